"""Matrix products on a CPU whose right side lies in panels, as the micro-kernel reads it (`fusion.panels`).

A work-item takes some panels. It reads each of them once, for all rows, and keeps the sums in local memory.
The epilogue comes after all products, row by row: what it reads is contiguous over all of its columns, not
only over those of a panel, so the processor fetches it ahead.
"""

from __future__ import annotations

from math import ceil

from penstock.drivers.driver import Capabilities
from penstock.kernels.builder import KernelBuilder
from penstock.kernels.ir.expressions import Const
from penstock.kernels.source import KernelSource
from penstock.kernels.templates.matmul import BATCH, Epilogue, Problem, offset
from penstock.kernels.templates.matmul_micro import finish_row, micro_kernel, minimum, share
from penstock.kernels.templates.matmul_tiling import CACHE_BYTES, most_lanes, most_sums


def panel_matmul(
    k: KernelBuilder, problem: Problem, capabilities: Capabilities, epilogue: Epilogue, width: int
) -> KernelSource:
    """The kernel of a product with panels. The epilogue takes `width` neighbours at a time."""
    left, right = problem.left, problem.right
    across, lanes = right.panel_width, most_lanes(capabilities)
    vectors = across // lanes
    rows = min(problem.rows, most_sums(lanes) // vectors)  # of a micro-tile
    panels = ceil(problem.columns / across)
    room = min(CACHE_BYTES, capabilities.local_bytes) // 8 // (problem.rows * across)  # for sums, in panels
    tiles = min(panels, max(capabilities.compute_units, ceil(panels / room)))
    widest = ceil(panels / tiles) * across
    sums = k.shared("sums", "float32", problem.rows * widest, width=lanes)
    k.let(BATCH.name, Const(0))
    begin, end = share(k, "panels", k.group(), panels, tiles)
    first = k.let("first_column", begin * across)
    with k.loop("panel", begin, end) as panel, k.loop("row_panel", 0, problem.rows, rows) as row_panel:
        column = k.let("column", panel * across)
        row = k.let("row", minimum(row_panel, problem.rows - rows))  # the last panel begins early
        lefts = k.pointer("left", left.memory, left.index(row, 0))
        rights = k.pointer("right", right.memory, right.index(0, column))
        totals = [k.variable(f"sum{i}", k.identity("sum", "float32", lanes)) for i in range(rows * vectors)]
        micro_kernel(
            k,
            Const(problem.inner),
            totals,
            lambda step: [(lefts, step + offset(i, left.row_stride)) for i in range(rows)],
            lambda step: [(rights, step * across + i * lanes) for i in range(vectors)],
        )
        place = k.let("place", row * widest + (column - first))
        for i, total in enumerate(totals):
            k.store(sums, place + (i // vectors * widest + i % vectors * lanes), total)
    last = k.let("column_end", minimum(end * across, problem.columns))
    with k.loop("item_row", 0, problem.rows) as item_row:
        line = k.pointer("line", sums, item_row * widest - first)  # from column 0 on
        finish_row(k, epilogue, width, item_row, line, (first, last, problem.columns))
    return k.source((tiles,), (1,))
