"""Rows of an array replaced by others. Where the result is written over the array, only these are written."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.kernels import ir
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.dialects import dialect_of
from penstock.kernels.dialects.dialect import MANY_STEPS
from penstock.kernels.source import KernelSource
from penstock.kernels.templates.launches import CPU_SHARES, Launch, Lowering, Tasks, is_cpu

_FEW_ROWS = 4096  # so many are put by the kernel that copies the others, if it has to
_COPY_THREADS = 256  # of a workgroup of a GPU that copies what is not written over
_COPY_GROUPS = 4  # for each compute unit of a GPU: few, as they mostly have nothing to do


def update(node: Node, capabilities: Capabilities) -> Lowering:
    """Kernels of `put_rows`: the first copies the array, unless the result is in its place.

    On a GPU, where a launch takes as long as a small kernel, few rows are put by the same kernel.
    """
    few = node.inputs[2].size <= _FEW_ROWS and dialect_of(capabilities).most_steps(capabilities) == MANY_STEPS
    if few and not is_cpu(capabilities):
        return Lowering(
            (Launch(_put_or_copy(node, capabilities), (0, 1, 2, 3), operations=0),), may_alias=((0,),)
        )
    copy = Launch(copying(node, capabilities), (0, 1), operations=0)
    put = Launch(_put(node, capabilities), (0, 2, 3), operations=0)
    return Lowering((copy, put), may_alias=((0,),))


def copying(node: Node, capabilities: Capabilities, scalars: Sequence[str] = ()) -> KernelSource:
    """The kernel that copies a value, unless it is to be where it is; `scalars` are those of the group."""
    dtype, size = str(node.dtype), node.size
    k = KernelBuilder("copy_unless_same", capabilities, [dtype], [dtype], scalars)
    source, target = k.inputs[0], k.outputs[0]
    if is_cpu(capabilities):
        groups, threads = CPU_SHARES * capabilities.compute_units, 1
        share = -(-size // groups)
        first = k.let("first", k.group() * share)
        last, step = k.let("last", k.call("minimum", first + share, size)), 1
    else:
        threads = min(_COPY_THREADS, capabilities.max_group_size)
        fewest = -(-size // (threads * dialect_of(capabilities).most_steps(capabilities)))
        groups = max(min(_COPY_GROUPS * capabilities.compute_units, -(-size // threads)), fewest)
        first, step = k.let("first", k.group() * threads + k.thread), groups * threads
        last = k.let("last", size)
    with k.when(~k.same_memory(target, source)), k.loop("i", first, last, step) as i:
        k.store(target, i, k.load(source, i))
    return k.source((groups,), (threads,))


def _put(node: Node, capabilities: Capabilities) -> KernelSource:
    dtype, (_, rows, index) = str(node.dtype), node.inputs
    length, rest = node.shape[0], math.prod(node.shape[1:])
    k = KernelBuilder("put_rows", capabilities, [dtype], [dtype, str(index.dtype)])
    # A thread of a CPU has whole rows, one of a GPU a vector.
    columns = rest if is_cpu(capabilities) else _width(node, rest)
    tasks = Tasks(rows.size // columns, capabilities)
    with tasks.each(k) as task:
        if is_cpu(capabilities):
            row = k.let("row", k.load_index(k.inputs[1], task, length))
            with k.when(row >= 0), k.loop("column", 0, rest) as column:
                k.store(k.outputs[0], row * rest + column, k.load(k.inputs[0], task * rest + column))
        else:
            _put_vector(k, k.inputs, task, length, rest, columns)
    return k.source(tasks.grid, tasks.group)


def _width(node: Node, rest: int) -> int:
    """The items of a vector that a thread puts: a part of a row, of up to 16 bytes."""
    return next(width for width in (8, 4, 2, 1) if rest % width == 0 and width * node.dtype.itemsize <= 16)


def _put_vector(
    k: KernelBuilder, memories: Sequence[Memory], number: ir.Expr, length: int, rest: int, width: int
) -> None:
    """Put one of all vectors of the rows; `memories` are those of the rows and of their indices."""
    rows, index = memories
    first = k.let("first_item", number * width)
    row = k.let("row", k.load_index(index, first // rest, length))
    with k.when(row >= 0):
        items = k.load(rows, first) if width == 1 else k.load_vector(rows, first, width, width)
        k.store(k.outputs[0], row * rest + first % rest, k.let("items", items), width)


def _put_or_copy(node: Node, capabilities: Capabilities) -> KernelSource:
    """Threads put vectors of rows, and copy the other rows if the result is not in their place."""
    dtype, (_, rows, index) = str(node.dtype), node.inputs
    length, rest = node.shape[0], math.prod(node.shape[1:])
    k = KernelBuilder("put_few_rows", capabilities, [dtype], [dtype, dtype, str(index.dtype)])
    width, threads = _width(node, rest), min(_COPY_THREADS, capabilities.max_group_size)
    vectors = rows.size // width
    groups = max(
        min(_COPY_GROUPS * capabilities.compute_units, -(-length // threads)), -(-vectors // threads)
    )
    thread = k.let("global_thread", k.group() * threads + k.thread)
    with k.when(thread < vectors):
        _put_vector(k, k.inputs[1:], thread, length, rest, width)
    with (
        k.when(~k.same_memory(k.outputs[0], k.inputs[0])),
        k.loop("copied", thread, length, groups * threads) as copied,
    ):
        stays = k.variable("stays", 1)
        with k.loop("at", 0, index.size) as at:
            k.assign(stays, k.select(k.load_index(k.inputs[2], at, length).eq(copied), 0, stays))
        with k.when(stays.ne(0)), k.loop("column", 0, rest) as column:
            place = k.let("place", copied * rest + column)
            k.store(k.outputs[0], place, k.load(k.inputs[0], place))
    return k.source((groups,), (threads,))
