"""The order that sorts rows, equal items in theirs.

Every dtype is sorted as unsigned numbers that stand in the same order, each in a pair with its place. Short
rows are sorted by one thread, rows that fit local memory by a group, and others digit by digit, in an order
that keeps what the last digit brought about.
"""

from __future__ import annotations

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.kernels.lone import CPU_SHARES, Launch, Lone, along, group_size, is_cpu, least, spread
from penstock.kernels.scanning import group_scan
from penstock.kernels.source import KernelSource, head

DIGITS = 256  # values of a digit, which is a byte; on a GPU each has a thread
_BLOCK = 2048  # items that one group counts and places
_INSERTED_ON_CPU = 32  # items of the longest row that is sorted by insertion
_INSERTED_ON_GPU = 16
_LOCAL_BYTES = 32768  # every GPU's groups have this much


def sort(node: Node, capabilities: Capabilities) -> Lone | None:
    """Kernels of `argsort`."""
    row = _Row(node)
    if row.length <= (_INSERTED_ON_CPU if is_cpu(capabilities) else _INSERTED_ON_GPU):
        return Lone((Launch(_inserting(row, capabilities), (0, 1)),))
    if is_cpu(capabilities):
        slots = min(row.count, CPU_SHARES * capabilities.compute_units)
        scratch = slots * 2 * row.length * pair_bytes(row.wide)
        return Lone((Launch(_row_by_row(row, slots), (0, 2, 1)),), (scratch,))
    padded = 1 << (row.length - 1).bit_length()
    if padded * pair_bytes(row.wide) <= min(_LOCAL_BYTES, capabilities.local_bytes):
        return Lone((Launch(_in_local_memory(row, padded, capabilities), (0, 1)),))
    if capabilities.max_group_size < DIGITS:
        return None
    load, store = _loading(row, capabilities), _storing(row, capabilities)
    passes, scratch_sizes = sorting_passes(row.count, row.length, row.bytes, row.wide, 2, capabilities)
    sorted_pairs = 2 + row.bytes % 2
    return Lone((Launch(load, (2, 1)), *passes, Launch(store, (0, sorted_pairs))), scratch_sizes)


def pair_bytes(wide: bool) -> int:
    """The bytes of a `Pair`."""
    return 16 if wide else 8


def pair(wide: bool) -> str:
    """The C type of a key and its place. Declared inside kernels, so that their texts can be put together."""
    return f"typedef struct {{ {'ulong key; long' if wide else 'uint key; int'} at; }} Pair;"


def sorting_passes(
    rows: int, length: int, digits: int, wide: bool, first: int, capabilities: Capabilities
) -> tuple[list[Launch], tuple[int, ...]]:
    """Sort rows of pairs by the last `digits` bytes of their keys, and the scratch for it.

    The scratch buffers, of which the first is number `first`, hold the pairs, the pairs after a pass, and
    counts. The pairs begin in the first one and change sides with every pass.
    """
    blocks = -(-length // _BLOCK)
    counts = DIGITS * blocks
    block = f"""\
    {pair(wide)}
    LOCAL uchar digits[{_BLOCK}];
    int block = GROUP(0) % {blocks}, row = GROUP(0) / {blocks};
    int start = row * {length} + block * {_BLOCK}, n = {least(_BLOCK, f"{length} - block * {_BLOCK}")};
    GLOBAL const Pair *pairs = (GLOBAL const Pair *)memory + start;
    int slot = row * {counts} + THREAD * {blocks} + block;
    for (int i = THREAD; i < n; i += {DIGITS}) digits[i] = (pairs[i].key >> shift) & {DIGITS - 1};
    BARRIER;
"""
    shift = [("int32", "shift")]
    count_text = f"""\
{head("count_digits", [("int32", "counts")], [("uint64", "memory")], shift)}\
{block}\
    int count = 0;
    for (int i = 0; i < n; i++) count += digits[i] == THREAD;
    counts[slot] = count;
}}
"""
    place_text = f"""\
{head("place_by_digit", [("uint64", "target")], [("uint64", "memory"), ("int32", "sums")], shift)}\
{block}\
    GLOBAL Pair *to = (GLOBAL Pair *)target + row * {length};
    int next = slot == row * {counts} ? 0 : sums[slot - 1];
    for (int i = 0; i < n; i++)
        if (digits[i] == THREAD) to[next++] = pairs[i];
}}
"""
    scalars, grid, group = ("int32",), (rows * blocks,), (DIGITS,)
    count = KernelSource("count_digits", count_text, ("int32", "uint64"), scalars, grid, group)
    scan = group_scan("sum_counts", "int32", "+", rows, counts, capabilities)
    place = KernelSource("place_by_digit", place_text, ("uint64", "uint64", "int32"), scalars, grid, group)
    launches = []
    for digit in range(digits):
        here, there, tally = first + digit % 2, first + 1 - digit % 2, first + 2
        launches += [
            Launch(count, (tally, here), (8 * digit,)),
            Launch(scan, (tally, tally)),
            Launch(place, (there, here, tally), (8 * digit,)),
        ]
    pairs_bytes = rows * length * pair_bytes(wide)
    return launches, (pairs_bytes, pairs_bytes, 4 * rows * counts)


class _Row:
    """What the texts say of the rows of one node: how many there are, where items lie, and their keys."""

    def __init__(self, node: Node) -> None:
        x = node.inputs[0]
        outer, self.length, self.inner = along(node.shape, node.attributes["axis"])
        self.count = outer * self.inner
        self.bytes = x.dtype.itemsize
        self.wide = self.bytes == 8
        self.dtype = f"uint{8 * self.bytes}"  # the bits are read, whatever they mean
        self.key_type = "ulong" if self.wide else "uint"
        self.largest = hex((1 << 8 * self.bytes) - 1)
        self.key = self._key(x.dtype.kind)  # of the bits `u`
        if node.attributes["descending"]:
            self.key = f"{self.largest} ^ {self.key}"

    def item(self, i: str) -> str:
        """Where item `i` of `row` lies."""
        if self.inner == 1:
            return f"row * {self.length} + {i}"
        return f"row / {self.inner} * {self.length * self.inner} + row % {self.inner} + {i} * {self.inner}"

    def _key(self, kind: str) -> str:
        sign = hex(1 << 8 * self.bytes - 1)
        if kind == "i":
            return f"(u ^ {sign})"
        if kind == "f":
            infinity = {4: "0xff000000", 8: "0xffe0000000000000"}[self.bytes]  # without its sign
            # Every NaN is the largest; -0 is 0; a negative number is the smaller the larger its bits are.
            return f"(u << 1 > {infinity} ? {self.largest} : u <= {sign} ? u | {sign} : ~u)"
        return "u"


def _loading(row: _Row, capabilities: Capabilities) -> KernelSource:
    over = spread(row.count * row.length, capabilities)
    text = f"""\
{head("load_keys", [("uint64", "memory")], [(row.dtype, "x")])}\
    {pair(row.wide)}
    GLOBAL Pair *pairs = (GLOBAL Pair *)memory;
    {over.loop}
        int row = t / {row.length}, i = t % {row.length};
        {row.key_type} u = x[{row.item("i")}];
        pairs[t].key = {row.key};
        pairs[t].at = i;
    }}
}}
"""
    return KernelSource("load_keys", text, ("uint64", row.dtype), (), over.grid, over.group)


def _storing(row: _Row, capabilities: Capabilities) -> KernelSource:
    over = spread(row.count * row.length, capabilities)
    text = f"""\
{head("store_places", [("int64", "y")], [("uint64", "memory")])}\
    {pair(row.wide)}
    GLOBAL const Pair *pairs = (GLOBAL const Pair *)memory;
    {over.loop}
        int row = t / {row.length}, i = t % {row.length};
        y[{row.item("i")}] = pairs[t].at;
    }}
}}
"""
    return KernelSource("store_places", text, ("int64", "uint64"), (), over.grid, over.group)


def _inserting(row: _Row, capabilities: Capabilities) -> KernelSource:
    over = spread(row.count, capabilities)
    text = f"""\
{head("sort_short_rows", [("int64", "y")], [(row.dtype, "x")])}\
    {over.loop}
        int row = t;
        {row.key_type} keys[{row.length}];
        int places[{row.length}];
        for (int i = 0; i < {row.length}; i++) {{
            {row.key_type} u = x[{row.item("i")}], key = {row.key};
            int j = i;
            for (; j > 0 && keys[j - 1] > key; j--) {{
                keys[j] = keys[j - 1];
                places[j] = places[j - 1];
            }}
            keys[j] = key;
            places[j] = i;
        }}
        for (int i = 0; i < {row.length}; i++) y[{row.item("i")}] = places[i];
    }}
}}
"""
    return KernelSource("sort_short_rows", text, ("int64", row.dtype), (), over.grid, over.group)


def _row_by_row(row: _Row, slots: int) -> KernelSource:
    """For a CPU: a thread sorts one row after the other, digit by digit, in a slot of the scratch."""
    n = row.length
    each = -(-row.count // slots)
    text = f"""\
{head("sort_rows", [("int64", "y"), ("uint64", "memory")], [(row.dtype, "x")])}\
    {pair(row.wide)}
    int last = {least(f"GROUP(0) * {each} + {each}", row.count)};
    for (int row = GROUP(0) * {each}; row < last; row++) {{
        GLOBAL Pair *from = (GLOBAL Pair *)memory + (size_t)GROUP(0) * {2 * n}, *to = from + {n};
        int counts[{row.bytes}][{DIGITS}];
        for (int d = 0; d < {row.bytes}; d++)
            for (int v = 0; v < {DIGITS}; v++) counts[d][v] = 0;
        for (int i = 0; i < {n}; i++) {{
            {row.key_type} u = x[{row.item("i")}], key = {row.key};
            from[i].key = key;
            from[i].at = i;
            for (int d = 0; d < {row.bytes}; d++) counts[d][key >> 8 * d & {DIGITS - 1}]++;
        }}
        for (int d = 0; d < {row.bytes}; d++) {{
            int *next = counts[d], sum = 0;
            if (next[from[0].key >> 8 * d & {DIGITS - 1}] == {n}) continue;
            for (int v = 0; v < {DIGITS}; v++) {{
                int count = next[v];
                next[v] = sum;
                sum += count;
            }}
            for (int i = 0; i < {n}; i++) {{
                Pair p = from[i];
                to[next[p.key >> 8 * d & {DIGITS - 1}]++] = p;
            }}
            GLOBAL Pair *sorted = to;
            to = from;
            from = sorted;
        }}
        for (int i = 0; i < {n}; i++) y[{row.item("i")}] = from[i].at;
    }}
}}
"""
    buffers = ("int64", "uint64", row.dtype)
    return KernelSource("sort_rows", text, buffers, (), (-(-row.count // each),), (1,))


def _in_local_memory(row: _Row, padded: int, capabilities: Capabilities) -> KernelSource:
    """For a GPU: a group sorts a row as a bitonic network, by key and place, with what pads it at the end."""
    threads = group_size(padded // 2, capabilities)
    text = f"""\
{head("sort_row", [("int64", "y")], [(row.dtype, "x")])}\
    {pair(row.wide)}
    LOCAL Pair pairs[{padded}];
    int row = GROUP(0);
    for (int i = THREAD; i < {padded}; i += {threads}) {{
        pairs[i].key = {row.largest};
        pairs[i].at = i;
        if (i < {row.length}) {{
            {row.key_type} u = x[{row.item("i")}];
            pairs[i].key = {row.key};
        }}
    }}
    for (int size = 2; size <= {padded}; size <<= 1)
        for (int step = size >> 1; step > 0; step >>= 1) {{
            BARRIER;
            for (int i = THREAD; i < {padded // 2}; i += {threads}) {{
                int low = 2 * i - (i & (step - 1)), high = low + step;
                Pair a = pairs[low], b = pairs[high];
                int falls = a.key > b.key || (a.key == b.key && a.at > b.at);
                if (falls == ((low & size) == 0)) {{
                    pairs[low] = b;
                    pairs[high] = a;
                }}
            }}
        }}
    BARRIER;
    for (int i = THREAD; i < {row.length}; i += {threads}) y[{row.item("i")}] = pairs[i].at;
}}
"""
    return KernelSource("sort_row", text, ("int64", row.dtype), (), (row.count,), (threads,))
