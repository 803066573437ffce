"""The staging ring: pinned host memory for copies to and from a device with its own memory.

Slots are reserved and released in order. A slot is busy until its copy is done; a slot of a download also
until its bytes are copied to their destination, which the ring does itself when it needs the space. So a
result that nobody waits for cannot block the ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from penstock.drivers.driver import Bytes, Driver, Event, Memory
from penstock.memory.pool import BufferPool

_ALIGNMENT = 256  # bytes, of slots


class Slot:
    """A part of the ring, used by a copy."""

    __slots__ = ("array", "carry", "done", "event", "start")

    def __init__(self, start: int, array: Bytes) -> None:
        self.start = start
        self.array = array
        self.event: Event | None = None  # set when the copy is recorded
        self.carry: Callable[[], None] | None = (
            None  # moves the bytes to their destination when the copy is done
        )
        self.done = False


class StagingRing:
    """At most `capacity` bytes, taken from `source` when first needed. The caller holds the stream's lock."""

    def __init__(self, driver: Driver, source: BufferPool, capacity: int) -> None:
        self._driver = driver
        self._source = source
        self.capacity = capacity
        self.memory: Memory | None = None
        self._slots: deque[Slot] = deque()

    @property
    def chunk_bytes(self) -> int:
        """The maximum size of a slot: four fit, so that copies to and from the ring overlap."""
        return max(self.capacity // 4 // _ALIGNMENT * _ALIGNMENT, _ALIGNMENT)

    def reserve(self, nbytes: int, wait: Callable[[Event], None]) -> Slot:
        """A slot of `nbytes`, at most `chunk_bytes`. If the ring is full, `wait` for the oldest copy."""
        if self.memory is None:
            self._source.give(self, max(self.capacity, 4 * _ALIGNMENT))
        assert self.memory is not None
        assert self.memory.host is not None
        while (start := self._room(nbytes)) is None:
            wait(self._slots[0].event)
            self.finish(self._slots[0])
            self._slots.popleft()
        slot = Slot(start, self.memory.host[start : start + nbytes])
        self._slots += (slot,)
        return slot  # no call in between, or an interrupt could leak the slot

    def cancel(self, slot: Slot) -> None:
        """Release the newest slot, whose copy could not be recorded."""
        assert self._slots[-1] is slot
        self._slots.pop()

    def finish(self, slot: Slot) -> None:
        """Finish a slot whose copy is done: move its bytes on, unless the copy failed."""
        if slot.done:
            return
        if slot.carry is not None and not self._driver.failures([slot.event]):
            slot.carry()
        slot.carry = None
        slot.done = True  # last: an interrupted call is repeated

    def retire(self) -> None:
        """Release the slots whose copies are done, oldest first."""
        while self._slots and self._driver.is_done(self._slots[0].event):
            self.finish(self._slots[0])
            del self._slots[0]

    def clear(self) -> None:
        """Release the memory, unless a copy is pending."""
        self.retire()
        if self.memory is not None and not self._slots:
            memory, self.memory = self.memory, None
            self._source.release(memory)

    def _room(self, nbytes: int) -> int | None:
        """The offset for `nbytes` after the newest slot or, wrapped around, before the oldest; or None."""
        assert self.memory is not None
        if not self._slots:
            return 0
        oldest, newest = self._slots[0], self._slots[-1]
        end = -(-(newest.start + newest.array.nbytes) // _ALIGNMENT) * _ALIGNMENT
        if newest.start >= oldest.start:  # the busy part does not wrap
            if end + nbytes <= self.memory.nbytes:
                return end
            return 0 if nbytes <= oldest.start else None
        return end if end + nbytes <= oldest.start else None
