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
_ROOM = _ROWS * _STRIDE  # floats for a tile
_LOCAL_BYTES = 48 << 10
_FEW_BYTES = 64 << 10  # of rows, which a workgroup may read for a tile of features
_WARPS = 8  # of a workgroup
_FEW_INPUTS = 8 * _WARPS * _CHUNK  # of which a workgroup reads a tile at once
_RESIDENT = 2  # workgroups of a compute unit


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
    """How the work is divided: a workgroup has so many `parts` of the inputs, and `across` of the features.

    Each part of each is that of a warp, which has `tiles` of every matrix, and reads so many `chunks` of
    inputs in a round. `splits` workgroups, a cluster, share the inputs.
    """

    parts: int
    across: int
    tiles: int
    chunks: int
    splits: int = 1

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


# What a thread read of the matrices, by chunk: where it begins, whether it is inside, and the words of each
# matrix and half of a tile.
_Words = Sequence[tuple[ir.Var, ir.Var | None, Mapping[tuple[int, int], list[ir.Expr]]]]
Totals = Mapping[tuple[int, int, int], Sequence[ir.Var]]  # by matrix, tile and tile of rows
# Given the row, the column, and the sum of each matrix: statements that compute the outputs and store them.
Finish = Callable[[ir.Expr, ir.Expr, Sequence[ir.Var]], list[ir.Statement]]


def divided(problem: LinearProblem, capabilities: Capabilities) -> Division:
    """How the workgroups of a product divide it."""
    each = len(problem.matrices)
    units = ceil(problem.columns / _FEATURES) * each / capabilities.compute_units  # tiles for each
    at_once = each == 1 and units <= 1.5 and problem.inner <= _FEW_INPUTS
    splits = 1 if units > 3 or at_once or not capabilities.clusters else _splits(problem)
    together = splits * (4 // each if units > 3 else 2 if units > 1.5 else 1)  # tiles of a workgroup
    wide = each == 1 and problem.row_tiles <= 4  # the sums of two tiles fit into registers
    tiles = 2 if wide and together > 1 else 1
    across = together // tiles
    chunks = ceil(problem.inner / (_CHUNK * splits))
    sums = tiles * each * problem.row_tiles
    most = 8 if sums <= 4 else 4 if sums <= 8 else 2  # chunks of tiles that a warp has registers for
    reads = min(most // (tiles * each), ceil(chunks * across / _WARPS))
    return Division(min(_WARPS // across, ceil(chunks / reads)), across, tiles, reads, splits)


def _splits(problem: LinearProblem) -> int:
    """How many workgroups share the inputs.

    Every workgroup reads its inputs of all rows. With few features, that is more than it reads of the matrix.
    """
    nbytes = 2 * problem.rows * problem.inner
    return 1 if nbytes <= _FEW_BYTES else 2 if nbytes <= 2 * _FEW_BYTES else 4


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
    splits = division.splits
    rank = k.let("rank", k.group() % splits if splits > 1 else 0)
    first = k.let("first", k.group() // splits * division.features)
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
    rounds = ceil(problem.inner / (splits * parts * taken))
    masked = rounds * splits * parts * taken > problem.inner

    def read(number: ir.Expr) -> _Words:
        warps = (number * splits + rank) * parts + place.part  # those before
        return round_.read(k.let("start", warps * taken + place.column * _ITEMS), masked)

    words = read(ir.Const(0))
    k.wait_for_earlier(problem.matrices)
    round_.add_products(words, totals)
    if rounds > 1:
        with k.loop("round", 1, rounds) as number:
            round_.add_products(read(number), totals)
    _Sums(k, problem, division, first, finish).combine(totals, place, rank)
    grid = ceil(problem.columns / division.features) * splits
    return k.source((grid,), (parts * across * _WARP,), _RESIDENT, cluster=splits)


class _Round:
    """The products of what a warp reads in a round."""

    def __init__(
        self, k: KernelBuilder, problem: LinearProblem, division: Division, first: ir.Expr, place: _Place
    ) -> None:
        self._k, self._problem, self._division = k, problem, division
        tops = [rows * _ROWS for rows in range(problem.row_tiles)]
        self._rows = self._starts("x", place.line, tops, problem.rows, problem.rows - _ROWS)
        feature = first + place.across * (division.tiles * _FEATURES) + place.line
        halves = [half * (_FEATURES // 2) for half in range(2 * division.tiles)]
        even = problem.columns % division.features == 0
        self._features = self._starts("w", feature, halves, problem.columns, halves[-1] if even else -1)

    def _starts(
        self, name: str, number: ir.Expr, offsets: Sequence[int], length: int, certain: int
    ) -> list[ir.Expr]:
        """The first items of lines, some after a thread's own; up to the offset `certain` they are inside.

        Those differ by constants, which are part of an instruction and take no register.
        """
        k, inner = self._k, self._problem.inner
        own = k.let(name, number * inner)
        return [
            own + offset * inner
            if offset <= certain
            else k.let(f"{name}{offset}", clamped(k, f"{name}_line{offset}", number + offset, length) * inner)
            for offset in offsets
        ]

    def read(self, start: ir.Expr, masked: bool) -> _Words:
        """Read the matrices from `start` on."""
        k, chunks = self._k, range(self._division.chunks)
        at = [k.let(f"at{chunk}", start + chunk * _CHUNK) for chunk in chunks]
        inside = [
            k.let(f"inside{chunk}", place < self._problem.inner) if masked else None
            for chunk, place in enumerate(at)
        ]
        left = [
            {
                (matrix, half): self._words(memory, begin + at[chunk], inside[chunk])
                for matrix, memory in enumerate(self._problem.matrices)
                for half, begin in enumerate(self._features)
            }
            for chunk in chunks
        ]
        return [*zip(at, inside, left, strict=True)]

    def add_products(self, words: _Words, totals: Totals) -> None:
        """Add the products of what was read of the matrices to the totals."""
        k = self._k
        with k.optimization_barrier(k.fresh("once")) as none:  # the matrices are read before
            for at, inside, left in words:
                for rows, begin in enumerate(self._rows):
                    right = self._words(self._problem.x, begin + (at + none), inside)
                    for (matrix, tile, other), sums in totals.items():
                        if other == rows:
                            self._multiply(sums, (left[matrix, 2 * tile], left[matrix, 2 * tile + 1]), right)

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


class _Sums:
    """Adds up the sums of all parts of the inputs, and finishes them."""

    def __init__(
        self, k: KernelBuilder, problem: LinearProblem, division: Division, first: ir.Expr, finish: Finish
    ) -> None:
        self._k, self._problem, self._division = k, problem, division
        self._first, self._finish = first, finish
        self._each, self._threads = len(problem.matrices), division.parts * division.across * _WARP
        self._tiles = [(tile, rows) for tile in range(division.tiles) for rows in range(problem.row_tiles)]
        self._items = division.across * len(self._tiles) * _TILE  # of each matrix

    def combine(self, totals: Totals, place: _Place, rank: ir.Expr) -> None:
        """Add up the totals of all warps, some tiles at a time."""
        k, parts, across, tiles = self._k, self._division.parts, self._division.across, self._tiles
        splits = self._division.splits
        kept = k.shared("kept", "float32", self._each * self._items) if splits > 1 else None
        room = _LOCAL_BYTES - (4 * self._each * self._items if splits > 1 else 0)
        held = max(1, min(room // (4 * _ROOM * self._each * parts * across), len(tiles)))
        sums = k.shared("sums", "float32", parts * across * held * self._each * _ROOM)
        for begin in range(0, len(tiles), held):
            if begin:
                k.barrier()  # the sums before were read
            for at, key in enumerate(tiles[begin : begin + held]):
                for matrix in range(self._each):
                    slot = ((place.part * across + place.across) * held + at) * self._each + matrix
                    for item, total in enumerate(totals[matrix, *key]):
                        line, offset = place.column * 2 + item % 2, place.line + item // 2 * (_FEATURES // 2)
                        k.store(sums, slot * _ROOM + line * _STRIDE + offset, total)
            k.barrier()
            self._add_parts(sums, begin, held, kept)
        if kept is not None:
            k.cluster_barrier()
            self._add_splits(kept, rank)
            k.cluster_barrier()  # no workgroup may end before the others have read its sums

    def _add_parts(self, sums: Memory, begin: int, held: int, kept: Memory | None) -> None:
        """Finish what all warps have of some tiles; or keep it."""
        k, each, parts, across = self._k, self._each, self._division.parts, self._division.across
        some = min(held, len(self._tiles) - begin)
        with k.loop("item", k.thread, across * some * _TILE, self._threads) as number:
            group = k.let("group", number // (_TILE * some))
            own = k.let("own", number // _TILE % some)
            inside = number % _TILE // _FEATURES * _STRIDE + number % _FEATURES
            item = k.let("place", (group * len(self._tiles) + (own + begin)) * _TILE + number % _TILE)

            def whole(matrix: int) -> ir.Var:
                total = k.variable(f"whole{matrix}", 0.0, "float32")
                for part in range(parts):
                    slot = ((group + part * across) * held + own) * each + matrix
                    k.assign(total, total + k.load(sums, slot * _ROOM + inside))
                return k.let(f"product{matrix}", total)

            if kept is None:
                self._finish_item(item, whole)
            else:
                for matrix in range(each):
                    k.store(kept, item + matrix * self._items, whole(matrix))

    def _add_splits(self, kept: Memory, rank: ir.Expr) -> None:
        """Finish a share of what the workgroups of a cluster have kept."""
        k, splits = self._k, self._division.splits
        share = self._items // splits
        with k.loop("item", rank * share + k.thread, (rank + 1) * share, self._threads) as item:
            self._finish_item(
                item,
                lambda matrix: k.cluster_sum(f"product{matrix}", kept, item + matrix * self._items, splits),
            )

    def _finish_item(self, item: ir.Expr, whole: Callable[[int], ir.Var]) -> None:
        """Finish an item of all tiles: neighbours are neighbouring features."""
        k, tiles, rows = self._k, len(self._tiles), self._problem.row_tiles
        row = k.let("row", item // _TILE % rows * _ROWS + item // _FEATURES % _ROWS)
        tile = item // (_TILE * tiles) * self._division.tiles + item // (_TILE * rows) % self._division.tiles
        column = k.let("feature", self._first + tile * _FEATURES + item % _FEATURES)
        with k.when((row < self._problem.rows) & (column < self._problem.columns)):
            k.splice(self._finish(row, column, [whole(matrix) for matrix in range(self._each)]))
