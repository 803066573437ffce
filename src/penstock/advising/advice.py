"""One piece of advice, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Advice:
    """A flaw that a profile shows, and what to do about it."""

    flaw: str  # a short name that stays the same, such as "small-batches"
    title: str
    evidence: str  # what was counted or measured
    where: str  # file:line of the user's code, or "" where no line is to blame
    change: str
    gain: str  # what to expect of the change, in words
    seconds: float | None  # the same over the whole profile, where it is time
    nbytes: int | None  # the same, where it is memory
