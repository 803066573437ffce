"""Attention of few queries to pages on tensor cores: a warp has 16 positions at a time.

Heads of queries that share keys are the rows of a tile; the other half of its rows stays empty. A product of
tiles adds over items of a head, or over positions, and any order of them does, as long as both operands
agree: so each thread reads neighbouring items, and nothing is exchanged. Weights are rounded to the dtype of
the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from penstock.drivers.driver import Capabilities
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.ir.expressions import Const, Expr, Type, Var
from penstock.kernels.source import KernelSource
from penstock.kernels.templates.paged_operands import LOWEST
from penstock.kernels.templates.paged_units import (
    MORE_THREADS,
    RESIDENT,
    ROUND,
    TILE,
    Parts,
    Sizes,
    Step,
    Unit,
    known,
    store_item,
    store_part,
    stored_until,
    weighted,
)

_WARP = 32
_WARPS = MORE_THREADS // _WARP
_WORDS = 4  # that a thread reads at once, of two items each
_PAIRS = (0, 1, 8, 9)  # the positions of a tile whose values and scores a thread has, apart from its part
# The next positions are read before the present ones are taken where a thread has registers for both, which
# depends on the size of a head, and a split has so many rounds.
_AHEAD, _LONG = (64,), 2
_NONE = Const(0, Type("uint32"))  # two items of the empty rows


def by_tiles(
    k: KernelBuilder, sizes: Sizes, capabilities: Capabilities, memories: Sequence[Memory], step: Step | None
) -> KernelSource:
    """The kernel of a split of a group of heads; `memories` are those of pages, table and positions."""
    pages, table, positions = memories
    unit = Unit(k, sizes, k.group(), table)
    last, puts = known(k, sizes, unit, positions, step, True)
    begin, start, stop = unit.tiles_of_positions(last, TILE)
    new, stored = stored_until(k, last, puts, start, stop)
    warp = _Warp(k, sizes, unit, Memory(pages.name, "uint32"), (begin, stored))
    ahead = sizes.size in _AHEAD and sizes.share >= _LONG * ROUND[sizes.size]
    blocks = 1 if ahead else max(min(ROUND[sizes.size], sizes.share) // (_WARPS * TILE), 1)
    each = _WARPS * blocks * TILE
    pages_of_tiles = [k.variable(f"page{block}", warp.page(start, block, blocks)) for block in range(blocks)]

    def read(base: Expr) -> list[_Block]:
        tiles = [warp.read(base, block, blocks, page) for block, page in enumerate(pages_of_tiles)]
        for block, page in enumerate(pages_of_tiles):  # of the next positions, before keys are waited for
            k.assign(page, warp.page(base + each, block, blocks))
        return tiles

    # The first positions are on their way while earlier launches still compute the queries.
    first = read(start)
    if step is not None:
        step.wait(k)
        step.begin(k, sizes, unit, MORE_THREADS, sizes.size)
    warp.take_queries(step)
    positions_left = k.loop("base", start + each, stored, each)
    if ahead:
        held = [warp.held(tile) for tile in first]
        with positions_left as base:
            tiles = read(base)
            warp.take(held)
            warp.hold(held, tiles)
        warp.take(held)
    else:
        warp.take(first)
        with positions_left as base:
            warp.take(read(base))
    if step is not None:
        step.put(k, unit, last, new.eq(1))
    _join(k, sizes, unit, warp, step, new)
    if step is not None:
        step.finish(k, unit)
    cluster = sizes.splits if sizes.clustered else 1
    return k.source((sizes.units * sizes.splits,), (MORE_THREADS,), RESIDENT // MORE_THREADS, True, cluster)


class _Block:
    """What a thread read of a tile of positions."""

    def __init__(self) -> None:
        self.keys: list[list[Expr]] = []  # of both halves of the positions, in words
        self.values: list[list[Expr]] = []  # of four positions
        self.seen: list[Var] = []  # whether these are attended to

    @property
    def everything(self) -> list[Expr]:
        """All of it."""
        return [*chain(*self.keys, *self.values), *self.seen]


class _Warp:
    """What a warp knows of its positions so far."""

    def __init__(
        self, k: KernelBuilder, sizes: Sizes, unit: Unit, words: Memory, bounds: tuple[Expr, Expr]
    ) -> None:
        self._k, self._sizes, self._unit, self._words, self._bounds = k, sizes, unit, words, bounds
        self.number = k.let("warp", k.thread // _WARP)
        self.line = k.let("line", k.thread % _WARP // 4)  # a head, or a position, of 8
        self.part = k.let("part", k.thread % 4)
        zero = Const(0.0, Type("float32"))
        self.most = k.variable("most", Const(LOWEST, Type("float32")))
        self.sum = k.variable("sum", zero)
        self.results = [
            [k.variable(f"result{tile}_{item}", zero) for item in range(4)] for tile in range(sizes.size // 8)
        ]

    def _start(self, base: Expr, block: int, blocks: int) -> Expr:
        """The first position of a tile of the warp."""
        return base + (self.number * blocks + block) * TILE

    def page(self, base: Expr, block: int, blocks: int) -> Expr:
        """The page of a tile; that of the last position for tiles beyond."""
        k = self._k
        within = k.call("minimum", self._start(base, block, blocks), self._bounds[1] - 1)
        return self._unit.page(k.call("maximum", within, 0))

    def take_queries(self, step: Step | None) -> None:
        """Have the queries of a head in registers."""
        k, sizes, unit = self._k, self._sizes, self._unit
        head = k.let("own_query", k.call("minimum", self.line, sizes.together - 1))
        self._queries: list[Var] = []
        for pair in range(sizes.size // 8):
            column = self.part * (sizes.size // 4) + 2 * pair
            items = [
                k.load(k.inputs[0], unit.head_row(head) * sizes.size + (column + item))
                if step is None
                else step.item(k, "queries", head, column + item)
                for item in range(2)
            ]
            word: Expr = self._paired(items[0], items[1])
            if sizes.together < 8:
                word = k.select(self.line < sizes.together, word, _NONE)
            self._queries.append(k.let(f"query{pair}", word))

    def read(self, base: Expr, block: int, blocks: int, page: Expr) -> _Block:
        """Read the keys and values of a tile of positions."""
        k, sizes, result = self._k, self._sizes, _Block()
        start = k.let(f"start{block}", self._start(base, block, blocks))
        place = k.let(f"place{block}", self._unit.place_in(page, start))
        for half in range(2):
            row = place + (self.line + half * 8) * sizes.size + self.part * (sizes.size // 4)
            result.keys.append(self._read(f"key{block}_{half}", row, sizes.size // 8, None))
        begin, stored = self._bounds
        for number, offset in enumerate(_PAIRS):
            own = k.let(f"own{block}_{number}", self.part * 2 + offset)
            position = start + own
            seen = k.let(f"seen{block}_{number}", (position >= begin) & (position < stored))
            row = place + (own * sizes.size + self.line * (sizes.size // 8) + self._unit.values)
            # What was never written might be no number.
            result.values.append(self._read(f"value{block}_{number}", row, sizes.size // 16, seen))
            result.seen.append(seen)
        return result

    def _read(self, name: str, place: Expr, words: int, mask: Expr | None) -> list[Expr]:
        """Words of pages, from an item on."""
        k, result = self._k, list[Expr]()
        for first in range(0, words, _WORDS):
            load = k.load_vector(self._words, place + 2 * first, _WORDS, aligned=_WORDS, mask=mask)
            read = k.let(f"{name}_{first}", load)
            result += [k.lane(read, word) for word in range(_WORDS)]
        return result

    def held(self, block: _Block) -> _Block:
        """What was read of a tile, in variables."""
        k, result = self._k, _Block()
        result.keys = [[k.variable(k.fresh("held_key"), word) for word in words] for words in block.keys]
        result.values = [
            [k.variable(k.fresh("held_value"), word) for word in words] for words in block.values
        ]
        result.seen = [k.variable(k.fresh("held_seen"), seen) for seen in block.seen]
        return result

    def hold(self, held: Sequence[_Block], tiles: Sequence[_Block]) -> None:
        """Have other tiles in these variables."""
        for old, new in zip(held, tiles, strict=True):
            for variable, value in zip(old.everything, new.everything, strict=True):
                assert isinstance(variable, Var)
                self._k.assign(variable, value)

    def take(self, tiles: Sequence[_Block]) -> None:
        """Take the positions of tiles."""
        for tile in tiles:
            self._take(tile)

    def _take(self, block: _Block) -> None:
        k, dtype = self._k, self._sizes.dtype
        scores: list[Expr] = []
        for half, keys in enumerate(block.keys):
            totals = [k.variable(k.fresh("product"), 0.0, "float32") for _ in range(4)]
            for at in range(0, len(keys), 2):
                left = [self._queries[at], _NONE, self._queries[at + 1], _NONE]
                k.multiply_tiles(totals, left, keys[at : at + 2], dtype)
            for item in range(2):
                seen = block.seen[2 * half + item]
                score = k.select(seen, self._unit.score(totals[item]), LOWEST)
                scores.append(k.let(k.fresh("score"), score))
        most: Expr = self.most
        for score in scores:
            most = k.call("maximum", most, score)
        own = k.variable(k.fresh("own_most"), most)
        most = k.block_reduce(k.fresh("new_most"), "max", own, MORE_THREADS, 4)
        factor = k.let(k.fresh("factor"), k.call("exp", self.most - most))
        k.assign(self.most, most)
        k.assign(self.sum, self.sum * factor)
        weights: list[Expr] = []
        for score, seen in zip(scores, block.seen, strict=True):
            weight = k.let(k.fresh("weight"), k.select(seen, k.call("exp", score - most), 0.0))
            k.assign(self.sum, self.sum + weight)
            weights.append(weight)
        left = [self._paired(*weights[:2]), _NONE, self._paired(*weights[2:]), _NONE]
        left = [k.let(k.fresh("weights"), word) if word is not _NONE else word for word in left]
        for tile, result in enumerate(self.results):
            for item in range(2):
                k.assign(result[item], result[item] * factor)
            word, pack = tile // 2, "pack_high" if tile % 2 else "pack_low"
            rows = [values[word] for values in block.values]
            right = [k.call(pack, rows[pair], rows[pair + 1]) for pair in (0, 2)]
            k.multiply_tiles(result, left, right, dtype)

    def _paired(self, low: Expr, high: Expr) -> Expr:
        return self._k.call(f"paired_{self._sizes.dtype}", low, high, dtype="uint32")


def _join(k: KernelBuilder, sizes: Sizes, unit: Unit, warp: _Warp, step: Step | None, new: Expr) -> None:
    """Combine what warps have, the position that a step puts, and what a cluster has; and store it."""
    slots = _WARPS + (step is not None)
    values = k.shared("merged", "float32", sizes.together * slots * sizes.size)
    sums = k.shared("slot_sums", "float32", sizes.together * slots * 2)
    total = k.block_reduce("warp_sum", "sum", warp.sum, MORE_THREADS, 4)
    with k.when(warp.line < sizes.together):
        slot = k.let("slot", warp.line * slots + warp.number)
        for tile, result in enumerate(warp.results):
            for number in range(2):
                place = (warp.part * 2 + number) * (sizes.size // 8) + tile
                k.store(values, slot * sizes.size + place, result[number])
        with k.when(warp.part.eq(0)):
            k.store(sums, slot * 2, warp.most)
            k.store(sums, slot * 2 + 1, total)
    if step is not None:
        _take_new(k, sizes, unit, warp, step, new, values, sums)
    k.barrier()
    part_sums = k.shared("part_sums", "float32", sizes.together * slots * 2) if sizes.clustered else None
    with k.loop("item", k.thread, sizes.together * sizes.size, MORE_THREADS) as item:
        head, column = k.let("own_head", item // sizes.size), k.let("own_column", item % sizes.size)
        parts = Parts(slots, head * slots, sizes.size, column)
        whole = weighted(k, sizes, parts, values, sums)
        if part_sums is None:
            store_item(k, sizes, unit, head, column, whole)
        else:  # the items in place of those of the first slot, which no other thread reads
            store_part(k, sizes, head * slots, column, whole, values, part_sums)
    if part_sums is not None:
        _combine(k, sizes, unit, slots, values, part_sums)


def _combine(k: KernelBuilder, sizes: Sizes, unit: Unit, slots: int, values: Memory, sums: Memory) -> None:
    """Each workgroup of a cluster combines a share of the items of all, and stores them."""
    splits, share = sizes.splits, sizes.together * sizes.size // sizes.splits
    k.cluster_barrier()
    first = k.let("first_combined", unit.split * share)
    with k.loop("combined", first + k.thread, first + share, MORE_THREADS) as item:
        head, column = k.let("part_head", item // sizes.size), k.let("part_column", item % sizes.size)
        place = k.let("part_place", head * slots)
        # In registers, so that all reads are on their way before the first is waited for.
        own_values = k.registers("own_values", "float32", splits)
        own_sums = k.registers("own_sums", "float32", splits * 2)
        with k.loop("rank", 0, splits, unrolled=splits) as rank:
            for number in range(2):
                read = k.cluster_load(f"sum{number}", sums, place * 2 + number, rank)
                k.store(own_sums, rank * 2 + number, read)
            value = k.cluster_load("value", values, place * sizes.size + column, rank)
            k.store(own_values, rank, value)
        parts = Parts(splits, Const(0), 1, Const(0))
        store_item(k, sizes, unit, head, column, weighted(k, sizes, parts, own_values, own_sums))
    k.cluster_barrier()  # no workgroup may end before the others have read its part


def _take_new(
    k: KernelBuilder,
    sizes: Sizes,
    unit: Unit,
    warp: _Warp,
    step: Step,
    new: Expr,
    values: Memory,
    sums: Memory,
) -> None:
    """The position that a step puts is as good as a warp's; each head's score is computed by a warp."""
    lane, slots = k.let("lane", k.thread % _WARP), _WARPS + 1
    head = k.let("head_of_warp", k.call("minimum", warp.number, sizes.together - 1))
    product = k.variable("product_of_new", 0.0, "float32")
    for first in range(0, sizes.size, _WARP):
        query = step.item(k, "queries", head, lane + first)
        k.multiply_add(product, query, step.item(k, "key", Const(0), lane + first))
    score = k.block_reduce("score_of_new", "sum", product, MORE_THREADS, _WARP)
    with k.when(lane.eq(0) & (warp.number < sizes.together)):
        slot = k.let("slot_of_new", head * slots + _WARPS)
        k.store(sums, slot * 2, k.select(new.eq(1), unit.score(score), LOWEST))
        k.store(sums, slot * 2 + 1, k.select(new.eq(1), 1.0, 0.0))
    with k.loop("new_item", k.thread, sizes.together * sizes.size, MORE_THREADS) as item:
        place = (item // sizes.size * slots + _WARPS) * sizes.size + item % sizes.size
        k.store(values, place, step.item(k, "value", Const(0), item % sizes.size))
