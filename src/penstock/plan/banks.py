"""One arena, or where a device gives no memory so large, several.

Each value goes into the first arena that has room for it for as long as it lives. Then each arena is planned
by itself. A value that is larger than an arena should be has one to itself while it lives, from the start of
it, and shares it only with others that are as many times too large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.plan.arena import Plan, Value, plan

_FULL = (0.95, 0.9, 0.8, 0.6)  # shares of an arena that live values may take: a plan needs some more


@dataclass(frozen=True)
class Banks:
    """Where each value lies, and the plan of every arena."""

    bank_of: tuple[int, ...]  # the number of its arena, for each value in the given order
    offsets: tuple[int, ...]  # bytes in that arena
    plans: tuple[Plan, ...]
    lower_bound: int  # the most bytes that are live at one step

    @property
    def arena_bytes(self) -> int:
        """The bytes of all arenas."""
        return sum(one.arena_bytes for one in self.plans)

    @property
    def gap(self) -> float:
        """The share by which the arenas exceed the lower bound."""
        return (self.arena_bytes - self.lower_bound) / max(self.lower_bound, 1)


def banks(values: Sequence[Value], alignment: int, most: int, largest: int | None = None) -> Banks:
    """Plans for arenas of at most `most` bytes, unless a single value has more.

    Raises ValueError where one has more than `largest` bytes, which is `most` if it is not given.
    """
    whole = plan(values, alignment)
    if whole.arena_bytes <= most:
        return Banks((0,) * len(values), whole.offsets, (whole,), whole.lower_bound)
    sizes = [-(-value.nbytes // alignment) * alignment for value in values]
    if max(sizes) > most and max(value.nbytes for value in values) > (largest or 0):
        raise ValueError(f"a value has {max(sizes)} bytes, and an arena may have {largest or most}")
    small = [at for at, size in enumerate(sizes) if size <= most]
    bank_of, offsets = [0] * len(values), [0] * len(values)
    plans = [Plan((), 0, 0)]
    if small:
        found, plans = _banks_of_small(_renumbered(values, small), alignment, most)
        places = [0] * len(plans)
        for at, bank in zip(small, found, strict=True):
            bank_of[at], offsets[at] = bank, plans[bank].offsets[places[bank]]
            places[bank] += 1
    for turns in _one_at_a_time(values, sizes, most):
        for at in turns:
            bank_of[at] = len(plans)
        nbytes = max(values[at].nbytes for at in turns)
        plans.append(Plan((0,) * len(turns), nbytes, nbytes))
    return Banks(tuple(bank_of), tuple(offsets), tuple(plans), whole.lower_bound)


def _banks_of_small(values: Sequence[Value], alignment: int, most: int) -> tuple[list[int], list[Plan]]:
    """The arena of each value, of which none is too large, and the plans of the arenas."""
    largest = max(-(-value.nbytes // alignment) * alignment for value in values)
    for share in _FULL:
        found = _split(values, alignment, max(int(most * share), largest))
        plans = [_plan(values, found, bank, alignment) for bank in range(max(found) + 1)]
        if all(one.arena_bytes <= most for one in plans):
            return found, plans
    found = list(range(len(values)))  # every value has as much as it needs for itself
    return found, [_plan(values, found, bank, alignment) for bank in found]


def _one_at_a_time(values: Sequence[Value], sizes: Sequence[int], most: int) -> list[list[int]]:
    """Values that are too large, by number, for each arena of theirs."""
    result: list[list[int]] = []
    for at in sorted(range(len(values)), key=lambda one: values[one].born):
        value, times = values[at], -(-sizes[at] // most)
        if times <= 1:
            continue
        for bank in result:
            last = bank[-1]
            free = values[last].dies < value.born
            taken = last in value.over and sizes[last] >= sizes[at] and values[last].born < value.born
            if -(-sizes[last] // most) == times and (free or taken):
                bank.append(at)
                break
        else:
            result.append([at])
    return result


def _split(values: Sequence[Value], alignment: int, room: int) -> list[int]:
    """The arena of each value, so that no more than `room` bytes are live in one; in order of birth."""
    steps = 1 + max(value.dies for value in values)
    loads: list[npt.NDArray[np.int64]] = []
    result = [0] * len(values)
    for at in sorted(range(len(values)), key=lambda one: values[one].born):
        value = values[at]
        size = -(-value.nbytes // alignment) * alignment
        life = slice(value.born, value.dies + 1)
        # Where it may take the place of another value, that should be in the same arena.
        first = [result[one] for one in value.over]
        choices = (bank for bank in (*first, *range(len(loads))) if loads[bank][life].max() + size <= room)
        bank = next(choices, len(loads))
        if bank == len(loads):
            loads.append(np.zeros(steps, np.int64))
        loads[bank][life] += size
        result[at] = bank
    return result


def _plan(values: Sequence[Value], found: Sequence[int], bank: int, alignment: int) -> Plan:
    """The plan of one arena's values."""
    return plan(_renumbered(values, [at for at, one in enumerate(found) if one == bank]), alignment)


def _renumbered(values: Sequence[Value], some: Sequence[int]) -> list[Value]:
    """Some of the values, by themselves."""
    number = {at: new for new, at in enumerate(some)}
    return [
        values[at]._replace(over=tuple(number[one] for one in values[at].over if one in number))
        for at in some
    ]
