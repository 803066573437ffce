"""How a CPU tiles a matrix product, by an estimate of the cycles of each choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from penstock.drivers.driver import Capabilities
from penstock.fusion.views import Digits
from penstock.kernels.source import item_size
from penstock.kernels.templates.matmul import Problem, neighbour_stride


@dataclass(frozen=True)
class MicroTile:
    """The product of a panel of the left side by a panel of the right side, whose sums stay in registers."""

    rows: int  # of a panel of the left side
    vectors: int  # columns of a panel of the right side, in vectors
    lanes: int  # of a vector

    @property
    def columns(self) -> int:
        """The columns of a panel of the right side."""
        return self.vectors * self.lanes


@dataclass(frozen=True)
class Tiling:
    """How a CPU tiles the product.

    Tiles are for work-items, blocks of K for the cache, and micro-tiles for registers.
    """

    micro_tile: MicroTile
    row_tiles: int
    column_tiles: int
    depth_blocks: int  # of K
    pack_left: bool
    pack_right: bool
    chunk: int  # panels of the left side that are packed at once
    span: int  # blocks of K that are added up before they are added to the total
    items: int  # of local memory for packed panels and sums

    @property
    def tiles(self) -> int:
        """The number of tiles."""
        return self.row_tiles * self.column_tiles


LANES = 8  # of a vector; twice as many where registers hold them
_ITEM = 4  # bytes of an item of which a register holds as many
CACHE_BYTES = 1 << 20  # of the second level: half for the right side, 3/8 or more for sums, 1/10 for the left
_DEPTH = 512  # steps along K before the next columns
_PACKED_DEPTH = 352  # the same where the left side is packed,
_STREAM_DEPTH = 8  # and where the right side does not stay in the cache
_MANY = 4096  # rows or columns, beyond which the best micro-tile hardly depends on their number
_WASTE = 1.5  # times the cycles, which a kernel for many sizes may take
_DIRECT_LEFT = 1 << 15  # items of a transposed left side that is not packed, since it stays in the cache,
_DIRECT_RIGHT = 1 << 16  # and of such a right side
_FEW_ROWS = 128  # that do not pay for packing windows,
_FEWER_ROWS = 12  # and for packing a right side that lies in rows


def tiling(problem: Problem, capabilities: Capabilities) -> Tiling:
    """The tiling with the fewest estimated cycles."""
    left = problem.left
    plain = not isinstance(left.row_stride, Digits) and not isinstance(left.column_stride, Digits)
    small = left.row_stride == 1 and problem.rows * problem.inner <= _DIRECT_LEFT
    pack_left = not (plain and left.is_summed and (left.column_stride == 1 or small))
    micro_tiles = list(_micro_tiles(problem, capabilities))

    def best_for(size: Problem) -> Tiling:
        micro_tile = min(micro_tiles, key=lambda tile: _cycles(size, tile, pack_left))
        return _tiling_with(problem, capabilities, micro_tile, pack_left)

    plan = best_for(problem)
    # The rows of a product with windows are channels, which vary little.
    if problem.varied and not reads_windows(problem, plan.micro_tile):
        # The micro-tile that is best for large sizes, if that adds in the same order and suits this size.
        usual = best_for(replace(problem, rows=_MANY, columns=_MANY))
        same_order = (usual.depth_blocks, usual.span) == (plan.depth_blocks, plan.span)
        cycles = [_cycles(problem, each.micro_tile, pack_left) for each in (usual, plan)]
        if same_order and cycles[0] <= _WASTE * cycles[1]:
            return usual
    return plan


def _tiling_with(
    problem: Problem, capabilities: Capabilities, micro_tile: MicroTile, pack_left: bool
) -> Tiling:
    """The best tiling with a micro-tile."""
    inner = problem.inner
    rows, width = micro_tile.rows, micro_tile.columns
    row_panels, column_panels = ceil(problem.rows / rows), ceil(problem.columns / width)
    windows = reads_windows(problem, micro_tile)
    pack_right = _packs_right(problem, micro_tile)
    stream_right = not pack_right and not windows and inner * problem.columns > _DIRECT_RIGHT
    fetching_left = _fetch_left(rows, pack_left) * inner
    fetching_right = pack_right * _fetch_right(problem, micro_tile) * inner

    items = min(CACHE_BYTES, capabilities.local_bytes) // item_size(problem.dtype)
    left_steps = items // 10 // (ceil(rows / LANES) * LANES)
    right_steps = items // 2 // width
    deepest = min(left_steps, right_steps, _DEPTH) if pack_left else min(right_steps, 2 * _DEPTH)
    good = min(deepest, _PACKED_DEPTH if pack_left else _DEPTH)
    depth_blocks = 1 if inner <= deepest else ceil(inner / good)
    if stream_right:  # in the order of the memory, since it is read at most twice
        depth_blocks = ceil(inner / _STREAM_DEPTH)
    depth = ceil(inner / depth_blocks)
    span = 1 if not stream_right else _DEPTH // depth if inner > 2 * _DEPTH else depth_blocks
    sums = items * 3 // 8 // (2 if 1 < span < depth_blocks else 1)
    if pack_right:  # what it leaves, if it is small
        sums = max(sums, items * 7 // 8 - column_panels * width * depth)
    widest = sums // (rows * width) if stream_right else right_steps // depth
    widest = column_panels if windows else widest
    cycles = _step(micro_tile) * inner + 40 * depth_blocks  # of a micro-tile
    choices = []
    for column_tiles in _counts(ceil(column_panels / widest), column_panels):
        wide = ceil(column_panels / column_tiles)
        highest = row_panels if depth_blocks == 1 else max(1, sums // (wide * width * rows))
        for row_tiles in _counts(ceil(row_panels / highest), row_panels):
            high = ceil(row_panels / row_tiles)
            tile = high * wide * cycles + high * fetching_left + wide * fetching_right + 500
            rounds = ceil(problem.batch * row_tiles * column_tiles / capabilities.compute_units)
            choices.append((rounds * tile, row_tiles, column_tiles))
    _, row_tiles, column_tiles = min(choices)
    chunk = max(1, min(8, left_steps // depth))
    return Tiling(
        micro_tile, row_tiles, column_tiles, depth_blocks, pack_left, pack_right, chunk, span, items
    )


def reads_windows(problem: Problem, micro_tile: MicroTile) -> bool:
    """Whether the right side is read in place although its steps are not evenly apart.

    Such are the windows of images. Few rows would not use what is packed often enough. Vectors are contiguous
    where they begin at multiples of their width, as panels do.
    """
    right, lanes = problem.right, micro_tile.lanes
    if not isinstance(right.row_stride, Digits) or not isinstance(right.column_stride, Digits):
        return False
    divisor, length, stride = right.column_stride.parts[-1]
    contiguous = (divisor, stride) == (1, 1) and length % lanes == 0 and problem.columns % lanes == 0
    few = problem.rows <= _FEW_ROWS and problem.columns >= micro_tile.columns
    return contiguous and few and right.memory.dtype == "float32"


def most_lanes(capabilities: Capabilities) -> int:
    """The lanes of a vector register of a device."""
    return 2 * LANES if capabilities.vector_width >= 2 * LANES else LANES


def most_sums(lanes: int) -> int:
    """The registers that hold sums, where there are twice as many for wide vectors."""
    return 12 * lanes // LANES


def _micro_tiles(problem: Problem, capabilities: Capabilities) -> Iterator[MicroTile]:
    """Those that fit into registers and into the product."""
    wide = most_lanes(capabilities)
    if item_size(problem.dtype) > _ITEM:  # as many registers as for vectors of twice as many items, or half
        yield from _with_lanes(problem, LANES, wide if wide > LANES else LANES // 2)
        return
    yield from _with_lanes(problem, LANES, LANES)
    in_place = [reads_windows(problem, MicroTile(1, 1, lanes)) for lanes in (LANES, wide)]
    if LANES < wide <= problem.columns and in_place[0] == in_place[1]:
        yield from _with_lanes(problem, wide, wide)


def _with_lanes(problem: Problem, lanes: int, half: int) -> Iterator[MicroTile]:
    """Micro-tiles of vectors of so many items, `half` of the registers of which there are."""
    sums, registers = most_sums(half), 2 * half
    for vectors in range(1, max(1, min(sums // 2, problem.columns // lanes)) + 1):
        most = min(problem.rows, sums // vectors, (registers - 1) // vectors - 1)
        yield from (MicroTile(rows, vectors, lanes) for rows in range(1, most + 1))


def _step(tile: MicroTile) -> float:
    """Cycles per step along K: two sums or loads per cycle, and a latency of 4 cycles for a sum."""
    return max(tile.rows * tile.vectors / 2, (tile.rows + tile.vectors) / 2, 4) + 0.6


def _fetch_left(rows: int, pack_left: bool) -> int:
    """Cycles to fetch a panel of the left side, per step along K."""
    return ceil(rows / LANES) * LANES if pack_left else rows


def _packs_right(problem: Problem, tile: MicroTile) -> bool:
    """Whether the right side is packed."""
    right, large = problem.right, problem.inner * problem.columns > _DIRECT_RIGHT
    return not reads_windows(problem, tile) and (
        right.column_stride != 1
        or isinstance(right.row_stride, Digits)
        or not right.is_summed
        or problem.columns < tile.columns
        or (large and problem.rows > _FEWER_ROWS)
    )


def _fetch_right(problem: Problem, tile: MicroTile) -> int:
    """Cycles to fetch a panel of the right side, per step along K."""
    in_vectors = neighbour_stride(problem.right.column_stride) == 1
    return tile.columns // LANES * (8 if in_vectors else 10)


def _cycles(problem: Problem, tile: MicroTile, pack_left: bool) -> float:
    """Cycles of the whole product, per step along K."""
    panels = ceil(problem.columns / tile.columns)
    fetching = ceil(problem.columns / 256) * _fetch_left(tile.rows, pack_left)
    multiplying = ceil(problem.rows / tile.rows) * (panels * _step(tile) + fetching)
    return multiplying + _packs_right(problem, tile) * panels * _fetch_right(problem, tile)


def _counts(fewest: int, most: int) -> Iterator[int]:
    """Candidates for the number of tiles along a side: not all, as there may be thousands."""
    count = max(fewest, 1)
    while count <= most:
        yield count
        count += max(1, count // 4)
