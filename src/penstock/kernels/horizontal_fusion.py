"""Horizontal fusion: independent kernels of a GPU in a single launch.

Each becomes a function of its workgroup's index, and gets a range of the launch's workgroups. Calls that
differ only in the offsets of their buffers, as those for the layers of a network do, share a piece of the
kernel: a table has their offsets. Buffers in the same memory share a parameter, as a device takes few
parameters.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from penstock.drivers.driver import Capabilities
from penstock.fusion.groups import Group
from penstock.kernels import ir
from penstock.kernels.concatenation import Call, MergedCalls, Rows, piece_of
from penstock.kernels.dialects import dialect_of
from penstock.kernels.dialects.dialect import Dialect
from penstock.kernels.lower import Lowering
from penstock.kernels.source import MOST_PARAMETER_BYTES, KernelSource, item_size, kernel_of

MOST_CALLS = 1024  # in a launch
_MOST_PIECES = 48  # function calls in a kernel
_MOST_STATEMENTS = 1500  # of functions
# Pieces, beyond which functions are not inlined: NVRTC takes 10 s for the kernel that draws the first weights
# of a GPT if it inlines all of them, and half a second if it does not.
_FEW_PIECES = 8
_MANY_BUFFERS = 64  # of a call, beyond which buffers share parameters even if it is the only call
_GROUP = ir.Var("group")  # the index of the workgroup in the whole launch


def kind(group: Group, lowering: Lowering | None, capabilities: Capabilities) -> Hashable | None:
    """A key that is equal for groups whose kernels may share a launch; None for groups that may not."""
    if lowering is None or lowering.function is not None:
        return None
    if not (group.kind.has_loops or any(node.primitive.few_rows for node in group.nodes)):
        return None
    if not dialect_of(capabilities).pointers:
        return None
    source = lowering.launches[0].source
    if source.arrays:  # which take local memory from all workgroups of a launch
        return source.group, source.cluster, "any" if _may_branch(source, capabilities) else source.name
    return source.group, 1, None


def _may_branch(source: KernelSource, capabilities: Capabilities) -> bool:
    """Whether a kernel may be one of several branches."""
    return not source.arrays or dialect_of(capabilities).barriers_in_branches


def joins(calls: Sequence[Call]) -> bool:
    """Whether calls that may share a launch become another kernel."""
    return len(calls) > 1 or len(calls[0].locations) > _MANY_BUFFERS


def fuse_horizontally(
    calls: Sequence[Call], within: Mapping[int, tuple[int, int]], capabilities: Capabilities
) -> list[Call]:
    """Independent calls in as few launches as possible.

    `within`: for buffers, by their indices in the program, the buffer that contains them, and the offset in
    it.
    """

    def moved(call: Call) -> Call:
        locations = ((within[slot][0], within[slot][1] + offset) for slot, offset in call.locations)
        return replace(call, locations=tuple(locations))

    most = _MOST_PIECES if _may_branch(calls[0].source, capabilities) else 1
    launches: list[_Launch] = []
    for new, call in sorted(((moved(call), call) for call in calls), key=lambda pair: piece_of(pair[0])):
        if not launches or not launches[-1].has_room(new):
            launches.append(_Launch(most, dialect_of(capabilities)))
        launches[-1].add(new, call)
    return [launch.fused() for launch in launches]


def _search(rows: Rows) -> list[ir.Statement]:
    """A binary search for the row of a workgroup, by the first workgroups of the rows."""
    row, end, middle = ir.Var("row"), ir.Var("end"), ir.Var("middle")
    first = ir.Load(ir.INT, rows.table, "int32", middle * len(rows.rows[0]))
    halving: list[ir.Statement] = [
        ir.Let("middle", (row + end) // 2),
        ir.If(first <= _GROUP, [ir.Assign("row", middle)], [ir.Assign("end", middle)]),
    ]
    return [
        ir.Declare("row", ir.Const(0)),
        ir.Declare("end", ir.Const(len(rows.rows))),
        ir.While(end - row > 1, halving),
    ]


class _Launch:
    """A launch of up to `most_pieces` pieces."""

    def __init__(self, most_pieces: int, dialect: Dialect) -> None:
        self._most_pieces, self._dialect = most_pieces, dialect
        self._pieces: dict[Hashable, list[Call]] = {}
        self._merging = MergedCalls()
        self._statements = 0  # of the kernel's functions
        self._given: list[Call] = []

    def has_room(self, call: Call) -> bool:
        """Whether another call fits into the bounds."""
        return (
            len(self._given) < MOST_CALLS
            and len({*self._pieces, piece_of(call)}) <= self._most_pieces
            and self._merging.parameter_bytes(call) <= MOST_PARAMETER_BYTES
            and self._statements + self._new_statements(call) <= _MOST_STATEMENTS
        )

    def _new_statements(self, call: Call) -> int:
        known = call.source.name in self._merging.sources
        return 0 if known else sum(1 for _ in ir.walk(kernel_of(call.source).body))

    def add(self, call: Call, given: Call) -> None:
        """Add a call, also as it was given, before its buffers were replaced by those that contain them."""
        self._statements += self._new_statements(call)
        self._pieces.setdefault(piece_of(call), []).append(call)
        self._merging.add(call)
        self._given.append(given)

    def fused(self) -> Call:
        """All calls fused. A single call stays as it was given: its kernel is shared with other programs."""
        if not joins(self._given):
            return self._given[0]
        merging, linkage = self._merging, "DEVICE" if len(self._pieces) <= _FEW_PIECES else "CALLED"
        kernel = ir.KernelIR(
            functions=merging.functions(linkage),
            arrays=local_memory(self._merging.sources.values()),
            group=self._given[0].source.group,
            resident=self._resident(),
            cluster=self._given[0].source.cluster,
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
            differing = Rows(f"table{number}", rows)  # the first workgroup of each call, then its offsets
            if len(rows) > 1:
                kernel.tables.append(differing.in_memory())
                body += _search(differing)
            branches.append((first > _GROUP, [*body, _called(piece[0], merging, differing)]))
        kernel.grid = (first,)
        kernel.body = [ir.Let(_GROUP.name, ir.WORKGROUP), *_by_branch(branches)]
        return merging.as_one(kernel, f"side_by_side_{merging.digest}", self._dialect)

    def _resident(self) -> int:
        """How many workgroups a compute unit should have room for, if all wait when they have read much."""
        return min(source.resident if source.ahead else 1 for source in self._merging.sources.values())


def _called(call: Call, merging: MergedCalls, rows: Rows) -> ir.CallFunction:
    """A call of a piece's function, with the offsets of its row."""
    arguments = [rows.item(1 + at) for at in range(len(call.locations))]
    arguments += [ir.Const(scalar) for scalar in call.scalars]
    return merging.call(call, _GROUP - rows.item(0), arguments, local_arrays(call.source))


def _by_branch(branches: list[tuple[ir.Expr, list[ir.Statement]]]) -> list[ir.Statement]:
    """The first branch whose condition holds; a single branch needs no condition."""
    if len(branches) == 1:
        return branches[0][1]
    result: list[ir.Statement] = []
    for condition, body in reversed(branches):
        result = [ir.If(condition, body, result)]
    return result


def local_memory(sources: Iterable[KernelSource]) -> list[ir.LocalArray]:
    """Local memory that each of a kernel's functions uses for its own arrays."""
    room = max(sum(_words(dtype, length) for dtype, _, length in source.arrays) for source in sources)
    return [ir.LocalArray(ir.LOCAL_MEMORY, "uint64", room, width=2)] if room else []


def local_arrays(source: KernelSource) -> list[tuple[str, int]]:
    """The arrays of a function in that memory: dtype and offset."""
    arrays, word = [], 0
    for dtype, _, length in source.arrays:
        arrays.append((dtype, word))
        word += _words(dtype, length)
    return arrays


def _words(dtype: str, length: int) -> int:
    """How many words of 8 bytes an array takes: an even number, since some are read 16 bytes at a time."""
    return 2 * -(-item_size(dtype) * length // 16)
