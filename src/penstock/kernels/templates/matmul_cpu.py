"""Matrix products on a CPU: a work-item computes a tile of the product with vectors.

What it reads often is packed: copied to memory that stays in the cache, in the order in which it is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from math import ceil

from penstock.drivers.driver import Capabilities
from penstock.fusion.views import Digits
from penstock.graph.contraction import FEW_ROWS
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.ir.expressions import Const, Expr, Operand, Var
from penstock.kernels.source import KernelSource
from penstock.kernels.templates.matmul import BATCH, Epilogue, Problem, offset
from penstock.kernels.templates.matmul_micro import finish_row, micro_kernel, minimum, share
from penstock.kernels.templates.matmul_panels import panel_matmul
from penstock.kernels.templates.matmul_shared import serves, shared_matmul
from penstock.kernels.templates.matmul_tiling import LANES, Tiling, reads_windows, tiling

_CHAINS = 4  # independent sums in a product of few rows or columns, so that none waits for another
_ALIGNED = 16  # items of a cache line, which no vector of packed panels and sums should cross
_SPAN = 128 * _CHAINS * LANES  # steps along K of such a product, before their sum is added to the total


def cpu_matmul(
    k: KernelBuilder, problem: Problem, capabilities: Capabilities, epilogue: Epilogue, width: int = 1
) -> KernelSource:
    """The kernel of a product. The epilogue takes `width` neighbours at a time."""
    if problem.right.panel_width:
        return panel_matmul(k, problem, capabilities, epilogue, width)
    if _is_thin(problem):
        return _thin(k, problem, capabilities, epilogue)
    if problem.order:
        return shared_matmul(k, problem, problem.order, capabilities, epilogue)
    plan = tiling(problem, capabilities)
    if problem.shared and width > 1 and serves(problem):
        return shared_matmul(k, problem, (plan.depth_blocks, plan.span), capabilities, epilogue)
    return _TiledProduct(k, problem, plan, epilogue, width).build()


def order_of(problem: Problem, capabilities: Capabilities) -> tuple[int, ...]:
    """How its kernel divides K, see `Problem`; nothing if it computes items as dot products."""
    plan = tiling(problem, capabilities)
    return () if _is_thin(problem) else (plan.depth_blocks, plan.span)


@dataclass(frozen=True)
class _DepthBlock:
    """A block of steps along K."""

    number: Expr
    begin: Expr
    depth: Expr


@dataclass(frozen=True)
class _Panel:
    """Lines of a side over a block of K, as the micro-kernel reads them."""

    memory: Memory  # from the first item on
    stride: int  # from line to line
    k_stride: int
    lanes: int  # of a vector of lines

    def parts(self, k: KernelBuilder, step: Expr) -> Iterator[tuple[Memory, Expr]]:
        """For each vector of lines of a step, the memory that it is in, and its index there."""
        for vector in itertools.count():
            yield self.memory, step * self.k_stride + vector * self.lanes


@dataclass(frozen=True)
class _Windows:
    """Lines of the right side that are read in place, with steps that a table has the offsets of."""

    memories: tuple[Memory, ...]  # of each vector of lines, from its first step on
    at_step: Callable[[Expr], Expr]

    def parts(self, k: KernelBuilder, step: Expr) -> Iterator[tuple[Memory, Expr]]:
        """For each vector of lines of a step, the memory that it is in, and its index there."""
        source = k.let("source", self.at_step(step))
        return ((memory, source) for memory in self.memories)


class _Side:
    """A side of the product in panels of lines: the rows of the left side, or the columns of the right side.

    Where the number of lines is not a multiple of a panel's, the last panel begins early, so that nothing is
    read out of bounds, and no panel needs separate code.
    """

    def __init__(self, k: KernelBuilder, problem: Problem, plan: Tiling, is_left: bool) -> None:
        self.k, self.is_left, self.problem, self.varied = k, is_left, problem, problem.varied
        self.name = "row" if is_left else "column"
        self.matrix = problem.left if is_left else problem.right
        self.length = problem.rows if is_left else problem.columns
        strides = self.matrix.row_stride, self.matrix.column_stride
        self.stride, self.k_stride = strides if is_left else strides[::-1]
        self.is_packed = plan.pack_left if is_left else plan.pack_right
        self.lines = plan.micro_tile.rows if is_left else plan.micro_tile.columns
        self.lanes = plan.micro_tile.lanes
        self.count = ceil(self.length / self.lines)  # of panels
        self.across = ceil(self.lines / LANES) * LANES  # a panel's lines, in whole vectors
        self.in_windows = not is_left and reads_windows(problem, plan.micro_tile)
        self._choose_packing(ceil(problem.inner / plan.depth_blocks), problem.inner // plan.depth_blocks)

    def _choose_packing(self, deepest: int, shallowest: int) -> None:
        """How a panel is packed: in vectors of neighbouring lines or steps, or item by item.

        `deepest` and `shallowest`: the largest and smallest number of steps of a block of K.
        """
        self.deepest, self.shallowest = deepest, shallowest
        self.order, packed_lines = "items", self.lines
        if isinstance(self.stride, Digits) or isinstance(self.k_stride, Digits):
            self.order, packed_lines = "digits", self.across
        elif self.stride == 1 and self.length >= self.across:
            self.order, packed_lines = "lines", self.across
        elif self.k_stride == 1 and self.length >= self.lines and shallowest >= LANES:
            self.order = "steps"
        self.packed_stride, self.packed_k_stride = 1, packed_lines
        if self.order == "steps" and self.is_left:  # the micro-kernel reads single items of it
            self.packed_stride, self.packed_k_stride = deepest, 1
        # A cache line more: at distances of a power of two, panels would evict each other from the cache.
        self.panel_size = packed_lines * deepest + (16 if self.order == "lines" and self.is_left else 0)

    def declare(self, panels: int, most: int) -> None:
        """Local memory for some packed panels."""
        if self.is_packed:
            name = "left_panels" if self.is_left else "right_panels"
            self.panels = _array(self.k, name, self.problem, panels * self.panel_size, most)

    def _index(self, line: Expr, step: Expr) -> Expr:
        return self.matrix.base + offset(line, self.stride) + offset(step, self.k_stride)

    def _packed_index(self, panel: Expr, line: Expr, step: Expr) -> Expr:
        return panel * self.panel_size + line * self.packed_stride + step * self.packed_k_stride

    @contextmanager
    def each_panel(self, begin: Expr, end: Expr) -> Iterator[tuple[Var, Var, Var]]:
        """A loop over panels: the index of each, its first line that no other panel has, its first line."""
        with self.k.loop(f"{self.name}_panel", begin, end) as panel:
            line = self.k.let(self.name, panel * self.lines)
            yield panel, line, self.k.let(f"first_{self.name}", self._inside(line, self.lines))

    def _inside(self, line: Expr, count: int) -> Expr:
        """The line where a panel begins, moved back so that `count` lines from there on exist."""
        if self.length < count:
            return Const(0)
        exact = count == self.lines and self.length % count == 0 and not self.varied
        return line if exact else minimum(line, self.length - count)

    def pack(self, block: _DepthBlock, begin: Expr, end: Expr) -> None:
        """Copy a block of K of some panels, in the order in which the micro-kernel reads it."""
        k, memory = self.k, self.matrix.memory
        if self.order == "lines":
            with k.loop("step", 0, block.depth) as step, self.each_panel(begin, end) as (panel, line, _):
                first = self._inside(line, self.across)
                source = k.let("source", self._index(first, block.begin + step))
                target = k.let("target", self._packed_index(panel - begin, Const(0), step))
                for lane in range(0, self.across, LANES):
                    k.store(self.panels, target + lane, k.load_vector(memory, source + lane, LANES))
        elif self.order == "steps":
            together = 1 if self.is_left else LANES  # lines; the right side is transposed
            with (
                self.each_panel(begin, end) as (panel, _, first),
                k.loop("line", 0, self.lines, together) as line,
                k.loop("steps", 0, block.depth, LANES) as steps,
            ):
                step = k.let("step", minimum(steps, block.depth - LANES))  # the last vector begins early
                source = k.let("source", self._index(first + line, block.begin + step))
                target = k.let("target", self._packed_index(panel - begin, line, step))
                vectors = [
                    k.let(f"x{i}", k.load_vector(memory, source + offset(i, self.stride), LANES))
                    for i in range(together)
                ]
                for i, column in enumerate(_transposed(k, vectors)):
                    k.store(self.panels, target + i * self.packed_k_stride, column)
        elif self.order == "digits":
            at_step = self.step_offsets(block)
            with (
                self.each_panel(begin, end) as (panel, _, first),
                k.loop("lane", 0, self.across, LANES) as vector,
            ):
                self._pack_digits(block, panel - begin, first, vector, at_step)
        else:
            with (
                k.loop("step", 0, block.depth) as step,
                self.each_panel(begin, end) as (panel, _, first),
                k.loop("line", 0, self.lines) as line,
            ):
                inside = k.let("inside", minimum(first + line, self.length - 1))
                value = k.load(memory, self._index(inside, block.begin + step))
                k.store(self.panels, self._packed_index(panel - begin, line, step), value)

    def step_offsets(self, block: _DepthBlock) -> Callable[[Expr], Expr]:
        """Where the steps of a block lie: in a table where that takes divisions, which all lines share."""
        k = self.k
        if not isinstance(self.k_stride, Digits):
            return lambda step: offset(block.begin + step, self.k_stride)
        length = 1 << (self.deepest - 1).bit_length() if self.varied else self.deepest
        table = k.registers(f"{self.name}_steps", "int32", length)
        with k.loop("step", 0, block.depth) as step:
            k.store(table, step, offset(block.begin + step, self.k_stride))
        return lambda step: k.load(table, step)

    def _pack_digits(
        self, block: _DepthBlock, panel: Expr, first: Expr, lane: Expr, at_step: Callable[[Expr], Expr]
    ) -> None:
        """Copy some lines of a panel: as vectors, where neighbouring lines or steps are contiguous."""
        k, memory, base = self.k, self.matrix.memory, self.matrix.base
        lines = [minimum(first + lane + i, self.length - 1) for i in range(LANES)]
        offsets = [k.let(f"line{i}", base + offset(line, self.stride)) for i, line in enumerate(lines)]

        def target(step: Expr) -> Expr:
            return self._packed_index(panel, lane, step)

        def copy() -> None:
            with k.loop("step", 0, block.depth) as step:
                k.store(self.panels, target(step), k.load_vector(memory, offsets[0] + at_step(step), LANES))

        def gather(begin: Operand, end: Operand) -> None:
            with k.loop("step", begin, end) as step:
                source = k.let("source", at_step(step))
                k.store(self.panels, target(step), k.vector([k.load(memory, at + source) for at in offsets]))

        def transpose() -> None:
            with k.loop("steps", 0, block.depth, LANES) as steps:
                begin = k.let("begin", minimum(steps, block.depth - LANES))  # the last vector begins early
                source = k.let("first_source", at_step(begin))
                with k.when((at_step(begin + (LANES - 1)) - source).eq(LANES - 1)):
                    rows = [
                        k.let(f"x{i}", k.load_vector(memory, at + source, LANES))
                        for i, at in enumerate(offsets)
                    ]
                    for i, column in enumerate(_transposed(k, rows)):
                        k.store(self.panels, target(begin + i), column)
                with k.otherwise():
                    gather(begin, begin + LANES)

        def by_steps() -> None:
            if _in_runs(self.k_stride) and self.shallowest >= LANES:
                transpose()
            else:
                gather(0, block.depth)

        if _in_runs(self.stride):
            # Lines after the last are the last again, which may be as far away as if all were neighbours.
            whole = first + lane + LANES <= self.length
            with k.when(whole & (offsets[-1] - offsets[0]).eq(LANES - 1)):
                copy()
            with k.otherwise():
                by_steps()
        else:
            by_steps()

    def windows(self, first: Expr, at_step: Callable[[Expr], Expr]) -> _Windows:
        """A panel that is read in place, by its first line."""
        k, matrix, lanes = self.k, self.matrix, range(0, self.lines, self.lanes)
        begins = [matrix.base + offset(first + lane, self.stride) for lane in lanes]
        lines = [k.pointer(f"right{i}_lines", matrix.memory, begin) for i, begin in enumerate(begins)]
        return _Windows(tuple(lines), at_step)

    def panel(self, block: _DepthBlock, number: Expr, first: Expr) -> _Panel:
        """A panel by its first line, or by its index among the packed panels."""
        k, name = self.k, "left" if self.is_left else "right"
        if not self.is_packed:
            begin = self._index(first, block.begin)
            assert isinstance(self.stride, int)
            assert isinstance(self.k_stride, int)
            return _Panel(k.pointer(name, self.matrix.memory, begin), self.stride, self.k_stride, self.lanes)
        begin = number * self.panel_size
        if self.order == "lines" and self.lines < self.across:
            begin = begin + first - self._inside(first, self.across)
        memory = k.pointer(name, self.panels, begin)
        return _Panel(memory, self.packed_stride, self.packed_k_stride, self.lanes)


class _TiledProduct:
    """Builds the kernel in which a work-item computes a tile: the micro-tiles of all its panels.

    The micro-kernel has all sums of a micro-tile in registers. Where a panel begins early, some items are
    computed twice, but stored once.
    """

    def __init__(
        self, k: KernelBuilder, problem: Problem, plan: Tiling, epilogue: Epilogue, epilogue_width: int
    ) -> None:
        self.k, self.problem, self.plan = k, problem, plan
        self.epilogue, self.epilogue_width = epilogue, epilogue_width
        self.left, self.right = (_Side(k, problem, plan, is_left) for is_left in (True, False))
        self.items = self.left.lines * self.right.lines  # of a micro-tile
        self.widest_tile = ceil(self.right.count / plan.column_tiles)  # in panels
        self.has_spans = 1 < plan.span < plan.depth_blocks

    def build(self) -> KernelSource:
        """The kernel."""
        k, problem, plan = self.k, self.problem, self.plan
        self._declare_arrays()
        k.let(BATCH.name, k.group() // plan.tiles)
        row_tile = k.let("row_tile", k.group() // plan.column_tiles % plan.row_tiles)
        column_tile = k.let("column_tile", k.group() % plan.column_tiles)
        rows = share(k, "row_panels", row_tile, self.left.count, plan.row_tiles)
        columns = share(k, "column_panels", column_tile, self.right.count, plan.column_tiles)
        with self._each_depth_block() as block:
            if plan.pack_right:
                self.right.pack(block, *columns)
            elif self.right.in_windows:
                self.at_step = self.right.step_offsets(block)
            if plan.pack_left:
                with k.loop("chunk", *rows, plan.chunk) as chunk:
                    end = k.let("chunk_end", minimum(chunk + plan.chunk, rows[1]))
                    self.left.pack(block, chunk, end)
                    self._multiply(block, (chunk, end), columns, rows[0])
            else:
                self._multiply(block, rows, columns, rows[0])
        return k.source((problem.batch * plan.tiles,), (1,))

    def _declare_arrays(self) -> None:
        plan, problem = self.plan, self.problem
        panels = ceil(self.left.count / plan.row_tiles) * self.widest_tile if plan.depth_blocks > 1 else 1
        most = plan.items * 3 // 8 // (2 if self.has_spans else 1)
        self.sums = _array(self.k, "sums", problem, panels * self.items, most)
        if self.has_spans:
            self.span_sums = _array(self.k, "span_sums", problem, panels * self.items, most)
        self.right.declare(self.widest_tile, plan.items // 2)
        self.left.declare(plan.chunk, plan.items // 10)

    @contextmanager
    def _each_depth_block(self) -> Iterator[_DepthBlock]:
        """A loop over blocks of K."""
        k, inner, count = self.k, self.problem.inner, self.plan.depth_blocks
        if count == 1:
            yield _DepthBlock(Const(0), Const(0), Const(inner))
            return
        each, more = divmod(inner, count)
        with k.loop("block", 0, count) as number:
            begin = k.let("block_begin", number * each + minimum(number, more))
            yield _DepthBlock(number, begin, k.let("depth", (number < more).cast("int32") + each))

    def _multiply(
        self, block: _DepthBlock, rows: tuple[Expr, Expr], columns: tuple[Expr, Expr], top: Expr
    ) -> None:
        """Multiply panels of rows by panels of columns over a block of K; `top` is the tile's first panel."""
        k, plan, number = self.k, self.plan, block.number
        last = plan.depth_blocks - 1
        with (
            self.left.each_panel(*rows) as (row_panel, row, first_row),
            self.right.each_panel(*columns) as (column_panel, column, first_column),
        ):
            across = column_panel - columns[0]
            kept = (row_panel - top) * self.widest_tile + across if last else 0
            slot = k.let("slot", kept * self.items)
            left = self.left.panel(block, row_panel - rows[0], first_row)
            right: _Panel | _Windows
            if self.right.in_windows:
                right = self.right.windows(first_column, self.at_step)
            else:
                right = self.right.panel(block, across, first_column)
            sums = self._micro_kernel(block, slot, left, right)
            done = number.eq(last)
            if self.has_spans:
                with k.when(done | (number % plan.span).eq(plan.span - 1)):
                    self._add_to_sums(number, slot, sums)
                with k.otherwise():
                    for i, value in enumerate(sums):
                        k.store(self.span_sums, slot + i * plan.micro_tile.lanes, value)
            else:
                self._add_to_sums(number, slot, sums)
            with k.when(done) if last else nullcontext():
                self._finish(slot, row, first_row, column, first_column)

    def _micro_kernel(
        self, block: _DepthBlock, slot: Expr, left: _Panel, right: _Panel | _Windows
    ) -> list[Var]:
        """The sums of a micro-tile over a block of K, in vectors, row by row."""
        k, plan, tile = self.k, self.plan, self.plan.micro_tile
        started, kept = block.number, self.sums
        if self.has_spans:
            started, kept = block.number % plan.span, self.span_sums
        sums = []
        for i in range(tile.rows * tile.vectors):
            start = k.identity("sum", self.problem.dtype, tile.lanes)
            if plan.span > 1:
                before = k.load_vector(kept, slot + i * tile.lanes, tile.lanes)
                start = k.select(started.ne(0), before, start)
            sums.append(k.variable(f"sum{i}", start))
        micro_kernel(
            k,
            block.depth,
            sums,
            lambda step: [
                (left.memory, step * left.k_stride + Const(row) * left.stride) for row in range(tile.rows)
            ],
            lambda step: [*islice(right.parts(k, step), tile.vectors)],
        )
        return sums

    def _add_to_sums(self, number: Expr, slot: Expr, sums: list[Var]) -> None:
        """Add sums to those of the previous spans of K."""
        k, span, lanes = self.k, self.plan.span, self.plan.micro_tile.lanes
        for i, total in enumerate(sums):
            index = slot + i * lanes
            value: Expr = total
            if span < self.plan.depth_blocks:
                before = k.load_vector(self.sums, index, lanes)
                value = k.select(number >= span, before + total, total)
            k.store(self.sums, index, value)

    def _finish(self, slot: Expr, row: Expr, first_row: Expr, column: Expr, first_column: Expr) -> None:
        """The epilogue of the items of a micro-tile that no other micro-tile has."""
        k, columns, width = self.k, self.problem.columns, self.right.lines
        end = k.let("column_end", minimum(column + width, columns))
        with k.loop("r", row - first_row, self.left.lines) as r:
            item_row = k.let("item_row", first_row + r)
            line = k.pointer("line", self.sums, slot + r * width - first_column)  # from column 0 on
            finish_row(k, self.epilogue, self.epilogue_width, item_row, line, (column, end, columns))


def _array(k: KernelBuilder, name: str, problem: Problem, items: int, most: int) -> Memory:
    """Local memory; where sizes vary, with more room than needed, up to `most` items."""
    if problem.varied:
        items = max(items, min(1 << (items - 1).bit_length(), most))
    return k.shared(name, problem.dtype, ceil(items / LANES) * LANES, width=_ALIGNED)


def _in_runs(stride: int | Digits) -> bool:
    """Whether neighbours may be contiguous, and are where the last of them is that far from the first."""
    return stride == 1 or (isinstance(stride, Digits) and stride.stride == 1 and stride.in_order)


def _transposed(k: KernelBuilder, rows: Sequence[Var]) -> list[Var]:
    """The columns of a square matrix from its rows: swap halves, quarters, ..."""
    vectors, size = [*rows], len(rows)
    block = size // 2
    while block:
        for i in (i for i in range(size) if not i & block):
            upper, lower = vectors[i], vectors[i + block]
            low = [k.lane(lower, c - block) if c & block else k.lane(upper, c) for c in range(size)]
            high = [k.lane(lower, c) if c & block else k.lane(upper, c + block) for c in range(size)]
            vectors[i] = k.let(f"x{i}_{block}", k.vector(low))
            vectors[i + block] = k.let(f"x{i + block}_{block}", k.vector(high))
        block //= 2
    return vectors


def _is_thin(problem: Problem) -> bool:
    """Whether there are so few rows or columns that each item is best computed as a dot product along K."""
    along = problem.left.column_stride == 1 and problem.right.row_stride == 1 and not problem.order
    return along and min(problem.rows, problem.columns) <= FEW_ROWS and problem.inner >= LANES


def _thin(k: KernelBuilder, problem: Problem, capabilities: Capabilities, epilogue: Epilogue) -> KernelSource:
    """Item by item; items with the same row or column of the larger side follow one another."""
    left, right, inner = problem.left, problem.right, problem.inner
    items = problem.rows * problem.columns
    work_items = ceil(4 * capabilities.compute_units / problem.batch)
    parts = max(1, min(work_items, items * inner // 2**14))
    few = min(problem.rows, problem.columns)
    k.let(BATCH.name, k.group() // parts)
    begin, end = share(k, "item", k.let("part", k.group() % parts), items, parts)
    with k.loop("item", begin, end) as item:
        row, column = item % few, item // few
        if problem.rows > problem.columns:
            row, column = column, row
        row, column = k.let("row", row), k.let("column", column)
        lefts = k.pointer("left", left.memory, left.index(row, 0))
        rights = k.pointer("right", right.memory, right.index(0, column))
        zero = k.identity("sum", problem.dtype, LANES)
        sums = [k.variable(f"sum{i}", zero) for i in range(_CHAINS)]

        def add_products(begin: Operand, end: Operand, chains: int) -> None:
            with k.loop("step", begin, end, chains * LANES) as step:
                for i, total in enumerate(sums[:chains]):
                    left, right = (k.load_vector(side, step + i * LANES, LANES) for side in (lefts, rights))
                    k.multiply_add(total, left, right)

        first, second, third, fourth = sums
        in_spans: Expr = Const(0)
        if inner > _SPAN:
            in_spans = k.let("in_spans", Const(inner) // _SPAN * _SPAN)
            span_sums = k.variable("span_sums", zero)
            with k.loop("span", 0, in_spans, _SPAN) as span:
                add_products(span, span + _SPAN, _CHAINS)
                k.accumulate(span_sums, "sum", (first + second) + (third + fourth))
                for total in sums:
                    k.assign(total, zero)
        in_chains = k.let("in_chains", Const(inner) // (_CHAINS * LANES) * (_CHAINS * LANES))
        in_vectors = k.let("in_vectors", Const(inner) // LANES * LANES)
        add_products(in_spans, in_chains, _CHAINS)
        add_products(in_chains, in_vectors, 1)
        k.accumulate(first, "sum", second + third + fourth)
        if inner > _SPAN:
            k.accumulate(first, "sum", span_sums)
        lanes = [k.lane(first, lane) for lane in range(LANES)]
        product = k.variable("product", reduce(Expr.__add__, lanes))
        with k.loop("step", in_vectors, inner) as step:
            k.multiply_add(product, k.load(lefts, step), k.load(rights, step))
        k.splice(epilogue(row, column, product))
    return k.source((problem.batch * parts,), (1,))
