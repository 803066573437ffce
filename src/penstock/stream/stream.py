"""The stream: kernels recorded in batches on one queue, copies on two others, bounded work in flight."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

from penstock.drivers.driver import Driver, Event, Grid, Kernel
from penstock.errors import DeviceError, DeviceUnavailable
from penstock.memory.buffer import Buffer
from penstock.memory.pool import BufferPool
from penstock.stream.queue import BufferSize, BufferSizes, CommandQueue, FlushPolicy, describe
from penstock.stream.recorder import Command, Launch, Recorder
from penstock.stream.waits import WaitLedger

PROFILE = "profile"  # why the host waits where a profile begins and ends
_PAUSE = 1000  # replays after which a graph that could not be made is tried again


class Program:
    """Launches whose arguments are set once: recording them again costs little beside the driver's calls."""

    __slots__ = ("__weakref__", "after", "bound", "buffers", "commands", "graph", "replays")

    def __init__(
        self,
        commands: list[Launch],
        buffers: tuple[Buffer, ...],
        bound: Sequence[Any],
        after: Sequence[Sequence[int]],
    ) -> None:
        self.commands = commands
        self.after = after  # for each launch, those that must have ended
        self.buffers = buffers  # all that the launches touch
        self.bound = bound
        self.graph: Any = None  # the launches as one, where the driver has such and that pays
        self.replays = 0

    def __repr__(self) -> str:
        return f"<program of {len(self.commands)} launches, from {self.commands[0][0]!r} on>"


class Stream:
    """All commands of one device, from any thread."""

    def __init__(self, driver: Driver, pool: BufferPool, policy: FlushPolicy) -> None:
        self.policy = policy
        self.waits = WaitLedger()
        self.lock = threading.RLock()
        self.unavailable: str = ""  # why nothing can be recorded any more
        self._driver = driver
        self._pool = pool
        self.compute = CommandQueue("compute", driver, driver.compute, policy, self.wait)
        # Copies start at once, each by itself: they should run beside the kernels, and what they hold on the
        # host be free as soon as they are done. As many may be in flight as there may be kernels.
        at_once = FlushPolicy(1, policy.max_bytes, policy.max_commands * policy.max_in_flight)
        self.incoming = CommandQueue("incoming", driver, driver.incoming, at_once, self.wait)
        self.outgoing = CommandQueue("outgoing", driver, driver.outgoing, at_once, self.wait)
        self._queues = (self.compute, self.incoming, self.outgoing)
        self.recorders: tuple[Recorder, ...] = ()  # of profiles that are on
        self._timed = False  # whether the driver notes when commands run
        self._graphs: weakref.WeakSet[Program] = weakref.WeakSet()  # programs that have one
        self.replayed = 0  # launches of programs that were recorded, in all

    @property
    def pending(self) -> int:
        """Commands recorded and not known to be done."""
        with self.lock:
            self.retire()
            return sum(queue.pending for queue in self._queues)

    @property
    def idle(self) -> bool:
        """Whether nothing is pending, as far as is known, and no failure is left to tell."""
        return self.compute.idle and self.incoming.idle and self.outgoing.idle

    def launch(self, kernel: Kernel, grid: Grid, group: Grid, args: Sequence[Any]) -> None:
        """Record `kernel` over `grid` groups of `group` threads. Buffers go where the signature says `*`."""
        native, buffers, sizes = _split(kernel, args)
        if 0 in grid:
            return  # nothing to do, which not every driver accepts
        queue, command = self.compute, (kernel, grid, group, sizes)
        with self.lock:  # not acquire() and try: an interrupt between the two would leave it locked
            if self.unavailable:
                self.check_available()
            waits = queue.dependencies(buffers)
            try:
                try:
                    event = self._driver.launch(queue.native, kernel, grid, group, native, waits)
                except DeviceError as error:
                    raise DeviceError(error.reason, describe(command)) from None
                queue.record(event, command, buffers)
            except DeviceError:
                raise
            except BaseException:
                self.interrupted(queue)
                raise

    def bind(self, launches: Sequence[Launch], after: Sequence[Sequence[int]] | None = None) -> Program:
        """A program of launches, each `(kernel, grid, group, args)`, for `replay`. It keeps their buffers.

        `after` says which launches each must follow, where that is not the one before.
        """
        self.check_available()
        if after is not None and any(0 in grid for _, grid, _, _ in launches):
            raise ValueError("launches of no groups cannot be waited for")
        commands: list[Launch] = []
        bound, held = [], {}
        for kernel, grid, group, args in launches:
            native, buffers, sizes = _split(kernel, args)
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

    def rebind(self, program: Program, places: Sequence[tuple[int, int]], arg: Any) -> None:
        """Give launches of a program another buffer or number, at (launch, position) each.

        From then on `replay` has to be told the buffers.
        """
        with self.lock:
            self._rebind(program, places, arg.native if isinstance(arg, Buffer) else arg)

    def _rebind(self, program: Program, places: Sequence[tuple[int, int]], native: Any) -> None:
        for launch, position in places:
            dtype = program.commands[launch][0].dtypes[position]
            self._driver.rebind(program.bound[launch], position, dtype, native)

    def replay(
        self,
        program: Program,
        buffers: tuple[Buffer, ...] | None = None,
        changes: Sequence[tuple[Sequence[tuple[int, int]], Any]] = (),
    ) -> None:
        """Record a program's launches, in order; `buffers`: all that they touch, if not those of `bind`.

        `changes`: arguments that are set before, as with `rebind`; of buffers, what is native.
        """
        touched = program.buffers if buffers is None else buffers
        step = self.policy.max_commands
        with self.lock:
            if self.unavailable:
                self.check_available()
            for places, native in changes:
                self._rebind(program, places, native)
            sizes = BufferSizes([buffer.nbytes for buffer in touched])
            if len(program.bound) > 1 and self._graph(program):
                # The command holds the program, because a graph that runs may not go.
                self._record([program.graph], [("replay", 0, None, (program, sizes))], touched)
                return
            commands: Sequence[Command] = program.commands
            if buffers is not None:
                commands = [(kernel, grid, group, sizes) for kernel, grid, group, _ in program.commands]
            if len(program.bound) <= step:
                self._record(program.bound, commands, touched)
                return
            for start in range(0, len(program.bound), step):
                self._record(program.bound[start : start + step], commands[start : start + step], touched)

    def _record(self, bound: Sequence[Any], commands: Sequence[Command], buffers: tuple[Buffer, ...]) -> None:
        waits = self.compute.dependencies(buffers)
        events: list[Event] = []
        try:
            try:
                self._driver.replay(self.compute.native, bound, waits, events)
            except DeviceError as error:
                raise DeviceError(error.reason, describe(commands[len(events)])) from None
            finally:
                self.replayed += len(events)
                self.compute.record_all(events, commands[: len(events)], buffers)
        except DeviceError:
            raise
        except BaseException:
            self.interrupted(self.compute)
            raise

    def interrupted(self, queue: CommandQueue) -> None:
        """Wait for a queue whose recording was interrupted, so that nothing unknown is under way there."""
        with suppress(DeviceError):  # a device that failed does nothing any more
            queue.finish_unknown()

    def _graph(self, program: Program) -> bool:
        """Whether a program is recorded as one graph: from the second time on, since it is costly to make."""
        if self.recorders:
            return False  # in a graph, nobody knows how long each launch takes
        program.replays += 1
        if program.graph is None and self._driver.graphs and program.replays > 1:
            try:
                program.graph = self._driver.capture(program.bound, program.after)
                self._graphs.add(program)
            except DeviceError:  # a graph takes memory of the device, of which there may be none now
                program.replays = -_PAUSE
        return program.graph is not None

    def release_graphs(self) -> None:
        """Let go of all graphs. Programs that are replayed again get new ones."""
        with self.lock:
            for program in self._graphs:
                program.graph = None
            self._graphs.clear()

    def forget(self, program: Program) -> None:
        """Let go of a program's buffers: from then on `replay` has to be told them."""
        program.buffers = ()
        program.commands = [(kernel, grid, group, ()) for kernel, grid, group, _ in program.commands]

    def commit(self) -> None:
        """Submit what is gathered. Raises the first failure of work that has finished since the last call."""
        self._submit()
        self.raise_error()

    def sync(self) -> None:
        """Wait until nothing is pending. Raises the first failure of the work that was."""
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
        """Let go of everything that the device has finished."""
        with self.lock:
            for queue in self._queues:
                queue.retire()

    def wait(self, event: Event, why: str) -> None:
        """Wait for one submitted command, and enter the time in the ledger if the host really waited."""
        if self._driver.is_done(event):
            return
        self.check_available()  # in a forked child the device will never be done
        start = perf_counter()
        self._driver.wait(event)
        end = perf_counter()
        where = self.waits.add(why, end - start)
        for recorder in self.recorders:
            recorder.waited(where, why, start, end)

    def check(self, events: Sequence[Event | None]) -> None:
        """Raise the error of the first of these commands that failed; those not done yet are passed over."""
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
        """Refuse everything from now on, in a forked child, where another thread may have held the lock."""
        self.unavailable = why
        self.lock = threading.RLock()
        self._set_recorders(())

    def add_recorder(self, recorder: Recorder) -> None:
        """Tell it of every command that is recorded from here on. Waits for what is pending."""
        with self.lock:
            self.drain(PROFILE)
            self._time_commands(self._driver.times)
            self._set_recorders((*self.recorders, recorder))

    def remove_recorder(self, recorder: Recorder) -> None:
        """Tell it of what is pending, once that is done, and then of nothing more."""
        with self.lock:
            others = tuple(other for other in self.recorders if other is not recorder)
            try:
                if not self.unavailable:  # a closed device has told everything
                    self.drain(PROFILE)
                    self._time_commands(self._driver.times and bool(others))
            finally:
                self._set_recorders(others)

    def _time_commands(self, on: bool) -> None:
        """Let the driver note when commands run, or stop it. Nothing is pending."""
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
        """Submit what is gathered; the last command of each queue that has something to wait for."""
        with self.lock:
            self.check_available()
            for queue in self._queues:
                queue.submit()
            self.retire()
            last = [event for queue in self._queues if (event := queue.last_submitted) is not None]
        self._pool.expire()
        return last

    def raise_error(self) -> None:
        """Raise the first failure that was not told yet, once."""
        with self.lock:
            errors = [error for queue in self._queues if (error := queue.take_error()) is not None]
        if errors:
            raise errors[0]


def _split(kernel: Kernel, args: Sequence[Any]) -> tuple[list[Any], list[Buffer], list[Any]]:
    """The arguments as the driver takes them, the buffers among them, and what is remembered of both."""
    native, sizes = list(args), list(args)
    buffers = []
    try:
        for slot in kernel.buffer_slots:
            buffer = args[slot]
            native[slot] = buffer.native
            sizes[slot] = BufferSize(buffer.nbytes)
            buffers.append(buffer)
        if len(native) == len(kernel.signature):
            return native, buffers, sizes
    except (AttributeError, IndexError):
        pass
    given = ", ".join("buffer" if isinstance(arg, Buffer) else type(arg).__name__ for arg in args)
    raise TypeError(f"kernel {kernel.name!r} takes ({', '.join(kernel.signature)}), and ({given}) was given")
