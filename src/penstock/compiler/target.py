"""What a graph is compiled for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.drivers.driver import Capabilities
from penstock.fusion.groups import Group
from penstock.kernels.lower import Lowering, write
from penstock.kernels.source import digest


@dataclass(frozen=True)
class Target:
    """A device as the passes see it: what it can do, how its kernels are written, and a memory budget."""

    name: str  # for messages
    capabilities: Capabilities
    lower: Callable[[Group], Lowering | None]  # the kernels of a group; None where NumPy has to compute it
    budget: int | None = None  # bytes that temporaries may take; None: as many as they need
    fuses: bool = True  # False: each operation has a kernel of its own, which many programs share

    @classmethod
    def of(cls, capabilities: Capabilities, budget: int | None = None) -> Target:
        """A target without a device."""

        def lower(group: Group) -> Lowering | None:
            return write(group, capabilities, digest(repr(group.structure)))

        return cls(capabilities.description, capabilities, lower, budget)

    @property
    def gpu(self) -> bool:
        """Whether kernels are those of a GPU: many threads, each without a vector unit."""
        return self.capabilities.vector_width == 1
