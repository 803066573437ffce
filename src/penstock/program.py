"""Programs: what is replayed. The kernels of a graph in order, with every temporary at its place in an arena.

A program is built once for a structure and run with any values and constants. Its launches keep their
arguments: a run sets only those that differ from the run before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.device.driver import Kernel
from penstock.fusion.costs import COSTLY
from penstock.fusion.groups import Group, partition
from penstock.fusion.views import FREE, base
from penstock.graph.contraction import MATMUL
from penstock.graph.node import Array, Node
from penstock.kernels.cache import KernelCache
from penstock.kernels.chaining import Call, chained
from penstock.kernels.source import UNIT
from penstock.kernels.writer import Written, computed, constants, fusible
from penstock.memory.buffer import Buffer
from penstock.plan.arena import Plan, Value, plan
from penstock.plan.order import Work, ordered
from penstock.runtime import Device
from penstock.stream.stream import Program as Launches

Constant = tuple[str, Any]  # dtype, and the bits of a number


@dataclass(frozen=True)
class Step:
    """One group: what computes it, or None where NumPy does, and its scratch among the planned values."""

    group: Group
    written: Written | None
    scratch: tuple[int, ...] = ()


class Program:
    """The values of some nodes from the values of others."""

    def __init__(
        self,
        device: Device,
        cache: KernelCache,
        wanted: Sequence[Node],
        inputs: Sequence[Node],
        numbers: Mapping[Constant, int],
    ) -> None:
        self.device = device
        self._numbers = numbers
        groups = _in_order(partition(wanted, lambda node: fusible(node, device.capabilities)), wanted)
        self._wanted = [base(node) for node in wanted]
        self.outputs = [node for node in dict.fromkeys(self._wanted) if node.value is None]
        counts = Counter(self._wanted)
        self._shared = [node not in self.outputs or counts[node] > 1 for node in self._wanted]
        # The buffers of a run: the arena, then the inputs, then the outputs.
        self._slot: dict[Node, int] = {node: 1 + at for at, node in enumerate(inputs)}
        self._first_output = 1 + len(inputs)
        self._slot.update({node: self._first_output + at for at, node in enumerate(self.outputs)})
        self._temporary: dict[Node, int] = {}
        self._values: list[Value] = []
        self._over: set[tuple[int, int]] = set()  # outputs, and inputs that they may be written over; slots
        self.steps = self._lay_out(groups, cache)
        self.plan: Plan = plan(self._values, UNIT)
        self._segments = self._in_segments(cache)

    # Building

    def _lay_out(self, groups: Sequence[Group], cache: KernelCache) -> list[Step]:
        """The steps, with the lifetime of every temporary."""
        last_use = {base(node): number for number, group in enumerate(groups) for node in group.inputs}
        steps = []
        for number, group in enumerate(groups):
            written = cache.written(group)
            for at, node in enumerate(group.outputs):
                allowed = [base(group.inputs[k]) for k in written.over[at]] if written else []
                if node in self._slot:
                    self._note_overwritable(node, number, allowed, last_use)
                    continue
                dead = [
                    self._temporary[one]
                    for one in allowed
                    if one in self._temporary and last_use[one] == number
                ]
                self._temporary[node] = len(self._values)
                self._values.append(Value(node.nbytes, number, last_use.get(node, number), tuple(dead)))
            scratch = written.scratch if written else ()
            first = len(self._values)
            self._values += [Value(nbytes, number, number) for nbytes in scratch]
            steps.append(Step(group, written, tuple(range(first, first + len(scratch)))))
        return steps

    def _note_overwritable(
        self, output: Node, number: int, allowed: Sequence[Node], last_use: Mapping[Node, int]
    ) -> None:
        """An output may take the memory of an input that no later step reads, nor this one elsewhere."""
        for node, slot in self._slot.items():
            if 0 < slot < self._first_output and node.nbytes == output.nbytes and node not in self._wanted:
                last = last_use.get(node, -1)
                if last < number or (last == number and node in allowed):
                    self._over.add((self._slot[output], slot))

    def _in_segments(self, cache: KernelCache) -> list[_Segment | Step]:
        """Runs of kernels, each bound at its first use, and the steps of the host between them."""
        parts: list[list[Call] | Step] = []
        functions: dict[str, Any] = {}
        for step in self.steps:
            if step.written is None:
                parts.append(step)
                continue
            calls = self._calls(step, step.written)
            if step.written.function is not None:
                functions[calls[0].source.name] = step.written.function
            if parts and isinstance(parts[-1], list):
                parts[-1].extend(calls)
            else:
                parts.append(calls)
        if self.device.capabilities.vector_width > 1:
            parts = [one if isinstance(one, Step) else chained(one) for one in parts]
        sources = [call.source for part in parts if isinstance(part, list) for call in part]
        kernels = iter(cache.kernels(sources, functions))
        return [one if isinstance(one, Step) else _Segment(one, kernels) for one in parts]

    def _calls(self, step: Step, written: Written) -> list[Call]:
        group = step.group
        places = [self._place(base(node)) for node in (*group.outputs, *group.inputs)]
        places += [(0, self.plan.offsets[value] // UNIT) for value in step.scratch]
        fused = group.kind != "lone" or written.function is not None
        named = constants(group) if fused else []
        numbers = tuple(self._numbers[number_key(node, name)] for node, name in named)
        return [
            Call(
                source=launch.source,
                places=tuple(places[at] for at in launch.buffers),
                scalars=launch.scalars,
                numbers=numbers,
                work=_work(group),
            )
            for launch in written.launches
        ]

    def _place(self, node: Node) -> tuple[int, int]:
        """The slot of a value's buffer, and its place there in units."""
        if node in self._temporary:
            return 0, self.plan.offsets[self._temporary[node]] // UNIT
        return self._slot[node], 0

    # Running

    def may_overwrite(self, output: int, number: int) -> bool:
        """Whether a wanted value can be written over an input: the input is read for the last time before."""
        return (self._slot[self._wanted[output]], 1 + number) in self._over and not self._shared[output]

    def run(
        self, inputs: Sequence[Buffer], numbers: Sequence[Any], over: Mapping[int, int] | None = None
    ) -> list[Buffer]:
        """The values of the wanted nodes, from buffers of the inputs and the constants.

        `over` names wanted values that are written over inputs.
        """
        with self.device.running:
            arena = self.device.scratch(max(self.plan.arena_bytes, 1))
            buffers = [arena, *inputs]
            taken = {self._slot[self._wanted[at]]: inputs[number] for at, number in (over or {}).items()}
            for slot, node in enumerate(self.outputs, self._first_output):
                buffers.append(taken[slot] if slot in taken else self.device.empty(node.nbytes))
            for segment in self._segments:
                if isinstance(segment, _Segment):
                    segment.run(self.device, buffers, numbers)
                else:
                    self._on_host(segment.group, buffers, numbers)
        result = [buffers[self._slot[node]] for node in self._wanted]
        for buffer, shared in zip(result, self._shared, strict=True):
            if shared:
                buffer.shared = True
        return result

    def _on_host(self, group: Group, buffers: Sequence[Buffer], numbers: Sequence[Any]) -> None:
        """A step by NumPy: its inputs are read, and its results written, where they lie."""
        (node,) = group.nodes
        arrays = [self._read(parent, buffers) for parent in node.inputs]
        attributes = dict(node.attributes)
        for _, name in constants(group):
            attributes[name] = numbers[self._numbers[number_key(node, name)]]
        result = np.ascontiguousarray(computed(node, arrays, attributes))
        slot, place = self._place(node)
        if result.nbytes:
            self.device.upload(result, buffers[slot], place * UNIT)

    def _read(self, node: Node, buffers: Sequence[Buffer]) -> Array:
        slot, place = self._place(base(node))
        if not node.size:
            return np.empty(node.shape, node.dtype)
        return self.device.download(buffers[slot], node.dtype, node.shape, place * UNIT).wait()


class _Segment:
    """Launches that follow one another, and the arguments of theirs that change from run to run."""

    def __init__(self, calls: Sequence[Call], kernels: Iterator[Kernel]) -> None:
        self._launches: list[tuple[Any, Any, Any, list[Any]]] = []  # kernel, grid, group, arguments
        self._slots: dict[int, list[tuple[int, int]]] = {}  # where each buffer goes: (launch, position)
        self._places: dict[int, list[tuple[int, int]]] = {}  # where each constant goes
        for number, call in enumerate(calls):
            args: list[Any] = [None] * len(call.places) + [unit for _, unit in call.places] + [*call.scalars]
            for position, (slot, _) in enumerate(call.places):
                self._slots.setdefault(slot, []).append((number, position))
            for position, constant in enumerate(call.numbers, len(args)):
                self._places.setdefault(constant, []).append((number, position))
            args += [None] * len(call.numbers)
            self._launches.append((next(kernels), call.source.grid, call.source.group, args))
        self._bound: Launches | None = None
        # What the arguments are now, without a reference: a program must keep no memory from use.
        self._memories: dict[int, tuple[int, int]] = {}
        self._last_numbers: Sequence[Any] = ()

    def run(self, device: Device, buffers: Sequence[Buffer], numbers: Sequence[Any]) -> None:
        """Record the launches."""
        if self._bound is None:
            self._bind(device, buffers, numbers)
        assert self._bound is not None
        memories, used = self._memories, []
        for slot, places in self._slots.items():
            buffer = buffers[slot]
            used.append(buffer)
            place = (buffer.memory.serial, buffer.offset)
            if memories[slot] != place:
                device.stream.rebind(self._bound, places, buffer)
                memories[slot] = place
        if numbers is not self._last_numbers:
            for at, places in self._places.items():
                if not _same_number(self._last_numbers[at], numbers[at]):
                    device.stream.rebind(self._bound, places, numbers[at])
            self._last_numbers = numbers
        device.stream.replay(self._bound, tuple(used))

    def _bind(self, device: Device, buffers: Sequence[Buffer], numbers: Sequence[Any]) -> None:
        for slot, places in self._slots.items():
            self._fill(places, buffers[slot])
            self._memories[slot] = (buffers[slot].memory.serial, buffers[slot].offset)
        for at, places in self._places.items():
            self._fill(places, numbers[at])
        self._last_numbers = numbers
        self._bound = device.stream.bind([(*how, tuple(args)) for *how, args in self._launches])
        device.stream.forget(self._bound)
        self._launches.clear()

    def _fill(self, places: Sequence[tuple[int, int]], arg: Any) -> None:
        for launch, position in places:
            self._launches[launch][3][position] = arg


def _in_order(groups: Sequence[Group], wanted: Sequence[Node]) -> list[Group]:
    """The groups in an order that needs little memory for what is between them."""
    numbers: dict[Node, int] = {}
    for group in groups:
        for node in (*map(base, group.inputs), *group.outputs):
            numbers.setdefault(node, len(numbers))
    steps = [
        Work(
            tuple(numbers[base(node)] for node in group.inputs), tuple(numbers[one] for one in group.outputs)
        )
        for group in groups
    ]
    # What the caller gives and gets is there whatever the order.
    kept = frozenset(numbers[node] for node in numbers if node.value is not None)
    kept |= {numbers[base(node)] for node in wanted if base(node) in numbers}
    return [groups[number] for number in ordered(steps, [node.nbytes for node in numbers], kept)]


def _same_number(one: Any, other: Any) -> bool:
    """Whether two constants are the same, and 0 is not -0."""
    return bool(one == other) and (one != 0 or str(one) == str(other))


def _work(group: Group) -> int:
    """About how many items times operations a group takes."""
    total = 0
    for node in group.nodes:
        if node.primitive is MATMUL:
            total += node.size * node.inputs[0].shape[-1] // 8  # in vectors
        elif node.primitive not in FREE:
            source = max((node, *node.inputs), key=lambda one: one.size)
            total += source.size * (8 if node.primitive in COSTLY or group.kind == "lone" else 1)
    return total


def number_key(node: Node, name: str) -> Constant:
    """A constant by its dtype and bits, so that 0 and -0 or 1 and True differ."""
    value = np.asarray(node.attributes[name]).astype(node.dtype)
    return str(node.dtype), value.tobytes()
