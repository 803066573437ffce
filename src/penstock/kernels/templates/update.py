"""Rows of an array replaced by others. Where the result is written over the array, only these are written."""

from __future__ import annotations

import math

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.kernels.builder import KernelBuilder
from penstock.kernels.dialects import dialect_of
from penstock.kernels.source import KernelSource
from penstock.kernels.templates.launches import CPU_SHARES, Launch, Lowering, Tasks, is_cpu, one_launch

_COPY_THREADS = 256  # of a workgroup of a GPU that copies what is not written over
_COPY_GROUPS = 4  # for each compute unit of a GPU: few, as they mostly have nothing to do


_FEW = 1024  # rows; what is copied is compared with the indices of so few of them


def update(node: Node, capabilities: Capabilities) -> Lowering:
    """Kernels of `put_rows`: the first copies the array, unless the result is in its place.

    A GPU takes few rows in a single kernel: its launches are short, and each has a cost.
    """
    if not is_cpu(capabilities) and node.inputs[2].size <= _FEW:
        return one_launch(_put_few(node, capabilities), may_alias=((0,),))
    copy = Launch(_copy(node, capabilities), (0, 1), operations=0)
    put = Launch(_put(node, capabilities), (0, 2, 3), operations=0)
    return Lowering((copy, put), may_alias=((0,),))


def _copy(node: Node, capabilities: Capabilities) -> KernelSource:
    dtype, size = str(node.dtype), node.size
    k = KernelBuilder("copy_unless_same", capabilities, [dtype], [dtype])
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
    # A thread of a CPU has whole rows, one of a GPU an item.
    columns = rest if is_cpu(capabilities) else 1
    tasks = Tasks(rows.size // columns, capabilities)
    with tasks.each(k) as task:
        position = k.let("position", task // (rest // columns))
        row = k.let("row", k.load_index(k.inputs[1], position, length))
        with k.when(row >= 0):
            if is_cpu(capabilities):
                with k.loop("column", 0, rest) as column:
                    k.store(k.outputs[0], row * rest + column, k.load(k.inputs[0], task * rest + column))
            else:
                k.store(k.outputs[0], row * rest + task % rest, k.load(k.inputs[0], task))
    return k.source(tasks.grid, tasks.group)


def _put_few(node: Node, capabilities: Capabilities) -> KernelSource:
    """Write the rows, or else the whole array with them."""
    dtype, (_, rows, index) = str(node.dtype), node.inputs
    length, rest = node.shape[0], math.prod(node.shape[1:])
    k = KernelBuilder("put_few_rows", capabilities, [dtype], [dtype, dtype, str(index.dtype)])
    threads = min(_COPY_THREADS, capabilities.max_group_size)
    fewest = -(-node.size // (threads * dialect_of(capabilities).most_steps(capabilities)))
    groups = max(min(capabilities.compute_units, -(-node.size // threads)), -(-rows.size // threads), fewest)
    first = k.let("first", k.group() * threads + k.thread)
    in_place = k.same_memory(k.outputs[0], k.inputs[0])
    with k.when(in_place), k.loop("item", first, rows.size, groups * threads) as item:
        row = k.let("row", k.load_index(k.inputs[2], item // rest, length))
        with k.when(row >= 0):
            k.store(k.outputs[0], row * rest + item % rest, k.load(k.inputs[1], item))
    with k.otherwise(), k.loop("item", first, node.size, groups * threads) as item:
        value = k.variable("value", k.load(k.inputs[0], item))
        with k.loop("position", 0, index.size) as position:
            replaces = k.let("replaces", k.load_index(k.inputs[2], position, length).eq(item // rest))
            with k.when(replaces):
                k.assign(value, k.load(k.inputs[1], position * rest + item % rest))
        k.store(k.outputs[0], item, value)
    return k.source((groups,), (threads,))
