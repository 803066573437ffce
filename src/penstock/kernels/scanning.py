"""Scans: sums, products and linear recurrences along an axis, from its start or from its end."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class _Scan:
    """What a scan computes: a sum, a product, or a linear recurrence, which has no sign and two inputs."""

    dtype: str
    sign: str = ""
    reverse: bool = False

    @property
    def inputs(self) -> list[tuple[str, str]]:
        """The parameters that are read: dtype and name."""
        return [(self.dtype, name) for name in (["x"] if self.sign else ["x", "factor"])]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of all parameters."""
        return (self.dtype,) * (1 + len(self.inputs))

    @property
    def way(self) -> str:
        """The sign of a step to the next item."""
        return "-" if self.reverse else "+"

    def first(self, length: int, stride: int) -> str:
        """What is added to the index of a row's first item, to get that of the item to begin with."""
        return f" + {(length - 1) * stride}" if self.reverse else ""

    def next(self, carry: str, index: str, x: str = "x", factor: str = "factor") -> str:
        """The result at an index, from the result before it."""
        if self.sign:
            return combined(self.dtype, self.sign, carry, f"{x}[{index}]")
        return f"({x}[{index}] + {factor}[{index}] * {carry})"


def scan(node: Node, capabilities: Capabilities) -> Lone:
    """Kernels of a scan along an axis."""
    sign = {"add": "+", "multiply": "*", "": ""}[node.primitive.combine]
    kind = _Scan(str(node.dtype), sign, node.attributes["reverse"])
    outer, length, inner = along(node.shape, node.attributes["axis"])
    if is_cpu(capabilities):
        write = _rows_on_cpu if inner == 1 else _columns_on_cpu
        source = write(kind, outer, length, inner, capabilities)
    elif inner == 1 and length > SHORT_ROW and sign:
        source = group_scan("scan_row", kind.dtype, sign, outer, length, capabilities, kind.reverse)
    else:
        source = _columns_on_gpu(kind, outer, length, inner, capabilities)
    return Lone((Launch(source, tuple(range(len(kind.dtypes)))),))


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

    def more(self, value: str, following: str = "") -> str:
        """One more value; `following` is the carry after it, where that is more than a sum or a product."""
        if not self._blocks:
            following = following or combined(self._dtype, self._sign, "carry", value)
            return f"carry = {following};"
        far = f"if (++blocks_added == {BLOCK}) {{ far += blocks; blocks = -0.0f; blocks_added = 0; }}"
        block = f"blocks += near; near = -0.0f; added = 0; {far} before_near = far + blocks;"
        return f"near += {value}; carry = before_near + near; if (++added == {BLOCK}) {{ {block} }}"


def group_scan(
    name: str,
    dtype: str,
    sign: str,
    rows: int,
    length: int,
    capabilities: Capabilities,
    reverse: bool = False,
) -> KernelSource:
    """A group for each row, which goes along it in steps. Output and input may be the same buffer."""
    at = f"{length - 1} - first - k" if reverse else "first + k"
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
            if (first + k < {length}) sum = {with_("sum", f"x[{at}]")};
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
            if (first + k < {length}) y[{at}] = {with_("before", "sums[k]")};
        {carry.more(f"part[{threads - 1}]")}
        BARRIER;
    }}
}}
"""
    return KernelSource(name, text, (dtype, dtype), (), (rows,), (threads,))


def _columns_on_gpu(
    kind: _Scan, outer: int, length: int, inner: int, capabilities: Capabilities
) -> KernelSource:
    over, carry = spread(outer * inner, capabilities), _Carry(kind.dtype, kind.sign, length)
    way, after = kind.way, f"i {kind.way} {inner}"
    begin = f"t / {inner} * {length * inner} + t % {inner}{kind.first(length, inner)}"
    text = f"""\
{head("scan_columns", [(kind.dtype, "y")], kind.inputs)}\
    {over.loop}
        int i = {begin}, last = i {way} {(length - 1) * inner};
        {carry.start("x[i]")}
        for (; i {">" if kind.reverse else "<"} last; i {way}= {inner}) {{
            y[i] = carry;
            {carry.more(f"x[{after}]", kind.next("carry", after))}
        }}
        y[i] = carry;
    }}
}}
"""
    return KernelSource("scan_columns", text, kind.dtypes, (), over.grid, over.group)


def _sum_type(dtype: str, sign: str, capabilities: Capabilities) -> str:
    """In which type a CPU adds up one item after the other: sums of many have an error in a narrow one."""
    return "double" if (dtype, sign) == ("float32", "+") and capabilities.float64 else C_TYPES[dtype]


def _rows_on_cpu(
    kind: _Scan, outer: int, length: int, inner: int, capabilities: Capabilities
) -> KernelSource:
    lanes = range(min(_ROWS_AT_ONCE, outer))
    over = spread(-(-outer // len(lanes)), capabilities)
    # The last rows may be fewer: then one is done again by the same thread.
    first, way = kind.first(length, 1), kind.way
    rows = [f"int r{k} = {least(f't * {len(lanes)} + {k}', outer - 1)} * {length}{first};" for k in lanes]
    text = f"""\
{head("scan_rows", [(kind.dtype, "y")], kind.inputs)}\
    {over.loop}
        {" ".join(rows)}
        {_sum_type(kind.dtype, kind.sign, capabilities)} {", ".join(f"s{k} = x[r{k}]" for k in lanes)};
        {" ".join(f"y[r{k}] = s{k};" for k in lanes)}
        for (int i = 1; i < {length}; i++) {{
            {" ".join(f"s{k} = {kind.next(f's{k}', f'r{k} {way} i')};" for k in lanes)}
            {" ".join(f"y[r{k} {way} i] = s{k};" for k in lanes)}
        }}
    }}
}}
"""
    return KernelSource("scan_rows", text, kind.dtypes, (), over.grid, over.group)


def _columns_on_cpu(
    kind: _Scan, outer: int, length: int, inner: int, capabilities: Capabilities
) -> KernelSource:
    ctype = C_TYPES[kind.dtype]
    parts = -(-CPU_SHARES * capabilities.compute_units // outer)
    width = min(-(-inner // (16 * parts)) * 16, inner, _WIDEST)
    parts = -(-inner // width)
    over, wide = spread(outer * parts, capabilities), _sum_type(kind.dtype, kind.sign, capabilities)
    begin = f"t / {parts} * {length * inner} + start{kind.first(length, inner)}"
    pointers = ["from" if name == "x" else "factors" for _, name in kind.inputs]
    reads = [
        f"GLOBAL const {ctype} *RESTRICT {pointer} = {name} + {begin};"
        for pointer, (_, name) in zip(pointers, kind.inputs, strict=True)
    ]
    step = " ".join(f"{pointer} {kind.way}= {inner};" for pointer in (*pointers, "to"))
    text = f"""\
{head("scan_columns", [(kind.dtype, "y")], kind.inputs)}\
    LOCAL {wide} sums[{width}];
    {over.loop}
        int start = t % {parts} * {width}, width = {least(width, f"{inner} - start")};
        {" ".join(reads)}
        GLOBAL {ctype} *RESTRICT to = y + {begin};
        for (int j = 0; j < width; j++) to[j] = sums[j] = from[j];
        for (int i = 1; i < {length}; i++) {{
            {step}
            for (int j = 0; j < width; j++) to[j] = sums[j] = {kind.next("sums[j]", "j", "from", "factors")};
        }}
    }}
}}
"""
    return KernelSource("scan_columns", text, kind.dtypes, (), over.grid, over.group)
