"""Ranges of WebGPU buffers as kernel arguments, and staging buffers for reading results."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.drivers.webgpu.adapters import BUFFER_ALIGNMENT
from penstock.drivers.webgpu.native import COPY_DST, COPY_SRC, MAP_READ, STORAGE, NativeBuffer, NativeDevice
from penstock.drivers.webgpu.wgsl import OFFSET_ALIGNMENT

MEMORY_USAGE = STORAGE | COPY_SRC | COPY_DST
WORD = 4  # bytes; WebGPU copies and binds whole words
_LEAST_READ = 4096  # bytes of the smallest staging buffer
_IDLE_READ_BYTES = 64 << 20  # bytes of idle staging buffers that are kept


def rounded(nbytes: int, alignment: int) -> int:
    """The bytes rounded up to a positive multiple of the alignment."""
    return max(-(-nbytes // alignment), 1) * alignment


@dataclass(slots=True, eq=False)
class Range:
    """A range of a buffer, as a kernel argument."""

    buffer: NativeBuffer
    offset: int
    size: int
    serial: int  # of the memory that the buffer is

    def part(self, start: int, end: int) -> Range:
        """The smallest range of the same buffer that can be bound and contains bytes `start` to `end`."""
        offset = start // OFFSET_ALIGNMENT * OFFSET_ALIGNMENT
        size = min(rounded(end - offset, BUFFER_ALIGNMENT), self.buffer.nbytes - offset)
        return Range(self.buffer, offset, size, self.serial)


class ReadBuffers:
    """Staging buffers that the host can map for reading. Idle buffers are kept, up to a limit."""

    def __init__(self, native: NativeDevice) -> None:
        self._native = native
        self._idle: dict[int, list[NativeBuffer]] = {}  # by size
        self.idle_bytes = 0

    def take(self, nbytes: int) -> NativeBuffer:
        """A buffer of at least so many bytes."""
        size = max(1 << (nbytes - 1).bit_length(), _LEAST_READ)
        size = max(min(size, self._native.max_buffer_bytes), nbytes)
        if idle := self._idle.get(size):
            self.idle_bytes -= size
            return idle.pop()
        return self._native.buffer(size, MAP_READ | COPY_DST)

    def give_back(self, buffer: NativeBuffer) -> None:
        """Keep a buffer for a later read, or destroy it if enough are kept."""
        if self.idle_bytes + buffer.nbytes > _IDLE_READ_BYTES:
            buffer.destroy()
        else:
            self._idle.setdefault(buffer.nbytes, []).append(buffer)
            self.idle_bytes += buffer.nbytes

    def clear(self) -> None:
        """Destroy the idle buffers."""
        for buffers in self._idle.values():
            for buffer in buffers:
                buffer.destroy()
        self._idle.clear()
        self.idle_bytes = 0
