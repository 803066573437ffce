"""What a graph is compiled for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from penstock.drivers.driver import Capabilities
from penstock.drivers.rates import StepRates
from penstock.fusion.groups import Group
from penstock.kernels.lower import Lowering, write
from penstock.kernels.source import digest


@dataclass(frozen=True)
class Budget:
    """The memory of a device, in bytes."""

    limit: int  # for everything
    held: int = 0  # by what is there before a run, with its inputs
    results: int = 1  # copies of the results: a caller may still hold those of the last call
    state: frozenset[int] = frozenset()  # inputs that may lie in the memory of the host between runs
    freed: Callable[[Collection[int]], int] = lambda hosted: 0  # how much of `held` is free if some do
    # Results that are state: the values before are held or gone, so they count once. They may lie there too.
    state_results: frozenset[int] = frozenset()
    last: int = 0  # of `held`, bytes of results of the last call, which somebody still holds
    # Inputs that share an allocation with others: a value of their own after a run frees nothing of it.
    parts: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Target:
    """A device as the passes see it: what it can do, how its kernels are written, and a memory budget."""

    name: str  # for messages
    capabilities: Capabilities
    lower: Callable[[Group], Lowering | None]  # the kernels of a group; None where NumPy has to compute it
    budget: Budget | None = None  # None: as much as a run needs
    # If given, each operation has a kernel of its own, which many programs share. `lower` gives those of the
    # program whose sums are added up in the same order.
    apart: Callable[[Group], Lowering | None] | None = None
    # How many bytes kernels could move while one byte crosses to the host or back; asked for where a plan is
    # too large. None: the device's memory is the host's, or copies do not run beside its kernels.
    link_cost: Callable[[], float | None] = lambda: None

    @classmethod
    def of(
        cls, capabilities: Capabilities, budget: Budget | None = None, link_cost: float | None = None
    ) -> Target:
        """A target without a device."""

        def lower(group: Group) -> Lowering | None:
            return write(group, capabilities, digest(repr(group.structure)))

        return cls(capabilities.description, capabilities, lower, budget, link_cost=lambda: link_cost)

    @property
    def rates(self) -> StepRates:
        """Rates by which choices are made: not those of the device, of which only the link is measured."""
        return StepRates.usual(self.gpu, self.capabilities.tf32)

    @property
    def fuses(self) -> bool:
        """Whether operations share kernels."""
        return self.apart is None

    @property
    def gpu(self) -> bool:
        """Whether kernels are those of a GPU: many threads, each without a vector unit."""
        return self.capabilities.vector_width == 1
