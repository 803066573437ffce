"""The launches of a group, and how the kernels of single nodes divide their work.

On a CPU a thread has many items, in plain loops; on a GPU it has one, or a workgroup works together.
`capabilities.vector_width` decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Shape
from penstock.kernels.source import KernelSource

CPU_SHARES = 4  # groups to a core, so that one that is busy elsewhere does not hold up the rest
GPU_THREADS = 64  # in a group whose threads have nothing to do with each other
SHORT_ROW = 64  # items; up to here a GPU gives a row to one thread and not to a group
MOST_THREADS = 1024  # in a group whose threads work together


@dataclass(frozen=True)
class Launch:
    """One launch: its kernel, and which buffers it takes, as numbers in [*outputs, *inputs, *scratch]."""

    source: KernelSource
    buffers: tuple[int, ...]
    scalars: tuple[int, ...] = ()
    operations: int | None = None  # on numbers; None: an equal part of what the group's nodes take


@dataclass(frozen=True)
class Lowering:
    """The launches that compute a group, in order, and the bytes of the scratch buffers that they share."""

    launches: tuple[Launch, ...]
    scratch: tuple[int, ...] = ()
    # For each output the numbers of the inputs that it may be written over; empty where none may be.
    may_alias: tuple[tuple[int, ...], ...] = ()
    function: Callable[..., None] | None = None  # instead of text: on the host, or of a library

    def named(self, ending: str) -> Lowering:
        """The same in kernels with names of this ending."""
        sources = [replace(launch.source, name=f"{launch.source.name}_{ending}") for launch in self.launches]
        launches = zip(self.launches, sources, strict=True)
        return replace(self, launches=tuple(replace(launch, source=source) for launch, source in launches))


def one_launch(source: KernelSource, may_alias: tuple[tuple[int, ...], ...] = ()) -> Lowering:
    """A group whose one kernel takes all outputs and inputs."""
    return Lowering((Launch(source, tuple(range(len(source.buffers)))),), may_alias=may_alias)


def is_cpu(capabilities: Capabilities) -> bool:
    """Whether one thread has a vector unit of its own."""
    return capabilities.vector_width > 1


def group_size(items: int, capabilities: Capabilities) -> int:
    """How many threads share work on `items` items: a power of two."""
    return 1 << min(max(items, 1), MOST_THREADS, capabilities.max_group_size).bit_length() - 1


def along(shape: Shape, axis: int) -> tuple[int, int, int]:
    """The items before an axis, along it, and after it."""
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis:][1:])
