"""Matrix products on a CPU by kernels that are compiled before they are needed: few serve all sizes.

An item is the same sum in the same order as in the kernel that is the best for a size. What differs is which
items are computed together, and that nothing is packed.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from penstock.drivers.driver import Capabilities
from penstock.kernels.builder import KernelBuilder
from penstock.kernels.ir.expressions import TRUE, Expr, Var
from penstock.kernels.source import KernelSource
from penstock.kernels.templates.launches import CPU_SHARES
from penstock.kernels.templates.matmul import BATCH, Epilogue, Problem
from penstock.kernels.templates.matmul_micro import minimum, share
from penstock.kernels.templates.matmul_tiling import LANES

_ROWS = 4  # of a micro-tile: as many sums as a processor works on at a time


def serves(problem: Problem) -> bool:
    """Whether these kernels are for a product: the items of its sides are evenly apart, and summed so."""
    sides = problem.left, problem.right
    strides = [stride for side in sides for stride in (side.row_stride, side.column_stride)]
    return all(isinstance(stride, int) for stride in strides) and all(side.is_summed for side in sides)


def shared_matmul(
    k: KernelBuilder,
    problem: Problem,
    order: tuple[int, ...],
    capabilities: Capabilities,
    epilogue: Epilogue,
) -> KernelSource:
    """The kernel of a product; `order`: that of the best tiling, see `Problem`."""
    rows = _ROWS if problem.rows >= _ROWS else 1
    width = LANES if problem.columns >= LANES else 1
    panels = ceil(problem.rows / rows)
    # Two at least, because a division by 1 would make another kernel.
    parts = max(2, min(panels, CPU_SHARES * capabilities.compute_units))
    k.let(BATCH.name, k.group() // parts)
    begin, end = share(k, "panels", k.let("part", k.group() % parts), panels, parts)
    with k.loop("panel", begin, end) as panel, k.loop("first", 0, problem.columns, width) as first:
        # The last panel begins early, and so do the last columns: some items are computed twice.
        row = k.let("row", minimum(panel * rows, problem.rows - rows))
        column = k.let("column", minimum(first, problem.columns - width))
        for i, total in enumerate(_totals(k, problem, order, (row, rows), (column, width))):
            with k.when(TRUE):  # a scope of its own
                k.splice(epilogue(row + i, column, total))
    return k.source((problem.batch * parts,), (1,))


def _totals(
    k: KernelBuilder,
    problem: Problem,
    order: tuple[int, ...],
    rows: tuple[Expr, int],
    columns: tuple[Expr, int],
) -> list[Var]:
    """The sums of a micro-tile, row by row: spans of K are added up, and then added to the total."""
    (row, count), (column, width) = rows, columns
    spans, ends = _spans(problem.inner, *order)
    zero = k.identity("sum", problem.dtype, width)
    totals = [k.variable(f"total{i}", zero) for i in range(count)]
    with k.loop("span", 0, spans) as span:
        sums = [k.variable(f"sum{i}", zero) for i in range(count)]
        begin, end = (minimum(ends(number), problem.inner) for number in (span, span + 1))
        with k.loop("step", begin, end) as step:
            right = k.let("right", _neighbours(k, problem, step, column, width))
            for i, total in enumerate(sums):
                item = k.load(problem.left.memory, problem.left.index(row + i, step))
                k.multiply_add(total, k.broadcast(item, width) if width > 1 else item, right)
        for total, sum_ in zip(totals, sums, strict=True):
            k.assign(total, k.select(span.ne(0), total + sum_, sum_))
    return totals


def _neighbours(k: KernelBuilder, problem: Problem, step: Expr, column: Expr, width: int) -> Expr:
    """Neighbouring items of a row of the right side."""
    right = problem.right
    if width > 1 and right.column_stride == 1:
        return k.load_vector(right.memory, right.index(step, column), width)
    return k.vector([k.load(right.memory, right.index(step, column + lane)) for lane in range(width)])


def _spans(inner: int, depth_blocks: int, span: int) -> tuple[int, Callable[[Expr], Expr]]:
    """How many spans K has, and where each begins.

    Blocks of K have the same length, but the first of them one step more. The numbers are doubled, and a
    single span is written like several: a factor of 1 would make another kernel.
    """
    spans = ceil(depth_blocks / span)
    each, more = divmod(inner, depth_blocks) if spans > 1 else (inner, 0)
    length = span if spans > 1 else 1
    return spans, lambda number: number * (each * length) + minimum(number * (2 * length), 2 * more) // 2
