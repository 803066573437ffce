"""Where the largest or the smallest item stands: the first of equal ones, and before all others a NaN."""

from __future__ import annotations

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.kernels.lone import SHORT_ROW, Launch, Lone, along, group_size, is_cpu, least, spread
from penstock.kernels.source import C_TYPES, KernelSource, head

_WIDEST = 256  # columns that one thread of a CPU compares side by side
_FEW = 8  # columns; fewer are done one by one
_VECTORS = 4  # of a row, compared side by side: one need not wait for the other
_SEGMENT = 512  # items of a row that are searched a second time where they hold the extreme


def extreme(node: Node, capabilities: Capabilities) -> Lone:
    """Kernels of `argmax` and `argmin`."""
    x, largest = node.inputs[0], node.primitive.name == "argmax"
    dtype = str(x.dtype)
    outer, length, inner = along(x.shape, node.attributes["axis"])
    if is_cpu(capabilities):
        long_row, short_row = _rows_on_cpu, _one_by_one if inner < _FEW else _columns_on_cpu
    else:
        long_row, short_row = _row_on_gpu, _one_by_one
    write = long_row if inner == 1 and length > SHORT_ROW else short_row
    return Lone((Launch(write(dtype, largest, outer, length, inner, capabilities), (0, 1)),))


def _beats(dtype: str, largest: bool, a: str, b: str) -> str:
    """Whether `a`, which comes later, takes the place of `b`."""
    if dtype.startswith("float"):
        return f"(!({a} {'<=' if largest else '>='} {b}) & ({b} == {b}))"
    return f"({a} {'>' if largest else '<'} {b})"


def _row_on_gpu(
    dtype: str, largest: bool, outer: int, length: int, inner: int, capabilities: Capabilities
) -> KernelSource:
    ctype, threads = C_TYPES[dtype], group_size(max(length // 4, 32), capabilities)
    text = f"""\
{head("extreme_of_row", [("int64", "y")], [(dtype, "x")])}\
    LOCAL {ctype} tops[{threads}];
    LOCAL int places[{threads}];
    x += (size_t)GROUP(0) * {length};
    {ctype} top = x[THREAD];
    int place = THREAD;
    for (int i = THREAD + {threads}; i < {length}; i += {threads}) {{
        {ctype} v = x[i];
        if ({_beats(dtype, largest, "v", "top")}) {{
            top = v;
            place = i;
        }}
    }}
    tops[THREAD] = top;
    places[THREAD] = place;
    for (int apart = {threads // 2}; apart > 0; apart >>= 1) {{
        BARRIER;
        if (THREAD < apart) {{
            {ctype} v = tops[THREAD + apart];
            int i = places[THREAD + apart];
            if ({_beats(dtype, largest, "v", "top")} ||
                (i < place && !{_beats(dtype, largest, "top", "v")})) {{
                tops[THREAD] = top = v;
                places[THREAD] = place = i;
            }}
        }}
    }}
    if (THREAD == 0) y[GROUP(0)] = place;
}}
"""
    return KernelSource("extreme_of_row", text, ("int64", dtype), (), (outer,), (threads,))


def _one_by_one(
    dtype: str, largest: bool, outer: int, length: int, inner: int, capabilities: Capabilities
) -> KernelSource:
    ctype, over = C_TYPES[dtype], spread(outer * inner, capabilities)
    text = f"""\
{head("extreme_of_each", [("int64", "y")], [(dtype, "x")])}\
    {over.loop}
        int start = t / {inner} * {length * inner} + t % {inner}, place = 0;
        {ctype} top = x[start];
        for (int i = 1; i < {length}; i++) {{
            {ctype} v = x[start + i * {inner}];
            int wins = {_beats(dtype, largest, "v", "top")};
            top = wins ? v : top;
            place = wins ? i : place;
        }}
        y[t] = place;
    }}
}}
"""
    return KernelSource("extreme_of_each", text, ("int64", dtype), (), over.grid, over.group)


def _rows_on_cpu(
    dtype: str, largest: bool, outer: int, length: int, inner: int, capabilities: Capabilities
) -> KernelSource:
    """A segment of a row is first asked for its extreme, in vectors, and searched only if that is new."""
    over, ctype = spread(outer, capabilities), C_TYPES[dtype]
    itemsize = np.dtype(dtype).itemsize
    lanes = 8 if itemsize >= 4 else 16
    vector, vectors = f"{ctype}{lanes}", range(_VECTORS)
    step = lanes * _VECTORS
    whole = length // step * step
    floats = dtype.startswith("float")
    # If the extreme is a NaN, only NaNs are the same; if it is not, there are none.
    odd = " | (v != v)" if floats else ""
    mask = f"{'long' if itemsize == 8 else 'int'}{lanes}"
    any_odd = " | ".join(f"odd.s{k}" for k in range(lanes))

    def better(a: str, b: str) -> str:
        return f"{a} {'>' if largest else '<'} {b} ? {a} : {b}"

    text = f"""\
{head("extreme_of_rows", [("int64", "y")], [(dtype, "x")])}\
    typedef {vector} Unaligned __attribute__((aligned({itemsize})));
    {over.loop}
        GLOBAL const {ctype} *row = x + t * {length};
        {ctype} top = row[0];
        int place = 0;
        for (int start = 0; start < {whole}; start += {_SEGMENT}) {{
            int stop = {least(f"start + {_SEGMENT}", whole)};
            {vector} {", ".join(f"b{k} = ({vector})(top)" for k in vectors)};
            {f"{mask} odd = 0;" if floats else ""}
            for (int i = start; i < stop; i += {step}) {{
                GLOBAL const Unaligned *from = (GLOBAL const Unaligned *)(row + i);
                {vector} {", ".join(f"v{k} = from[{k}]" for k in vectors)};
                {" ".join(f"b{k} = {better(f'v{k}', f'b{k}')};" for k in vectors)}
                {" ".join(f"odd |= v{k} != v{k};" for k in vectors if floats)}
            }}
            {" ".join(f"b0 = {better(f'b{k}', 'b0')};" for k in vectors[1:])}
            {ctype} best = top;
            {" ".join(f"best = {better(f'b0.s{k:x}', 'best')};" for k in range(lanes))}
            {f"if ({any_odd}) best = NAN;" if floats else ""}
            if ({_beats(dtype, largest, "best", "top")}) {{
                top = best;
                place = start - {step};
                int found = 0;
                while (!found) {{
                    place += {step};
                    for (int j = 0; j < {step}; j++) {{
                        {ctype} v = row[place + j];
                        found |= (v == top){odd};
                    }}
                }}
                while (!((row[place] == top){odd.replace("v", "row[place]")})) place++;
            }}
        }}
        for (int i = {whole}; i < {length}; i++)
            if ({_beats(dtype, largest, "row[i]", "top")}) {{
                top = row[i];
                place = i;
            }}
        y[t] = place;
    }}
}}
"""
    return KernelSource("extreme_of_rows", text, ("int64", dtype), (), over.grid, over.group)


def _columns_on_cpu(
    dtype: str, largest: bool, outer: int, length: int, inner: int, capabilities: Capabilities
) -> KernelSource:
    ctype, width = C_TYPES[dtype], min(inner, _WIDEST)
    parts = -(-inner // width)
    over = spread(outer * parts, capabilities)
    text = f"""\
{head("extreme_of_columns", [("int64", "y")], [(dtype, "x")])}\
    {over.loop}
        int start = t % {parts} * {width}, width = {least(width, f"{inner} - start")};
        GLOBAL const {ctype} *from = x + t / {parts} * {length * inner} + start;
        {ctype} tops[{width}];
        int places[{width}];
        for (int j = 0; j < width; j++) {{
            tops[j] = from[j];
            places[j] = 0;
        }}
        for (int i = 1; i < {length}; i++) {{
            from += {inner};
            for (int j = 0; j < width; j++) {{
                {ctype} v = from[j];
                int wins = {_beats(dtype, largest, "v", "tops[j]")};
                tops[j] = wins ? v : tops[j];
                places[j] = wins ? i : places[j];
            }}
        }}
        for (int j = 0; j < width; j++) y[t / {parts} * {inner} + start + j] = places[j];
    }}
}}
"""
    return KernelSource("extreme_of_columns", text, ("int64", dtype), (), over.grid, over.group)
