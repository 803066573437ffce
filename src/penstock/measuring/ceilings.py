"""The best rates of a device, measured once and kept on disk.

Other processes can only slow a measurement down, so the best of several is taken. A kernel whose data are in
a cache may exceed the bandwidth of memory.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import PenstockError
from penstock.measuring import workloads
from penstock.measuring.quiet import Record, device_key, measure_quietly
from penstock.runtime import Device
from penstock.tensor.recording import no_grad
from penstock.tuning_cache import TuningCache

_TRY_SECONDS = 0.05
_EXCEEDED = 1.25  # a kernel that is so many times as fast as the ceiling shows that the ceiling is wrong
_BANDWIDTH = "bytes"  # beside the dtypes of products, in the file
_LAUNCHES, _RECORDING, _LINK = "launches", "recorded operations", "link both ways"
_WORKLOADS: dict[str, Callable[[Device, float], float]] = {
    _BANDWIDTH: workloads.bandwidth,
    _LAUNCHES: workloads.launches,
    _RECORDING: workloads.recorded_operations,
    _LINK: workloads.link,
}


class Ceilings:
    """The best rates of a device, per second. Each is measured when it is first requested."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept = TuningCache(device_key("ceilings", device.capabilities))
        self._rates: dict[str, float | None] = {}
        self._too_low: set[str] = set()  # rates that a kernel exceeded

    def bandwidth(self, measure: bool = True) -> float | None:
        """Bytes that are read and written; None if it is unknown and not to be measured."""
        return self._rate(_BANDWIDTH, measure)

    def operations(self, dtype: str, measure: bool = True) -> float | None:
        """Operations of a large matrix product in a dtype; integers are compared with float32."""
        return self._rate(dtype if dtype in workloads.DTYPES else "float32", measure)

    def launches(self, measure: bool = True) -> float | None:
        """Replays of the smallest jitted function in sequence: the cost of a launch."""
        return self._rate(_LAUNCHES, measure)

    def recorded(self, measure: bool = True) -> float | None:
        """Operations without `jit`, each of which is recorded and looked up as a known program."""
        return self._rate(_RECORDING, measure)

    def link(self, measure: bool = True) -> float | None:
        """Bytes in each direction between the device and pinned memory of the host, both at once."""
        return self._rate(_LINK, measure)

    def known(self) -> dict[str, float]:
        """All rates that were requested: `bytes`, and operations by the dtype of their products."""
        return {what: rate for what, rate in self._rates.items() if rate is not None}

    def least_seconds(
        self, operations: int, nbytes: int, dtype: str, measure: bool = True
    ) -> tuple[float, float] | None:
        """The least time of some work: the longer of the times for its operations and for its bytes."""
        rate, bandwidth = self.operations(dtype, measure), self.bandwidth(measure)
        return (operations / rate, nbytes / bandwidth) if rate and bandwidth else None

    def exceeded(self, dtype: str, rate: float) -> None:
        """Note the rate that a kernel reached. A ceiling far below it is wrong, and is remeasured once.

        Only rates of operations are used for this, since bytes may come from a cache.
        """
        what = dtype if dtype in workloads.DTYPES else "float32"
        if rate > _EXCEEDED * (self._rates.get(what) or rate) and what not in self._too_low:
            self._too_low.add(what)
            del self._rates[what]
            self._rate(what, measure=True)

    def _rate(self, what: str, measure: bool) -> float | None:
        if what not in self._rates:
            record = Record(self._kept, what)
            value, due = record.get()
            rate = _number(value)
            if measure and (rate is None or due or what in self._too_low):
                new, quiet = measure_quietly(lambda: _measured(self._device, what), _larger)
                rate = _larger(rate, new)
                if rate is not None:
                    record.put(rate, quiet)
            if rate is None and not measure:
                return None
            self._rates[what] = rate
        return self._rates[what]


def _number(value: object) -> float | None:
    """A rate from a file; None if it is no valid rate."""
    return float(value) if isinstance(value, (int, float)) and 0 < value < float("inf") else None


def _larger(rate: float | None, other: float | None) -> float | None:
    return max((known for known in (rate, other) if known is not None), default=None)


def _measured(device: Device, what: str) -> float | None:
    """A measured rate; None if the device does not support it, or has too little memory."""
    if not _room_for_it(device):
        return None
    try:
        with workloads.device_for_measuring(device) as own, no_grad():
            if what in _WORKLOADS:
                return _WORKLOADS[what](own, _TRY_SECONDS)
            return workloads.product_operations(own, what, _TRY_SECONDS)
    except PenstockError:
        return None


def _room_for_it(device: Device) -> bool:
    """Whether the memory that measuring takes is within the device's limit."""
    limit, stats = device.limit_bytes, device.memory_stats()
    return limit is None or limit - stats.live_bytes - stats.pooled_bytes >= workloads.most_bytes(device)
