"""The order of launches: a launch must wait for those that access the same bytes, if either writes them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

Range = tuple[int, int, int]  # the index of a memory, the first byte, and the byte after the last


@dataclass(frozen=True)
class Touched:
    """The bytes that a launch reads and writes."""

    reads: tuple[Range, ...] = ()
    writes: tuple[Range, ...] = ()
    ahead: tuple[Range, ...] = ()  # of those that it reads, before it waits for other launches


class _Uses:
    """Ranges of bytes of a memory, sorted by start, each with the launch that accesses it."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, int]] = []  # the first byte, the byte after the last, the launch
        self._longest = 0

    def __iter__(self) -> Iterator[int]:
        return (launch for _, _, launch in self._ranges)

    def add(self, start: int, end: int, launch: int) -> None:
        insort(self._ranges, (start, end, launch))
        self._longest = max(self._longest, end - start)

    def overlapping(self, start: int, end: int) -> list[int]:
        """The launches that access any of these bytes."""
        ranges = self._ranges
        near = ranges[bisect_left(ranges, (start - self._longest,)) : bisect_left(ranges, (end,))]
        return [launch for _, last, launch in near if start < last]

    def forget_inside(self, start: int, end: int) -> None:
        """Drop the ranges inside of another range."""
        inside = slice(bisect_left(self._ranges, (start,)), bisect_left(self._ranges, (end,)))
        self._ranges[inside] = [use for use in self._ranges[inside] if use[1] > end]


def orderings(touched: Sequence[Touched], aliases: Mapping[int, Collection[int]]) -> list[list[int]]:
    """For each launch the earlier launches that it must wait for, without those that are implied.

    `aliases`: for a memory, others that it may share bytes with; launches that write it wait for all their
    uses.
    """
    read, written = defaultdict[int, _Uses](_Uses), defaultdict[int, _Uses](_Uses)  # by memory
    before: list[int] = []  # for each launch, a bit for every launch that it follows, even indirectly
    result = []
    for number, launch in enumerate(touched):
        earlier: set[int] = set()
        for memory, start, end in launch.reads:
            earlier.update(written[memory].overlapping(start, end))
        for memory, start, end in launch.writes:
            for uses in (read, written):
                earlier.update(uses[memory].overlapping(start, end))
                earlier.update(who for other in aliases.get(memory, ()) for who in uses[other])
        for memory, start, end in launch.reads:
            read[memory].add(start, end, number)
        for memory, start, end in launch.writes:
            # Launches that would have to follow accesses inside of it follow this launch.
            read[memory].forget_inside(start, end)
            written[memory].forget_inside(start, end)
            written[memory].add(start, end, number)
        needed: list[int] = []
        reached = 0
        for other in sorted(earlier, reverse=True):
            if not reached >> other & 1:
                needed.append(other)
                reached |= before[other] | 1 << other
        before.append(reached)
        result.append(needed)
    return result
