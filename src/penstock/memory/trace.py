"""Who holds memory: a layer that remembers the user's line behind every block that is out."""

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
    """A block of memory that somebody holds."""

    serial: int  # which allocation of the driver it is, of all that there were
    nbytes: int  # with rounding
    asked: int
    site: str  # the user's line


@dataclass(frozen=True, slots=True)
class Action:
    """A block that is handed out, or comes back, at a moment of `perf_counter`."""

    seconds: float
    out: bool
    block: Block
    took: float = 0.0  # seconds until it was there


class Log(Protocol):
    """Who is told of every block."""

    note: Callable[[Action], object]  # one atomic step without a lock, because finalisers call it

    def process(self) -> None:
        """Count what was noted; never called by a finaliser."""
        ...


class Trace:
    """Passes everything on to the pool, and ranks the lines of code by the bytes that they hold.

    Every step on the table is atomic: a finaliser may come between any two, and must not meet a lock.
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
        """All blocks that are out and were traced."""
        return list(self._blocks.values())

    def owners(self, most: int = 10) -> list[tuple[str, int]]:
        """The lines that hold the most bytes, with how many, the largest first."""
        totals: Counter[str] = Counter()
        for block in self.blocks():
            totals[block.site] += block.nbytes
        return totals.most_common(most)
