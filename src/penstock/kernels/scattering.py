"""Sums of rows by index, each in the order of the index, so that they come out the same every time."""

from __future__ import annotations

import math

from penstock.device.driver import Capabilities
from penstock.graph.node import Node
from penstock.kernels.lone import Launch, Lone, combined, is_cpu, least, spread
from penstock.kernels.sorting import DIGITS, pair, sorting_passes
from penstock.kernels.source import C_TYPES, KernelSource, head

_NARROW = 64  # columns; a thread of a CPU has no fewer, unless there are none
_LOOK_UP = 16  # items that could be added while a row of the index is looked at for nothing


def scatter(node: Node, capabilities: Capabilities) -> Lone | None:
    """Kernels of `scatter_add`."""
    index, length, rest = node.inputs[1], node.shape[0], math.prod(node.shape[1:])
    if is_cpu(capabilities):
        return Lone((Launch(_by_parts(node, index, length, rest, capabilities), (0, 1, 2)),))
    if capabilities.max_group_size < DIGITS:
        return None
    digits = -(-length.bit_length() // 8)
    passes, scratch = sorting_passes(1, index.size, digits, False, 3, capabilities)
    load = Launch(_loading(index, length, capabilities), (3, 2))
    add = Launch(_adding(node, index.size, length, rest, capabilities), (0, 1, 3 + digits % 2))
    return Lone((load, *passes, add), scratch)


def _by_parts(node: Node, index: Node, length: int, rest: int, capabilities: Capabilities) -> KernelSource:
    """For a CPU: a thread has some rows and some columns of the result to itself, and reads all the index."""
    dtype, index_dtype = str(node.dtype), str(index.dtype)
    wanted = 2 * capabilities.compute_units
    if (length + index.size) * rest < _LOOK_UP * index.size:
        wanted = 1
    width = -(-rest // max(min(wanted, rest // _NARROW), 1))
    across = -(-rest // width)
    height = -(-length // min(-(-wanted // across), length))
    down = -(-length // height)
    text = f"""\
{head("add_rows", [(dtype, "y")], [(dtype, "x"), (index_dtype, "index")])}\
    int first = GROUP(0) / {across} * {height}, last = {least(f"first + {height}", length)};
    int start = GROUP(0) % {across} * {width}, width = {least(width, f"{rest} - start")};
    for (int r = first; r < last; r++)
        for (int j = 0; j < width; j++) y[r * {rest} + start + j] = 0;
    for (int i = 0; i < {index.size}; i++) {{
        {C_TYPES[index_dtype]} r = index[i];
        if (r < first || r >= last) continue;
        GLOBAL {C_TYPES[dtype]} *RESTRICT to = y + (int)r * {rest} + start;
        GLOBAL const {C_TYPES[dtype]} *RESTRICT from = x + i * {rest} + start;
        for (int j = 0; j < width; j++) to[j] = {combined(dtype, "+", "to[j]", "from[j]")};
    }}
}}
"""
    return KernelSource("add_rows", text, (dtype, dtype, index_dtype), (), (down * across,), (1,))


def _loading(index: Node, length: int, capabilities: Capabilities) -> KernelSource:
    dtype, over = str(index.dtype), spread(index.size, capabilities)
    text = f"""\
{head("load_index", [("uint64", "memory")], [(dtype, "index")])}\
    {pair(False)}
    GLOBAL Pair *pairs = (GLOBAL Pair *)memory;
    {over.loop}
        {C_TYPES[dtype]} row = index[t];
        pairs[t].key = row < 0 || row >= {length} ? {length} : row;
        pairs[t].at = t;
    }}
}}
"""
    return KernelSource("load_index", text, ("uint64", dtype), (), over.grid, over.group)


def _adding(node: Node, count: int, length: int, rest: int, capabilities: Capabilities) -> KernelSource:
    """For a GPU: a thread finds the sources of its item in the sorted index, and adds them up."""
    dtype, over = str(node.dtype), spread(length * rest, capabilities)
    text = f"""\
{head("add_sorted", [(dtype, "y")], [(dtype, "x"), ("uint64", "memory")])}\
    {pair(False)}
    GLOBAL const Pair *pairs = (GLOBAL const Pair *)memory;
    {over.loop}
        int row = t / {rest}, column = t % {rest}, i = 0, after = {count};
        while (i < after) {{
            int middle = (i + after) / 2;
            if (pairs[middle].key < row) i = middle + 1;
            else after = middle;
        }}
        {C_TYPES[dtype]} sum = 0;
        for (; i < {count} && pairs[i].key == row; i++)
            sum = {combined(dtype, "+", "sum", f"x[pairs[i].at * {rest} + column]")};
        y[t] = sum;
    }}
}}
"""
    return KernelSource("add_sorted", text, (dtype, dtype, "uint64"), (), over.grid, over.group)
