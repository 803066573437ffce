"""CUDA's memory: small blocks from its allocator, large ones mapped piece by piece, and pinned ones."""

from __future__ import annotations

import ctypes

import numpy as np
from cuda.bindings import driver as cu

from penstock.drivers.cuda.calls import checked
from penstock.drivers.cuda.devices import Attribute, attribute
from penstock.drivers.driver import Memory

_MAPPED_FROM = 32 << 20  # bytes, from which on memory is mapped piece by piece
_PIECE = 64 << 20  # bytes of the pieces


class Allocator:
    """Allocates memory. Calls that fail raise CudaError."""

    def __init__(self, device: int) -> None:
        self._maps = bool(
            attribute(device, Attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
        )
        self._location = cu.CUmemLocation()
        self._location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._location.id = device
        self._mapped: dict[Memory, int] = {}  # the bytes of mapped blocks; every step on it is atomic

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
        """Map pieces of memory to one range of addresses, so that no hole need be as large as the block."""
        how = cu.CUmemAllocationProp()
        how.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        how.location = self._location
        least = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granule = checked(cu.cuMemGetAllocationGranularity(how, least))
        total = -(-nbytes // granule) * granule
        start = int(checked(cu.cuMemAddressReserve(total, 0, 0, 0)))
        mapped = 0
        try:
            while mapped < total:
                size = min(_PIECE, total - mapped)
                piece = checked(cu.cuMemCreate(size, how, 0))
                try:
                    checked(cu.cuMemMap(start + mapped, size, 0, piece, 0))
                finally:
                    cu.cuMemRelease(piece)  # it stays for as long as it is mapped
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
        """The address of a block that is given back, and its mapped bytes, 0 where it is not mapped."""
        mapped = self._mapped.pop(memory, 0)
        address, memory.native, memory.host = memory.native, None, None
        return address, mapped


def release(address: int, mapped: int, pinned: bool) -> None:
    """Give a block back. A device that has failed refuses that, and its memory goes with the process."""
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
