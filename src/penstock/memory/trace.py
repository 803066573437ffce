"""Memory tracing: a layer that records the line of the user's code that allocated each live block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from penstock.callsite import user_line
from penstock.drivers.driver import Memory
from penstock.memory.pool import BufferPool, Owner


@dataclass(frozen=True, slots=True)
class Block:
    """A live block of memory."""

    serial: int  # of the driver's allocation, unique
    nbytes: int  # with rounding
    asked: int
    site: str  # the user's line


@dataclass(frozen=True, slots=True)
class Action:
    """An allocation or a release of a block, at a time of `perf_counter`."""

    seconds: float
    out: bool
    block: Block
    took: float = 0.0  # seconds for the allocation


class Log(Protocol):
    """A listener for allocations and releases."""

    note: Callable[[Action], object]  # atomic and without a lock, because finalisers call it

    def process(self) -> None:
        """Process noted actions; never called by a finaliser."""
        ...


class Trace:
    """Forwards to the pool, and ranks lines of code by the bytes that they hold.

    Operations on the table are atomic, without a lock: a finaliser may run between any two of them.
    """

    def __init__(self, upstream: BufferPool) -> None:
        self._upstream = upstream
        self._blocks: dict[int, Block] = {}  # by serial
        self.logs: tuple[Log, ...] = ()

    def give(self, owner: Any, nbytes: int, unused: bool = False) -> None:
        """See BufferPool."""
        start = perf_counter()
        self._upstream.give(owner, nbytes, unused)
        memory = owner.memory
        end = perf_counter()
        block = self._blocks[memory.serial] = Block(memory.serial, memory.nbytes, nbytes, user_line())
        for log in self.logs:
            log.note(Action(end, True, block, end - start))
            log.process()

    def reserve(self, nbytes: int) -> Memory:
        """See Resource."""
        owner = Owner()
        self.give(owner, nbytes)
        return owner.memory

    def release(self, memory: Memory) -> None:
        """See Resource."""
        block = self._blocks.pop(memory.serial, None)
        if block is not None:
            for log in self.logs:
                log.note(Action(perf_counter(), False, block))
        self._upstream.release(memory)

    def blocks(self) -> list[Block]:
        """All live blocks that were traced."""
        return list(self._blocks.values())

    def owners(self, most: int = 10) -> list[tuple[str, int]]:
        """The lines that hold the most bytes, with the bytes, the largest first."""
        totals: Counter[str] = Counter()
        for block in self.blocks():
            totals[block.site] += block.nbytes
        return totals.most_common(most)
