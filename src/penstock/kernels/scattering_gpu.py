"""Sums of rows by index on a GPU, in one kernel that needs no sorted index, and the same every time.

A group has every n-th row of the result, because the tokens of a text that are frequent mostly have numbers
next to each other. It looks for its rows in the whole index, counts how often each is there, and sorts the
places by row. A few threads add up a row; where it is long, all threads of the group do. A row that is very
often there, or all where the places are too many for the group's memory, is looked for in the index again.
"""

from __future__ import annotations

import math
from typing import Protocol

from penstock.drivers.driver import Capabilities
from penstock.graph.dtypes import HALVES
from penstock.graph.node import Node
from penstock.graph.reducing import BLOCK
from penstock.kernels.dialects.c_expressions import c_type, combine
from penstock.kernels.dialects.c_threads import ThreadPrinter
from penstock.kernels.ir import Accumulate, Declare, Identity, Let, Load, Opaque, Statement, Store, Type, Var
from penstock.kernels.lone import group_size
from penstock.kernels.source import C_TYPES, KernelSource, head

_THREADS = 512  # of a group
_TILE = 32  # threads that add up a row
_MOST_ROWS = 1024  # of a group
_LISTED = 4096  # places that a group sorts
_LOCAL_BYTES = 46 << 10  # of a group, with all of the above
_LONG = 16  # places of a row, beyond which all threads add it up
_OFTEN = 1024  # places of a row, beyond which they are not sorted
_ACCESS = 16  # bytes that a thread reads at once


def add_rows(node: Node, index: Node, capabilities: Capabilities) -> KernelSource:
    """The kernel of `scatter_add`."""
    dtype, index_dtype = str(node.dtype), str(index.dtype)
    length, rest, count = node.shape[0], math.prod(node.shape[1:]), index.size
    less = 1 if capabilities.local_bytes >= _LOCAL_BYTES else 2
    threads = group_size(_THREADS // less, capabilities)
    tile = min(_TILE, threads)
    tiles = threads // tile
    groups = min(length, max(2 * capabilities.compute_units, -(-length // (_MOST_ROWS // less))))
    rows = -(-length // groups)
    sums = _Sums(node, rest, threads)
    levels = Levels(sums, -(-count // tiles) if sums.type in ("float", "double") else 0)
    # A key is a row of the group and a place, which sort as one number.
    wide = rows * (1 << count.bit_length()) > 1 << 31
    key, listed = ("ulong", _LISTED // less // 2) if wide else ("uint", _LISTED // less)
    place_bits = count.bit_length()
    text = f"""\
{head("add_rows", [(dtype, "out0")], [(dtype, "in0"), (index_dtype, "index")])}\
    LOCAL {key} keys[{listed}];
    LOCAL int counts[{rows}], starts[{rows + 1}], long_rows[{rows}], found, found_long;
    LOCAL {sums.type} across[{threads * sums.lanes}];
    int group = GROUP(0), tile = THREAD / {tile}, rank = THREAD % {tile};
    for (int row = THREAD; row < {rows}; row += {threads}) counts[row] = 0;
    if (THREAD == 0) found = found_long = 0;
    BARRIER;
    for (int i = THREAD; i < {count}; i += {threads}) {{
        {C_TYPES[index_dtype]} row = index[i];
        int mine = row >= 0 && row < {length} && (int)row % {groups} == group;
        if (mine) LOCAL_NEXT(counts[(int)row / {groups}]);
    }}
    BARRIER;
    for (int i = THREAD; i < {count}; i += {threads}) {{
        {C_TYPES[index_dtype]} row = index[i];
        if (row < 0 || row >= {length} || (int)row % {groups} != group) continue;
        int mine = (int)row / {groups}, at = counts[mine] > {_OFTEN} ? {listed} : LOCAL_NEXT(found);
        if (at < {listed}) keys[at] = ({key})mine << {place_bits} | ({key})i;
    }}
    BARRIER;
    int listed = found <= {listed} ? found : 0, padded = 1;
    while (padded < listed) padded *= 2;
    for (int i = listed + THREAD; i < padded; i += {threads}) keys[i] = ~({key})0;
    for (int size = 2; size <= padded; size *= 2)
        for (int step = size / 2; step > 0; step /= 2) {{
            BARRIER;
            for (int i = THREAD; i < padded / 2; i += {threads}) {{
                int low = 2 * i - (i & (step - 1));
                {key} a = keys[low], b = keys[low + step];
                if ((a > b) == ((low & size) == 0)) {{
                    keys[low] = b;
                    keys[low + step] = a;
                }}
            }}
        }}
    BARRIER;
    for (int row = THREAD; row <= {rows}; row += {threads}) {{
        int before = 0, after = listed;
        while (before < after) {{
            int middle = (before + after) / 2;
            if (keys[middle] >> {place_bits} < row) before = middle + 1;
            else after = middle;
        }}
        starts[row] = before;
    }}
    BARRIER;
    for (int row = tile; row < {rows} && row * {groups} + group < {length}; row += {tiles}) {{
        int begin = starts[row], end = starts[row + 1], target = row * {groups} + group;
        if (counts[row] > {_LONG} || counts[row] != end - begin) {{
            if (rank == 0) long_rows[LOCAL_NEXT(found_long)] = row;
            continue;
        }}
        for (int column = rank * {sums.lanes}; column < {rest}; column += {tile * sums.lanes}) {{
            {sums.start()}
            for (int i = begin; i < end; i++) {{
                int place = keys[i] & {(1 << place_bits) - 1};
                {sums.more()}
            }}
            {sums.stored()}
        }}
    }}
    BARRIER;
    for (int k = 0; k < found_long; k++) {{
        int row = long_rows[k], target = row * {groups} + group, begin = starts[row];
        int size = starts[row + 1] - begin, sorted = counts[row] == size;
        if (!sorted) {{
            begin = 0;
            size = {count};
        }}
        int first = begin + (int)((long)size * tile / {tiles});
        int end = begin + (int)((long)size * (tile + 1) / {tiles});
        for (int start = 0; start < {rest}; start += {tile * sums.lanes}) {{
            int column = start + rank * {sums.lanes};
            {sums.start()} {levels.start()}
            for (int i = first; i < (column < {rest} ? end : 0); i++) {{
                int place = sorted ? (int)(keys[i] & {(1 << place_bits) - 1}) : i;
                if (!sorted && index[i] != target) continue;
                {sums.more()} {levels.more()}
            }}
            {levels.end()}
            {sums.across()}
            BARRIER;
            for (int sum = THREAD; sum < {tile * sums.lanes}; sum += {threads}) {{
                int at = sum / {tile} * {threads} + sum % {tile};
                {sums.type} total = across[at];
                for (int other = 1; other < {tiles}; other++)
                    total = {sums.combined("total", f"across[at + other * {tile}]")};
                across[at] = total;
            }}
            BARRIER;
            if (THREAD < {tile} && column < {rest}) {{
                {sums.back()}
                {sums.stored()}
            }}
            BARRIER;
        }}
    }}
}}
"""
    return KernelSource("add_rows", text, (dtype, dtype, index_dtype), (), (groups,), (threads,))


class Levels:
    """Long sums in levels, as text in C or WGSL: what so many items gave is added to the sums above."""

    def __init__(self, sums: LevelSums, most: int) -> None:
        """`most`: items that there may be."""
        self._sums, self._count = sums, 0
        while most > BLOCK:
            most, self._count = -(-most // BLOCK), self._count + 1

    def start(self) -> str:
        """Declare the sums of all levels above the first, and how many items each level has taken in."""
        return " ".join(
            f"{self._sums.integer} taken{level} = 0; {self._sums.declared(level + 1)}"
            for level in range(self._count)
        )

    def more(self, level: int = 0) -> str:
        """The sums of the first level have taken in one item more."""
        if level == self._count:
            return ""
        clear = " ".join(f"{name} = {self._sums.zero};" for name in self._sums.names(level))
        full = f"{self._added(level)} {clear} taken{level} = 0; {self.more(level + 1)}"
        return f"taken{level} += 1; if (taken{level} == {BLOCK}) {{ {full} }}"

    def end(self) -> str:
        """Have everything in the sums of the first level."""
        both = zip(self._sums.names(0), self._sums.names(self._count), strict=True)
        back = [f"{first} = {last};" for first, last in both] if self._count else []
        return " ".join([*(self._added(level) for level in range(self._count)), *back])

    def _added(self, level: int) -> str:
        both = zip(self._sums.names(level), self._sums.names(level + 1), strict=True)
        return " ".join(f"{above} = {self._sums.combined(above, one)};" for one, above in both)


class LevelSums(Protocol):
    """The sums of a thread, as text; those of the levels above the first are like them."""

    integer: str  # how a count is declared
    zero: str

    def declared(self, level: int) -> str:
        """What declares the sums of a level."""

    def names(self, level: int) -> list[str]:
        """The sums of a level, one by one."""

    def combined(self, one: str, other: str) -> str:
        """The sum of two."""


class _Sums:
    """The sums of neighbouring columns in a thread, as text."""

    def __init__(self, node: Node, rest: int, threads: int) -> None:
        self._stored = str(node.dtype)
        self._index = f"((size_t)%s * {rest} + column)"
        self._dtype = "float32" if node.dtype in HALVES else self._stored
        self.lanes = math.gcd(rest, max(1, _ACCESS // node.dtype.itemsize))
        self._kind = Type(self._dtype, self.lanes)
        self.type = c_type(Type(self._dtype))
        self._item = "sums[l_]" if self.lanes > 1 else "sums"
        self._mine = f"across[THREAD + l_ * {threads}]" if self.lanes > 1 else "across[THREAD]"
        self._each = f"EACH_LANE({self.lanes}) " if self.lanes > 1 else ""

    def _text(self, *statements: Statement) -> list[str]:
        lines = ThreadPrinter().statements([self._declare("sums"), *statements])
        return [line.strip() for line in lines]

    def _declare(self, name: str) -> Declare:
        return Declare(name, Identity(self._kind, "sum"))

    integer, zero = "int", "0"

    def declared(self, level: int) -> str:
        """What declares the sums of a level."""
        (line,) = ThreadPrinter().statements([self._declare(f"sums_{level}")])
        return line.strip()

    def names(self, level: int) -> list[str]:
        """The sums of a level, one by one."""
        name = f"sums_{level}" if level else "sums"
        return [f"{name}[{lane}]" for lane in range(self.lanes)] if self.lanes > 1 else [name]

    def start(self) -> str:
        """The sums before anything is added."""
        return self._text()[0]

    def more(self) -> str:
        """Add what is at `place`."""
        index = Opaque(self._index % "place")
        load = Let("more", Load(self._kind, "in0", self._stored, index, 1, self.lanes))
        sums, more = Var("sums", self._kind), Var("more", self._kind)
        return " ".join(self._text(load, Accumulate(sums, "sum", more, self._kind))[1:])

    def stored(self) -> str:
        """Store the sums at row `target`."""
        index, sums = Opaque(self._index % "target"), Var("sums", self._kind)
        store = Store(sums, "out0", self._stored, index, self.lanes)
        return " ".join(self._text(store)[1:])

    def across(self) -> str:
        """Put the sums into the group's memory."""
        return f"{self._each}{self._mine} = {self._item};"

    def back(self) -> str:
        """Take the sums out of the group's memory."""
        return f"{self._each}{self._item} = {self._mine};"

    def combined(self, one: str, other: str) -> str:
        """The sum of two."""
        return combine("sum", Type(self._dtype), one, other)
