"""Programs: what is replayed. The kernels of a graph in order, with every temporary at its place in an arena.

A program is built once for a structure and run with any values and constants. Its launches keep their
arguments: a run sets only those that differ from the run before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from penstock.device.driver import Kernel
from penstock.fusion.costs import COSTLY
from penstock.fusion.groups import Group, partition
from penstock.fusion.products import by_library
from penstock.fusion.views import FREE, base
from penstock.graph.contraction import MATMUL
from penstock.graph.node import Array, Node
from penstock.kernels.cache import KernelCache
from penstock.kernels.chaining import Call, chained
from penstock.kernels.side_by_side import MOST_CALLS, joins, kind, side_by_side
from penstock.kernels.source import UNIT
from penstock.kernels.writer import Written, computed, constants, fusible
from penstock.memory.buffer import Buffer
from penstock.plan.arena import Plan, Value, plan
from penstock.plan.bundles import bundled
from penstock.plan.order import Work, ordered
from penstock.runtime import Device
from penstock.stream.stream import Program as Launches

Constant = tuple[str, Any]  # dtype, and the bits of a number
# Of buffers: the number of the memory that each lies in, and the unit there.
Layout = tuple[tuple[int, int], ...]
_MAX_LAYOUTS = 4  # for which a program writes kernels; others take every buffer by itself


@dataclass(frozen=True)
class Step:
    """One group: what computes it, or None where NumPy does, and its scratch among the planned values."""

    group: Group
    written: Written | None
    scratch: tuple[int, ...] = ()
    bundle: int = 0  # a number that it shares with the steps that run beside it


class Program:
    """The values of some nodes from the values of others."""

    def __init__(
        self,
        device: Device,
        cache: KernelCache,
        wanted: Sequence[Node],
        inputs: Sequence[Node],
        numbers: Mapping[Constant, int],
        replaced: Mapping[int, int] | None = None,
    ) -> None:
        """`replaced` names wanted values that should be written over inputs, which they replace."""
        self.device = device
        self._numbers = numbers
        groups = partition(
            wanted,
            lambda node: fusible(node, device.capabilities),
            lambda product: by_library(product, device.capabilities),
        )
        self._wanted = [base(node) for node in wanted]
        replaces = {self._wanted[at]: inputs[number] for at, number in (replaced or {}).items()}
        self._gpu = device.capabilities.vector_width == 1
        kinds = [
            kind(group, cache.written(group), device.capabilities) if self._gpu else None for group in groups
        ]
        bundles = _in_order(groups, wanted, replaces, kinds)
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
        self.steps = self._lay_out(bundles, cache)
        self.plan: Plan = plan(self._values, UNIT)
        self._cache = cache
        self._functions: dict[str, Any] = {}  # what computes instead of text, by name
        self._parts = self._in_parts()
        together = [one for part in self._parts if isinstance(part, list) for one in part]
        beside = [call for one in together if isinstance(one, list) for call in one]
        self._beside = {slot for call in beside for slot, _ in call.places}
        # The launches, for each way in which the buffers of those that run side by side lie in memories.
        self._segments: dict[Layout | None, list[_Segment | Step]] = {}
        if not self._beside:
            self._segments[()] = self._in_segments(())
        # Of the last run: where the buffers were, slots whose memories were taken too, and the launches.
        self._last_places: list[tuple[int, int]] = []
        self._memories: list[tuple[int, bool]] = []
        self._current: list[_Segment | Step] = []
        self._distinct = 0  # memories among the buffers
        self._lonely: set[int] = set()  # slots at the start of a memory that no other is in

    # Building

    def _lay_out(self, bundles: Sequence[Sequence[Group]], cache: KernelCache) -> list[Step]:
        """The steps, with the lifetime of every temporary. Those of a bundle run at the same time."""
        reads = [
            [base(node) for group in bundle for node in dict.fromkeys(group.inputs)] for bundle in bundles
        ]
        last_use = {node: number for number, nodes in enumerate(reads) for node in nodes}
        steps = []
        for number, bundle in enumerate(bundles):
            readers = Counter(reads[number])
            for group in bundle:
                written = cache.written(group)
                for at, node in enumerate(group.outputs):
                    allowed = [base(group.inputs[k]) for k in written.over[at]] if written else []
                    if len(bundle) > 1:  # nobody knows which of them reads first
                        allowed = [one for one in allowed if readers[one] == 1]
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
                steps.append(Step(group, written, tuple(range(first, first + len(scratch))), number))
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

    def _in_parts(self) -> list[list[Call | list[Call]] | Step]:
        """Calls in order, and lists of calls that become one; between them the steps of the host."""
        parts: list[list[Call | list[Call]] | Step] = []
        for _, bundle in groupby(self.steps, lambda step: step.bundle):
            steps = list(bundle)
            calls: list[Call] = []
            for step in steps:
                if step.written is None:
                    parts.append(step)
                    continue
                own = self._calls(step, step.written)
                if step.written.function is not None:
                    self._functions[own[0].source.name] = step.written.function
                calls += own
            if calls:
                if not parts or isinstance(parts[-1], Step):
                    parts.append([])
                run = parts[-1]
                assert isinstance(run, list)
                first = steps[0]
                alike = self._gpu and kind(first.group, first.written, self.device.capabilities) is not None
                run += [calls] if alike and joins(calls) else calls
        return parts

    def _in_segments(self, layout: Layout | None) -> list[_Segment | Step]:
        """Runs of kernels, each bound at its first use, and the steps of the host between them.

        Where no layout is given, kernels that run side by side take every buffer by itself.
        """
        first = self._first_output + len(self.outputs)
        lies = {slot: (slot, 0) for slot in self._beside}
        if layout is not None:
            inside = zip(sorted(self._beside), layout, strict=True)
            lies = {slot: (first + memory, unit) for slot, (memory, unit) in inside}
        limits = self.device.capabilities
        parts: list[list[Call] | Step] = []
        for part in self._parts:
            if isinstance(part, Step):
                parts.append(part)
                continue
            calls: list[Call] = []
            for one in part:
                calls += side_by_side(one, lies, limits) if isinstance(one, list) else [one]
            parts.append(calls if self._gpu else chained(calls))
        sources = [call.source for part in parts if isinstance(part, list) for call in part]
        kernels = iter(self._cache.kernels(sources, self._functions))
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
            places = [buffer.place for buffer in buffers]
            moved = self._moved(places)
            self._last_places = []  # of no run, if this one fails
            if moved is None:
                self._lay_over(buffers)
            buffers += [buffers[slot].whole if whole else buffers[slot] for slot, whole in self._memories]
            for segment in self._current:
                if isinstance(segment, _Segment):
                    segment.run(self.device, buffers, numbers, moved)
                else:
                    self._on_host(segment.group, buffers, numbers)
            self._last_places = places
        result = [buffers[self._slot[node]] for node in self._wanted]
        for buffer, shared in zip(result, self._shared, strict=True):
            if shared:
                buffer.shared = True
        return result

    def _moved(self, places: Sequence[tuple[int, int]]) -> list[int] | None:
        """The slots whose buffers do not lie where they did in the last run; None: all may have moved."""
        if not self._last_places:
            return None
        both = zip(places, self._last_places, strict=True)
        moved = [slot for slot, (place, last) in enumerate(both) if place != last]
        if self._beside.isdisjoint(moved):
            return moved
        # Those that had a memory for themselves, and have one again, are found there in the same way.
        same = all(slot in self._lonely and not places[slot][1] for slot in moved)
        if not same or len({serial for serial, _ in places}) != self._distinct:
            return None
        taken = [len(places) + at for at, (slot, _) in enumerate(self._memories) if slot in moved]
        return moved + taken

    def _lay_over(self, buffers: Sequence[Buffer]) -> None:
        """Find the launches for these buffers. Those side by side take whole memories, beside the buffers."""
        memories: list[tuple[int, bool]] = []
        numbers: dict[Any, int] = {}
        places = []
        for slot in sorted(self._beside):
            buffer = buffers[slot]
            offset = buffer.offset
            aligned = not offset % UNIT
            key = buffer.memory.serial if aligned else buffer
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = len(memories)
                memories.append((slot, aligned))
            places.append((number, offset // UNIT if aligned else 0))
        layout: Layout | None = tuple(places)
        if layout not in self._segments and len(self._segments) >= _MAX_LAYOUTS:
            layout = None  # a program is not compiled again and again
        if layout not in self._segments:
            self._segments[layout] = self._in_segments(layout)
        self._memories, self._current = memories, self._segments[layout]
        counts = Counter(buffer.place[0] for buffer in buffers)
        self._distinct = len(counts)
        self._lonely = {
            slot for slot, buffer in enumerate(buffers) if counts[buffer.place[0]] == 1 and not buffer.offset
        }

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
        self._held: list[int] = []  # one slot of each memory: parts of one are in use as long as any of them
        self._alone: set[int] = set()  # slots that no other shares its memory with
        self._last_numbers: Sequence[Any] = ()

    def run(
        self, device: Device, buffers: Sequence[Buffer], numbers: Sequence[Any], moved: Sequence[int] | None
    ) -> None:
        """Record the launches; `moved`: slots whose buffers do not lie where they did, if it is known."""
        if self._bound is None:
            self._bind(device, buffers, numbers)
        assert self._bound is not None
        for slot in self._slots if moved is None else moved:
            if slot in self._slots and self._memories[slot] != buffers[slot].place:
                device.stream.rebind(self._bound, self._slots[slot], buffers[slot])
                self._memories[slot] = buffers[slot].place
        if moved is None or not self._alone.issuperset(moved):
            self._share(buffers)
        if numbers is not self._last_numbers:
            for at, places in self._places.items():
                if not _same_number(self._last_numbers[at], numbers[at]):
                    device.stream.rebind(self._bound, places, numbers[at])
            self._last_numbers = numbers
        device.stream.replay(self._bound, tuple([buffers[slot] for slot in self._held]))

    def _bind(self, device: Device, buffers: Sequence[Buffer], numbers: Sequence[Any]) -> None:
        for slot, places in self._slots.items():
            self._fill(places, buffers[slot])
            self._memories[slot] = buffers[slot].place
        for at, places in self._places.items():
            self._fill(places, numbers[at])
        self._last_numbers = numbers
        self._bound = device.stream.bind([(*how, tuple(args)) for *how, args in self._launches])
        device.stream.forget(self._bound)
        self._launches.clear()

    def _share(self, buffers: Sequence[Buffer]) -> None:
        """Find out which buffers lie in one memory."""
        sharing: dict[int, list[int]] = {}
        for slot in self._slots:
            sharing.setdefault(buffers[slot].place[0], []).append(slot)
        self._held = [slots[0] for slots in sharing.values()]
        self._alone = {slots[0] for slots in sharing.values() if len(slots) == 1}

    def _fill(self, places: Sequence[tuple[int, int]], arg: Any) -> None:
        for launch, position in places:
            self._launches[launch][3][position] = arg


def _in_order(
    groups: Sequence[Group],
    wanted: Sequence[Node],
    replaces: Mapping[Node, Node],
    kinds: Sequence[Hashable | None],
) -> list[list[Group]]:
    """The groups in an order that needs little memory for what is between them, in bundles that run at once.

    `replaces` names outputs that should be written over inputs; groups of one bundle are equal in `kinds`.
    """
    numbers: dict[Node, int] = {}
    for group in groups:
        for node in (*map(base, group.inputs), *group.outputs):
            numbers.setdefault(node, len(numbers))
    steps = [
        Work(
            tuple(numbers[base(node)] for node in group.inputs),
            tuple(numbers[one] for one in group.outputs),
            tuple(numbers[replaces[one]] for one in group.outputs if replaces.get(one) in numbers),
        )
        for group in groups
    ]
    # What the caller gives and gets is there whatever the order.
    kept = frozenset(numbers[node] for node in numbers if node.value is not None)
    kept |= {numbers[base(node)] for node in wanted if base(node) in numbers}
    nbytes = [node.nbytes for node in numbers]
    order = ordered(steps, nbytes, kept)
    alike = [kinds[number] for number in order]
    bundles = bundled([steps[number] for number in order], alike, nbytes, kept, MOST_CALLS)
    return [[groups[order[at]] for at in bundle] for bundle in bundles]


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
