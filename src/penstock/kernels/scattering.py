"""Sums of rows by index, each in the order of the index, so that they come out the same every time."""

from __future__ import annotations

import math

from penstock.device.driver import Capabilities
from penstock.graph.contraction import LEVEL
from penstock.graph.dtypes import HALVES
from penstock.graph.node import Node
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
        source = _add_narrow_rows(node, index, length, rest)
        return Lone((Launch(source, (0, 3, 4, 5, 1, 2)),), (4 * length, node.nbytes, node.nbytes))
    places = Launch(_find_places(index, length), (3, 4, 2))
    sums = Launch(_add_rows(node, length, rest, capabilities), (0, 1, 3, 4))
    return Lone((places, sums), (4 * length, 4 * index.size))


def _add_narrow_rows(node: Node, index: Node, length: int, rest: int) -> KernelSource:
    """For a CPU: one thread adds everything up in the order of the index, and counts what each row takes."""
    dtype, index_dtype = str(node.dtype), str(index.dtype)
    outputs = [(dtype, "y"), ("int32", "taken"), (dtype, "more"), (dtype, "most")]
    levels = f"""\
        int now = ++taken[r];
        if (now % {LEVEL} == 0)
            for (int j = 0; j < {rest}; j++) {{
                more[r * {rest} + j] += to[j];
                to[j] = 0;
                if (now % {LEVEL * LEVEL} == 0) {{
                    most[r * {rest} + j] += more[r * {rest} + j];
                    more[r * {rest} + j] = 0;
                }}
            }}
"""
    end = f"    for (int i = 0; i < {length * rest}; i++) y[i] = most[i] + (more[i] + y[i]);\n"
    has_levels = dtype.startswith("float")
    text = f"""\
{head("add_rows", outputs, [(dtype, "x"), (index_dtype, "index")])}\
    for (int i = 0; i < {length * rest}; i++) y[i] = more[i] = most[i] = 0;
    for (int r = 0; r < {length}; r++) taken[r] = 0;
    for (int i = 0; i < {index.size}; i++) {{
        {C_TYPES[index_dtype]} r = index[i];
        if (r < 0 || r >= {length}) continue;
        GLOBAL {C_TYPES[dtype]} *RESTRICT to = y + (size_t)r * {rest};
        GLOBAL const {C_TYPES[dtype]} *RESTRICT from = x + (size_t)i * {rest};
        for (int j = 0; j < {rest}; j++) to[j] = {combined(dtype, "+", "to[j]", "from[j]")};
{levels if has_levels else ""}\
    }}
{end if has_levels else ""}\
}}
"""
    buffers = (dtype, "int32", dtype, dtype, dtype, index_dtype)
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
{_often(dtype, rest) if dtype.startswith("float") else ""}\
        for (int i = begin; i < end; i++) {{
            GLOBAL const {C_TYPES[dtype]} *RESTRICT from = x + (size_t)places[i] * {rest} + start;
            for (int j = 0; j < width; j++) to[j] = {combined(dtype, "+", "to[j]", "from[j]")};
        }}
    }}
}}
"""
    return KernelSource("add_rows", text, (dtype, dtype, "int32", "int32"), (), (down * across,), (1,))


def _often(dtype: str, rest: int) -> str:
    """A row that is there more often than a level takes in: its sums in levels."""
    kind = C_TYPES[dtype]
    return f"""\
        for (int near = 0; near < (end - begin > {LEVEL} ? width : 0); near += {_TOGETHER}) {{
            int far = {least(f"near + {_TOGETHER}", "width")};
            for (int most = begin; most < end; most += {LEVEL * LEVEL}) {{
                {kind} sums[{_TOGETHER}];
                int most_end = {least(f"most + {LEVEL * LEVEL}", "end")};
                for (int j = near; j < far; j++) sums[j - near] = 0;
                for (int more = most; more < most_end; more += {LEVEL}) {{
                    {kind} parts[{_TOGETHER}];
                    int more_end = {least(f"more + {LEVEL}", "most_end")};
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
        if (end - begin > {LEVEL}) continue;
"""
