"""What a device reaches at best: measured once, as no data sheet says it of the machine, and kept on disk.

Others on the machine can only slow a measurement down, so the best of several is taken. A kernel whose data
are still in a cache may move more than the memory does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from importlib.metadata import version
from time import perf_counter
from typing import Any

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.errors import PenstockError
from penstock.graph.dtypes import bfloat16, float16, float32, float64
from penstock.kernels.choices import Choices
from penstock.profiling.settled import Kept, settled
from penstock.realize import Structure
from penstock.runtime import Device
from penstock.tensor.core import no_grad
from penstock.tensor.creation import asarray
from penstock.tensor.jit import jit
from penstock.tensor.linear import matmul
from penstock.tensor.manipulation import astype
from penstock.tensor.reduction import sum as sum_

measuring: ContextVar[bool] = ContextVar("measuring", default=False)  # on a device that is there for it alone

_MOVED = {"cpu": 64 << 20, "gpu": 256 << 20}  # bytes of an array, beyond the caches
_MEASURED = {kind: 4 * nbytes for kind, nbytes in _MOVED.items()}  # bytes that a measurement takes at most
_LENGTH, _MOST_LENGTH = 1024, 8192  # of the matrices of products
_LONG = 2e-3  # seconds, from which on a product is long enough, and a larger one would tell no more
_TRIES, _TRY_SECONDS = 3, 0.05  # at least so often, and for so long
_AGREEING = 1.1  # the shortest times differ by less than this factor, or it is tried for longer:
_PATIENCE = 3  # for so many times as long
_EXCEEDED = 1.25  # what computes so many times as fast as the best shows that this was measured wrongly
DTYPES = {str(dtype): dtype for dtype in (float16, bfloat16, float32, float64)}
_BANDWIDTH = "bytes"  # beside the dtypes of products, in the file
_LAUNCHES, _RECORDING = "launches", "recorded operations"
_LAUNCHED, _RECORDED = 100, 200  # in a row, for one time


class Ceilings:
    """The best rates of one device, per second. Each is measured when it is first asked for."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept = Choices(_described(device.capabilities))
        self._found: dict[str, float | None] = {}
        self._again: set[str] = set()  # what was seen to be too low

    def bandwidth(self, measure: bool = True) -> float | None:
        """Bytes that are read and written; None if nothing is known, and it is not to be measured."""
        return self._rate(_BANDWIDTH, measure)

    def operations(self, dtype: str, measure: bool = True) -> float | None:
        """Operations of a large product of matrices; whole numbers are held against float32."""
        return self._rate(dtype if dtype in DTYPES else "float32", measure)

    def launches(self, measure: bool = True) -> float | None:
        """Replays of the smallest jitted function, one after another: what starting something costs."""
        return self._rate(_LAUNCHES, measure)

    def recorded(self, measure: bool = True) -> float | None:
        """Operations that are recorded, and found again as a known program, without `jit`."""
        return self._rate(_RECORDING, measure)

    def known(self) -> dict[str, float]:
        """All rates that were asked for: `bytes`, and operations by the dtype of their products."""
        return {what: rate for what, rate in self._found.items() if rate is not None}

    def least_seconds(
        self, operations: int, nbytes: int, dtype: str, measure: bool = True
    ) -> tuple[float, float] | None:
        """How long work takes at best, by its operations and by its bytes; the longer one holds."""
        rate, bandwidth = self.operations(dtype, measure), self.bandwidth(measure)
        return (operations / rate, nbytes / bandwidth) if rate and bandwidth else None

    def exceeded(self, dtype: str, rate: float) -> None:
        """Learn how fast something computed: where that is far above the ceiling, measure it again, once.

        Bytes tell no such thing, as they may come from a cache.
        """
        what = dtype if dtype in DTYPES else "float32"
        if rate > _EXCEEDED * (self._found.get(what) or rate) and what not in self._again:
            self._again.add(what)
            del self._found[what]
            self._rate(what, measure=True)

    def _rate(self, what: str, measure: bool) -> float | None:
        if what not in self._found:
            record = Kept(self._kept, what)
            value, due = record.get()
            rate = _number(value)
            if measure and (rate is None or due or what in self._again):
                new, quiet = settled(lambda: _measured(self._device, what), _larger)
                rate = _larger(rate, new)
                if rate is not None:
                    record.put(rate, quiet)
            if rate is None and not measure:
                return None
            self._found[what] = rate
        return self._found[what]


def _described(capabilities: Capabilities) -> str:
    """What rates depend on: they are measured again where one of it is another."""
    about = (capabilities.description, capabilities.vendor, capabilities.api, capabilities.compute_units)
    more = (capabilities.vector_width, capabilities.matmul_library, capabilities.tf32, np.__version__)
    return f"ceilings {about} {more} penstock {version('penstock')}"


def _number(value: object) -> float | None:
    """A rate; None where a file that somebody changed has something else."""
    return float(value) if isinstance(value, (int, float)) and 0 < value < float("inf") else None


def _larger(rate: float | None, other: float | None) -> float | None:
    return max((known for known in (rate, other) if known is not None), default=None)


def _measured(device: Device, what: str) -> float | None:
    """A rate; None where the device cannot do it, or has no room."""
    if not _room_for_it(device):
        return None
    token = measuring.set(True)
    try:
        own = Device(f"{device.name} (measured)", device.capabilities, device.another_driver)
        try:
            if own.driver is device.driver:  # it was given, and there is no other
                return _rate(device, what)
            return _rate(own, what)
        finally:
            if own.driver is not device.driver:
                own.close()
    except PenstockError:
        return None
    finally:
        measuring.reset(token)


def _room_for_it(device: Device) -> bool:
    """Whether measuring stays within the limit that was set for the device."""
    limit, stats = device.limit_bytes, device.memory_stats()
    return limit is None or limit - stats.live_bytes - stats.pooled_bytes >= _MEASURED[_size(device)]


def _size(device: Device) -> str:
    return "gpu" if device.capabilities.kind == "gpu" else "cpu"


def _rate(device: Device, what: str) -> float:
    with no_grad():
        if what == _BANDWIDTH:
            return bandwidth_of(
                device, min(_MOVED[_size(device)], device.capabilities.total_bytes // 16), _TRY_SECONDS
            )
        if what == _LAUNCHES:
            return _LAUNCHED / launching_seconds(device, _LAUNCHED, _TRY_SECONDS)
        if what == _RECORDING:
            return _RECORDED / recording_seconds(device, _RECORDED, _TRY_SECONDS)
        length = _LENGTH
        seconds = product_seconds(device, length, what, _TRY_SECONDS)
        if seconds < _LONG:
            while seconds < _LONG and length < _MOST_LENGTH:  # about eight times as long for each
                length, seconds = 2 * length, 8 * seconds
            seconds = product_seconds(device, length, what, _TRY_SECONDS)
        return 2 * length**3 / seconds


def bandwidth_of(device: Device, nbytes: int, seconds: float) -> float:
    """Bytes a second, by the best of a copy, of a kernel that reads and writes, and of one that only reads.

    Each is tried for about so many seconds.
    """
    array = np.ones(nbytes // 4, np.float32)
    source, target = device.upload(array), device.empty(array.nbytes)
    copied = best_seconds(device, partial(device.copy, target, source), seconds)
    del source, target
    x = asarray(array, device=device)
    doubled = best_seconds(device, partial(jit(lambda x: x * 2), x), seconds)
    read = best_seconds(device, partial(jit(sum_), x), seconds)
    return array.nbytes / min(copied / 2, doubled / 2, read)


def launching_seconds(device: Device, count: int, seconds: float) -> float:
    """How long so many replays of next to nothing take, tried for about so many seconds."""
    x = asarray(np.ones(64, np.float32), device=device)
    doubled: Callable[..., Any] = jit(lambda x: x * 2)

    def replay() -> None:
        for _ in range(count):
            doubled(x)

    return best_seconds(device, replay, seconds)


def recording_seconds(device: Device, count: int, seconds: float) -> float:
    """How long it takes to record so many operations and to look them up, tried for about so many seconds."""
    x = asarray(np.ones(64, np.float32), device=device)

    def record() -> None:
        y = x
        for _ in range(count):
            y = y + 1.0
        Structure([y._node])

    return best_seconds(device, record, seconds)


def product_seconds(device: Device, length: int, dtype: str, seconds: float) -> float:
    """How long a product of square matrices takes, tried for about so many seconds."""
    # Few bits change from number to number, so that a GPU takes little power, and keeps its clock.
    array = np.ones((length, length), np.float32)
    x = astype(asarray(array, device=device), DTYPES[dtype])
    return best_seconds(device, partial(jit(lambda x: matmul(x, x)), x), seconds)


def best_seconds(device: Device, call: Callable[[], Any], seconds: float) -> float:
    """The shortest time of a call with the wait for it, of several that take about so many seconds.

    It is tried for longer where the shortest ones do not agree.
    """
    for _ in range(2):
        call()  # compiles
    device.sync()
    shortest: list[float] = []
    end = perf_counter() + seconds
    last = end + _PATIENCE * seconds
    while True:
        start = perf_counter()
        call()
        device.sync()
        now = perf_counter()
        shortest = sorted([*shortest, now - start])[:_TRIES]
        if len(shortest) == _TRIES and now >= (end if shortest[-1] < _AGREEING * shortest[0] else last):
            return shortest[0]
