"""Who is told what a device does, while a profile is on, and in which words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from penstock.drivers.driver import Grid, Kernel

# What is remembered of a command, cheap to make: kernel or verb, grid or bytes, group, arguments. Of buffers
# only the sizes are remembered, since a command must not keep memory from its next use.
Launch = tuple[Kernel, Grid, Grid, Sequence[Any]]
Command = Launch | tuple[str, int, None, Sequence[Any]]
Ran = tuple[Command, tuple[float, float] | None]  # with its begin and end, where those are known


class Run(NamedTuple):
    """Something that was computed, as a recorder is told of it."""

    how: Literal["jit", "program", "numpy"]  # the last: by the host, node by node
    program: Any  # what was run; None where the host computed
    fresh: bool  # whether this device computed nothing of that structure before
    build_seconds: float  # the part of the time in which programs were built
    start: float
    end: float
    nodes: Sequence[Any]  # what was recorded for it, its inputs too; empty for a jitted function
    wanted: Sequence[Any]  # those of them that were asked for


class Recorder(Protocol):
    """Who is told, while a profile is on, what was done. Seconds are those of `perf_counter`."""

    def finished(self, queue: str, commands: Sequence[Ran]) -> None:
        """Commands of a queue are done."""
        ...

    def waited(self, where: str, why: str, start: float, end: float) -> None:
        """The host waited for the device, because of a line of the user's code."""
        ...

    def copied_by_host(self, verb: str, nbytes: int, start: float, end: float) -> None:
        """The host copied something itself, in memory that it shares with the device."""
        ...

    def computed_by_host(self, what: str, start: float, end: float) -> None:
        """The host computed something itself, for which a kernel would not have paid, or there is none."""
        ...

    def computed(self, run: Run) -> None:
        """A line of the user's code had something computed."""
        ...

    def sent(self, array: Any, start: float, end: float) -> None:
        """A line of the user's code made a tensor of an array."""
        ...

    def fetched(self, array: Any) -> None:
        """A line of the user's code has got the values of a tensor."""
        ...
