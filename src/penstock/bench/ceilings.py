"""What a device can reach at best: measured, since no data sheet says it for the machine at hand.

A ceiling is the best of several tries, where the time of a case is the median: others on the machine can only
lower it.
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
    flops: float  # operations of a large product of float32, or of whatever had more
    uploaded: float  # bytes copied to the device
    downloaded: float  # bytes copied from it

    def least_seconds(self, flops: float, nbytes: float, way: Way) -> float:
        """How long work takes that reaches the ceiling: the one that it meets first."""
        rate = {"device": self.moved, "upload": self.uploaded, "download": self.downloaded}[way]
        return max(flops / self.flops, nbytes / rate)

    def bound(self, flops: float, nbytes: float, way: Way) -> str:
        """Which ceiling that is."""
        if way != "device":
            return "copy"
        return "matmul" if flops / self.flops > nbytes / self.moved else "memory"


def measure_ceilings(device: Device, seconds: float) -> Ceilings:
    """Measure them, each for about so many seconds."""
    moved = workloads.bandwidth(device, seconds / 3)
    flops = workloads.product_operations(device, "float32", seconds)
    if device.capabilities.shared_memory:
        # A copy reads and writes the one memory that there is.
        return Ceilings(moved, flops, moved / 2, moved / 2)
    return Ceilings(moved, flops, *workloads.transfers(device, seconds))
