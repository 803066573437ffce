"""Kernels of a GPU that do not depend on one another, as one: each gets a range of the launch's groups.

Each kernel becomes a function that is told the number of its group. Calls that differ only in the places of
their buffers, as those for the layers of a network do, are one piece of the text: a table has their places.
Buffers that lie in one memory are one parameter, of which a device takes few.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.fusion.groups import Group
from penstock.kernels.chaining import Call, together, total_cost
from penstock.kernels.dialects import dialect_of
from penstock.kernels.source import C_TYPES, MOST_PARAMETER_BYTES, KernelSource, declared, digest, head
from penstock.kernels.writer import Written

MOST_CALLS = 1024  # in one launch
_MOST_PIECES = 48  # calls in the text, which a compiler writes out
_MOST_TEXT = 1 << 17  # characters of functions
# Pieces, beyond which a compiler for a GPU need not write all of them into one another: NVRTC takes 10 s for
# the first weights of a GPT where it has to, and half a second where each stays a function.
_FEW_PIECES = 8
_BUFFER_BYTES, _NUMBER_BYTES = 12, 8  # of a parameter: an address with its place, and a number
_MANY_BUFFERS = 64  # from which on a kernel takes them as memories, even where it is by itself
_KINDS = ("map", "row", "column")


def kind(group: Group, written: Written | None, capabilities: Capabilities) -> Hashable | None:
    """What groups have in common whose kernels may run side by side; None for those that run alone."""
    if written is None or written.function is not None or group.kind not in _KINDS:
        return None
    if not dialect_of(capabilities).pointers:
        return None
    source = written.launches[0].source
    if source.arrays:  # which take room from all the groups of a launch
        return source.group, "any" if _may_branch(source, capabilities) else source.name
    return source.group, None


def _may_branch(source: KernelSource, capabilities: Capabilities) -> bool:
    """Whether a kernel may be one of several, of which each group runs another."""
    return not source.arrays or dialect_of(capabilities).barriers_in_branches


def joins(calls: Sequence[Call]) -> bool:
    """Whether calls that may run side by side are to become another kernel."""
    return len(calls) > 1 or len(calls[0].places) > _MANY_BUFFERS


def side_by_side(
    calls: Sequence[Call], lies: Mapping[int, tuple[int, int]], capabilities: Capabilities
) -> list[Call]:
    """Calls that do not depend on one another, as few.

    `lies` says of buffers, by their numbers in the program, which buffer has them inside, and at which unit.
    """

    def moved(call: Call) -> Call:
        places = ((lies[slot][0], lies[slot][1] + unit) for slot, unit in call.places)
        return replace(call, places=tuple(places))

    most = _MOST_PIECES if _may_branch(calls[0].source, capabilities) else 1
    launches: list[_Launch] = []
    for new, call in sorted(((moved(call), call) for call in calls), key=lambda pair: _piece(pair[0])):
        if not launches or not launches[-1].has_room(new):
            launches.append(_Launch(most))
        launches[-1].add(new, call)
    return [launch.written() for launch in launches]


def _piece(call: Call) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Equal for calls that differ in places only."""
    return call.source.name, tuple(slot for slot, _ in call.places), call.scalars, call.numbers


@dataclass(frozen=True)
class _Table:
    """What the calls of one piece differ in: a row for each, its first group and then the places."""

    name: str
    rows: list[list[int]]

    def text(self) -> str:
        """The table as a constant."""
        numbers = ", ".join(str(number) for row in self.rows for number in row)
        return f"CONSTANT int {self.name}[] = {{{numbers}}};\n"

    def search(self) -> list[str]:
        """The lines that find the row of a group."""
        return [
            f"int row = 0, end = {len(self.rows)};",
            "while (end - row > 1) {",
            "    int middle = (row + end) / 2;",
            f"    if ({self.name}[middle * {len(self.rows[0])}] <= side_group) row = middle;",
            "    else end = middle;",
            "}",
        ]

    def item(self, column: int) -> str:
        """A column of the row that was found; the number itself where it is the same in all rows."""
        if len({row[column] for row in self.rows}) == 1:
            return str(self.rows[0][column])
        return f"{self.name}[row * {len(self.rows[0])} + {column}]"


class _Launch:
    """One launch while it grows, up to some pieces."""

    def __init__(self, most_pieces: int) -> None:
        self._most_pieces = most_pieces
        self._pieces: dict[Hashable, list[Call]] = {}
        self._sources: dict[str, KernelSource] = {}
        self._slots: set[int] = set()
        self._numbers: dict[int, str] = {}  # dtypes
        self._given: list[Call] = []

    def has_room(self, call: Call) -> bool:
        """Whether one more call fits into the bounds."""
        slots = self._slots.union(slot for slot, _ in call.places)
        parameters = _BUFFER_BYTES * len(slots) + _NUMBER_BYTES * len({*self._numbers, *call.numbers})
        texts = {**self._sources, call.source.name: call.source}.values()
        return (
            len(self._given) < MOST_CALLS
            and len({*self._pieces, _piece(call)}) <= self._most_pieces
            and parameters <= MOST_PARAMETER_BYTES
            and sum(len(source.text) for source in texts) <= _MOST_TEXT
        )

    def add(self, call: Call, given: Call) -> None:
        """One more call, and what it was before it was told in which memories its buffers lie."""
        self._pieces.setdefault(_piece(call), []).append(call)
        self._sources[call.source.name] = call.source
        self._slots.update(slot for slot, _ in call.places)
        self._numbers.update(zip(call.numbers, call.source.scalars[len(call.scalars) :], strict=True))
        self._given.append(given)

    def written(self) -> Call:
        """All calls as one. One by itself stays what it is: its kernel serves others elsewhere."""
        if not joins(self._given):
            return self._given[0]
        calls = [call for piece in self._pieces.values() for call in piece]
        said = [(call.source.name, call.places, call.scalars, call.numbers) for call in calls]
        name = f"side_by_side_{digest(repr(said))}"
        tables, lines, first = [], [], 0
        for number, piece in enumerate(self._pieces.values()):
            rows = []
            for call in piece:
                rows.append([first, *(unit for _, unit in call.places)])
                first += call.source.grid[0]
            table = _Table(f"{name}_{number}", rows)
            if len(self._pieces) > 1:
                lines.append(f"{'} else ' if number else ''}if (side_group < {first}) {{")
            if len(rows) > 1:
                tables.append(table.text())
                lines += table.search()
            lines.append(self._called(piece[0], table, name))
        if len(self._pieces) > 1:
            lines.append("}")
        room = max(_local_words(source) for source in self._sources.values())
        slots = sorted(self._slots)
        opening, *places = (
            head(
                name,
                [("uint8", f"b{slot}") for slot in slots],
                [],
                [(dtype, f"c{number}") for number, dtype in self._numbers.items()],
            )
            .rstrip()
            .split("\n")
        )
        body = [*([f"LOCAL ulong side_memory[{room}];"] if room else ()), *(line.strip() for line in places)]
        body += ["int side_group = GROUP(0);", *lines]
        inside = len(self._pieces) <= _FEW_PIECES
        text = [
            *(_function(source, f"{name}_{source.name}", inside) for source in self._sources.values()),
            *tables,
            "\n".join([opening, *(f"    {line}" for line in body), "}\n"]),
        ]
        source = KernelSource(
            name,
            "\n".join(text),
            ("uint8",) * len(slots),
            tuple(self._numbers.values()),
            (first,),
            calls[0].source.group,
        )
        work = sum(call.work for call in calls)
        begin = tuple((slot, 0) for slot in slots)
        cost = total_cost(self._given)
        return Call(source, begin, (), tuple(self._numbers), work, together(self._given), cost=cost)

    @staticmethod
    def _called(call: Call, table: _Table, name: str) -> str:
        arguments = [f"side_group - {table.item(0)}"]
        word = 0
        for dtype, _, length in call.source.arrays:
            arguments.append(f"(LOCAL_AT {C_TYPES[dtype]} *)(side_memory + {word})")
            word += _words(dtype, length)
        arguments += [
            f"(GLOBAL {C_TYPES[dtype]} *)b{slot}"
            for dtype, (slot, _) in zip(call.source.buffers, call.places, strict=True)
        ]
        arguments += [table.item(1 + at) for at in range(len(call.places))]
        arguments += [*map(str, call.scalars), *(f"c{number}" for number in call.numbers)]
        return f"{name}_{call.source.name}({', '.join(arguments)});"


def _function(source: KernelSource, name: str, inside: bool) -> str:
    """A kernel as a function of its group's number, its memory of the group, and its parameters.

    `inside`: it is written into the kernel wherever that calls it.
    """
    text = source.text
    for array in source.arrays:  # which only a kernel may declare
        text = text.replace(f"{declared(*array)}\n", "")
    arrays = "".join(f"LOCAL_AT {C_TYPES[dtype]} *{array}, " for dtype, array, _ in source.arrays)
    word = "DEVICE" if inside else "CALLED"
    text = text.replace(f"KERNEL {source.name}(", f"{word} void {name}(int side_group, {arrays}")
    return text.replace("GROUP(0)", "side_group")


def _words(dtype: str, length: int) -> int:
    """How many units of 8 bytes an array takes."""
    return -(-np.dtype(dtype).itemsize * length // 8)


def _local_words(source: KernelSource) -> int:
    return sum(_words(dtype, length) for dtype, _, length in source.arrays)
