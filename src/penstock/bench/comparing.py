"""Comparison of two runs: what got slower or faster beyond noise, and what only one of them has."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.bench.results import Measured
from penstock.bench.statistics import Interval, Verdict, ratio_of_runs, verdict


@dataclass(frozen=True)
class Change:
    """A case that both runs have."""

    label: str
    before: Interval  # seconds
    now: Interval
    ratio: Interval  # the time now over that before
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """All cases of two runs on a device."""

    changes: list[Change]
    only_before: list[str]  # labels of cases
    only_now: list[str]

    @property
    def slower(self) -> list[Change]:
        """The cases that got slower beyond noise."""
        return [change for change in self.changes if change.verdict == "slower"]


def compare(before: list[Measured], now: list[Measured]) -> Comparison:
    """The cases of a device in two runs, matched by name and size."""
    old, new = ({case.label: case for case in measured} for measured in (before, now))
    changes = []
    for label in new:
        if label in old:
            ratio = ratio_of_runs(new[label].seconds, old[label].seconds)
            changes.append(Change(label, old[label].time, new[label].time, ratio, verdict(ratio)))
    return Comparison(
        changes,
        [label for label in old if label not in new],
        [label for label in new if label not in old],
    )
