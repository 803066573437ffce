"""Attention of many queries of a sequence to keys and values in pages; scores are kept for a tile at a time.

A line is a query of one head. Lines that share a head of keys are computed together, and read each tile of
positions once. The maximum of the scores, the sum of the weights and the weighted sum of the values are
updated as tiles come.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.ir.expressions import Const, Expr, Type, Var
from penstock.kernels.source import KernelSource, item_size
from penstock.kernels.templates.launches import Launch, Lowering, Tasks, is_cpu
from penstock.kernels.templates.paged_operands import LOWEST, Operands, operands_of

_LEAST_VECTOR = 8  # items of a vector of a CPU
_LINES, _TILE = 32, 64  # lines of a task of a CPU, and positions of a tile
_AT_ONCE = 4  # lines of a CPU, and positions of a GPU, whose sums are in registers together
_THREADS = 64  # of a workgroup of a GPU
_COLUMNS = 64  # of a head that a thread of a GPU has, at most
_TILE_BYTES = 12 << 10  # of keys and values that a workgroup of a GPU has in local memory


class _Sizes(Operands):
    """The sizes of the operands."""

    @property
    def lines(self) -> int:
        """Lines of a head of keys, of a row."""
        return self.length * self.groups


def prompt_attention(node: Node, capabilities: Capabilities) -> Lowering:
    """The kernel of a node with many queries."""
    query, pages, table, _ = node.inputs
    sizes = _Sizes(**vars(operands_of(query, pages, table, node.attributes)))
    build = _on_cpu if is_cpu(capabilities) else _on_gpu
    return Lowering((Launch(build(sizes, capabilities), (0, 1, 2, 3, 4)),))


class _Block:
    """Some lines of a row and a head of keys."""

    def __init__(self, k: KernelBuilder, sizes: _Sizes, number: Expr, parts: int, lines: int) -> None:
        self._k, self._sizes = k, sizes
        pair = k.let("pair", number // parts)
        self.first = k.let("first_line", number % parts * lines)
        self.row = k.let("row", pair // sizes.key_heads)
        self.key_head = k.let("key_head", pair % sizes.key_heads)

    def query(self, line: Expr) -> Var:
        """Which query of all rows a line has; what comes after the last line repeats it."""
        k, sizes = self._k, self._sizes
        own = k.let(k.fresh("own_line"), k.call("minimum", line, sizes.lines - 1))
        self._own = own
        return k.let(k.fresh("query"), self.row * sizes.length + own // sizes.groups)

    def place_of_query(self, query: Expr) -> Expr:
        """Where the items of the line begin that `query` was last asked for."""
        sizes = self._sizes
        head = self.key_head * sizes.groups + self._own % sizes.groups
        return (query * sizes.heads + head) * sizes.size

    def place(self, position: Expr) -> Expr:
        """Where the keys of a position begin."""
        k, sizes = self._k, self._sizes
        at = self.row * sizes.width + position // sizes.page
        page = k.let(k.fresh("page"), k.load_index(k.inputs[2], at, sizes.pages))
        head = k.call("maximum", page, 0) * sizes.key_heads + self.key_head
        return (head * sizes.page + position % sizes.page) * sizes.size

    @property
    def values(self) -> int:
        """How far after its keys the values of a position are."""
        sizes = self._sizes
        return sizes.pages * sizes.key_heads * sizes.page * sizes.size

    def score(self, product: Expr) -> Expr:
        """The score of a product of a query and a key, or a vector of them."""
        k, sizes, width = self._k, self._sizes, product.type.width

        def constant(value: float) -> Expr:
            single = Const(value, Type(sizes.type))
            return k.broadcast(single, width) if width > 1 else single

        score = k.call("multiply", product, constant(sizes.scale))
        if not sizes.softcap:
            return score
        capped = k.call("tanh", k.call("divide", score, constant(sizes.softcap)))
        return k.call("multiply", capped, constant(sizes.softcap))

    def seen(self, position: Expr, last: Expr) -> Expr:
        """Whether a query that attends up to `last` attends to a position."""
        window = self._sizes.window
        seen = position <= last
        return self._k.call("logical_and", seen, position > last - window) if window else seen


def _kernel(sizes: _Sizes, capabilities: Capabilities) -> KernelBuilder:
    given = [sizes.dtype, sizes.dtype, "int32", "int32"]
    return KernelBuilder("attend_from_prompts", capabilities, [sizes.dtype], given)


# CPUs


def _on_cpu(sizes: _Sizes, capabilities: Capabilities) -> KernelSource:
    """A task has a block of lines. A tile of keys is transposed, so that vectors have several positions."""
    lines = min(_LINES, -(-sizes.lines // _AT_ONCE) * _AT_ONCE)
    parts = -(-sizes.lines // lines)
    k = _kernel(sizes, capabilities)
    tasks = Tasks(sizes.rows * sizes.key_heads * parts, capabilities)
    with tasks.each(k) as task:
        _Tiles(k, sizes, _Block(k, sizes, task, parts, lines), lines, capabilities).attend()
    return k.source(tasks.grid, tasks.group)


class _Tiles:
    """A block of lines on a CPU, and its arrays."""

    def __init__(
        self, k: KernelBuilder, sizes: _Sizes, block: _Block, lines: int, capabilities: Capabilities
    ) -> None:
        self._k, self._sizes, self._block, self._lines = k, sizes, block, lines
        self._lanes, self._width = lanes_of(sizes.size, sizes.type, capabilities)
        items = lines * sizes.size
        self._queries, self._results = (k.shared(name, sizes.type, items) for name in ("queries", "results"))
        self._keys = k.shared("keys", sizes.type, sizes.size * _TILE, width=self._lanes)
        self._scores = k.shared("scores", sizes.type, lines * _TILE, width=self._lanes)
        self._most, self._sums = (k.shared(name, sizes.type, lines) for name in ("most", "sums"))
        self._lasts, self._begins = (k.shared(name, "int32", lines) for name in ("lasts", "begins"))
        self._places = k.shared("places", "int32", _TILE)

    def attend(self) -> None:
        """All tiles of positions that a line attends to."""
        k, sizes = self._k, self._sizes
        start, stop, least = self._begin()
        with k.loop("tile", start, stop, _TILE) as tile:
            self._turn_keys(tile, stop)
            self._multiply_keys()
            hides = tile + (_TILE - 1) > least
            with k.when(hides if not sizes.window else Const(1) > 0):
                self._hide(tile)
            self._weigh()
            self._add_values(k.let("count", k.call("minimum", stop - tile, _TILE)))
        with k.loop("ended", 0, self._lines) as line:
            begin = k.let("begin", k.load(self._begins, line))
            total = k.let("total", k.load(self._sums, line))
            with k.loop("item", 0, sizes.size) as item:
                k.store(k.outputs[0], begin + item, k.load(self._results, line * sizes.size + item) / total)

    def _begin(self) -> tuple[Expr, Expr, Expr]:
        """Take the queries: the first position, that after the last, and the least of the last positions."""
        k, sizes, block = self._k, self._sizes, self._block
        reach = sizes.width * sizes.page
        start, stop, least = (
            k.variable(name, value) for name, value in (("start", reach), ("stop", 0), ("least", reach))
        )
        with k.loop("begun", 0, self._lines) as line:
            query = block.query(block.first + line)
            last = k.let("last", k.load(k.inputs[3], query))
            begin = k.let("begin", block.place_of_query(query))
            k.store(self._lasts, line, last)
            k.store(self._begins, line, begin)
            k.store(self._most, line, LOWEST)
            k.store(self._sums, line, 0.0)
            k.assign(stop, k.call("maximum", stop, last + 1))
            k.assign(least, k.call("minimum", least, last))
            with k.loop("item", 0, sizes.size) as item:
                k.store(self._queries, line * sizes.size + item, k.load(k.inputs[0], begin + item))
                k.store(self._results, line * sizes.size + item, 0.0)
        first = k.call("maximum", least - (sizes.window - 1), 0) if sizes.window else 0
        k.assign(start, first)
        return start, stop, least

    def _turn_keys(self, tile: Expr, stop: Expr) -> None:
        """Have the keys of a tile with positions next to each other; the last position is repeated."""
        k, width = self._k, self._width
        with k.loop("turned", 0, _TILE) as at:
            position = k.let("position", k.call("minimum", tile + at, stop - 1))
            place = k.let("place", self._block.place(position))
            k.store(self._places, at, place)
            with k.loop("column", 0, self._sizes.size, width) as column:
                key = k.let("key", _items(k, k.inputs[1], place + column, width))
                for lane in range(width):
                    k.store(self._keys, (column + lane) * _TILE + at, k.lane(key, lane))

    def _multiply_keys(self) -> None:
        """The scores of a tile."""
        k, size = self._k, self._sizes.size
        several = range(_AT_ONCE)
        with (
            k.loop("line", 0, self._lines, _AT_ONCE) as line,
            k.loop("positions", 0, _TILE, 2 * self._lanes) as at,
        ):
            zero = k.broadcast(Const(0.0, Type(self._sizes.type)), self._lanes)
            totals = [[k.variable(f"product{own}_{half}", zero) for half in range(2)] for own in several]
            with k.loop("inner", 0, size) as inner:
                keys = [
                    k.let(
                        f"keys{half}",
                        k.load_vector(self._keys, inner * _TILE + (at + half * self._lanes), self._lanes),
                    )
                    for half in range(2)
                ]
                for own in several:
                    query = k.load(self._queries, (line + own) * size + inner)
                    query = k.let(f"query{own}", k.broadcast(query, self._lanes))
                    for total, key in zip(totals[own], keys, strict=True):
                        k.multiply_add(total, query, key)
            for own in several:
                for half, total in enumerate(totals[own]):
                    place = (line + own) * _TILE + (at + half * self._lanes)
                    k.store(self._scores, place, self._block.score(total))

    def _hide(self, tile: Expr) -> None:
        """Have the lowest score where a line does not attend."""
        k = self._k
        with k.loop("hidden", 0, self._lines) as line:
            last = k.let("last", k.load(self._lasts, line))
            with k.loop("at", 0, _TILE) as at:
                place = line * _TILE + at
                seen = self._block.seen(tile + at, last)
                score = k.let("score", k.load(self._scores, place))
                k.store(self._scores, place, k.select(seen, score, LOWEST))

    def _weigh(self) -> None:
        """Replace scores by weights, and rescale what was summed before.

        A line that has seen nothing yet sums up what its first position multiplies by 0.
        """
        k, sizes, width = self._k, self._sizes, self._width
        starts = range(0, _TILE, self._lanes)
        with k.loop("weighed", 0, self._lines) as line:
            scores = [
                k.let(f"scores{at}", k.load_vector(self._scores, line * _TILE + at, self._lanes))
                for at in starts
            ]
            most = k.variable("most_of_lanes", scores[0])
            for score in scores[1:]:
                k.assign(most, k.call("maximum", most, score))
            before = k.let("before", k.load(self._most, line))
            now = k.let("now", k.call("maximum", before, k.block_reduce("greatest", "max", most, 1, 1)))
            total = k.variable("sum_of_lanes", k.broadcast(Const(0.0, Type(sizes.type)), self._lanes))
            for at, score in zip(starts, scores, strict=True):
                power = k.call("exp", k.call("subtract", score, k.broadcast(now, self._lanes)))
                weight = k.let(f"weight{at}", power)
                k.store(self._scores, line * _TILE + at, weight)
                k.assign(total, k.call("add", total, weight))
            factor = k.let("factor", k.call("exp", before - now))
            added = k.block_reduce("added", "sum", total, 1, 1)
            k.store(self._sums, line, k.load(self._sums, line) * factor + added)
            k.store(self._most, line, now)
            with k.when(before < now), k.loop("scaled", 0, sizes.size, width) as item:
                place = line * sizes.size + item
                k.store(self._results, place, factor * k.let("old", _items(k, self._results, place, width)))

    def _add_values(self, count: Expr) -> None:
        """Add the weighted values of a tile to the results."""
        k, size, width = self._k, self._sizes.size, self._width
        several = range(_AT_ONCE)
        with k.loop("lines", 0, self._lines, _AT_ONCE) as line:
            for column in range(0, size, 2 * width):
                columns = range(column, min(column + 2 * width, size), width)
                totals = [
                    [
                        k.variable(
                            f"result{own}_{first}",
                            _items(k, self._results, (line + own) * size + first, width),
                        )
                        for first in columns
                    ]
                    for own in several
                ]
                with k.loop(f"at{column}", 0, count) as at:
                    place = k.let("place", k.load(self._places, at) + self._block.values)
                    values = [
                        k.let(f"value{first}", _items(k, k.inputs[1], place + first, width))
                        for first in columns
                    ]
                    for own in several:
                        weight = k.load(self._scores, (line + own) * _TILE + at)
                        weight = k.let(f"weight{own}", k.broadcast(weight, width) if width > 1 else weight)
                        for total, value in zip(totals[own], values, strict=True):
                            k.multiply_add(total, weight, value)
                for own in several:
                    for first, total in zip(columns, totals[own], strict=True):
                        k.store(self._results, (line + own) * size + first, total)


def lanes_of(size: int, dtype: str, capabilities: Capabilities) -> tuple[int, int]:
    """The lanes of a CPU's vectors of positions, and of those of a head's items, which may be 1."""
    lanes = _LEAST_VECTOR if dtype == "float64" else max(capabilities.vector_width, _LEAST_VECTOR)
    return lanes, next(width for width in (lanes, _LEAST_VECTOR, 1) if not size % width)


def _items(k: KernelBuilder, memory: Memory, index: Expr, width: int) -> Expr:
    return k.load_vector(memory, index, width) if width > 1 else k.load(memory, index)


# GPUs


def _on_gpu(sizes: _Sizes, capabilities: Capabilities) -> KernelSource:
    """A thread, or a few neighbours, have a line; a workgroup has a tile of keys and values."""
    lanes = 1
    while sizes.size > lanes * _COLUMNS and not sizes.size % (2 * lanes):
        lanes *= 2
    columns, per = sizes.size // lanes, _THREADS // lanes
    parts = -(-sizes.lines // per)
    k = _kernel(sizes, capabilities)
    block = _Block(k, sizes, k.group(), parts, per)
    query = block.query(block.first + k.thread // lanes)
    column = k.let("column", k.thread % lanes * columns)
    begin = k.let("begin", block.place_of_query(query) + column)
    last = k.let("last", k.load(k.inputs[3], query))
    start, stop = _bounds(k, sizes, last)
    tile = max(_TILE_BYTES // (2 * sizes.size * item_size(sizes.type)) // _AT_ONCE, 1) * _AT_ONCE
    keys, values = (k.shared(name, sizes.type, tile * sizes.size) for name in ("keys", "values"))
    line = _Line(k, sizes, [k.load(k.inputs[0], begin + own) for own in range(columns)])
    with k.loop("tile", start, stop, tile) as first:
        k.barrier()  # the last tile was read
        with k.loop("item", k.thread, tile * sizes.size, _THREADS) as item:
            position = k.let("position", k.call("minimum", first + item // sizes.size, stop - 1))
            place = k.let("place", block.place(position) + item % sizes.size)
            k.store(keys, item, k.load(k.inputs[1], place))
            k.store(values, item, k.load(k.inputs[1], place + block.values))
        k.barrier()
        with k.loop("at", 0, tile, _AT_ONCE) as at:
            places = [(at + number) * sizes.size + column for number in range(_AT_ONCE)]
            scores, masks = [], []
            for number, key in enumerate(places):
                product = line.product(number, keys, key, lanes)
                masks.append(k.let(f"seen{number}", block.seen(first + at + number, last)))
                score = k.select(masks[-1], block.score(product), LOWEST)
                scores.append(k.let(f"score{number}", score))
            line.take(scores, masks, values, places)
    for own, result in enumerate(line.results):
        k.store(k.outputs[0], begin + own, result / line.total)
    return k.source((sizes.rows * sizes.key_heads * parts,), (_THREADS,))


class _Line:
    """What a thread of a GPU knows of the positions of its line so far, for its columns."""

    def __init__(self, k: KernelBuilder, sizes: _Sizes, queries: Sequence[Expr]) -> None:
        self._k, self._type = k, sizes.type
        self._queries = [k.let(f"query{own}", query) for own, query in enumerate(queries)]
        self.results = [k.variable(f"result{own}", 0.0, sizes.type) for own in range(len(queries))]
        self._most = k.variable("most", LOWEST, sizes.type)
        self.total = k.variable("sum", 0.0, sizes.type)

    def product(self, number: int, keys: Memory, place: Expr, lanes: int) -> Expr:
        """The product with a key, of all threads of the line."""
        k = self._k
        product = k.variable(f"product{number}", 0.0, self._type)
        for own, query in enumerate(self._queries):
            k.multiply_add(product, query, k.load(keys, place + own))
        if lanes == 1:
            return product
        return k.block_reduce(f"whole{number}", "sum", product, _THREADS, lanes)

    def take(
        self, scores: Sequence[Expr], masks: Sequence[Expr], values: Memory, places: Sequence[Expr]
    ) -> None:
        """Take further positions, of which those count that are seen."""
        k = self._k
        most: Expr = self._most
        for score in scores:
            most = k.call("maximum", most, score)
        most = k.let("new_most", most)
        factor = k.let("factor", k.call("exp", self._most - most))
        k.assign(self._most, most)
        weights = [
            k.let(f"weight{number}", k.select(seen, k.call("exp", score - most), 0.0))
            for number, (seen, score) in enumerate(zip(masks, scores, strict=True))
        ]
        k.assign(self.total, self.total * factor)
        for weight in weights:
            k.assign(self.total, self.total + weight)
        for own, result in enumerate(self.results):
            k.assign(result, result * factor)
            for weight, place in zip(weights, places, strict=True):
                k.multiply_add(result, weight, k.load(values, place + own))


def _bounds(k: KernelBuilder, sizes: _Sizes, last: Expr) -> tuple[Expr, Expr]:
    """The positions that the threads of a workgroup attend to: from, and up to; the same for all threads."""
    ends = k.shared("ends", "int32", 2)
    greatest = k.block_reduce("greatest", "max", k.variable("own_last", last), _THREADS, _THREADS)
    least = k.block_reduce("least", "min", k.variable("own_first", last), _THREADS, _THREADS)
    with k.when(k.thread.eq(0)):
        k.store(ends, 0, k.call("maximum", least - (sizes.window - 1), 0) if sizes.window else 0)
        k.store(ends, 1, greatest + 1)
    return k.uniform("start", ends, 0), k.uniform("stop", ends, 1)
