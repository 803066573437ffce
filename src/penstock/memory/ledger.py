"""The account of all memory: the library's counters against the driver's and the process's."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Protocol

import psutil

from penstock.memory.pool import PoolStatistics
from penstock.memory.trace import Block


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device's memory at one moment, in bytes."""

    live_bytes: int  # in buffers that somebody holds or pending commands use
    planned_bytes: int  # the part of them that is arenas, in which programs have planned their temporaries
    pooled_bytes: int  # idle in the pool
    staging_bytes: int  # pinned memory for transfers, in use or idle
    peak_bytes: int  # the most that was ever live
    driver_bytes: int  # allocated from the driver, as the driver counts
    limit_bytes: int | None
    pool: PoolStatistics

    @property
    def unaccounted_bytes(self) -> int:
        """What the driver has given out and no counter of the library knows. Anything but 0 is a leak."""
        return self.driver_bytes - self.live_bytes - self.pooled_bytes - self.staging_bytes


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """All opened devices, by name, and the process that holds them."""

    devices: dict[str, DeviceMemory]
    resident_bytes: int  # memory of the machine that this process occupies
    host_bytes: int  # allocations that lie in the machine's own memory, resident as far as they were used

    @property
    def live_bytes(self) -> int:
        """Bytes in use, over all devices."""
        return sum(device.live_bytes for device in self.devices.values())

    @property
    def pooled_bytes(self) -> int:
        """Idle bytes, over all devices."""
        return sum(device.pooled_bytes for device in self.devices.values())

    @property
    def unaccounted_bytes(self) -> int:
        """Bytes that a driver has given out and no counter knows, over all devices."""
        return sum(device.unaccounted_bytes for device in self.devices.values())

    @property
    def other_bytes(self) -> int:
        """The least part of the resident size that is not device memory: Python, libraries, arrays."""
        return max(self.resident_bytes - self.host_bytes, 0)


class Accountable(Protocol):
    """What an opened device shows to the ledger."""

    name: str

    def memory_stats(self) -> DeviceMemory:
        """Its memory now."""
        ...

    def host_bytes(self) -> int:
        """How much of it lies in the machine's own memory."""
        ...

    def memory_blocks(self) -> tuple[list[Block], list[tuple[int, int]]]:
        """What was traced and is live, and what is idle: which allocation each block is, and its bytes."""
        ...

    def trim(self) -> int:
        """Give idle memory back; how many bytes."""
        ...


_opened: weakref.WeakSet[Accountable] = weakref.WeakSet()


def register(device: Accountable) -> None:
    """Add an opened device to the account; it leaves by itself when it is gone."""
    _opened.add(device)


def unregister(device: Accountable) -> None:
    """Take a device out of the account."""
    _opened.discard(device)


def opened_devices() -> list[Accountable]:
    """The devices in the account, by name."""
    return sorted(_opened, key=lambda device: device.name)


def stats() -> MemoryStats:
    """Where all memory is: every opened device, and the resident size of the process."""
    devices = list(_opened)
    return MemoryStats(
        devices={device.name: device.memory_stats() for device in devices},
        resident_bytes=psutil.Process().memory_info().rss,
        host_bytes=sum(device.host_bytes() for device in devices),
    )


def trim() -> int:
    """Give idle memory of every device back to its driver; how many bytes."""
    return sum(device.trim() for device in list(_opened))
