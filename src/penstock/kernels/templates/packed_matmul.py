"""Products of few rows with a matrix of packed integers, which are unpacked in registers.

Such a product takes as long as reading the matrix. On a GPU, the threads of a workgroup divide the contracted
axis among them. Each keeps its part of the rows in registers, and reads its part of several features: 16
bytes of each at a time, if there is a single row. All of these reads are under way at once.

An integer becomes a float without a conversion, of which a GPU makes few at a time: its bits are put into the
fraction of a number between 1 and 2. For 8 bits that takes a shift and an operation on bits. For 4 bits the
shift serves two integers. The lower is in bits of 1/256, and 1 + 8/256 is subtracted, which is exact. For the
upper, as for 8 bits, 1.5 times the sum of the row's items is subtracted from the sum of products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from penstock.drivers.driver import Capabilities
from penstock.graph.quantization import SHIFTS, WORD_BITS
from penstock.kernels import ir
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.source import KernelSource
from penstock.kernels.templates.matmul import Epilogue

# Of a GPU.
_FEATURES = {1: 16, 2: 8, 4: 8, 8: 4}  # of a workgroup at most, by its rows at most: sums are in registers
_MOST_ROWS = 8  # of a workgroup
_MOST_THREADS = 256
_BUSY = 256  # threads for each compute unit; where there are fewer, a workgroup has fewer features
_WARP = 32
_FRACTION = 23  # bits
_OFFSET = 1.5  # what stands for 0

PACKED_FEATURES = (
    32  # of a workgroup at most, of all kinds of kernels; theirs begin at a multiple of their number
)


@dataclass(frozen=True)
class PackedProblem:
    """A product of `rows` x `inner` items with `columns` rows of packed integers."""

    x: Memory
    words: Memory
    scales: Memory
    rows: int
    columns: int
    inner: int
    bits: int
    group: int  # integers with the same scale

    @property
    def each(self) -> int:
        """The integers of a word."""
        return WORD_BITS // self.bits


def gpu_packed(
    k: KernelBuilder, problem: PackedProblem, capabilities: Capabilities, epilogue: Epilogue
) -> KernelSource:
    """A workgroup computes some features of some rows."""
    parts = ceil(problem.rows / _MOST_ROWS)  # of the rows
    rows = ceil(problem.rows / parts)
    items = 32 // rows if rows < 3 else 8  # of a row that a thread has at a time
    most = min(_MOST_THREADS, capabilities.max_group_size)
    steps = ceil(problem.inner / (items * most))
    threads = ceil(ceil(problem.inner / (items * steps)) / _WARP) * _WARP
    features = _features(problem, rows, threads * parts, capabilities)
    first = k.let("first", k.group() // parts * features if parts > 1 else k.group() * features)
    top = k.let("top", k.group() % parts * rows if parts > 1 else 0)
    lines = [clamped(k, f"line{row}", top + row, problem.rows) for row in range(rows)]
    totals = k.registers("totals", "float32", features * rows)
    with k.loop("slot", 0, features * rows, unrolled=features * rows) as slot:
        k.store(totals, slot, 0.0)
    with k.loop("step", 0, steps) as step:
        at = k.let("at", (step * threads + k.thread) * items)
        with k.when(at < problem.inner):
            _add_products(k, problem, features, items, at, first, lines, totals)
    _finish(k, problem, features, threads, first, lines, totals, epilogue, top)
    grid = ceil(problem.columns / features) * parts
    return k.source((grid,), (threads,), resident=2 if rows > 4 else 1)


def _features(problem: PackedProblem, rows: int, threads: int, capabilities: Capabilities) -> int:
    """How many features a workgroup computes: many, if there are enough threads for all compute units."""
    features = next(most for limit, most in _FEATURES.items() if rows <= limit)
    while features > 2 and problem.columns * threads < _BUSY * capabilities.compute_units * features:
        features //= 2
    return features


def clamped(k: KernelBuilder, name: str, number: ir.Expr, length: int) -> ir.Var:
    """An index that is read even where it is beyond the last."""
    return k.let(name, k.call("minimum", number, length - 1))


def _add_products(
    k: KernelBuilder,
    problem: PackedProblem,
    features: int,
    items: int,
    at: ir.Expr,
    first: ir.Expr,
    lines: Sequence[ir.Var],
    totals: Memory,
) -> None:
    """Add the products of a thread's items, from `at` on, to the totals of all features."""
    rows, inner, words = len(lines), problem.inner, items // problem.each
    packed = k.registers("packed", "uint32", features * words)
    scales = k.registers("factors", "float32", features)
    with k.loop("feature", 0, features, unrolled=features) as feature:  # reads everything first
        column = clamped(k, "column", first + feature, problem.columns)
        place = column * (inner // problem.each) + at // problem.each
        if words > 1:
            read = k.let("read", k.load_vector(problem.words, place, words, aligned=words))
        else:
            read = k.let("read", k.load(problem.words, place))
        for word in range(words):
            k.store(packed, feature * words + word, k.lane(read, word))
        scale = k.load(problem.scales, column * (inner // problem.group) + at // problem.group)
        k.store(scales, feature, k.let("scale", scale) * float(2**problem.bits))
    own = [_own_items(k, problem, items, row, line * inner + at) for row, line in enumerate(lines)]
    with k.loop("feature", 0, features, unrolled=features) as feature:
        sums = [k.variable(f"sum{row}", start) for row, (_, start) in enumerate(own)]
        for word in range(words):
            bits = k.let(f"bits{word}", k.load(packed, feature * words + word))
            for number, value in enumerate(_floats(k, problem.bits, bits)):
                for total, (row_items, _) in zip(sums, own, strict=True):
                    k.multiply_add(total, value, row_items[word * problem.each + number])
        for row, total in enumerate(sums):
            slot = feature * rows + row
            k.store(totals, slot, k.load(totals, slot) + total * k.load(scales, feature))


def _own_items(
    k: KernelBuilder, problem: PackedProblem, items: int, row: int, place: ir.Expr
) -> tuple[list[ir.Expr], ir.Var]:
    """A thread's items of a row, as they are multiplied, and what a sum of their products starts with."""
    read = k.let(f"x{row}", k.load_vector(problem.x, place, items, aligned=items))
    # In the order of their bits in a word.
    order = sorted(range(problem.each), key=SHIFTS[problem.bits].__getitem__)
    values = [k.lane(read, word + item) for word in range(0, items, problem.each) for item in order]
    upper = values if problem.bits == 8 else values[1::2]
    total = k.variable(f"sum_of_x{row}", upper[0])
    for value in upper[1:]:
        k.assign(total, total + value)
    start = k.let(f"start{row}", total * -_OFFSET)
    if problem.bits == 4:
        lower = [k.let(f"lower{row}_{item}", values[item] * 16.0) for item in range(0, items, 2)]
        values[::2] = lower
    return values, start


def byte_floats(k: KernelBuilder, word: ir.Expr) -> list[ir.Expr]:
    """The bytes of a word as floats: 1 + byte / 256."""
    return [_float(k, moved, 8) for moved in _bytes(k, word)]


def _bytes(k: KernelBuilder, word: ir.Expr) -> list[ir.Expr]:
    """Words that have the bytes of a word, one after another, as the highest bits of the fraction."""
    shifts = [_FRACTION - 8 - 8 * byte for byte in range(4)]
    return [k.let(k.fresh("byte"), word << shift if shift > 0 else word >> -shift) for shift in shifts]


def _floats(k: KernelBuilder, bits: int, word: ir.Var) -> list[ir.Expr]:
    """The integers of a word as floats: 1 + integer / 2^bits, or (integer - 8) / 256 for the lower of two."""
    if bits == 8:
        return byte_floats(k, word)
    values: list[ir.Expr] = []
    for moved in _bytes(k, word):
        lower = _float(k, moved, 4, below=4) - (1 + 8 / 256)
        values += [k.let(k.fresh("lower"), lower), _float(k, moved, 4)]
    return values


def _float(k: KernelBuilder, word: ir.Expr, bits: int, below: int = 0) -> ir.Var:
    """The float between 1 and 2 with some bits of its fraction from a word, `below` the highest."""
    mask = (2**bits - 1) << (_FRACTION - bits - below)
    return k.let(k.fresh("value"), k.call("unit_float", word, mask, dtype="float32"))


def _finish(
    k: KernelBuilder,
    problem: PackedProblem,
    features: int,
    threads: int,
    first: ir.Expr,
    lines: Sequence[ir.Var],
    totals: Memory,
    epilogue: Epilogue,
    top: ir.Expr,
) -> None:
    """Add up the totals of all threads, row by row, and store the results."""
    rows, adding = len(lines), min(_WARP, 1 << (threads // features).bit_length() - 1)  # threads of a sum
    parts = k.shared("parts", "float32", features * threads)
    feature, rank = k.let("own", k.thread // adding), k.let("rank", k.thread % adding)
    for row in range(rows):
        if row:
            k.barrier()
        with k.loop("slot", 0, features, unrolled=features) as slot:
            k.store(parts, slot * threads + k.thread, k.load(totals, slot * rows + row))
        k.barrier()
        part = k.variable(f"part{row}", 0.0, "float32")
        with k.when(feature < features), k.loop("other", rank, threads, adding) as other:
            k.assign(part, part + k.load(parts, feature * threads + other))
        whole = k.block_reduce(f"whole{row}", "sum", part, threads, adding)
        column = k.let(f"to{row}", first + feature)
        inside = rank.eq(0) & (feature < features) & (column < problem.columns)
        if problem.rows % rows:
            inside = inside & (top + row < problem.rows)
        with k.when(inside):
            k.splice(epilogue(top + row, column, whole))
