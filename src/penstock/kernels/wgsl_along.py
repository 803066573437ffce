"""Scans and extremes along an axis in WGSL: a group for a long row, a thread for a short one or a column."""

from __future__ import annotations

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.graph.reducing import BLOCK
from penstock.kernels.dialects.wgsl_expressions import number, wgsl_expression
from penstock.kernels.dialects.wgsl_memory import WORD, Words, from_shared, item_size, shared_type, to_shared
from penstock.kernels.lone import GPU_THREADS, SHORT_ROW, Launch, Lone, along, group_size
from penstock.kernels.source import KernelSource
from penstock.kernels.wgsl_steps import UNROLLED, most_steps

_ITEMS = 4  # of one thread in a group's step
_ROW_STEP = 256  # items of a row to each step of a loop, of all that a group's step takes


def wgsl_scan(node: Node, capabilities: Capabilities) -> Lone | None:
    """Kernels of a scan along an axis; a linear recurrence has no operation, and a second input."""
    dtype, operation, reverse = str(node.dtype), node.primitive.combine, node.attributes["reverse"]
    outer, length, inner = along(node.shape, node.attributes["axis"])
    few = length <= _ROW_STEP * most_steps(capabilities)
    if operation and inner == 1 and length > SHORT_ROW and few:
        source = group_scan("scan_row", dtype, operation, outer, length, capabilities, reverse)
    elif length > UNROLLED * most_steps(capabilities):
        return None
    else:
        source = _scan_columns(dtype, operation, outer, length, inner, reverse)
    return Lone((Launch(source, tuple(range(len(source.buffers)))),))


class _Carry:
    """A sum of values that come one after the other, as text: see `scanning.py`."""

    def __init__(self, dtype: str, operation: str, count: int) -> None:
        self._dtype, self._operation = dtype, operation
        self._blocks = operation == "add" and dtype == "float32" and count > BLOCK

    def start(self, value: str) -> str:
        """Before anything is added to a first value."""
        if not self._blocks:
            return f"var carry = {value};"
        sums = "var near = carry; var blocks = -0.0; var far = -0.0; var before_near = -0.0;"
        return f"var carry: f32 = {value}; {sums} var added = 1; var blocks_added = 0;"

    def more(self, value: str) -> str:
        """One more value."""
        if not self._blocks:
            return f"carry = {_combined(self._operation, self._dtype, 'carry', value)};"
        count = "blocks_added += 1;"
        far = f"{count} if (blocks_added == {BLOCK}) {{ far += blocks; blocks = -0.0; blocks_added = 0; }}"
        block = f"blocks += near; near = -0.0; added = 0; {far} before_near = far + blocks;"
        return f"near += {value}; carry = before_near + near; added += 1; if (added == {BLOCK}) {{ {block} }}"


def group_scan(
    name: str,
    dtype: str,
    operation: str,
    rows: int,
    length: int,
    capabilities: Capabilities,
    reverse: bool = False,
) -> KernelSource:
    """A group for each row, which goes along it in steps. Output and input may be the same buffer."""
    words = Words(item_size(dtype) < WORD)
    threads = group_size(max(length // _ITEMS, 32), capabilities)
    # A sum begins with -0, which leaves what is added to it as it is, be it 0 or -0.
    nothing = (
        number(dtype, 1) if operation == "multiply" else "-0.0" if dtype == "float32" else number(dtype, 0)
    )
    carry = _Carry(dtype, operation, -(-length // (threads * _ITEMS)))
    lines = []
    places = [
        f"begin + {length - 1 - k} - first" if reverse else f"begin + first + {k}" for k in range(_ITEMS)
    ]
    for k in range(_ITEMS):
        item = words.item("in0", dtype, places[k])
        lines.append(f"if (first + {k} < {length}) {{ sum = {_combined(operation, dtype, 'sum', item)}; }}")
        lines.append(f"let sum{k} = sum;")
    stores = []
    for k in range(_ITEMS):
        value = _combined(operation, dtype, "before", f"sum{k}")
        stores.append(f"if (first + {k} < {length}) {{ {words.put('out0', dtype, places[k], value)} }}")
    text = f"""\
var<workgroup> parts: array<{shared_type(dtype)}, {threads}>;
{words.opening(name, ["out0", "in0"])}\
    let begin = GROUP_0 * {length};
    {carry.start(nothing)}
    for (var start = 0; start < {length}; start += {threads * _ITEMS}) {{
        let first = start + THREAD * {_ITEMS};
        var sum = {nothing};
        {_joined(lines)}
        parts[THREAD] = {to_shared(dtype, "sum")};
        workgroupBarrier();
        for (var reach = 1; reach < {threads}; reach *= 2) {{
            if (THREAD >= reach) {{
                let other = {from_shared(dtype, "parts[THREAD - reach]")};
                sum = {_combined(operation, dtype, "other", "sum")};
            }}
            workgroupBarrier();
            parts[THREAD] = {to_shared(dtype, "sum")};
            workgroupBarrier();
        }}
        var before = carry;
        if (THREAD > 0) {{
            let other = {from_shared(dtype, "parts[THREAD - 1]")};
            before = {_combined(operation, dtype, "carry", "other")};
        }}
        {_joined(stores)}
        let last = {from_shared(dtype, f"parts[{threads - 1}]")};
        {carry.more("last")}
        workgroupBarrier();
    }}
}}
"""
    return KernelSource(name, text, (dtype, dtype), (), (rows,), (threads,))


def _scan_columns(
    dtype: str, operation: str, outer: int, length: int, inner: int, reverse: bool
) -> KernelSource:
    words, count, carry = Words(item_size(dtype) < WORD), outer * inner, _Carry(dtype, operation, length)
    inputs = ["in0"] if operation else ["in0", "in1"]
    more = f"let more = {words.item('in0', dtype, 'i')}; "
    if operation:
        more += carry.more("more")
    else:
        product = _combined("multiply", dtype, words.item("in1", dtype, "i"), "carry")
        more += f"carry = {_combined('add', dtype, 'more', product)};"
    way, before = ("-", "i > last") if reverse else ("+", "i < last")
    first = f" + {(length - 1) * inner}" if reverse else ""
    step = f"if ({before}) {{ i {way}= {inner}; {more} {words.put('out0', dtype, 'i', 'carry')} }}"
    text = f"""\
{words.opening("scan_columns", ["out0", *inputs])}\
    let column = GROUP_0 * {GPU_THREADS} + THREAD;
    if (column < {count}) {{
        var i = column / {inner} * {length * inner} + column % {inner}{first};
        let last = i {way} {(length - 1) * inner};
        {carry.start(words.item("in0", dtype, "i"))}
        {words.put("out0", dtype, "i", "carry")}
        while ({before}) {{
            {" ".join([step] * UNROLLED)}
        }}
    }}
}}
"""
    dtypes = (dtype,) * (1 + len(inputs))
    return KernelSource("scan_columns", text, dtypes, (), (-(-count // GPU_THREADS),), (GPU_THREADS,))


def _combined(operation: str, dtype: str, one: str, other: str) -> str:
    found = wgsl_expression(operation, dtype, dtype, (one, other))
    assert found is not None
    return found


def wgsl_extreme(node: Node, capabilities: Capabilities) -> Lone | None:
    """Kernels of `argmax` and `argmin`."""
    x, largest = node.inputs[0], node.primitive.name == "argmax"
    outer, length, inner = along(x.shape, node.attributes["axis"])
    if inner == 1 and length > SHORT_ROW:
        source = _extreme_of_row(str(x.dtype), largest, outer, length, capabilities)
    elif length > UNROLLED * most_steps(capabilities):
        return None
    else:
        source = _extreme_of_each(str(x.dtype), largest, outer, length, inner)
    return Lone((Launch(source, (0, 1)),))


def _beats(dtype: str, largest: bool, a: str, b: str) -> str:
    """Whether `a`, which comes later, takes the place of `b`."""
    if dtype == "bool":
        return f"({a} && !{b})" if largest else f"(!{a} && {b})"
    better = f"{a} {'>' if largest else '<'} {b}"
    return f"(!is_nan({b}) && (is_nan({a}) || {better}))" if dtype == "float32" else f"({better})"


def _extreme_of_row(
    dtype: str, largest: bool, outer: int, length: int, capabilities: Capabilities
) -> KernelSource:
    words, threads = Words(), group_size(max(length // 4, 32), capabilities)
    text = f"""\
var<workgroup> tops: array<{shared_type(dtype)}, {threads}>;
var<workgroup> places: array<i32, {threads}>;
{words.opening("extreme_of_row", ["out0", "in0"])}\
    let begin = GROUP_0 * {length};
    var top = {words.item("in0", dtype, "begin + THREAD")};
    var place = THREAD;
    for (var i = THREAD + {threads}; i < {length}; i += {threads}) {{
        let v = {words.item("in0", dtype, "begin + i")};
        if ({_beats(dtype, largest, "v", "top")}) {{
            top = v;
            place = i;
        }}
    }}
    tops[THREAD] = {to_shared(dtype, "top")};
    places[THREAD] = place;
    for (var apart = {threads // 2}; apart > 0; apart /= 2) {{
        workgroupBarrier();
        if (THREAD < apart) {{
            let v = {from_shared(dtype, "tops[THREAD + apart]")};
            let i = places[THREAD + apart];
            let later = i > place || {_beats(dtype, largest, "top", "v")};
            if ({_beats(dtype, largest, "v", "top")} || !later) {{
                top = v;
                place = i;
                tops[THREAD] = {to_shared(dtype, "top")};
                places[THREAD] = place;
            }}
        }}
    }}
    if (THREAD == 0) {{ {words.put_index("out0", "GROUP_0", "place")} }}
}}
"""
    return KernelSource("extreme_of_row", text, ("int64", dtype), (), (outer,), (threads,))


def _extreme_of_each(dtype: str, largest: bool, outer: int, length: int, inner: int) -> KernelSource:
    words, count = Words(), outer * inner
    step = (
        f"let v = {words.item('in0', dtype, f'start + i * {inner}')}; "
        f"let wins = {_beats(dtype, largest, 'v', 'top')}; "
        "top = select(top, v, wins); place = select(place, i, wins);"
    )
    text = f"""\
{words.opening("extreme_of_each", ["out0", "in0"])}\
    let column = GROUP_0 * {GPU_THREADS} + THREAD;
    if (column < {count}) {{
        let start = column / {inner} * {length * inner} + column % {inner};
        var place = 0;
        var top = {words.item("in0", dtype, "start")};
        for (var i = 1; i < {length}; i++) {{
            {{ {step} }}
            {" ".join([f"i++; if (i < {length}) {{ {step} }}"] * (UNROLLED - 1))}
        }}
        {words.put_index("out0", "column", "place")}
    }}
}}
"""
    return KernelSource(
        "extreme_of_each", text, ("int64", dtype), (), (-(-count // GPU_THREADS),), (GPU_THREADS,)
    )


def _joined(lines: list[str]) -> str:
    return "\n        ".join(lines)
