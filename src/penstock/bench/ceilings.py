"""The ceilings of a device: measured, since no data sheet has them for this machine.

A ceiling is the best of several tries, while the time of a case is the median: other load of the machine can
only lower a rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.bench.case import Way
from penstock.measuring import workloads
from penstock.runtime import Device


@dataclass(frozen=True)
class Ceilings:
    """Rates per second."""

    moved: float  # bytes read and written in the device's memory
    flops: float  # operations of a large float32 product, or of a faster case
    uploaded: float  # bytes copied to the device
    downloaded: float  # bytes copied from it

    def least_seconds(self, flops: float, nbytes: float, way: Way) -> float:
        """The time of work at the lowest ceiling that applies to it."""
        rate = {"device": self.moved, "upload": self.uploaded, "download": self.downloaded}[way]
        return max(flops / self.flops, nbytes / rate)

    def bound(self, flops: float, nbytes: float, way: Way) -> str:
        """Which ceiling applies."""
        if way != "device":
            return "copy"
        return "matmul" if flops / self.flops > nbytes / self.moved else "memory"


def measure_ceilings(device: Device, seconds: float) -> Ceilings:
    """Measure them, each for about so many seconds."""
    moved = workloads.bandwidth(device, seconds / 3)
    flops = workloads.product_operations(device, "float32", seconds)
    if device.capabilities.shared_memory:
        # A copy reads and writes the same memory.
        return Ceilings(moved, flops, moved / 2, moved / 2)
    return Ceilings(moved, flops, *workloads.transfers(device, seconds))
