"""A schedule: the steps in order, and the memory of every value. Plain data, made without a device."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from penstock.formatting import format_bytes
from penstock.fusion.groups import Group
from penstock.kernels.concatenation import Call
from penstock.kernels.hazards import Range, Touched
from penstock.kernels.lower import Lowering
from penstock.kernels.source import ALIGNMENT
from penstock.memory.pool import size_class
from penstock.plan.arena import Value
from penstock.plan.arenas import ArenaPlan

# The index of a buffer, and an offset in it in multiples of the alignment.
Location = tuple[int, int]


@dataclass(frozen=True)
class BufferSpec:
    """A buffer that a run takes: an arena for temporaries, an input, an output, or memory of the host."""

    role: Literal["arena", "input", "output", "host"]
    nbytes: int
    hosted: bool = False  # an input or output in memory of the host


@dataclass(frozen=True)
class Step:
    """A group, computed by kernels of its own, by a library or by NumPy on the host.

    `locations` are those of the group's outputs, then of its inputs, then of its scratch.
    """

    kind: Literal["kernel", "library", "host"]
    turn: int  # steps of the same turn are independent
    locations: tuple[Location, ...]
    reads: tuple[Range, ...]
    writes: tuple[Range, ...]
    constants: tuple[int, ...]  # indices of the run's constants, in the order of the group's
    calls: tuple[Call, ...]
    structure: Hashable  # of the group: what it computes, apart from values
    again: bool  # it recomputes values that were dropped to save memory
    group: Group = field(compare=False)
    lowering: Lowering | None = field(compare=False)


@dataclass(frozen=True)
class Copy:
    """Bytes from one location to another, by the device's copy engine."""

    turn: int
    target: Location
    source: Location
    nbytes: int
    # Beside the kernels: to the host what nothing reads for long, and from there before it is read again.
    way: Literal["inside", "out", "in"] = "inside"
    what: str = field(default="", compare=False)  # for people

    @property
    def touched(self) -> Touched:
        """The bytes that it reads and writes."""
        return Touched((self._range(self.source),), (self._range(self.target),))

    def _range(self, location: Location) -> Range:
        buffer, start = location[0], location[1] * ALIGNMENT
        return buffer, start, start + self.nbytes


class InputUse(NamedTuple):
    """The last turn that reads an input; -1 if none does."""

    nbytes: int
    last_turn: int


class OutputWrite(NamedTuple):
    """The turn that writes an output, and the inputs that its step may overwrite while it reads them."""

    nbytes: int
    turn: int
    in_place: frozenset[int]


def may_alias(write: OutputWrite | None, use: InputUse | None, given: int) -> bool:
    """Whether an output may overwrite the input buffer `given`."""
    if write is None or use is None or write.nbytes != use.nbytes:
        return False
    return use.last_turn < write.turn or (use.last_turn == write.turn and given in write.in_place)


@dataclass(frozen=True)
class Schedule:
    """The steps in order, the buffers of a run, and the memory plan with its certificate."""

    steps: tuple[Step | Copy, ...]
    buffers: tuple[BufferSpec, ...]  # the first arena, inputs, outputs, more arenas, memory of the host
    results: tuple[int, ...]  # for each wanted value: the buffer that holds it
    shared: tuple[bool, ...]  # for each wanted value: whether its buffer is an input's or another value's
    lifetimes: tuple[Value, ...]  # of the temporaries, in turns
    plan: ArenaPlan
    input_uses: Mapping[int, InputUse]  # by buffer: inputs that an output may be written over
    output_writes: Mapping[int, OutputWrite]  # by buffer
    result_bytes: int  # that a run takes from the device for results that take over no input

    @cached_property
    def inputs(self) -> range:
        """The indices of the input buffers."""
        return range(1, 1 + sum(buffer.role == "input" for buffer in self.buffers))

    @cached_property
    def outputs(self) -> range:
        """The indices of the output buffers."""
        first = self.inputs.stop
        return range(first, first + sum(buffer.role == "output" for buffer in self.buffers))

    @cached_property
    def arenas(self) -> tuple[int, ...]:
        """The indices of the arenas."""
        return tuple(at for at, buffer in enumerate(self.buffers) if buffer.role == "arena")

    @cached_property
    def host_bytes(self) -> int:
        """What a run takes of the host's memory, for values that are moved there."""
        return sum(buffer.nbytes for buffer in self.buffers if buffer.role == "host")

    @cached_property
    def hosted(self) -> frozenset[int]:
        """The inputs that lie in the memory of the host, by their indices among the inputs."""
        return frozenset(at for at, buffer in enumerate(self.inputs) if self.buffers[buffer].hosted)

    @property
    def groups(self) -> list[Step]:
        """The steps that compute something."""
        return [step for step in self.steps if isinstance(step, Step)]

    @cached_property
    def recomputed(self) -> list[Step]:
        """The steps that compute once more what was dropped to save memory."""
        return [step for step in self.groups if step.again]

    @cached_property
    def moved(self) -> list[Copy]:
        """The copies to the host of what was moved there to save memory."""
        return [step for step in self.steps if isinstance(step, Copy) and step.way == "out"]

    @cached_property
    def spares(self) -> bool:
        """Whether it spares memory: something is recomputed, moved, or expected at the host."""
        return bool(self.recomputed or self.moved or self.hosted)

    @cached_property
    def arena_bytes(self) -> tuple[int, ...]:
        """The bytes of each arena."""
        return tuple(self.buffers[arena].nbytes for arena in self.arenas)

    @property
    def taken_bytes(self) -> int:
        """What a run takes from the device beside its inputs."""
        return self.result_bytes + sum(map(size_class, self.arena_bytes))

    @property
    def turns(self) -> int:
        """How many turns a run has."""
        return 1 + self.steps[-1].turn if self.steps else 0

    def may_alias(self, output: int, given: int) -> bool:
        """Whether an output may overwrite an input buffer: no later step reads the input."""
        return may_alias(self.output_writes.get(output), self.input_uses.get(given), given)

    def kept_bytes(self) -> int:
        """The most bytes, at any turn, of temporaries that live for more than half of all turns.

        In a training step these are the activations that wait for their gradients.
        """
        last = self.turns - 1
        kept = [value for value in self.lifetimes if 2 * (value.dies - value.born) > last]
        return max(
            (
                sum(value.nbytes for value in kept if value.born <= turn <= value.dies)
                for turn in range(last + 1)
            ),
            default=0,
        )

    def __str__(self) -> str:
        lines = [f"{number}. {_line(step)}" for number, step in enumerate(self.steps, start=1)]
        moved = sum(sum(_traffic(step)) for step in self.steps)
        arena = f"arena of {format_bytes(self.plan.arena_bytes)}, {100 * self.plan.gap:.1f}% over"
        steps = f"{len(lines)} steps"
        if self.turns < len(lines):
            steps += f" in {self.turns} turns, as some run side by side"
        return "\n".join([*lines, f"{steps}, {format_bytes(moved)} moved; {arena} the least possible"])


def _traffic(step: Step | Copy) -> tuple[int, int]:
    """The bytes that a step reads and writes."""
    if isinstance(step, Copy):
        return step.nbytes, step.nbytes
    return sum(node.nbytes for node in step.group.inputs), sum(node.nbytes for node in step.group.outputs)


def _line(step: Step | Copy) -> str:
    read, written = map(format_bytes, _traffic(step))
    if isinstance(step, Copy):
        ways = {"inside": "", "out": " to the host, to save memory", "in": " back from the host"}
        return f"copy of {f'{step.what}: ' if step.what else ''}{read}{ways[step.way]}"
    names = " ".join(node.primitive.name for node in step.group.nodes)
    outputs = ", ".join(f"{node.dtype}{list(node.shape)}" for node in step.group.outputs)
    where = "host" if step.kind == "host" else step.group.kind
    again = ", once more to save memory" if step.again else ""
    return f"{where} [{names}] -> {outputs}: {read} read, {written} written{again}"
