"""What the plan of a jitted function depends on under a limit, beside its graph."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from penstock.graph.node import Node
from penstock.memory.buffer import Buffer
from penstock.runtime import Device

if TYPE_CHECKING:
    from penstock.execution.executable import Executable


class Build(Protocol):
    """Builds the program of a function within the present limit."""

    def __call__(self, apart: Collection[int] = (), given: Sequence[Node] | None = None) -> Executable:
        """The program.

        `apart`: outputs that cannot be written over inputs, as somebody holds these. `given`: arguments and
        constants; None: those of the call that was captured.
        """
        ...


class LastResults:
    """The results of the last call of a function, as long as somebody holds them."""

    def __init__(self) -> None:
        self.buffers: list[weakref.ref[Buffer]] = []  # set by each replay, for which a method takes long

    def nbytes(self, device: Device) -> int:
        """What they take on a device."""
        live = {buffer for reference in self.buffers if (buffer := reference()) is not None}
        own = [buffer for buffer in live if device.holds(buffer) and buffer.whole is buffer]
        return sum(buffer.memory.nbytes for buffer in own if not buffer.memory.pinned)
