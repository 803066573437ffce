"""When commands ran on a WebGPU device: moments that it writes down, and its clock on the host's."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
from wgpu.backends.wgpu_native import ffi, lib

from penstock.drivers.webgpu.native import COPY_SRC, NativeDevice

Moments = npt.NDArray[np.uint64]  # in ticks of the device's clock

_MOST = 1024  # moments of a batch: two for each command
_TICK_BYTES = 8
_QUERY_RESOLVE = 0x200  # what a buffer is used for


class Queries:
    """Room on the device for the moments of one batch."""

    def __init__(self, native: NativeDevice) -> None:
        self._set = native.create("QuerySet", type=lib.WGPUQueryType_Timestamp, count=_MOST)
        self._resolved = native.buffer(_TICK_BYTES * _MOST, _QUERY_RESOLVE | COPY_SRC)
        self._writes = ffi.new("WGPUPassTimestampWrites *", {"querySet": self._set.native})
        self._pass = ffi.new("WGPUComputePassDescriptor *", {"timestampWrites": self._writes})
        self.used = 0  # moments, of which the first is the beginning of a command and the second its end

    @property
    def full(self) -> bool:
        """Whether there is no room for one more command."""
        return self.used + 2 > _MOST

    @property
    def nbytes(self) -> int:
        """Of the moments that are used."""
        return _TICK_BYTES * self.used

    def timed_pass(self) -> Any:
        """How a pass is begun whose beginning and end are the next two moments."""
        self._writes.beginningOfPassWriteIndex, self._writes.endOfPassWriteIndex = self.used, self.used + 1
        self.used += 2
        return self._pass

    def mark(self, encoder: Any) -> None:
        """Let the next moment be that at which the encoder's commands come to this point."""
        lib.wgpuCommandEncoderWriteTimestamp(encoder, self._set.native, self.used)
        self.used += 1

    def resolve(self, encoder: Any, into: Any) -> None:
        """Record a copy of the moments into a native buffer."""
        resolved = self._resolved.native
        lib.wgpuCommandEncoderResolveQuerySet(encoder, self._set.native, 0, self.used, resolved, 0)
        lib.wgpuCommandEncoderCopyBufferToBuffer(encoder, resolved, 0, into, 0, self.nbytes)


class Timing:
    """While commands are timed: idle queries for the next batches, and the device's clock on the host's.

    A batch begins after it was submitted, and has ended when that is seen: between these two lies how far the
    clocks are apart. To ask the device for its time would be to wait behind everything that is submitted.
    """

    def __init__(self, native: NativeDevice, copies: bool) -> None:
        self._native = native
        self.copies = copies  # whether copies can be timed, too
        self._idle: list[Queries] = []
        self._seconds = float(lib.wgpuQueueGetTimestampPeriod(native.queue)) * 1e-9  # of a tick
        self._offset: float | None = None
        self._doubt = float("inf")

    def queries(self) -> Queries:
        """Room for the moments of one batch."""
        return self._idle.pop() if self._idle else Queries(self._native)

    def learn(self, queries: Queries | None, moments: Moments, submitted: float) -> None:
        """Take notice of a batch that is done, and keep its queries for another one."""
        least = submitted - float(moments.min()) * self._seconds
        most = perf_counter() - float(moments.max()) * self._seconds
        doubt = most - least
        if self._offset is None or doubt < self._doubt:
            self._offset, self._doubt = (least + most) / 2, doubt
        elif least <= most:  # they drift apart
            self._offset = min(max(self._offset, least), most)
        if queries is not None:
            queries.used = 0
            self._idle.append(queries)

    def on_host(self, tick: int) -> float:
        """A moment of the device in seconds of the host."""
        return tick * self._seconds + (self._offset or 0.0)
