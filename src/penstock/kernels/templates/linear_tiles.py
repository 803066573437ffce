"""Products of few rows with matrices of 16-bit floats, on tensor cores: tiles of 16 features and 8 rows.

A thread reads 16 bytes of two features of a tile at once, and of a row: neighbouring inputs. Which of a
tile's inputs is which does not matter for a sum, as long as both operands agree, so nothing is exchanged.
What a thread reads of the matrix in a round is under way before it multiplies anything.

Sums are float32, in an order that does not depend on the number of rows, as long as a workgroup has as many
warps for the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from penstock.drivers.driver import Capabilities
from penstock.kernels import ir
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.source import KernelSource
from penstock.kernels.templates.packed_matmul import clamped

_WARP = 32
_FEATURES, _ROWS = 16, 8  # of a tile
_TILE = _FEATURES * _ROWS
_ITEMS, _WORDS = 8, 4  # neighbouring inputs that a thread reads at once
_CHUNK = 4 * _ITEMS  # inputs of a warp
_STRIDE = 20  # floats between the rows of a tile in local memory: then a warp writes to all of its banks
_LOCAL_BYTES = 40 << 10  # for sums
_READS = 4  # chunks of tiles that a warp reads in a round


@dataclass(frozen=True)
class LinearProblem:
    """The products of `rows` x `inner` items with matrices of `columns` features."""

    x: Memory
    matrices: Sequence[Memory]
    rows: int
    columns: int
    inner: int

    @property
    def row_tiles(self) -> int:
        """The tiles that all rows take."""
        return ceil(self.rows / _ROWS)


@dataclass(frozen=True)
class Division:
    """How a workgroup divides its work: so many `parts` of the inputs, and `across` of the features.

    Each part of each is that of a warp, which has `tiles` of every matrix, and reads so many `chunks` of
    inputs in a round.
    """

    parts: int
    across: int
    tiles: int
    chunks: int

    @property
    def features(self) -> int:
        """The features of a workgroup."""
        return self.across * self.tiles * _FEATURES


@dataclass(frozen=True)
class _Place:
    """Where a thread is in its workgroup: its warp's parts, and its row and column among items of a tile."""

    part: ir.Var  # of the inputs
    across: ir.Var  # of the features
    line: ir.Var  # of 8
    column: ir.Var  # of 4


# Given the row, the column, and the sum of each matrix: statements that compute the outputs and store them.
Finish = Callable[[ir.Expr, ir.Expr, Sequence[ir.Var]], list[ir.Statement]]


def divided(problem: LinearProblem, capabilities: Capabilities) -> Division:
    """How the workgroups of a product divide it."""
    each = len(problem.matrices)
    units = ceil(problem.columns / _FEATURES) * each / capabilities.compute_units  # tiles for each
    wide = each == 1 and problem.row_tiles <= 4  # the sums of two tiles fit into registers
    chunks = ceil(problem.inner / _CHUNK)
    if units > 3:
        parts, across, tiles = 4, 2, 2 if wide else 1
    else:
        parts, across, tiles = 16, 1, 2 if wide and units > 1.5 else 1
    reads = min(max(1, _READS // (tiles * each)), ceil(chunks / parts))
    return Division(min(parts, ceil(chunks / reads)), across, tiles, reads)


def linear_tiles(
    k: KernelBuilder, problem: LinearProblem, division: Division, finish: Finish
) -> KernelSource:
    """A workgroup computes some features of all rows."""
    parts, across = division.parts, division.across
    warp = k.let("warp", k.thread // _WARP)
    place = _Place(
        k.let("part", warp % parts),
        k.let("across", warp // parts),
        k.let("line", k.thread % _WARP // 4),
        k.let("column", k.thread % 4),
    )
    first = k.let("first", k.group() * division.features)
    totals = {
        (matrix, tile, rows): [
            k.variable(f"total{matrix}_{tile}_{rows}_{item}", 0.0, "float32") for item in range(4)
        ]
        for matrix in range(len(problem.matrices))
        for tile in range(division.tiles)
        for rows in range(problem.row_tiles)
    }
    round_ = _Round(k, problem, division, first, place)
    taken = division.chunks * _CHUNK  # inputs of a warp in a round
    rounds = ceil(problem.inner / (parts * taken))
    with k.loop("round", 0, rounds) as number:
        start = k.let("start", (number * parts + place.part) * taken + place.column * _ITEMS)
        round_.add_products(start, rounds * parts * taken > problem.inner, totals)
    _combine(k, problem, division, first, totals, place, finish)
    return k.source((ceil(problem.columns / division.features),), (parts * across * _WARP,))


class _Round:
    """The products of what a warp reads in a round."""

    def __init__(
        self, k: KernelBuilder, problem: LinearProblem, division: Division, first: ir.Expr, place: _Place
    ) -> None:
        self._k, self._problem, self._division = k, problem, division
        self._rows = [
            k.let(
                f"x{rows}", clamped(k, f"row{rows}", place.line + rows * _ROWS, problem.rows) * problem.inner
            )
            for rows in range(problem.row_tiles)
        ]
        self._features: dict[tuple[int, int], ir.Var] = {}  # the first items, by tile and half
        for tile in range(division.tiles):
            for half in range(2):
                offset = tile * _FEATURES + half * (_FEATURES // 2)
                feature = first + place.across * (division.tiles * _FEATURES) + (place.line + offset)
                number = clamped(k, f"feature{tile}_{half}", feature, problem.columns)
                self._features[tile, half] = k.let(f"w{tile}_{half}", number * problem.inner)

    def add_products(
        self, start: ir.Expr, masked: bool, totals: Mapping[tuple[int, int, int], Sequence[ir.Var]]
    ) -> None:
        """Read everything from `start` on; add its products to the totals."""
        k, chunks = self._k, range(self._division.chunks)
        at = [k.let(f"at{chunk}", start + chunk * _CHUNK) for chunk in chunks]
        inside = [
            k.let(f"inside{chunk}", place < self._problem.inner) if masked else None
            for chunk, place in enumerate(at)
        ]
        left = [
            {
                (matrix, *key): self._words(memory, begin + at[chunk], inside[chunk])
                for matrix, memory in enumerate(self._problem.matrices)
                for key, begin in self._features.items()
            }
            for chunk in chunks
        ]
        for chunk in chunks:
            for rows, begin in enumerate(self._rows):
                right = self._words(self._problem.x, begin + at[chunk], inside[chunk])
                for (matrix, tile, other), sums in totals.items():
                    if other == rows:
                        halves = left[chunk][matrix, tile, 0], left[chunk][matrix, tile, 1]
                        self._multiply(sums, halves, right)

    def _words(self, memory: Memory, index: ir.Expr, inside: ir.Expr | None) -> list[ir.Expr]:
        """Neighbouring items, as words of two; zeros where there are none."""
        k, words = self._k, Memory(memory.name, "uint32")
        read = k.let(k.fresh("words"), k.load_vector(words, index, _WORDS, aligned=_WORDS, mask=inside))
        return [k.lane(read, word) for word in range(_WORDS)]

    def _multiply(
        self, sums: Sequence[ir.Var], halves: tuple[list[ir.Expr], list[ir.Expr]], right: list[ir.Expr]
    ) -> None:
        upper, lower = halves
        for word in range(0, _WORDS, 2):
            left = [upper[word], lower[word], upper[word + 1], lower[word + 1]]
            self._k.multiply_tiles(sums, left, right[word : word + 2], self._problem.x.dtype)


def _combine(
    k: KernelBuilder,
    problem: LinearProblem,
    division: Division,
    first: ir.Expr,
    totals: Mapping[tuple[int, int, int], Sequence[ir.Var]],
    place: _Place,
    finish: Finish,
) -> None:
    """Add up the sums of all parts of the inputs, some tiles at a time."""
    each, parts, across, row_tiles = len(problem.matrices), division.parts, division.across, problem.row_tiles
    size = _ROWS * _STRIDE
    tiles = [(tile, rows) for tile in range(division.tiles) for rows in range(row_tiles)]
    most = max(1, _LOCAL_BYTES // (4 * size * each * parts * across))
    held = min(most, len(tiles))  # by a warp, of each matrix
    sums = k.shared("sums", "float32", parts * across * held * each * size)
    for begin in range(0, len(tiles), held):
        some = tiles[begin : begin + held]
        if begin:
            k.barrier()  # the sums before were read
        for at, (tile, rows) in enumerate(some):
            for matrix in range(each):
                slot = ((place.part * across + place.across) * held + at) * each + matrix
                for item, total in enumerate(totals[matrix, tile, rows]):
                    line, offset = place.column * 2 + item % 2, place.line + item // 2 * (_FEATURES // 2)
                    k.store(sums, slot * size + line * _STRIDE + offset, total)
        k.barrier()
        threads, items = parts * across * _WARP, across * len(some) * _TILE
        with k.loop("item", k.thread, items, threads) as number:
            own, group = (
                k.let("own", number // _TILE % len(some)),
                k.let("group", number // (_TILE * len(some))),
            )
            line = k.let("own_line", number // _FEATURES % _ROWS)
            offset = k.let("offset", number % _FEATURES)
            row = k.let("row", (own + begin) % row_tiles * _ROWS + line)
            ahead = (group * division.tiles + (own + begin) // row_tiles) * _FEATURES
            column = k.let("feature", first + ahead + offset)
            with k.when((row < problem.rows) & (column < problem.columns)):
                products = []
                for matrix in range(each):
                    whole = k.variable(f"whole{matrix}", 0.0, "float32")
                    for part in range(parts):
                        slot = ((group + part * across) * held + own) * each + matrix
                        k.assign(whole, whole + k.load(sums, slot * size + line * _STRIDE + offset))
                    products.append(k.let(f"product{matrix}", whole))
                k.splice(finish(row, column, products))
