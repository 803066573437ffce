"""The host driver: NumPy in this process. It is the oracle, the fallback, and a device for tests of hazards.

Kernels are Python functions that take an array per buffer and a scalar per other parameter. Commands run when
they are recorded, unless a `scheduler` is given: then they run as late as the contract in `driver.py` allows,
in a random order across queues, and memory is filled with poison when it is allocated and freed.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import psutil

from penstock.drivers.driver import (
    Args,
    Bytes,
    Capabilities,
    Driver,
    Event,
    Grid,
    Kernel,
    Memory,
    Queue,
    Source,
    Waits,
)
from penstock.errors import CompileError, DeviceError

_FRESH, _FREED = 0xA5, 0xDD  # poison of allocated and of freed memory


@dataclass(slots=True, eq=False)
class _Command:
    """A recorded command, which is its own event."""

    run: Callable[[], None] | None
    waits: Sequence[_Command]
    timed: bool
    flushed: bool = False
    done: bool = False
    error: str = ""
    ran: tuple[float, float] | None = None

    def execute(self) -> None:
        assert self.run is not None
        start = perf_counter() if self.timed else 0.0
        failed = [event.error for event in self.waits if event.error]
        try:
            if failed:
                self.error = f"a command that it waits for failed ({failed[0]})"
            else:
                self.run()
        except Exception as error:  # any error of a kernel is a failure of the command, kept in its event
            self.error = f"{type(error).__name__}: {error}"
        if self.timed and not self.error:
            self.ran = start, perf_counter()
        self.run, self.waits, self.done = None, (), True  # releases what the command references


def _typed(arg: Any, dtype: np.dtype[Any]) -> Any:
    return arg.view(dtype) if isinstance(arg, np.ndarray) else dtype.type(arg)


class HostDriver(Driver):
    """The CPU through NumPy."""

    times = True

    def __init__(
        self, name: str = "host", *, shared_memory: bool = True, scheduler: random.Random | None = None
    ) -> None:
        super().__init__(name, host_capabilities(shared_memory))
        self._queues = [deque[_Command]() for _ in range(3)]
        self.compute, self.incoming, self.outgoing = self._queues
        self._scheduler = scheduler
        self._timed = False
        self._lock = threading.RLock()

    # Memory

    def allocate(self, nbytes: int, pinned: bool = False) -> Memory:
        array = self._host_bytes(nbytes)
        if self._scheduler:
            array.fill(_FRESH)
        visible = pinned or self.capabilities.shared_memory
        memory = Memory(array, nbytes, array if visible else None, pinned)
        self._allocations |= {memory}  # unlike a call, it leaves no moment for an interrupt before the return
        return memory

    def free(self, memory: Memory) -> None:
        if self._scheduler:
            memory.native.fill(_FREED)
        self._allocations -= {memory}
        memory.native = memory.host = None

    def view(self, memory: Memory, offset: int, nbytes: int) -> Bytes:
        part: Bytes = memory.native[offset : offset + nbytes]
        return part

    def native_handles(self) -> int:
        return len(self._allocations)

    # Kernels

    def compile(self, source: Source, signatures: Mapping[str, Sequence[str]]) -> dict[str, Kernel]:
        if isinstance(source, str):
            raise CompileError("the host device takes Python functions by name, and source text was given")
        kernels = {}
        for name, signature in signatures.items():
            if not callable(source.get(name)):
                raise CompileError(f"no function {name!r} was given; there are {sorted(source)}")
            kernels[name] = Kernel(name, signature, source[name])
        return kernels

    def bind(self, kernel: Kernel, grid: Grid, group: Grid, args: Args) -> Any:
        limit = self.capabilities.max_group_size
        if not 1 <= len(grid) == len(group) <= 3 or min(*grid, *group) < 1 or np.prod(group) > limit:
            raise DeviceError(
                f"grid and group need 1 to 3 positive sizes each, a group at most {limit} threads"
            )
        return kernel.native, [_typed(arg, dtype) for arg, dtype in zip(args, kernel.dtypes, strict=True)]

    def rebind(self, bound: Any, position: int, dtype: np.dtype[Any], arg: Any) -> None:
        bound[1][position] = _typed(arg, dtype)

    def replay(self, queue: Queue, bound: Sequence[Any], waits: Waits, events: list[Event]) -> None:
        for function, args in bound:
            events.append(self._record(queue, partial(function, *args), waits))

    # Copies

    def write(self, queue: Queue, memory: Memory, offset: int, source: Bytes, waits: Waits) -> Event:
        target = self.view(memory, offset, source.nbytes)
        return self._record(queue, lambda: np.copyto(target, source), waits)

    def read(self, queue: Queue, target: Bytes, memory: Memory, offset: int, waits: Waits) -> Event:
        source = self.view(memory, offset, target.nbytes)
        return self._record(queue, lambda: np.copyto(target, source), waits)

    def copy(
        self, queue: Queue, target: Memory, to: int, source: Memory, start: int, nbytes: int, waits: Waits
    ) -> Event:
        return self.write(queue, target, to, self.view(source, start, nbytes), waits)

    def map(self, memory: Memory, offset: int, nbytes: int, writable: bool) -> Bytes:
        return self.view(memory, offset, nbytes)

    def unmap(self, memory: Memory, mapped: Bytes) -> Event | None:
        return None

    # Order and completion

    def flush(self, queue: Queue) -> None:
        with self._lock:
            for command in queue:
                command.flushed = True

    def is_done(self, event: Event) -> bool:
        with self._lock:
            if self._scheduler and not event.done:
                for _ in range(self._scheduler.randrange(3)):
                    self._run_next()
            done: bool = event.done
            return done

    def wait(self, event: Event) -> None:
        with self._lock:
            while not event.done:
                if not self._run_next():
                    raise DeviceError("deadlock: the command, or what it waits for, was never flushed")

    def failures(self, events: Sequence[Event]) -> list[tuple[int, str]]:
        return [(position, event.error) for position, event in enumerate(events) if event.error]

    def _record(self, queue: Queue, run: Callable[[], None], waits: Waits) -> Event:
        command = _Command(run, waits or (), self._timed)
        with self._lock:
            if self._scheduler:
                queue.append(command)
            else:
                command.execute()
        return command

    def _run_next(self) -> bool:
        """Run a random command of those that are ready; False if there are none."""
        assert self._scheduler is not None
        ready = [
            queue
            for queue in self._queues
            if queue and queue[0].flushed and all(event.done for event in queue[0].waits)
        ]
        if ready:
            self._scheduler.choice(ready).popleft().execute()
        return bool(ready)

    # Times

    def time_commands(self, on: bool) -> None:
        self._timed = on

    def ran(self, event: Event) -> tuple[float, float] | None:
        times: tuple[float, float] | None = event.ran
        return times

    # Life cycle

    def close(self) -> None:
        with self._lock:
            for queue in self._queues:
                self.flush(queue)
            while self._scheduler and self._run_next():
                pass

    def abandon(self) -> None:
        """Nothing to do: arrays can be used after a fork."""


def host_capabilities(shared_memory: bool = True) -> Capabilities:
    """What the host driver can do on this machine."""
    total = psutil.virtual_memory().total
    return Capabilities(
        description="NumPy",
        vendor="this process",
        api=f"NumPy {np.__version__}",
        kind="host",
        language="numpy",
        total_bytes=total,
        max_allocation_bytes=total,
        offset_alignment=16,
        shared_memory=shared_memory,
        compute_units=1,
        max_group_size=1024,
        local_bytes=0,
        vector_width=1,
        float16=True,
        float64=True,
    )
