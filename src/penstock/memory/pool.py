"""The pool: keeps released memory for later requests of the same size class, within bounds.

A block that the pool hands out belongs to the caller until `release`. Blocks are never split, so there is no
fragmentation, and idle blocks can always be given back to the driver.

A block may be released while commands still use it. Kernels run in the order in which they are recorded, so
the next kernel may have it immediately; other users wait for its last use, which the block knows. It is freed
only when the device is done with it.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from time import monotonic
from typing import Any

from penstock.drivers.driver import Event, Memory
from penstock.errors import OutOfDeviceMemory, SettingError
from penstock.memory.resource import Resource, Statistics

GRANULE = 256  # bytes; every size is a multiple, and the smallest block
EXACT_FROM = 1 << 20  # bytes; larger requests are rounded to the granule only
_AHEAD = 4  # blocks of a size that may wait for the device before the oldest is reused


@lru_cache(maxsize=4096)
def size_class(nbytes: int) -> int:
    """The block size for a request: eight classes per power of two, so less than 12.5% is wasted."""
    least = max(-(-nbytes // GRANULE) * GRANULE, GRANULE)
    if least >= EXACT_FROM or least <= 8 * GRANULE:
        return least
    step: int = 1 << ((least - 1).bit_length() - 4)
    return -(-least // step) * step


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Counters of a pool. Bytes are those taken from the driver, including rounding.

    >>> ps.default_device().memory_stats().pool.hit_rate <= 1
    True
    """

    hits: int  # requests served by idle blocks
    misses: int  # requests that went to the driver
    allocation_count: int  # allocations that the driver made
    size_classes: int  # sizes with idle blocks
    total_pooled: int  # idle blocks
    pooled_bytes: int  # idle bytes, some of which commands may still use
    live_bytes: int  # bytes that callers hold
    peak_bytes: int  # the maximum of live_bytes

    @property
    def total_memory(self) -> int:
        """Bytes taken from the driver: live and pooled."""
        return self.live_bytes + self.pooled_bytes

    @property
    def reuse_count(self) -> int:
        """Requests that needed no allocation."""
        return self.hits

    @property
    def hit_rate(self) -> float:
        """The share of requests that needed no allocation; 0 before the first."""
        return self.hits / max(self.hits + self.misses, 1)

    @property
    def fragmentation(self) -> float:
        """The idle share of the bytes taken from the driver."""
        return self.pooled_bytes / max(self.pooled_bytes + self.live_bytes, 1)


def _at_least_0(name: str, value: float) -> float:
    """A bound of a pool, or a SettingError that names it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise SettingError(f"the pool's {name} is a number of 0 or more, and {value!r} was given")
    return value


class Owner:
    """Holds memory for `BufferPool.reserve`, without a finaliser that would release it."""

    memory: Memory


class BufferPool:
    """Idle memory by size class, bounded in blocks per class, in bytes, and in seconds of idle time.

    >>> ps.default_device().memory_stats().pooled_bytes >= 0
    True
    """

    def __init__(
        self,
        upstream: Resource,
        *,
        capacity: int = 512,
        max_bytes: float = math.inf,
        idle_seconds: float = 60.0,
        clock: Callable[[], float] = monotonic,
        is_done: Callable[[Event], bool] = lambda event: True,
        wait: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._capacity = int(_at_least_0("capacity", capacity))
        self._max_bytes = _at_least_0("max_bytes", max_bytes)
        self._idle_seconds = _at_least_0("idle_seconds", idle_seconds)
        self._counted = Statistics(upstream)
        self._clock = clock
        self._is_done = is_done
        self._wait = wait
        self._next_sweep = clock() + idle_seconds
        self._lock = threading.Lock()
        self._idle: dict[int, list[Memory]] = {}  # by size; the longest idle first
        self._leaving: list[Memory] = []  # to be freed once the device is done with them
        self._leaving_bytes = 0
        self._returned: deque[Memory] = deque()  # released, but still counted as live
        # Takes memory back. Atomic and without a lock, because finalisers call it, and they may run inside
        # any other call; the next call of the pool does the rest.
        self.release: Callable[[Memory], None] = self._returned.append
        self._hits = 0
        self._misses = 0
        self._live = 0
        self._peak = 0

    @property
    def capacity(self) -> int:
        """The maximum of idle blocks in a size class. Setting it gives blocks above it back."""
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        if isinstance(capacity, float):
            raise SettingError(
                f"the pool's capacity is an integer number of blocks, and {capacity} was given"
            )
        with self._lock:
            self._capacity = int(_at_least_0("capacity", capacity))
            self._collect()
            for blocks in self._idle.values():
                for _ in range(len(blocks) - self._capacity):
                    self._give_back(blocks)
            self._forget_empty_classes()
            self._free_leaving()

    @property
    def max_bytes(self) -> float:
        """The maximum of idle bytes. Setting it gives bytes above it back, the longest idle first."""
        return self._max_bytes

    @max_bytes.setter
    def max_bytes(self, max_bytes: float) -> None:
        with self._lock:
            self._max_bytes = _at_least_0("max_bytes", max_bytes)
            self._collect()

    @property
    def idle_seconds(self) -> float:
        """The maximum idle time of a block. Setting it gives blocks back that have idled for longer."""
        return self._idle_seconds

    @idle_seconds.setter
    def idle_seconds(self, idle_seconds: float) -> None:
        with self._lock:
            self._idle_seconds = _at_least_0("idle_seconds", idle_seconds)
            self._collect()
            now = self._next_sweep = self._clock()
            self._expire(now)

    def reserve(self, nbytes: int, unused: bool = False) -> Memory:
        """Memory of at least `nbytes` bytes, idle or new, for a kernel to write. Raises OutOfDeviceMemory.

        `unused`: for the host, so blocks that pending commands still use are avoided.
        """
        owner = Owner()
        self.give(owner, nbytes, unused)
        return owner.memory

    def give(self, owner: Any, nbytes: int, unused: bool = False) -> None:
        """Set `owner.memory`. If the owner's finaliser releases it, no interrupt can lose it."""
        with self._lock:
            returned = self._returned
            if len(returned) == 1:
                last = returned[0]
                usage = last.usage
                batch = None if unused or usage is None else usage.batch
                # A kernel may have what the last kernel used, as in `_usable`, without its call.
                is_next = batch is not None and batch.queue.runs_kernels
                is_free = is_next or usage is None or usage.event is None
                if last.asked == nbytes and (is_free or self._usable(last, unused)):
                    owner.memory = last  # the block that was just released has the requested size
                    del returned[0]
                    self._hits += 1
                    return
            if returned or self._leaving:
                self._collect()
            idle = self._idle.get(size_class(nbytes))
            memory = self._idle_block(idle, unused) if idle else None
            if memory is None:
                allocations = self._counted.allocation_count
                memory = self._allocate(nbytes)
                missed = self._counted.allocation_count - allocations
                self._misses += missed
                self._hits -= missed
            self._hits += 1
            owner.memory = memory
            memory.asked = nbytes
            self._live += memory.nbytes
            if self._live > self._peak:
                self._peak = self._live

    def shrink_to_fit(self, max_bytes: int = 0) -> int:
        """Give idle blocks back, the longest idle first, down to `max_bytes`; returns the bytes."""
        with self._lock:
            self._collect()
            return self._shrink(max_bytes)

    def clear(self) -> int:
        """Give all idle blocks back to the driver; returns the bytes."""
        return self.shrink_to_fit(0)

    def clear_size(self, nbytes: int) -> int:
        """Give back the idle blocks of the size class of `nbytes`; returns the bytes."""
        with self._lock:
            self._collect()
            blocks = self._idle.get(size_class(nbytes), [])
            freed = sum(self._give_back(blocks) for _ in range(len(blocks)))
            self._forget_empty_classes()
            self._free_leaving()
            return freed

    def expire(self) -> int:
        """Give back blocks that have idled for too long; returns the bytes. Cheap if there are none."""
        now = self._clock()
        if now < self._next_sweep and not self._returned:
            return 0
        with self._lock:
            self._collect()
            return self._expire(now)

    def abandon(self) -> None:
        """Replace the lock in a forked child, where another thread may have held it."""
        self._lock = threading.Lock()

    def stats(self) -> PoolStatistics:
        """The present counters."""
        with self._lock:
            self._collect()
            blocks = [len(idle) for idle in self._idle.values() if idle]
            return PoolStatistics(
                hits=self._hits,
                misses=self._misses,
                allocation_count=self._counted.allocation_count,
                size_classes=len(blocks),
                total_pooled=sum(blocks),
                pooled_bytes=self._counted.nbytes - self._live,
                live_bytes=self._live,
                peak_bytes=self._peak,
            )

    def balance(self) -> tuple[int, int]:
        """Live and idle bytes, as in `stats`, but cheaper."""
        with self._lock:
            self._collect()
            return self._live, self._counted.nbytes - self._live

    def idle(self) -> list[tuple[int, int]]:
        """The idle blocks, as (serial of the allocation, bytes)."""
        with self._lock:
            self._collect()
            return [(memory.serial, memory.nbytes) for idle in self._idle.values() for memory in idle]

    def reset_peak(self) -> None:
        """Set `peak_bytes` to the present live bytes."""
        with self._lock:
            self._collect()
            self._peak = self._live

    # The methods below need the lock.

    def _idle_bytes(self) -> int:
        return self._counted.nbytes - self._live - self._leaving_bytes

    def _usable(self, memory: Memory, unused: bool) -> bool:
        """Whether memory can be handed out without a wait for its last use."""
        usage = memory.usage
        if usage is None or usage.event is None:
            return True
        if not unused and usage.batch is not None and usage.batch.queue.runs_kernels:
            return True  # the next kernel follows its last use, as kernels share a queue
        if not self._is_done(usage.event):
            return False
        usage.forget()
        return True

    def _idle_block(self, idle: list[Memory], unused: bool) -> Memory | None:
        """The most recently released usable block of a class, or None.

        If many blocks wait for the device, the oldest is taken anyway; its next command waits.
        """
        for position in range(len(idle) - 1, -1, -1):
            if self._usable(idle[position], unused):
                memory = idle[position]
                del idle[position]
                return memory
        if len(idle) < _AHEAD:
            return None
        memory = idle[0]
        del idle[0]
        return memory

    def _allocate(self, nbytes: int) -> Memory:
        """New memory. If the driver has none, as few idle blocks as possible are given back first."""
        self._expire(self._clock())
        size = freed = size_class(nbytes)
        try:
            return self._counted.reserve(size)
        except OutOfDeviceMemory:
            pass
        if idle := self._idle.get(size):  # waiting for a block of this size is better than freeing others
            memory = idle[0]
            del idle[0]
            return memory
        while self._shrink(max(self._idle_bytes() - freed, 0)):
            try:
                return self._counted.reserve(size)
            except OutOfDeviceMemory:
                freed *= 2
        return self._counted.reserve(max(nbytes, 1))  # without rounding, which may exceed the free memory

    def _collect(self) -> None:
        """Move released blocks into their size classes, and apply the bounds."""
        returned, classes, capacity, now = self._returned, self._idle, self._capacity, self._clock()
        while returned:
            memory = returned[0]
            nbytes, usage = memory.nbytes, memory.usage
            if usage is not None and usage.batch is not None and not usage.batch.events:
                usage.forget()  # the batch is done: idle memory must not keep native events
            idle = classes.get(nbytes)
            if idle is None:
                # A block of an unrounded size would never be reused: no request has its class.
                keeps = size_class(nbytes) == nbytes <= self._max_bytes
                idle = classes.setdefault(nbytes, []) if keeps else None
            if idle is None or len(idle) >= capacity:
                self._give_back(returned, 0)
            else:
                memory.idle_since = now
                idle += (memory,)
                del returned[0]
            self._live -= nbytes
        if self._idle_bytes() > self._max_bytes:
            self._shrink(self._max_bytes)
        self._free_leaving()

    def _give_back(self, blocks: list[Memory] | deque[Memory], position: int = 0) -> int:
        """Remove a block from a list, to free it when the device is done with it; returns the bytes."""
        memory = blocks[position]
        del blocks[position]
        self._leaving += (memory,)
        self._leaving_bytes += memory.nbytes
        return memory.nbytes

    def _free_leaving(self) -> None:
        """Free the blocks that the device is done with."""
        for position in range(len(self._leaving) - 1, -1, -1):
            memory = self._leaving[position]
            usage = memory.usage
            if usage is not None and usage.event is not None and usage.batch is None:
                self._wait(usage.event)  # the end of a host view, which is short
            if not self._usable(memory, unused=True):
                continue
            released = False
            try:
                self._counted.release(memory)
                released = True
            finally:
                if released or memory.is_freed:
                    del self._leaving[position]
                    self._leaving_bytes -= memory.nbytes

    def _shrink(self, max_bytes: float) -> int:
        self._forget_empty_classes()
        freed = 0
        while self._idle and self._idle_bytes() > max_bytes:
            oldest = min(self._idle.values(), key=lambda blocks: blocks[0].idle_since)
            freed += self._give_back(oldest)
            if not oldest:
                self._forget_empty_classes()
        self._free_leaving()
        return freed

    def _expire(self, now: float) -> int:
        if now < self._next_sweep:
            return 0
        self._next_sweep = now + self._idle_seconds / 2
        freed = 0
        for blocks in self._idle.values():
            stale = sum(memory.idle_since < now - self._idle_seconds for memory in blocks)
            freed += sum(self._give_back(blocks) for _ in range(stale))
        self._forget_empty_classes()
        self._free_leaving()
        return freed

    def _forget_empty_classes(self) -> None:
        self._idle = {size: blocks for size, blocks in self._idle.items() if blocks}
