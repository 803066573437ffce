"""Memory resources: layers with two verbs, `reserve` and `release`, each wrapping the one below it.

From the driver up: `Raw` asks the driver, `Limit` refuses, `Statistics` counts, `BufferPool` keeps what was
released for the next request, `Trace` remembers who asked. A layer may take more than it was asked for; what
comes back says its true size in `nbytes`.

An interrupt (Ctrl-C) may come after any call of a C function, at the start of any Python function and at the
end of a loop's turn, not elsewhere. So there is no such call between taking a block and noting who has it.
"""

from __future__ import annotations

from typing import Protocol

from penstock.drivers.driver import Driver, Memory
from penstock.errors import OutOfDeviceMemory


class Resource(Protocol):
    """Anything that hands out memory and takes it back."""

    def reserve(self, nbytes: int) -> Memory:
        """At least `nbytes` bytes. Raises OutOfDeviceMemory."""
        ...

    def release(self, memory: Memory) -> None:
        """Take back what `reserve` gave. Only a pool takes it before the device is done with it."""
        ...


class Raw:
    """The driver itself: device memory, or pinned memory of the host."""

    def __init__(self, driver: Driver, *, pinned: bool = False) -> None:
        self._driver = driver
        self._pinned = pinned

    def reserve(self, nbytes: int) -> Memory:
        """See Resource."""
        return self._driver.allocate(nbytes, self._pinned)

    def release(self, memory: Memory) -> None:
        """See Resource."""
        self._driver.free(memory)


class Statistics:
    """Counts what passes through: how often, how much is out, and the most that ever was."""

    def __init__(self, upstream: Resource) -> None:
        self._upstream = upstream
        self.allocation_count = 0
        self.free_count = 0
        self.nbytes = 0
        self.peak_bytes = 0

    def reserve(self, nbytes: int) -> Memory:
        """See Resource."""
        memory = self._upstream.reserve(nbytes)
        self.allocation_count += 1
        self.nbytes += memory.nbytes
        if self.nbytes > self.peak_bytes:
            self.peak_bytes = self.nbytes
        return memory

    def release(self, memory: Memory) -> None:
        """See Resource."""
        released = False
        try:
            self._upstream.release(memory)
            released = True
        finally:
            if released or memory.is_freed:  # where not, it was interrupted before, and is tried again
                self.free_count += 1
                self.nbytes -= memory.nbytes


class Limit:
    """Refuses what would take more than `limit_bytes` in all; None lets everything pass."""

    def __init__(self, upstream: Resource, limit_bytes: int | None = None) -> None:
        self._upstream = upstream
        self._used = 0
        self.limit_bytes = limit_bytes

    def reserve(self, nbytes: int) -> Memory:
        """See Resource."""
        if self.limit_bytes is not None and self._used + nbytes > self.limit_bytes:
            raise OutOfDeviceMemory(
                f"{nbytes} bytes over the {self._used} already taken pass the limit of {self.limit_bytes}",
                asked=nbytes,
            )
        memory = self._upstream.reserve(nbytes)
        self._used += memory.nbytes
        return memory

    def release(self, memory: Memory) -> None:
        """See Resource."""
        released = False
        try:
            self._upstream.release(memory)
            released = True
        finally:
            if released or memory.is_freed:
                self._used -= memory.nbytes
