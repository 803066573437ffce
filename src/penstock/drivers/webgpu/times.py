"""Times of commands on a WebGPU device: timestamp queries, and conversion to the host's clock."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
from wgpu.backends.wgpu_native import ffi, lib

from penstock.drivers.webgpu.c_types import TYPES
from penstock.drivers.webgpu.native import COPY_SRC, NativeDevice

Moments = npt.NDArray[np.uint64]  # timestamps in ticks of the device's clock

_MOST = 1024  # moments of a batch: two for each command
_TICK_BYTES = 8
_QUERY_RESOLVE = 0x200  # what a buffer is used for


class Queries:
    """Timestamp queries for the commands of a batch."""

    def __init__(self, native: NativeDevice) -> None:
        self._set = native.create("QuerySet", type=lib.WGPUQueryType_Timestamp, count=_MOST)
        self._resolved = native.buffer(_TICK_BYTES * _MOST, _QUERY_RESOLVE | COPY_SRC)
        self._writes = ffi.new(TYPES["WGPUPassTimestampWrites *"], {"querySet": self._set.native})
        self._pass = ffi.new(TYPES["WGPUComputePassDescriptor *"], {"timestampWrites": self._writes})
        self.used = 0  # moments: the start and the end of each command

    @property
    def full(self) -> bool:
        """Whether there is no room for another command."""
        return self.used + 2 > _MOST

    @property
    def nbytes(self) -> int:
        """The bytes of the moments that are used."""
        return _TICK_BYTES * self.used

    def timed_pass(self) -> Any:
        """The descriptor of a pass whose start and end are the next two moments."""
        self._writes.beginningOfPassWriteIndex, self._writes.endOfPassWriteIndex = self.used, self.used + 1
        self.used += 2
        return self._pass

    def mark(self, encoder: Any) -> None:
        """Record the next moment in an encoder."""
        lib.wgpuCommandEncoderWriteTimestamp(encoder, self._set.native, self.used)
        self.used += 1

    def resolve(self, encoder: Any, into: Any) -> None:
        """Record a copy of the moments into a native buffer."""
        resolved = self._resolved.native
        lib.wgpuCommandEncoderResolveQuerySet(encoder, self._set.native, 0, self.used, resolved, 0)
        lib.wgpuCommandEncoderCopyBufferToBuffer(encoder, resolved, 0, into, 0, self.nbytes)


class Timing:
    """Idle queries for the next batches, and the offset of the device's clock, while commands are timed.

    A batch starts after its submission, and ends before its completion is seen. This gives a lower and an
    upper bound of the offset. Querying the device's time directly would wait for everything submitted.
    """

    def __init__(self, native: NativeDevice, copies: bool) -> None:
        self._native = native
        self.copies = copies  # whether copies can be timed, too
        self._idle: list[Queries] = []
        self._seconds = float(lib.wgpuQueueGetTimestampPeriod(native.queue)) * 1e-9  # of a tick
        self._offset: float | None = None
        self._uncertainty = float("inf")

    def queries(self) -> Queries:
        """Queries for a batch."""
        return self._idle.pop() if self._idle else Queries(self._native)

    def learn(self, queries: Queries | None, moments: Moments, submitted: float) -> None:
        """Update the offset from a batch that is done, and keep its queries for another batch."""
        least = submitted - float(moments.min()) * self._seconds
        most = perf_counter() - float(moments.max()) * self._seconds
        if self._offset is None or most - least < self._uncertainty:
            self._offset, self._uncertainty = (least + most) / 2, most - least
        elif least <= most:  # the clocks drift
            self._offset = min(max(self._offset, least), most)
        if queries is not None:
            queries.used = 0
            self._idle.append(queries)

    def on_host(self, tick: int) -> float:
        """A time of the device in seconds of the host's clock."""
        return tick * self._seconds + (self._offset or 0.0)
