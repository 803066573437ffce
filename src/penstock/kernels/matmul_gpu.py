"""Matrix products on a GPU: the threads of a group share a tile's operands, or the sums of few items."""

from __future__ import annotations

from math import ceil
from typing import Literal

from penstock.drivers.driver import Capabilities
from penstock.kernels.matmul_problem import Body, Finish, Problem, item

_TILE_DEPTH = 16
_SMALL = 1 << 22  # multiplications, up to which tiles would be too few, and each would take too long
_SMALL_THREADS = 128  # in a group, of a small product
_MOST_PARTS = 32  # of a sum
_STEPS = 8  # of a thread for its part of a sum, where there are enough parts


def gpu_body(problem: Problem, capabilities: Capabilities, finish: Finish) -> Body:
    """The statements of a product, which depend on its size."""
    multiplications = problem.batch * problem.rows * problem.columns * problem.inner
    write = _few_items if multiplications <= _SMALL else _tiles
    return write(problem, capabilities, finish)


def _few_items(problem: Problem, capabilities: Capabilities, finish: Finish) -> Body:
    """Threads that take parts of an item's sum, side by side; one of them adds the parts up.

    Neighbouring threads read neighbours of the right side: they are of one item, or of neighbouring ones.
    """
    threads = min(_SMALL_THREADS, capabilities.max_group_size)
    parts = 1
    while parts < min(_MOST_PARTS, threads) and parts * _STEPS < problem.inner:
        parts *= 2
    items = threads // parts
    total = problem.batch * problem.rows * problem.columns
    if problem.right.row_stride == 1:
        part, place, first, step = f"THREAD % {parts}", f"THREAD / {parts}", f"mm_place * {parts}", 1
    else:
        part, place, first, step = f"THREAD / {items}", f"THREAD % {items}", "mm_place", items
    left, right = problem.left, problem.right
    left_place = f"({left.base}) + mm_y * {left.row_stride} + mm_k * {left.column_stride}"
    right_place = f"({right.base}) + mm_k * {right.row_stride} + mm_x * {right.column_stride}"
    product = f"{item(left, left.name, left_place)} * {item(right, right.name, right_place)}"
    lines = [
        f"const int mm_part = {part}, mm_place = {place}, mm_item = GROUP(0) * {items} + mm_place;",
        f"const int batch = mm_item / {problem.rows * problem.columns};",
        f"const int mm_y = mm_item / {problem.columns} % {problem.rows}, mm_x = mm_item % {problem.columns};",
        "float mm_value = 0;",
        f"if (mm_item < {total}) {{",
        f"#pragma unroll {_STEPS}",
        f"for (int mm_k = mm_part; mm_k < {problem.inner}; mm_k += {parts}) mm_value += {product};",
        "}",
    ]
    if parts > 1:
        lines += [
            f"LOCAL float mm_parts[{threads}];",
            "mm_parts[THREAD] = mm_value;",
            "BARRIER;",
            "if (mm_part == 0) {",
            *_unrolled("mm_i", parts - 1, f"mm_value += mm_parts[{first} + (mm_i + 1) * {step}];"),
            "}",
        ]
    lines += [
        f"if (mm_part == 0 && mm_item < {total}) {{",
        *finish("mm_y", "mm_x", "mm_value", 1),
        "}",
    ]
    return "".join(f"    {line}\n" for line in lines), (ceil(total / items),), (threads,)


def _tiles(problem: Problem, capabilities: Capabilities, finish: Finish) -> Body:
    """A group computes a square tile; of it, each thread a square of items as far apart as there are threads.

    So neighbouring threads have neighbouring columns, in local memory and where `finish` writes them.
    """
    side = 16 if capabilities.max_group_size >= 256 else 8  # threads, in a square
    for each in (8, 4, 2):  # items of a thread, in a square
        size = side * each
        row_tiles, column_tiles = ceil(problem.rows / size), ceil(problem.columns / size)
        grid = problem.batch * row_tiles * column_tiles
        fits = 4 * _TILE_DEPTH * (2 * size + 2) <= capabilities.local_bytes
        if fits and grid >= 2 * capabilities.compute_units:
            break
    lines = [
        f"LOCAL float mm_left_tile[{_TILE_DEPTH * (size + 1)}], mm_right_tile[{_TILE_DEPTH * (size + 1)}];",
        f"const int batch = GROUP(0) / {row_tiles * column_tiles};",
        f"const int mm_top = GROUP(0) / {column_tiles} % {row_tiles} * {size};",
        f"const int mm_start = GROUP(0) % {column_tiles} * {size};",
        f"const int mm_row = THREAD / {side}, mm_column = THREAD % {side};",
        f"float mm_s[{each}][{each}];",
        *_unrolled("mm_r", each, *_unrolled("mm_c", each, "mm_s[mm_r][mm_c] = 0;")),
        f"for (int mm_k = 0; mm_k < {problem.inner}; mm_k += {_TILE_DEPTH}) {{",
        *_load_tile(problem, "left", size),
        *_load_tile(problem, "right", size),
        "BARRIER;",
        f"for (int mm_i = 0; mm_i < {_TILE_DEPTH}; mm_i++) {{",
        f"float mm_a[{each}], mm_b[{each}];",
        *_unrolled(
            "mm_r",
            each,
            f"mm_a[mm_r] = mm_left_tile[mm_i * {size + 1} + mm_row + mm_r * {side}];",
            f"mm_b[mm_r] = mm_right_tile[mm_i * {size + 1} + mm_column + mm_r * {side}];",
        ),
        *_unrolled("mm_r", each, *_unrolled("mm_c", each, "mm_s[mm_r][mm_c] += mm_a[mm_r] * mm_b[mm_c];")),
        "}",
        "BARRIER;",
        "}",
        # The sums move up for the loops to find the next one in the same place: an array whose place is
        # computed would not be kept in registers, and loops laid out in full would repeat what `finish` says.
        f"for (int mm_r = 0; mm_r < {each}; mm_r++) {{",
        f"for (int mm_c = 0; mm_c < {each}; mm_c++) {{",
        f"const int mm_y = mm_top + mm_row + mm_r * {side}, mm_x = mm_start + mm_column + mm_c * {side};",
        f"if (mm_y < {problem.rows} && mm_x < {problem.columns}) {{",
        "float mm_value = mm_s[0][0];",
        *finish("mm_y", "mm_x", "mm_value", 1),
        "}",
        *_unrolled("mm_i", each - 1, "mm_s[0][mm_i] = mm_s[0][mm_i + 1];"),
        "}",
        *_unrolled("mm_i", each - 1, *_unrolled("mm_c", each, "mm_s[mm_i][mm_c] = mm_s[mm_i + 1][mm_c];")),
        "}",
    ]
    return "".join(f"    {line}\n" for line in lines), (grid,), (side * side,)


def _load_tile(problem: Problem, side: Literal["left", "right"], size: int) -> list[str]:
    """Fill a side's tile for the steps from `mm_k` on, with zeros outside, in the order of the memory."""
    if side == "left":
        operand, begin, length = problem.left, "mm_top", problem.rows
        stride, k_stride = operand.row_stride, operand.column_stride
    else:
        operand, begin, length = problem.right, "mm_start", problem.columns
        stride, k_stride = operand.column_stride, operand.row_stride
    if k_stride == 1:
        line, step = f"mm_i / {_TILE_DEPTH}", f"mm_i % {_TILE_DEPTH}"
    else:
        line, step = f"mm_i % {size}", f"mm_i / {size}"
    place = f"({operand.base}) + ({begin} + mm_line) * {stride} + (mm_k + mm_step) * {k_stride}"
    return [
        f"for (int mm_i = THREAD; mm_i < {size * _TILE_DEPTH}; mm_i += THREADS) {{",
        f"const int mm_line = {line}, mm_step = {step};",
        f"const int mm_inside = {begin} + mm_line < {length} && mm_k + mm_step < {problem.inner};",
        f"mm_{side}_tile[mm_step * {size + 1} + mm_line] =",
        f"    mm_inside ? {item(operand, operand.name, place)} : 0.0f;",
        "}",
    ]


def _unrolled(name: str, count: int, *body: str) -> list[str]:
    return ["#pragma unroll", f"for (int {name} = 0; {name} < {count}; {name}++) {{", *body, "}"]
