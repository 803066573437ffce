"""What a device can reach at best: measured, since no data sheet says it for the machine at hand.

A ceiling is the best of several tries, where the time of a case is the median: others on the machine can only
lower it.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.bench.case import Way
from penstock.profiling.ceilings import bandwidth_of, best_seconds, product_seconds
from penstock.runtime import Device

_COPIED = {"cpu": 64 << 20, "gpu": 256 << 20}  # bytes; beyond the caches
_TRANSFERRED = 32 << 20
_LENGTH = {"cpu": 1024, "gpu": 4096}  # of a product's matrices


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
    size = "gpu" if device.capabilities.kind == "gpu" else "cpu"
    nbytes = min(_COPIED[size], device.capabilities.total_bytes // 16)
    moved = bandwidth_of(device, nbytes, seconds / 3)
    length = _LENGTH[size]
    flops = 2 * length**3 / product_seconds(device, length, "float32", seconds)
    if device.capabilities.shared_memory:
        # A copy reads and writes the one memory that there is.
        return Ceilings(moved, flops, moved / 2, moved / 2)
    return Ceilings(moved, flops, *_transferred(device, seconds))


def _transferred(device: Device, seconds: float) -> tuple[float, float]:
    """Copies between pinned memory of the host and the device, by the driver alone."""
    driver = device.driver
    buffer = device.empty(_TRANSFERRED)
    pinned = driver.allocate(_TRANSFERRED, pinned=True)
    host = pinned.host
    assert host is not None

    def upload() -> None:
        event = driver.write(driver.incoming, buffer.memory, buffer.offset, host, None)
        driver.flush(driver.incoming)
        driver.wait(event)

    def download() -> None:
        event = driver.read(driver.outgoing, host, buffer.memory, buffer.offset, None)
        driver.flush(driver.outgoing)
        driver.wait(event)

    try:
        with device.stream.lock:
            times = [best_seconds(device, call, seconds / 2) for call in (upload, download)]
    finally:
        driver.free(pinned)
    return _TRANSFERRED / times[0], _TRANSFERRED / times[1]
