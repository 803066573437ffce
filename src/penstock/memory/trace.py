"""Who holds memory: a layer that remembers the user's line behind every block that is out."""

from __future__ import annotations

from collections import Counter

from penstock.callsite import user_line
from penstock.device.driver import Memory
from penstock.memory.pool import BufferPool


class Trace:
    """Passes everything on to the pool, and ranks the lines of code by the bytes that they hold.

    Every step on the table is atomic: a finaliser may come between any two, and must not meet a lock.
    """

    def __init__(self, upstream: BufferPool) -> None:
        self._upstream = upstream
        self._owners: dict[int, tuple[str, int]] = {}  # by the identity of the block, which lives in the pool

    def reserve(self, nbytes: int) -> Memory:
        """See Resource."""
        memory = self._upstream.reserve(nbytes)
        self._owners[id(memory)] = (user_line(), memory.nbytes)
        return memory

    def release(self, memory: Memory) -> None:
        """See Resource."""
        self._owners.pop(id(memory), None)
        self._upstream.release(memory)

    def owners(self, most: int = 10) -> list[tuple[str, int]]:
        """The lines that hold the most bytes, with how many, the largest first."""
        totals: Counter[str] = Counter()
        for site, nbytes in list(self._owners.values()):
            totals[site] += nbytes
        return totals.most_common(most)
