"""The order of steps: among those that can run, the one that adds the least to what is live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Work(NamedTuple):
    """A step: the values that it reads and writes, by number."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    replaces: tuple[int, ...] = ()  # given values whose memory its results take, if nothing reads them later


def ordered(steps: Sequence[Work], nbytes: Sequence[int], kept: frozenset[int]) -> list[int]:
    """The steps in an order that needs little memory, each after those that write what it reads.

    The given order has to be a possible one, and stays if it needs no more. What is in `kept` is never freed.
    A step that replaces a value comes after the other readers of it, where that can be: a result that cannot
    take over its memory needs memory of its own.
    """
    # Sums of gradients begin with the last part, so of steps that add the same the later may be better.
    orders = [list(range(len(steps))), *(_greedy(steps, nbytes, kept, turn) for turn in (1, -1))]
    return min(orders, key=lambda order: _peak(order, steps, nbytes, kept))


def _greedy(steps: Sequence[Work], nbytes: Sequence[int], kept: frozenset[int], turn: int) -> list[int]:
    """Of steps that add the same, the first by number times `turn`."""
    readers: dict[int, set[int]] = {}
    for number, step in enumerate(steps):
        for value in step.reads:
            readers.setdefault(value, set()).add(number)
    writer = {value: number for number, step in enumerate(steps) for value in step.writes}
    missing = [len({writer[value] for value in step.reads if value in writer}) for step in steps]
    ready = {number for number, count in enumerate(missing) if not count}
    order: list[int] = []
    while ready:
        best = min(
            ready,
            key=lambda number: (
                any(readers[value] - {number} for value in steps[number].replaces if value in readers),
                _added(number, steps, nbytes, kept, readers),
                turn * number,
            ),
        )
        ready.remove(best)
        order.append(best)
        followers = {number for value in steps[best].writes for number in readers.get(value, ())}
        for value in steps[best].reads:
            readers[value].discard(best)
        for number in followers:
            missing[number] -= 1
            if not missing[number]:
                ready.add(number)
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
