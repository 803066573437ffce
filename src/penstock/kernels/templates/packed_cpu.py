"""Products of few rows with a matrix of packed integers, on a CPU.

A vector has neighbouring words of a row of the matrix, and an integer of each word is computed at a time: a
mask and a conversion give it times the power of 2 of its place. What would be done to each integer is done to
the items of x, once for all features of a workgroup: they are put into the order in which they are
multiplied, and divided by these powers. Integers are packed with 2^(bits - 1) added. What that adds to a sum
of products, the sum starts without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from penstock.drivers.driver import Capabilities
from penstock.graph.quantization import SHIFTS
from penstock.kernels import ir
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.source import KernelSource
from penstock.kernels.templates.launches import Tasks
from penstock.kernels.templates.matmul import Epilogue
from penstock.kernels.templates.matmul_micro import finish_row
from penstock.kernels.templates.matmul_tiling import LANES
from penstock.kernels.templates.packed_matmul import PackedProblem, clamped

_SUMS = 8  # vectors that are added to at a time
_MOST_FEATURES = 4  # at a time
_AHEAD = 2048  # words; rows of a matrix are too short for a CPU to notice in time that they are read in turn
_LEAST_VECTOR = 8  # items that are read and written at once
_HIGHEST = {4: 28, 8: 24}  # the shift of the integer with a word's highest bit, by the bits

_Totals = dict[tuple[int, int], ir.Var]  # vectors whose lanes add up to an item, by feature and row


@dataclass(frozen=True)
class _Blocks:
    """Blocks of the words of a row of the matrix, one after another, each a vector."""

    first: int  # word
    count: int
    lanes: int


def cpu_packed(
    k: KernelBuilder,
    problem: PackedProblem,
    capabilities: Capabilities,
    epilogue: Epilogue,
    epilogue_width: int,
) -> KernelSource:
    """A task computes `LANES` features of all rows, some features and rows at a time.

    The epilogue takes so many neighbours at a time.
    """
    room = capabilities.local_bytes // 4 - _SUMS * LANES
    fitting = room // (problem.inner + problem.inner // problem.each)
    rows = ceil(problem.rows / ceil(problem.rows / min(_SUMS, fitting)))
    features = min(_MOST_FEATURES, _SUMS // rows)
    tasks = Tasks(ceil(problem.columns / LANES), capabilities)
    product = _Product(k, problem, capabilities, min(fitting // rows, ceil(problem.rows / rows)) * rows)
    sums = k.shared("sums", "float32", rows * LANES, width=LANES)
    with k.loop("begin", 0, problem.rows, product.held) as begin:
        end = k.let("end", k.call("minimum", problem.rows - begin, product.held))
        with k.loop("place", 0, end) as place:
            product.lay_out(begin + place, place)
        with tasks.each(k) as task, k.loop("top", 0, end, rows) as top:
            first = k.let("first", task * LANES)
            own = [k.let(f"own{row}", k.call("minimum", top + row, end - 1)) for row in range(rows)]
            with k.loop("part", 0, LANES, features) as part:
                columns = [
                    clamped(k, f"column{feature}", first + part + feature, problem.columns)
                    for feature in range(features)
                ]
                for (feature, row), total in product.totals(columns, own).items():
                    whole = k.block_reduce(f"whole{feature}_{row}", "sum", total, 1, 1)
                    k.store(sums, part + (row * LANES + feature), whole)
            last = k.let("last", k.call("minimum", first + LANES, problem.columns))
            with k.loop("line_row", 0, k.call("minimum", end - top, rows)) as line_row:
                line = k.pointer("line", sums, line_row * LANES - first)  # from column 0 on
                item_row = k.let("item_row", begin + top + line_row)
                finish_row(k, epilogue, epilogue_width, item_row, line, (first, last, problem.columns))
    return k.source(tasks.grid, tasks.group)


class _Product:
    """The product, some of whose rows are laid out in local memory."""

    def __init__(
        self, k: KernelBuilder, problem: PackedProblem, capabilities: Capabilities, held: int
    ) -> None:
        """`held`: the rows that are laid out at a time."""
        self._k, self._problem = k, problem
        self._words = problem.inner // problem.each  # of a row of the matrix
        self._length = problem.inner + self._words  # of a row that is laid out
        self.held = held
        self._items = k.shared("items", "float32", held * self._length, width=capabilities.vector_width)
        self._blocks = list(_blocks(self._words, capabilities.vector_width))

    def lay_out(self, row: ir.Expr, place: ir.Expr) -> None:
        """Write a row of x in the order in which it is multiplied, a block after another.

        Behind the items of a block is what the sums of its products start with.
        """
        k, problem = self._k, self._problem
        for blocks in self._blocks:
            lanes = blocks.lanes
            with k.loop(k.fresh("block"), 0, blocks.count) as block:
                word = k.let("word", block * lanes + blocks.first)
                first = row * problem.inner + word * problem.each
                read = [
                    k.let(f"read{n}", _neighbours(k, problem.x, first + n * lanes, lanes))
                    for n in range(problem.each)
                ]
                to = k.let("to", place * self._length + word * (problem.each + 1))
                total = k.variable("sum", k.identity("sum", "float32", lanes))
                for n, (item, shift) in enumerate(zip(_dealt(k, read), SHIFTS[problem.bits], strict=True)):
                    _write(k, self._items, to + n * lanes, item * _everywhere(2.0**-shift, "float32", lanes))
                    if shift != _HIGHEST[problem.bits]:
                        k.assign(total, total + item)
                offset = _everywhere(-(2.0 ** (problem.bits - 1)), "float32", lanes)
                _write(k, self._items, to + problem.each * lanes, total * offset)

    def totals(self, columns: Sequence[ir.Var], rows: Sequence[ir.Var]) -> _Totals:
        """The products of some features with some rows that are laid out."""
        k = self._k
        slots = [(feature, row) for feature in range(len(columns)) for row in range(len(rows))]
        zero = k.identity("sum", "float32", self._blocks[0].lanes)
        totals = {slot: k.variable(k.fresh("total"), zero) for slot in slots}
        for blocks in self._blocks:
            totals = {slot: _narrowed(k, total, blocks.lanes) for slot, total in totals.items()}
            with k.loop(k.fresh("block"), 0, blocks.count) as block:
                self._add_block(blocks, block, columns, rows, totals)
        return totals

    def _add_block(
        self,
        blocks: _Blocks,
        block: ir.Var,
        columns: Sequence[ir.Var],
        rows: Sequence[ir.Var],
        totals: _Totals,
    ) -> None:
        """Add the products of a block of words."""
        k, problem, lanes = self._k, self._problem, blocks.lanes
        word = k.let("word", block * lanes + blocks.first)
        words = [
            k.let(f"words{n}", _neighbours(k, problem.words, column * self._words + word, lanes))
            for n, column in enumerate(columns)
        ]
        for column in columns:
            k.prefetch(problem.words, column * self._words + word + _AHEAD)
        places = [
            k.let(f"place{n}", row * self._length + word * (problem.each + 1)) for n, row in enumerate(rows)
        ]
        starts = [_neighbours(k, self._items, place + problem.each * lanes, lanes) for place in places]
        sums = {slot: k.variable("sum{}_{}".format(*slot), starts[slot[1]]) for slot in totals}
        for number, shift in enumerate(SHIFTS[problem.bits]):
            items = [
                k.let(k.fresh("items"), _neighbours(k, self._items, place + number * lanes, lanes))
                for place in places
            ]
            for feature, read in enumerate(words):
                value = k.let(k.fresh("value"), _in_place(k, problem.bits, shift, read))
                for row, item in enumerate(items):
                    k.multiply_add(sums[feature, row], value, item)
        for feature, column in enumerate(columns):
            scales = k.let(f"scales{feature}", self._scales(column, blocks, block))
            for row in range(len(rows)):
                k.multiply_add(totals[feature, row], sums[feature, row], scales)

    def _scales(self, column: ir.Var, blocks: _Blocks, block: ir.Var) -> ir.Expr:
        """The scale of each word of a block."""
        k, problem, lanes = self._k, self._problem, blocks.lanes
        each = problem.group // problem.each  # words with the same scale
        several = lanes // each
        number = block * several + blocks.first // each if several else (block * lanes + blocks.first) // each
        first = column * (problem.inner // problem.group) + number
        k.prefetch(problem.scales, first + _AHEAD // each)
        if several < 2:
            return k.broadcast(k.let(k.fresh("scale"), k.load(problem.scales, first)), lanes)
        read = k.let(k.fresh("scale"), _neighbours(k, problem.scales, first, several))
        return ir.Shuffle(ir.Type("float32", lanes), read, read, tuple(n // each for n in range(lanes)))


def _blocks(words: int, lanes: int) -> Iterator[_Blocks]:
    """Words in vectors of so many lanes, and those that remain in shorter ones."""
    first = 0
    while first < words:
        count = (words - first) // lanes
        if count:
            yield _Blocks(first, count, lanes)
        first += count * lanes
        lanes //= 2


def _neighbours(k: KernelBuilder, memory: Memory, first: ir.Expr, lanes: int) -> ir.Expr:
    """Neighbouring items as a vector."""
    if lanes >= _LEAST_VECTOR:
        return k.load_vector(memory, first, lanes)
    return k.vector([k.load(memory, first + lane) for lane in range(lanes)])


def _write(k: KernelBuilder, memory: Memory, first: ir.Expr, value: ir.Expr) -> None:
    """Write a vector as neighbouring items."""
    written = k.let(k.fresh("written"), value)
    if written.type.width >= _LEAST_VECTOR:
        k.store(memory, first, written)
        return
    for lane in range(written.type.width):
        k.store(memory, first + lane, k.lane(written, lane))


def _dealt(k: KernelBuilder, vectors: Sequence[ir.Var]) -> list[ir.Var]:
    """The items of several vectors, of which each result gets the next in turn."""
    if len(vectors) == 1:
        return [*vectors]
    even: list[ir.Var] = []  # the items at even places of neighbouring vectors
    odd: list[ir.Var] = []
    for left, right in zip(vectors[::2], vectors[1::2], strict=True):
        for first, items in enumerate((even, odd)):
            lanes = tuple(range(first, 2 * left.type.width, 2))
            items.append(k.let(k.fresh("dealt"), ir.Shuffle(left.type, left, right, lanes)))
    even, odd = _dealt(k, even), _dealt(k, odd)
    return [vector for pair in zip(even, odd, strict=True) for vector in pair]


def _narrowed(k: KernelBuilder, total: ir.Var, lanes: int) -> ir.Var:
    """A vector of so many lanes with the same sum."""
    while total.type.width > lanes:
        half = total.type.width // 2
        lower, upper = (
            ir.Shuffle(ir.Type("float32", half), total, total, tuple(range(first, first + half)))
            for first in (0, half)
        )
        total = k.variable(k.fresh("total"), lower + upper)
    return total


def _in_place(k: KernelBuilder, bits: int, shift: int, words: ir.Var) -> ir.Expr:
    """An integer of each word as a float, times 2^shift.

    It is 2^(bits - 1) too large, but for the highest: with its highest bit inverted it is an integer with a
    sign.
    """
    lanes = words.type.width
    numbers = words & _everywhere((2**bits - 1) << shift, "uint32", lanes)
    if shift == _HIGHEST[bits]:
        numbers = numbers ^ _everywhere(1 << 31, "uint32", lanes)
    return k.call("cast", k.call("cast", numbers, dtype="int32"), dtype="float32")


def _everywhere(value: float, dtype: str, lanes: int) -> ir.Expr:
    """A constant in every lane."""
    return ir.Broadcast(ir.Type(dtype, lanes), ir.Const(value, ir.Type(dtype)))
