"""Which launches must follow which: those that touch the same bytes, of which one writes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Range = tuple[int, int, int]  # a memory by number, the first byte, and the byte after the last


@dataclass(frozen=True)
class Touched:
    """The bytes that a launch reads and writes."""

    reads: tuple[Range, ...] = ()
    writes: tuple[Range, ...] = ()


def orderings(touched: Sequence[Touched], over: Mapping[int, Collection[int]]) -> list[list[int]]:
    """For each launch the earlier ones that it must wait for, without those that others of them wait for.

    `over`: for a memory, others that it may share bytes with; launches that write it wait for all their uses.
    """
    uses: dict[int, list[tuple[int, int, int, bool]]] = {}  # of each memory: first byte, end, launch, writes
    before: list[int] = []  # for each launch, a bit for every one that it follows, however indirectly
    result = []
    for number, launch in enumerate(touched):
        earlier: set[int] = set()
        for memory, start, end in launch.reads:
            earlier |= {who for a, b, who, writes in uses.get(memory, ()) if writes and a < end and start < b}
        for memory, start, end in launch.writes:
            earlier |= {who for a, b, who, _ in uses.get(memory, ()) if a < end and start < b}
            earlier |= {who for other in over.get(memory, ()) for _, _, who, _ in uses.get(other, ())}
        for memory, start, end in launch.reads:
            uses.setdefault(memory, []).append((start, end, number, False))
        for memory, start, end in launch.writes:
            # Whoever would have to follow what lies inside has to follow this launch.
            rest = [use for use in uses.get(memory, ()) if use[0] < start or end < use[1]]
            uses[memory] = [*rest, (start, end, number, True)]
        needed: list[int] = []
        reached = 0
        for other in sorted(earlier - {number}, reverse=True):
            if not reached >> other & 1:
                needed.append(other)
                reached |= before[other] | 1 << other
        before.append(reached)
        result.append(needed)
    return result
