"""The order of steps: among those that can run, the one that adds the least to what is live."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class Work(NamedTuple):
    """A step: the values that it reads and writes, by number."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    replaces: tuple[int, ...] = ()  # given values whose memory its results take, if nothing reads them later


_Place = tuple[int, ...]


def ordered(steps: Sequence[Work], nbytes: Sequence[int], kept: frozenset[int]) -> list[int]:
    """The steps in an order that needs little memory, each after those that write what it reads.

    The given order has to be a possible one, and stays if it needs no more. What is in `kept` is never freed.
    A step that replaces a value comes after the other readers of it, where that can be: a result that cannot
    take over its memory needs memory of its own.
    """
    # Sums of gradients begin with the last part, so of steps that add the same the later may be better.
    orders = [list(range(len(steps))), *(_greedy(steps, nbytes, kept, turn) for turn in (1, -1))]
    return min(orders, key=lambda order: _peak(order, steps, nbytes, kept))


def deferred(
    order: Sequence[int], steps: Sequence[Work], nbytes: Sequence[int], kept: frozenset[int]
) -> list[int]:
    """The same order, with steps just before what reads their results, where that keeps fewer bytes alive.

    That holds for steps that read little or what lives longer anyway, such as the first ones of a region that
    is recomputed for the gradient: nothing but the results says when these should run.
    """
    # Steps are taken from the last to the first, and a place is the smaller, the later it is. What stands
    # just before another has a place that begins with the other's.
    first: dict[int, _Place] = {}  # where a value is read first, so far
    last: dict[int, _Place] = {}
    replaced: dict[int, _Place] = {}
    places: dict[int, _Place] = {}
    for number in reversed(order):
        step = steps[number]
        after = [first[value] for value in step.writes if value in first]
        after += [replaced[value] for value in step.reads if value in replaced]
        place: _Place = (len(places),)
        if after:
            before = (*max(after), -len(places))
            born = sum(nbytes[value] for value in step.writes if value not in kept)
            longer = {value for value in step.reads if value not in kept and last.get(value, place) > before}
            if born >= sum(nbytes[value] for value in longer):
                place = before
        places[number] = place
        for value in step.reads:
            first[value] = max(first.get(value, place), place)
            last[value] = min(last.get(value, place), place)
        replaced.update(dict.fromkeys(step.replaces, place))
    return sorted(places, key=places.__getitem__, reverse=True)


def _greedy(steps: Sequence[Work], nbytes: Sequence[int], kept: frozenset[int], turn: int) -> list[int]:
    """Of steps that add the same, the first by number times `turn`."""
    readers: dict[int, set[int]] = {}
    replacers: dict[int, list[int]] = {}
    for number, step in enumerate(steps):
        for value in step.reads:
            readers.setdefault(value, set()).add(number)
        for value in step.replaces:
            replacers.setdefault(value, []).append(number)
    writer = {value: number for number, step in enumerate(steps) for value in step.writes}
    missing = [len({writer[value] for value in step.reads if value in writer}) for step in steps]
    # The rank of each step that can run, and the steps by rank. A rank only ever falls, so an entry of the
    # queue that is not the step's rank any more has another before it.
    ranks: dict[int, tuple[bool, int, int]] = {}
    queue: list[tuple[tuple[bool, int, int], int]] = []

    def enter(number: int) -> None:
        waits = any(readers[value] - {number} for value in steps[number].replaces if value in readers)
        rank = waits, _added(number, steps, nbytes, kept, readers), turn * number
        if ranks.get(number) != rank:
            ranks[number] = rank
            heapq.heappush(queue, (rank, number))

    for number, count in enumerate(missing):
        if not count:
            enter(number)
    order: list[int] = []
    while queue:
        rank, best = heapq.heappop(queue)
        if ranks.get(best) != rank:
            continue
        del ranks[best]
        order.append(best)
        followers = {number for value in steps[best].writes for number in readers.get(value, ())}
        changed: set[int] = set()
        for value in steps[best].reads:
            readers[value].discard(best)
            if len(readers[value]) <= 1:
                changed.update(readers[value], replacers.get(value, ()))
        for number in changed & ranks.keys():
            enter(number)
        for number in followers:
            missing[number] -= 1
            if not missing[number]:
                enter(number)
    return order


def _added(
    number: int,
    steps: Sequence[Work],
    nbytes: Sequence[int],
    kept: frozenset[int],
    readers: dict[int, set[int]],
) -> int:
    """The bytes that a step adds to what is live, less those that nothing needs after it."""
    step = steps[number]
    freed = sum(nbytes[v] for v in set(step.reads) if v not in kept and readers[v] == {number})
    return sum(nbytes[value] for value in step.writes if value not in kept) - freed


def _peak(order: Sequence[int], steps: Sequence[Work], nbytes: Sequence[int], kept: frozenset[int]) -> int:
    last = {value: position for position, number in enumerate(order) for value in steps[number].reads}
    live = peak = 0
    apart = 0  # bytes of results that cannot take over the memory of what they replace
    for position, number in enumerate(order):
        step = steps[number]
        apart += sum(nbytes[value] for value in step.replaces if last.get(value, position) > position)
        live += sum(nbytes[value] for value in step.writes if value not in kept)
        peak = max(peak, live)
        ends = {value for value in step.reads if last[value] == position} | {
            value for value in step.writes if value not in last
        }
        live -= sum(nbytes[value] for value in ends if value not in kept)
    return peak + apart
