"""The interface of profiles to the stream: what they are notified of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from penstock.drivers.driver import Grid, Kernel

# A description of a command that is cheap to create: kernel or verb, grid or bytes, group, arguments. Of
# buffers it has only the sizes, since a command must not keep memory alive.
Launch = tuple[Kernel, Grid, Grid, Sequence[Any]]
Command = Launch | tuple[str, int, None, Sequence[Any]]
Ran = tuple[Command, tuple[float, float] | None]  # with its start and end, if those are known


class Run(NamedTuple):
    """A computation, as recorders are notified of it."""

    how: Literal["jit", "program", "numpy"]  # "numpy": by the host, node by node
    program: Any  # None if the host computed
    fresh: bool  # whether it is the first of its structure on this device
    build_seconds: float  # the part of the time in which programs were built
    start: float
    end: float
    nodes: Sequence[Any]  # the recorded nodes, including inputs; empty for a jitted function
    wanted: Sequence[Any]  # the nodes whose values were requested


class Recorder(Protocol):
    """Is notified of everything that a device does, while a profile is on. Seconds are of `perf_counter`."""

    def finished(self, queue: str, commands: Sequence[Ran]) -> None:
        """Commands of a queue are done."""
        ...

    def waited(self, where: str, why: str, start: float, end: float) -> None:
        """The host waited for the device, because of a line of the user's code."""
        ...

    def copied_by_host(self, verb: str, nbytes: int, start: float, end: float) -> None:
        """The host copied in memory that it shares with the device."""
        ...

    def computed_by_host(self, what: str, start: float, end: float) -> None:
        """The host computed something for which there is no kernel, or a kernel would not have paid."""
        ...

    def computed(self, run: Run) -> None:
        """A line of the user's code caused a computation."""
        ...

    def sent(self, array: Any, start: float, end: float) -> None:
        """A line of the user's code made a tensor from an array."""
        ...

    def fetched(self, array: Any) -> None:
        """A line of the user's code read the values of a tensor."""
        ...
