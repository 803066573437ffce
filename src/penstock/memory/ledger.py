"""The account of all memory: the library's counters beside those of drivers and the process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import psutil

from penstock.formatting import format_bytes
from penstock.living import Living
from penstock.memory.pool import PoolStatistics
from penstock.memory.trace import Block


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory at a moment, in bytes.

    >>> x = ps.ones(4) + 1
    >>> ps.default_device().memory_stats().live_bytes >= 0
    True
    """

    live_bytes: int  # in buffers that are referenced or used by pending commands
    planned_bytes: int  # the part of them in arenas, for the temporaries of programs
    pooled_bytes: int  # idle in the pool
    staging_bytes: int  # pinned memory of the host, for transfers and for state, in use or idle
    peak_bytes: int  # the most that was ever live
    driver_bytes: int  # allocated from the driver, as the driver counts
    limit_bytes: int | None
    pool: PoolStatistics

    @property
    def unaccounted_bytes(self) -> int:
        """Bytes that the driver has allocated and no counter of the library knows. Not 0 is a leak."""
        return self.driver_bytes - self.live_bytes - self.pooled_bytes - self.staging_bytes

    def __str__(self) -> str:
        live, planned, pooled, staging, peak = map(
            format_bytes,
            (self.live_bytes, self.planned_bytes, self.pooled_bytes, self.staging_bytes, self.peak_bytes),
        )
        limit = "" if self.limit_bytes is None else f", limit {format_bytes(self.limit_bytes)}"
        return f"{live} live ({planned} planned), {pooled} pooled, {staging} staging, peak {peak}{limit}"


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """All opened devices, by name, and the process that holds them.

    >>> ps.memory.stats().live_bytes >= 0
    True
    """

    devices: dict[str, DeviceMemory]
    resident_bytes: int  # memory of the machine that this process uses
    host_bytes: int  # device allocations in the machine's memory; resident once touched

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
        """Bytes that drivers have allocated and no counter knows, over all devices."""
        return sum(device.unaccounted_bytes for device in self.devices.values())

    def __str__(self) -> str:
        """A line for each device, and one for the process."""
        lines = [f"{name}: {device}" for name, device in self.devices.items()]
        process = f"{format_bytes(self.resident_bytes)} resident, {format_bytes(self.host_bytes)} for devices"
        return "\n".join([*lines, f"this process: {process}"])

    @property
    def other_bytes(self) -> int:
        """A lower bound of the resident size without device memory: Python, libraries, arrays."""
        return max(self.resident_bytes - self.host_bytes, 0)


class Accountable(Protocol):
    """The interface of an opened device for the ledger."""

    name: str

    def memory_stats(self) -> DeviceMemory:
        """Its memory now."""
        ...

    def host_bytes(self) -> int:
        """The bytes of it in the machine's memory."""
        ...

    def memory_blocks(self) -> tuple[list[Block], list[tuple[int, int]]]:
        """Live blocks that were traced, and idle blocks as (serial of the allocation, bytes)."""
        ...

    def trim(self) -> int:
        """Give idle memory back; returns the bytes."""
        ...

    def keep_within(self, limit_bytes: int) -> None:
        """Give idle memory back while more than `limit_bytes` are taken."""
        ...


_opened = Living[Accountable]()


def register(device: Accountable) -> None:
    """Add an opened device to the account; it is removed when it is garbage-collected."""
    _opened.add(device)


def unregister(device: Accountable) -> None:
    """Remove a device from the account."""
    _opened.discard(device)


def opened_devices() -> list[Accountable]:
    """The devices in the account, by name."""
    return sorted(_opened, key=lambda device: device.name)


def stats() -> MemoryStats:
    """The memory of every opened device, and the resident size of the process.

    >>> "host" in ps.memory.stats().devices
    True
    """
    devices = opened_devices()
    return MemoryStats(
        devices={device.name: device.memory_stats() for device in devices},
        resident_bytes=psutil.Process().memory_info().rss,
        host_bytes=sum(device.host_bytes() for device in devices),
    )


def trim() -> int:
    """Give idle memory of every device back to its driver; returns the bytes.

    >>> ps.memory.trim() >= 0
    True
    """
    return sum(device.trim() for device in opened_devices())
