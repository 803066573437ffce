"""Offsets in one arena for values whose lifetimes are known.

A value that takes over the memory of a dead value forms a block with it. The blocks that are live at the
peak, the step with the most live bytes, are stacked without gaps. The other blocks follow outward in time,
each in the smallest gap that it fits: blocks born after the peak in the order of their births, blocks that
died before it in the reverse order of their deaths. For the networks that people train, this usually reaches
the lower bound. Where it does not, blocks at the top of the arena evict blocks below, which then get new
offsets, within a fixed amount of work.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NOWHERE = -1  # the offset of a block that has none yet
NEVER = np.iinfo(np.int64).max

# Work is counted in blocks looked at and not in seconds, so that a plan depends on nothing but its input.
STEP_WORK = 250  # the fixed cost of finding an offset
ATTEMPT_WORK = 120_000  # for steps that evict blocks
TOTAL_WORK = 1_200_000  # about 0.1 s
TOTAL_WORK_PER_BLOCK = 1200
SMALL_EXCESS = 0.005  # of the lower bound: worth a single further attempt


class Value(NamedTuple):
    """Bytes that are needed from one step to another."""

    nbytes: int
    born: int  # the step that writes it
    dies: int  # the last step that uses it, `born` or later
    may_alias: tuple[int, ...] = ()  # values that die at its birth, whose memory it may take over


@dataclass(frozen=True)
class Plan:
    """The offset of each value, and the bytes of the arena beside their lower bound."""

    offsets: tuple[int, ...]  # bytes, for each value in the given order
    arena_bytes: int
    lower_bound: int  # the most bytes that are live at one step, once takeovers are chosen

    @property
    def gap(self) -> float:
        """The share by which the arena exceeds the lower bound."""
        return (self.arena_bytes - self.lower_bound) / max(self.lower_bound, 1)


class _Blocks(NamedTuple):
    size: Ints  # in units of the alignment, like all sizes and offsets inside this module
    born: Ints
    dies: Ints


def lower_bound(values: Sequence[Value], alignment: int) -> int:
    """The bytes of the smallest arena that a plan could have."""
    every = _every(values, alignment)
    return _take_over(values, every)[1] * alignment if every.size.any() else 0


def plan(values: Sequence[Value], alignment: int) -> Plan:
    """Assign offsets so that two values never share a byte while both are live, unless they may alias."""
    every = _every(values, alignment)
    size = every.size
    if not size.any():
        return Plan((0,) * len(values), 0, 0)
    heads, live = _take_over(values, every)
    last = every.dies.copy()
    np.maximum.at(last, heads, every.dies)
    first = np.flatnonzero((heads == np.arange(len(heads))) & (size > 0))
    blocks = _Blocks(size[first], every.born[first], last[first])
    starts = np.zeros(len(values), np.int64)
    starts[first] = _place(blocks)
    return Plan(
        offsets=tuple((starts[heads] * alignment).tolist()),
        arena_bytes=int((starts + size).max()) * alignment,
        lower_bound=live * alignment,
    )


def _every(values: Sequence[Value], alignment: int) -> _Blocks:
    """Each value as a block."""
    size = np.array([-(-value.nbytes // alignment) for value in values], np.int64)
    births = np.array([value.born for value in values], np.int64)
    deaths = np.array([value.dies for value in values], np.int64)
    steps = np.unique(births)  # live bytes only grow where something is born: no other step matters
    return _Blocks(size, steps.searchsorted(births), steps.searchsorted(deaths, "right") - 1)


def _load(blocks: _Blocks) -> Ints:
    """The size of all live blocks at each step."""
    change = np.zeros(int(blocks.dies.max()) + 2, np.int64)
    np.add.at(change, blocks.born, blocks.size)
    np.subtract.at(change, blocks.dies + 1, blocks.size)
    return change[:-1].cumsum()


def _take_over(values: Sequence[Value], every: _Blocks) -> tuple[Ints, int]:
    """The first value of each value's block, and the peak of live sizes with these blocks."""
    size, born, dies = (column.tolist() for column in every)
    live = _load(every)
    held = live.copy()  # blocks keep their first size, so a smaller successor holds more than it needs
    heads = list(range(len(values)))
    taken: set[int] = set()
    for i in sorted(
        (i for i, value in enumerate(values) if value.may_alias and size[i]), key=born.__getitem__
    ):
        # A value that is born at this step too cannot be taken over: its own predecessor might be live.
        choices = [
            (size[heads[k]], k)
            for k in values[i].may_alias
            if k not in taken and size[k] >= size[i] and values[k].born < values[i].born == values[k].dies
        ]
        if not choices:
            continue
        room, k = min(choices)
        waste = room - size[i]
        now, later = held[born[i]] - size[i], held[born[i] + 1 : dies[i] + 1]
        if waste and max(now, later.max(initial=0) + waste) >= max(now + size[i], later.max(initial=0)):
            continue  # it would not lower the peak during its lifetime
        if waste:
            later += waste
        held[born[i]] -= size[i]
        live[born[i]] -= size[i]
        taken.add(k)
        heads[i] = heads[k]
    return np.array(heads), int(live.max())


def _place(blocks: _Blocks) -> Ints:
    load = _load(blocks)
    return _tighten(blocks, load, np.array(_outward(blocks, int(load.argmax()))))


class _Gaps:
    """Free memory: gaps by size, and by either end so that neighbours join."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []  # each with its start
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}

    def take(self, size: int) -> tuple[int, int]:
        """Remove the smallest gap that is large enough; its start and end."""
        _, start = self._by_size.pop(bisect_left(self._by_size, (size, 0)))
        end = self._end_of.pop(start)
        del self._start_of[end]
        return start, end

    def free(self, start: int, end: int) -> None:
        before = self._start_of.pop(start, start)
        if before < start:
            del self._by_size[bisect_left(self._by_size, (start - before, before))]
        after = self._end_of.pop(end, end)
        if after > end:
            del self._by_size[bisect_left(self._by_size, (after - end, end))]
        if before < after:
            insort(self._by_size, (after - before, before))
            self._end_of[before] = after
            self._start_of[after] = before


def _outward(blocks: _Blocks, peak: int) -> list[int]:
    """Offsets under no limit, placed from the step `peak` outward."""
    size, born, dies = (column.tolist() for column in blocks)

    def from_the_ends(i: int) -> tuple[bool, int]:
        # Blocks born last are at the bottom, and blocks that die first at the top: so in either direction of
        # time, memory is freed at an end of the stack, and not in many small holes.
        until, since = dies[i] - peak, peak - born[i]
        return (True, -until) if until < since else (False, since)

    everyone = range(len(size))
    stack = sorted((i for i in everyone if born[i] <= peak <= dies[i]), key=from_the_ends)
    offsets = [0] * len(size)
    top = 0
    for i in stack:
        offsets[i] = top
        top += size[i]
    later = [i for i in everyone if born[i] > peak]
    sooner = [i for i in everyone if dies[i] < peak]
    _sweep(stack, later, size, born, dies, offsets)
    _sweep(stack, sooner, size, [-step for step in dies], [-step for step in born], offsets)
    return offsets


def _sweep(
    stack: list[int], queue: list[int], size: list[int], born: list[int], dies: list[int], offsets: list[int]
) -> None:
    """Set the offsets of the queue in the order of its births; the stack is live when the first is born."""
    gaps = _Gaps()
    gaps.free(sum(size[i] for i in stack), NEVER)
    death_below = {offsets[i] + size[i]: dies[i] for i in stack}  # of the block that ends at an offset
    death_above = {offsets[i]: dies[i] for i in stack}
    queue.sort(key=lambda i: (born[i], -size[i]))
    ending = sorted(stack + queue, key=dies.__getitem__)
    ended = 0
    for i in queue:
        while dies[k := ending[ended]] < born[i]:
            gaps.free(offsets[k], offsets[k] + size[k])
            ended += 1
        start, end = gaps.take(size[i])
        # Beside the neighbour that dies at about the same time, so that both leave a single gap.
        if abs(death_below.get(start, NEVER) - dies[i]) <= abs(death_above.get(end, NEVER) - dies[i]):
            offsets[i] = start
            gaps.free(start + size[i], end)
        else:
            offsets[i] = end - size[i]
            gaps.free(start, end - size[i])
        death_below[offsets[i] + size[i]] = death_above[offsets[i]] = dies[i]


def _tighten(blocks: _Blocks, load: Ints, offsets: Ints) -> Ints:
    """Shrink the arena towards the peak load, by half of the excess at a time, or by less if that fails."""
    bound = int(load.max())
    floor = _Blocks(np.array([0]), np.array([-1]), np.array([NEVER - 1]))  # a block to stand on
    size, born, dies = (np.concatenate(columns) for columns in zip(blocks, floor, strict=True))
    offsets = np.append(offsets, 0)
    # Without `**`, whose last bits depend on the CPU, and with them the plan.
    fourth = np.square(np.square(load / bound))
    crowding = np.append(0.0, np.square(np.square(fourth)).cumsum())  # full steps count most
    crowded = crowding[blocks.dies + 1] - crowding[blocks.born]
    weight = np.append(blocks.size * (crowded * np.sqrt(crowded)), 0.0)
    weight /= weight.max()  # weights grow, so this keeps them finite
    work = min(TOTAL_WORK, TOTAL_WORK_PER_BLOCK * len(size))
    failures = 0
    while work > 0 and (excess := int((offsets + size).max()) - bound) > 0:
        if excess < bound * SMALL_EXCESS:
            work = min(work, ATTEMPT_WORK)
        capacity = bound + excess - max(excess >> (1 + failures % 5), 1)
        trial = np.where(offsets + size > capacity, NOWHERE, offsets)
        fits, spent = _repack(_Blocks(size, born, dies), trial, capacity, weight, work)
        work -= spent
        offsets, failures = (trial, 0) if fits else (offsets, failures + 1)
    return offsets[:-1]


def _repack(blocks: _Blocks, offsets: Ints, capacity: int, weight: Floats, work: int) -> tuple[bool, int]:
    """Find offsets for the blocks that have none, the heaviest first, and for those that they evict.

    Changes the offsets, and the weights too: an evicted block gets heavier, so that no two blocks evict each
    other for ever, and the next attempt starts with the blocks that were hard to place. Returns whether all
    blocks have an offset, and the work spent.
    """
    size, born, dies = blocks
    sizes, births, deaths = (column.tolist() for column in blocks)  # iterating over a list is faster
    ends = offsets + size
    since = np.where(offsets == NOWHERE, NEVER, born)  # a block without an offset takes no memory
    homeless = [(-float(weight[i]), i) for i in np.flatnonzero(offsets == NOWHERE).tolist()]
    heapify(homeless)
    spent = pushing = 0
    while homeless and spent < work and pushing < ATTEMPT_WORK:
        i = heappop(homeless)[1]
        need = sizes[i]
        near = ((since <= deaths[i]) & (dies >= births[i])).nonzero()[0]
        effort = STEP_WORK + len(near)
        spent += effort
        start, end, heavy = offsets[near], ends[near], weight[near]
        by_start, by_end = start.argsort(kind="stable"), end.argsort(kind="stable")
        # Only offsets at which another block ends are tried: the best offset is among them.
        candidates = end[by_end]
        candidates = candidates[: candidates.searchsorted(capacity - need, "right")]
        begun = heavy[by_start].cumsum()[start[by_start].searchsorted(candidates + need) - 1]
        ended = heavy[by_end].cumsum()[: len(candidates)]
        offset = int(candidates[(begun - ended).argmin()])
        pushed = near[(start < offset + need) & (end > offset)]
        if len(pushed):
            pushing += effort
            since[pushed] = NEVER
            weight[pushed] *= 1.3
            for k, pushed_weight in zip(pushed.tolist(), weight[pushed].tolist(), strict=True):
                heappush(homeless, (-pushed_weight, k))
        offsets[i], ends[i], since[i] = offset, offset + need, births[i]
    return not homeless, spent
