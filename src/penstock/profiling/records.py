"""The results of a profile as plain records. Seconds, bytes and operations; rates are per second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OTHER = "(others)"  # for names beyond the number that is counted separately


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """A kernel on a device. Unknown values are None, such as times of a device without timers."""

    device: str
    name: str
    shapes: str  # of inputs and outputs
    where: Literal["device", "host"]  # the host computes what is small and seen for the first time
    calls: int
    seconds: float | None  # of all calls
    least_seconds: float | None  # of the shortest
    most_seconds: float | None  # of the longest
    operations: int | None  # of a call
    read_bytes: int | None
    written_bytes: int | None
    share: float | None  # of the device's best rate of operations or of bytes
    bound: Literal["compute", "memory", ""]  # which of the two limits it

    @property
    def mean_seconds(self) -> float | None:
        """Of a call."""
        return None if self.seconds is None else self.seconds / self.calls

    @property
    def gflops(self) -> float | None:
        """10^9 operations per second."""
        return self._rate(self.operations)

    @property
    def gbytes(self) -> float | None:
        """10^9 bytes per second, read and written."""
        if self.read_bytes is None or self.written_bytes is None:
            return None
        return self._rate(self.read_bytes + self.written_bytes)

    def _rate(self, amount: int | None) -> float | None:
        return None if amount is None or not self.seconds else amount * self.calls / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class CopyRecord:
    """All copies in a direction."""

    device: str
    direction: Literal["upload", "download", "copy", "exchange"]  # a copy is inside the device
    where: Literal["device", "host"]  # which of them copied; the host does it in shared memory
    calls: int
    nbytes: int
    seconds: float | None

    @property
    def gbytes(self) -> float | None:
        """10^9 bytes per second."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else None


@dataclass(frozen=True, slots=True)
class WaitRecord:
    """The waits for a device that a line of the user's code caused."""

    device: str
    where: str  # file:line
    why: str  # as in the ledger of waits
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class OwnerRecord:
    """The device memory that a line of the user's code held and requested."""

    device: str
    owner: str  # file:line
    peak_bytes: int  # that it held when the total of live bytes was largest
    allocations: int  # blocks that it requested during the profile
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """A device during a profile."""

    name: str
    description: str
    timed: bool  # whether commands were timed
    busy_seconds: float | None  # of kernels
    peak_bytes: int  # the most that was live
    pool_hits: int  # requests for memory that were served from idle blocks
    pool_misses: int
    dropped_events: int  # single events that are not kept, because there were too many
    dropped_actions: int  # allocations and frees that are not kept


@dataclass(frozen=True, slots=True)
class EventRecord:
    """An event. Seconds count from the start of the profile."""

    device: str
    track: str  # a queue of the device, or a thread of the host
    kind: Literal["kernel", "copy", "wait"]
    name: str
    detail: str  # shapes of a kernel, the reason of a wait
    start: float
    end: float
    nbytes: int | None
    operations: int | None
