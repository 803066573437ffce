"""Attention of few queries to keys and values in pages: each position that is attended to is read once.

The positions of a sequence are divided into splits, so that few sequences keep all of a device busy. The
maximum of the scores, the sum of the weights and the weighted sum of the values are updated as positions
come, and those of splits are combined at the end. Heads of queries that share keys are computed together.

A step on a GPU takes the last position of each sequence from its operands rather than from pages, and writes
that to its page: no other workgroup reads it there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.graph.paged_attention import MOST_QUERIES
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.dialects import dialect_of
from penstock.kernels.ir.expressions import HALF_PRECISION, Const, Expr, Type, Var
from penstock.kernels.source import KernelSource, item_size
from penstock.kernels.templates.launches import Launch, Lowering, Tasks, is_cpu
from penstock.kernels.templates.paged_operands import LOWEST, Operands, operands_of
from penstock.kernels.templates.paged_prompts import prompt_attention

_MOST_HEADS = 8  # of queries that are computed together
_FEW_HEADS = 4  # of which a thread of a GPU can have several positions at once
_ITEMS = 8  # of a position, that a thread of a GPU has
_THREADS = 128  # of a workgroup of a GPU
_MORE_THREADS = 256  # where they exchange values without local memory
_RESIDENT = 512  # threads for each compute unit of a GPU
_LEAST = 64  # positions of a split of a GPU
_CPU_LEAST = 512  # of a CPU
_AT_ONCE = 32  # splits that are read at a time
_VECTOR = 8  # items of a vector of a CPU
_TILE = 64  # positions that a thread of a CPU has the scores of


@dataclass(frozen=True)
class Sizes(Operands):
    """The sizes of the operands, and how the work is divided."""

    together: int  # heads of queries
    splits: int

    @property
    def units(self) -> int:
        """How many groups of heads there are, of all queries."""
        return self.rows * self.length * self.heads // self.together

    @property
    def scratch(self) -> tuple[int, ...]:
        """The bytes of the results of splits, and of their maxima and sums."""
        results = self.units * self.together * self.splits * item_size(self.type)
        return (results * self.size, results * 2) if self.splits > 1 else ()


def paged_attention(node: Node, capabilities: Capabilities) -> Lowering:
    """The kernel of all splits, and the kernel that combines them if there are several."""
    query, pages, table, _ = node.inputs
    if query.shape[1] > MOST_QUERIES:
        return prompt_attention(node, capabilities)
    sizes = sizes_of(query, pages, table, node.attributes, capabilities)
    build = _on_cpu if is_cpu(capabilities) else _on_gpu
    inputs = (1, 2, 3, 4)
    if sizes.splits == 1:
        return Lowering((Launch(build(sizes, capabilities), (0, *inputs)),))
    splits = Launch(build(sizes, capabilities), (5, 6, *inputs))
    combine = Launch(combining(sizes, capabilities), (0, 5, 6), operations=0)
    return Lowering((splits, combine), sizes.scratch)


def sizes_of(
    query: Node, pages: Node, table: Node, attributes: Mapping[str, Any], capabilities: Capabilities
) -> Sizes:
    """The sizes of a node with these inputs and attributes."""
    given = operands_of(query, pages, table, attributes)
    groups, reach = given.groups, given.width * given.page
    together = max(heads for heads in range(1, min(groups, _MOST_HEADS) + 1) if groups % heads == 0)
    seen = min(reach, given.window or reach)
    units = given.rows * given.length * given.heads // together
    if is_cpu(capabilities):
        splits, least = -(-capabilities.compute_units // units), _CPU_LEAST
    else:  # all workgroups run at once
        groups = _RESIDENT // _threads(given.size, together, capabilities)
        splits, least = capabilities.compute_units * groups // units, _LEAST
    return Sizes(**vars(given), together=together, splits=max(min(splits, seen // least), 1))


def _threads(size: int, together: int, capabilities: Capabilities) -> int:
    """The threads of a workgroup of a GPU."""
    more = dialect_of(capabilities).shuffles and together <= _FEW_HEADS
    wanted = max(_MORE_THREADS if more else _THREADS, _lanes(size))
    return min(wanted, capabilities.max_group_size)


def _lanes(size: int) -> int:
    """How many threads of a GPU share a position."""
    return 1 << (size // math.gcd(size, _ITEMS) - 1).bit_length()


class Unit:
    """Which queries and positions a task has; names that both kinds of kernel use."""

    def __init__(self, k: KernelBuilder, sizes: Sizes, task: Expr, table: Memory) -> None:
        self._k, self._sizes, self._table = k, sizes, table
        self.split = k.let("split", task % sizes.splits)
        self.number = unit = k.let("unit", task // sizes.splits)
        units_of_query = sizes.heads // sizes.together
        self.query = k.let("query", unit // units_of_query)  # of all rows
        self.row = k.let("row", self.query // sizes.length)
        self.head = k.let("head", unit % units_of_query * sizes.together)  # the first
        self.key_head = k.let("key_head", self.head // (sizes.heads // sizes.key_heads))

    def positions(self, last: Expr) -> tuple[Var, Var]:
        """The positions of the split, given the last that the query attends to: from, and up to."""
        k, sizes = self._k, self._sizes
        stop = k.let("all_stop", last + 1)
        start = k.let("all_start", k.call("maximum", stop - sizes.window, 0) if sizes.window else 0)
        share = k.let("share", (stop - start + sizes.splits - 1) // sizes.splits)
        first = k.let("first", start + self.split * share)
        return first, k.let("stop", k.call("minimum", first + share, stop))

    def page(self, position: Expr) -> Expr:
        """The page of a position."""
        sizes = self._sizes
        at = self.row * sizes.width + position // sizes.page
        return self._k.call("maximum", self._k.load_index(self._table, at, sizes.pages), 0)

    def place_in(self, page: Expr, position: Expr) -> Expr:
        """Where the keys of a position begin, given its page."""
        sizes = self._sizes
        row = (page * sizes.key_heads + self.key_head) * sizes.page + position % sizes.page
        return row * sizes.size

    def place(self, position: Expr) -> Expr:
        """Where the keys of a position begin."""
        return self.place_in(self._k.let(self._k.fresh("page"), self.page(position)), position)

    @property
    def values(self) -> int:
        """How far after its keys the values of a position are."""
        sizes = self._sizes
        return sizes.pages * sizes.key_heads * sizes.page * sizes.size

    def head_row(self, number: Expr | int) -> Expr:
        """Which row of queries one of the heads is."""
        return self.query * self._sizes.heads + self.head + number

    def score(self, product: Expr) -> Expr:
        """The score of a product of a query and a key."""
        k, sizes = self._k, self._sizes
        score = product * sizes.scale
        return k.call("tanh", score / sizes.softcap) * sizes.softcap if sizes.softcap else score


def _kernel(name: str, sizes: Sizes, capabilities: Capabilities) -> KernelBuilder:
    outputs = [sizes.type] * 2 if sizes.splits > 1 else [sizes.dtype]
    return KernelBuilder(name, capabilities, outputs, [sizes.dtype, sizes.dtype, "int32", "int32"])


# GPUs


class Step(Protocol):
    """The operands of a step, which put the last position of each row into its pages."""

    def begin(self, k: KernelBuilder, sizes: Sizes, unit: Unit, threads: int, padded: int) -> None:
        """Have queries, keys and values in local memory, in rows of so many items."""

    def query(self, k: KernelBuilder, head: int, column: Expr, width: int) -> Var:
        """Items of a query."""

    def puts(self, k: KernelBuilder, unit: Unit) -> Expr:
        """Whether the row of a workgroup puts its position, 1 or 0."""

    def pair(self, k: KernelBuilder, column: Expr, width: int) -> tuple[Var, Var]:
        """Items of the key and the value that are put."""

    def put(self, k: KernelBuilder, unit: Unit, last: Expr, condition: Expr) -> None:
        """Put them, under a condition."""

    def finish(self, k: KernelBuilder, unit: Unit) -> None:
        """What follows when the results of a split are stored."""


def _on_gpu(sizes: Sizes, capabilities: Capabilities) -> KernelSource:
    k = _kernel("attend_to_pages", sizes, capabilities)
    return on_gpu(k, sizes, capabilities, k.inputs[1:], None)


def on_gpu(
    k: KernelBuilder, sizes: Sizes, capabilities: Capabilities, memories: Sequence[Memory], step: Step | None
) -> KernelSource:
    """A workgroup has a split of a group of heads; neighbouring threads share a position.

    Each set of them has positions of its own, and all results are combined at the end. `memories` are those
    of pages, table and positions.
    """
    pages, table, positions = memories
    width, lanes = math.gcd(sizes.size, _ITEMS), _lanes(sizes.size)
    threads = _threads(sizes.size, sizes.together, capabilities)
    apart = threads // lanes
    reach = sizes.width * sizes.page
    most = 4 if sizes.together <= _FEW_HEADS else 2
    share = min(reach, sizes.window or reach) // sizes.splits
    at_once = max(min(most, share // apart), 1)  # positions of a thread
    joined = threads * (width + 1) * item_size(sizes.type)  # bytes of a head
    folded = 0 if dialect_of(capabilities).shuffles else threads * item_size(sizes.type)
    room = capabilities.local_bytes - ((sizes.together + 2) * lanes * width + 4) * item_size(sizes.type)
    while at_once > 1 and sizes.together * (at_once + 1) * folded + joined > room:
        at_once //= 2
    heads = (room - sizes.together * (at_once + 1) * folded) // joined
    unit = Unit(k, sizes, k.group(), table)
    last, puts = _known(k, sizes, unit, positions, step, dialect_of(capabilities).shuffles)
    start, stop = unit.positions(last)
    slot = k.let("slot", k.thread // lanes)
    column = k.let("column", k.thread % lanes * width)
    inside = column < sizes.size if lanes * width > sizes.size else None
    stored = stop
    if puts is not None:
        new = k.let("put_here", k.select(stop.eq(last + 1) & (start <= last), puts, 0))
        stored = k.let("stored", stop - new)

    def clipped(base: Expr, number: int) -> Expr:
        position = k.call("minimum", base + (slot + number * apart), stored - 1)
        return k.call("maximum", position, 0)

    def vector(name: str, memory: Memory, index: Expr) -> Var:
        if width == 1:
            return k.let(name, k.load(memory, index, inside))
        return k.let(name, k.load_vector(memory, index, width, width, inside))

    # The pages of the next positions are looked up before keys are waited for.
    ahead = [k.variable(f"page{number}", unit.page(clipped(start, number))) for number in range(at_once)]
    if step is None:
        queries = [
            vector(f"query{head}", k.inputs[0], unit.head_row(head) * sizes.size + column)
            for head in range(sizes.together)
        ]
    else:
        step.begin(k, sizes, unit, threads, lanes * width)
        queries = [step.query(k, head, column, width) for head in range(sizes.together)]
    running = [_Running(k, sizes, head, width) for head in range(sizes.together)]
    with k.loop("base", start, stored, apart * at_once) as base:
        keys, values, masks = [], [], []
        for number, page in enumerate(ahead):
            masks.append(k.let(f"seen{number}", base + (slot + number * apart) < stored))
            position = k.let(f"position{number}", clipped(base, number))
            place = k.let(f"place{number}", unit.place_in(page, position) + column)
            keys.append(vector(f"key{number}", pages, place))
            values.append(vector(f"value{number}", pages, place + unit.values))
        for number, page in enumerate(ahead):
            k.assign(page, unit.page(clipped(base + apart * at_once, number)))
        _take(k, sizes, unit, running, queries, (keys, values, masks), (threads, lanes, width))
    if step is not None:
        key, value = step.pair(k, column, width)
        seen = k.let("is_new", new.eq(1) & slot.eq(0))
        _take(k, sizes, unit, running, queries, ([key], [value], [seen]), (threads, lanes, width))
        step.put(k, unit, last, new.eq(1))
    _join_slots(k, sizes, unit, running, (threads, lanes, width), max(min(heads, sizes.together), 1))
    if step is not None:
        step.finish(k, unit)
    quick = sizes.dtype in HALF_PRECISION
    resident = max(_RESIDENT // threads, 1) if threads > _THREADS else 1
    return k.source((sizes.units * sizes.splits,), (threads,), resident, quick)


def _known(
    k: KernelBuilder, sizes: Sizes, unit: Unit, positions: Memory, step: Step | None, shuffles: bool
) -> tuple[Expr, Expr | None]:
    """The last position that a workgroup attends to, and whether a step puts it, 1 or 0.

    Where threads exchange values by barriers, these have to be the same for all of them by rule.
    """
    if shuffles:
        last = k.let("last", k.load(positions, unit.query))
        return last, None if step is None else k.let("puts", step.puts(k, unit))
    known = k.shared("known", "int32", 2)
    with k.when(k.thread.eq(0)):
        k.store(known, 0, k.load(positions, unit.query))
        k.store(known, 1, 0 if step is None else step.puts(k, unit))
    last = k.uniform("last", known)
    return last, None if step is None else k.uniform("puts", known, 1)


def _take(
    k: KernelBuilder,
    sizes: Sizes,
    unit: Unit,
    running: Sequence[_Running],
    queries: Sequence[Var],
    positions: tuple[Sequence[Var], Sequence[Var], Sequence[Expr]],
    shape: tuple[int, int, int],
) -> None:
    """Take the keys and values of further positions, as far as they are seen."""
    keys, values, masks = positions
    threads, lanes, width = shape
    for head, query in enumerate(queries):
        scores = []
        for number, key in enumerate(keys):
            product = k.variable(k.fresh(f"product{head}"), 0.0, sizes.type)
            for lane in range(width):
                k.multiply_add(product, k.lane(query, lane), k.lane(key, lane))
            total = k.block_reduce(k.fresh(f"total{head}"), "sum", product, threads, lanes)
            seen = k.select(masks[number], unit.score(total), LOWEST)
            scores.append(k.let(k.fresh(f"score{head}"), seen))
        running[head].take(scores, masks, values)


class _Running:
    """What is known of the positions of a thread so far, for a head."""

    def __init__(self, k: KernelBuilder, sizes: Sizes, head: int, width: int) -> None:
        self._k, self._head = k, head
        zero = Const(0.0, Type(sizes.type))
        self.most = k.variable(f"most{head}", Const(LOWEST, Type(sizes.type)))
        self.sum = k.variable(f"sum{head}", zero)
        self.result = k.variable(f"result{head}", k.broadcast(zero, width) if width > 1 else zero)

    def take(self, scores: Sequence[Expr], masks: Sequence[Expr], values: Sequence[Expr]) -> None:
        """Take further positions, of which those count that are seen."""
        k, head = self._k, self._head
        most: Expr = self.most
        for score in scores:
            most = k.call("maximum", most, score)
        most = k.let(k.fresh(f"new_most{head}"), most)
        self.rescale(k.let(k.fresh(f"factor{head}"), k.call("exp", self.most - most)))
        k.assign(self.most, most)
        for score, seen, value in zip(scores, masks, values, strict=True):
            weight = k.select(seen, k.call("exp", score - most), 0.0)
            weight = k.let(k.fresh(f"weight{head}"), weight)
            k.assign(self.sum, self.sum + weight)
            k.assign(self.result, k.call("add", self.result, weight * value))

    def rescale(self, factor: Expr) -> None:
        """Multiply the sums."""
        k = self._k
        k.assign(self.sum, self.sum * factor)
        k.assign(self.result, factor * self.result)


def _join_slots(
    k: KernelBuilder,
    sizes: Sizes,
    unit: Unit,
    running: Sequence[_Running],
    shape: tuple[int, int, int],
    together: int,
) -> None:
    """Combine what the threads of a workgroup have, and store it; so many heads at a time."""
    threads, lanes, width = shape
    slots = threads // lanes
    padded = width + 1  # threads that store at once use banks of their own
    values = k.shared("merged", sizes.type, together * threads * padded)
    sums = k.shared("slot_sums", sizes.type, together * slots * 2)
    for first in range(0, sizes.together, together):
        heads = range(first, min(first + together, sizes.together))
        if first:
            k.barrier()  # the heads before were read
        for number, head in enumerate(heads):
            for lane in range(width):
                place = (number * threads + k.thread) * padded + lane
                k.store(values, place, k.lane(running[head].result, lane))
            with k.when((k.thread % lanes).eq(0)):
                place = k.let(f"place_of_slot{head}", (k.thread // lanes + number * slots) * 2)
                k.store(sums, place, running[head].most)
                k.store(sums, place + 1, running[head].sum)
        k.barrier()
        with k.loop(f"item{first}", k.thread, len(heads) * sizes.size, threads) as item:
            own = k.let(f"own_head{first}", item // sizes.size)
            column = k.let(f"own_column{first}", item % sizes.size)
            place_of_item = column // width * padded + column % width
            parts = _Parts(slots, own * slots, lanes * padded, place_of_item)
            _store(k, sizes, unit, own + first, column, _weighted(k, sizes, parts, values, sums))


def _store(
    k: KernelBuilder, sizes: Sizes, unit: Unit, head: Expr, column: Expr, known: tuple[Expr, Expr, Expr]
) -> None:
    """Write an item of a result, or of a split's, given the maximum, the sum of the weights, and the item."""
    most, total, result = known
    row = k.let(k.fresh("head_row"), unit.head_row(head))
    if sizes.splits == 1:
        k.store(k.outputs[0], row * sizes.size + column, result / total)
        return
    place = k.let(k.fresh("place_in_split"), row * sizes.splits + unit.split)
    k.store(k.outputs[0], place * sizes.size + column, result)
    with k.when(column.eq(0)):
        k.store(k.outputs[1], place * 2, most)
        k.store(k.outputs[1], place * 2 + 1, total)


# CPUs


def _on_cpu(sizes: Sizes, capabilities: Capabilities) -> KernelSource:
    """A task has a split of a group of heads, in tiles of positions."""
    width = 1 if sizes.size % _VECTOR else _VECTOR
    k = _kernel("attend_to_pages", sizes, capabilities)
    tasks = Tasks(sizes.units * sizes.splits, capabilities)
    scores = k.shared("scores", sizes.type, sizes.together * _TILE)
    places = k.shared("places", "int32", _TILE)
    results = k.shared("results", sizes.type, sizes.together * sizes.size)
    heads = range(sizes.together)
    with tasks.each(k) as task:
        unit = Unit(k, sizes, task, k.inputs[2])
        start, stop = unit.positions(k.let("last", k.load(k.inputs[3], unit.query)))
        most = [k.variable(f"most{head}", LOWEST, sizes.type) for head in heads]
        sums = [k.variable(f"sum{head}", 0.0, sizes.type) for head in heads]
        with k.loop("cleared", 0, sizes.together * sizes.size) as item:
            k.store(results, item, 0.0)
        with k.loop("tile", start, stop, _TILE) as tile:
            count = k.let("count", k.call("minimum", stop - tile, _TILE))
            with k.loop("at", 0, count) as at:
                place = k.let("place", unit.place(k.let("position", tile + at)))
                k.store(places, at, place)
                for head in heads:
                    product = _dot(k, sizes, unit.head_row(head) * sizes.size, place, width, head)
                    k.store(scores, at + head * _TILE, unit.score(product))
            for head in heads:
                _weigh(k, sizes, head, (scores, results), count, (most[head], sums[head]))
            for column in range(0, sizes.size, width):
                _add_values(k, sizes, unit, column, width, (scores, places, results), count)
        for head in heads:
            with k.loop(f"item{head}", 0, sizes.size) as item:
                result = k.load(results, item + head * sizes.size)
                _store(k, sizes, unit, Const(head), item, (most[head], sums[head], result))
    return k.source(tasks.grid, tasks.group)


def _vector(k: KernelBuilder, memory: Memory, index: Expr, width: int) -> Expr:
    return k.load_vector(memory, index, width) if width > 1 else k.load(memory, index)


def _dot(k: KernelBuilder, sizes: Sizes, query: Expr, key: Expr, width: int, head: int) -> Expr:
    """The product of a query and a key, whose first items are given."""
    zero = Const(0.0, Type(sizes.type))
    total = k.variable(f"products{head}", k.broadcast(zero, width) if width > 1 else zero)
    for column in range(0, sizes.size, width):
        left = k.let(f"left{head}_{column}", _vector(k, k.inputs[0], query + column, width))
        right = k.let(f"right{head}_{column}", _vector(k, k.inputs[1], key + column, width))
        k.multiply_add(total, left, right)
    return k.block_reduce(f"product{head}", "sum", total, 1, 1)


def _weigh(
    k: KernelBuilder,
    sizes: Sizes,
    head: int,
    arrays: tuple[Memory, Memory],
    count: Expr,
    known: tuple[Var, Var],
) -> None:
    """Replace the scores of a tile by weights, and rescale what was summed before."""
    (scores, results), (most, total) = arrays, known
    before = k.let(f"before{head}", most)
    with k.loop(f"at_most{head}", 0, count) as at:
        k.assign(most, k.call("maximum", most, k.load(scores, at + head * _TILE)))
    factor = k.let(f"factor{head}", k.call("exp", before - most))
    k.assign(total, total * factor)
    with k.loop(f"at_weight{head}", 0, count) as at:
        weight = k.let(f"weight{head}", k.call("exp", k.load(scores, at + head * _TILE) - most))
        k.store(scores, at + head * _TILE, weight)
        k.assign(total, total + weight)
    with k.loop(f"scaled{head}", 0, sizes.size) as item:
        place = item + head * sizes.size
        k.store(results, place, k.load(results, place) * factor)


def _add_values(
    k: KernelBuilder,
    sizes: Sizes,
    unit: Unit,
    column: int,
    width: int,
    arrays: tuple[Memory, Memory, Memory],
    count: Expr,
) -> None:
    """Add some columns of the weighted values of a tile to the results of all heads."""
    scores, places, results = arrays
    heads = range(sizes.together)
    totals = [
        k.variable(f"total{head}_{column}", _vector(k, results, Const(head * sizes.size + column), width))
        for head in heads
    ]
    with k.loop(f"at_value{column}", 0, count) as at:
        place = k.load(places, at) + (unit.values + column)
        value = k.let(f"value{column}", _vector(k, k.inputs[1], place, width))
        for head, total in zip(heads, totals, strict=True):
            weight = k.load(scores, at + head * _TILE)
            k.multiply_add(total, k.broadcast(weight, width) if width > 1 else weight, value)
    for head, total in zip(heads, totals, strict=True):
        k.store(results, Const(head * sizes.size + column), total)


# Splits


def combining(sizes: Sizes, capabilities: Capabilities, scalars: Sequence[str] = ()) -> KernelSource:
    """A task for each item of the result; `scalars` are those of the group."""
    k = KernelBuilder("combine_splits", capabilities, [sizes.dtype], [sizes.type] * 2, scalars)
    tasks = Tasks(sizes.units * sizes.together * sizes.size, capabilities)
    values, sums = k.inputs
    with tasks.each(k) as task:
        k.store(k.outputs[0], task, combined(k, sizes, task, values, sums))
    return k.source(tasks.grid, tasks.group)


def combined(k: KernelBuilder, sizes: Sizes, task: Expr, values: Memory, sums: Memory) -> Expr:
    """An item of the result, by the results, maxima and sums of all splits."""
    first = k.let("first_split", task // sizes.size * sizes.splits)
    parts = _Parts(sizes.splits, first, sizes.size, task % sizes.size)
    _, total, result = _weighted(k, sizes, parts, values, sums)
    return result / total


@dataclass(frozen=True)
class _Parts:
    """Parts of the positions: how many, the first, how long the rows of their results are, and an item."""

    count: int
    first: Expr
    length: int
    item: Expr


def _weighted(
    k: KernelBuilder, sizes: Sizes, parts: _Parts, values: Memory, sums: Memory
) -> tuple[Var, Var, Var]:
    """The maximum of the scores of all parts, the sum of their weights, and an item of the weighted sum."""
    most = k.variable(k.fresh("most"), LOWEST, sizes.type)
    at_once = min(parts.count, _AT_ONCE)
    with k.loop(k.fresh("most_of"), 0, parts.count, unrolled=at_once) as part:
        k.assign(most, k.call("maximum", most, k.load(sums, (parts.first + part) * 2)))
    total = k.variable(k.fresh("total"), 0.0, sizes.type)
    result = k.variable(k.fresh("result"), 0.0, sizes.type)
    with k.loop(k.fresh("of_part"), 0, parts.count, unrolled=at_once) as part:
        place = k.let("part", parts.first + part)
        factor = k.let("factor", k.call("exp", k.load(sums, place * 2) - most))
        k.assign(total, total + factor * k.load(sums, place * 2 + 1))
        k.assign(result, result + factor * k.load(values, place * parts.length + parts.item))
    return most, total, result
