"""The devices that the conformance suite runs on, and the kernels that the tests use on them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from penstock.config import Settings
from penstock.device.driver import Driver, Kernel, Source
from penstock.device.host import HostDriver
from penstock.device.opencl import OpenCLDriver, best_memory_kind, find_devices
from penstock.runtime import Device

SIGNATURES = {
    "fill": ("int32*", "int32", "int32"),
    "axpy": ("float32*", "float32*", "float32", "int32"),
    "spin": ("int32*", "int32"),
}

OPENCL = """
__kernel void fill(__global int *out, int value, int n) {
    for (int i = get_global_id(0); i < n; i += get_global_size(0)) out[i] = value;
}
__kernel void axpy(__global const float *x, __global float *y, float a, int n) {
    for (int i = get_global_id(0); i < n; i += get_global_size(0)) y[i] += a * x[i];
}
__kernel void spin(__global int *out, int rounds) {  /* takes its time */
    int x = get_global_id(0) + 1;
    for (int i = 0; i < rounds; i++) x = x * 1664525 + 1013904223;
    out[0] = x;
}
"""


def _fill(out: np.ndarray, value: np.int32, n: np.int32) -> None:
    out[:n] = value


def _axpy(x: np.ndarray, y: np.ndarray, a: np.float32, n: np.int32) -> None:
    y[:n] += a * x[:n]


def _spin(out: np.ndarray, rounds: np.int32) -> None:
    out[0] = rounds


NUMPY = {"fill": _fill, "axpy": _axpy, "spin": _spin}

NATIVE = find_devices()[0]  # PoCL, unless the machine has a GPU

# Every way in which a driver can hold memory and finish work, each as a driver of its own. Every OpenCL
# device has the last two kinds of memory; shared virtual memory is PoCL's and that of integrated GPUs.
DRIVERS: dict[str, Callable[[], Driver]] = {
    "opencl-svm": lambda: OpenCLDriver(NATIVE, "opencl-svm", "svm"),
    "opencl-mapped": lambda: OpenCLDriver(NATIVE, "opencl-mapped", "mapped"),
    "opencl-device": lambda: OpenCLDriver(NATIVE, "opencl-device", "device"),
    "host": lambda: HostDriver("host-plain"),
    "host-late": lambda: HostDriver("host-late", scheduler=random.Random(1)),
    "host-far": lambda: HostDriver("host-far", shared_memory=False, scheduler=random.Random(2)),
}

if best_memory_kind(NATIVE) != "svm":
    del DRIVERS["opencl-svm"]


class Lazy(random.Random):
    """A scheduler that lets nothing run before the host waits for it."""

    def randrange(self, *_: int) -> int:  # type: ignore[override]
        return 0


# Small bounds, so that a short test passes through every one of them.
SMALL = Settings(max_commands=8, max_bytes=1 << 20, max_in_flight=2, staging_bytes=1 << 16)


def source_for(device: Device) -> Source:
    """The test kernels in the device's language."""
    return OPENCL if device.capabilities.language == "opencl" else NUMPY


def compiled(device: Device) -> dict[str, Kernel]:
    """The test kernels on a device."""
    return device.compile(source_for(device), SIGNATURES)


@pytest.fixture(params=DRIVERS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A fresh device of every kind."""
    made = Device.over(DRIVERS[request.param](), SMALL)
    yield made
    made.close()


@pytest.fixture
def kernels(device: Device) -> dict[str, Kernel]:
    return compiled(device)
