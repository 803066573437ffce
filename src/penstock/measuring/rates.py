"""How long devices take for work of each size, measured once in a few seconds and kept on disk.

Other processes can only slow a measurement down, so the shortest of several times is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

from penstock.errors import PenstockError
from penstock.measuring.quiet import Record, device_key, measure_quietly
from penstock.measuring.workloads import best_seconds, device_for_measuring
from penstock.runtime import Device
from penstock.tensor.arithmetic import add, exp
from penstock.tensor.creation import asarray
from penstock.tensor.jit import jit
from penstock.tensor.linear import matmul
from penstock.tuning_cache import TuningCache

Points = tuple[tuple[float, float], ...]  # sizes, each with its seconds

_SECONDS = 3.5  # for all devices of a machine; sizes that are not measured by then are extrapolated
_TRY_SECONDS = 0.01
_ITEMS = (1 << 20, 1 << 16, 1 << 23, 1 << 18, 1 << 12)  # of sums of vectors, the most important first
_LENGTHS = (256, 32, 1024, 512, 64, 128)  # of the matrices of products
_STEPS = 8
_SMALL_COPY, _LARGE_COPY = 4 << 10, 8 << 20  # bytes
_RATES = "rates"  # the name in the file


@dataclass(frozen=True)
class Rates:
    """How long a device takes, in seconds."""

    program: float  # to run a program of a single small step, and to wait for it
    step: float  # for each further step
    sums: Points  # by bytes: to read and write so many in a step, in addition to `program`
    products: Points  # by length: the product of two square float32 matrices, in addition to `program`
    exponential: float  # per item, in addition to reading and writing it
    uploads: Points  # by bytes: from an array of the host into the device's memory
    downloads: Points

    def moving_seconds(self, nbytes: int) -> float:
        """To read and write so many bytes in a step."""
        return at(self.sums, nbytes)

    def product_seconds(self, operations: float) -> float:
        """A product of float32 matrices that are not far from square."""
        return at(self.products, (operations / 2) ** (1 / 3))

    def best(self, other: Rates) -> Rates:
        """The shorter times of two measurements."""
        return Rates(
            program=min(self.program, other.program),
            step=min(self.step, other.step),
            sums=_shorter(self.sums, other.sums),
            products=_shorter(self.products, other.products),
            exponential=min(self.exponential, other.exponential),
            uploads=_shorter(self.uploads, other.uploads),
            downloads=_shorter(self.downloads, other.downloads),
        )

    @classmethod
    def parsed(cls, record: Any) -> Rates:
        """From a record of the tuning cache; raises ValueError, TypeError or KeyError if it is not valid."""
        times = {name: _time(record[name]) for name in ("program", "step", "exponential")}
        points = {name: _points(record[name]) for name in ("sums", "products", "uploads", "downloads")}
        return cls(**times, **points)  # type: ignore[arg-type]


def at(points: Points, size: float) -> float:
    """Seconds at a size, interpolated between two points on logarithmic axes."""
    if size <= points[0][0]:
        return points[0][1]
    for (low, before), (high, after) in pairwise(points):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return float(before * (after / before) ** share)
    last, seconds = points[-1]
    if len(points) == 1:
        return seconds * size / last
    # Beyond the last point, the time grows by the power of the size that the last two points show.
    low, before = points[-2]
    power = math.log(max(seconds / before, 1.0)) / math.log(last / low)
    return float(seconds * (size / last) ** max(power, 1.0))


def machine_rates(devices: Sequence[Device], remeasure: bool = False) -> dict[Device, Rates]:
    """The rates of devices, from the file or measured; a device that cannot be used is left out.

    With `remeasure`, all are measured anew.
    """
    kept = {
        device: Record(TuningCache(device_key("dispatch", device.capabilities)), _RATES) for device in devices
    }
    rates: dict[Device, Rates] = {}
    missing = []
    for device, record in kept.items():
        value, due = record.get()
        try:
            rates[device] = Rates.parsed(value)
        except (ValueError, TypeError, KeyError):  # never measured, or the file is not valid
            due = True
        if due or remeasure:
            missing.append(device)
    # The host first, which compiles nothing and so is done soon.
    missing.sort(key=lambda device: device.capabilities.kind != "host")
    end = perf_counter() + _SECONDS
    for at, device in enumerate(missing):
        # In a context of its own, since a function may be being captured in this one.
        try:
            seconds = (end - perf_counter()) / (len(missing) - at)
            new, quiet = measure_quietly(partial(Context().run, measured, device, seconds), Rates.best)
        except PenstockError:
            continue
        rates[device] = new if remeasure or device not in rates else new.best(rates[device])
        kept[device].put(asdict(rates[device]), quiet)
    return {device: rates[device] for device in devices if device in rates}


def placement_cache(devices: Sequence[Device]) -> TuningCache:
    """The file of placements on these devices."""
    return TuningCache(" and ".join(device_key("dispatch", device.capabilities) for device in devices))


def measured(device: Device, seconds: float) -> Rates:
    """The rates of a device, measured in about so many seconds on a driver that is opened only for this."""
    end = perf_counter() + seconds
    with device_for_measuring(device) as own:
        return _Measurement(own, end).rates()


class _Measurement:
    def __init__(self, device: Device, end: float) -> None:
        self._device = device
        self._end = end  # the time after which no further size is measured
        self._program = 0.0

    def rates(self) -> Rates:
        self._program = self._seconds(add, (16,))
        chain: Callable[..., Any] = partial(_chained, matmul)
        product = self._seconds(matmul, (8, 8))
        step = max(self._seconds(chain, (8, 8)) - product, 0.0) / _STEPS
        items = _ITEMS[0]
        first = self._beside(add, (items,))
        exponential = max(self._beside(exp, (items,), operands=1) - first, first / 10) / items
        uploads, downloads = self._copies()
        lengths = [(float(_LENGTHS[0]), self._beside(matmul, (_LENGTHS[0],) * 2))]
        sums = [(8.0 * items, first)]
        for number in range(1, max(len(_ITEMS), len(_LENGTHS))):
            if number < len(_LENGTHS) and not self._late():
                lengths.append((float(_LENGTHS[number]), self._beside(matmul, (_LENGTHS[number],) * 2)))
            if number < len(_ITEMS) and not self._late():
                sums.append((8.0 * _ITEMS[number], self._beside(add, (_ITEMS[number],))))
        return Rates(
            program=self._program,
            step=max(step, 1e-7),
            sums=plausible(sums),
            products=plausible(lengths, 3, self._program),
            exponential=exponential,
            uploads=uploads,
            downloads=downloads,
        )

    def _late(self) -> bool:
        return perf_counter() > self._end

    def _seconds(self, function: Callable[..., Any], shape: tuple[int, ...], operands: int = 2) -> float:
        """The time of a jitted function; all operands are the same tensor."""
        x = asarray(np.ones(shape, np.float32), device=self._device)
        return best_seconds(self._device, partial(jit(function), *[x] * operands), _TRY_SECONDS)

    def _beside(self, function: Callable[..., Any], shape: tuple[int, ...], operands: int = 2) -> float:
        """The time of a jitted function, less that of the smallest program."""
        return max(self._seconds(function, shape, operands) - self._program, 1e-7)

    def _copies(self) -> tuple[Points, Points]:
        uploads, downloads = [], []
        for nbytes in (_SMALL_COPY, _LARGE_COPY):
            array = np.ones(nbytes, np.uint8)
            buffer = self._device.upload(array)
            call: Callable[[], Any] = partial(self._device.upload, array, buffer)
            uploads.append((float(nbytes), best_seconds(self._device, call, _TRY_SECONDS)))
            call = partial(_downloaded, self._device, buffer)
            downloads.append((float(nbytes), best_seconds(self._device, call, _TRY_SECONDS)))
        return tuple(uploads), tuple(downloads)


def plausible(points: Sequence[tuple[float, float]], power: int = 0, unsure: float = 0.0) -> Points:
    """Measured times, corrected for the influence of other processes.

    A smaller size takes no longer than a larger size. Unless the power is 0, a larger size takes at most
    twice the time that growth by this power of the size predicts. Times below `unsure` predict nothing.
    """
    corrected = sorted(points)
    for number in range(len(corrected) - 1, 0, -1):
        size, seconds = corrected[number - 1]
        corrected[number - 1] = size, min(seconds, corrected[number][1])
    for after in range(1, len(corrected) if power else 0):
        (low, before_seconds), (high, seconds) = corrected[after - 1 : after + 1]
        most = 2 * max(before_seconds, unsure) * (high / low) ** power
        corrected[after] = high, min(seconds, most)
    return tuple(corrected)


def _shorter(points: Points, others: Points) -> Points:
    """The shorter of two times for each size; a smaller size takes no longer than a larger size."""
    both = dict(others)
    for size, seconds in points:
        both[size] = min(seconds, both.get(size, seconds))
    return plausible(list(both.items()))


def _chained(product: Callable[..., Any], x: Any, y: Any) -> Any:
    for _ in range(1 + _STEPS):
        x = product(x, y)
    return x


def _downloaded(device: Device, buffer: Any) -> None:
    device.download(buffer).wait()


def _time(value: Any) -> float:
    seconds = float(value)
    if not 0 < seconds < math.inf:
        raise ValueError(f"{value!r} is no time")
    return seconds


def _points(record: Any) -> Points:
    points = tuple(sorted((_time(size), _time(seconds)) for size, seconds in record))
    if not points or len({size for size, _ in points}) != len(points):
        raise ValueError("each size has a single time")
    return points
