"""Sums of rows by index, each in the order of the index, so that they come out the same every time."""

from __future__ import annotations

import math

from penstock.device.driver import Capabilities
from penstock.graph.dtypes import HALVES
from penstock.graph.node import Node
from penstock.kernels.lone import Launch, Lone, combined, is_cpu, least
from penstock.kernels.scattering_gpu import add_rows
from penstock.kernels.source import C_TYPES, KernelSource, head

_NARROW = 64  # columns; a thread of a CPU has no fewer, unless there are none
_LOOK_UP = 16  # items that could be added while a row of the index is looked at for nothing


def scatter(node: Node, capabilities: Capabilities) -> Lone | None:
    """Kernels of `scatter_add`."""
    index, length, rest = node.inputs[1], node.shape[0], math.prod(node.shape[1:])
    if is_cpu(capabilities):
        if node.dtype in HALVES:
            return None
        return Lone((Launch(_by_parts(node, index, length, rest, capabilities), (0, 1, 2)),))
    return Lone((Launch(add_rows(node, index, capabilities), (0, 1, 2)),))


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
