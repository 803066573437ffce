"""Horizontal fusion: kernels of a GPU that do not depend on one another, as one launch.

Each gets a range of the launch's workgroups, and becomes a function that is told the number of its workgroup.
Calls that differ only in the places of their buffers, as those for the layers of a network do, are one piece
of the kernel: a table has their places. Buffers that lie in one memory are one parameter, of which a device
takes few.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.fusion.groups import Group
from penstock.kernels.concatenation import Call, together, total_cost
from penstock.kernels.dialects import dialect_of
from penstock.kernels.dialects.dialect import Dialect
from penstock.kernels.ir.expressions import INT, WORKGROUP, Const, Expr, Load, Var
from penstock.kernels.ir.statements import (
    LOCAL_MEMORY,
    Assign,
    CallFunction,
    Declare,
    Function,
    If,
    KernelIR,
    Let,
    LocalArray,
    Statement,
    Table,
    While,
)
from penstock.kernels.lower import Lowering
from penstock.kernels.rewriting import statement_count
from penstock.kernels.source import MOST_PARAMETER_BYTES, KernelSource, digest, kernel_of

MOST_CALLS = 1024  # in one launch
_MOST_PIECES = 48  # calls in the kernel, which a compiler lays out
_MOST_STATEMENTS = 1500  # of functions
# Pieces, beyond which functions are called and not inlined: NVRTC takes 10 s for the kernel that draws the
# first weights of a GPT where it inlines all of them, and half a second where it does not.
_FEW_PIECES = 8
_BUFFER_BYTES, _NUMBER_BYTES = 12, 8  # of a parameter: an address with its place, and a number
_MANY_BUFFERS = 64  # from which on a kernel takes them as memories, even where it is by itself
_GROUP = Var("group")  # the number of the workgroup in the whole launch


def kind(group: Group, written: Lowering | None, capabilities: Capabilities) -> Hashable | None:
    """What groups have in common whose kernels may run side by side; None for those that run alone."""
    if written is None or written.function is not None or not group.kind.has_loops:
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


def fuse_horizontally(
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
            launches.append(_Launch(most, dialect_of(capabilities)))
        launches[-1].add(new, call)
    return [launch.written() for launch in launches]


def _piece(call: Call) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Equal for calls that differ in places only."""
    return call.source.name, tuple(slot for slot, _ in call.places), call.scalars, call.numbers


@dataclass(frozen=True)
class _Rows:
    """What the calls of one piece differ in: a row for each, its first group and then the places."""

    table: str
    rows: list[list[int]]

    def search(self) -> list[Statement]:
        """What finds the row of a workgroup."""
        row, end, middle = Var("row"), Var("end"), Var("middle")
        first = Load(INT, self.table, "int32", middle * len(self.rows[0]))
        halving: list[Statement] = [
            Let("middle", (row + end) // 2),
            If(first <= _GROUP, [Assign("row", middle)], [Assign("end", middle)]),
        ]
        return [
            Declare("row", Const(0)),
            Declare("end", Const(len(self.rows))),
            While(end - row > 1, halving),
        ]

    def item(self, column: int) -> Expr:
        """A column of the row that was found; the number itself where it is the same in all rows."""
        if len({row[column] for row in self.rows}) == 1:
            return Const(self.rows[0][column])
        return Load(INT, self.table, "int32", Var("row") * len(self.rows[0]) + column)


class _Launch:
    """One launch while it grows, up to some pieces."""

    def __init__(self, most_pieces: int, dialect: Dialect) -> None:
        self._most_pieces, self._dialect = most_pieces, dialect
        self._pieces: dict[Hashable, list[Call]] = {}
        self._sources: dict[str, KernelSource] = {}
        self._statements = 0  # of those
        self._slots: set[int] = set()
        self._numbers: dict[int, str] = {}  # dtypes
        self._given: list[Call] = []

    def has_room(self, call: Call) -> bool:
        """Whether one more call fits into the bounds."""
        slots = self._slots.union(slot for slot, _ in call.places)
        parameters = _BUFFER_BYTES * len(slots) + _NUMBER_BYTES * len({*self._numbers, *call.numbers})
        return (
            len(self._given) < MOST_CALLS
            and len({*self._pieces, _piece(call)}) <= self._most_pieces
            and parameters <= MOST_PARAMETER_BYTES
            and self._statements + self._new_statements(call) <= _MOST_STATEMENTS
        )

    def _new_statements(self, call: Call) -> int:
        known = call.source.name in self._sources
        return 0 if known else statement_count(kernel_of(call.source).body)

    def add(self, call: Call, given: Call) -> None:
        """One more call, and what it was before it was told in which memories its buffers lie."""
        self._statements += self._new_statements(call)
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
        kernel = KernelIR(
            outputs=["uint8"] * len(self._slots),
            scalars=[*self._numbers.values()],
            functions=self._functions(),
            group=calls[0].source.group,
            vectors=False,
        )
        kernel.arrays += self._local_memory()
        branches: list[tuple[Expr, list[Statement]]] = []
        first = 0
        for number, piece in enumerate(self._pieces.values()):
            rows = []
            for call in piece:
                rows.append([first, *(unit for _, unit in call.places)])
                first += call.source.grid[0]
            body: list[Statement] = []
            differing = _Rows(f"table{number}", rows)
            if len(rows) > 1:
                kernel.tables.append(Table(differing.table, tuple(unit for row in rows for unit in row)))
                body += differing.search()
            branches.append((first > _GROUP, [*body, self._called(piece[0], differing)]))
        kernel.grid = (first,)
        kernel.body = [Let(_GROUP.name, WORKGROUP), *_by_branch(branches)]
        slots = tuple((slot, 0) for slot in sorted(self._slots))
        work, cost = sum(call.work for call in calls), total_cost(self._given)
        source = self._dialect.render(kernel, name)
        return Call(source, slots, (), tuple(self._numbers), work, together(self._given), cost=cost)

    def _functions(self) -> list[Function]:
        linkage = "DEVICE" if len(self._pieces) <= _FEW_PIECES else "CALLED"
        return [Function(name, kernel_of(source), linkage) for name, source in self._sources.items()]

    def _local_memory(self) -> list[LocalArray]:
        """Memory of the workgroup that every piece uses for its own arrays."""
        room = max(
            sum(_words(dtype, length) for dtype, _, length in source.arrays)
            for source in self._sources.values()
        )
        return [LocalArray(LOCAL_MEMORY, "uint64", room)] if room else []

    def _called(self, call: Call, rows: _Rows) -> CallFunction:
        arrays, word = [], 0
        for dtype, _, length in call.source.arrays:
            arrays.append((dtype, word))
            word += _words(dtype, length)
        slots, numbers = sorted(self._slots), list(self._numbers)
        buffers = tuple(
            (dtype, f"out{slots.index(slot)}")
            for dtype, (slot, _) in zip(call.source.buffers, call.places, strict=True)
        )
        arguments = [rows.item(1 + at) for at in range(len(call.places))]
        arguments += [Const(scalar) for scalar in call.scalars]
        arguments += [Var(f"c{numbers.index(number)}") for number in call.numbers]
        group = _GROUP - rows.item(0)
        return CallFunction(call.source.name, group, tuple(arrays), buffers, tuple(arguments))


def _by_branch(branches: list[tuple[Expr, list[Statement]]]) -> list[Statement]:
    """The first branch whose condition holds; one by itself needs no condition."""
    if len(branches) == 1:
        return branches[0][1]
    result: list[Statement] = []
    for condition, body in reversed(branches):
        result = [If(condition, body, result)]
    return result


def _words(dtype: str, length: int) -> int:
    """How many units of 8 bytes an array takes."""
    return -(-np.dtype(dtype).itemsize * length // 8)
