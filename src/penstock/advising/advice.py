"""A piece of advice, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Advice:
    """A flaw that a profile shows, and what to do about it.

    >>> advice = ps.Advice("small-batches", "Larger batches", "9 launches", "", "batch=64", "2x", 0.5, None)
    >>> advice.flaw, advice.seconds
    ('small-batches', 0.5)
    """

    flaw: str  # a short name that stays the same, such as "small-batches"
    title: str
    evidence: str  # what was counted or measured
    where: str  # file:line of the user's code, or "" if no line is responsible
    change: str
    gain: str  # the expected effect of the change
    seconds: float | None  # the gain over the whole profile, if it is time
    nbytes: int | None  # the gain, if it is memory
