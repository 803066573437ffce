"""Matrix products on a GPU: the threads of a workgroup share a tile's operands, or the sums of few items.

The order of sums is fixed, so the bits of a product are always the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, gcd

from penstock.drivers.driver import Capabilities
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.dialects import dialect_of
from penstock.kernels.ir.expressions import Expr, Var, all_of
from penstock.kernels.source import WORD, KernelSource, item_size
from penstock.kernels.templates.matmul import BATCH, Epilogue, Problem, neighbour_stride, offset

_TILE_DEPTH = 16
_SMALL = 1 << 22  # multiplications, up to which a product may have no tiles
_SMALL_THREADS = 128  # of a workgroup, for a small product
_MOST_PARTS = 32  # of a sum
_STEPS = 8  # of a thread along K, if there are enough parts


@dataclass(frozen=True)
class _Tuning:
    """How products are tiled in a language."""

    vector: int  # neighbours that are a vector in local memory
    tiles: tuple[tuple[int, int], ...]  # threads of a workgroup, and items of a thread, along a side
    filled: float  # the part of a tile that has to be inside the matrices, or a smaller tile is taken
    least_filled: float  # the same for the smallest tile; below, a small product has no tiles
    tiles_small: bool  # whether a small product has tiles if there are enough for all compute units
    unrolled: int  # unroll factor along K; 0 leaves it to the compiler


_SCALARS = _Tuning(1, ((16, 8), (16, 4), (16, 2)), 0, 0, False, 0)
_VECTORS = _Tuning(4, ((16, 8), (16, 4), (8, 4)), 0.5, 0.25, True, 4)


def gpu_matmul(
    k: KernelBuilder, problem: Problem, capabilities: Capabilities, epilogue: Epilogue, width: int = 1
) -> KernelSource:
    """The kernel of a product. The epilogue takes `width` neighbours at a time."""
    build = _few_items if _is_small(problem, capabilities) else _tiles
    return build(k, problem, capabilities, epilogue, width)


def gpu_width(problem: Problem, capabilities: Capabilities, outputs: Sequence[str]) -> int:
    """How many neighbours of a row an epilogue may take that stores these dtypes."""
    if not dialect_of(capabilities).word_access:
        return 1
    together = max(WORD // item_size(dtype) for dtype in (*outputs, "float32"))  # of a word
    return gcd(problem.columns, together if _is_small(problem, capabilities) else _VECTORS.vector)


def _tuning(capabilities: Capabilities) -> _Tuning:
    return _VECTORS if dialect_of(capabilities).word_access else _SCALARS


def _is_small(problem: Problem, capabilities: Capabilities) -> bool:
    """Whether there would be too few tiles for the device, or too little in them."""
    if problem.batch * problem.rows * problem.columns * problem.inner > _SMALL:
        return False
    tuning = _tuning(capabilities)
    side, each = tuning.tiles[-1]
    count, filled = _tiling(problem, side * each)
    return not tuning.tiles_small or count < capabilities.compute_units or filled < tuning.least_filled


def _tiling(problem: Problem, size: int) -> tuple[int, float]:
    """The number of tiles of a size, and the part of them that is inside the matrices."""
    tiles = ceil(problem.rows / size) * ceil(problem.columns / size)
    return problem.batch * tiles, problem.rows * problem.columns / (tiles * size**2)


def _few_items(
    k: KernelBuilder, problem: Problem, capabilities: Capabilities, epilogue: Epilogue, width: int
) -> KernelSource:
    """Each thread computes a part of the sums of some neighbours; the first of them adds the parts up.

    Neighbouring threads read neighbours of the right side: for parts of the same item, or for neighbouring
    items.
    """
    threads = min(_SMALL_THREADS, capabilities.max_group_size)
    parts = 1
    while parts < min(_MOST_PARTS, threads) and parts * _STEPS < problem.inner:
        parts *= 2
    items, columns = threads // parts, problem.columns // width
    total = problem.batch * problem.rows * columns
    along = neighbour_stride(problem.right.row_stride) == 1  # neighbouring threads have parts of one item
    part = k.let("part", k.thread % parts if along else k.thread // items)
    slot = k.let("slot", k.thread // parts if along else k.thread % items)
    item = k.let("item", k.group() * items + slot)
    k.let(BATCH.name, item // (problem.rows * columns))
    row = k.let("row", item // columns % problem.rows)
    column = k.let("column", item % columns * width)
    sums = [k.variable(f"sum{lane}", 0.0, "float32") for lane in range(width)]
    with k.when(item < total), k.loop("step", part, problem.inner, parts, unrolled=_STEPS) as step:
        left = k.let("left", k.load(problem.left.memory, problem.left.index(row, step)))
        for lane, total_of_lane in enumerate(sums):
            place = problem.right.index(step, column + lane)
            k.multiply_add(total_of_lane, left, k.load(problem.right.memory, place))
    if parts > 1:
        shared = k.shared("parts", "float32", threads * width)
        for lane, total_of_lane in enumerate(sums):
            k.store(shared, k.thread + lane * threads, total_of_lane)
        k.barrier()
        first, stride = (slot * parts, 1) if along else (slot, items)
        with k.when(part.eq(0)), k.loop("other", 0, parts - 1, unrolled=parts - 1) as other:
            for lane, total_of_lane in enumerate(sums):
                place = first + (other + 1) * stride + lane * threads
                k.assign(total_of_lane, k.combine("sum", total_of_lane, k.load(shared, place)))
    with k.when(part.eq(0) & (item < total)):
        product = k.let("product", k.vector(sums))
        k.splice(epilogue(row, column, product))
    return k.source((ceil(total / items),), (threads,))


class _Tile:
    """A square tile of the product, of which each thread computes squares of `vector` x `vector` items.

    The squares of a thread are as far apart as the squares of all threads reach, so that neighbouring threads
    have neighbouring columns, in local memory and where the epilogue stores them.
    """

    def __init__(self, side: int, each: int, vector: int) -> None:
        """`side`: threads along a side; `each`: items of a thread along a side."""
        self.side, self.each, self.vector = side, each, vector
        self.size = side * each  # rows and columns of the tile
        self.squares = each // vector  # of a thread, along a side
        self.vectors = self.size // vector  # of an operand's tile, at a step along K
        self.pitch = self.vectors + (vector == 1)  # vectors from step to step; padded against bank conflicts
        self.floats = _TILE_DEPTH * self.pitch * vector  # of an operand's tile

    def index(self, step: Expr, number: Expr) -> Expr:
        """Where a vector of an operand's tile lies."""
        place = step * self.pitch + number
        return place * self.vector if self.vector > 1 else place

    def line(self, begin: Expr, thread: Expr, square: Expr) -> Expr:
        """The first row or column of a thread's square."""
        return begin + square * (self.side * self.vector) + thread * self.vector


def _tile(problem: Problem, capabilities: Capabilities) -> tuple[_Tile, int]:
    """The largest tile that keeps all compute units busy, and the number of tiles."""
    tuning = _tuning(capabilities)
    most = 16 if capabilities.max_group_size >= 256 else 8
    for side, each in tuning.tiles:
        tile = _Tile(min(side, most), each, tuning.vector)
        count, filled = _tiling(problem, tile.size)
        fits = 8 * tile.floats <= capabilities.local_bytes
        if fits and count >= 2 * capabilities.compute_units and filled >= tuning.filled:
            break
    return tile, count


def _tiles(
    k: KernelBuilder, problem: Problem, capabilities: Capabilities, epilogue: Epilogue, width: int
) -> KernelSource:
    """A workgroup computes a tile, with some steps along K of both operands in local memory at a time."""
    tile, count = _tile(problem, capabilities)
    side, size, vector = tile.side, tile.size, tile.vector
    row_tiles, column_tiles = ceil(problem.rows / size), ceil(problem.columns / size)
    left_tile, right_tile = (
        k.shared(f"{name}_tile", "float32", tile.floats, width=vector) for name in ("left", "right")
    )
    k.let(BATCH.name, k.group() // (row_tiles * column_tiles))
    top = k.let("top", k.group() // column_tiles % row_tiles * size)
    start = k.let("start", k.group() % column_tiles * size)
    thread_row, thread_column = k.let("thread_row", k.thread // side), k.let("thread_column", k.thread % side)
    zero = k.identity("sum", "float32", vector)
    sums = [
        [k.variable(f"sum{row}_{square}", zero) for square in range(tile.squares)] for row in range(tile.each)
    ]
    with k.loop("first", 0, problem.inner, _TILE_DEPTH) as first:
        _load_tile(k, problem, tile, left_tile, top, first)
        _load_tile(k, problem, tile, right_tile, start, first)
        k.barrier()
        with k.loop("step", 0, _TILE_DEPTH, unrolled=_tuning(capabilities).unrolled) as step:
            lefts = _vectors(k, tile, "left", left_tile, step, thread_row)
            rights = _vectors(k, tile, "right", right_tile, step, thread_column)
            for row, row_sums in enumerate(sums):
                factor = k.lane(lefts[row // vector], row % vector)
                for row_sum, right in zip(row_sums, rights, strict=True):
                    k.multiply_add(row_sum, factor, right)
        k.barrier()
    _finish(k, problem, tile, sums, (top, thread_row), (start, thread_column), epilogue, width)
    return k.source((count,), (side**2,))


def _vectors(k: KernelBuilder, tile: _Tile, name: str, memory: Memory, step: Expr, thread: Expr) -> list[Var]:
    """A thread's operands from a side's tile, at a step along K."""
    indices = [tile.index(step, thread + square * tile.side) for square in range(tile.squares)]
    loads = [k.load_vector(memory, index, tile.vector) for index in indices]
    return [k.let(f"{name}{square}", load) for square, load in enumerate(loads)]


def _load_tile(
    k: KernelBuilder, problem: Problem, tile: _Tile, memory: Memory, begin: Expr, first: Expr
) -> None:
    """Fill a side's tile for the steps from `first` on, in the order of the memory, with zeros outside.

    All threads fill the same number of vectors.
    """
    left = memory.name == "left_tile"
    matrix, length = (problem.left, problem.rows) if left else (problem.right, problem.columns)
    stride, k_stride = matrix.row_stride, matrix.column_stride
    if not left:
        stride, k_stride = k_stride, stride
    threads = tile.side**2
    turns = tile.vectors * _TILE_DEPTH // threads
    with k.loop("turn", 0, turns, unrolled=turns) as turn:
        task = k.let("task", k.thread + turn * threads)
        along = neighbour_stride(k_stride) == 1  # neighbouring threads read neighbouring steps
        step = k.let("step", task % _TILE_DEPTH if along else task // tile.vectors)
        number = k.let("number", task // _TILE_DEPTH if along else task % tile.vectors)
        line = k.let("line", begin + (number * tile.vector if tile.vector > 1 else number))
        items: list[Expr] = []
        for lane in range(tile.vector):
            at = line + lane if lane else line
            inside = []
            if length % tile.size or problem.varied:
                inside.append(at < length)
            if problem.inner % _TILE_DEPTH or problem.varied:
                inside.append(first + step < problem.inner)
            place = matrix.base + offset(at, stride) + offset(first + step, k_stride)
            mask = all_of(inside) if inside else None
            items.append(k.let(f"item{lane}", k.load(matrix.memory, place, mask)))
        k.store(memory, tile.index(step, number), k.let("neighbours", k.vector(items)))


def _finish(
    k: KernelBuilder,
    problem: Problem,
    tile: _Tile,
    sums: list[list[Var]],
    rows: tuple[Expr, Expr],
    columns: tuple[Expr, Expr],
    epilogue: Epilogue,
    width: int,
) -> None:
    """The epilogue of all items. `rows` and `columns`: where the tile begins, and the thread's index.

    The sums are shifted so that each iteration reads the same variable: an array with a computed index would
    not be in registers, and unrolled loops would repeat the epilogue.
    """
    vector = tile.vector
    with k.loop("row_turn", 0, tile.each) as row_turn:
        with k.loop("column_turn", 0, tile.squares) as column_turn:
            row = k.let("row", tile.line(*rows, row_turn // vector) + row_turn % vector)
            column = k.let("column", tile.line(*columns, column_turn))
            with k.when(row < problem.rows):
                for lane in range(0, vector, width):
                    at = column + lane if lane else column
                    with k.when(at < problem.columns):
                        items = [k.lane(sums[0][0], lane + item) for item in range(width)]
                        k.splice(epilogue(row, at, k.let("product", k.vector(items))))
            for before, after in pairwise(sums[0]):
                k.assign(before, after)
        for row_before, row_after in pairwise(sums):
            for before, after in zip(row_before, row_after, strict=True):
                k.assign(before, after)
