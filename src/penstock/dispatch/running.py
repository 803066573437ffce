"""A placed program, on a device or in two parts on two devices, and how long it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from statistics import median
from time import perf_counter, sleep
from typing import Any

from penstock.dispatch.cutting import Parts
from penstock.dispatch.moving import Locations
from penstock.errors import OutOfDeviceMemory
from penstock.execution.executable import Executable
from penstock.graph.node import Node
from penstock.memory.buffer import Buffer
from penstock.runtime import Device

_ROUNDS = 4  # of all programs, unless that takes too long
_MOST_SECONDS = 1.0
_PAUSE = 5e-3  # seconds, so that the threads of the last program stop spinning
# In a round, after a run that may compile: at least so many runs and seconds, at most so many.
_TRIES, _TRY_SECONDS, _MOST_TRIES, _LONG_SECONDS = 4, 3e-3, 12, 0.3
_TRIED = "a placement is tried"  # why the host waits

Over = Mapping[int, int] | None
Wants = list[tuple[Device, list[int]]]  # devices, and the indices of the inputs that are needed there


class OnOne:
    """A program on a single device, which drops copies of values that it overwrites."""

    def __init__(self, locations: Locations, program: Executable) -> None:
        self._locations = locations
        self.programs = (program,)
        self._run = program.run
        self.devices = (program.device,)
        self.may_overwrite = program.may_overwrite

    def bring(self, held: Sequence[Node]) -> list[Buffer]:
        """The inputs, which are values of nodes, moved to the program's device."""
        return self._locations.bring(held, self.devices[0])

    def copied(self, held: Sequence[Node]) -> list[Buffer]:
        """The same, but the nodes hold their values where they were."""
        return [self._locations.copied(node.value, self.devices[0]) for node in held]

    def run(self, inputs: Sequence[Buffer], constants: Sequence[Any], over: Over = None) -> list[Buffer]:
        """See `Executable.run`."""
        if over and self._locations.kept:
            self._locations.forget([inputs[at] for at in over.values()])
        return self._run(inputs, constants, over)

    def explained(self) -> str:
        """Its steps."""
        return str(self.programs[0].schedule)


class InTwo:
    """A program in two parts, each on a device of its own. It overwrites no inputs."""

    def __init__(
        self,
        locations: Locations,
        first: Executable,
        second: Executable,
        parts: Parts,
        nodes: Sequence[Node],
        wants: Wants,
    ) -> None:
        """`nodes`: the outputs of both parts; `wants`: the inputs of each part."""
        self._locations = locations
        self._wants = wants
        self.programs = (first, second)
        self.devices = (first.device, second.device)
        self._crossing = [parts.heads.index(node) for node in parts.crossing]
        tails = [node for node in dict.fromkeys(nodes) if node not in parts.heads]
        self._results = [
            (0, parts.heads.index(node)) if node in parts.heads else (1, tails.index(node)) for node in nodes
        ]

    def bring(self, held: Sequence[Node]) -> list[Buffer]:
        """The inputs of the first part and those of the second, moved to their devices."""
        return [
            buffer
            for device, indices in self._wants
            for buffer in self._locations.bring([held[at] for at in indices], device)
        ]

    def copied(self, held: Sequence[Node]) -> list[Buffer]:
        """The same, but the nodes hold their values where they were."""
        return [
            self._locations.copied(held[at].value, device)
            for device, indices in self._wants
            for at in indices
        ]

    def may_overwrite(self, output: int, number: int) -> bool:
        """See `Executable.may_overwrite`."""
        return False

    def run(self, inputs: Sequence[Buffer], constants: Sequence[Any], over: Over = None) -> list[Buffer]:
        """Both parts; see `Executable.run`."""
        first, second = self.programs
        count = len(self._wants[0][1])
        heads = first.run(inputs[:count], constants)
        crossed = [self._locations.copied(heads[at], second.device) for at in self._crossing]
        tails = second.run([*inputs[count:], *crossed], constants)
        return [(tails if part else heads)[at] for part, at in self._results]

    def explained(self) -> str:
        """The steps of both parts."""
        parts = [f"on {program.device.name}:\n{program.schedule}" for program in self.programs]
        return "\n".join(parts)


def seconds_of(
    ways: Sequence[OnOne | InTwo], held: Sequence[Node], constants: Sequence[Any], members: Sequence[Device]
) -> list[float]:
    """How long the same program takes in several placements, with nothing else pending.

    Programs run on copies of the inputs, so no value changes or moves. The median counts, since other load on
    the machine slows devices down unequally. The time is infinite if there is not enough memory.
    """
    times: list[list[float]] = [[] for _ in ways]
    buffers = [node.value for node in held]
    shared = [buffer.shared for buffer in buffers]
    try:
        for member in members:
            member.stream.drain(_TRIED)
        for _ in range(_ROUNDS):
            if sum(map(sum, times)) > _MOST_SECONDS:
                break
            for way, taken in zip(ways, times, strict=True):
                sleep(_PAUSE)
                taken += _run_on_end(way, held, constants)
    finally:
        for buffer, flag in zip(buffers, shared, strict=True):
            buffer.shared = flag  # no copy uses its memory any more
    return [median(taken) for taken in times]


def _run_on_end(way: OnOne | InTwo, held: Sequence[Node], constants: Sequence[Any]) -> list[float]:
    """The times of successive runs, as in a loop of the user's.

    The first run may compile or wake threads, and is counted only if it takes long.
    """
    times: list[float] = []
    try:
        inputs = way.copied(held)
        while not _enough(times):
            start = perf_counter()
            way.run(inputs, constants)
            for device in way.devices:
                device.stream.drain(_TRIED)
            times.append(perf_counter() - start)
    except OutOfDeviceMemory:
        return [inf]
    return times[1:] or times


def _enough(times: Sequence[float]) -> bool:
    tries, total = len(times) - 1, sum(times[1:])
    often = tries >= _TRIES and total >= _TRY_SECONDS
    return often or tries >= _MOST_TRIES or sum(times) >= _LONG_SECONDS
