"""The commands of a queue: gathered into batches, submitted, and retired when the device is done.

A command does not keep buffers alive. It is noted as the last use of the memory that it touches, and the next
command that touches this memory, perhaps as another buffer, is ordered after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.drivers.driver import Driver, Event, Kernel, Queue
from penstock.errors import DeviceError
from penstock.memory.buffer import Buffer, Usage
from penstock.stream.recorder import Command, Ran, Recorder

_MARKER_BYTES = 256  # of the copy that `finish_unknown` waits for


@dataclass
class FlushPolicy:
    """When gathered commands are submitted, and how far the device may fall behind."""

    max_commands: int
    max_bytes: int  # of memory that gathered commands touch, and of memory that all batches in flight touch
    max_in_flight: int


class BufferSize(int):
    """Stands for a buffer among the remembered arguments of a command."""


class BufferSizes(tuple[int, ...]):
    """Stands for the remembered arguments of a command that are all buffers."""


class Uses:
    """The memories that launches touch each time. It keeps none of them from other use."""

    __slots__ = ("nbytes", "sizes", "usages")

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        """`buffers`: one of each memory."""
        self.sizes = BufferSizes([buffer.nbytes for buffer in buffers])
        self.usages = [buffer.usage for buffer in buffers]
        self.nbytes = sum(buffer.memory.nbytes for buffer in buffers)


class Batch:
    """Commands that are submitted together, and the bytes of the distinct memories that they touch."""

    __slots__ = ("commands", "events", "nbytes", "queue")

    def __init__(self, queue: CommandQueue) -> None:
        self.queue = queue
        self.events: list[Event] = []
        self.commands: list[Command] = []
        self.nbytes = 0


class CommandQueue:
    """A queue of the driver, and what was recorded on it. The caller holds the stream's lock."""

    def __init__(
        self,
        name: str,
        driver: Driver,
        native: Queue,
        policy: FlushPolicy,
        wait: Callable[[Event, str], None],
    ) -> None:
        self.name = name
        self.runs_kernels = name == "compute"
        self.native = native
        self.recorders: tuple[Recorder, ...] = ()
        self._driver = driver
        self.policy = policy
        self._wait = wait
        self.opened = Batch(self)  # what is gathered
        self._in_flight: deque[Batch] = deque()
        self._error: DeviceError | None = None  # for the next commit or sync
        self._failed: deque[tuple[Event, DeviceError]] = deque(maxlen=32)  # for futures

    @property
    def pending(self) -> int:
        """Commands recorded and not known to be done."""
        return len(self.opened.events) + sum(len(batch.events) for batch in self._in_flight)

    @property
    def idle(self) -> bool:
        """Whether all commands are known to be done, and their failures were reported."""
        return not self.opened.events and not self._in_flight and self._error is None

    @property
    def last_submitted(self) -> Event | None:
        """The event of the last command submitted; None when all are known to be done."""
        return self._in_flight[-1].events[-1] if self._in_flight else None

    def dependencies(self, buffers: Sequence[Buffer], reads_only: bool = False) -> list[Event] | None:
        """The events that a new command on these buffers has to wait for: their last uses on other queues."""
        batch = self.opened
        for buffer in buffers:
            if buffer.usage.batch is not batch:
                return self.admit(buffers, reads_only)
        return None  # all of them are in this batch already

    def admit(self, buffers: Sequence[Buffer], reads_only: bool = False) -> list[Event] | None:
        """The same where not all buffers are known to be in the batch."""
        waits = []
        opened, driver, nbytes = self.opened, self._driver, 0
        usages: set[Usage] = set()  # each memory counts once
        for buffer in buffers:
            usage = buffer.usage
            if buffer.driver is not driver:
                raise ValueError(f"{buffer!r} cannot be used on {driver.name}; copy it there first")
            if usage.viewers:
                buffer.refuse_if_viewed(reads_only)
            batch = usage.batch
            if batch is opened or usage in usages:
                continue
            usages.add(usage)
            nbytes += buffer.memory.nbytes
            queue = None if batch is None else batch.queue
            if queue is not self and usage.event is not None and not driver.is_done(usage.event):
                if queue is not None:
                    queue.submit()  # only a submitted command is certain to run, so that it can be waited for
                waits.append(usage.event)
        opened.nbytes += nbytes
        return waits or None

    def admit_again(self, uses: Uses) -> list[Event] | None:
        """The events that a new command has to wait for; None: the host views any of its memories."""
        waits = []
        opened, is_new = self.opened, False
        for usage in uses.usages:
            batch = usage.batch
            if usage.viewers:
                return None
            if batch is opened:
                continue
            is_new = True
            queue = None if batch is None else batch.queue
            if queue is not self and usage.event is not None and not self._driver.is_done(usage.event):
                if queue is not None:
                    queue.submit()
                waits.append(usage.event)
        if is_new:
            opened.nbytes += uses.nbytes
        return waits

    def record_again(self, uses: Uses, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """Add commands like `record_all`."""
        if events:
            batch, event = self.opened, events[-1]
            for usage in uses.usages:
                usage.batch = batch
                usage.event = event
            self.record_all((), events, commands)

    def record(self, event: Event, command: Command, buffers: Sequence[Buffer]) -> None:
        """Add a command that the driver has recorded, on these buffers; submit if there are enough."""
        batch = self.opened
        batch.events += (event,)  # no call, after which an interrupt could leave the batch inconsistent
        batch.commands += (command,)
        for buffer in buffers:
            usage = buffer.usage
            usage.batch = batch
            usage.event = event
        if len(batch.events) >= self.policy.max_commands or batch.nbytes >= self.policy.max_bytes:
            self.submit()

    def record_all(
        self, buffers: Sequence[Buffer], events: Sequence[Event], commands: Sequence[Command]
    ) -> None:
        """Add several commands. The last of them, which ends after all others, is the last use of memory."""
        if events:
            self.opened.events += events[:-1]
            self.opened.commands += commands[:-1]
            self.record(events[-1], commands[-1], buffers)

    def submit(self) -> None:
        """Submit the batch; wait for the oldest batch if too many are in flight."""
        if not self.opened.events:
            return
        self._driver.flush(self.native)
        fresh = Batch(self)
        self._in_flight += (self.opened,)
        self.opened = fresh
        self.retire()
        while self._too_much_in_flight():
            self._wait(self._in_flight[0].events[-1], "back-pressure")
            self.retire()

    def finish_unknown(self) -> None:
        """Wait for all commands of the queue, even if an interrupt left commands that are in no batch.

        The queue runs in order, so a copy is recorded and waited for.
        """
        source, target = (
            self._driver.allocate(_MARKER_BYTES, pinned=True),
            self._driver.allocate(_MARKER_BYTES),
        )
        assert source.host is not None
        try:
            event = self._driver.write(self.native, target, 0, source.host, None)
            self._driver.flush(self.native)
            self._driver.wait(event)
        finally:
            self._driver.free(source)
            self._driver.free(target)

    def _too_much_in_flight(self) -> bool:
        """Whether there are too many batches or bytes. Two batches are allowed, to keep the device busy."""
        batches, policy = self._in_flight, self.policy
        if len(batches) > policy.max_in_flight:
            return True
        return len(batches) > 2 and sum(batch.nbytes for batch in batches) > policy.max_bytes

    def retire(self) -> None:
        """Retire the batches that the device has finished, and note the first failure in them."""
        while self._in_flight and self._driver.is_done(self._in_flight[0].events[-1]):
            batch = self._in_flight[0]
            for position, reason in self._driver.failures(batch.events):
                error = DeviceError(reason, describe(batch.commands[position]))
                self._failed.append((batch.events[position], error))
                self._error = self._error or error
            if self.recorders:
                self._tell(batch)
            del self._in_flight[0]  # last, so that an interrupted call can be repeated
            batch.commands.clear()  # memories refer to their last batch, and may be idle for long
            batch.events.clear()

    def _tell(self, batch: Batch) -> None:
        commands = zip(batch.commands, map(self._driver.ran, batch.events), strict=True)
        ran: list[Ran] = list(commands)
        for recorder in self.recorders:
            recorder.finished(self.name, ran)

    def explain(self, event: Event) -> DeviceError | None:
        """The error of a command of this queue that failed, as long as it is remembered."""
        for batch in (self.opened, *self._in_flight):
            if event in batch.events:
                command = batch.commands[batch.events.index(event)]
                return DeviceError(self._driver.failures([event])[0][1], describe(command))
        return next((error for failed, error in self._failed if failed is event), None)

    def take_error(self) -> DeviceError | None:
        """The first failure since the last call; it is returned once."""
        error, self._error = self._error, None
        return error


def describe(command: Command) -> str:
    """A command for an error message: kernel, sizes and arguments."""
    what, grid, group, args = command
    arguments = (
        _describe_argument(args)
        if isinstance(args, BufferSizes)
        else ", ".join(map(_describe_argument, args))
    )
    if isinstance(what, Kernel):
        return f"kernel {what.name!r}, grid {grid}, group {group}, arguments ({arguments})"
    return f"{what} ({arguments})"


def _describe_argument(argument: Any) -> str:
    if isinstance(argument, BufferSizes):
        return ", ".join(f"{nbytes}-byte buffer" for nbytes in argument)
    if isinstance(argument, BufferSize):
        return f"{int(argument)}-byte buffer"
    return f"{argument.nbytes}-byte array" if isinstance(argument, np.ndarray) else repr(argument)


def split(kernel: Kernel, args: Sequence[Any]) -> tuple[list[Any], list[Buffer], list[Any]]:
    """The native arguments, the buffers among them, and a description of both to remember."""
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
