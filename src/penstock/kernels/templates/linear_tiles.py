"""Products of few rows with matrices of 16-bit floats, on tensor cores: tiles of 16 features and 8 rows.

Such a product takes as long as reading the matrix, if enough of it is always under way. So a workgroup copies
lines of 64 inputs of its features and of all rows to a ring in local memory, several steps ahead of what it
multiplies. It begins with the matrix while the kernels before, which compute the rows, still run. Where a
matrix has few features, the workgroups of a cluster share the inputs.

A line has eight parts of 16 bytes. Which part is where depends on the line (a swizzle), so that neither the
threads that read a tile nor those that write it have bank conflicts in local memory.

Sums are float32, in an order that does not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from penstock.drivers.driver import Capabilities
from penstock.kernels import ir
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.source import KernelSource
from penstock.kernels.templates.cluster_sums import FEATURES, ROWS, ClusterSums, Division, Finish, Totals
from penstock.kernels.templates.packed_matmul import clamped

_WARP, _WARPS = 32, 4
_THREADS = _WARP * _WARPS
_INPUTS = 16  # of a product of tiles
_STEP = 64  # inputs of a line
_WORDS = 4  # of a part
_LINE = 32  # words
_PARTS = _LINE // _WORDS  # of a line
_ITEMS = _STEP // _PARTS  # of a part
_AT_ONCE = _THREADS // _PARTS  # lines that a workgroup copies at once
# With less, a compute unit would have room for more workgroups than its share, and take them from others: a
# product begins while those before it still run, where there is room.
_RING_BYTES = 48 << 10
_RESIDENT = 4  # workgroups of a compute unit
_MOST_SPLITS = 8
_FEWEST_INPUTS = 2 * _STEP  # of a workgroup, where several share them
_BUSY = 3  # if fewer than one of so many compute units would have a workgroup, it gets fewer features


@dataclass(frozen=True)
class LinearProblem:
    """The products of `rows` x `inner` items with one or two matrices of `columns` features."""

    x: Memory
    matrices: Sequence[Memory]
    rows: int
    columns: int
    inner: int

    @property
    def row_tiles(self) -> int:
        """The tiles that all rows take."""
        return ceil(self.rows / ROWS)


def divided(problem: LinearProblem, capabilities: Capabilities) -> Division:
    """How the workgroups of a product divide it."""
    features, splits = 4 * FEATURES if len(problem.matrices) == 1 else FEATURES, 1
    units = capabilities.compute_units
    most = min(_MOST_SPLITS, problem.inner // _FEWEST_INPUTS) if capabilities.clusters else 1
    while 2 * splits <= most and 2 * splits * ceil(problem.columns / features) <= _RESIDENT * units:
        splits *= 2
    while features > FEATURES and splits * ceil(problem.columns / features) * _BUSY < units:
        features //= 2
    return Division(features, splits)


def linear_tiles(
    k: KernelBuilder, problem: LinearProblem, division: Division, finish: Finish
) -> KernelSource:
    """A workgroup computes some features of all rows, or a part of their sums."""
    splits = division.splits
    rank = k.let("rank", k.group() % splits if splits > 1 else 0)
    first = k.let("first", k.group() // splits * division.features)
    lines = division.features * len(problem.matrices) + problem.row_tiles * ROWS
    stages = _RING_BYTES // (4 * _LINE * lines)
    steps = ceil(problem.inner / (_STEP * splits))  # of a workgroup
    ring = k.shared("ring", "float32", stages * lines * _LINE, width=_WORDS)
    copies = _Copies(k, problem, division, ring, first, rank * steps, steps)
    products = _Products(k, problem, division, ring)

    early = range(steps if steps <= stages else stages - 1)
    for step in early:
        copies.begin_matrices(ir.Const(step), ir.Const(step * lines * _LINE))
    k.wait_for_earlier(problem.matrices)
    for step in early:
        copies.begin_rows(ir.Const(step), ir.Const(step * lines * _LINE))
        k.end_copies()
    with k.loop("step", 0, steps) as now:
        k.wait_for_copies(len(early) - 1)
        k.barrier()  # all threads' copies are there; and what was read in the step before may be overwritten
        if steps > len(early):
            later = k.let("later", now + len(early))
            with k.when(later < steps):
                stage = k.let("free", later % stages * (lines * _LINE))
                copies.begin_matrices(later, stage)
                copies.begin_rows(later, stage)
        k.end_copies()
        products.add(k.let("stage", now % stages * (lines * _LINE)))
    k.barrier()
    products.finish(first, rank, finish)
    grid = ceil(problem.columns / division.features) * splits
    return k.source((grid,), (_THREADS,), _RESIDENT, cluster=splits)


class _Copies:
    """Copies of lines to the ring: a thread has the same part of every 16th line."""

    def __init__(
        self,
        k: KernelBuilder,
        problem: LinearProblem,
        division: Division,
        ring: Memory,
        first: ir.Expr,
        before: ir.Expr,
        steps: int,
    ) -> None:
        """`before`: the steps of the workgroups of the cluster that have the inputs before these."""
        self._k, self._problem, self._ring = k, problem, ring
        self._masked = steps * division.splits * _STEP > problem.inner
        line, part = k.let("line", k.thread // _PARTS), k.let("part", k.thread % _PARTS)
        self._to = k.let("to", line * _LINE + (part ^ line % _PARTS) * _WORDS)
        self._from = k.let("from", before * _STEP + part * _ITEMS)
        even = problem.columns % division.features == 0
        self._matrices: list[tuple[Memory, ir.Expr]] = []
        for matrix, memory in enumerate(problem.matrices):
            own = k.let(f"w{matrix}", (first + line) * problem.inner)
            for offset in range(0, division.features, _AT_ONCE):
                start = own + offset * problem.inner
                if not even:
                    feature = clamped(k, f"feature{matrix}_{offset}", first + line + offset, problem.columns)
                    start = k.let(f"w{matrix}_{offset}", feature * problem.inner)
                self._matrices.append((memory, start))
        self._rows: list[ir.Expr] = []
        for offset in range(0, problem.row_tiles * ROWS, _AT_ONCE):
            row = clamped(k, f"row{offset}", line + offset, problem.rows)
            self._rows.append(k.let(f"x{offset}", row * problem.inner))

    def begin_matrices(self, step: ir.Expr, stage: ir.Expr) -> None:
        """Begin to copy the lines of all features."""
        start, inside = self._place(step)
        for number, (memory, own) in enumerate(self._matrices):
            self._copy(stage, number, memory, own + start, inside)

    def begin_rows(self, step: ir.Expr, stage: ir.Expr) -> None:
        """Begin to copy the lines of all rows."""
        k, before = self._k, len(self._matrices)
        start, inside = self._place(step)
        for number, own in enumerate(self._rows):
            if self._problem.row_tiles * ROWS >= (number + 1) * _AT_ONCE:
                self._copy(stage, before + number, self._problem.x, own + start, inside)
            else:  # half of the threads have a line
                with k.when(k.thread < ROWS * _PARTS):
                    self._copy(stage, before + number, self._problem.x, own + start, inside)

    def _place(self, step: ir.Expr) -> tuple[ir.Var, ir.Var | None]:
        """Where a thread's part of a line is among the inputs, and whether they have it."""
        k = self._k
        start = k.let(k.fresh("start"), self._from + step * _STEP)
        return start, k.let(k.fresh("inside"), start < self._problem.inner) if self._masked else None

    def _copy(
        self, stage: ir.Expr, number: int, memory: Memory, start: ir.Expr, inside: ir.Var | None
    ) -> None:
        index = stage + self._to + number * _AT_ONCE * _LINE
        self._k.copy_ahead(self._ring, index, memory, start, inside)


class _Products:
    """The sums of products: a warp has a tile of features, and some of the inputs of a line."""

    def __init__(self, k: KernelBuilder, problem: LinearProblem, division: Division, ring: Memory) -> None:
        self._k, self._problem, self._ring = k, problem, ring
        self._features = len(problem.matrices) * division.features
        tiles = self._features // FEATURES
        self._sharing = _WARPS // tiles  # warps that share the inputs
        matrices = len(problem.matrices)
        self._sums = ClusterSums(ring, problem.rows, problem.columns, matrices, division, self._sharing)
        warp, lane = k.let("warp", k.thread // _WARP), k.let("lane", k.thread % _WARP)
        self._lane, self._tile = lane, k.let("tile", warp % tiles)
        self._share = k.let("share", warp // tiles)
        # Of the four tiles that are read at once, two are neighbours of the first two: in their inputs where
        # they are features, and else in their rows.
        swizzle, half = k.let("swizzle", lane % 8), lane // 16
        own = k.let("own_line", (self._tile * FEATURES + lane % 16) * _LINE)
        other = k.let("row_line", (self._features + lane % 8) * _LINE)
        next_ = k.let("next_line", (self._features + lane % 8 + half * ROWS) * _LINE)
        self._left, self._right = [], []
        for turn in range(_STEP // _INPUTS // self._sharing):
            part = (self._share + turn * self._sharing) * 2
            self._left.append(k.let(f"left{turn}", own + ((part + half) ^ swizzle) * _WORDS))
            within = k.let(f"within{turn}", ((part + lane // 8 % 2) ^ swizzle) * _WORDS)
            pairs = []
            for rows in range(0, problem.row_tiles, 2):
                line = next_ if rows + 1 < problem.row_tiles else other
                pairs.append(line + rows * ROWS * _LINE + within)
            self._right.append(pairs)
        self._totals: Totals = {
            rows: [k.variable(f"total{rows}_{item}", 0.0, "float32") for item in range(4)]
            for rows in range(problem.row_tiles)
        }

    def add(self, stage: ir.Expr) -> None:
        """Add the products of the lines of a stage."""
        k, dtype = self._k, self._problem.x.dtype
        for left, pairs in zip(self._left, self._right, strict=True):
            features = k.load_tiles(self._ring, stage + left)
            for number, right in enumerate(pairs):
                words = k.load_tiles(self._ring, stage + right)
                for half in range(min(2, self._problem.row_tiles - 2 * number)):
                    totals = self._totals[2 * number + half]
                    k.multiply_tiles(totals, features, words[2 * half : 2 * half + 2], dtype)

    def finish(self, first: ir.Expr, rank: ir.Expr, finish: Finish) -> None:
        """Add up the sums of all that share the inputs, in the ring, and finish a share of them."""
        self._sums.keep(self._k, self._lane, self._tile, self._share, self._totals)
        self._sums.finish(self._k, _THREADS, first, rank, finish)
