"""Exchanges between ranks start early, and are waited for late, so that the device computes meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.plan.order import Work


def overlapped(
    order: Sequence[int],
    steps: Sequence[Work],
    kept: frozenset[int],
    starts: Collection[int],
    fetches: Collection[int],
    waits: Collection[int],
) -> list[int]:
    """The same steps in another order; `kept` are values that are no temporaries.

    What is fetched comes in time for its use (see `in_time`).
    """
    fetched = {value for number in fetches for value in steps[number].writes}
    late = {number for number in waits if fetched.isdisjoint(steps[number].reads)}
    order = waits_late(starts_early(order, steps, kept, starts), steps, late)
    return in_time(order, steps, fetches, waits)


def starts_early(
    order: Sequence[int], steps: Sequence[Work], kept: frozenset[int], starts: Collection[int]
) -> list[int]:
    """The same order, but each start comes as soon as all is there that others need too.

    The steps whose results only it needs, such as the gradients that it sends, come just before it.
    """
    writer = {value: number for number in order for value in steps[number].writes}
    readers: dict[int, set[int]] = {}
    for number in order:
        for value in steps[number].reads:
            readers.setdefault(value, set()).add(number)
    # The place of a step; and the number of the start that it was moved behind that place for, if it was.
    places = {number: (at, 0, at) for at, number in enumerate(order)}
    started = 0
    for at, start in enumerate(order):
        if start not in starts:
            continue
        own = {start}
        for number in reversed(order[:at]):
            results = () if number in starts else steps[number].writes
            if results and all(value not in kept and readers.get(value, {-1}) <= own for value in results):
                own.add(number)
        needed = {writer[value] for number in own for value in steps[number].reads if value in writer} - own
        after = max((places[number][0] for number in needed), default=-1)
        started += 1
        for number in own:
            places[number] = min(places[number], (after, started, places[number][2]))  # never later
    return sorted(order, key=places.__getitem__)


def waits_late(order: Sequence[int], steps: Sequence[Work], waits: Collection[int]) -> list[int]:
    """The same order, but what depends on no wait comes before what depends on one, and so on.

    Waits come in the order of their starts, and what needs no later one comes before that.
    """
    places = {value: at for at, number in enumerate(order) for value in steps[number].writes}
    # How many waits, one after the other, come before a value, and where the last of them was started.
    written: dict[int, tuple[int, int]] = {}
    keys: dict[int, tuple[int, int]] = {}
    for number in order:
        reads = steps[number].reads
        key = max((written.get(value, (0, -1)) for value in reads), default=(0, -1))
        if number in waits:
            key = key[0] + 1, max((places.get(value, -1) for value in reads), default=-1)
        keys[number] = key
        written.update(dict.fromkeys(steps[number].writes, key))
    return sorted(order, key=keys.__getitem__)


def in_time(
    order: Sequence[int], steps: Sequence[Work], fetches: Collection[int], waits: Collection[int]
) -> list[int]:
    """The same order, but each fetch starts just before the one before it is needed, and is waited for late.

    So there is time for it, and few results are there at once: those in use, and the next.
    """
    if not fetches:
        return list(order)
    place = {number: at for at, number in enumerate(order)}
    readers: dict[int, list[int]] = {}
    for number in order:
        for value in steps[number].reads:
            readers.setdefault(value, []).append(number)
    # The step that each comes before; and of what comes before the same step, fetches are first.
    key = {number: (at, 2) for number, at in place.items()}
    needed = -1  # the step that needs what was fetched before
    for fetch in order:
        if fetch not in fetches:
            continue
        key[fetch] = needed, 0
        for wait in (number for value in steps[fetch].writes for number in readers.get(value, ())):
            if wait in waits:
                uses = [place[number] for value in steps[wait].writes for number in readers.get(value, ())]
                needed = min(uses, default=place[wait])
                key[wait] = needed, 1
    for number in reversed(order):  # nothing comes after what needs it
        for value in steps[number].writes:
            for reader in readers.get(value, ()):
                key[number] = min(key[number], key[reader])
    return sorted(order, key=key.__getitem__)
