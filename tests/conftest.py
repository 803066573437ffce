"""The devices that the conformance suite runs on, and the kernels that the tests use on them."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import nn, optim
from penstock.config import Settings
from penstock.drivers.driver import Driver, Event, Kernel, Queue, Source
from penstock.drivers.host import HostDriver
from penstock.drivers.opencl import OpenCLDriver, best_memory_kind, find_devices
from penstock.errors import DeviceError
from penstock.runtime import Device

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread does: one of ours, or of a driver, which gives things back in its time."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)


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

CUDA = """
#define FROM (blockIdx.x * blockDim.x + threadIdx.x)
#define STEP (gridDim.x * blockDim.x)
extern "C" __global__ void fill(int *out, int value, int n) {
    for (int i = FROM; i < n; i += STEP) out[i] = value;
}
extern "C" __global__ void axpy(const float *x, float *y, float a, int n) {
    for (int i = FROM; i < n; i += STEP) y[i] += a * x[i];
}
extern "C" __global__ void spin(int *out, int rounds) {  /* takes its time */
    int x = FROM + 1;
    for (int i = 0; i < rounds; i++) x = x * 1664525 + 1013904223;
    out[0] = x;
}
"""

WGSL = """
kernel fill(out: array<i32>, value: i32, n: i32) {
    for (var i = GROUP_0 * THREADS + THREAD; i < n; i += GROUPS_0 * THREADS) { out[i] = value; }
}
kernel axpy(x: array<f32>, y: array<f32>, a: f32, n: i32) {
    for (var i = GROUP_0 * THREADS + THREAD; i < n; i += GROUPS_0 * THREADS) { y[i] += a * x[i]; }
}
kernel spin(out: array<i32>, rounds: i32) {  // takes its time
    var x = GROUP_0 * THREADS + THREAD + 1;
    for (var i = 0; i < rounds; i += 1024) { ROUNDS }
    out[0] = x;
}
"""
# Mesa's software Vulkan ends a thread's loops after 65535 iterations, so each has many rounds.
WGSL = WGSL.replace("ROUNDS", "x = (x ^ (x >> 3u)) * 1664525 + 1013904223; " * 1024)


def _fill(out: np.ndarray, value: np.int32, n: np.int32) -> None:
    out[:n] = value


def _axpy(x: np.ndarray, y: np.ndarray, a: np.float32, n: np.int32) -> None:
    y[:n] += a * x[:n]


def _spin(out: np.ndarray, rounds: np.int32) -> None:
    out[0] = rounds


NUMPY = {"fill": _fill, "axpy": _axpy, "spin": _spin}


class GraphingHost(HostDriver):
    """A host driver that makes one launch of many, as CUDA does."""

    graphs = True
    reaches_pinned = True
    _random = random.Random(0)

    def capture(self, bound: Sequence[Any], after: Sequence[Sequence[int]]) -> Any:
        """In another order, whatever `after` permits."""
        waiting, order = list(range(len(bound))), []
        while waiting:
            ready = [one for one in waiting if not set(after[one]).intersection(waiting)]
            order.append(self._random.choice(ready))
            waiting.remove(order[-1])
        return [bound[one] for one in order]

    def replay(
        self, queue: Queue, bound: Sequence[Any], waits: list[Event] | None, events: list[Event]
    ) -> None:
        for one in bound:
            if not isinstance(one, list):
                super().replay(queue, [one], waits, events)
                continue
            calls = [partial(function, *args) for function, args in one]

            def run(calls: list[Callable[[], None]] = calls) -> None:
                for call in calls:
                    call()

            events.append(self._record(queue, run, waits))


# PoCL, unless the machine has a GPU, or PENSTOCK_TEST_OPENCL has a part of another platform's name.
NATIVE = next(
    device
    for device in find_devices()
    if os.environ.get("PENSTOCK_TEST_OPENCL", "").lower() in device.platform.name.lower()
)

# Every way in which a driver can hold memory and finish work, each as a driver of its own. Every OpenCL
# device has the last two kinds of memory; shared virtual memory is PoCL's and that of integrated GPUs.
DRIVERS: dict[str, Callable[[], Driver]] = {
    "opencl-svm": lambda: OpenCLDriver(NATIVE, "opencl-svm", "svm"),
    "opencl-mapped": lambda: OpenCLDriver(NATIVE, "opencl-mapped", "mapped"),
    "opencl-device": lambda: OpenCLDriver(NATIVE, "opencl-device", "device"),
    "host": lambda: HostDriver("host-plain"),
    "host-late": lambda: HostDriver("host-late", scheduler=random.Random(1)),
    "host-far": lambda: GraphingHost("host-far", shared_memory=False, scheduler=random.Random(2)),
}

if best_memory_kind(NATIVE) != "svm":
    del DRIVERS["opencl-svm"]


# The values that kernels compute do not depend on the kind of memory: the quick set has one OpenCL driver.
one_opencl = pytest.mark.slow("opencl-mapped", "opencl-device" if "opencl-svm" in DRIVERS else "")


def _cuda_devices() -> list[int]:
    with suppress(ImportError, DeviceError):  # neither the library nor a device need be there
        from penstock.drivers import cuda

        return cuda.find_devices()
    return []


def _cuda() -> Driver:
    from penstock.drivers.cuda import CudaDriver

    return CudaDriver(_cuda_devices()[0], "cuda")


if _cuda_devices():
    DRIVERS["cuda"] = _cuda
CUDA_KINDS = [kind for kind in DRIVERS if kind == "cuda"]  # on machines that have one
collect_ignore = [] if CUDA_KINDS else ["test_cuda.py"]


def _adapters() -> list[Any]:
    from penstock.drivers import webgpu

    found = webgpu.find_devices()
    if not found and os.environ.get("PENSTOCK_REQUIRE_WEBGPU"):
        raise RuntimeError("PENSTOCK_REQUIRE_WEBGPU is set, and there is no WebGPU adapter on this machine")
    return found


def _webgpu() -> Driver:
    from penstock.drivers.webgpu import WebGpuDriver

    return WebGpuDriver(_adapters()[0], "webgpu")


if _adapters():
    DRIVERS["webgpu"] = _webgpu
WEBGPU_KINDS = [kind for kind in DRIVERS if kind == "webgpu"]  # on machines that have one
if not WEBGPU_KINDS:
    collect_ignore.append("test_webgpu.py")


# The quick set and the whole suite. docs/testing.md says what differs.


whole = False  # whether all of the suite runs


def examples(in_whole: int, quick: int) -> int:
    """How many are tried: of examples that compile kernels, of processes, of operations."""
    return in_whole if whole else quick


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow", action="store_true", help="every test, every example, and kernels that PoCL optimizes"
    )


def pytest_configure(config: pytest.Config) -> None:
    global whole
    whole = config.getoption("--slow")
    import hypothesis  # not above: many tests start processes that import this file, and need none

    # Without a deadline: on a busy machine, any example may take long.
    hypothesis.settings.register_profile("penstock", deadline=None, derandomize=not whole)
    hypothesis.settings.load_profile("penstock")
    os.environ.setdefault("PENSTOCK_COMPILE_AHEAD", "0")  # what tests compile is enough
    if not whole:  # PoCL compiles in a quarter of the time what it does not optimize
        os.environ.setdefault("POCL_EXTRA_BUILD_FLAGS", "-cl-opt-disable")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the slow tests, unless they are asked for."""
    if not config.getoption("--slow"):
        config.hook.pytest_deselected(items=[item for item in items if is_slow(item)])
        items[:] = [item for item in items if not is_slow(item)]


def is_slow(item: pytest.Item) -> bool:
    """Marked with `slow`; or with `slow(value, ...)`, and one of its parameters has such a value or name."""
    call = getattr(item, "callspec", None)
    given = set() if call is None else {*map(str, call.params.values()), *call._idlist}
    return any(not marker.args or given.intersection(marker.args) for marker in item.iter_markers("slow"))


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> None:
    """PoCL optimizes the kernels of drivers that are opened from here on, as it does for users."""
    monkeypatch.delenv("POCL_EXTRA_BUILD_FLAGS", raising=False)


@pytest.fixture(autouse=True, scope="module")
def _collections_see_one_file() -> Iterator[None]:
    """Late in a run, a collection of all objects takes 0.15 s, and many tests ask for hundreds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Lazy(random.Random):
    """A scheduler that lets nothing run before the host waits for it."""

    def randrange(self, *_: int) -> int:  # type: ignore[override]
        return 0


# Small bounds, so that a short test passes through every one of them.
SMALL = Settings(max_commands=8, max_bytes=1 << 20, max_in_flight=2, staging_bytes=1 << 16)


def source_for(device: Device) -> Source:
    """The test kernels in the device's language."""
    return {"opencl": OPENCL, "cuda": CUDA, "wgsl": WGSL, "numpy": NUMPY}[device.capabilities.language]


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


def gpt_losses(device: Device, layers: int, batches: int) -> tuple[list[float], Any]:
    """The losses of a small GPT on random tokens, and the jitted step."""
    ps.random.manual_seed(5)
    model = nn.GPT(vocab_size=61, context=16, width=32, layers=layers, heads=2, device=device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)

    @ps.jit
    def step(tokens: ps.Tensor) -> ps.Tensor:
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        return loss

    tokens = np.random.default_rng(0).integers(0, 61, (batches, 8, 17))
    return [step(ps.asarray(batch, device=device)).item() for batch in tokens], step
