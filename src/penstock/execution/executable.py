"""A schedule bound to a device: compiled kernels whose arguments are set once, and replayed.

An executable decides nothing. A run sets only the arguments that differ from the previous run. It keeps no
memory alive: it knows the buffers of the previous run only by the serial numbers of their allocations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from time import perf_counter
from typing import Any

import numpy as np

from penstock.collectives.communicator import Job
from penstock.compiler.launches import (
    Arrangement,
    arranged,
    dependencies,
    fused_buffers,
    launch_parts,
    may_begin_early,
)
from penstock.compiler.schedule import Copy, Location, Schedule, Step
from penstock.drivers.driver import Kernel
from penstock.execution.hosting import on_device
from penstock.execution.launched import (
    DirectLaunch,
    RepeatedRun,
    RunProgram,
    direct_launch,
    direct_runs,
    ends,
)
from penstock.execution.run_buffers import RunBuffers
from penstock.execution.sources import functions_of
from penstock.graph.collectives import launcher, moves_on_device, result_bytes, started
from penstock.graph.node import Array, Node
from penstock.graph.reference import computed
from penstock.kernels.cache import KernelCache
from penstock.kernels.concatenation import Call
from penstock.kernels.lower import constants
from penstock.kernels.source import ALIGNMENT
from penstock.memory.buffer import Buffer
from penstock.plan.arenas import ArenaPlan
from penstock.runtime import Device
from penstock.stream.future import Future
from penstock.stream.program import Program as Launches
from penstock.stream.queue import Uses
from penstock.stream.stream import Stream

_MAX_ARRANGEMENTS = 4  # for which kernels are fused; in others, every buffer is an argument of its own


class Executable:
    """The values of some nodes from the values of others."""

    def __init__(
        self, schedule: Schedule, device: Device, cache: KernelCache, anywhere: bool = False
    ) -> None:
        """`anywhere`: its kernels serve any arrangement of buffers, and so are those of `kernel_sources`."""
        self.schedule = schedule
        self._anywhere = anywhere
        self.device = device
        self.wrote = False  # of a run that failed: whether anything may have been written
        self._cache = cache
        self._stream = device.stream
        self._exchanges: dict[Node, Job | Buffer] = {}  # between ranks, that were started in this run
        self._parts = launch_parts(schedule, device.capabilities)
        self._functions = functions_of(schedule)
        self._run_buffers = RunBuffers(schedule, fused_buffers(self._parts))
        self._segments: dict[Arrangement | None, list[_Segment | Step | Copy]] = {}
        self._current: list[_Segment | Step | Copy] = []  # those of the last run
        if not self._run_buffers.fused:
            self._segments[()] = self._bound(())
        self._layers = device.layers()
        self._arena_bytes = schedule.arena_bytes
        is_only = len(self._arena_bytes) == 1 and not schedule.host_bytes
        self._only_arena = self._arena_bytes[0] if is_only else 0  # its bytes
        self._most_arena_bytes = device.capabilities.max_arena_bytes
        # All launches, if they are a single sequence in which each buffer is its own argument.
        parts = self._segments.get((), [])
        self._only = parts[0] if len(parts) == 1 and isinstance(parts[0], _Segment) else None
        self._has_arenas = self._only is not None and self._only.touches(schedule.arenas)
        self._direct = self._direct_run()
        self._shared = [
            buffer for buffer, shared in zip(schedule.results, schedule.shared, strict=True) if shared
        ]

    @property
    def plan(self) -> ArenaPlan:
        """The memory plan, with its certificate."""
        return self.schedule.plan

    @property
    def launches(self) -> int:
        """The number of launches in a run, after fusion and concatenation; 0 before the first run."""
        return sum(segment.launches for segment in self._current if isinstance(segment, _Segment))

    def _direct_run(self) -> RunProgram | None:
        """What runs it by setting all arguments of its launches, if these are few."""
        schedule, segment = self.schedule, self._only
        launches = None if segment is None else segment.direct(schedule, self.device.driver.few_launches)
        if launches is None:
            return None
        return direct_runs(launches, schedule, self.device, self._arenas, self._has_arenas)

    def may_overwrite(self, output: int, given: int) -> bool:
        """Whether a wanted value can be written over an input, which is read for the last time before."""
        buffer = self.schedule.results[output]
        return self.schedule.may_alias(buffer, 1 + given) and not self.schedule.shared[output]

    def run(
        self, inputs: Sequence[Buffer], numbers: Sequence[Any], aliases: Mapping[int, int] | None = None
    ) -> list[Buffer]:
        """The values of the wanted nodes, from buffers of the inputs and the constants.

        `aliases` names wanted values that are written over inputs. Some, `schedule.hosted`, lie at the host.
        """
        if self._direct is not None and aliases is None:
            with self.device.running:
                self.wrote = False  # nor will it be: nothing is written but new buffers
                return self.runner(inputs, numbers)
        if self._layers.hosts_state:
            inputs = on_device(inputs, self.schedule.hosted, self.device)
        if self._only is not None and aliases is None:
            return self._run_only(self._only, inputs, numbers)
        with self.device.running:
            self.wrote = False
            state = self._run_buffers
            arena, *more_arenas = self._arenas()
            same = aliases is not None and (aliases is state.aliases or aliases == state.aliases)
            if not same:
                state.set_outputs(aliases)
            buffers = [arena, *inputs]
            buffers += [self._new(at) if given < 0 else inputs[given] for at, given in state.outputs]
            buffers += more_arenas
            places = [buffer.place for buffer in buffers]
            moved, regrouped = state.moved(places, same)
            state.places = []  # of no run, if this one fails
            if moved is None:
                self._current = self._arranged(state.arrange(buffers))
            buffers += [buffers[at].whole if whole else buffers[at] for at, whole in state.allocations]
            self._run_segments(buffers, numbers, moved, regrouped)
            state.places = places
        for at in self._shared:
            buffers[at].shared = True
        return [buffers[at] for at in self.schedule.results]

    def repeated(self, inputs: Sequence[Buffer]) -> RepeatedRun | None:
        """The last run, on these inputs, for `run_again`; None if it was more than launches in place."""
        state, segment = self._run_buffers, self._current[0] if len(self._current) == 1 else None
        in_place = all(given >= 0 for _, given in state.outputs) and not self._shared
        if not state.places or not in_place or not isinstance(segment, _Segment) or self.schedule.hosted:
            return None
        arena, *more_arenas = self._arenas()
        buffers = [arena, *inputs, *(inputs[given] for _, given in state.outputs), *more_arenas]
        if [buffer.place for buffer in buffers] != state.places:
            return None
        arenas = [buffer.place for buffer in (arena, *more_arenas)]
        buffers += [buffers[at].whole if whole else buffers[at] for at, whole in state.allocations]
        program = segment.repeatable()
        return None if program is None else RepeatedRun(program, segment.uses(buffers), state.places, arenas)

    def run_again(self, last: RepeatedRun) -> bool:
        """Launch what the last run did, while `device.running` is held; False if that was another run.

        The inputs lie where they did.
        """
        self.wrote = False
        if self._run_buffers.places is not last.places:
            return False
        if [arena.place for arena in self._arenas()] != last.arenas:
            return False
        before = self._stream.replayed
        try:
            return self._stream.repeat(last.program, last.uses)
        except BaseException:
            self.wrote = self._stream.replayed != before
            self._run_buffers.places = []
            raise

    def _new(self, output: int) -> Buffer:
        """Memory for a result."""
        spec = self.schedule.buffers[output]
        return (self.device.layers().hosted if spec.hosted else self.device.empty)(spec.nbytes)

    def _run_only(self, segment: _Segment, inputs: Sequence[Buffer], numbers: Sequence[Any]) -> list[Buffer]:
        """The same for launches that follow one another, with nothing to find out before them."""
        device, stream = self.device, self.device.stream
        with device.running:
            self.wrote = False
            before = stream.replayed
            arena, *more_arenas = self._arenas() if self._has_arenas else [None]
            buffers: list[Any] = [arena, *inputs, *map(self._new, self.schedule.outputs), *more_arenas]
            try:
                segment.run_all(stream, buffers, numbers)
            except BaseException:
                self.wrote = stream.replayed != before
                raise
            self._current = self._segments[()]
            self._run_buffers.places = []  # which are those of another run
        for at in self._shared:
            buffers[at].shared = True
        return [buffers[at] for at in self.schedule.results]

    @property
    def runner(self) -> RunProgram:
        """What runs it without aliases while `device.running` is held, with little before a launch."""
        if self._direct is None:
            return self.run
        self._current = self._segments[()]
        return self._direct

    def _run_segments(
        self, buffers: Sequence[Buffer], numbers: Sequence[Any], moved: list[int] | None, regrouped: bool
    ) -> None:
        stream = self.device.stream
        before = stream.replayed
        try:
            for segment in self._current:
                if isinstance(segment, _Segment):
                    segment.run(self.device, buffers, numbers, moved, regrouped)
                    continue
                self.wrote = True
                if isinstance(segment, Copy):
                    self._copy(segment, buffers)
                else:
                    self._on_host(segment, buffers, numbers)
        except BaseException:
            self.wrote = self.wrote or stream.replayed != before
            raise

    def _arenas(self) -> list[Buffer]:
        """Memory for temporaries, and the host's for what is moved there.

        The device's may be larger than a kernel's argument can be.
        """
        there, most = self._layers.scratch, self._most_arena_bytes
        if self._only_arena and there and self._layers.limit.limit_bytes is None:
            arena = there[0]
            if self._only_arena <= arena.nbytes <= most:
                return [arena]  # the most frequent case, before anything else is looked at
        arenas = self.device.scratch(self._arena_bytes, self.schedule.result_bytes)
        host = self.schedule.host_bytes
        return [
            *(
                arena if arena.nbytes <= most else arena.part(0, nbytes)
                for arena, nbytes in zip(arenas, self._arena_bytes, strict=True)
            ),
            *([self.device.layers().host_memory(host)] if host else []),
        ]

    def _arranged(self, arrangement: Arrangement) -> list[_Segment | Step | Copy]:
        """The launches for an arrangement of buffers; beyond the bound, those that serve any arrangement."""
        known: Arrangement | None = None if self._anywhere else arrangement
        if known not in self._segments and len(self._segments) >= _MAX_ARRANGEMENTS:
            known = None
        if known not in self._segments:
            self._segments[known] = self._bound(known)
        return self._segments[known]

    def _bound(self, arrangement: Arrangement | None) -> list[_Segment | Step | Copy]:
        """Runs of kernels, each bound at its first use, and the steps between them."""
        capabilities = self.device.capabilities
        parts = arranged(self._parts, self.schedule, capabilities, arrangement, self._cache.sizes)
        items = [item for part in parts if isinstance(part, list) for item in part]
        sources = [item.source for item in items if isinstance(item, Call)]
        kernels = iter(self._cache.kernels(sources, self._functions))
        return [
            _Segment(part, kernels, dependencies(self.schedule, part, self._functions))
            if isinstance(part, list)
            else part
            for part in parts
        ]

    # Steps without a kernel

    def _copy(self, step: Copy, buffers: Sequence[Buffer]) -> None:
        target, to, source, start = ends(step, buffers)
        self.device.copy(target, source, step.nbytes, target_offset=to, source_offset=start)

    def _on_host(self, step: Step, buffers: Sequence[Buffer], numbers: Sequence[Any]) -> None:
        """Compute a node by NumPy, on the memory of its inputs and result."""
        (node,) = step.group.nodes
        target, *sources = step.locations
        if node.primitive.collective in ("start", "fetch"):
            self._exchanges[node] = self._start(node, sources[0], buffers)
            return
        if node.primitive.collective == "wait":
            arrived = self._exchanges.pop(node.inputs[0])
            if isinstance(arrived, Buffer):
                self.device.copy(
                    buffers[target[0]], arrived, node.nbytes, target_offset=target[1] * ALIGNMENT
                )
            else:
                self._upload(arrived.wait(), target, buffers)
            return
        read = zip(node.inputs, sources, strict=True)
        arrays = [self._read(parent, location, buffers) for parent, location in read]
        attributes = dict(node.attributes)
        for (_, name), number in zip(constants(step.group), step.constants, strict=True):
            attributes[name] = numbers[number]
        start = perf_counter()
        result = np.ascontiguousarray(computed(node, arrays, attributes))
        for recorder in self.device.stream.recorders:
            recorder.computed_by_host(node.primitive.name, start, perf_counter())
        self._upload(result, target, buffers)

    def _start(self, node: Node, source: Location, buffers: Sequence[Buffer]) -> Job | Buffer:
        """Start an exchange between ranks: what will have its result."""
        (row, *_), device = node.inputs, self.device
        if not moves_on_device(node):  # the row is read when the device has computed it
            return started(node, self._reading(row, source, buffers))
        # In memory of their own: kernels that use the arena meanwhile must not wait.
        given, result = device.empty(row.nbytes), device.empty(result_bytes(node))
        device.copy(given, buffers[source[0]], row.nbytes, source_offset=source[1] * ALIGNMENT)
        device.exchange(result, given, launcher(node))
        return result

    def _upload(self, array: Array, target: Location, buffers: Sequence[Buffer]) -> None:
        if array.nbytes:
            self.device.upload(array, buffers[target[0]], target[1] * ALIGNMENT)

    def _read(self, node: Node, location: Location, buffers: Sequence[Buffer]) -> Array:
        if not node.size:
            return np.empty(node.shape, node.dtype)
        return self._reading(node, location, buffers).wait()

    def _reading(self, node: Node, location: Location, buffers: Sequence[Buffer]) -> Future[Array]:
        buffer, offset = location
        return self.device.download(buffers[buffer], node.dtype, node.shape, offset * ALIGNMENT)


class _Segment:
    """A sequence of launches, and their arguments that change between runs.

    Among them may be copies, which run beside them.
    """

    def __init__(
        self, calls: Sequence[Call | Copy], kernels: Iterator[Kernel], after: Sequence[Sequence[int]]
    ) -> None:
        """`after`: the calls that each must follow."""
        self._calls = calls
        self._after = after
        self._launches: list[tuple[Any, Any, Any, list[Any]]] = []  # kernel, grid, group, arguments
        self._slots: dict[int, list[tuple[int, int]]] = {}  # where each buffer goes: (launch, position)
        self._places: dict[int, list[tuple[int, int]]] = {}  # where each constant goes
        self._copies: dict[int, Copy] = {}  # by their number among the calls
        early = may_begin_early(calls, after)
        for number, call in enumerate(calls):
            if isinstance(call, Copy):
                self._copies[number] = call
                self._launches.append(("copy", call.nbytes, None, []))
                self._slots.setdefault(call.target[0], [])
                self._slots.setdefault(call.source[0], [])
                continue
            units = [unit for _, unit in call.locations] if call.source.placed else []
            args: list[Any] = [None] * len(call.locations) + units + [*call.scalars]
            for position, (slot, _) in enumerate(call.locations):
                self._slots.setdefault(slot, []).append((number, position))
            for position, constant in enumerate(call.constants, len(args)):
                self._places.setdefault(constant, []).append((number, position))
            args += [None] * len(call.constants)
            kernel = copy(next(kernels))  # which may serve other sizes elsewhere, at another cost
            kernel.cost, kernel.early = call.cost, early[number]
            self._launches.append((kernel, call.source.grid, call.source.group, args))
        self._bound: Launches | None = None
        # What the arguments are now, without a reference: a program must keep no memory from use.
        self._memories: dict[int, tuple[int, int]] = {}
        self._in_force = False  # whether the arguments are those
        self._held: list[int] = []  # one slot of each memory: parts of one are in use as long as any of them
        self._alone: set[int] = set()  # slots that no other shares its memory with
        self._uses: Uses | None = None  # of the last run, as long as no buffer moves
        self._last_numbers: Sequence[Any] = ()
        self.launches = len(self._launches) - len(self._copies)

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
        bound = self._bound or self._bind(device.stream, buffers, numbers)
        known = moved is not None and self._in_force
        if known and not moved and numbers is self._last_numbers and not self._copies:
            self._uses = self._uses or self.uses(buffers)
            if device.stream.repeat(bound, self._uses):
                return
        self._uses = None
        if moved is None or (regrouped and not self._alone.issuperset(moved)):
            self._share(buffers)
        slots = [slot for slot in moved or () if slot in self._slots] if known else self._slots
        self._replay(device.stream, slots, [buffers[slot] for slot in self._held], buffers, numbers)

    def direct(self, schedule: Schedule, most: int) -> list[DirectLaunch] | None:
        """Its launches, if there are at most so many: setting every argument costs less than comparing."""
        if len(self._calls) > most or self._copies or any(0 in grid for _, grid, *_ in self._launches):
            return None
        return [
            direct_launch(call, launch, schedule)
            for call, launch in zip(self._calls, self._launches, strict=True)
            if isinstance(call, Call)
        ]

    def repeatable(self) -> Launches | None:
        """What was launched last, if it can be launched again as it is."""
        return self._bound if self._in_force and not self._copies else None

    def uses(self, buffers: Sequence[Buffer]) -> Uses:
        """What the launches touch, of the buffers of a run."""
        return Uses([buffers[slot] for slot in self._held])

    def touches(self, slots: Iterable[int]) -> bool:
        """Whether a launch takes one of these buffers."""
        return any(slot in self._slots for slot in slots)

    def run_all(self, stream: Stream, buffers: Sequence[Buffer], numbers: Sequence[Any]) -> None:
        """Record the launches, wherever the buffers lie."""
        if self._bound is None:
            self._bind(stream, buffers, numbers)
        self._held = []  # no longer known
        self._replay(stream, self._slots, [buffers[slot] for slot in self._slots], buffers, numbers)

    def _replay(
        self,
        stream: Stream,
        slots: Iterable[int],
        touched: Sequence[Buffer],
        buffers: Sequence[Buffer],
        numbers: Sequence[Any],
    ) -> None:
        """Set the arguments that are not those of the last run, of buffers those in `slots`, and launch."""
        assert self._bound is not None
        memories, last, stale = self._memories, self._last_numbers, not self._in_force
        changed = [slot for slot in slots if stale or memories[slot] != buffers[slot].place]
        changes = [(self._slots[slot], buffers[slot].native) for slot in changed]
        if stale or numbers is not last:
            changes += [(places, numbers[at]) for at, places in self._places.items()]
        self._in_force = False  # until all of them are set: an interrupt may come between any two
        copies = {number: ends(step, buffers) for number, step in self._copies.items()}
        stream.replay(self._bound, tuple(touched), changes, copies)
        for slot in changed:
            memories[slot] = buffers[slot].place
        self._last_numbers = numbers
        self._in_force = True

    def _bind(self, stream: Stream, buffers: Sequence[Buffer], numbers: Sequence[Any]) -> Launches:
        for slot, places in self._slots.items():
            self._fill(places, buffers[slot])
            self._memories[slot] = buffers[slot].place
        for at, places in self._places.items():
            self._fill(places, numbers[at])
        self._last_numbers = numbers
        self._bound = stream.bind([(*how, tuple(args)) for *how, args in self._launches], self._after)
        stream.forget(self._bound)
        self._launches.clear()
        self._in_force = True
        return self._bound

    def _share(self, buffers: Sequence[Buffer]) -> None:
        """Determine which buffers share an allocation."""
        sharing: dict[int, list[int]] = {}
        for slot in self._slots:
            sharing.setdefault(buffers[slot].place[0], []).append(slot)
        self._held = [slots[0] for slots in sharing.values()]
        self._alone = {slots[0] for slots in sharing.values() if len(slots) == 1}

    def _fill(self, places: Sequence[tuple[int, int]], arg: Any) -> None:
        for launch, position in places:
            self._launches[launch][3][position] = arg
