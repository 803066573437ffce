"""Sums and products of the items up to each one."""

from __future__ import annotations

from penstock.device.driver import Capabilities
from penstock.graph.node import Node
from penstock.kernels.lone import (
    CPU_SHARES,
    SHORT_ROW,
    Launch,
    Lone,
    along,
    combined,
    group_size,
    is_cpu,
    least,
    spread,
)
from penstock.kernels.source import C_TYPES, KernelSource, head

_ROWS_AT_ONCE = 4  # on a CPU: one sum must wait for the last, so four of them take turns
_WIDEST = 2048  # items, of which the last row of sums stays near the core
_ITEMS = 4  # of one thread in a group's step


def scan(node: Node, capabilities: Capabilities) -> Lone:
    """Kernels of `cumulative_sum` and `cumulative_prod`."""
    dtype, sign = str(node.dtype), "+" if node.primitive.name == "cumulative_sum" else "*"
    outer, length, inner = along(node.shape, node.attributes["axis"])
    if is_cpu(capabilities):
        write = _rows_on_cpu if inner == 1 else _columns_on_cpu
        source = write(dtype, sign, outer, length, inner, capabilities)
    elif inner == 1 and length > SHORT_ROW:
        source = group_scan("scan_row", dtype, sign, outer, length, capabilities)
    else:
        source = _columns_on_gpu(dtype, sign, outer, length, inner, capabilities)
    return Lone((Launch(source, (0, 1)),))


def group_scan(
    name: str, dtype: str, sign: str, rows: int, length: int, capabilities: Capabilities
) -> KernelSource:
    """A group for each row, which goes along it in steps. Output and input may be the same buffer."""
    ctype = C_TYPES[dtype]
    threads = group_size(max(length // _ITEMS, 32), capabilities)
    # A sum begins with -0, which leaves what is added to it as it is, be it 0 or -0.
    nothing = {"+": "-0.0f" if dtype == "float32" else "-0.0" if dtype == "float64" else "0", "*": "1"}[sign]

    def with_(a: str, b: str) -> str:
        return combined(dtype, sign, a, b)

    text = f"""\
{head(name, [(dtype, "y")], [(dtype, "x")])}\
    LOCAL {ctype} part[{threads}];
    x += (size_t)GROUP(0) * {length};
    y += (size_t)GROUP(0) * {length};
    {ctype} carry = {nothing};
    for (int start = 0; start < {length}; start += {threads * _ITEMS}) {{
        int first = start + THREAD * {_ITEMS};
        {ctype} sums[{_ITEMS}], sum = {nothing};
        for (int k = 0; k < {_ITEMS}; k++) {{
            if (first + k < {length}) sum = {with_("sum", "x[first + k]")};
            sums[k] = sum;
        }}
        part[THREAD] = sum;
        BARRIER;
        for (int reach = 1; reach < {threads}; reach <<= 1) {{
            if (THREAD >= reach) sum = {with_("part[THREAD - reach]", "sum")};
            BARRIER;
            part[THREAD] = sum;
            BARRIER;
        }}
        {ctype} before = carry;
        if (THREAD > 0) before = {with_("carry", "part[THREAD - 1]")};
        for (int k = 0; k < {_ITEMS}; k++)
            if (first + k < {length}) y[first + k] = {with_("before", "sums[k]")};
        carry = {with_("carry", f"part[{threads - 1}]")};
        BARRIER;
    }}
}}
"""
    return KernelSource(name, text, (dtype, dtype), (), (rows,), (threads,))


def _columns_on_gpu(
    dtype: str, sign: str, outer: int, length: int, inner: int, capabilities: Capabilities
) -> KernelSource:
    over = spread(outer * inner, capabilities)
    text = f"""\
{head("scan_columns", [(dtype, "y")], [(dtype, "x")])}\
    {over.loop}
        int i = t / {inner} * {length * inner} + t % {inner}, last = i + {(length - 1) * inner};
        {C_TYPES[dtype]} sum = x[i];
        for (; i < last; i += {inner}) {{
            y[i] = sum;
            sum = {combined(dtype, sign, "sum", f"x[i + {inner}]")};
        }}
        y[i] = sum;
    }}
}}
"""
    return KernelSource("scan_columns", text, (dtype, dtype), (), over.grid, over.group)


def _rows_on_cpu(
    dtype: str, sign: str, outer: int, length: int, inner: int, capabilities: Capabilities
) -> KernelSource:
    ctype, lanes = C_TYPES[dtype], range(min(_ROWS_AT_ONCE, outer))
    over = spread(-(-outer // len(lanes)), capabilities)
    # The last rows may be fewer: then one is done again by the same thread.
    rows = [f"int r{k} = {least(f't * {len(lanes)} + {k}', outer - 1)} * {length};" for k in lanes]
    text = f"""\
{head("scan_rows", [(dtype, "y")], [(dtype, "x")])}\
    {over.loop}
        {" ".join(rows)}
        {ctype} {", ".join(f"s{k} = x[r{k}]" for k in lanes)};
        {" ".join(f"y[r{k}] = s{k};" for k in lanes)}
        for (int i = 1; i < {length}; i++) {{
            {" ".join(f"s{k} = {combined(dtype, sign, f's{k}', f'x[r{k} + i]')};" for k in lanes)}
            {" ".join(f"y[r{k} + i] = s{k};" for k in lanes)}
        }}
    }}
}}
"""
    return KernelSource("scan_rows", text, (dtype, dtype), (), over.grid, over.group)


def _columns_on_cpu(
    dtype: str, sign: str, outer: int, length: int, inner: int, capabilities: Capabilities
) -> KernelSource:
    ctype = C_TYPES[dtype]
    parts = -(-CPU_SHARES * capabilities.compute_units // outer)
    width = min(-(-inner // (16 * parts)) * 16, inner, _WIDEST)
    parts = -(-inner // width)
    over = spread(outer * parts, capabilities)
    text = f"""\
{head("scan_columns", [(dtype, "y")], [(dtype, "x")])}\
    {over.loop}
        int start = t % {parts} * {width}, width = {least(width, f"{inner} - start")};
        GLOBAL const {ctype} *RESTRICT from = x + t / {parts} * {length * inner} + start;
        GLOBAL {ctype} *RESTRICT to = y + t / {parts} * {length * inner} + start;
        for (int j = 0; j < width; j++) to[j] = from[j];
        for (int i = 1; i < {length}; i++) {{
            from += {inner};
            to += {inner};
            for (int j = 0; j < width; j++) to[j] = {combined(dtype, sign, f"to[j - {inner}]", "from[j]")};
        }}
    }}
}}
"""
    return KernelSource("scan_columns", text, (dtype, dtype), (), over.grid, over.group)
