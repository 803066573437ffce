"""Where a program may run, and the seconds that it takes there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.runtime import Device


@dataclass(frozen=True)
class Placement:
    """Where a program runs: on one device, or up to an operation on one and from there on another."""

    first: Device
    second: Device | None = None
    place: int = 0  # so many operations are the first device's

    @property
    def name(self) -> str:
        """The placement in words, which is also its key in the tuning cache."""
        if self.second is None:
            return self.first.name
        return f"{self.first.name} for {self.place} operations, then {self.second.name}"

    @classmethod
    def parsed(cls, name: str, members: Sequence[Device]) -> Placement | None:
        """The cut placement of a name; None where the name is none of these devices."""
        match = re.fullmatch(r"(.+) for (\d{1,9}) operations, then (.+)", name)
        devices = {member.name: member for member in members}
        if match is None or match[1] not in devices or match[3] not in devices:
            return None
        return cls(devices[match[1]], devices[match[3]], int(match[2]))


@dataclass
class Candidate:
    """A placement with the seconds that it takes, once its inputs are there."""

    placement: Placement
    estimated: float
    moved: float = 0.0  # of a cut: the part of them in which values go from the one to the other
    measured: float | None = None

    @property
    def seconds(self) -> float:
        """The measured time, or else the estimate."""
        return self.estimated if self.measured is None else self.measured
