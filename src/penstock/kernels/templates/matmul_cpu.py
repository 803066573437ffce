"""Matrix products on a CPU: one work-item computes a tile of the product alone, with vectors.

What it reads often is copied to where it stays in the cache, in the order in which it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from penstock.drivers.driver import Capabilities
from penstock.kernels.builder import KernelBuilder
from penstock.kernels.dialects.c_vectors import VectorPrinter
from penstock.kernels.ir.expressions import Expr, Type, Var
from penstock.kernels.source import C_TYPES, KernelSource, head
from penstock.kernels.templates.matmul import Epilogue, Matrix, Problem
from penstock.kernels.templates.matmul_tiling import LANES, Tiling, tiling

_SPAN_STEPS = 128  # of a product of few rows or columns, before what they give is added to the rest
_Body = tuple[str, tuple[int, ...], tuple[int, ...]]  # statements between a kernel's braces, grid and group


def cpu_matmul(
    k: KernelBuilder, problem: Problem, capabilities: Capabilities, epilogue: Epilogue, width: int = 1
) -> KernelSource:
    """The kernel of a product. The epilogue takes `width` neighbours at a time, or one."""
    text, grid, group = _body(problem, capabilities, epilogue, width)
    outputs, inputs, scalars = k.parameters
    stored = tuple("uint8" if dtype == "bool" else dtype for dtype, _ in scalars)
    buffers = tuple(dtype for dtype, _ in (*outputs, *inputs))
    opening = head(k.name, outputs, inputs, scalars)
    return KernelSource(k.name, f"{opening}{text}\n}}\n", buffers, stored, grid, group)


def cpu_width(problem: Problem, capabilities: Capabilities, outputs: Sequence[str]) -> int:
    """How many neighbours of a row an epilogue may take."""
    return LANES


def _body(problem: Problem, capabilities: Capabilities, epilogue: Epilogue, width: int) -> _Body:
    """The statements for threads that have vectors."""
    if _is_thin(problem):
        return _thin_body(problem, capabilities, epilogue)
    plan = tiling(problem, capabilities)
    lines = _CpuWriter(problem, plan, epilogue, width).lines()
    return "".join(f"    {line}\n" for line in lines), (problem.batch * plan.tiles,), (1,)


def _finished(epilogue: Epilogue, width: int) -> Iterator[str]:
    """The epilogue of `mm_value`, which are so many items."""
    value = Var("mm_value", Type("float32", width))
    yield "{"
    yield from VectorPrinter().statements(epilogue(Var("mm_y"), Var("mm_x"), value))
    yield "}"


def _text(expr: Expr) -> str:
    return VectorPrinter().expr(expr)


def _item(operand: Matrix, pointer: str, place: str) -> str:
    """One item of an operand, in float32."""
    return f"vload_half({place}, {pointer})" if operand.memory.dtype == "float16" else f"{pointer}[{place}]"


class _CpuWriter:
    """Writes the statements of one work-item.

    Where a size is no multiple of a block's, the last block begins early and does some items again, of which
    only the new ones are finished: so it reads nothing outside and needs no code of its own.
    """

    def __init__(self, problem: Problem, plan: Tiling, epilogue: Epilogue, epilogue_width: int) -> None:
        self.problem, self.plan = problem, plan
        self.epilogue, self.epilogue_width = epilogue, epilogue_width
        self.width = plan.vectors * LANES
        self.row_units = ceil(problem.rows / plan.rows)
        self.column_units = ceil(problem.columns / self.width)
        self.tile_columns = ceil(self.column_units / plan.column_tiles)  # in units, the widest tile
        self.depth = ceil(problem.inner / plan.depth_blocks)  # of the deepest block
        self.has_spans = 1 < plan.span < plan.depth_blocks
        self.has_vectors = problem.inner // plan.depth_blocks >= LANES  # along K, in every block

    def lines(self) -> Iterator[str]:
        problem, plan = self.problem, self.plan
        yield from self._declarations()
        if plan.depth_blocks > 1:
            each, more = divmod(problem.inner, plan.depth_blocks)
            yield f"for (int mm_block = 0; mm_block < {plan.depth_blocks}; mm_block++) {{"
            yield f"const int mm_depth = {each} + (mm_block < {more});"
            yield f"const int mm_k = mm_block * {each} + min(mm_block, {more});"
        else:
            yield f"const int mm_depth = {problem.inner}, mm_k = 0;"
        if plan.pack_right:
            yield from self._pack_right()
        if plan.pack_left:
            yield f"for (int mm_near = mm_top; mm_near < mm_bottom; mm_near += {plan.chunk * plan.rows}) {{"
            yield f"const int mm_far = min(mm_near + {plan.chunk * plan.rows}, mm_bottom);"
            yield from self._pack_left()
        else:
            yield "{ const int mm_near = mm_top, mm_far = mm_bottom;"
        yield from self._each_row("mm_near", "mm_far")
        yield f"for (int mm_column = mm_start; mm_column < mm_stop; mm_column += {self.width}) {{"
        yield from self._sums()
        yield from self._finished()
        yield "}}}" if plan.depth_blocks == 1 else "}}}}"

    def _each_row(self, begin: str, end: str) -> Iterator[str]:
        """A loop over the rows of a tile, as many at a time as the registers take."""
        rows = self.plan.rows
        yield f"for (int mm_row = {begin}; mm_row < {end}; mm_row += {rows}) {{"
        yield f"const int mm_first = {self._at_most('mm_row', self.problem.rows, rows)};"

    def _at_most(self, place: str, size: int, block: int) -> str:
        """`place`, a multiple of `block`, or where the last block begins if that is before it."""
        exact = size % block == 0 and not self.problem.varied
        return place if exact else f"min({place}, {size - block})"

    def _room(self, vectors: int, floats: int) -> int:
        """The length of an array of so many vectors; where sizes vary, with room for more, up to a bound."""
        if not self.problem.varied:
            return vectors
        return max(vectors, min(1 << (vectors - 1).bit_length(), floats // LANES))

    def _declarations(self) -> Iterator[str]:
        problem, plan = self.problem, self.plan
        block = plan.rows * plan.vectors
        tile_rows = ceil(self.row_units / plan.row_tiles)
        kept = block * tile_rows * self.tile_columns if plan.depth_blocks > 1 else block
        sums = self._room(kept, plan.floats * 3 // 8 // (2 if self.has_spans else 1))
        yield f"LOCAL float8 mm_sums[{sums}];"
        if self.has_spans:
            yield f"LOCAL float8 mm_span_sums[{sums}];"
        if plan.pack_right:
            panels = self.tile_columns * self.depth * plan.vectors
            yield f"LOCAL float8 mm_panels[{self._room(panels, plan.floats // 2)}];"
        if plan.pack_left:
            floats = plan.chunk * self._left_packing()[1]
            yield f"LOCAL float8 mm_slivers[{self._room(ceil(floats / LANES), plan.floats // 10)}];"
        yield f"const int batch = GROUP(0) / {plan.tiles};"
        for axis, tile, tiles, units, unit, size, begin, end in (
            ("row", f"GROUP(0) / {plan.column_tiles} % {plan.row_tiles}", plan.row_tiles, self.row_units,
             plan.rows, problem.rows, "top", "bottom"),
            ("column", f"GROUP(0) % {plan.column_tiles}", plan.column_tiles, self.column_units,
             self.width, problem.columns, "start", "stop"),
        ):  # fmt: skip
            yield f"const int mm_{axis}_tile = {tile};"
            yield f"const int mm_{begin} = mm_{axis}_tile * {units} / {tiles} * {unit};"
            yield f"const int mm_{end} = min((mm_{axis}_tile + 1) * {units} / {tiles} * {unit}, {size});"
        for side, operand in (("left", problem.left), ("right", problem.right)):
            yield _pointer(f"mm_{side}", operand, f"({_text(operand.base)})")

    def _pack_right(self) -> Iterator[str]:
        """Copy this block of K, a panel of columns at a time, in the order in which the sums read it."""
        right, plan, width = self.problem.right, self.plan, self.width
        columns, panel = self.problem.columns, self.depth * self.plan.vectors
        if right.column_stride == 1 and columns >= width:
            yield "for (int mm_i = 0; mm_i < mm_depth; mm_i++) {"
            yield f"LOCAL float8 *mm_to = mm_panels + mm_i * {plan.vectors};"
            yield f"for (int mm_column = mm_start; mm_column < mm_stop; mm_column += {width}) {{"
            place = f"(mm_k + mm_i) * {right.row_stride} + {self._at_most('mm_column', columns, width)}"
            for vector in range(plan.vectors):
                yield f"mm_to[{vector}] = {_vector(right, 'mm_right', f'{place} + {vector * LANES}')};"
            yield f"mm_to += {panel};"
            yield "}}"
        elif right.row_stride == 1 and columns >= width and self.has_vectors:
            column = f"mm_start + mm_part / {plan.vectors} * {width}"
            yield f"for (int mm_part = 0; {column} < mm_stop; mm_part++) {{"
            column = f"{self._at_most(column, columns, width)} + mm_part % {plan.vectors} * {LANES}"
            to = f"mm_part / {plan.vectors} * {panel} + mm_part % {plan.vectors}"
            yield f"const int mm_column = {column};"
            yield f"LOCAL float8 *mm_to = mm_panels + {to};"
            yield f"for (int mm_step = 0; mm_step < mm_depth; mm_step += {LANES}) {{"
            yield f"const int mm_i = min(mm_step, mm_depth - {LANES});"
            for i in range(LANES):
                place = f"(mm_column + {i}) * {right.column_stride} + mm_k + mm_i"
                yield f"float8 mm_x{i} = {_vector(right, 'mm_right', place)};"
            yield from _transposed()
            for i in range(LANES):
                yield f"mm_to[(mm_i + {i}) * {plan.vectors}] = mm_x{i};"
            yield "}}"
        else:
            column = f"mm_start + mm_j / {width} * {width}"
            yield "for (int mm_i = 0; mm_i < mm_depth; mm_i++)"
            yield f"for (int mm_j = 0; {column} < mm_stop; mm_j++) {{"
            shifted = column if columns < width else self._at_most(column, columns, width)
            yield f"const int mm_column = min({shifted} + mm_j % {width}, {columns - 1});"
            place = f"(mm_k + mm_i) * {right.row_stride} + mm_column * {right.column_stride}"
            to = f"mm_j / {width} * {panel * LANES} + mm_i * {width} + mm_j % {width}"
            yield f"((LOCAL float *)mm_panels)[{to}] = {_item(right, 'mm_right', place)};"
            yield "}"

    def _left_packing(self) -> tuple[str, int, int, int]:
        """How rows for the registers are packed, the room that takes, and the strides of rows and K in it."""
        left, rows = self.problem.left, self.plan.rows
        across = ceil(rows / LANES) * LANES
        if left.column_stride == 1 and self.has_vectors:
            return "rows", rows * self.depth, self.depth, 1
        if left.row_stride == 1 and self.problem.rows >= across:
            # A cache line more: a power of two apart, slivers would push each other out of the cache.
            return "columns", across * self.depth + 16, 1, across
        return "items", rows * self.depth, 1, rows

    def _pack_left(self) -> Iterator[str]:
        """Copy some rows of this block of K."""
        left, rows = self.problem.left, self.plan.rows
        how, size, row_stride, k_stride = self._left_packing()
        to = f"LOCAL float *mm_to = (LOCAL float *)mm_slivers + (mm_row - mm_near) / {rows} * {size}"
        if how == "rows":
            yield from self._each_row("mm_near", "mm_far")
            yield f"{to};"
            yield f"for (int mm_r = 0; mm_r < {rows}; mm_r++)"
            yield f"for (int mm_step = 0; mm_step < mm_depth; mm_step += {LANES}) {{"
            yield f"const int mm_i = min(mm_step, mm_depth - {LANES});"
            value = _vector(left, "mm_left", f"(mm_first + mm_r) * {left.row_stride} + mm_k + mm_i")
            yield f"*(LOCAL loose_float8 *)(mm_to + mm_r * {row_stride} + mm_i) = {value};"
        elif how == "columns":
            yield "for (int mm_i = 0; mm_i < mm_depth; mm_i++) {"
            yield f"LOCAL float *mm_to = (LOCAL float *)mm_slivers + mm_i * {k_stride};"
            yield f"for (int mm_row = mm_near; mm_row < mm_far; mm_row += {rows}) {{"
            for vector in range(0, k_stride, LANES):
                row = f"min(mm_row, {self.problem.rows - k_stride}) + {vector}"
                value = _vector(left, "mm_left", f"{row} + (mm_k + mm_i) * {left.column_stride}")
                yield f"*(LOCAL loose_float8 *)(mm_to + {vector}) = {value};"
            yield f"mm_to += {size};"
        else:
            yield from self._each_row("mm_near", "mm_far")
            yield f"{to};"
            yield f"for (int mm_i = 0; mm_i < {rows} * mm_depth; mm_i++) {{"
            row, k = f"(mm_first + mm_i % {rows})", f"(mm_k + mm_i / {rows})"
            place = f"{row} * {left.row_stride} + {k} * {left.column_stride}"
            yield f"mm_to[mm_i] = {_item(left, 'mm_left', place)};"
        yield "}}"

    def _sums(self) -> Iterator[str]:
        """The sums of one block in registers, over this block of K, and then in `mm_slot`."""
        problem, plan, width = self.problem, self.plan, self.width
        left, right, block = problem.left, problem.right, plan.rows * plan.vectors
        first = "0" if problem.columns < width else self._at_most("mm_column", problem.columns, width)
        yield f"const int mm_begin = {first};"
        if plan.depth_blocks > 1:
            down, across = f"(mm_row - mm_top) / {plan.rows}", f"(mm_column - mm_start) / {width}"
            place = f"({down} * {self.tile_columns} + {across}) * {block}"
            yield f"LOCAL float8 *mm_slot = mm_sums + {place};"
            if self.has_spans:
                yield f"LOCAL float8 *mm_span = mm_span_sums + {place};"
        else:
            yield "LOCAL float8 *mm_slot = mm_sums;"
        if plan.pack_left:
            how, size, row_stride, k_stride = self._left_packing()
            place = f"(mm_row - mm_near) / {plan.rows} * {size}"
            if how == "columns":
                place += f" + mm_first - min(mm_first, {problem.rows - k_stride})"
            yield f"LOCAL const float *mm_a = (LOCAL const float *)mm_slivers + {place};"
        else:
            row_stride, k_stride = left.row_stride, left.column_stride
            yield f"GLOBAL const float *mm_a = mm_left + mm_first * {row_stride} + mm_k * {k_stride};"
        if plan.pack_right:
            panel = self.depth * plan.vectors
            yield f"LOCAL const float8 *mm_b = mm_panels + (mm_column - mm_start) / {width} * {panel};"
            vectors = [f"mm_b[{vector}]" for vector in range(plan.vectors)]
            right_stride = plan.vectors
        else:
            yield f"GLOBAL const float *mm_b = mm_right + mm_begin + mm_k * {right.row_stride};"
            vectors = [
                f"*(GLOBAL const loose_float8 *)(mm_b + {vector * LANES})" for vector in range(plan.vectors)
            ]
            right_stride = right.row_stride
        kept, first = ("mm_span", f"mm_block % {plan.span}") if self.has_spans else ("mm_slot", "mm_block")
        for i in range(block):
            start = f"{first} ? {kept}[{i}] : (float8)(0)" if plan.span > 1 else "0"
            yield f"float8 mm_s{i} = {start};"
        yield "for (int mm_i = 0; mm_i < mm_depth; mm_i++) {"
        for vector, value in enumerate(vectors):
            yield f"const float8 mm_b{vector} = {value};"
        for row in range(plan.rows):
            yield f"const float8 mm_a{row} = (float8)(mm_a[{row * row_stride}]);"
            for vector in range(plan.vectors):
                yield f"mm_s{row * plan.vectors + vector} += mm_a{row} * mm_b{vector};"
        yield f"mm_a += {k_stride}; mm_b += {right_stride};"
        yield "}"
        if self.has_spans:
            yield f"if (mm_block % {plan.span} < {plan.span - 1} && mm_block < {plan.depth_blocks - 1}) {{"
            yield from (f"mm_span[{i}] = mm_s{i};" for i in range(block))
            yield "continue; }"
        added = plan.span < plan.depth_blocks
        for i in range(block):
            value = f"mm_block >= {plan.span} ? mm_slot[{i}] + mm_s{i} : mm_s{i}" if added else f"mm_s{i}"
            yield f"mm_slot[{i}] = {value};"

    def _finished(self) -> Iterator[str]:
        plan, columns = self.plan, self.problem.columns
        if plan.depth_blocks > 1:
            yield f"if (mm_block < {plan.depth_blocks - 1}) continue;"
        yield f"const int mm_end = min(mm_column + {self.width}, {columns});"
        yield f"for (int mm_r = mm_row - mm_first; mm_r < {plan.rows}; mm_r++) {{"
        yield f"LOCAL const float *mm_values = (LOCAL const float *)mm_slot + mm_r * {self.width} - mm_begin;"
        yield "const int mm_y = mm_first + mm_r;"
        yield "int mm_x = mm_column;"
        if columns >= LANES and self.epilogue_width > 1:
            yield f"for (; mm_x + {LANES} <= mm_end; mm_x += {LANES}) {{"
            yield "float8 mm_value = *(LOCAL const loose_float8 *)(mm_values + mm_x);"
            yield from _finished(self.epilogue, LANES)
            yield "}"
        if columns % LANES or self.epilogue_width == 1:
            yield "for (; mm_x < mm_end; mm_x++) {"
            yield "float mm_value = mm_values[mm_x];"
            yield from _finished(self.epilogue, 1)
            yield "}"
        yield "}"


def _pointer(name: str, operand: Matrix, place: str) -> str:
    return f"GLOBAL const {C_TYPES[operand.memory.dtype]} *{name} = {operand.memory.name} + {place};"


def _vector(operand: Matrix, pointer: str, place: str) -> str:
    if operand.memory.dtype == "float16":
        return f"from_halves_{LANES}(*(GLOBAL const loose_ushort{LANES} *)({pointer} + {place}))"
    return f"*(GLOBAL const loose_float8 *)({pointer} + {place})"


def _transposed() -> Iterator[str]:
    """Transpose the matrix whose rows are the vectors `mm_x0`, `mm_x1`, ...: swap halves, quarters, ..."""
    block = LANES // 2
    while block:
        for i in (i for i in range(LANES) if not i & block):
            one, two = f"mm_x{i}", f"mm_x{i + block}"
            low = [f"{two}.s{c - block:x}" if c & block else f"{one}.s{c:x}" for c in range(LANES)]
            high = [f"{two}.s{c:x}" if c & block else f"{one}.s{c + block:x}" for c in range(LANES)]
            yield f"{{ const float8 mm_low = (float8)({', '.join(low)});"
            yield f"{two} = (float8)({', '.join(high)}); {one} = mm_low; }}"
        block //= 2


def _is_thin(problem: Problem) -> bool:
    """Whether so few rows or columns are multiplied that each item is best computed alone, along K."""
    along = problem.left.column_stride == 1 and problem.right.row_stride == 1
    return along and min(problem.rows, problem.columns) <= 3 and problem.inner >= LANES


def _thin_body(problem: Problem, capabilities: Capabilities, epilogue: Epilogue) -> _Body:
    """Items one by one, those that read the same row or column of the larger side one after the other."""
    left, right, inner = problem.left, problem.right, problem.inner
    items = problem.rows * problem.columns
    work_items = ceil(4 * capabilities.compute_units / problem.batch)
    parts = max(1, min(work_items, items * inner // 2**14))
    few = min(problem.rows, problem.columns)
    row, column = f"mm_item % {few}", f"mm_item / {few}"
    if problem.rows > problem.columns:
        row, column = column, row
    chains = 4  # of sums, that a sum need not wait for the one before it
    step = chains * LANES

    def products(count: int) -> Iterator[str]:
        for i in range(count):
            place = f"mm_i + {i * LANES}"
            one, two = _vector(left, "mm_a", place), _vector(right, "mm_b", place)
            yield f"mm_s{i} += {one} * {two};"

    span = _SPAN_STEPS * step
    spans = [
        "float8 mm_spans = 0;",
        f"while (mm_i + {span} <= {inner}) {{",
        f"for (const int mm_end = mm_i + {span}; mm_i < mm_end; mm_i += {step}) {{",
        *products(chains),
        "}",
        "mm_spans += (mm_s0 + mm_s1) + (mm_s2 + mm_s3);",
        *(f"mm_s{i} = 0;" for i in range(chains)),
        "}",
    ]
    lines = [
        f"const int batch = GROUP(0) / {parts}, mm_part = GROUP(0) % {parts};",
        f"const int mm_last = (int)((long)(mm_part + 1) * {items} / {parts});",
        f"for (int mm_item = (int)((long)mm_part * {items} / {parts}); mm_item < mm_last; mm_item++) {{",
        f"const int mm_y = {row}, mm_x = {column};",
        _pointer("mm_a", left, f"({_text(left.base)}) + mm_y * {left.row_stride}"),
        _pointer("mm_b", right, f"({_text(right.base)}) + mm_x * {right.column_stride}"),
        f"float8 {', '.join(f'mm_s{i} = 0' for i in range(chains))};",
        "int mm_i = 0;",
        *(spans if inner > span else []),
        f"for (; mm_i + {step} <= {inner}; mm_i += {step}) {{",
        *products(chains),
        "}",
        f"for (; mm_i + {LANES} <= {inner}; mm_i += {LANES}) {{",
        *products(1),
        "}",
        f"mm_s0 += {' + '.join(f'mm_s{i}' for i in range(1, chains))};",
        *(["mm_s0 += mm_spans;"] if inner > span else []),
        f"float mm_value = {' + '.join(f'mm_s0.s{i:x}' for i in range(LANES))};",
        f"for (; mm_i < {inner}; mm_i++)",
        f"    mm_value += {_item(left, 'mm_a', 'mm_i')} * {_item(right, 'mm_b', 'mm_i')};",
        *_finished(epilogue, 1),
        "}",
    ]
    return "".join(f"    {line}\n" for line in lines), (problem.batch * parts,), (1,)
