"""Memory resources: layers with `reserve` and `release`, each wrapping the layer below it.

From the driver up: `Raw` allocates, `Limit` enforces a limit, `Statistics` counts, `BufferPool` keeps
released memory for later requests, `Trace` records the user's lines. A layer may allocate more than
requested; `nbytes` of the memory is its true size.

An interrupt (Ctrl-C) may come after a call of a C function, at the start of a Python function and at the end
of a loop's iteration, not elsewhere. So there is no such point between taking a block and noting its owner.
"""

from __future__ import annotations

from typing import Protocol

from penstock.drivers.driver import Driver, Memory
from penstock.errors import OutOfDeviceMemory


class Resource(Protocol):
    """An allocator of memory."""

    def reserve(self, nbytes: int) -> Memory:
        """At least `nbytes` bytes. Raises OutOfDeviceMemory."""
        ...

    def release(self, memory: Memory) -> None:
        """Release memory from `reserve`. Only a pool takes it before the device is done with it."""
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
    """Counts allocations, the bytes that are allocated, and their peak."""

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
            if released or memory.is_freed:  # otherwise it was interrupted before, and will be retried
                self.free_count += 1
                self.nbytes -= memory.nbytes


in_force: list[int] = []  # budgets of blocks of code: see `budgeting`


class Limit:
    """Refuses allocations beyond a total of `limit_bytes`; None is no limit."""

    def __init__(self, upstream: Resource, limit_bytes: int | None = None) -> None:
        self._upstream = upstream
        self._used = 0
        self._own = limit_bytes

    @property
    def limit_bytes(self) -> int | None:
        """Its own limit, or the smallest budget of the enclosing blocks of code, if that is smaller."""
        if not in_force:
            return self._own
        limits = list(in_force)  # none, if another thread has just left the last
        return min(limits, default=None) if self._own is None else min([self._own, *limits])

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int | None) -> None:
        self._own = limit_bytes

    def reserve(self, nbytes: int) -> Memory:
        """See Resource."""
        limit = self.limit_bytes
        if limit is not None and self._used + nbytes > limit:
            raise OutOfDeviceMemory(
                f"{nbytes} bytes beside the {self._used} already taken exceed the limit of {limit}",
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
