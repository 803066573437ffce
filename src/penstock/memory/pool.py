"""The pool: keeps released memory for the next request of the same size class, within bounds.

A block that the pool hands out belongs to the caller until it comes back through `release`. Blocks are never
split, so nothing fragments, and what is idle can always be given back whole.

A block may come back while commands still use it. Kernels run in the order in which they are recorded, so the
next kernel may have it at once; whoever else gets it waits for its last use, which the block knows. A driver
has it back only when the device is done with it.
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

GRANULE = 256  # bytes; the unit of every size, and the least that a request takes
EXACT_FROM = 1 << 20  # bytes; larger requests are rounded to the granule alone
_AHEAD = 4  # blocks of one size that may wait for the device before one of them is taken again


@lru_cache(maxsize=4096)
def size_class(nbytes: int) -> int:
    """The size that serves a request: eight classes to an octave, so less than 12.5% is wasted."""
    least = max(-(-nbytes // GRANULE) * GRANULE, GRANULE)
    if least >= EXACT_FROM or least <= 8 * GRANULE:
        return least
    step: int = 1 << ((least - 1).bit_length() - 4)
    return -(-least // step) * step


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """What a pool did and holds. Bytes are those taken from the driver, so they include rounding."""

    hits: int  # requests served from what was idle
    misses: int  # requests that went to the driver
    allocation_count: int  # allocations that the driver made
    size_classes: int  # sizes of which something is idle
    total_pooled: int  # idle blocks
    pooled_bytes: int  # idle bytes, of which commands may still use some
    live_bytes: int  # bytes in the callers' hands
    peak_bytes: int  # the most that was ever in the callers' hands

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
        """The share of the bytes taken from the driver that nobody uses at the moment."""
        return self.pooled_bytes / max(self.pooled_bytes + self.live_bytes, 1)


def _at_least_0(name: str, value: float) -> float:
    """A bound of a pool, or a SettingError that names it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise SettingError(f"the pool's {name} is a number of 0 or more, and {value!r} was given")
    return value


class Owner:
    """Holds memory for `BufferPool.reserve`; it does not give it back by itself."""

    memory: Memory


class BufferPool:
    """Idle memory by size class, bounded in blocks per class, in bytes, and in the seconds it may idle."""

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
        self._leaving: list[Memory] = []  # for the driver, once the device is done with them
        self._leaving_bytes = 0
        self._returned: deque[Memory] = deque()  # released, and still counted as live
        # Takes memory back. An atomic step without a lock, because finalisers call it, and those may run
        # inside any other call; the next call does the rest.
        self.release: Callable[[Memory], None] = self._returned.append
        self._hits = 0
        self._misses = 0
        self._live = 0
        self._peak = 0

    @property
    def capacity(self) -> int:
        """The most idle blocks of a size class. What is over a new one is given back at once."""
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
        """The most idle bytes. What is over a new bound is given back at once, the longest idle first."""
        return self._max_bytes

    @max_bytes.setter
    def max_bytes(self, max_bytes: float) -> None:
        with self._lock:
            self._max_bytes = _at_least_0("max_bytes", max_bytes)
            self._collect()

    @property
    def idle_seconds(self) -> float:
        """How long a block may idle. What has idled for longer than a new bound is given back at once."""
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

        `unused`: for the host, so avoid blocks that a pending command still uses.
        """
        owner = Owner()
        self.give(owner, nbytes, unused)
        return owner.memory

    def give(self, owner: Any, nbytes: int, unused: bool = False) -> None:
        """Set `owner.memory`. An owner whose finaliser gives it back loses none to an interrupt."""
        with self._lock:
            returned = self._returned
            if len(returned) == 1 and returned[0].asked == nbytes and self._usable(returned[0], unused):
                owner.memory = returned[0]  # the block that just came back is the one that is wanted
                del returned[0]
                self._hits += 1
                return
            if returned or self._leaving:
                self._collect()
            allocations = self._counted.allocation_count
            memory = self._idle_block(nbytes, unused)
            if memory is None:
                memory = self._allocate(nbytes)
            owner.memory = memory
            memory.asked = nbytes
            self._live += memory.nbytes
            if self._live > self._peak:
                self._peak = self._live
            if self._counted.allocation_count == allocations:
                self._hits += 1
            else:
                self._misses += 1

    def shrink_to_fit(self, max_bytes: int = 0) -> int:
        """Give idle blocks back, the longest idle first, until at most `max_bytes` idle; how many bytes."""
        with self._lock:
            self._collect()
            return self._shrink(max_bytes)

    def clear(self) -> int:
        """Give everything idle back to the driver; how many bytes."""
        return self.shrink_to_fit(0)

    def clear_size(self, nbytes: int) -> int:
        """Give back what is idle of the class that serves requests of `nbytes`; how many bytes."""
        with self._lock:
            self._collect()
            blocks = self._idle.get(size_class(nbytes), [])
            freed = sum(self._give_back(blocks) for _ in range(len(blocks)))
            self._forget_empty_classes()
            self._free_leaving()
            return freed

    def expire(self) -> int:
        """Give back what has idled for too long; how many bytes. Cheap when there is nothing to do."""
        now = self._clock()
        if now < self._next_sweep and not self._returned:
            return 0
        with self._lock:
            self._collect()
            return self._expire(now)

    def abandon(self) -> None:
        """Go on in a forked child, where another thread may have held the lock."""
        self._lock = threading.Lock()

    def stats(self) -> PoolStatistics:
        """Counts and bytes at this moment."""
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
        """Live and idle bytes: the same as in `stats`, but cheaper."""
        with self._lock:
            self._collect()
            return self._live, self._counted.nbytes - self._live

    def idle(self) -> list[tuple[int, int]]:
        """The idle blocks: which allocation of the driver each is, and its bytes."""
        with self._lock:
            self._collect()
            return [(memory.serial, memory.nbytes) for idle in self._idle.values() for memory in idle]

    def reset_peak(self) -> None:
        """Let `peak_bytes` start again from what is live now."""
        with self._lock:
            self._collect()
            self._peak = self._live

    # The lock is held from here on.

    def _idle_bytes(self) -> int:
        return self._counted.nbytes - self._live - self._leaving_bytes

    def _usable(self, memory: Memory, unused: bool) -> bool:
        """Whether memory can be handed out without anybody waiting for its last use."""
        usage = memory.usage
        if usage is None or usage.event is None or (usage.in_order and not unused):
            return True
        if not self._is_done(usage.event):
            return False
        usage.forget()
        return True

    def _idle_block(self, nbytes: int, unused: bool) -> Memory | None:
        """An idle block for a request, the one that came back last; None if there is none that is usable.

        Where many blocks wait for the device, the oldest is taken all the same; its next command waits.
        """
        idle = self._idle.get(size_class(nbytes), [])
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
        """New memory. Where there is none, idle blocks are given back, only as many as it takes."""
        self._expire(self._clock())
        size = much = size_class(nbytes)
        try:
            return self._counted.reserve(size)
        except OutOfDeviceMemory:
            pass
        if idle := self._idle.get(size):  # better to wait for a block of this size than to give others back
            memory = idle[0]
            del idle[0]
            return memory
        while self._shrink(max(self._idle_bytes() - much, 0)):
            try:
                return self._counted.reserve(size)
            except OutOfDeviceMemory:
                much *= 2
        return self._counted.reserve(max(nbytes, 1))  # rounding may ask for more than there is

    def _collect(self) -> None:
        """Move released blocks into their size classes, and apply the bounds."""
        returned, classes, capacity, now = self._returned, self._idle, self._capacity, self._clock()
        while returned:
            memory = returned[0]
            nbytes = memory.nbytes
            idle = classes.get(nbytes)
            if idle is None:
                # A block made to measure would never be found again: no request is of its class.
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
        """Take the oldest block off a list, to free it when the device is done with it; how many bytes."""
        memory = blocks[position]
        del blocks[position]
        self._leaving += (memory,)
        self._leaving_bytes += memory.nbytes
        return memory.nbytes

    def _free_leaving(self) -> None:
        """Give the driver what the device is done with."""
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
