"""Matrix products in WGSL: the threads of a group share a tile's operands, or the sums of few items."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd
from typing import Literal

from penstock.drivers.driver import Capabilities
from penstock.kernels.dialects.wgsl_memory import Words
from penstock.kernels.matmul_problem import Finish, Problem
from penstock.kernels.wgsl_steps import UNROLLED

_TILE_DEPTH = 16
_TILES = ((16, 8), (16, 4), (8, 4))  # threads of a group, and items of a thread, in a square
_QUAD = 4  # neighbours that lie in one vector of a tile
_FILLED, _LEAST_FILLED = 0.5, 0.25  # part of a tile that is used, or a smaller one is taken, or none
_SMALL = 1 << 22  # multiplications, up to which a product may be one of few items
_SMALL_THREADS = 128  # in a group, of a small product
_MOST_PARTS = 32  # of a sum
_STEPS = 8  # of a thread for its part of a sum, where there are enough parts


@dataclass(frozen=True)
class WgslBody:
    """What a product is as text: lines before the kernel and in it, grid and group."""

    declared: tuple[str, ...]
    lines: list[str]
    grid: tuple[int, ...]
    group: tuple[int, ...]


def finished_lanes(problem: Problem, capabilities: Capabilities, together: int) -> int:
    """How many neighbours of a row are finished at a time; `together` of them are one word of an output."""
    return gcd(problem.columns, together if _is_small(problem, capabilities) else _QUAD)


def wgsl_body(
    problem: Problem, capabilities: Capabilities, finish: Finish, lanes: int, words: Words
) -> WgslBody:
    """The statements of a product, whose items go through `finish`, so many neighbours at a time."""
    write = _few_items if _is_small(problem, capabilities) else _tiles
    return write(problem, capabilities, finish, lanes, words)


def _is_small(problem: Problem, capabilities: Capabilities) -> bool:
    """Whether tiles would be too few, and each would take too long, or would be filled too little."""
    multiplications = problem.batch * problem.rows * problem.columns * problem.inner
    side, each = _TILES[-1]
    grid, filled = _tiling(problem, side * each)
    return multiplications <= _SMALL and (grid < capabilities.compute_units or filled < _LEAST_FILLED)


def _tiling(problem: Problem, size: int) -> tuple[int, float]:
    """How many tiles of a size there are, and which part of them is inside the matrices."""
    tiles = ceil(problem.rows / size) * ceil(problem.columns / size)
    return problem.batch * tiles, problem.rows * problem.columns / (tiles * size**2)


def _few_items(
    problem: Problem, capabilities: Capabilities, finish: Finish, lanes: int, words: Words
) -> WgslBody:
    """Threads that take parts of the sums of some neighbours; one of them adds the parts up.

    Neighbouring threads read neighbours of the right side: they are of one item, or of neighbouring ones.
    """
    threads = min(_SMALL_THREADS, capabilities.max_group_size)
    parts = 1
    while parts < min(_MOST_PARTS, threads) and parts * _STEPS < problem.inner:
        parts *= 2
    items, columns = threads // parts, problem.columns // lanes
    total = problem.batch * problem.rows * columns
    if problem.right.row_stride == 1:
        part, place, first, step = f"THREAD % {parts}", f"THREAD / {parts}", f"mm_place * {parts}", 1
    else:
        part, place, first, step = f"THREAD / {items}", f"THREAD % {items}", "mm_place", items
    left, right = problem.left, problem.right
    left_place = f"({left.base}) + mm_y * {left.row_stride} + mm_k * {left.column_stride}"
    names = [f"mm_value_{lane}" for lane in range(lanes)] if lanes > 1 else ["mm_value"]
    sums = []
    for lane, name in enumerate(names):
        at = f"({right.base}) + mm_k * {right.row_stride} + (mm_x + {lane}) * {right.column_stride}"
        sums.append(f"            {name} += mm_left * {words.item(right.name, right.dtype, at)};")
    steps = []
    for k in range(UNROLLED):
        steps += [
            f"        {{ let mm_k = mm_first + {k * parts};",
            f"        if (mm_k < {problem.inner}) {{",
            f"            let mm_left = {words.item(left.name, left.dtype, left_place)};",
            *sums,
            "        } }",
        ]
    lines = [
        f"let mm_part = {part};",
        f"let mm_place = {place};",
        f"let mm_item = GROUP_0 * {items} + mm_place;",
        f"let batch = mm_item / {problem.rows * columns};",
        f"let mm_y = mm_item / {columns} % {problem.rows};",
        f"let mm_x = mm_item % {columns} * {lanes};",
        *(f"var {name} = 0.0;" for name in names),
        f"if (mm_item < {total}) {{",
        f"    for (var mm_first = mm_part; mm_first < {problem.inner}; mm_first += {parts * UNROLLED}) {{",
        *steps,
        "    }",
        "}",
    ]
    declared = []
    if parts > 1:
        declared = [f"var<workgroup> mm_parts: array<f32, {threads * lanes}>;"]
        lines += [f"mm_parts[THREAD + {lane * threads}] = {name};" for lane, name in enumerate(names)]
        lines += ["workgroupBarrier();", "if (mm_part == 0) {"]
        lines.append(f"    for (var mm_i = 1; mm_i < {parts}; mm_i++) {{")
        lines += [
            f"        {name} += mm_parts[{first} + mm_i * {step} + {lane * threads}];"
            for lane, name in enumerate(names)
        ]
        lines += ["    }", "}"]
    lines += [
        f"if (mm_part == 0 && mm_item < {total}) {{",
        *finish("mm_y", "mm_x", "mm_value", lanes),
        "}",
    ]
    return WgslBody(tuple(declared), lines, (ceil(total / items),), (threads,))


def _tiles(
    problem: Problem, capabilities: Capabilities, finish: Finish, lanes: int, words: Words
) -> WgslBody:
    """A group computes a square tile. A thread has 4 by 4 items of it, or as many in each quarter of it.

    Of both sides, vectors of 4 neighbours are in the group's memory, each written by one thread.
    """
    for side, each in _TILES:
        size = side * each
        grid, filled = _tiling(problem, size)
        fits = 8 * _TILE_DEPTH * size <= capabilities.local_bytes and side**2 <= capabilities.max_group_size
        if fits and grid >= 2 * capabilities.compute_units and filled >= _FILLED:
            break
    row_tiles, column_tiles = ceil(problem.rows / size), ceil(problem.columns / size)
    squares, quads = each // _QUAD, size // _QUAD
    count = each * squares
    inner = []
    for step in range(UNROLLED):
        inner.append("        {")
        for square in range(squares):
            for tile, rank in (("left", "mm_row"), ("right", "mm_column")):
                at = f"(mm_i + {step}) * {quads} + {square * side} + {rank}"
                inner.append(f"            let mm_{tile}_{square} = mm_{tile}_tile[{at}];")
        for row in range(each):
            factor = f"mm_left_{row // _QUAD}.{'xyzw'[row % _QUAD]}"
            for square in range(squares):
                inner.append(f"            mm_s{row * squares + square} += {factor} * mm_right_{square};")
        inner.append("        }")
    lines = [
        f"let batch = GROUP_0 / {row_tiles * column_tiles};",
        f"let mm_top = GROUP_0 / {column_tiles} % {row_tiles} * {size};",
        f"let mm_start = GROUP_0 % {column_tiles} * {size};",
        f"let mm_row = THREAD / {side};",
        f"let mm_column = THREAD % {side};",
        *(f"var mm_s{k} = vec4<f32>();" for k in range(count)),
        f"for (var mm_k = 0; mm_k < {problem.inner}; mm_k += {_TILE_DEPTH}) {{",
        *_load_tile(problem, "left", size, side**2, words),
        *_load_tile(problem, "right", size, side**2, words),
        "    workgroupBarrier();",
        f"    for (var mm_i = 0; mm_i < {_TILE_DEPTH}; mm_i += {UNROLLED}) {{",
        *inner,
        "    }",
        "    workgroupBarrier();",
        "}",
        # The sums move up, so that the next is always in the same place: an array with a changing index would
        # not be in registers, and each of the sums would need the lines of `finish` for itself.
        f"for (var mm_i = 0; mm_i < {count}; mm_i++) {{",
        f"    let mm_r = mm_i / {squares};",
        f"    let mm_y = mm_top + mm_r / {_QUAD} * {side * _QUAD} + mm_row * {_QUAD} + mm_r % {_QUAD};",
        f"    let mm_x = mm_start + mm_i % {squares} * {side * _QUAD} + mm_column * {_QUAD};",
        f"    if (mm_y < {problem.rows}) {{",
        *_finished(problem, finish, lanes),
        "    }",
        *(f"    mm_s{k} = mm_s{k + 1};" for k in range(count - 1)),
        "}",
    ]
    declared = [
        f"var<workgroup> mm_{s}_tile: array<vec4<f32>, {_TILE_DEPTH * quads}>;" for s in ("left", "right")
    ]
    return WgslBody(tuple(declared), lines, (grid,), (side**2,))


def _finished(problem: Problem, finish: Finish, lanes: int) -> list[str]:
    """The ends of the four items of a vector, some of which may lie outside."""
    lines = []
    for first in range(0, _QUAD, lanes):
        column = f"mm_x + {first}" if first else "mm_x"
        components = [f"mm_s0.{'xyzw'[first + lane]}" for lane in range(lanes)]
        names = [f"mm_value_{lane}" for lane in range(lanes)] if lanes > 1 else ["mm_value"]
        lines += [
            f"if ({column} < {problem.columns}) {{",
            *(f"let {name} = {value};" for name, value in zip(names, components, strict=True)),
            *finish("mm_y", column, "mm_value", lanes),
            "}",
        ]
    return lines


def _load_tile(
    problem: Problem, side: Literal["left", "right"], size: int, threads: int, words: Words
) -> list[str]:
    """Fill a side's tile for the steps from `mm_k` on, with zeros outside, in the order of the memory.

    All threads have as many vectors to fill.
    """
    if side == "left":
        operand, begin, length = problem.left, "mm_top", problem.rows
        stride, k_stride = operand.row_stride, operand.column_stride
    else:
        operand, begin, length = problem.right, "mm_start", problem.columns
        stride, k_stride = operand.column_stride, operand.row_stride
    quads = size // _QUAD
    if k_stride == 1:
        quad, step = f"mm_i / {_TILE_DEPTH}", f"mm_i % {_TILE_DEPTH}"
    else:
        quad, step = f"mm_i % {quads}", f"mm_i / {quads}"
    loads = []
    for lane in range(_QUAD):
        place = f"({operand.base}) + (mm_line + {lane}) * {stride} + (mm_k + mm_step) * {k_stride}"
        load = f"mm_quad.{'xyzw'[lane]} = {words.item(operand.name, operand.dtype, place)};"
        inside = f"mm_line + {lane} < {length}" if length % size else ""
        loads.append(f"if ({inside}) {{ {load} }}" if inside else load)
    if problem.inner % _TILE_DEPTH:
        loads = [f"if (mm_k + mm_step < {problem.inner}) {{", *loads, "}"]
    lines = []
    for first in range(0, quads * _TILE_DEPTH, threads):
        lines += [
            "    {",
            f"        let mm_i = THREAD + {first};",
            f"        let mm_step = {step};",
            f"        let mm_quad_at = {quad};",
            f"        let mm_line = {begin} + mm_quad_at * {_QUAD};",
            "        var mm_quad = vec4<f32>();",
            *(f"        {line}" for line in loads),
            f"        mm_{side}_tile[mm_step * {quads} + mm_quad_at] = mm_quad;",
            "    }",
        ]
    return lines
