"""The order that sorts rows, in WGSL: as `sorting.py` has it, with keys of 64 bits as two words.

A pair in memory is a word or two of its key, the low one first, and its place.
"""

from __future__ import annotations

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.kernels.dialects.wgsl_memory import WORD, Words
from penstock.kernels.lone import GPU_THREADS, Launch, Lone, along, group_size
from penstock.kernels.sorting import DIGITS
from penstock.kernels.source import KernelSource
from penstock.kernels.wgsl_along import group_scan

_BLOCK = 2048  # items that one group counts and places
_INSERTED = 16  # items of the longest row that is sorted by insertion
_SIGN = "0x80000000u"


def wgsl_sort(node: Node, capabilities: Capabilities) -> Lone | None:
    """Kernels of `argsort`."""
    row = _Row(node)
    if row.length <= _INSERTED:
        return Lone((Launch(_inserting(row), (0, 1)),))
    padded = 1 << (row.length - 1).bit_length()
    if padded * row.pair * WORD <= capabilities.local_bytes:
        return Lone((Launch(_in_local_memory(row, padded, capabilities), (0, 1)),))
    if capabilities.max_group_size < DIGITS or capabilities.local_bytes < 4 * _BLOCK:
        return None
    blocks = -(-row.length // _BLOCK)
    count, place = _counting(row, blocks), _placing(row, blocks)
    scan = group_scan("sum_counts", "int32", "add", row.count, DIGITS * blocks, capabilities)
    launches = [Launch(_loading(row), (2, 1))]
    for digit in range(row.bytes):
        here, there = 2 + digit % 2, 3 - digit % 2
        launches += [
            Launch(count, (4, here), (8 * digit,)),
            Launch(scan, (4, 4)),
            Launch(place, (there, here, 4), (8 * digit,)),
        ]
    launches.append(Launch(_storing(row), (0, 2 + row.bytes % 2)))
    pairs = row.count * row.length * row.pair * WORD
    return Lone(tuple(launches), (pairs, pairs, 4 * row.count * DIGITS * blocks))


class _Row:
    """What the texts say of the rows of one node: how many there are, where items lie, and their keys."""

    def __init__(self, node: Node) -> None:
        x = node.inputs[0]
        outer, self.length, self.inner = along(node.shape, node.attributes["axis"])
        self.count = outer * self.inner
        self.bytes = x.dtype.itemsize
        self.wide = self.bytes == 8
        self.pair = 3 if self.wide else 2  # words
        self.dtype = f"uint{8 * self.bytes}"  # the bits are read, whatever they mean
        self._kind = x.dtype.kind
        self._flip = node.attributes["descending"]
        self.words = Words()

    def item(self, i: str) -> str:
        """Where item `i` of `row` lies."""
        if self.inner == 1:
            return f"row * {self.length} + {i}"
        return f"row / {self.inner} * {self.length * self.inner} + row % {self.inner} + {i} * {self.inner}"

    def key(self, i: str) -> str:
        """The statements that name item `i`'s key: `key_0`, and `key_1` above it if it has two words."""
        if not self.wide:
            bits = self.words.item("in0", self.dtype, self.item(i))
            return f"let u = {bits}; let key_0 = {self._order('u', 8 * self.bytes)};"
        at = f"2 * ({self.item(i)})"
        low, high = self.words.word("in0", at), self.words.word("in0", f"{at} + 1")
        flipped = f"~{low}" if self._flip else low
        return f"let u = {high}; let key_0 = {flipped}; let key_1 = {self._order('u', 32)};"

    def _order(self, u: str, bits: int) -> str:
        """Bits, as many as that, as a number that stands in the same order as what they mean."""
        key, sign = u, 1 << bits - 1
        if self._kind == "i":
            key = f"({u} ^ {sign:#x}u)"
        if self._kind == "f":
            # Every NaN is the largest; -0 is 0; a negative number is the smaller the larger its bits are.
            number = f"select(~{u}, {u} | {_SIGN}, {u} <= {_SIGN})"
            key = f"select({number}, 0xffffffffu, ({u} << 1u) > 0xff000000u)"
        return f"({(1 << bits) - 1:#x}u ^ {key})" if self._flip else key

    def later(self, a: str, b: str, equal: str = "false") -> str:
        """Whether key `a` stands after key `b`; the names end in the number of the word."""
        text = f"{a}_0 > {b}_0" if equal == "false" else f"({a}_0 > {b}_0 || ({a}_0 == {b}_0 && {equal}))"
        return f"({a}_1 > {b}_1 || ({a}_1 == {b}_1 && {text}))" if self.wide else f"({text})"

    @property
    def parts(self) -> range:
        """The numbers of a key's words."""
        return range(self.pair - 1)


def _each(
    name: str, buffers: list[str], count: int, body: str, row: _Row, dtypes: tuple[str, ...]
) -> KernelSource:
    """A kernel with a thread for each of `count` tasks, whose number is `task`."""
    text = f"""\
{row.words.opening(name, buffers)}\
    let task = GROUP_0 * {GPU_THREADS} + THREAD;
    if (task < {count}) {{
        {body}
    }}
}}
"""
    return KernelSource(name, text, dtypes, (), (-(-count // GPU_THREADS),), (GPU_THREADS,))


def _loading(row: _Row) -> KernelSource:
    put = row.words.put_word
    stores = [put("pairs", f"task * {row.pair} + {k}", f"key_{k}") for k in row.parts]
    stores.append(put("pairs", f"task * {row.pair} + {row.pair - 1}", "u32(i)"))
    body = f"let row = task / {row.length}; let i = task % {row.length}; {row.key('i')} {' '.join(stores)}"
    return _each("load_keys", ["pairs", "in0"], row.count * row.length, body, row, ("uint64", row.dtype))


def _storing(row: _Row) -> KernelSource:
    place = row.words.word("pairs", f"task * {row.pair} + {row.pair - 1}")
    store = row.words.put_index("out0", row.item("i"), place)
    body = f"let row = task / {row.length}; let i = task % {row.length}; {store}"
    return _each("store_places", ["out0", "pairs"], row.count * row.length, body, row, ("int64", "uint64"))


def _block(row: _Row, blocks: int) -> str:
    """The digits of a group's block: which counts and pairs are its own."""
    key = row.words.word("pairs", f"(start + i) * {row.pair} + shift / 32")
    return f"""\
    let block = GROUP_0 % {blocks};
    let row = GROUP_0 / {blocks};
    let start = row * {row.length} + block * {_BLOCK};
    let n = min({_BLOCK}, {row.length} - block * {_BLOCK});
    let slot = row * {DIGITS * blocks} + THREAD * {blocks} + block;
    for (var i = THREAD; i < n; i += {DIGITS}) {{
        digits[i] = i32(({key} >> u32(shift % 32)) & {DIGITS - 1}u);
    }}
    workgroupBarrier();
"""


def _counting(row: _Row, blocks: int) -> KernelSource:
    text = f"""\
var<workgroup> digits: array<i32, {_BLOCK}>;
{row.words.opening("count_digits", ["counts", "pairs"], [("int32", "shift")])}\
{_block(row, blocks)}\
    var count = 0;
    for (var i = 0; i < n; i++) {{ count += select(0, 1, digits[i] == THREAD); }}
    {row.words.put("counts", "int32", "slot", "count")}
}}
"""
    grid = (row.count * blocks,)
    return KernelSource("count_digits", text, ("int32", "uint64"), ("int32",), grid, (DIGITS,))


def _placing(row: _Row, blocks: int) -> KernelSource:
    copies = [
        row.words.put_word(
            "sorted", f"next * {row.pair} + {k}", row.words.word("pairs", f"(start + i) * {row.pair} + {k}")
        )
        for k in range(row.pair)
    ]
    text = f"""\
var<workgroup> digits: array<i32, {_BLOCK}>;
{row.words.opening("place_by_digit", ["sorted", "pairs", "sums"], [("int32", "shift")])}\
{_block(row, blocks)}\
    var next = row * {row.length};
    if (slot > row * {DIGITS * blocks}) {{ next += {row.words.item("sums", "int32", "slot - 1")}; }}
    for (var i = 0; i < n; i++) {{
        if (digits[i] == THREAD) {{
            {" ".join(copies)}
            next++;
        }}
    }}
}}
"""
    buffers, grid = ("uint64", "uint64", "int32"), (row.count * blocks,)
    return KernelSource("place_by_digit", text, buffers, ("int32",), grid, (DIGITS,))


def _inserting(row: _Row) -> KernelSource:
    n = row.length
    moves = " ".join(f"keys_{k}[j] = keys_{k}[j - 1];" for k in row.parts)
    body = f"""\
let row = task;
        {" ".join(f"var keys_{k}: array<u32, {n}>;" for k in row.parts)}
        var places: array<i32, {n}>;
        for (var i = 0; i < {n}; i++) {{
            {row.key("i")}
            var j = i;
            while (j > 0) {{
                {" ".join(f"let last_{k} = keys_{k}[j - 1];" for k in row.parts)}
                if (!{row.later("last", "key")}) {{ break; }}
                {moves}
                places[j] = places[j - 1];
                j--;
            }}
            {" ".join(f"keys_{k}[j] = key_{k};" for k in row.parts)}
            places[j] = i;
        }}
        for (var i = 0; i < {n}; i++) {{ {row.words.put_index("out0", row.item("i"), "places[i]")} }}"""
    return _each("sort_short_rows", ["out0", "in0"], row.count, body, row, ("int64", row.dtype))


def _in_local_memory(row: _Row, padded: int, capabilities: Capabilities) -> KernelSource:
    """A group sorts a row as a bitonic network, by key and place, with what pads it at the end."""
    threads = group_size(padded // 2, capabilities)
    names = [*(f"keys_{k}" for k in row.parts), "places"]
    swaps = [f"let other = {name}[low]; {name}[low] = {name}[high]; {name}[high] = other;" for name in names]
    text = f"""\
{" ".join(f"var<workgroup> {name}: array<u32, {padded}>;" for name in names)}
{row.words.opening("sort_row", ["out0", "in0"])}\
    let row = GROUP_0;
    for (var i = THREAD; i < {padded}; i += {threads}) {{
        {" ".join(f"keys_{k}[i] = 0xffffffffu;" for k in row.parts)}
        places[i] = u32(i);
        if (i < {row.length}) {{
            {row.key("i")}
            {" ".join(f"keys_{k}[i] = key_{k};" for k in row.parts)}
        }}
    }}
    for (var size = 2; size <= {padded}; size *= 2) {{
        for (var step = size / 2; step > 0; step /= 2) {{
            workgroupBarrier();
            for (var i = THREAD; i < {padded // 2}; i += {threads}) {{
                let low = 2 * i - (i & (step - 1));
                let high = low + step;
                {" ".join(f"let a_{k} = keys_{k}[low]; let b_{k} = keys_{k}[high];" for k in row.parts)}
                let falls = {row.later("a", "b", "places[low] > places[high]")};
                if (falls == ((low & size) == 0)) {{
                    {" ".join(f"{{ {swap} }}" for swap in swaps)}
                }}
            }}
        }}
    }}
    workgroupBarrier();
    for (var i = THREAD; i < {row.length}; i += {threads}) {{
        {row.words.put_index("out0", row.item("i"), "places[i]")}
    }}
}}
"""
    return KernelSource("sort_row", text, ("int64", row.dtype), (), (row.count,), (threads,))
