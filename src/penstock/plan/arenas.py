"""A single arena, or several where it would exceed the device's largest allocation.

Each value goes into the first arena that has room for it during its lifetime; then each arena is planned by
itself. A value that exceeds the size of an arena is at the start of an arena, alone while it is live. It
shares that arena only with values that exceed the size by the same factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.plan.arena import Plan, Value, lower_bound, plan

_FULL = (0.95, 0.9, 0.8, 0.6)  # shares of an arena that live values may take, since a plan needs some more


@dataclass(frozen=True)
class ArenaPlan(Plan):
    """The offset of each value in its arena; the bytes and their lower bound are those of all arenas."""

    arena_of: tuple[int, ...]  # the number of its arena, for each value in the given order
    plans: tuple[Plan, ...]  # of every arena


def plan_arenas(values: Sequence[Value], alignment: int, most: int, largest: int | None = None) -> ArenaPlan:
    """Plans for arenas of at most `most` bytes, unless a single value has more.

    Raises ValueError where a value has more than `largest` bytes, by default `most`.
    """
    sizes = [-(-value.nbytes // alignment) * alignment for value in values]
    least = lower_bound(values, alignment) if sum(sizes) > most else 0
    if least <= most:
        whole = plan(values, alignment)
        if whole.arena_bytes <= most:
            return ArenaPlan(**vars(whole), arena_of=(0,) * len(values), plans=(whole,))
    if max(sizes) > most and max(value.nbytes for value in values) > (largest or 0):
        raise ValueError(f"a value has {max(sizes)} bytes, and an arena may have {largest or most}")
    small = [at for at, size in enumerate(sizes) if size <= most]
    arena_of, offsets = [0] * len(values), [0] * len(values)
    plans = [Plan((), 0, 0)]
    if small:
        chosen, plans = _plan_small(_renumbered(values, small), alignment, most)
        placed = [0] * len(plans)
        for at, arena in zip(small, chosen, strict=True):
            arena_of[at], offsets[at] = arena, plans[arena].offsets[placed[arena]]
            placed[arena] += 1
    for sharing in _one_at_a_time(values, sizes, most):
        for at in sharing:
            arena_of[at] = len(plans)
        nbytes = max(values[at].nbytes for at in sharing)
        plans.append(Plan((0,) * len(sharing), nbytes, nbytes))
    total = sum(arena.arena_bytes for arena in plans)
    return ArenaPlan(tuple(offsets), total, least, tuple(arena_of), tuple(plans))


def least_bytes(values: Sequence[Value], alignment: int, most: int) -> int:
    """Bytes below which arenas of at most `most` bytes are not worth a plan."""
    least = lower_bound(values, alignment)
    if least <= most or max(value.nbytes for value in values) > most:
        return least
    arena_of = _split(values, alignment, max(int(most * _FULL[0]), _largest(values, alignment)))
    arenas = ([at for at, arena in enumerate(arena_of) if arena == number] for number in {*arena_of})
    return sum(lower_bound(_renumbered(values, some), alignment) for some in arenas)


def _largest(values: Sequence[Value], alignment: int) -> int:
    return max(-(-value.nbytes // alignment) * alignment for value in values)


def _plan_small(values: Sequence[Value], alignment: int, most: int) -> tuple[list[int], list[Plan]]:
    """The arena of each value, and the plans of the arenas; no value is larger than an arena."""
    largest = _largest(values, alignment)
    for share in _FULL:
        arena_of = _split(values, alignment, max(int(most * share), largest))
        plans: list[Plan] = []
        for arena in range(max(arena_of) + 1):
            plans.append(_plan(values, arena_of, arena, alignment))
            if plans[-1].arena_bytes > most:
                break
        else:
            return arena_of, plans
    arena_of = list(range(len(values)))  # an arena for each value
    return arena_of, [_plan(values, arena_of, arena, alignment) for arena in arena_of]


def _one_at_a_time(values: Sequence[Value], sizes: Sequence[int], most: int) -> list[list[int]]:
    """The indices of values that are larger than an arena, by the arena that they get."""
    result: list[list[int]] = []
    for at in sorted(range(len(values)), key=lambda number: values[number].born):
        value, times = values[at], -(-sizes[at] // most)
        if times <= 1:
            continue
        for arena in result:
            last = arena[-1]
            free = values[last].dies < value.born
            aliased = last in value.may_alias and sizes[last] >= sizes[at] and values[last].born < value.born
            if -(-sizes[last] // most) == times and (free or aliased):
                arena.append(at)
                break
        else:
            result.append([at])
    return result


def _split(values: Sequence[Value], alignment: int, room: int) -> list[int]:
    """The arena of each value, so that at most `room` bytes are live in any; in order of birth."""
    steps = 1 + max(value.dies for value in values)
    loads: list[npt.NDArray[np.int64]] = []
    result = [0] * len(values)
    for at in sorted(range(len(values)), key=lambda number: values[number].born):
        value = values[at]
        size = -(-value.nbytes // alignment) * alignment
        life = slice(value.born, value.dies + 1)
        # A value should be in the arena of a value whose memory it may take over.
        first = [result[number] for number in value.may_alias]
        fitting = (arena for arena in (*first, *range(len(loads))) if loads[arena][life].max() + size <= room)
        arena = next(fitting, len(loads))
        if arena == len(loads):
            loads.append(np.zeros(steps, np.int64))
        loads[arena][life] += size
        result[at] = arena
    return result


def _plan(values: Sequence[Value], arena_of: Sequence[int], arena: int, alignment: int) -> Plan:
    """The plan of an arena's values."""
    return plan(_renumbered(values, [at for at, other in enumerate(arena_of) if other == arena]), alignment)


def _renumbered(values: Sequence[Value], some: Sequence[int]) -> list[Value]:
    """Some of the values; aliases are restricted to these."""
    number = {at: new for new, at in enumerate(some)}
    return [
        values[at]._replace(may_alias=tuple(number[old] for old in values[at].may_alias if old in number))
        for at in some
    ]
