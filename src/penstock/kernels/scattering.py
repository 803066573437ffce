"""Sums of rows by index, each in the order of the index, so that they come out the same every time."""

from __future__ import annotations

import math

from penstock.drivers.driver import Capabilities
from penstock.graph.dtypes import HALVES
from penstock.graph.node import Node
from penstock.graph.reducing import BLOCK
from penstock.kernels.lone import Launch, Lone, combined, is_cpu, least
from penstock.kernels.scattering_gpu import add_rows
from penstock.kernels.source import C_TYPES, KernelSource, head

_NARROW = 64  # columns; a thread of a CPU has no fewer, unless there are none
_LOOK_UP = 16  # items that are added in the time that it takes to look at two rows of the index
_TOGETHER = 64  # columns of a row that is often there, which a thread adds up at a time


def scatter(node: Node, capabilities: Capabilities) -> Lone | None:
    """Kernels of `scatter_add`."""
    index, length, rest = node.inputs[1], node.shape[0], math.prod(node.shape[1:])
    if not is_cpu(capabilities):
        return Lone((Launch(add_rows(node, index, capabilities), (0, 1, 2)),))
    if node.dtype in HALVES:
        return None
    if (length + index.size) * rest < _LOOK_UP * index.size:
        scratch = (4 * length, node.nbytes, node.nbytes) if _has_levels(node) else ()
        buffers = (0, *range(3, 3 + len(scratch)), 1, 2)
        return Lone((Launch(_add_narrow_rows(node, index, length, rest), buffers),), scratch)
    places = Launch(_find_places(index, length), (3, 4, 2))
    sums = Launch(_add_rows(node, length, rest, capabilities), (0, 1, 3, 4))
    return Lone((places, sums), (4 * length, 4 * index.size))


def _has_levels(node: Node) -> bool:
    """Whether long sums are rounded, and so are added up in levels."""
    return node.dtype.kind == "f"


def _add_narrow_rows(node: Node, index: Node, length: int, rest: int) -> KernelSource:
    """For a CPU: one thread adds everything up in the order of the index.

    It counts what each row took in: a full block of sums in `y` goes to `sums1`, and a block of those to
    `sums2`.
    """
    dtype, index_dtype = str(node.dtype), str(index.dtype)
    outputs, inputs = [(dtype, "y")], [(dtype, "x"), (index_dtype, "index")]
    start = block = end = ""
    if _has_levels(node):
        outputs += [("int32", "counts"), (dtype, "sums1"), (dtype, "sums2")]
        start = f"""\
    for (int i = 0; i < {length * rest}; i++) sums1[i] = sums2[i] = 0;
    for (int r = 0; r < {length}; r++) counts[r] = 0;
"""
        block = f"""\
        int count = ++counts[r];
        for (int j = (int)r * {rest}, last = count % {BLOCK} ? j : j + {rest}; j < last; j++) {{
            sums1[j] += y[j];
            y[j] = 0;
            if (count % {BLOCK * BLOCK} == 0) {{
                sums2[j] += sums1[j];
                sums1[j] = 0;
            }}
        }}
"""
        end = f"    for (int i = 0; i < {length * rest}; i++) y[i] = sums2[i] + (sums1[i] + y[i]);\n"
    text = f"""\
{head("add_rows", outputs, inputs)}\
    for (int i = 0; i < {length * rest}; i++) y[i] = 0;
{start}\
    for (int i = 0; i < {index.size}; i++) {{
        {C_TYPES[index_dtype]} r = index[i];
        if (r < 0 || r >= {length}) continue;
        GLOBAL {C_TYPES[dtype]} *to = y + (size_t)r * {rest};
        GLOBAL const {C_TYPES[dtype]} *from = x + (size_t)i * {rest};
        for (int j = 0; j < {rest}; j++) to[j] = {combined(dtype, "+", "to[j]", "from[j]")};
{block}\
    }}
{end}\
}}
"""
    buffers = tuple(dtype for dtype, _ in outputs + inputs)
    return KernelSource("add_rows", text, buffers, (), (1,), (1,))


def _find_places(index: Node, length: int) -> KernelSource:
    """For a CPU: the places of the index by row, in order, and for each row where its places end."""
    dtype = str(index.dtype)
    text = f"""\
{head("find_places", [("int32", "ends"), ("int32", "places")], [(dtype, "index")])}\
    for (int r = 0; r < {length}; r++) ends[r] = 0;
    for (int i = 0; i < {index.size}; i++) {{
        {C_TYPES[dtype]} r = index[i];
        if (r >= 0 && r < {length}) ends[r]++;
    }}
    for (int r = 0, before = 0; r < {length}; r++) {{
        int count = ends[r];
        ends[r] = before;
        before += count;
    }}
    for (int i = 0; i < {index.size}; i++) {{
        {C_TYPES[dtype]} r = index[i];
        if (r >= 0 && r < {length}) places[ends[r]++] = i;
    }}
}}
"""
    return KernelSource("find_places", text, ("int32", "int32", dtype), (), (1,), (1,))


def _add_rows(node: Node, length: int, rest: int, capabilities: Capabilities) -> KernelSource:
    """For a CPU: a thread has some rows and some columns of the result to itself."""
    dtype = str(node.dtype)
    wanted = 2 * capabilities.compute_units
    width = -(-rest // max(min(wanted, rest // _NARROW), 1))
    across = -(-rest // width)
    height = -(-length // min(-(-wanted // across), length))
    down = -(-length // height)
    text = f"""\
{head("add_rows", [(dtype, "y")], [(dtype, "x"), ("int32", "ends"), ("int32", "places")])}\
    int first = GROUP(0) / {across} * {height}, last = {least(f"first + {height}", length)};
    int start = GROUP(0) % {across} * {width}, width = {least(width, f"{rest} - start")};
    for (int r = first; r < last; r++) {{
        int begin = r > 0 ? ends[r - 1] : 0, end = ends[r];
        GLOBAL {C_TYPES[dtype]} *RESTRICT to = y + (size_t)r * {rest} + start;
        for (int j = 0; j < width; j++) to[j] = 0;
{_often(dtype, rest) if _has_levels(node) else ""}\
        for (int i = begin; i < end; i++) {{
            GLOBAL const {C_TYPES[dtype]} *RESTRICT from = x + (size_t)places[i] * {rest} + start;
            for (int j = 0; j < width; j++) to[j] = {combined(dtype, "+", "to[j]", "from[j]")};
        }}
    }}
}}
"""
    return KernelSource("add_rows", text, (dtype, dtype, "int32", "int32"), (), (down * across,), (1,))


def _often(dtype: str, rest: int) -> str:
    """A row that is there more often than a block has values: its sums in levels."""
    kind = C_TYPES[dtype]
    return f"""\
        for (int near = 0; near < (end - begin > {BLOCK} ? width : 0); near += {_TOGETHER}) {{
            int far = {least(f"near + {_TOGETHER}", "width")};
            for (int most = begin; most < end; most += {BLOCK * BLOCK}) {{
                {kind} sums[{_TOGETHER}];
                int most_end = {least(f"most + {BLOCK * BLOCK}", "end")};
                for (int j = near; j < far; j++) sums[j - near] = 0;
                for (int more = most; more < most_end; more += {BLOCK}) {{
                    {kind} parts[{_TOGETHER}];
                    int more_end = {least(f"more + {BLOCK}", "most_end")};
                    for (int j = near; j < far; j++) parts[j - near] = 0;
                    for (int i = more; i < more_end; i++) {{
                        GLOBAL const {kind} *RESTRICT from = x + (size_t)places[i] * {rest} + start;
                        for (int j = near; j < far; j++) parts[j - near] += from[j];
                    }}
                    for (int j = near; j < far; j++) sums[j - near] += parts[j - near];
                }}
                for (int j = near; j < far; j++) to[j] += sums[j - near];
            }}
        }}
        if (end - begin > {BLOCK}) continue;
"""
