"""The stream: kernels in batches on a queue, copies on two others, and a limit on work in flight."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from penstock.drivers.driver import Driver, Event, Grid, Kernel, Queue
from penstock.errors import DeviceError, DeviceUnavailable
from penstock.memory.buffer import Buffer
from penstock.memory.pool import BufferPool
from penstock.stream.launcher import launcher
from penstock.stream.program import CopyEnds, Program
from penstock.stream.queue import BufferSizes, CommandQueue, FlushPolicy, Uses, describe, split
from penstock.stream.recorder import Command, Launch, Recorder
from penstock.stream.waits import WaitLedger

PROFILE = "profile"  # the reason of waits at the start and the end of a profile
_BYTES = np.dtype(np.uint8)  # the dtype of copies
_PAUSE = 1000  # replays after which capturing a graph is retried if it failed


class Stream:
    """All commands of a device, from any thread."""

    def __init__(self, driver: Driver, pool: BufferPool, policy: FlushPolicy) -> None:
        self.policy = policy
        self.waits = WaitLedger()
        self.lock = threading.RLock()
        self.unavailable: str = ""  # why nothing can be recorded any more
        self._driver = driver
        self._pool = pool
        self.compute = CommandQueue("compute", driver, driver.compute, policy, self.wait)
        # Each copy is submitted at once: it should overlap with kernels, and free its staging memory as soon
        # as it is done. The limit on copies in flight is that on kernels.
        at_once = FlushPolicy(1, policy.max_bytes, policy.max_commands * policy.max_in_flight)
        self.incoming = CommandQueue("incoming", driver, driver.incoming, at_once, self.wait)
        self.outgoing = CommandQueue("outgoing", driver, driver.outgoing, at_once, self.wait)
        self._queues = (self.compute, self.incoming, self.outgoing)
        self.recorders: tuple[Recorder, ...] = ()  # of profiles that are on
        self._timed = False  # whether the driver times commands
        self._graphs: weakref.WeakSet[Program] = weakref.WeakSet()  # programs that have a graph
        self.replayed = 0  # launches of programs so far

    @property
    def pending(self) -> int:
        """Commands recorded and not known to be done."""
        with self.lock:
            self.retire()
            return sum(queue.pending for queue in self._queues)

    @property
    def idle(self) -> bool:
        """Whether nothing is known to be pending, and all failures were reported."""
        return self.compute.idle and self.incoming.idle and self.outgoing.idle

    def launch(self, kernel: Kernel, grid: Grid, group: Grid, args: Sequence[Any]) -> None:
        """Record a launch of `grid` workgroups of `group` threads. Parameters with `*` take buffers."""
        native, buffers, sizes = split(kernel, args)
        if 0 in grid:
            return  # some drivers refuse an empty grid
        self.launcher((kernel, grid, group, sizes))(native, buffers)

    def launcher(self, command: Launch) -> Callable[[Sequence[Any], Sequence[Buffer]], None]:
        """What records a launch, any number of times, with native arguments and all buffers among them."""
        return launcher(self, self.compute, command, self._driver)

    def bind(self, launches: Sequence[Any], after: Sequence[Sequence[int]] | None = None) -> Program:
        """A program of launches, each `(kernel, grid, group, args)`, for `replay`. It keeps their buffers.

        `after` lists the launches that each launch depends on; by default, each depends on the one before.
        `("copy", nbytes, None, ())` is a copy; `replay` is given its source and target.
        """
        self.check_available()
        if after is not None and any(group and 0 in grid for _, grid, group, _ in launches):
            raise ValueError("launches of no groups cannot be waited for")
        commands: list[Any] = []
        bound: list[Any] = []
        held = {}
        for kernel, grid, group, args in launches:
            if not isinstance(kernel, Kernel):
                commands.append((kernel, grid, group, args))
                bound.append(None)  # until a graph needs it
                continue
            native, buffers, sizes = split(kernel, args)
            if 0 in grid:
                continue
            commands.append((kernel, grid, group, sizes))
            held.update({id(buffer.usage): buffer for buffer in buffers})
            try:
                bound.append(self._driver.bind(kernel, grid, group, native))
            except DeviceError as error:
                raise DeviceError(error.reason, describe(commands[-1])) from None
        if after is None:
            after = [[number - 1] if number else [] for number in range(len(commands))]
        return Program(commands, tuple(held.values()), bound, after)

    def rebind(self, program: Program, slots: Sequence[tuple[int, int]], arg: Any) -> None:
        """Set an argument, a buffer or a scalar, of a program at each slot (launch, position).

        From then on `replay` has to be given the buffers.
        """
        with self.lock:
            self._rebind(program, slots, arg.native if isinstance(arg, Buffer) else arg)

    def _rebind(self, program: Program, slots: Sequence[tuple[int, int]], native: Any) -> None:
        for launch, position in slots:
            dtype = program.commands[launch][0].dtypes[position]
            self._driver.rebind(program.bound[launch], position, dtype, native)

    def replay(
        self,
        program: Program,
        buffers: tuple[Buffer, ...] | None = None,
        changes: Sequence[tuple[Sequence[tuple[int, int]], Any]] = (),
        copies: Mapping[int, CopyEnds] | None = None,
    ) -> None:
        """Record a program's launches, in order; `buffers`: all that they touch, if not those of `bind`.

        `changes`: slots and native arguments that are set before, as by `rebind`. `copies`: the sources and
        targets of its copies, by their index.
        """
        touched = program.buffers if buffers is None else buffers
        step = self.policy.max_commands
        with self.lock:
            if self.unavailable:
                self.check_available()
            for slots, native in changes:
                self._rebind(program, slots, native)
            sizes = BufferSizes([buffer.nbytes for buffer in touched])
            if len(program.bound) > 1 and self._graph(program, copies or {}):
                # The command keeps the program alive, because a running graph must not be destroyed.
                self._record([program.graph], [("replay", 0, None, (program, sizes))], touched)
                return
            commands: Sequence[Command] = program.commands
            if buffers is not None:
                commands = [(kernel, grid, group, sizes) for kernel, grid, group, _ in program.commands]
            if copies:
                self._record_beside(program, commands, touched, copies)
                return
            if len(program.bound) <= step:
                self._record(program.bound, commands, touched)
                return
            for start in range(0, len(program.bound), step):
                self._record(program.bound[start : start + step], commands[start : start + step], touched)

    def repeat(self, program: Program, uses: Uses) -> bool:
        """Record a program without copies once more, all as it was; False if `replay` has to.

        That is so if the host views any of its memories.
        """
        with self.lock:
            if self.unavailable:
                self.check_available()
            bound, commands = program.bound, program.commands
            if len(bound) > 1 and self._graph(program, {}):
                bound, commands = [program.graph], [("replay", 0, None, (program, uses.sizes))]
            step = self.policy.max_commands
            for start in range(0, len(bound), step):
                waits = self.compute.admit_again(uses)
                if waits is None:
                    return False
                part = slice(start, start + step)
                self._launch(bound[part], commands[part], waits, partial(self.compute.record_again, uses))
        return True

    def _record_beside(
        self,
        program: Program,
        commands: Sequence[Command],
        touched: tuple[Buffer, ...],
        copies: Mapping[int, CopyEnds],
    ) -> None:
        """Record launches, and copies on their own queues, each after what it must follow."""
        events: dict[int, Event] = {}
        run: list[int] = []  # launches, of which only the first waits for copies
        waits: list[Event] = []
        # What a copy waits for that is the first to touch its memory, as the first launch does.
        entry = self.incoming.dependencies(touched) or []

        def record_run() -> None:
            if run:
                bound = [program.bound[number] for number in run]
                made = self._record(bound, [commands[number] for number in run], touched, waits)
                events.update(zip(run, made, strict=True))
            run.clear()
            waits.clear()

        try:
            for number, before in enumerate(program.after):
                if number == program.tail:
                    continue
                if number in copies:
                    record_run()
                    if any(earlier not in copies for earlier in before):
                        self.compute.submit()  # nothing may wait for what is not certain to run
                    follows = [events[earlier] for earlier in before] or entry
                    events[number] = self._copy_beside(commands[number], copies[number], follows)
                    continue
                fetched = [events[earlier] for earlier in before if earlier in copies]
                if fetched or len(run) >= self.policy.max_commands:
                    record_run()
                    waits += fetched
                run.append(number)
            record_run()
            if program.tail >= 0:  # the last on its queue, and after all launches: it ends when all have
                self.compute.submit()
                last = max(number for number in events if number not in copies)
                follows = [events[earlier] for earlier in {*program.after[program.tail], last}]
                self._copy_beside(commands[program.tail], copies[program.tail], follows, touched)
        except BaseException:
            for queue in (self.incoming, self.outgoing):  # no launch after them tells when they are done
                self.interrupted(queue)
            raise

    def _copy_beside(
        self, command: Command, ends: CopyEnds, waits: list[Event], last_of: Sequence[Buffer] = ()
    ) -> Event:
        """Record a copy to pinned memory or from there; `last_of`: buffers whose last use it is."""
        target, to, source, start = ends
        nbytes = command[1]
        assert isinstance(nbytes, int)
        sizes = BufferSizes((target.nbytes, source.nbytes))
        if source.memory.pinned:
            here = source.memory.host
            assert here is not None
            first = source.offset + start
            return self.record_copy(
                self.incoming,
                ("upload", nbytes, None, sizes),
                (),
                lambda queue: self._driver.write(
                    queue, target.memory, target.offset + to, here[first : first + nbytes], waits
                ),
            )
        there = target.memory.host
        assert there is not None
        begin = target.offset + to
        return self.record_copy(
            self.outgoing,
            ("download", nbytes, None, sizes),
            last_of,
            lambda queue: self._driver.read(
                queue, there[begin : begin + nbytes], source.memory, source.offset + start, waits
            ),
        )

    def record_copy(
        self,
        queue: CommandQueue,
        command: Command,
        buffers: Sequence[Buffer],
        copy: Callable[[Queue], Event],
    ) -> Event:
        """Record one copy, which starts at once; `buffers`: those whose last use it is."""
        try:
            try:
                event = copy(queue.native)
            except DeviceError as error:
                raise DeviceError(error.reason, describe(command)) from None
            queue.record(event, command, buffers)
        except DeviceError:
            raise
        except BaseException:
            self.interrupted(queue)
            raise
        return event

    def _record(
        self,
        bound: Sequence[Any],
        commands: Sequence[Command],
        buffers: tuple[Buffer, ...],
        after: Sequence[Event] = (),
    ) -> list[Event]:
        """Record launches, the first of them after some events too; their events."""
        waits = self.compute.dependencies(buffers)
        if after:
            waits = [*(waits or ()), *after]
        return self._launch(bound, commands, waits, partial(self.compute.record_all, buffers))

    def _launch(
        self,
        bound: Sequence[Any],
        commands: Sequence[Command],
        waits: list[Event] | None,
        note: Callable[[list[Event], Sequence[Command]], None],
    ) -> list[Event]:
        """Launch what is bound, and have it noted; the events."""
        events: list[Event] = []
        try:
            try:
                self._driver.replay(self.compute.native, bound, waits, events)
            except DeviceError as error:
                raise DeviceError(error.reason, describe(commands[len(events)])) from None
            finally:
                self.replayed += len(events)
                note(events, commands[: len(events)])
        except DeviceError:
            raise
        except BaseException:
            self.interrupted(self.compute)
            raise
        return events

    def interrupted(self, queue: CommandQueue) -> None:
        """Wait for all commands of a queue whose recording was interrupted, since some may be unknown."""
        with suppress(DeviceError):  # a device that has failed runs nothing any more
            queue.finish_unknown()

    def _graph(self, program: Program, copies: Mapping[int, CopyEnds]) -> bool:
        """Whether a program is launched as a graph: from the second time on, since capturing is costly."""
        if self.recorders:
            return False  # the launches of a graph are not timed separately
        program.replays += 1
        if program.graph is None and self._driver.graphs and program.replays > 1:
            try:
                self._bind_copies(program, copies)
                program.graph = self._driver.capture(program.bound, program.after)
                self._graphs.add(program)
            except DeviceError:  # a graph takes device memory, which may be exhausted
                program.replays = -_PAUSE
        if program.graph is not None:
            self._rebind_copies(program, copies)
        return program.graph is not None

    def _bind_copies(self, program: Program, copies: Mapping[int, CopyEnds]) -> None:
        for number, ends in copies.items():
            nbytes = program.commands[number][1]
            program.bound[number] = self._driver.bind_copy(
                *ends.native(nbytes), nbytes, ends.source.memory.pinned
            )
            program.copied[number] = ends.places

    def _rebind_copies(self, program: Program, copies: Mapping[int, CopyEnds]) -> None:
        for number, ends in copies.items():
            if program.copied[number] != ends.places:
                for position, native in enumerate(ends.native(program.commands[number][1])):
                    self._driver.rebind(program.bound[number], position, _BYTES, native)
                program.copied[number] = ends.places

    def release_graphs(self) -> None:
        """Release all graphs. Programs capture new graphs when they are replayed."""
        with self.lock:
            for program in self._graphs:
                program.graph = None
            self._graphs.clear()

    def forget(self, program: Program) -> None:
        """Release a program's buffers: from then on `replay` has to be given the buffers."""
        program.buffers = ()
        program.commands = [(kernel, grid, group, ()) for kernel, grid, group, _ in program.commands]

    def commit(self) -> None:
        """Submit gathered commands. Raises the first failure of those that finished since the last call."""
        self._submit()
        self.raise_error()

    def sync(self) -> None:
        """Wait until nothing is pending. Raises the first failure of what was pending."""
        self.drain("sync")
        self.raise_error()

    def drain(self, why: str) -> None:
        """Wait until nothing is pending; failures are kept for the next `commit` or `sync`."""
        for event in self._submit():  # without the lock: other threads may go on recording
            self.wait(event, why)
        self.retire()
        self._pool.expire()

    def close(self, why: str) -> None:
        """Refuse new commands from now on, and wait for those that were recorded."""
        with self.lock:
            if not self.unavailable:
                self._submit()
            self.unavailable = why
            events = [event for queue in self._queues if (event := queue.last_submitted) is not None]
        for event in events:
            self._driver.wait(event)
        self.retire()

    def retire(self) -> None:
        """Release everything that the device has finished."""
        with self.lock:
            for queue in self._queues:
                queue.retire()

    def wait(self, event: Event, why: str) -> None:
        """Wait for a submitted command, and enter the time in the ledger if the host had to wait."""
        if self._driver.is_done(event):
            return
        self.check_available()  # in a forked child the command would never be done
        start = perf_counter()
        self._driver.wait(event)
        end = perf_counter()
        where = self.waits.add(why, end - start)
        for recorder in self.recorders:
            recorder.waited(where, why, start, end)

    def check(self, events: Sequence[Event | None]) -> None:
        """Raise the error of the first of these commands that failed; pending commands are ignored."""
        for event in events:
            if event is not None and self._driver.is_done(event) and self._driver.failures([event]):
                with self.lock:
                    known = [error for queue in self._queues if (error := queue.explain(event)) is not None]
                raise known[0] if known else DeviceError(self._driver.failures([event])[0][1])

    def check_available(self) -> None:
        """Raise DeviceUnavailable if the device was closed, or opened before a fork."""
        if self.unavailable:
            raise DeviceUnavailable(self.unavailable)

    def abandon(self, why: str) -> None:
        """Refuse everything from now on. In a forked child, where another thread may have held the lock."""
        self.unavailable = why
        self.lock = threading.RLock()
        self._set_recorders(())

    def add_recorder(self, recorder: Recorder) -> None:
        """Notify a recorder of every command that is recorded from now on. Waits for what is pending."""
        with self.lock:
            self.drain(PROFILE)
            self._time_commands(self._driver.times)
            self._set_recorders((*self.recorders, recorder))

    def remove_recorder(self, recorder: Recorder) -> None:
        """Wait for what is pending, notify a recorder of it, and then of nothing more."""
        with self.lock:
            others = tuple(other for other in self.recorders if other is not recorder)
            try:
                if not self.unavailable:  # nothing is pending on a closed device
                    self.drain(PROFILE)
                    self._time_commands(self._driver.times and bool(others))
            finally:
                self._set_recorders(others)

    def _time_commands(self, on: bool) -> None:
        """Start or stop timing commands. Nothing is pending."""
        if on != self._timed:
            self._driver.time_commands(on)
            self._timed = on
            for queue in self._queues:
                queue.native = getattr(self._driver, queue.name)

    def _set_recorders(self, recorders: tuple[Recorder, ...]) -> None:
        self.recorders = recorders
        for queue in self._queues:
            queue.recorders = recorders

    def _submit(self) -> list[Event]:
        """Submit gathered commands; the last command of each queue that is not known to be done."""
        with self.lock:
            self.check_available()
            for queue in self._queues:
                queue.submit()
            self.retire()
            last = [event for queue in self._queues if (event := queue.last_submitted) is not None]
        self._pool.expire()
        return last

    def raise_error(self) -> None:
        """Raise the first failure that was not reported yet."""
        with self.lock:
            errors = [error for queue in self._queues if (error := queue.take_error()) is not None]
        if errors:
            raise errors[0]
