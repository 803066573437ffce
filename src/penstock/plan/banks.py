"""One arena, or where a device gives no memory so large, several.

Each value goes into the first arena that has room for it for as long as it lives. Then each arena is planned
by itself.
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


def banks(values: Sequence[Value], alignment: int, most: int) -> Banks:
    """Plans for arenas of at most `most` bytes. Raises ValueError where one value has more."""
    whole = plan(values, alignment)
    if whole.arena_bytes <= most:
        return Banks((0,) * len(values), whole.offsets, (whole,), whole.lower_bound)
    largest = max(-(-value.nbytes // alignment) * alignment for value in values)
    if largest > most:
        raise ValueError(f"a value has {largest} bytes, and an arena may have {most}")
    for share in _FULL:
        found = _split(values, alignment, max(int(most * share), largest))
        plans = [_plan(values, found, bank, alignment) for bank in range(max(found) + 1)]
        if all(one.arena_bytes <= most for one in plans):
            break
    else:  # every value has as much as it needs for itself
        found = list(range(len(values)))
        plans = [_plan(values, found, bank, alignment) for bank in found]
    offsets = [0] * len(values)
    for bank, one in enumerate(plans):
        for at, offset in zip(_inside(found, bank), one.offsets, strict=True):
            offsets[at] = offset
    return Banks(tuple(found), tuple(offsets), tuple(plans), whole.lower_bound)


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


def _inside(found: Sequence[int], bank: int) -> list[int]:
    return [at for at, one in enumerate(found) if one == bank]


def _plan(values: Sequence[Value], found: Sequence[int], bank: int, alignment: int) -> Plan:
    """The plan of one arena's values."""
    inside = _inside(found, bank)
    number = {at: new for new, at in enumerate(inside)}
    return plan(
        [
            values[at]._replace(over=tuple(number[one] for one in values[at].over if one in number))
            for at in inside
        ],
        alignment,
    )
