"""A pool of CUDA events, and conversion of the device's times to the host's clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from cuda.bindings import driver as cu

from penstock.drivers.cuda.calls import CudaError, checked
from penstock.drivers.driver import Queue

_CLOCK_SECONDS = 1.0  # how long the measured offset of the device's clock is used
_MAX_IDLE_EVENTS = 1024
_UNTIMED = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
_TIMED = cu.CUevent_flags.CU_EVENT_DEFAULT


@dataclass(slots=True, eq=False)
class CudaEvent:
    """A point on a queue. Its native event returns to the pool when this object is deleted."""

    queue: Queue
    idle: deque[Any]
    native: Any = None  # None until the queue is flushed
    done: bool = False
    error: str = ""  # why the command failed
    start: Any = None  # a native event before the command, if that is timed
    base: _Base | None = None

    def __del__(self) -> None:
        for native in (self.native, self.start):
            if native is not None:
                self.idle.append(native)  # atomic, since a finalizer may run inside any other call


@dataclass(slots=True, eq=False)
class _Base:
    """A native event whose time on the host's clock is known. Times of other events are relative to it."""

    native: Any
    seconds: float
    idle: deque[Any]

    def __del__(self) -> None:
        self.idle.append(self.native)


class EventPool:
    """Native events for reuse, with and without timing."""

    def __init__(self) -> None:
        self.idle: deque[Any] = deque()
        self.timed: deque[Any] = deque()  # idle events with timing
        self.count = 0  # of native events, idle or in use

    @property
    def in_use(self) -> int:
        """Native events that are not idle."""
        return self.count - len(self.idle) - len(self.timed)

    def mark(self, queue: Queue, idle: deque[Any]) -> Any:
        """Record a native event on a queue, reusing one of `idle` if possible."""
        while len(idle) > _MAX_IDLE_EVENTS:
            self._destroy_oldest(idle)
        try:
            native = idle.pop()
        except IndexError:
            native = checked(cu.cuEventCreate(_UNTIMED if idle is self.idle else _TIMED))
            self.count += 1
        try:
            checked(cu.cuEventRecord(native, queue))
        except CudaError:
            idle.append(native)
            raise
        return native

    def _destroy_oldest(self, idle: deque[Any]) -> None:
        cu.cuEventDestroy(idle.popleft())
        self.count -= 1

    def destroy_timed(self) -> None:
        """Destroy the idle events with timing."""
        while self.timed:
            self._destroy_oldest(self.timed)

    def destroy(self) -> None:
        """Destroy all idle events."""
        self.destroy_timed()
        while self.idle:
            self._destroy_oldest(self.idle)


class Clock:
    """Converts times of the device to the host's clock, and records when commands start."""

    def __init__(self, events: EventPool, idle_queue: Queue) -> None:
        """`idle_queue`: a queue without commands, so that events recorded on it complete at once."""
        self._events = events
        self._queue = idle_queue
        self._base: _Base | None = None
        self._due = 0.0
        self._starts: dict[Queue, tuple[Any, _Base]] = {}  # of the next command, by queue

    def note_start(self, queue: Queue) -> None:
        """Record an event before the next command on a queue."""
        if queue in self._starts:  # its command was refused
            self._events.timed.append(self._starts.pop(queue)[0])
        base = self._recent_base()  # recorded first, because times are relative to it
        self._starts[queue] = self._events.mark(queue, self._events.timed), base

    def give_start(self, event: CudaEvent) -> None:
        """Move the start of a command to the event of the command."""
        event.start, event.base = self._starts.pop(event.queue, (None, None))
        event.idle = self._events.timed  # the event at its end needs timing, too

    def close(self) -> None:
        """Return the starts of commands that were refused to the pool."""
        self._events.timed.extend(native for native, _ in self._starts.values())
        self._starts.clear()

    def _recent_base(self) -> _Base:
        """A base of the last second, because the clocks drift, and CUDA rounds long intervals."""
        if self._base is None or perf_counter() > self._due:
            measured = []
            for _ in range(5):  # the best of 5, since the host may be interrupted in between
                before = perf_counter()
                native = self._events.mark(self._queue, self._events.timed)
                checked(cu.cuEventSynchronize(native))
                after = perf_counter()
                measured.append((after - before, _Base(native, (before + after) / 2, self._events.timed)))
            self._base = min(measured, key=lambda pair: pair[0])[1]
            self._due = perf_counter() + _CLOCK_SECONDS
        return self._base


def elapsed(first: Any, last: Any) -> float:
    """Seconds between two native events."""
    return float(checked(cu.cuEventElapsedTime(first, last))) / 1000
