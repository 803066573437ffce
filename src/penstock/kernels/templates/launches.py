"""The launches of a group, and how the kernels of templates divide their work.

On a CPU a thread loops over many items; on a GPU it has a single item, or shares work with its workgroup.
`capabilities.vector_width` decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penstock.drivers.driver import Capabilities, Cost
from penstock.graph.node import Shape
from penstock.kernels import ir
from penstock.kernels.builder import KernelBuilder
from penstock.kernels.source import KernelSource

CPU_SHARES = 4  # workgroups per core, so that a core that is busy elsewhere does not hold up the rest
GPU_THREADS = 64  # of a workgroup whose threads are independent
SHORT_ROW = 64  # items; up to here a thread of a GPU has a row to itself
MOST_THREADS = 1024  # of a workgroup whose threads work together


class Partials(NamedTuple):
    """Partial results, of which a workgroup reads those that its own results are reduced from."""

    results: int
    parts: int  # of each
    parts_first: bool  # whether the first parts of all results come before the second; else all of the first


@dataclass(frozen=True)
class Launch:
    """A launch: its kernel, and the indices of its buffers in [*outputs, *inputs, *scratch]."""

    source: KernelSource
    buffers: tuple[int, ...]
    scalars: tuple[int, ...] = ()
    operations: int | None = None  # arithmetic; None: an equal share of those of the group's nodes
    reads_own: Partials | None = None  # if its workgroups read those of their own results only


@dataclass(frozen=True)
class Lowering:
    """The launches that compute a group, in order, and the bytes of their scratch buffers."""

    launches: tuple[Launch, ...]
    scratch: tuple[int, ...] = ()
    may_alias: tuple[tuple[int, ...], ...] = ()  # for each output, the inputs that it may overwrite
    restores: tuple[int, ...] = ()  # inputs that a launch changes, and that are as they were at its end
    function: Callable[..., None] | None = None  # of the host or a library, instead of text
    order: tuple[int, ...] = ()  # of a GPU's sums: see `Lowered`
    # The results of `costs` for its groups, by which of their buffers share memory.
    known_costs: dict[tuple[int, ...], list[Cost]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def named(self, ending: str) -> Lowering:
        """The same launches, with an ending added to the names of their kernels."""

        def named(launch: Launch) -> Launch:
            return replace(launch, source=replace(launch.source, name=f"{launch.source.name}_{ending}"))

        return replace(self, launches=tuple(map(named, self.launches)))


def one_launch(source: KernelSource, may_alias: tuple[tuple[int, ...], ...] = ()) -> Lowering:
    """A group with a single kernel that takes all outputs and inputs."""
    return Lowering((Launch(source, tuple(range(len(source.buffers)))),), may_alias=may_alias)


def is_cpu(capabilities: Capabilities) -> bool:
    """Whether a thread has a vector unit to itself."""
    return capabilities.vector_width > 1


def group_size(items: int, capabilities: Capabilities) -> int:
    """How many threads share `items` items: a power of two."""
    return 1 << min(max(items, 1), MOST_THREADS, capabilities.max_group_size).bit_length() - 1


def along(shape: Shape, axis: int) -> tuple[int, int, int]:
    """The number of items before an axis, along it, and after it."""
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis:][1:])


class Tasks:
    """`count` independent tasks: a thread has neighbouring tasks on a CPU, and a single task on a GPU."""

    def __init__(self, count: int, capabilities: Capabilities) -> None:
        self._count, self._cpu = count, is_cpu(capabilities)
        self._each = -(-count // (CPU_SHARES * capabilities.compute_units)) if self._cpu else 1
        threads = 1 if self._cpu else GPU_THREADS
        self.grid, self.group = (-(-count // (self._each * threads)),), (threads,)

    @contextmanager
    def each(self, k: KernelBuilder) -> Iterator[ir.Expr]:
        """The body of a task, given its index."""
        if self._cpu:
            first = k.let("first_task", k.group() * self._each)
            last = k.let("last_task", k.call("minimum", first + self._each, self._count))
            with k.loop("task", first, last) as task:
                yield task
        else:
            task = k.let("task", k.group() * GPU_THREADS + k.thread)
            with k.when(task < self._count):
                yield task
