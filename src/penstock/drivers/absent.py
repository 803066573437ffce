"""A device that is not there: it counts memory and computes nothing, so that plans can be made for it."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.drivers.driver import (
    Args,
    Bytes,
    Capabilities,
    Driver,
    Event,
    Grid,
    Kernel,
    Memory,
    Queue,
    Source,
    Waits,
)
from penstock.drivers.rates import StepRates


class AbsentDriver(Driver):
    """Memory is only counted, without a limit, so that a plan can say how much would be needed.

    An event is the reason why its command failed, which only those that read have.
    """

    compute, incoming, outgoing = "compute", "incoming", "outgoing"

    def __init__(self, name: str, capabilities: Capabilities, rates: StepRates) -> None:
        super().__init__(name, replace(capabilities, shared_memory=False))  # there is nothing to map
        self.rates = rates

    # Memory

    def allocate(self, nbytes: int, pinned: bool = False) -> Memory:
        host = _pinned(nbytes) if pinned else None
        memory = Memory(object(), nbytes, host, pinned)
        self._allocations |= {memory}
        return memory

    def free(self, memory: Memory) -> None:
        self._allocations -= {memory}
        memory.native = memory.host = None

    def view(self, memory: Memory, offset: int, nbytes: int) -> Any:
        return memory.native

    def native_handles(self) -> int:
        return len(self._allocations)

    # Kernels

    def compile(self, source: Source, signatures: Mapping[str, Sequence[str]]) -> dict[str, Kernel]:
        return {name: Kernel(name, signature, None) for name, signature in signatures.items()}

    def bind(self, kernel: Kernel, grid: Grid, group: Grid, args: Args) -> Any:
        return kernel

    def rebind(self, bound: Any, position: int, dtype: np.dtype[Any], arg: Any) -> None:
        """Nothing runs, so nothing has arguments."""

    def replay(self, queue: Queue, bound: Sequence[Any], waits: Waits, events: list[Event]) -> None:
        events += [""] * len(bound)

    # Copies

    def write(self, queue: Queue, memory: Memory, offset: int, source: Bytes, waits: Waits) -> Event:
        return ""

    def read(self, queue: Queue, target: Bytes, memory: Memory, offset: int, waits: Waits) -> Event:
        return f"{self.name} describes a device that is not there: it has plans, and no values"

    def copy(
        self, queue: Queue, target: Memory, to: int, source: Memory, start: int, nbytes: int, waits: Waits
    ) -> Event:
        return ""

    # Order and completion

    def flush(self, queue: Queue) -> None:
        """Nothing is pending."""

    def is_done(self, event: Event) -> bool:
        return True

    def wait(self, event: Event) -> None:
        """Nothing is pending."""

    def failures(self, events: Sequence[Event]) -> list[tuple[int, str]]:
        return [(position, event) for position, event in enumerate(events) if event]

    # Life cycle

    def close(self) -> None:
        """Nothing is open."""

    def abandon(self) -> None:
        """Nothing is open."""


def _pinned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory that hardly anything is written to: an empty file stands for more than this machine has."""
    try:
        return np.empty(nbytes, np.uint8)
    except MemoryError:
        with tempfile.TemporaryFile() as file:
            file.truncate(nbytes)
            return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
