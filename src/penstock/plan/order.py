"""The order of steps: the next step is the ready step that adds the fewest live bytes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class Work(NamedTuple):
    """A step: the indices of the values that it reads and writes."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    replaces: tuple[int, ...] = ()  # inputs whose memory its results take, if no later step reads them


_Position = tuple[int, ...]


def ordered(steps: Sequence[Work], nbytes: Sequence[int], kept: frozenset[int]) -> list[int]:
    """The steps in an order that needs little memory, each after those that write what it reads.

    The given order has to be valid, and is kept if no other needs less. Values in `kept` are never freed. A
    step that replaces a value comes after all other readers of that value if possible: otherwise its result
    cannot take over the memory, and needs memory of its own.
    """
    return min(_orders(steps, nbytes, kept), key=lambda order: _peak(order, steps, nbytes, kept))


def least_deferred(steps: Sequence[Work], nbytes: Sequence[int], kept: frozenset[int]) -> list[int]:
    """The order that needs the least memory once steps are `deferred`; see `ordered`."""
    orders = (deferred(order, steps, nbytes, kept) for order in _orders(steps, nbytes, kept))
    return min(orders, key=lambda order: _peak(order, steps, nbytes, kept))


def _orders(steps: Sequence[Work], nbytes: Sequence[int], kept: frozenset[int]) -> list[list[int]]:
    # Sums of gradients begin with the last part, so among equal steps the later may be better.
    return [list(range(len(steps))), *(_greedy(steps, nbytes, kept, turn) for turn in (1, -1))]


def deferred(
    order: Sequence[int], steps: Sequence[Work], nbytes: Sequence[int], kept: frozenset[int]
) -> list[int]:
    """The same order, with steps moved just before the first reader of their results if that saves memory.

    It does for steps whose inputs are small or live longer anyway, such as the first steps of a region that
    is recomputed for the gradient: only their readers determine when they have to run.
    """
    # Steps are visited from the last to the first, and later positions are smaller. The position of a step
    # that is moved before another step has the other's position as its prefix.
    first: dict[int, _Position] = {}  # of the first reader of a value, so far
    last: dict[int, _Position] = {}
    replaced: dict[int, _Position] = {}
    positions: dict[int, _Position] = {}
    for number in reversed(order):
        step = steps[number]
        after = [first[value] for value in step.writes if value in first]
        after += [replaced[value] for value in step.reads if value in replaced]
        position: _Position = (len(positions),)
        if after:
            before = (*max(after), -len(positions))
            born = sum(nbytes[value] for value in step.writes if value not in kept)
            reads = set(step.reads) - kept
            longer = (value for value in reads if last.get(value, position) > before)
            if born >= sum(nbytes[value] for value in longer):
                position = before
        positions[number] = position
        for value in step.reads:
            first[value] = max(first.get(value, position), position)
            last[value] = min(last.get(value, position), position)
        replaced.update(dict.fromkeys(step.replaces, position))
    return sorted(positions, key=positions.__getitem__, reverse=True)


def _greedy(steps: Sequence[Work], nbytes: Sequence[int], kept: frozenset[int], turn: int) -> list[int]:
    """A greedy order; of equal steps the first is taken, or the last if `turn` is -1."""
    readers: dict[int, set[int]] = {}
    replacers: dict[int, list[int]] = {}
    for number, step in enumerate(steps):
        for value in step.reads:
            readers.setdefault(value, set()).add(number)
        for value in step.replaces:
            replacers.setdefault(value, []).append(number)
    writer = {value: number for number, step in enumerate(steps) for value in step.writes}
    missing = [len({writer[value] for value in step.reads if value in writer}) for step in steps]
    # The rank of each ready step, and a queue by rank. Ranks only fall, so an outdated entry of the queue
    # comes after the step's current entry, and is skipped.
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
    """The bytes that a step writes, less those of its inputs that no later step reads."""
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
