"""Horizontal fusion: kernels of a GPU that do not depend on one another, as one launch.

Each gets a range of the launch's workgroups, and becomes a function that is told the number of its workgroup.
Calls that differ only in the offsets of their buffers, as those for the layers of a network do, are one piece
of the kernel: a table has their offsets. Buffers that lie in one memory are one parameter, as a device takes
few parameters.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.fusion.groups import Group
from penstock.kernels import ir
from penstock.kernels.concatenation import Call, MergedCalls
from penstock.kernels.dialects import dialect_of
from penstock.kernels.dialects.dialect import Dialect
from penstock.kernels.lower import Lowering
from penstock.kernels.source import MOST_PARAMETER_BYTES, KernelSource, digest, kernel_of

MOST_CALLS = 1024  # in one launch
_MOST_PIECES = 48  # calls in the kernel, which a compiler lays out
_MOST_STATEMENTS = 1500  # of functions
# Pieces, beyond which functions are called and not inlined: NVRTC takes 10 s for the kernel that draws the
# first weights of a GPT where it inlines all of them, and half a second where it does not.
_FEW_PIECES = 8
_MANY_BUFFERS = 64  # from which on a kernel takes them as memories, even where it is by itself
_GROUP = ir.Var("group")  # the number of the workgroup in the whole launch


def kind(group: Group, lowering: Lowering | None, capabilities: Capabilities) -> Hashable | None:
    """What groups have in common whose kernels may run side by side; None for those that run alone."""
    if lowering is None or lowering.function is not None or not group.kind.has_loops:
        return None
    if not dialect_of(capabilities).pointers:
        return None
    source = lowering.launches[0].source
    if source.arrays:  # which take room from all the groups of a launch
        return source.group, "any" if _may_branch(source, capabilities) else source.name
    return source.group, None


def _may_branch(source: KernelSource, capabilities: Capabilities) -> bool:
    """Whether a kernel may be one of several, of which each group runs another."""
    return not source.arrays or dialect_of(capabilities).barriers_in_branches


def joins(calls: Sequence[Call]) -> bool:
    """Whether calls that may run side by side are to become another kernel."""
    return len(calls) > 1 or len(calls[0].locations) > _MANY_BUFFERS


def fuse_horizontally(
    calls: Sequence[Call], lies: Mapping[int, tuple[int, int]], capabilities: Capabilities
) -> list[Call]:
    """Calls that do not depend on one another, as few.

    `lies`: for buffers, by their numbers in the program, the buffer that they lie in, and the offset there.
    """

    def moved(call: Call) -> Call:
        locations = ((lies[slot][0], lies[slot][1] + offset) for slot, offset in call.locations)
        return replace(call, locations=tuple(locations))

    most = _MOST_PIECES if _may_branch(calls[0].source, capabilities) else 1
    launches: list[_Launch] = []
    for new, call in sorted(((moved(call), call) for call in calls), key=lambda pair: _piece(pair[0])):
        if not launches or not launches[-1].has_room(new):
            launches.append(_Launch(most, dialect_of(capabilities)))
        launches[-1].add(new, call)
    return [launch.fused() for launch in launches]


def _piece(call: Call) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Equal for calls that differ in offsets only."""
    return call.source.name, tuple(slot for slot, _ in call.locations), call.scalars, call.constants


@dataclass(frozen=True)
class _Rows:
    """What the calls of one piece differ in: a row for each, with its first workgroup, then its offsets."""

    table: str
    rows: list[list[int]]

    def search(self) -> list[ir.Statement]:
        """What finds the row of a workgroup."""
        row, end, middle = ir.Var("row"), ir.Var("end"), ir.Var("middle")
        first = ir.Load(ir.INT, self.table, "int32", middle * len(self.rows[0]))
        halving: list[ir.Statement] = [
            ir.Let("middle", (row + end) // 2),
            ir.If(first <= _GROUP, [ir.Assign("row", middle)], [ir.Assign("end", middle)]),
        ]
        return [
            ir.Declare("row", ir.Const(0)),
            ir.Declare("end", ir.Const(len(self.rows))),
            ir.While(end - row > 1, halving),
        ]

    def item(self, column: int) -> ir.Expr:
        """A column of the workgroup's row; a constant where all rows have the same integer."""
        if len({row[column] for row in self.rows}) == 1:
            return ir.Const(self.rows[0][column])
        return ir.Load(ir.INT, self.table, "int32", ir.Var("row") * len(self.rows[0]) + column)


class _Launch:
    """One launch while it grows, up to some pieces."""

    def __init__(self, most_pieces: int, dialect: Dialect) -> None:
        self._most_pieces, self._dialect = most_pieces, dialect
        self._pieces: dict[Hashable, list[Call]] = {}
        self._merging = MergedCalls()
        self._statements = 0  # of the kernel's functions
        self._given: list[Call] = []

    def has_room(self, call: Call) -> bool:
        """Whether one more call fits into the bounds."""
        return (
            len(self._given) < MOST_CALLS
            and len({*self._pieces, _piece(call)}) <= self._most_pieces
            and self._merging.parameter_bytes(call) <= MOST_PARAMETER_BYTES
            and self._statements + self._new_statements(call) <= _MOST_STATEMENTS
        )

    def _new_statements(self, call: Call) -> int:
        known = call.source.name in self._merging.sources
        return 0 if known else sum(1 for _ in ir.walk(kernel_of(call.source).body))

    def add(self, call: Call, given: Call) -> None:
        """One more call, and what it was before it was told in which memories its buffers lie."""
        self._statements += self._new_statements(call)
        self._pieces.setdefault(_piece(call), []).append(call)
        self._merging.add(call)
        self._given.append(given)

    def fused(self) -> Call:
        """All calls as one. One by itself stays what it is: its kernel serves others elsewhere."""
        if not joins(self._given):
            return self._given[0]
        merging, linkage = self._merging, "DEVICE" if len(self._pieces) <= _FEW_PIECES else "CALLED"
        kernel = ir.KernelIR(
            functions=merging.functions(linkage),
            arrays=self._local_memory(),
            group=self._given[0].source.group,
            vectors=False,
        )
        branches: list[tuple[ir.Expr, list[ir.Statement]]] = []
        first = 0
        for number, piece in enumerate(self._pieces.values()):
            rows = []
            for call in piece:
                rows.append([first, *(offset for _, offset in call.locations)])
                first += call.source.grid[0]
            body: list[ir.Statement] = []
            differing = _Rows(f"table{number}", rows)
            if len(rows) > 1:
                integers = tuple(integer for row in rows for integer in row)
                kernel.tables.append(ir.Table(differing.table, integers))
                body += differing.search()
            branches.append((first > _GROUP, [*body, _called(piece[0], merging, differing)]))
        kernel.grid = (first,)
        kernel.body = [ir.Let(_GROUP.name, ir.WORKGROUP), *_by_branch(branches)]
        identity = [
            (call.source.name, call.locations, call.scalars, call.constants) for call in merging.calls
        ]
        return merging.as_one(kernel, f"side_by_side_{digest(repr(identity))}", self._dialect)

    def _local_memory(self) -> list[ir.LocalArray]:
        """Memory of the workgroup that every piece uses for its own arrays."""
        room = max(
            sum(_words(dtype, length) for dtype, _, length in source.arrays)
            for source in self._merging.sources.values()
        )
        return [ir.LocalArray(ir.LOCAL_MEMORY, "uint64", room)] if room else []


def _called(call: Call, merging: MergedCalls, rows: _Rows) -> ir.CallFunction:
    """A call of a piece's function, with the offsets of its row."""
    arrays, word = [], 0
    for dtype, _, length in call.source.arrays:
        arrays.append((dtype, word))
        word += _words(dtype, length)
    arguments = [rows.item(1 + at) for at in range(len(call.locations))]
    arguments += [ir.Const(scalar) for scalar in call.scalars]
    return merging.call(call, _GROUP - rows.item(0), arguments, arrays)


def _by_branch(branches: list[tuple[ir.Expr, list[ir.Statement]]]) -> list[ir.Statement]:
    """The first branch whose condition holds; one by itself needs no condition."""
    if len(branches) == 1:
        return branches[0][1]
    result: list[ir.Statement] = []
    for condition, body in reversed(branches):
        result = [ir.If(condition, body, result)]
    return result


def _words(dtype: str, length: int) -> int:
    """How many words of 8 bytes an array takes."""
    return -(-np.dtype(dtype).itemsize * length // 8)
