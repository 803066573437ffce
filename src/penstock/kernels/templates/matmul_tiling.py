"""How a CPU tiles a matrix product, by an estimate of the cycles of each choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from penstock.drivers.driver import Capabilities
from penstock.fusion.views import Digits
from penstock.kernels.templates.matmul import Problem, neighbour_stride


@dataclass(frozen=True)
class Tiling:
    """How a CPU tiles the product.

    Tiles are for work-items, blocks of K for the cache, and micro-tiles, the product of a panel of the left
    side by a panel of the right side, for registers.
    """

    rows: int  # of a panel of the left side
    vectors: int  # columns of a panel of the right side, in vectors
    row_tiles: int
    column_tiles: int
    depth_blocks: int  # of K
    pack_left: bool
    pack_right: bool
    chunk: int  # panels of the left side that are packed at once
    span: int  # blocks of K that are added up before they are added to the total
    floats: int  # of local memory for packed panels and sums

    @property
    def tiles(self) -> int:
        """The number of tiles."""
        return self.row_tiles * self.column_tiles


LANES = 8  # of a vector
_REGISTERS = 16  # for vectors
SUMS = 12  # registers that hold sums
CACHE_BYTES = 1 << 20  # of the second level: half for the right side, 3/8 or more for sums, 1/10 for the left
_DEPTH = 512  # steps along K before the next columns
_PACKED_DEPTH = 352  # the same where the left side is packed,
_STREAM_DEPTH = 8  # and where the right side does not stay in the cache
_MANY = 4096  # rows or columns, beyond which the best micro-tile hardly depends on their number
_DIRECT_LEFT = 1 << 15  # items of a transposed left side that is not packed, since it stays in the cache,
_DIRECT_RIGHT = 1 << 16  # and of such a right side
_FEW_ROWS = 128  # that do not pay for packing windows


def tiling(problem: Problem, capabilities: Capabilities) -> Tiling:
    """The tiling with the fewest estimated cycles."""
    left = problem.left
    plain = not isinstance(left.row_stride, Digits) and not isinstance(left.column_stride, Digits)
    small = left.row_stride == 1 and problem.rows * problem.inner <= _DIRECT_LEFT
    pack_left = not (plain and left.memory.dtype == "float32" and (left.column_stride == 1 or small))
    micro_tiles = list(_micro_tiles(problem))

    def best_for(size: Problem) -> Tiling:
        rows, vectors = min(micro_tiles, key=lambda tile: _cycles(size, tile[0], tile[1], pack_left))
        return _tiling_with(problem, capabilities, rows, vectors, pack_left)

    plan = best_for(problem)
    # The rows of a product with windows are channels, which vary little.
    if problem.varied and not reads_windows(problem, plan.vectors * LANES):
        # The micro-tile that is best for large sizes, if that adds in the same order.
        usual = best_for(replace(problem, rows=_MANY, columns=_MANY))
        if (usual.depth_blocks, usual.span) == (plan.depth_blocks, plan.span):
            return usual
    return plan


def _tiling_with(
    problem: Problem, capabilities: Capabilities, rows: int, vectors: int, pack_left: bool
) -> Tiling:
    """The best tiling with a micro-tile of some rows and vectors."""
    right, inner = problem.right, problem.inner
    in_vectors = neighbour_stride(right.column_stride) == 1
    width = vectors * LANES
    row_panels, column_panels = ceil(problem.rows / rows), ceil(problem.columns / width)
    windows = reads_windows(problem, width)
    pack_right = not windows and (
        right.column_stride != 1
        or isinstance(right.row_stride, Digits)
        or right.memory.dtype != "float32"
        or problem.columns < width
        or (inner * problem.columns > _DIRECT_RIGHT and row_panels > 4)
    )
    stream_right = not pack_right and not windows and inner * problem.columns > _DIRECT_RIGHT
    fetching_left = _fetch_left(rows, pack_left) * inner
    fetching_right = pack_right * vectors * (8 if in_vectors else 10) * inner

    floats = min(CACHE_BYTES, capabilities.local_bytes) // 4
    left_steps = floats // 10 // (ceil(rows / LANES) * LANES)
    right_steps = floats // 2 // width
    deepest = min(left_steps, right_steps, _DEPTH) if pack_left else min(right_steps, 2 * _DEPTH)
    good = min(deepest, _PACKED_DEPTH if pack_left else _DEPTH)
    depth_blocks = 1 if inner <= deepest else ceil(inner / good)
    if stream_right:  # in the order of the memory, since it is read at most twice
        depth_blocks = ceil(inner / _STREAM_DEPTH)
    depth = ceil(inner / depth_blocks)
    span = 1 if not stream_right else _DEPTH // depth if inner > 2 * _DEPTH else depth_blocks
    sums = floats * 3 // 8 // (2 if 1 < span < depth_blocks else 1)
    if pack_right:  # what it leaves, if it is small
        sums = max(sums, floats * 7 // 8 - column_panels * width * depth)
    widest = sums // (rows * width) if stream_right else right_steps // depth
    widest = column_panels if windows else widest
    micro_tile = _step(rows, vectors) * inner + 40 * depth_blocks  # cycles
    choices = []
    for column_tiles in _counts(ceil(column_panels / widest), column_panels):
        wide = ceil(column_panels / column_tiles)
        highest = row_panels if depth_blocks == 1 else max(1, sums // (wide * width * rows))
        for row_tiles in _counts(ceil(row_panels / highest), row_panels):
            high = ceil(row_panels / row_tiles)
            tile = high * wide * micro_tile + high * fetching_left + wide * fetching_right + 500
            rounds = ceil(problem.batch * row_tiles * column_tiles / capabilities.compute_units)
            choices.append((rounds * tile, row_tiles, column_tiles))
    _, row_tiles, column_tiles = min(choices)
    chunk = max(1, min(8, left_steps // depth))
    return Tiling(
        rows, vectors, row_tiles, column_tiles, depth_blocks, pack_left, pack_right, chunk, span, floats
    )


def reads_windows(problem: Problem, width: int) -> bool:
    """Whether the right side is read in place although its steps are not evenly apart.

    Such are the windows of images. Few rows would not use what is packed often enough. Vectors are contiguous
    where they begin at multiples of their width, as panels do.
    """
    right = problem.right
    if not isinstance(right.row_stride, Digits) or not isinstance(right.column_stride, Digits):
        return False
    divisor, length, stride = right.column_stride.parts[-1]
    contiguous = (divisor, stride) == (1, 1) and length % LANES == 0 and problem.columns % LANES == 0
    few = problem.rows <= _FEW_ROWS and problem.columns >= width
    return contiguous and few and right.memory.dtype == "float32"


def _micro_tiles(problem: Problem) -> Iterator[tuple[int, int]]:
    """Rows and vectors of sums that fit into registers and into the product."""
    for vectors in range(1, max(1, min(SUMS // 2, problem.columns // LANES)) + 1):
        most = min(problem.rows, SUMS // vectors, (_REGISTERS - 1) // vectors - 1)
        yield from ((rows, vectors) for rows in range(1, most + 1))


def _step(rows: int, vectors: int) -> float:
    """Cycles per step along K: two sums or loads per cycle, and a latency of 4 cycles for a sum."""
    return max(rows * vectors / 2, (rows + vectors) / 2, 4) + 0.6


def _fetch_left(rows: int, pack_left: bool) -> int:
    """Cycles to fetch a panel of the left side, per step along K."""
    return ceil(rows / LANES) * LANES if pack_left else rows


def _cycles(problem: Problem, rows: int, vectors: int, pack_left: bool) -> float:
    """Cycles of the whole product, per step along K."""
    across = ceil(problem.columns / (vectors * LANES)) * _step(rows, vectors)
    return ceil(problem.rows / rows) * (across + ceil(problem.columns / 256) * _fetch_left(rows, pack_left))


def _counts(fewest: int, most: int) -> Iterator[int]:
    """Candidates for the number of tiles along a side: not all, as there may be thousands."""
    count = max(fewest, 1)
    while count <= most:
        yield count
        count += max(1, count // 4)
