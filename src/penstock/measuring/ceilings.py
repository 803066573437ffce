"""The best rates of a device: measured once, since no data sheet knows this machine, and kept on disk.

Others on the machine can only slow a measurement down, so the best of several is taken. A kernel whose data
are still in a cache may move more than the memory does.
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
_EXCEEDED = 1.25  # what computes so many times as fast as the best shows that this was measured wrongly
_BANDWIDTH = "bytes"  # beside the dtypes of products, in the file
_LAUNCHES, _RECORDING = "launches", "recorded operations"
_WORKLOADS: dict[str, Callable[[Device, float], float]] = {
    _BANDWIDTH: workloads.bandwidth,
    _LAUNCHES: workloads.launches,
    _RECORDING: workloads.recorded_operations,
}


class Ceilings:
    """The best rates of one device, per second. Each is measured when it is first asked for."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept = TuningCache(device_key("ceilings", device.capabilities))
        self._found: dict[str, float | None] = {}
        self._again: set[str] = set()  # what was seen to be too low

    def bandwidth(self, measure: bool = True) -> float | None:
        """Bytes that are read and written; None if nothing is known, and it is not to be measured."""
        return self._rate(_BANDWIDTH, measure)

    def operations(self, dtype: str, measure: bool = True) -> float | None:
        """Operations of a large matrix product in a dtype; integers are compared with float32."""
        return self._rate(dtype if dtype in workloads.DTYPES else "float32", measure)

    def launches(self, measure: bool = True) -> float | None:
        """Replays of the smallest jitted function, one after another: the cost of a launch."""
        return self._rate(_LAUNCHES, measure)

    def recorded(self, measure: bool = True) -> float | None:
        """Operations that are recorded without `jit`, and looked up as a known program."""
        return self._rate(_RECORDING, measure)

    def known(self) -> dict[str, float]:
        """All rates that were asked for: `bytes`, and operations by the dtype of their products."""
        return {what: rate for what, rate in self._found.items() if rate is not None}

    def least_seconds(
        self, operations: int, nbytes: int, dtype: str, measure: bool = True
    ) -> tuple[float, float] | None:
        """The least time of some work, by its operations and by its bytes; the longer of the two holds."""
        rate, bandwidth = self.operations(dtype, measure), self.bandwidth(measure)
        return (operations / rate, nbytes / bandwidth) if rate and bandwidth else None

    def exceeded(self, dtype: str, rate: float) -> None:
        """Note the rate that a kernel reached; a ceiling far below it is wrong, and measured again, once.

        Only operations tell this: bytes may come from a cache.
        """
        what = dtype if dtype in workloads.DTYPES else "float32"
        if rate > _EXCEEDED * (self._found.get(what) or rate) and what not in self._again:
            self._again.add(what)
            del self._found[what]
            self._rate(what, measure=True)

    def _rate(self, what: str, measure: bool) -> float | None:
        if what not in self._found:
            record = Record(self._kept, what)
            value, due = record.get()
            rate = _number(value)
            if measure and (rate is None or due or what in self._again):
                new, quiet = measure_quietly(lambda: _measured(self._device, what), _larger)
                rate = _larger(rate, new)
                if rate is not None:
                    record.put(rate, quiet)
            if rate is None and not measure:
                return None
            self._found[what] = rate
        return self._found[what]


def _number(value: object) -> float | None:
    """A rate; None where a file that somebody changed has something else."""
    return float(value) if isinstance(value, (int, float)) and 0 < value < float("inf") else None


def _larger(rate: float | None, other: float | None) -> float | None:
    return max((known for known in (rate, other) if known is not None), default=None)


def _measured(device: Device, what: str) -> float | None:
    """A rate; None where the device cannot do it, or has no room."""
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
