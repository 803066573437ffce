"""Waits for other ranks come after all that needs none of their results."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.plan.order import Work


def waits_late(order: Sequence[int], steps: Sequence[Work], waits: Collection[int]) -> list[int]:
    """The same order, but what depends on no wait comes before what depends on one, and so on."""
    written: dict[int, int] = {}  # how many waits, one after the other, come before a value
    phases: dict[int, int] = {}
    for number in order:
        phase = max((written.get(value, 0) for value in steps[number].reads), default=0)
        phases[number] = phase + (number in waits)
        written.update(dict.fromkeys(steps[number].writes, phases[number]))
    return sorted(order, key=phases.__getitem__)
