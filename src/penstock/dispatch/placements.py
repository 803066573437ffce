"""Placements of a program, and the seconds that it takes there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.execution.structure import Structure
from penstock.graph.node import Primitive
from penstock.kernels.source import digest
from penstock.runtime import Device


@dataclass(frozen=True)
class Placement:
    """Where a program runs: on `first`, or its first `count` operations there and the rest on `second`."""

    first: Device
    second: Device | None = None
    count: int = 0

    @property
    def name(self) -> str:
        """A description of the placement, which is also its key in the tuning cache."""
        if self.second is None:
            return self.first.name
        return f"{self.first.name} for {self.count} operations, then {self.second.name}"

    @classmethod
    def parsed(cls, name: str, members: Sequence[Device]) -> Placement | None:
        """The placement that a name describes; None if it is no cut between these devices."""
        match = re.fullmatch(r"(.+) for (\d{1,9}) operations, then (.+)", name)
        devices = {member.name: member for member in members}
        if match is None or match[1] not in devices or match[3] not in devices:
            return None
        return cls(devices[match[1]], devices[match[3]], int(match[2]))


@dataclass
class Candidate:
    """A placement with the seconds that it takes, without moving its inputs."""

    placement: Placement
    estimated: float
    moved: float = 0.0  # of a cut: the part of `estimated` for moving values between the devices
    measured: float | None = None

    @property
    def seconds(self) -> float:
        """The measured time, or else the estimate."""
        return self.estimated if self.measured is None else self.measured


def structure_digest(structure: Structure, aliases: Mapping[int, int]) -> str | None:
    """The key of a structure in the tuning cache, the same in every process; None if there is none."""
    key: Any = structure.key.parts
    # A part of the key is a primitive with its attributes, or the shape and dtype of an input.
    named = [(part[0].name, *part[1:]) if isinstance(part[0], Primitive) else part for part in key[0]]
    text = repr((named, key[1], sorted(aliases.items())))
    return None if " at 0x" in text else f"placed {digest(text)}"
