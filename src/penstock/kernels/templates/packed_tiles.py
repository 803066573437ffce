"""Products of few rows with a matrix of packed integers, on tensor cores: tiles of 16 features and 8 rows.

Of 128 inputs that a warp multiplies at a time, each thread reads 32 neighbours of two features of a tile, 16
bytes of 4-bit integers each, so a thread has a single scale for a feature. Which of a tile's inputs is which
does not matter for a sum, as long as both operands agree. Integers become float16 or bfloat16 exactly, and
are rounded once, when they are multiplied by their scale: a product of many rows has the same weights. Sums
are float32, in an order that does not depend on the number of rows.

A single row leaves most of the cores' work unused. Still it takes 2.6 to 3.5 instructions for a weight of 4
bits, counted for sm_90, and `packed_matmul`, in float32, 3.7 to 4.3; an H200 has time for some 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import ceil

from penstock.drivers.driver import Capabilities
from penstock.kernels import ir
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.rewriting import divided
from penstock.kernels.source import KernelSource
from penstock.kernels.templates.packed_matmul import PackedProblem, byte_floats, clamped

# Given a row, a column and the items of all products there: what computes and stores the results.
Epilogues = Callable[[ir.Expr, ir.Expr, Sequence[ir.Var]], list[ir.Statement]]

_WARP = 32
_FEATURES, _ROWS = 16, 8  # of a tile
MOST_ROWS = 2 * _ROWS  # with more, `packed_ring` takes less time
_ITEMS = 32  # neighbouring inputs of a thread
_CHUNK = 4 * _ITEMS  # inputs of a warp
_FEW_WARPS, _MOST_WARPS = 8, 32  # of a workgroup; more, where there are few workgroups
_FEW_TILES = 2  # for each compute unit: with fewer, a workgroup has a single tile
_WORDS = 4  # that a thread reads at once
_AT_ONCE = 4  # tiles whose integers a thread has registers for


@dataclass(frozen=True)
class _Place:
    """Where a thread is in its workgroup: its warp, and its row and column among the items of a tile."""

    warp: ir.Var
    line: ir.Var  # of 8
    part: ir.Var  # of 4


def tensor_packed(
    k: KernelBuilder,
    problems: Sequence[PackedProblem],
    capabilities: Capabilities,
    epilogue: Epilogues,
    prologue: Callable[[KernelBuilder, int], Memory] | None = None,
) -> KernelSource:
    """Products of the same rows with matrices of the same shape.

    A workgroup computes some tiles of features of each matrix, of all rows. Its warps divide the inputs among
    them. A `prologue`, which gets the number of threads, computes the rows as words in local memory.
    """
    problem = problems[0]
    few = len(problems) * problem.columns / _FEATURES < _FEW_TILES * capabilities.compute_units
    tiles, chunks = 1 if few else ceil(2 / len(problems)), ceil(problem.inner / _CHUNK)
    warps = min(_MOST_WARPS if few else _FEW_WARPS, chunks, capabilities.max_group_size // _WARP)
    steps, row_tiles = ceil(chunks / warps), ceil(problem.rows / _ROWS)
    place = _Place(
        k.let("warp", k.thread // _WARP),
        k.let("line", k.thread % _WARP // 4),
        k.let("part", k.thread % 4),
    )
    first = k.let("first", k.group() * (tiles * _FEATURES))
    results = _Results(k, problems, warps * _WARP, first, tiles * _FEATURES, epilogue)
    own = [(matrix, tile) for matrix in problems for tile in range(tiles)]
    totals = {
        (number, rows): [k.variable(f"total{number}_{rows}_{item}", 0.0, "float32") for item in range(4)]
        for number in range(len(own))
        for rows in range(row_tiles)
    }
    at_once = max(min(steps, _AT_ONCE // len(own)), 1)
    rounds = ceil(steps / at_once)

    def begin() -> Memory:
        """Wait for earlier launches; then read what follows the products, and have the rows."""
        k.wait_for_earlier([memory for matrix in problems for memory in (matrix.words, matrix.scales)])
        results.read()
        return problem.x if prologue is None else prologue(k, warps * _WARP)

    if rounds > 1:
        x = begin()
    with k.loop("round", 0, rounds) if rounds > 1 else nullcontext(ir.Const(0)) as round_:
        read: list[tuple[ir.Var, ir.Var | None, list[_Left]]] = []
        for turn in range(at_once):
            step = round_ * at_once + turn
            at = k.let(f"at{turn}", (step * warps + place.warp) * _CHUNK + place.part * _ITEMS)
            masked = problem.inner < rounds * at_once * warps * _CHUNK
            inside = k.let(f"inside{turn}", at < problem.inner) if masked else None
            lefts = [
                _Left(k, matrix, f"{turn}_{number}", tile, first, at, inside, place)
                for number, (matrix, tile) in enumerate(own)
            ]
            read.append((at, inside, lefts))
        if rounds == 1:  # while the integers are under way
            x = begin()
        # A few workgroups read all integers before they compute anything; many wait for each other's.
        with k.optimization_barrier(k.fresh("once")) if few else nullcontext(ir.Const(0)) as none:
            for at, inside, lefts in read:
                own_rows = [
                    _row_words(k, problem, x, rows, at + none, inside, place) for rows in range(row_tiles)
                ]
                for number, left in enumerate(lefts):
                    left.begin()
                    for part in range(_ITEMS // 4):  # the inputs of a thread that a product of tiles takes
                        pairs = left.pairs(part)
                        for rows, words in enumerate(own_rows):
                            k.multiply_tiles(
                                totals[number, rows], pairs, words[2 * part :][:2], problem.x.dtype
                            )
    results.finish(totals, place)
    return k.source((ceil(problem.columns / (tiles * _FEATURES)),), (warps * _WARP,))


def _row_words(
    k: KernelBuilder,
    problem: PackedProblem,
    x: Memory,
    rows: int,
    at: ir.Expr,
    inside: ir.Expr | None,
    place: _Place,
) -> list[ir.Expr]:
    """A thread's items of a row of x, as words of two; those of the last row for rows beyond it."""
    words = x if x.dtype == "uint32" else Memory(x.name, "uint32")
    row = clamped(k, k.fresh(f"row{rows}"), place.line + rows * _ROWS, problem.rows)
    result: list[ir.Expr] = []
    for part in range(_ITEMS // 2 // _WORDS):
        index = row * problem.inner + at + part * 2 * _WORDS  # in items
        index = index // 2 if x is words else index
        read = k.load_vector(words, index, _WORDS, aligned=_WORDS, mask=inside)
        name = k.let(k.fresh(f"x{rows}"), read)
        result += [k.lane(name, word) for word in range(_WORDS)]
    return result


class _Left:
    """A thread's integers of a tile: of two features, 8 apart."""

    def __init__(
        self,
        k: KernelBuilder,
        problem: PackedProblem,
        of: str,
        tile: int,
        first: ir.Expr,
        at: ir.Expr,
        inside: ir.Expr | None,
        place: _Place,
    ) -> None:
        self._k, self._problem = k, problem
        self._words: list[list[ir.Expr]] = []
        self._scales: list[ir.Var] = []
        self._pairs: dict[tuple[int, int], list[ir.Expr]] = {}
        for half in range(2):
            name, offset = f"{of}_{half}", tile * _FEATURES + half * _FEATURES // 2
            column = clamped(k, f"column{name}", first + offset + place.line, problem.columns)
            begin = column * (problem.inner // problem.each) + at // problem.each
            read: list[ir.Expr] = []
            for part in range(0, _ITEMS // problem.each, _WORDS):
                load = k.load_vector(problem.words, begin + part, _WORDS, aligned=_WORDS, mask=inside)
                words = k.let(f"words{name}_{part}", load)
                read += [k.lane(words, word) for word in range(_WORDS)]
            self._words.append(read)
            index = column * (problem.inner // problem.group) + at // problem.group
            self._scales.append(k.let(f"scale{name}", k.load(problem.scales, index, inside)))

    def begin(self) -> None:
        """Have the scales as they are multiplied, once they are there."""
        self._scales = [multiplied(self._k, self._problem, scale) for scale in self._scales]

    def pairs(self, number: int) -> list[ir.Expr]:
        """The weights of a product of tiles, two in a word: neighbours of both features, then the next."""
        (first, second), (third, fourth) = (
            weights(self._k, self._problem, words, factor, number)
            for words, factor in zip(self._words, self._scales, strict=True)
        )
        return [first, third, second, fourth]


def multiplied(k: KernelBuilder, problem: PackedProblem, scale: ir.Expr) -> ir.Var:
    """A scale as integers are multiplied with it, two at a time."""
    factor = scale * (256.0 if problem.bits == 8 else 1.0)  # integers of 8 bits are in 1/256
    return k.let(k.fresh("factor"), _paired(k, problem, factor, factor))


def weights(
    k: KernelBuilder, problem: PackedProblem, words: Sequence[ir.Expr], factor: ir.Expr, number: int
) -> list[ir.Var]:
    """Four neighbouring weights of a feature, in two words: those that a product of tiles takes."""
    each = problem.each // 4  # products of tiles that take from a word
    word = words[number // each]
    if problem.bits == 8:
        values = [value - 1.5 for value in byte_floats(k, word)]
        pairs = [_paired(k, problem, *values[:2]), _paired(k, problem, *values[2:])]
    else:
        shifts = [8 * (number % each), 8 * (number % each) + 4]
        moved = [word >> shift if shift else word for shift in shifts]
        pairs = [k.call(f"integers_{problem.x.dtype}", bits) for bits in moved]
    scaled = (k.call(f"scaled_{problem.x.dtype}", pair, factor) for pair in pairs)
    return [k.let(k.fresh("pair"), value) for value in scaled]


def _paired(k: KernelBuilder, problem: PackedProblem, low: ir.Expr, high: ir.Expr) -> ir.Expr:
    return k.call(f"paired_{problem.x.dtype}", low, high, dtype="uint32")


class _Results:
    """The items of all products that a workgroup has, and what is computed from them.

    Where each thread has one at most, what that needs besides is read before the products.
    """

    def __init__(
        self,
        k: KernelBuilder,
        problems: Sequence[PackedProblem],
        threads: int,
        first: ir.Expr,
        features: int,
        epilogue: Epilogues,
    ) -> None:
        """`features`: of each matrix, from `first` on."""
        self._k, self._problem, self._threads = k, problems[0], threads
        self._first, self._features, self._epilogue = first, features, epilogue
        self._products = [ir.Var(f"product{at}", ir.Type("float32")) for at in range(len(problems))]
        self._count = features * self._problem.rows
        self._ready: list[ir.Statement] = []
        self._later: list[ir.Statement] = []
        if self._count <= threads:
            self._item = clamped(k, "item", k.thread, self._count)
            names = [product.name for product in self._products]
            self._ready, self._later = divided(self._statements(self._item), names)

    def read(self) -> None:
        """Read what the results need besides the products."""
        self._k.splice(self._ready)

    def _statements(self, item: ir.Expr) -> list[ir.Statement]:
        k, columns = self._k, self._problem.columns
        row, column = k.let("row", item // self._features), k.let("own", self._first + item % self._features)
        inside = column if columns % self._features == 0 else clamped(k, "column", column, columns)
        return self._epilogue(row, inside, self._products)

    def finish(self, totals: Mapping[tuple[int, int], Sequence[ir.Var]], place: _Place) -> None:
        """Add up the totals of all warps, and store the results: neighbours are neighbouring features."""
        k, warps = self._k, self._threads // _WARP
        tiles, row_tiles = (1 + max(key[axis] for key in totals) for axis in range(2))
        everything, rows = tiles * _FEATURES, row_tiles * _ROWS
        parts = k.shared("parts", "float32", warps * rows * everything)
        for (tile, row_tile), items in totals.items():
            for number, total in enumerate(items):
                row = place.part * 2 + (row_tile * _ROWS + number % 2)
                feature = place.line + (tile * _FEATURES + number // 2 * (_FEATURES // 2))
                k.store(parts, (place.warp * rows + row) * everything + feature, total)
        k.barrier()

        def add_up(item: ir.Expr, own: ir.Expr) -> None:
            for number, product in enumerate(self._products):
                whole = k.variable(f"whole{number}", 0.0, "float32")
                feature = item % self._features + number * self._features
                at = k.let(f"from{number}", own * everything + feature)
                with k.loop(f"other{number}", 0, warps, unrolled=warps) as other:
                    k.assign(whole, whole + k.load(parts, other * (rows * everything) + at))
                k.let(product.name, whole)

        if self._count <= self._threads:
            with k.when((k.thread < self._count) & (ir.Var("own") < self._problem.columns)):
                add_up(self._item, ir.Var("row"))
                k.splice(self._later)
            return
        with k.loop("item", k.thread, self._count, self._threads) as item:
            statements = self._statements(item)
            add_up(item, ir.Var("row"))
            with k.when(ir.Var("own") < self._problem.columns):
                k.splice(statements)
