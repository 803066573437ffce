"""Launches and copies that are recorded again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.memory.buffer import Buffer


class CopyEnds(NamedTuple):
    """Where a copy of a program goes and comes from: buffers with offsets. One of them is pinned memory."""

    target: Buffer
    to: int
    source: Buffer
    start: int

    @property
    def places(self) -> tuple[int, ...]:
        """Where both lie, of all memory that there ever was."""
        return (*self.target.place, self.to, *self.source.place, self.start)

    def native(self, nbytes: int) -> tuple[Any, Any]:
        """Both as a driver takes them."""
        target, source = self.target, self.source
        return (
            target.driver.view(target.memory, target.offset + self.to, nbytes),
            source.driver.view(source.memory, source.offset + self.start, nbytes),
        )


class Program:
    """Launches whose arguments are set once: recording them again costs little beside the driver's calls.

    Some may be copies to pinned memory or from there. A launch follows each copy from there, however
    indirectly; `tail` is the last copy to the host that none follows, or -1.
    """

    __slots__ = ("__weakref__", "after", "bound", "buffers", "commands", "copied", "graph", "replays", "tail")

    def __init__(
        self,
        commands: list[Any],
        buffers: tuple[Buffer, ...],
        bound: Sequence[Any],
        after: Sequence[Sequence[int]],
    ) -> None:
        self.commands = commands  # launches, and copies with their bytes
        self.after = after  # for each launch, those that must have ended
        self.buffers = buffers  # all that the launches touch
        self.bound = list(bound)
        self.copied: dict[int, tuple[int, ...]] = {}  # by number, between which places the graph copies
        self.graph: Any = None  # the launches as one, where the driver has such and that pays
        self.replays = 0
        self.tail = self._tail()

    def _tail(self) -> int:
        waited_for = {earlier for before in self.after for earlier in before}
        copies = [number for number, (kernel, *_) in enumerate(self.commands) if kernel == "copy"]
        return max((number for number in copies if number not in waited_for), default=-1)

    def __repr__(self) -> str:
        return f"<program of {len(self.commands)} launches, from {self.commands[0][0]!r} on>"
