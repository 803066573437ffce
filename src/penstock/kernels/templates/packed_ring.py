"""Products of 17 to 32 rows with packed matrices, on tensor cores: by way of a ring in local memory.

Each weight is unpacked once and multiplied with all rows. What takes long is to read the rows, which are more
bytes than the weights of a few features. So a workgroup has up to 128 features, and reads the rows once for
all of them. It copies lines of 128 inputs, of its features and of all rows, to a ring in local memory several
steps ahead, as `linear_tiles` does. Each warp has its own features.

A thread has 32 neighbouring inputs of two features of a tile at a time, as in `packed_tiles`; of a row it has
the same inputs, 16 bytes at a time. The parts of a line, of 16 bytes, are so ordered (a swizzle) that neither
those who read nor those who write have bank conflicts in local memory.

Sums are float32, in an order that does not depend on the number of rows. On an H200, the products of a layer
of Llama-1B with 4 bits take 39 us for 32 rows, and 55 by `packed_tiles`, and that of its head 77 and 151 us.
For 16 rows a layer takes as long by either, and for fewer `packed_tiles` is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from penstock.drivers.driver import Capabilities
from penstock.kernels import ir
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.source import KernelSource
from penstock.kernels.templates.cluster_sums import FEATURES, ROWS, ClusterSums, Division, Finish
from penstock.kernels.templates.packed_matmul import PackedProblem, clamped
from penstock.kernels.templates.packed_tiles import multiplied, weights

_WARP, _WARPS = 32, 4
_THREADS = _WARP * _WARPS
_STEP = 128  # inputs of a line
_ITEMS = 32  # neighbouring inputs of a thread
_WORDS = 4  # of a part
_PARTS = _STEP // 8  # of a line of a row
_LINE = _PARTS * _WORDS  # words
_RING_BYTES = 48 << 10
_RESIDENT = 4  # workgroups of a compute unit
_MOST_SPLITS = 8
_FEWEST_INPUTS = 2 * _STEP  # of a workgroup, where several share them
_MOST_BITS = 512  # of an input of all features of a workgroup
_BUSY = 2  # workgroups of a compute unit; if there would be fewer, they get fewer features


def divided(problems: Sequence[PackedProblem], capabilities: Capabilities) -> Division:
    """How the workgroups of products of the same shape divide them."""
    problem, units = problems[0], capabilities.compute_units
    fewest = _WARPS * FEATURES  # a tile for each warp
    features = max(_MOST_BITS // problem.bits // len(problems), fewest)
    most = min(_MOST_SPLITS, problem.inner // _FEWEST_INPUTS) if capabilities.clusters else 1
    while True:
        splits, count = 1, ceil(problem.columns / features)
        while 2 * splits <= most and 2 * splits * count <= _RESIDENT * units:
            splits *= 2
        if features == fewest or splits * count >= _BUSY * units:
            return Division(features, splits)
        features //= 2


def packed_ring(
    k: KernelBuilder, problems: Sequence[PackedProblem], division: Division, finish: Finish
) -> KernelSource:
    """A workgroup computes some features of all rows, or a part of their sums."""
    problem, splits = problems[0], division.splits
    rank = k.let("rank", k.group() % splits if splits > 1 else 0)
    first = k.let("first", k.group() // splits * division.features)
    steps = ceil(problem.inner / (_STEP * splits))  # of a workgroup
    row_words = ceil(problem.rows / ROWS) * ROWS * _LINE
    stage_words = row_words + len(problems) * division.features * (_STEP // problem.each)
    stages = _RING_BYTES // (4 * stage_words)
    ring = k.shared("ring", "float32", stages * stage_words, width=_WORDS)
    before = rank * steps if splits > 1 else ir.Const(0)
    copies = _Copies(k, problems, division, ring, first, before, row_words)
    products = _Products(k, problems, division, ring, first, before, row_words)

    early = range(steps if steps <= stages else stages - 1)
    for step in early:
        copies.begin_matrices(ir.Const(step), ir.Const(step * stage_words))
    scales = products.scales(ir.Const(0))
    k.wait_for_earlier([memory for matrix in problems for memory in (matrix.words, matrix.scales)])
    for step in early:
        copies.begin_rows(ir.Const(step), ir.Const(step * stage_words))
        k.end_copies()
    scales = [k.variable(k.fresh("next"), scale) for scale in scales]
    with k.loop("step", 0, steps) as now:
        k.wait_for_copies(len(early) - 1)
        k.barrier()  # all threads' copies are there; and what was read in the step before may be overwritten
        if steps > len(early):
            later = k.let("later", now + len(early))
            with k.when(later < steps):
                stage = k.let("free", later % stages * stage_words)
                copies.begin_matrices(later, stage)
                copies.begin_rows(later, stage)
        k.end_copies()
        factors = products.factors(scales)
        if steps > 1:
            for scale, value in zip(scales, products.scales(clamped(k, "then", now + 1, steps)), strict=True):
                k.assign(scale, value)
        products.add(k.let("stage", now % stages * stage_words), factors)
    k.barrier()
    products.finish(first, rank, finish)
    grid = ceil(problem.columns / division.features) * splits
    return k.source((grid,), (_THREADS,), _RESIDENT, cluster=splits)


class _Copies:
    """Copies of lines to the ring: a thread has the same part of some lines."""

    def __init__(
        self,
        k: KernelBuilder,
        problems: Sequence[PackedProblem],
        division: Division,
        ring: Memory,
        first: ir.Expr,
        before: ir.Expr,
        row_words: int,
    ) -> None:
        """`before`: the steps of the workgroups of the cluster that have the inputs before these."""
        self._k, self._problem, self._ring = k, problems[0], ring
        problem = self._problem
        self._masked = problem.inner % (_STEP * division.splits) > 0
        self._begin = k.let("begin", before * _STEP)
        line, part = k.let("line", k.thread // _PARTS), k.let("part", k.thread % _PARTS)
        self._rows: list[tuple[ir.Expr, ir.Expr]] = []  # where they lie, and where they are copied to
        self._row_items = k.let("row_items", part * 8)
        to = k.let("to", line * _LINE + (part ^ (part // 8 | line % 2 * 2)) * _WORDS)
        for offset in range(0, ceil(problem.rows / ROWS) * ROWS, _THREADS // _PARTS):
            row = clamped(k, f"row{offset}", line + offset, problem.rows)
            self._rows.append((k.let(f"x{offset}", row * problem.inner), to + offset * _LINE))
        parts = _STEP // problem.each // _WORDS
        own, packed = k.let("packed_line", k.thread // parts), k.let("packed_part", k.thread % parts)
        self._items = k.let("packed_items", packed * (_WORDS * problem.each))
        place = own * parts + _swizzled(packed, own, parts)
        packed_to = k.let("packed_to", row_words + place * _WORDS)
        self._matrices: list[tuple[Memory, ir.Expr, ir.Expr]] = []
        for number, matrix in enumerate(problems):
            for offset in range(0, division.features, _THREADS // parts):
                name = f"feature{number}_{offset}"
                feature = clamped(k, name, first + own + offset, problem.columns)
                start = k.let(f"w{number}_{offset}", feature * (problem.inner // problem.each))
                moved = (number * division.features + offset) * parts * _WORDS
                self._matrices.append((matrix.words, start, packed_to + moved))

    def begin_matrices(self, step: ir.Expr, stage: ir.Expr) -> None:
        """Begin to copy the lines of all features."""
        start, inside = self._place(self._items, step)
        for memory, own, to in self._matrices:
            self._k.copy_ahead(self._ring, stage + to, memory, own + start // self._problem.each, inside)

    def begin_rows(self, step: ir.Expr, stage: ir.Expr) -> None:
        """Begin to copy the lines of all rows."""
        start, inside = self._place(self._row_items, step)
        for own, to in self._rows:
            self._k.copy_ahead(self._ring, stage + to, self._problem.x, own + start, inside)

    def _place(self, items: ir.Expr, step: ir.Expr) -> tuple[ir.Var, ir.Var | None]:
        """Where a thread's part of a line is among the inputs, and whether they have it."""
        k = self._k
        start = k.let(k.fresh("start"), self._begin + items + step * _STEP)
        return start, k.let(k.fresh("inside"), start < self._problem.inner) if self._masked else None


def _swizzled(part: ir.Expr, line: ir.Expr, parts: int) -> ir.Expr:
    """Where a part of a line of packed integers is: four threads read all of its parts, or every other."""
    return part if parts == 4 else part ^ line % 2


class _Products:
    """The sums of products: a warp has one or more tiles of features, and all inputs of a line."""

    def __init__(
        self,
        k: KernelBuilder,
        problems: Sequence[PackedProblem],
        division: Division,
        ring: Memory,
        first: ir.Expr,
        before: ir.Expr,
        row_words: int,
    ) -> None:
        self._k, self._problems, self._ring, self._problem = k, problems, ring, problems[0]
        problem = self._problem
        row_tiles = ceil(problem.rows / ROWS)
        self._masked = problem.inner % (_STEP * division.splits) > 0
        self._sums = ClusterSums(ring, problem.rows, problem.columns, len(problems), division)
        lane = self._lane = k.let("lane", k.thread % _WARP)
        warp, own = k.let("warp", k.thread // _WARP), k.let("own_line", lane // 4)
        part = k.let("own_part", lane % 4)
        self._items = k.let("own_items", before * _STEP + part * _ITEMS)
        tiles = len(problems) * division.features // FEATURES
        self._tiles = [k.let(f"tile{number}", warp + number * _WARPS) for number in range(tiles // _WARPS)]
        self._scales: list[tuple[Memory, ir.Expr]] = []
        self._left: list[list[list[ir.Expr]]] = []  # by tile, and by half of its features: a thread's parts
        parts = _STEP // problem.each // _WORDS  # of a line
        for number, tile in enumerate(self._tiles):
            pair: list[list[ir.Expr]] = []
            for half in range(2):
                line = k.let(f"line{number}_{half}", tile * FEATURES + own + half * (FEATURES // 2))
                places = [
                    line * parts + _swizzled(part * (parts // 4) + turn, line, parts)
                    for turn in range(parts // 4)
                ]
                names = [f"left{number}_{half}_{turn}" for turn in range(parts // 4)]
                pair.append(
                    [
                        k.let(name, row_words + place * _WORDS)
                        for name, place in zip(names, places, strict=True)
                    ]
                )
                self._scales.append(self._scale(f"scales{number}_{half}", number, line, division, first))
            self._left.append(pair)
        swizzle = k.let("swizzle", part // 2 | own % 2 * 2)
        self._right = [
            k.let(f"right{turn}", own * _LINE + (part * 4 + (swizzle ^ turn)) * _WORDS) for turn in range(4)
        ]
        self._totals = [
            {
                rows: [k.variable(f"total{number}_{rows}_{item}", 0.0, "float32") for item in range(4)]
                for rows in range(row_tiles)
            }
            for number in range(len(self._tiles))
        ]

    def _scale(
        self, name: str, number: int, line: ir.Expr, division: Division, first: ir.Expr
    ) -> tuple[Memory, ir.Expr]:
        """The scales of a line, which is of the same matrix in all warps, and where they begin."""
        k, problem, problems = self._k, self._problem, self._problems
        feature = line if len(problems) == 1 else line % division.features
        column = clamped(k, f"column_{name}", first + feature, problem.columns)
        index = k.let(name, column * (problem.inner // problem.group))
        return problems[number * len(problems) // len(self._tiles)].scales, index

    def scales(self, step: ir.Expr) -> list[ir.Var]:
        """The scales of a step, of two features of each tile."""
        k, problem = self._k, self._problem
        at = k.let(k.fresh("at"), self._items + step * _STEP)
        inside = k.let(k.fresh("scaled"), at < problem.inner) if self._masked else None
        return [
            k.let(k.fresh("scale"), k.load(memory, index + at // problem.group, inside))
            for memory, index in self._scales
        ]

    def factors(self, scales: Sequence[ir.Var]) -> list[ir.Var]:
        """Scales as they are multiplied."""
        return [multiplied(self._k, self._problem, scale) for scale in scales]

    def add(self, stage: ir.Expr, factors: Sequence[ir.Var]) -> None:
        """Add the products of the lines of a stage."""
        k, problem = self._k, self._problem
        words = [[self._words(stage, places) for places in pair] for pair in self._left]
        for turn, right in enumerate(self._right):
            rows = {
                tile: k.load_part(self._ring, stage + right + tile * (ROWS * _LINE))
                for tile in self._totals[0]
            }
            for number, totals in enumerate(self._totals):
                scales = factors[2 * number : 2 * number + 2]
                for part in range(2):  # of a row's words: those that a product of tiles takes
                    (first, second), (third, fourth) = (
                        weights(k, problem, own, scale, 2 * turn + part)
                        for own, scale in zip(words[number], scales, strict=True)
                    )
                    left = [first, third, second, fourth]
                    for tile, total in totals.items():
                        k.multiply_tiles(total, left, rows[tile][2 * part :][:2], problem.x.dtype)

    def _words(self, stage: ir.Expr, places: Sequence[ir.Expr]) -> list[ir.Expr]:
        """A thread's packed integers of a feature."""
        parts = [self._k.load_part(self._ring, stage + place) for place in places]
        return [word for part in parts for word in part]

    def finish(self, first: ir.Expr, rank: ir.Expr, finish: Finish) -> None:
        """Add up the sums of all that share the inputs, and finish a share of them."""
        for tile, totals in zip(self._tiles, self._totals, strict=True):
            self._sums.keep(self._k, self._lane, tile, ir.Const(0), totals)
        self._sums.finish(self._k, _THREADS, first, rank, finish)
