"""Programs: what is replayed. The kernels of a graph in order, with every temporary at its place in an arena.

A program is built once for a structure and run with any values and constants. Its launches keep their
arguments: a run sets only those that differ from the run before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from time import perf_counter
from typing import Any

import numpy as np

from penstock.config import format_bytes
from penstock.device.driver import Kernel
from penstock.errors import OutOfDeviceMemory
from penstock.fusion.bounding import bounded
from penstock.fusion.groups import Group, partition
from penstock.fusion.products import by_library
from penstock.fusion.tallies import units_with_tallies
from penstock.fusion.views import base
from penstock.graph.contraction import MATMUL
from penstock.graph.node import Array, Node
from penstock.graph.reference import Constant, computed, number_key
from penstock.kernels.cache import KernelCache
from penstock.kernels.chaining import Call, chained
from penstock.kernels.costing import costs
from penstock.kernels.hazards import Range, Touched, orderings
from penstock.kernels.side_by_side import MOST_CALLS, joins, kind, side_by_side
from penstock.kernels.source import UNIT
from penstock.kernels.writer import Written, constants, fusible
from penstock.memory.buffer import Buffer
from penstock.plan.arena import Value
from penstock.plan.banks import Banks, banks
from penstock.plan.bundles import bundled
from penstock.plan.order import Work, ordered
from penstock.runtime import Device
from penstock.stream.stream import Program as Launches

# Of buffers: the number of the memory that each lies in, and the unit there.
Layout = tuple[tuple[int, int], ...]
# Bytes. What touches more fills a GPU by itself, and beside others would only drive them out of the cache:
# all such write to one range that is no memory's, and so follow one another.
_LARGE = 24 << 20
_DEVICE: tuple[Range, ...] = ((-1, 0, 1),)
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
            units_with_tallies(device.capabilities),
        )
        can = device.capabilities
        groups = bounded(groups, can.max_buffers, lambda node: can.bindings(node.nbytes))
        self._wanted = [base(node) for node in wanted]
        replaces = {self._wanted[at]: inputs[number] for at, number in (replaced or {}).items()}
        self._gpu = device.capabilities.vector_width == 1
        kinds = [
            kind(group, cache.written(group), device.capabilities) if self._gpu else None for group in groups
        ]
        bundles = _in_order(groups, wanted, replaces, kinds)
        apart = [node for group in groups for node in self._apart(group, cache.written(group))]
        self.outputs = [node for node in dict.fromkeys([*self._wanted, *apart]) if node.value is None]
        counts = Counter(self._wanted)
        self._shared = [node not in self.outputs or counts[node] > 1 for node in self._wanted]
        # The buffers of a run: the arena, then the inputs, then the outputs, then arenas besides.
        self._slot: dict[Node, int] = {node: 1 + at for at, node in enumerate(inputs)}
        self._first_output = 1 + len(inputs)
        self._slot.update({node: self._first_output + at for at, node in enumerate(self.outputs)})
        self._result_slots = [self._slot[node] for node in self._wanted]
        shared = zip(self._result_slots, self._shared, strict=True)
        self._shared_slots = [slot for slot, several in shared if several]
        self._temporary: dict[Node, int] = {}
        self._values: list[Value] = []
        # By slots. Of inputs that others may be written over: their bytes, and the last step that reads them.
        # Of outputs: their bytes, the step that writes them, and inputs that it may read at the same time.
        self._ends: dict[int, tuple[int, int]] = {}
        self._written: dict[int, tuple[int, int, frozenset[int]]] = {}
        self.steps = self._lay_out(bundles, cache)
        self.plan = self._planned()
        self._arena_bytes = [max(one.arena_bytes, 1) for one in self.plan.plans]
        self._bank_bytes = device.capabilities.bank_bytes
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
        self._last_over: Mapping[int, int] | None = None
        self._targets: list[tuple[int, int]] = []  # for each output: the input that it takes or -1, its bytes
        self._fresh: list[int] = []  # slots of outputs that take none
        self._memories: list[tuple[int, bool]] = []
        self._current: list[_Segment | Step] = []
        self._distinct = 0  # memories among the buffers
        self.wrote = False  # of a run that failed: whether anything may have been written
        self._lonely: set[int] = set()  # slots at the start of a memory that no other is in

    # Building

    def _planned(self) -> Banks:
        can = self.device.capabilities
        most = can.max_allocation_bytes
        largest = max((*self.outputs, *self._temporary), key=lambda node: node.nbytes, default=None)
        if largest is not None and largest.nbytes > most:
            raise OutOfDeviceMemory(
                f"{self.device.name} has no memory of more than {format_bytes(most)}, and a result"
                f"{'' if largest in self.outputs else ' on the way'}, {largest.dtype}{list(largest.shape)}, "
                f"takes {format_bytes(largest.nbytes)}; compute it in parts",
                asked=largest.nbytes,
            )
        return banks(self._values, UNIT, can.bank_bytes, most)

    def _bank(self, value: int) -> int:
        """The slot of the arena that a planned value is in."""
        bank = self.plan.bank_of[value]
        return self._first_output + len(self.outputs) + bank - 1 if bank else 0

    def _lay_out(self, bundles: Sequence[Sequence[Group]], cache: KernelCache) -> list[Step]:
        """The steps, with the lifetime of every temporary. Those of a bundle run at the same time."""
        reads = [
            [base(node) for group in bundle for node in dict.fromkeys(group.inputs)] for bundle in bundles
        ]
        last_use = {node: number for number, nodes in enumerate(reads) for node in nodes}
        wanted = set(self._wanted)
        for node, slot in self._slot.items():
            if slot < self._first_output and node not in wanted:
                self._ends[slot] = node.nbytes, last_use.get(node, -1)
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
                        slots = frozenset(self._slot[one] for one in allowed if one in self._slot)
                        self._written[self._slot[node]] = node.nbytes, number, slots
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

    def _may_be_over(self, output: int, slot: int) -> bool:
        """Whether an output may take an input's memory: no later step reads it, nor this one elsewhere."""
        if output not in self._written or slot not in self._ends:
            return False
        nbytes, number, allowed = self._written[output]
        ended, last = self._ends[slot]
        return nbytes == ended and (last < number or (last == number and slot in allowed))

    @staticmethod
    def _apart(group: Group, written: Written | None) -> list[Node]:
        """What has to lie in buffers of its own, as a kernel takes no places there."""
        placed = written is None or all(launch.source.placed for launch in written.launches)
        return [] if placed else [base(node) for node in (*group.outputs, *group.inputs)]

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
        first = self._first_output + len(self.outputs) + len(self.plan.plans) - 1
        lies = {slot: (slot, 0) for slot in self._beside}
        if layout is not None:
            inside = zip(sorted(self._beside), layout, strict=True)
            lies = {slot: (first + memory, unit) for slot, (memory, unit) in inside}
        limits = self.device.capabilities
        arenas = {0, *range(self._first_output + len(self.outputs), first)}
        parts: list[list[Call] | Step] = []
        for part in self._parts:
            if isinstance(part, Step):
                parts.append(part)
                continue
            calls: list[Call] = []
            for one in part:
                if isinstance(one, Call):
                    calls.append(one)
                    continue
                joined = side_by_side(one, lies, limits)
                if any(call.source.sizes for call in one):
                    sizes = self._cache.sizes
                    joined = [call if call in one else sizes.launch(call, varied=True) for call in joined]
                calls += joined
            parts.append(calls if self._gpu else chained(calls, arenas))
        sources = [call.source for part in parts if isinstance(part, list) for call in part]
        kernels = iter(self._cache.kernels(sources, self._functions))
        return [
            one if isinstance(one, Step) else _Segment(one, kernels, self._orderings(one)) for one in parts
        ]

    def _orderings(self, calls: Sequence[Call]) -> list[list[int]]:
        """Which of some calls must follow which."""
        over = {
            output: [slot for slot in self._ends if self._may_be_over(output, slot)]
            for output in self._written
        }
        touched = []
        for call in calls:
            # Only once it is compiled, a library's launch tells whether it writes to its scratch.
            used = getattr(self._functions.get(call.source.name), "workspace", 1)
            one = call.touched
            writes = one.writes + call.scratch if used else one.writes
            if sum(end - start for _, start, end in one.reads + one.writes) > _LARGE:
                writes += _DEVICE
            touched.append(Touched(one.reads, writes))
        return orderings(touched, over)

    def _calls(self, step: Step, written: Written) -> list[Call]:
        group = step.group
        places = [self._place(base(node)) for node in (*group.outputs, *group.inputs)]
        places += [(self._bank(value), self.plan.offsets[value] // UNIT) for value in step.scratch]
        fused = group.kind != "lone" or written.function is not None
        named = constants(group) if fused else []
        numbers = tuple(self._numbers[number_key(node, name)] for node, name in named)
        touched = Touched(
            tuple(self._range(node) for node in dict.fromkeys(map(base, group.inputs))),
            tuple(self._range(node) for node in group.outputs),
        )
        scratch = tuple(self._span(value) for value in step.scratch)
        return [
            Call(
                source=launch.source,
                places=tuple(places[at] for at in launch.buffers),
                scalars=launch.scalars,
                numbers=numbers,
                work=_work(group),
                touched=touched,
                scratch=scratch,
                cost=cost,
            )
            for launch, cost in zip(written.launches, costs(group, written), strict=True)
        ]

    def _range(self, node: Node) -> Range:
        """The bytes that hold a value, of the arena or of a buffer of its own."""
        if node in self._temporary:
            return self._span(self._temporary[node])
        return self._slot[node], 0, node.nbytes

    def _span(self, value: int) -> Range:
        """The bytes of a planned value."""
        start = self.plan.offsets[value]
        return self._bank(value), start, start + self._values[value].nbytes

    def _place(self, node: Node) -> tuple[int, int]:
        """The slot of a value's buffer, and its place there in units."""
        if node in self._temporary:
            value = self._temporary[node]
            return self._bank(value), self.plan.offsets[value] // UNIT
        return self._slot[node], 0

    @property
    def launches(self) -> int:
        """How many one run has, after those that could be were put together; 0 before the first."""
        return sum(one.launches for one in self._current if isinstance(one, _Segment))

    def kept_bytes(self) -> int:
        """What temporaries take that are needed for longer than half of the steps, where that is the most.

        In a training step these are the activations that wait for their gradients.
        """
        last = max((step.bundle for step in self.steps), default=0)
        kept = [value for value in self._values if 2 * (value.dies - value.born) > last]
        return max(
            (sum(v.nbytes for v in kept if v.born <= at <= v.dies) for at in range(last + 1)), default=0
        )

    # Running

    def may_overwrite(self, output: int, number: int) -> bool:
        """Whether a wanted value can be written over an input: the input is read for the last time before."""
        return self._may_be_over(self._slot[self._wanted[output]], 1 + number) and not self._shared[output]

    def run(
        self, inputs: Sequence[Buffer], numbers: Sequence[Any], over: Mapping[int, int] | None = None
    ) -> list[Buffer]:
        """The values of the wanted nodes, from buffers of the inputs and the constants.

        `over` names wanted values that are written over inputs.
        """
        with self.device.running:
            self.wrote = False
            arena, *others = self._arenas()
            same = over is not None and over is self._last_over
            if not same:
                self._aim(over or {})
                self._last_over = over
            empty = self.device.empty
            buffers = [arena, *inputs]
            buffers += [empty(nbytes) if at < 0 else inputs[at] for at, nbytes in self._targets]
            buffers += others
            places = [buffer.place for buffer in buffers]
            moved, regrouped = self._moved(places, same)
            self._last_places = []  # of no run, if this one fails
            if moved is None:
                self._lay_over(buffers)
            buffers += [buffers[slot].whole if whole else buffers[slot] for slot, whole in self._memories]
            self._run_segments(buffers, numbers, moved, regrouped)
            self._last_places = places
        for slot in self._shared_slots:
            buffers[slot].shared = True
        return [buffers[slot] for slot in self._result_slots]

    def _run_segments(
        self, buffers: Sequence[Buffer], numbers: Sequence[Any], moved: list[int] | None, regrouped: bool
    ) -> None:
        stream = self.device.stream
        before = stream.replayed
        try:
            for segment in self._current:
                if isinstance(segment, _Segment):
                    segment.run(self.device, buffers, numbers, moved, regrouped)
                else:
                    self.wrote = True
                    self._on_host(segment.group, buffers, numbers)
        except BaseException:
            self.wrote = self.wrote or stream.replayed != before
            raise

    def _arenas(self) -> list[Buffer]:
        """Memories for temporaries, which may be larger than this program's: no more is taken of them."""
        most = self._bank_bytes
        return [
            one if one.nbytes <= most else one.part(0, nbytes)
            for one, nbytes in zip(self.device.scratch(self._arena_bytes), self._arena_bytes, strict=True)
        ]

    def _aim(self, over: Mapping[int, int]) -> None:
        """Note where the outputs of a run go."""
        taken = {self._slot[self._wanted[at]]: number for at, number in over.items()}
        slots = range(self._first_output, self._first_output + len(self.outputs))
        self._targets = [
            (taken.get(slot, -1), node.nbytes) for slot, node in zip(slots, self.outputs, strict=True)
        ]
        self._fresh = [slot for slot in slots if slot not in taken]

    def _moved(self, places: list[tuple[int, int]], same: bool) -> tuple[list[int] | None, bool]:
        """The slots whose buffers do not lie where they did in the last run; None: all may have moved.

        `same`: outputs take the inputs that they took then. The second result is whether other buffers than
        before may lie in one memory.
        """
        last, end = self._last_places, self._first_output
        if not last:
            return None, True
        arenas = end + len(self.outputs)
        same = same and places[:end] == last[:end] and places[arenas:] == last[arenas:]
        looked_at = self._fresh if same else range(len(places))
        moved = [slot for slot in looked_at if places[slot] != last[slot]]
        if self._beside.isdisjoint(moved):
            return moved, True
        # Those that had a memory for themselves, and have one again, are found there in the same way.
        alone = all(slot in self._lonely and not places[slot][1] for slot in moved)
        if not alone or len({serial for serial, _ in places}) != self._distinct:
            return None, True
        taken = [len(places) + at for at, (slot, _) in enumerate(self._memories) if slot in moved]
        return moved + taken, False

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
        start = perf_counter()
        result = np.ascontiguousarray(computed(node, arrays, attributes))
        for recorder in self.device.stream.recorders:
            recorder.computed_by_host(node.primitive.name, start, perf_counter())
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

    def __init__(
        self, calls: Sequence[Call], kernels: Iterator[Kernel], after: Sequence[Sequence[int]]
    ) -> None:
        """`after`: the calls that each must follow."""
        self._after = after
        self._launches: list[tuple[Any, Any, Any, list[Any]]] = []  # kernel, grid, group, arguments
        self._slots: dict[int, list[tuple[int, int]]] = {}  # where each buffer goes: (launch, position)
        self._places: dict[int, list[tuple[int, int]]] = {}  # where each constant goes
        for number, call in enumerate(calls):
            units = [unit for _, unit in call.places] if call.source.placed else []
            args: list[Any] = [None] * len(call.places) + units + [*call.scalars]
            for position, (slot, _) in enumerate(call.places):
                self._slots.setdefault(slot, []).append((number, position))
            for position, constant in enumerate(call.numbers, len(args)):
                self._places.setdefault(constant, []).append((number, position))
            args += [None] * len(call.numbers)
            kernel = copy(next(kernels))  # which may serve other sizes elsewhere, at another cost
            kernel.cost = call.cost
            self._launches.append((kernel, call.source.grid, call.source.group, args))
        self._bound: Launches | None = None
        # What the arguments are now, without a reference: a program must keep no memory from use.
        self._memories: dict[int, tuple[int, int]] = {}
        self._held: list[int] = []  # one slot of each memory: parts of one are in use as long as any of them
        self._alone: set[int] = set()  # slots that no other shares its memory with
        self._last_numbers: Sequence[Any] = ()
        self.launches = len(self._launches)

    def run(
        self,
        device: Device,
        buffers: Sequence[Buffer],
        numbers: Sequence[Any],
        moved: Sequence[int] | None,
        regrouped: bool,
    ) -> None:
        """Record the launches; `moved`: slots whose buffers do not lie where they did, if it is known.

        `regrouped`: other buffers than before may lie in one memory.
        """
        if self._bound is None:
            self._bind(device, buffers, numbers)
        assert self._bound is not None
        for slot in self._slots if moved is None else moved:
            if slot in self._slots and self._memories[slot] != buffers[slot].place:
                device.stream.rebind(self._bound, self._slots[slot], buffers[slot])
                self._memories[slot] = buffers[slot].place
        if moved is None or (regrouped and not self._alone.issuperset(moved)):
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
        self._bound = device.stream.bind([(*how, tuple(args)) for *how, args in self._launches], self._after)
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
        elif not node.primitive.is_free:
            source = max((node, *node.inputs), key=lambda one: one.size)
            total += source.size * (8 if node.primitive.costly or group.kind == "lone" else 1)
    return total
