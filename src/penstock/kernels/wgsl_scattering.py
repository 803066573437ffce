"""Sums of rows by index in WGSL: as `scattering_gpu.py` has it, with keys of one word."""

from __future__ import annotations

import math

from penstock.drivers.driver import Capabilities
from penstock.graph.dtypes import HALVES
from penstock.graph.node import Node
from penstock.kernels.dialects.wgsl_expressions import wgsl_combine
from penstock.kernels.dialects.wgsl_memory import WORD, Words, from_shared, shared_type, to_shared
from penstock.kernels.dialects.wgsl_printer import WgslPrinter
from penstock.kernels.ir import Accumulate, Declare, Identity, Let, Load, Opaque, Store, Type, Var
from penstock.kernels.lone import Launch, Lone, group_size
from penstock.kernels.scattering_gpu import Levels
from penstock.kernels.source import KernelSource
from penstock.kernels.wgsl_steps import most_steps

_THREADS = 512  # of a group
_TILE = 32  # threads that add up a row
_PARTS = 4  # of a row that a thread adds up side by side
_MOST_ROWS = 1024  # of a group
_LISTED = 4096  # places that a group sorts
_LONG = 16  # places of a row, beyond which all threads add it up
_OFTEN = 1024  # places of a row, beyond which they are not sorted


def wgsl_scatter(node: Node, capabilities: Capabilities) -> Lone | None:
    """The kernel of `scatter_add`; None where its loops would be too long."""
    dtype, index_dtype = str(node.dtype), str(node.inputs[1].dtype)
    length, rest, count = node.shape[0], math.prod(node.shape[1:]), node.inputs[1].size
    less = 1
    while _local_bytes(_Sums(node, rest, _TILE, _THREADS), less) > capabilities.local_bytes:
        less *= 2
    listed = _LISTED // less
    threads = group_size(_THREADS // less, capabilities)
    tile = min(_TILE, threads)
    tiles = threads // tile
    sums = _Sums(node, rest, tile, threads)
    place_bits = count.bit_length()
    # A key is a row of the group and a place, which sort as one number.
    most_rows = min(_MOST_ROWS // less, 1 << 32 - place_bits)
    if count > listed:  # a group may have to look for any of its rows in all of the index
        most_rows = min(
            most_rows, most_steps(capabilities) // (-(-rest // sums.span) * (count // tiles + 64))
        )
    if not most_rows:
        return None
    groups = min(length, max(2 * capabilities.compute_units, -(-length // most_rows)))
    rows = -(-length // groups)
    words = sums.words
    levels = Levels(sums, -(-count // tiles) if sums.dtype == "float32" else 0)
    index = words.index("indices", index_dtype, "i", str(length))
    place = f"i32(keys[i] & {(1 << place_bits) - 1:#x}u)"
    text = f"""\
var<workgroup> keys: array<u32, {listed}>;
var<workgroup> counts: array<atomic<i32>, {rows}>;
var<workgroup> starts: array<i32, {rows + 1}>;
var<workgroup> long_rows: array<i32, {rows}>;
var<workgroup> found: atomic<i32>;
var<workgroup> found_long: atomic<i32>;
var<workgroup> told: i32;
var<workgroup> across: array<{shared_type(sums.dtype)}, {threads * sums.count}>;
{words.opening("add_rows", ["out0", "in0", "indices"])}\
    let tile = THREAD / {tile};
    let rank = THREAD % {tile};
    for (var row = THREAD; row < {rows}; row += {threads}) {{ atomicStore(&counts[row], 0); }}
    if (THREAD == 0) {{
        atomicStore(&found, 0);
        atomicStore(&found_long, 0);
    }}
    workgroupBarrier();
    for (var i = THREAD; i < {count}; i += {threads}) {{
        let row = {index};
        if (row >= 0 && row % {groups} == GROUP_0) {{ atomicAdd(&counts[row / {groups}], 1); }}
    }}
    workgroupBarrier();
    for (var i = THREAD; i < {count}; i += {threads}) {{
        let row = {index};
        if (row >= 0 && row % {groups} == GROUP_0) {{
            let mine = row / {groups};
            if (atomicLoad(&counts[mine]) <= {_OFTEN}) {{
                let at = atomicAdd(&found, 1);
                if (at < {listed}) {{ keys[at] = (u32(mine) << {place_bits}u) | u32(i); }}
            }}
        }}
    }}
    workgroupBarrier();
    if (THREAD == 0) {{ told = select(0, atomicLoad(&found), atomicLoad(&found) <= {listed}); }}
    let listed = workgroupUniformLoad(&told);
    var padded = 1;
    while (padded < listed) {{ padded *= 2; }}
    for (var i = listed + THREAD; i < padded; i += {threads}) {{ keys[i] = 0xffffffffu; }}
    for (var size = 2; size <= padded; size *= 2) {{
        for (var step = size / 2; step > 0; step /= 2) {{
            workgroupBarrier();
            for (var i = THREAD; i < padded / 2; i += {threads}) {{
                let low = 2 * i - (i & (step - 1));
                let a = keys[low];
                let b = keys[low + step];
                if ((a > b) == ((low & size) == 0)) {{
                    keys[low] = b;
                    keys[low + step] = a;
                }}
            }}
        }}
    }}
    workgroupBarrier();
    for (var row = THREAD; row <= {rows}; row += {threads}) {{
        var before = 0;
        var after = listed;
        while (before < after) {{
            let middle = (before + after) / 2;
            let less = i32(keys[middle] >> {place_bits}u) < row;
            before = select(before, middle + 1, less);
            after = select(middle, after, less);
        }}
        starts[row] = before;
    }}
    workgroupBarrier();
    for (var row = tile; row < {rows} && row * {groups} + GROUP_0 < {length}; row += {tiles}) {{
        let begin = starts[row];
        let end = starts[row + 1];
        let goal = row * {groups} + GROUP_0;
        if (atomicLoad(&counts[row]) > {_LONG} || atomicLoad(&counts[row]) != end - begin) {{
            if (rank == 0) {{ long_rows[atomicAdd(&found_long, 1)] = row; }}
            continue;
        }}
        for (var column = rank * {sums.lanes}; column < {rest}; column += {sums.span}) {{
            {sums.start()}
            for (var i = begin; i < end; i++) {{
                let place = {place};
                {sums.more()}
            }}
            {sums.stored()}
        }}
    }}
    workgroupBarrier();
    if (THREAD == 0) {{ told = atomicLoad(&found_long); }}
    let long = workgroupUniformLoad(&told);
    for (var k = 0; k < long; k++) {{
        let row = long_rows[k];
        let goal = row * {groups} + GROUP_0;
        var begin = starts[row];
        var size = starts[row + 1] - begin;
        let is_listed = atomicLoad(&counts[row]) == size;
        if (!is_listed) {{
            begin = 0;
            size = {count};
        }}
        let first = begin + size / {tiles} * tile + min(tile, size % {tiles});
        let end = first + size / {tiles} + select(0, 1, tile < size % {tiles});
        for (var start = 0; start < {rest}; start += {sums.span}) {{
            let column = start + rank * {sums.lanes};
            {sums.start()} {levels.start()}
            for (var i = first; i < end; i++) {{
                var place = i;
                if (is_listed) {{ place = {place}; }} else if ({index} != goal) {{ continue; }}
                {sums.more()} {levels.more()}
            }}
            {levels.end()}
            {sums.across()}
            workgroupBarrier();
            for (var sum = THREAD; sum < {tile * sums.count}; sum += {threads}) {{
                let at = sum / {tile} * {threads} + sum % {tile};
                var total = {from_shared(sums.dtype, "across[at]")};
                for (var other = 1; other < {tiles}; other++) {{
                    let more = {from_shared(sums.dtype, f"across[at + other * {tile}]")};
                    total = {wgsl_combine("sum", sums.dtype, "total", "more")};
                }}
                across[at] = {to_shared(sums.dtype, "total")};
            }}
            workgroupBarrier();
            if (THREAD < {tile}) {{
                {sums.back()}
                {sums.stored()}
            }}
            workgroupBarrier();
        }}
    }}
}}
"""
    source = KernelSource("add_rows", text, (dtype, dtype, index_dtype), (), (groups,), (threads,))
    return Lone((Launch(source, (0, 1, 2)),))


def _local_bytes(sums: _Sums, less: int) -> int:
    """The bytes of a group's memory, of which all parts but a few words are so many times smaller."""
    item = 2 * WORD if sums.dtype.endswith("64") else WORD
    return (WORD * (_LISTED + 3 * _MOST_ROWS) + item * _THREADS * sums.count) // less + 64


class _Sums:
    """The sums of some columns in a thread, as text: parts of a row that lie apart, of neighbours each.

    Neighbours are as many as a word of the memory holds.
    """

    def __init__(self, node: Node, rest: int, tile: int, threads: int) -> None:
        self._stored = str(node.dtype)
        self.dtype = "float32" if node.dtype in HALVES else self._stored
        each = max(1, WORD // node.dtype.itemsize)
        self.lanes = math.gcd(rest, each)
        self.words = Words(self.lanes < each)
        parts = min(_PARTS, -(-rest // (tile * self.lanes)))
        self.count = parts * self.lanes  # sums of a thread
        self.span = tile * self.count  # columns that the threads of a tile add up at a time
        self._rest, self._threads = rest, threads
        self._steps = [part * tile * self.lanes for part in range(parts)]
        self._kind = Type(self.dtype, self.lanes)
        self._thread = WgslPrinter(self.words)

    def _lines(self, lines: list[str]) -> str:
        return " ".join(line.strip() for line in lines)

    def _inside(self, step: int) -> str:
        """Whether a part's columns are there; nothing where they always are."""
        return f"column + {step} < {self._rest}" if self._rest % self.span else ""

    def _place(self, row: str, step: int) -> str:
        return f"({row} * {self._rest} + column + {step})"

    integer, zero = "var", "0.0"

    def start(self) -> str:
        """The sums before anything is added."""
        return self.declared(0)

    def declared(self, level: int) -> str:
        """What declares the sums of a level."""
        names = [self._name(k, level) for k in range(len(self._steps))]
        sums = [Declare(name, Identity(self._kind, "sum")) for name in names]
        return self._lines(self._thread.statements(sums))

    def _name(self, part: int, level: int) -> str:
        return f"sums{part}_{level}" if level else f"sums{part}"

    def names(self, level: int) -> list[str]:
        """The sums of a level, one by one."""
        return [
            self._thread.expr(Var(self._name(k, level), self._kind), lane)
            for k in range(len(self._steps))
            for lane in range(self.lanes)
        ]

    def combined(self, one: str, other: str) -> str:
        """The sum of two."""
        return wgsl_combine("sum", self.dtype, one, other)

    def more(self) -> str:
        """Add what is at `place`."""
        lines = []
        for k, step in enumerate(self._steps):
            place, inside = self._place("place", step), self._inside(step)
            mask = Opaque(inside) if inside else None
            load = Load(self._kind, "in0", self._stored, Opaque(place), 1, self.lanes, mask)
            sums, more = Var(f"sums{k}", self._kind), Var(f"more{k}", self._kind)
            added = Accumulate(sums, "sum", more, self._kind)
            lines += self._thread.statements([Let(more.name, load), added])
        return self._lines(lines)

    def stored(self) -> str:
        """Store the sums at row `goal`."""
        lines = []
        for k, step in enumerate(self._steps):
            place, sums = Opaque(self._place("goal", step)), Var(f"sums{k}", self._kind)
            store = Store(sums, "out0", self._stored, place, self.lanes)
            written = self._thread.statements([store])
            inside = self._inside(step)
            lines += [f"if ({inside}) {{", *written, "}"] if inside else written
        return self._lines(lines)

    def _shared(self) -> list[tuple[str, str]]:
        """The names of the sums, and where they lie in the group's memory."""
        return [(name, f"across[THREAD + {at * self._threads}]") for at, name in enumerate(self.names(0))]

    def across(self) -> str:
        """Put the sums into the group's memory."""
        return " ".join(f"{place} = {to_shared(self.dtype, name)};" for name, place in self._shared())

    def back(self) -> str:
        """Take the sums out of the group's memory."""
        return " ".join(f"{name} = {from_shared(self.dtype, place)};" for name, place in self._shared())
