"""Independent tasks over the threads of a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.drivers.driver import Capabilities
from penstock.kernels.builder import KernelBuilder
from penstock.kernels.ir.expressions import Expr
from penstock.kernels.templates.launches import CPU_SHARES, GPU_THREADS, is_cpu


class Tasks:
    """`count` tasks, neighbours to one thread on a CPU, one to a thread on a GPU."""

    def __init__(self, count: int, capabilities: Capabilities) -> None:
        self._count, self._cpu = count, is_cpu(capabilities)
        self._each = -(-count // (CPU_SHARES * capabilities.compute_units)) if self._cpu else 1
        threads = 1 if self._cpu else GPU_THREADS
        self.grid, self.group = (-(-count // (self._each * threads)),), (threads,)

    @contextmanager
    def each(self, k: KernelBuilder) -> Iterator[Expr]:
        """What a thread does for one of its tasks, whose number is given."""
        if self._cpu:
            first = k.let("first_task", k.group() * self._each)
            last = k.let("last_task", k.call("minimum", first + self._each, self._count))
            with k.loop("task", first, last) as task:
                yield task
        else:
            task = k.let("task", k.group() * GPU_THREADS + k.thread)
            with k.when(task < self._count):
                yield task
