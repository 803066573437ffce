"""CUDA's memory: small blocks by cuMemAlloc, large blocks mapped from pieces, and pinned blocks."""

from __future__ import annotations

import ctypes

import numpy as np
from cuda.bindings import driver as cu

from penstock.drivers.cuda.calls import checked
from penstock.drivers.cuda.devices import Attribute, attribute
from penstock.drivers.driver import Memory

_MAPPED_FROM = 32 << 20  # bytes of the smallest block that is mapped from pieces
_PIECE = 64 << 20  # bytes of a piece


class Allocator:
    """Allocates memory. Raises CudaError."""

    def __init__(self, device: int) -> None:
        self._maps = bool(
            attribute(device, Attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
        )
        self._location = cu.CUmemLocation()
        self._location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._location.id = device
        self._mapped: dict[Memory, int] = {}  # the bytes of mapped blocks; its operations are atomic

    def allocate(self, nbytes: int, pinned: bool) -> Memory:
        """A new block."""
        mapped = 0
        if pinned:
            address = int(checked(cu.cuMemHostAlloc(nbytes, cu.CU_MEMHOSTALLOC_PORTABLE)))
        elif self._maps and nbytes >= _MAPPED_FROM:
            address, mapped = self._map(nbytes)
        else:
            address = int(checked(cu.cuMemAlloc(nbytes)))
        host = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)) if pinned else None
        memory = Memory(address, nbytes, host, pinned)
        if mapped:
            self._mapped[memory] = mapped
        return memory

    def _map(self, nbytes: int) -> tuple[int, int]:
        """Map pieces of physical memory to a contiguous range of addresses, which avoids fragmentation."""
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location
        least = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granule = checked(cu.cuMemGetAllocationGranularity(properties, least))
        total = -(-nbytes // granule) * granule
        start = int(checked(cu.cuMemAddressReserve(total, 0, 0, 0)))
        mapped = 0
        try:
            while mapped < total:
                size = min(_PIECE, total - mapped)
                piece = checked(cu.cuMemCreate(size, properties, 0))
                try:
                    checked(cu.cuMemMap(start + mapped, size, 0, piece, 0))
                finally:
                    cu.cuMemRelease(piece)  # it is freed when it is unmapped
                mapped += size
            access = cu.CUmemAccessDesc()
            access.location = self._location
            access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            checked(cu.cuMemSetAccess(start, total, [access], 1))
        except BaseException:
            _unmap(start, mapped, total)
            raise
        return start, total

    def forget(self, memory: Memory) -> tuple[int, int]:
        """Invalidate a block; its address and mapped bytes (0 if it is not mapped), for `release`."""
        mapped = self._mapped.pop(memory, 0)
        address, memory.native, memory.host = memory.native, None, None
        return address, mapped


def release(address: int, mapped: int, pinned: bool) -> None:
    """Free a block. A device that has failed refuses this; its memory is freed when the process ends."""
    if mapped:
        _unmap(address, mapped, mapped)
    elif pinned:
        cu.cuMemFreeHost(address)
    else:
        cu.cuMemFree(address)


def _unmap(start: int, mapped: int, total: int) -> None:
    if mapped:
        cu.cuMemUnmap(start, mapped)
    cu.cuMemAddressFree(start, total)
