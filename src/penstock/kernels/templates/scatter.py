"""Sums of rows by index, each in the order of the index, so that the bits are always the same."""

from __future__ import annotations

import math
from collections.abc import Callable

from penstock.drivers.driver import Capabilities
from penstock.graph.dtypes import HALF_PRECISION
from penstock.graph.node import Node
from penstock.graph.reducing import BLOCK
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.ir.expressions import Const, Expr, Operand
from penstock.kernels.source import KernelSource
from penstock.kernels.templates.launches import Launch, Lowering, is_cpu, one_launch
from penstock.kernels.templates.scatter_gpu import add_rows

_NARROW = 64  # columns that a thread of a CPU has at least, if there are as many
_LOOK_UP = 16  # items that can be added in the time of two index look-ups
_TOGETHER = 64  # columns of a frequent row that a thread adds up at a time


def scatter(node: Node, capabilities: Capabilities) -> Lowering | None:
    """Kernels of `scatter_add`."""
    index, length, rest = node.inputs[1], node.shape[0], math.prod(node.shape[1:])
    if not is_cpu(capabilities):
        source = add_rows(node, capabilities)
        return None if source is None else one_launch(source)
    if node.dtype in HALF_PRECISION:
        return None
    if (length + index.size) * rest < _LOOK_UP * index.size:
        scratch = (4 * length, node.nbytes, node.nbytes) if _has_levels(node) else ()
        buffers = (0, *range(3, 3 + len(scratch)), 1, 2)
        return Lowering((Launch(_add_narrow_rows(node, rest, capabilities), buffers),), scratch)
    positions = Launch(_find_positions(index, length, capabilities), (3, 4, 2))
    sums = Launch(_add_rows(node, rest, capabilities), (0, 1, 3, 4))
    return Lowering((positions, sums), (4 * length, 4 * index.size))


def _has_levels(node: Node) -> bool:
    """Whether long sums are rounded, and so added up in levels."""
    return node.dtype.kind == "f"


def _clear(k: KernelBuilder, memory: Memory, length: Operand) -> None:
    """Set the first items of a memory to 0."""
    with k.loop("i", 0, length) as i:
        k.store(memory, i, 0)


def _grow(k: KernelBuilder, memory: Memory, index: Expr, value: Expr) -> None:
    """Add a value to an item."""
    k.store(memory, index, k.combine("sum", k.load(memory, index), value))


def _least(k: KernelBuilder, value: Expr, bound: Operand) -> Expr:
    """The smaller of two integers. PoCL calls `min` as a function that it does not optimise."""
    return k.select(value < bound, value, bound)


def _add_narrow_rows(node: Node, rest: int, capabilities: Capabilities) -> KernelSource:
    """For a CPU: a single thread adds everything up in the order of the index.

    It counts the additions to each row: after a block of them, the sums in the output move to the first
    level, and after a block of blocks to the second.
    """
    dtype, index, length = str(node.dtype), node.inputs[1], node.shape[0]
    levels = ["int32", dtype, dtype] if _has_levels(node) else []
    k = KernelBuilder("add_rows", capabilities, [dtype, *levels], [dtype, str(index.dtype)])
    sums, *others = k.outputs
    _clear(k, sums, length * rest)
    for memory in others:
        _clear(k, memory, length if memory.dtype == "int32" else length * rest)
    with k.loop("position", 0, index.size) as position:
        row = k.let("row", k.load_index(k.inputs[1], position, length))
        with k.when(row >= 0):
            # In 64 bits, or PoCL extends the sign of each product: a tenth of the time of so short a loop.
            target = k.pointer("target", sums, row.cast("int64") * rest)
            source = k.pointer("source", k.inputs[0], position.cast("int64") * rest)
            with k.loop("column", 0, rest) as column:
                _grow(k, target, column, k.load(source, column))
            if others:
                _raise_blocks(k, target, others, row, rest)
    if others:
        _, sums1, sums2 = others
        with k.loop("i", 0, length * rest) as i:
            k.store(sums, i, k.load(sums2, i) + (k.load(sums1, i) + k.load(sums, i)))
    return k.source((1,), (1,))


def _raise_blocks(k: KernelBuilder, target: Memory, others: list[Memory], row: Expr, rest: int) -> None:
    """Count an addition to a row; if that fills a block, its sums in `target` move to the next level."""
    counts, sums1, sums2 = others
    count = k.let("count", k.load(counts, row) + 1)
    k.store(counts, row, count)
    with k.when((count % BLOCK).eq(0)), k.loop("column", 0, rest) as column:
        i = k.let("i", row * rest + column)
        _grow(k, sums1, i, k.load(target, column))
        k.store(target, column, 0)
        with k.when((count % (BLOCK * BLOCK)).eq(0)):
            _grow(k, sums2, i, k.load(sums1, i))
            k.store(sums1, i, 0)


def _find_positions(index: Node, length: int, capabilities: Capabilities) -> KernelSource:
    """For a CPU: the positions of the index grouped by row, and for each row where its positions end."""
    k = KernelBuilder("find_positions", capabilities, ["int32", "int32"], [str(index.dtype)])
    ends, positions = k.outputs
    _clear(k, ends, length)
    with k.loop("i", 0, index.size) as i:
        row = k.let("row", k.load_index(k.inputs[0], i, length))
        with k.when(row >= 0):
            _grow(k, ends, row, Const(1))
    before = k.variable("before", 0)
    with k.loop("i", 0, length) as i:
        count = k.let("count", k.load(ends, i))
        k.store(ends, i, before)
        k.assign(before, before + count)
    with k.loop("i", 0, index.size) as i:
        row = k.let("row", k.load_index(k.inputs[0], i, length))
        with k.when(row >= 0):
            end = k.let("end", k.load(ends, row))
            k.store(positions, end, i)
            k.store(ends, row, end + 1)
    return k.source((1,), (1,))


def _add_rows(node: Node, rest: int, capabilities: Capabilities) -> KernelSource:
    """For a CPU: a thread has some rows and columns of the result to itself."""
    dtype, length = str(node.dtype), node.shape[0]
    wanted = 2 * capabilities.compute_units
    width = -(-rest // max(min(wanted, rest // _NARROW), 1))
    across = -(-rest // width)
    height = -(-length // min(-(-wanted // across), length))
    down = -(-length // height)
    k = KernelBuilder("add_rows", capabilities, [dtype], [dtype, "int32", "int32"])
    x, ends, positions = k.inputs
    first = k.let("first", k.group() // across * height)
    start = k.let("start", k.group() % across * width)
    columns = k.let("columns", _least(k, rest - start, width))
    last = k.let("last", _least(k, first + height, length))
    with k.loop("row", first, last) as row:
        begin = k.let("begin", k.select(row > 0, k.load(ends, row - 1), 0))
        end = k.let("end", k.load(ends, row))
        target = k.pointer("target", k.outputs[0], row * rest + start)
        _clear(k, target, columns)

        def add(memory: Memory, first: Expr, last: Expr, near: Operand, far: Expr) -> None:
            """Add the rows of the input at some positions, in columns from `near` to below `far`."""
            with k.loop("at", first, last) as at:
                source = k.pointer("source", x, k.load(positions, at) * rest + start)
                with k.loop("column", near, far) as column:
                    _grow(k, memory, column if near == 0 else column - near, k.load(source, column))

        if _has_levels(node):
            with k.when(end - begin > BLOCK):
                _add_often(k, target, begin, end, columns, add)
            with k.otherwise():
                add(target, begin, end, 0, columns)
        else:
            add(target, begin, end, 0, columns)
    return k.source((down * across,), (1,))


def _add_often(
    k: KernelBuilder,
    target: Memory,
    begin: Expr,
    end: Expr,
    columns: Expr,
    add: Callable[[Memory, Expr, Expr, Operand, Expr], None],
) -> None:
    """Add up a row that occurs more than `BLOCK` times, in levels."""
    with k.loop("near", 0, columns, _TOGETHER) as near:
        far = k.let("far", _least(k, near + _TOGETHER, columns))
        with k.loop("first2", begin, end, BLOCK * BLOCK) as first2:
            last2 = k.let("last2", _least(k, first2 + BLOCK * BLOCK, end))
            sums2 = k.registers("sums2", target.dtype, _TOGETHER)
            _clear(k, sums2, far - near)
            with k.loop("first1", first2, last2, BLOCK) as first1:
                last1 = k.let("last1", _least(k, first1 + BLOCK, last2))
                sums1 = k.registers("sums1", target.dtype, _TOGETHER)
                _clear(k, sums1, far - near)
                add(sums1, first1, last1, near, far)
                with k.loop("column", 0, far - near) as column:
                    _grow(k, sums2, column, k.load(sums1, column))
            with k.loop("column", near, far) as column:
                _grow(k, target, column, k.load(sums2, column - near))
