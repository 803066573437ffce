"""The memory of every value: buffers for inputs and outputs, lifetimes and arenas for temporaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from penstock.compiler.compilation import Compilation, Layout, Move
from penstock.compiler.schedule import InputUse, OutputWrite
from penstock.compiler.target import Target
from penstock.errors import OutOfDeviceMemory
from penstock.formatting import format_bytes
from penstock.fusion.groups import Group
from penstock.fusion.views import base
from penstock.graph.node import Node
from penstock.kernels.lower import Lowering
from penstock.kernels.source import ALIGNMENT
from penstock.plan.arena import Value
from penstock.plan.arena import plan as plan_arena
from penstock.plan.arenas import plan_arenas


def lay_out(state: Compilation, target: Target) -> Compilation:
    """Number the buffers of a run, and determine the lifetime of every temporary in turns."""
    wanted = [base(node) for node in state.wanted]
    outputs = [node for node in dict.fromkeys([*wanted, *own_buffers(state)]) if node.value is None]
    buffers = {node: 1 + at for at, node in enumerate(state.inputs)}
    buffers |= {node: 1 + len(state.inputs) + at for at, node in enumerate(outputs)}
    return replace(state, layout=_Lifetimes(state, buffers, wanted).layout(outputs))


def own_buffers(state: Compilation) -> list[Node]:
    """Intermediate values that need buffers of their own."""
    pairs = zip(state.groups, state.lowered, strict=True)
    return [node for group, written in pairs for node in _in_own_buffers(group, written)]


def _in_own_buffers(group: Group, written: Lowering | None) -> list[Node]:
    """Values that cannot be in an arena, because a kernel takes no offsets for them."""
    offsets = written is None or all(launch.source.placed for launch in written.launches)
    return [] if offsets else [base(node) for node in (*group.outputs, *group.inputs)]


class _Lifetimes:
    """Determines the lifetimes of values in turns. All steps of a turn may run at the same time."""

    def __init__(self, state: Compilation, buffers: dict[Node, int], wanted: Sequence[Node]) -> None:
        self._state, self._buffers = state, buffers
        self._reads = [[node for number in turn for node in self._read(number)] for turn in state.turns]
        self._last_turn = {node: turn for turn, nodes in enumerate(self._reads) for node in nodes}
        kept = set(wanted)
        self._input_uses = {
            1 + at: InputUse(node.nbytes, self._last_turn.get(node, -1))
            for at, node in enumerate(state.inputs)
            if node not in kept
        }
        self._output_writes: dict[int, OutputWrite] = {}
        self._temporaries: dict[Node, int] = {}
        self._values: list[Value] = []
        self._scratch: list[tuple[int, ...]] = [()] * len(state.groups)
        self._hosted: dict[Node, int] = {}
        self._host_values: list[Value] = []

    def _read(self, number: int) -> list[Node]:
        """The values that a group or a move reads."""
        groups = self._state.groups
        if number >= len(groups):
            return [self._state.moves[number - len(groups)].reads]
        return [base(node) for node in dict.fromkeys(groups[number].inputs)]

    def layout(self, outputs: Sequence[Node]) -> Layout:
        """The layout, after a pass through all turns."""
        for turn, numbers in enumerate(self._state.turns):
            readers = Counter(self._reads[turn])
            for number in numbers:
                if number < len(self._state.groups):
                    self._write(turn, number, readers if len(numbers) > 1 else Counter())
                else:
                    self._move(turn, self._state.moves[number - len(self._state.groups)])
        return Layout(
            self._buffers,
            outputs,
            self._temporaries,
            self._scratch,
            self._values,
            self._hosted,
            self._host_values,
            self._input_uses,
            self._output_writes,
        )

    def _write(self, turn: int, number: int, readers: Counter[Node]) -> None:
        """Add the outputs and the scratch of a group; `readers` counts the readers of values in its turn."""
        group, written = self._state.groups[number], self._state.lowered[number]
        for at, node in enumerate(group.outputs):
            # A value with several readers in a turn must not be overwritten: their order is not defined.
            over = written.may_alias[at] if written and written.may_alias else ()
            in_place = [base(group.inputs[k]) for k in over]
            in_place = [given for given in in_place if readers[given] <= 1]
            if node in self._buffers:
                given = frozenset(self._buffers[value] for value in in_place if value in self._buffers)
                self._output_writes[self._buffers[node]] = OutputWrite(node.nbytes, turn, given)
                continue
            dead = [
                self._temporaries[given]
                for given in in_place
                if given in self._temporaries and self._last_turn[given] == turn
            ]
            self._temporaries[node] = len(self._values)
            self._values.append(Value(node.nbytes, turn, self._last_turn.get(node, turn), tuple(dead)))
        scratch = written.scratch if written else ()
        first = len(self._values)
        self._values += [Value(nbytes, turn, turn) for nbytes in scratch]
        self._scratch[number] = tuple(range(first, first + len(scratch)))

    def _move(self, turn: int, move: Move) -> None:
        """Add the values that a move writes, on the device or at the host."""
        for node in move.writes:
            if node in self._buffers:  # the new value of state at the host
                self._output_writes[self._buffers[node]] = OutputWrite(node.nbytes, turn, frozenset())
                continue
            value = Value(node.nbytes, turn, self._last_turn.get(node, turn))
            numbers, values = self._temporaries, self._values
            if move.kind == "out":
                numbers, values = self._hosted, self._host_values
            numbers[node] = len(values)
            values.append(value)


def plan(state: Compilation, target: Target) -> Compilation:
    """Give every temporary its offset in an arena, or refuse what no device memory can hold."""
    layout, can = state.layout, target.capabilities
    assert layout is not None
    most = can.max_allocation_bytes
    largest = max((*layout.outputs, *layout.temporaries), key=lambda node: node.nbytes, default=None)
    if largest is not None and largest.nbytes > most:
        raise OutOfDeviceMemory(
            f"{target.name} has no memory of more than {format_bytes(most)}, and a result"
            f"{'' if largest in layout.outputs else ' on the way'}, {largest.dtype}{list(largest.shape)}, "
            f"takes {format_bytes(largest.nbytes)}; compute it in parts",
            asked=largest.nbytes,
        )
    planned = plan_arenas(layout.lifetimes, ALIGNMENT, can.max_arena_bytes, most)
    return replace(state, plan=planned, host_plan=plan_arena(layout.host_lifetimes, ALIGNMENT))
