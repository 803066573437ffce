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

from penstock.device.driver import Capabilities
from penstock.errors import PenstockError
from penstock.graph.dtypes import bfloat16, float16, float32, float64
from penstock.kernels.choices import Choices
from penstock.runtime import Device
from penstock.tensor.core import no_grad
from penstock.tensor.creation import asarray
from penstock.tensor.jit import jit
from penstock.tensor.linear import matmul
from penstock.tensor.manipulation import astype

measuring: ContextVar[bool] = ContextVar(
    "measuring", default=False
)  # then, a device is opened for this alone

_MOVED = {"cpu": 64 << 20, "gpu": 256 << 20}  # bytes of an array, beyond the caches
_LENGTH, _MOST_LENGTH = 1024, 8192  # of the matrices of products
_LONG = 2e-3  # seconds, from which on a product is long enough, and a larger one would tell no more
_TRIES, _TRY_SECONDS = 3, 0.05  # at least so often, and for so long
DTYPES = {str(dtype): dtype for dtype in (float16, bfloat16, float32, float64)}
_BANDWIDTH = "bytes"  # beside the dtypes of products, in the file


class Ceilings:
    """The best rates of one device, per second. Each is measured when it is first asked for."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept = Choices(_described(device.capabilities))
        self._found: dict[str, float | None] = {}

    def bandwidth(self, measure: bool = True) -> float | None:
        """Bytes that are read and written; None if nothing is known, and it is not to be measured."""
        return self._rate(_BANDWIDTH, measure)

    def operations(self, dtype: str, measure: bool = True) -> float | None:
        """Operations of a large product of matrices; whole numbers are held against float32."""
        return self._rate(dtype if dtype in DTYPES else "float32", measure)

    def least_seconds(
        self, operations: int, nbytes: int, dtype: str, measure: bool = True
    ) -> tuple[float, float] | None:
        """How long work takes at best, by its operations and by its bytes; the longer one holds."""
        rate, bandwidth = self.operations(dtype, measure), self.bandwidth(measure)
        return (operations / rate, nbytes / bandwidth) if rate and bandwidth else None

    def _rate(self, what: str, measure: bool) -> float | None:
        if what not in self._found:
            kept = _number(self._kept.get(what))
            if kept is None and not measure:
                return None
            if kept is None:
                kept = _measured(self._device, what)
                if kept is not None:
                    self._kept.put(what, repr(kept))
            self._found[what] = kept
        return self._found[what]


def _described(capabilities: Capabilities) -> str:
    """What rates depend on: they are measured again where one of it is another."""
    about = (capabilities.description, capabilities.vendor, capabilities.api, capabilities.compute_units)
    more = (capabilities.vector_width, capabilities.matmul_library, capabilities.tf32, np.__version__)
    return f"ceilings {about} {more} penstock {version('penstock')}"


def _number(text: str | None) -> float | None:
    try:
        found = float(text) if text else 0.0
    except ValueError:  # a file that somebody changed
        return None
    return found if 0 < found < float("inf") else None


def _measured(device: Device, what: str) -> float | None:
    """A rate; None where the device cannot do it, or has no room."""
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


def _rate(device: Device, what: str) -> float:
    size = "gpu" if device.capabilities.kind == "gpu" else "cpu"
    with no_grad():
        if what == _BANDWIDTH:
            return _bandwidth(device, min(_MOVED[size], device.capabilities.total_bytes // 16))
        length = _LENGTH
        seconds = _product_seconds(device, length, what)
        if seconds < _LONG:
            while seconds < _LONG and length < _MOST_LENGTH:  # about eight times as long for each
                length, seconds = 2 * length, 8 * seconds
            seconds = _product_seconds(device, length, what)
        return 2 * length**3 / seconds


def _bandwidth(device: Device, nbytes: int) -> float:
    """The better one of a copy by the driver, and of a kernel that reads and writes."""
    array = np.ones(nbytes // 4, np.float32)
    source, target = device.upload(array), device.empty(array.nbytes)
    copied = _best(device, partial(device.copy, target, source))
    del source, target
    doubled = partial(jit(lambda x: x * 2), asarray(array, device=device))
    return 2 * array.nbytes / min(copied, _best(device, doubled))


def _product_seconds(device: Device, length: int, dtype: str) -> float:
    # Few bits change from number to number, so that a GPU takes little power, and keeps its clock.
    array = np.ones((length, length), np.float32)
    x = astype(asarray(array, device=device), DTYPES[dtype])
    return _best(device, partial(jit(lambda x: matmul(x, x)), x))


def _best(device: Device, call: Callable[[], Any]) -> float:
    call()  # compiles
    device.sync()
    best, tries, end = float("inf"), 0, perf_counter() + _TRY_SECONDS
    while tries < _TRIES or perf_counter() < end:
        start = perf_counter()
        call()
        device.sync()
        best, tries = min(best, perf_counter() - start), tries + 1
    return best
