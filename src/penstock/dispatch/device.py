"""The device `auto`, a logical device for several others."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.dispatch.placing import Dispatcher
from penstock.errors import PenstockError
from penstock.memory.buffer import Buffer
from penstock.memory.ledger import DeviceMemory
from penstock.opened import Layers, refuse
from penstock.registry import devices
from penstock.runtime import Device
from penstock.stream.future import Future
from penstock.stream.hostview import HostView
from penstock.stream.watching import Watched

_SMALL = 256 << 10  # bytes up to which values stay on the host until a device needs them


def auto_device() -> AutoDevice:
    """The best GPU or other accelerator of this machine, its CPU (no GPU in software), and NumPy."""
    return AutoDevice(_usable(devices()))


def _usable(devices: Sequence[Device]) -> list[Device]:
    """At most one device of each kind, leaving out those that cannot be opened, as in a forked child."""
    kinds = (
        [device for device in devices if device.capabilities.kind in ("gpu", "accelerator")],
        [
            device
            for device in devices
            if device.capabilities.kind == "cpu" and device.capabilities.vector_width > 1
        ],
        [device for device in devices if device.capabilities.kind == "host"],
    )
    return [first for kind in kinds if (first := next(filter(_opens, kind), None)) is not None]


def _opens(device: Device) -> bool:
    try:
        return device.driver is not None
    except PenstockError:
        return False


class AutoDevice(Device):
    """A logical device: each program runs on the member that is fastest for it, and values move there.

    `pool`, `stream` and `driver` are those of the first member.
    """

    def __init__(self, members: Sequence[Device]) -> None:
        """`members`: the device that is best for large programs first."""
        first = members[0]
        names = " or ".join(f"{member.name} ({member.capabilities.description})" for member in members)
        limits = replace(
            first.capabilities,
            description=f"{names}, whichever is sooner",
            offset_alignment=math.lcm(*(member.capabilities.offset_alignment for member in members)),
            max_allocation_bytes=min(member.capabilities.max_allocation_bytes for member in members),
            binding_bytes=min(member.capabilities.binding_bytes for member in members),
        )
        super().__init__("auto", limits, refuse("auto has no driver of its own"))
        self._members = tuple(members)
        self._shared = first.capabilities.shared_memory
        self.dispatcher: Dispatcher = Dispatcher(self, self._members)
        self.executables = self.dispatcher

    @property
    def members(self) -> tuple[Device, ...]:
        """The devices that it consists of."""
        return self._members

    def holder(self, buffer: Buffer) -> Device:
        """The member that a buffer is on."""
        return self.dispatcher.locations.holder(buffer)

    def layers(self) -> Layers:
        """Those of the first member."""
        return self._members[0].layers()

    def watch(self, watched: Watched) -> None:
        """See Device."""
        self.holder(watched.buffer).watch(watched)

    def _home(self, nbytes: int) -> Device:
        """The member for new values: the first for large values, else the host."""
        return self._members[0] if self._shared or nbytes > _SMALL else self._members[-1]

    # Memory

    def empty(self, nbytes: int, unused: bool = False) -> Buffer:
        """See Device."""
        return self._home(nbytes).empty(nbytes, unused)

    def visible(self, nbytes: int) -> Buffer:
        """See Device."""
        return self._home(nbytes).visible(nbytes)

    @property
    def limit_bytes(self) -> int | None:
        """The most memory that may be taken from each member."""
        return self._members[0].limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit: int | str | None) -> None:
        for member in self._members:
            member.limit_bytes = limit

    def memory_stats(self) -> DeviceMemory:
        """The statistics of all members together; `pool` is that of the first."""
        members = [member.memory_stats() for member in self._members]
        sums = {
            name: sum(getattr(stats, name) for stats in members)
            for name in DeviceMemory.__dataclass_fields__
            if name not in ("limit_bytes", "pool")
        }
        return DeviceMemory(**sums, limit_bytes=self.limit_bytes, pool=members[0].pool)

    def host_bytes(self) -> int:
        """See Device."""
        return sum(member.host_bytes() for member in self._members)

    def trim(self) -> int:
        """See Device."""
        return sum(member.trim() for member in self._members)

    def release_idle(self) -> None:
        """See Device."""
        for member in self._members:
            member.release_idle()

    def trace_memory(self, on: bool = True) -> None:
        """See Device."""
        for member in self._members:
            member.trace_memory(on)

    def memory_owners(self, most: int = 10) -> list[tuple[str, int]]:
        """See Device."""
        owners = [owner for member in self._members for owner in member.memory_owners(most)]
        return sorted(owners, key=lambda owner: -owner[1])[:most]

    # Copies

    def upload(self, array: npt.ArrayLike, into: Buffer | None = None, offset: int = 0) -> Buffer:
        """See Device. A new buffer is on the host, or on the first member if it is large."""
        array = np.asarray(array)
        if into is None:
            return self._home(array.nbytes).upload(array)
        self.dispatcher.locations.forget([into])
        return self.holder(into).upload(array, into, offset)

    def download(
        self,
        buffer: Buffer,
        dtype: npt.DTypeLike = np.uint8,
        shape: Sequence[int] | None = None,
        offset: int = 0,
    ) -> Future[npt.NDArray[Any]]:
        """See Device."""
        return self.holder(buffer).download(buffer, dtype, shape, offset)

    def reading(self, buffer: Buffer, dtype: npt.DTypeLike, shape: Sequence[int]) -> Future[npt.NDArray[Any]]:
        """See Device."""
        return self.holder(buffer).reading(buffer, dtype, shape)

    def copy(
        self,
        target: Buffer,
        source: Buffer,
        nbytes: int | None = None,
        *,
        target_offset: int = 0,
        source_offset: int = 0,
    ) -> None:
        """See Device; a copy from one member to another waits for the source."""
        nbytes = source.nbytes - source_offset if nbytes is None else nbytes
        holder = self.holder(source)
        self.dispatcher.locations.forget([target])
        if holder.holds(target):
            offsets = {"target_offset": target_offset, "source_offset": source_offset}
            holder.copy(target, source, nbytes, **offsets)
        elif nbytes:
            array = holder.download(source, np.uint8, (nbytes,), source_offset).wait()
            self.holder(target).upload(array, target, target_offset)

    def view(
        self,
        buffer: Buffer,
        dtype: npt.DTypeLike = np.uint8,
        shape: Sequence[int] | None = None,
        offset: int = 0,
        *,
        writable: bool = False,
    ) -> HostView:
        """See Device."""
        if writable:
            self.dispatcher.locations.forget([buffer])
        return self.holder(buffer).view(buffer, dtype, shape, offset, writable=writable)

    # Life cycle

    def sync(self) -> None:
        """See Device; all members that have something pending."""
        for member in self._members:
            if not member.stream.idle or member.watches:
                member.sync()

    def cleanup(self) -> None:
        """See Device; all members."""
        self.dispatcher.locations.clear()
        for member in self._members:
            member.cleanup()

    def close(self) -> None:
        """See Device; all members."""
        self.dispatcher.locations.clear()
        for member in self._members:
            member.close()

    def abandon(self) -> None:
        """In a forked child: the members are abandoned by themselves."""
        self._background = None
        self.running = threading.RLock()
