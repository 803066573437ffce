"""Sums and products of the items up to each one."""

from __future__ import annotations

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.graph.reducing import BLOCK
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


class _Carry:
    """A sum of values that come one after the other, as text; `carry` is what they give so far.

    Where they are many, those since the last block, and the blocks, are added up by themselves.
    """

    def __init__(self, dtype: str, sign: str, count: int) -> None:
        self._type, self._dtype, self._sign = C_TYPES[dtype], dtype, sign
        self._blocks = sign == "+" and dtype.startswith("float") and count > BLOCK

    def start(self, value: str) -> str:
        """Before anything is added to a first value."""
        if not self._blocks:
            return f"{self._type} carry = {value};"
        sums = "near = carry, blocks = -0.0f, far = -0.0f, before_near = -0.0f"
        return f"{self._type} carry = {value}, {sums}; int added = 1, blocks_added = 0;"

    def more(self, value: str) -> str:
        """One more value."""
        if not self._blocks:
            return f"carry = {combined(self._dtype, self._sign, 'carry', value)};"
        far = f"if (++blocks_added == {BLOCK}) {{ far += blocks; blocks = -0.0f; blocks_added = 0; }}"
        block = f"blocks += near; near = -0.0f; added = 0; {far} before_near = far + blocks;"
        return f"near += {value}; carry = before_near + near; if (++added == {BLOCK}) {{ {block} }}"


def group_scan(
    name: str, dtype: str, sign: str, rows: int, length: int, capabilities: Capabilities
) -> KernelSource:
    """A group for each row, which goes along it in steps. Output and input may be the same buffer."""
    ctype = C_TYPES[dtype]
    threads = group_size(max(length // _ITEMS, 32), capabilities)
    # A sum begins with -0, which leaves what is added to it as it is, be it 0 or -0.
    nothing = {"+": "-0.0f" if dtype == "float32" else "-0.0" if dtype == "float64" else "0", "*": "1"}[sign]

    carry = _Carry(dtype, sign, -(-length // (threads * _ITEMS)))

    def with_(a: str, b: str) -> str:
        return combined(dtype, sign, a, b)

    text = f"""\
{head(name, [(dtype, "y")], [(dtype, "x")])}\
    LOCAL {ctype} part[{threads}];
    x += (size_t)GROUP(0) * {length};
    y += (size_t)GROUP(0) * {length};
    {carry.start(nothing)}
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
        {carry.more(f"part[{threads - 1}]")}
        BARRIER;
    }}
}}
"""
    return KernelSource(name, text, (dtype, dtype), (), (rows,), (threads,))


def _columns_on_gpu(
    dtype: str, sign: str, outer: int, length: int, inner: int, capabilities: Capabilities
) -> KernelSource:
    over, carry = spread(outer * inner, capabilities), _Carry(dtype, sign, length)
    text = f"""\
{head("scan_columns", [(dtype, "y")], [(dtype, "x")])}\
    {over.loop}
        int i = t / {inner} * {length * inner} + t % {inner}, last = i + {(length - 1) * inner};
        {carry.start("x[i]")}
        for (; i < last; i += {inner}) {{
            y[i] = carry;
            {carry.more(f"x[i + {inner}]")}
        }}
        y[i] = carry;
    }}
}}
"""
    return KernelSource("scan_columns", text, (dtype, dtype), (), over.grid, over.group)


def _sum_type(dtype: str, sign: str, capabilities: Capabilities) -> str:
    """In which type a CPU adds up one item after the other: sums of many have an error in a narrow one."""
    return "double" if (dtype, sign) == ("float32", "+") and capabilities.float64 else C_TYPES[dtype]


def _rows_on_cpu(
    dtype: str, sign: str, outer: int, length: int, inner: int, capabilities: Capabilities
) -> KernelSource:
    lanes = range(min(_ROWS_AT_ONCE, outer))
    over = spread(-(-outer // len(lanes)), capabilities)
    # The last rows may be fewer: then one is done again by the same thread.
    rows = [f"int r{k} = {least(f't * {len(lanes)} + {k}', outer - 1)} * {length};" for k in lanes]
    text = f"""\
{head("scan_rows", [(dtype, "y")], [(dtype, "x")])}\
    {over.loop}
        {" ".join(rows)}
        {_sum_type(dtype, sign, capabilities)} {", ".join(f"s{k} = x[r{k}]" for k in lanes)};
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
    over, wide = spread(outer * parts, capabilities), _sum_type(dtype, sign, capabilities)
    text = f"""\
{head("scan_columns", [(dtype, "y")], [(dtype, "x")])}\
    LOCAL {wide} sums[{width}];
    {over.loop}
        int start = t % {parts} * {width}, width = {least(width, f"{inner} - start")};
        GLOBAL const {ctype} *RESTRICT from = x + t / {parts} * {length * inner} + start;
        GLOBAL {ctype} *RESTRICT to = y + t / {parts} * {length * inner} + start;
        for (int j = 0; j < width; j++) to[j] = sums[j] = from[j];
        for (int i = 1; i < {length}; i++) {{
            from += {inner};
            to += {inner};
            for (int j = 0; j < width; j++) to[j] = sums[j] = {combined(dtype, sign, "sums[j]", "from[j]")};
        }}
    }}
}}
"""
    return KernelSource("scan_columns", text, (dtype, dtype), (), over.grid, over.group)
