"""The devices that the conformance suite runs on, and the kernels that the tests use on them."""

from __future__ import annotations

import gc
import graphlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy reads it once; other tests have the other cores
os.environ.setdefault("GALLIVM_PERF", "nopt")  # Mesa's software Vulkan compiles in two thirds of the time

import numpy as np
import pocl_headers
import pyopencl as cl
import pytest

import penstock as ps
from penstock import nn, optim, tuning_cache
from penstock.config import Settings
from penstock.drivers.driver import Driver, Event, Kernel, Queue, Source
from penstock.drivers.host import HostDriver
from penstock.drivers.opencl import OpenCLDriver, best_memory_kind, find_devices, pocl
from penstock.drivers.opencl.driver import MemoryKind
from penstock.drivers.rates import StepRates
from penstock.errors import DeviceError
from penstock.measuring import ceilings, rates, step_rates
from penstock.measuring.rates import Rates
from penstock.runtime import Device

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def until(condition: Callable[[], object]) -> None:
    """Wait for another thread, of Penstock or of a driver, which may release things later."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)


def pause_of_others(call: Callable[[], object]) -> tuple[float, float]:
    """The seconds of a call, and the longest in which no other thread of Python ran meanwhile."""
    longest, ends = 0.0, threading.Event()

    def look() -> None:
        nonlocal longest
        before = time.perf_counter()
        while not ends.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            longest, before = max(longest, now - before), now

    thread = threading.Thread(target=look)
    thread.start()
    start = time.perf_counter()
    call()
    taken = time.perf_counter() - start
    ends.set()
    thread.join()
    return taken, longest


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
    """A host driver that merges many launches into one, as CUDA graphs do."""

    graphs = True
    few_launches = 4
    reaches_pinned = True
    _random = random.Random(0)

    def capture(self, bound: Sequence[Any], after: Sequence[Sequence[int]]) -> Any:
        """In another order, whatever `after` permits."""
        left, order = graphlib.TopologicalSorter(dict(enumerate(after))), []
        left.prepare()
        ready = list(left.get_ready())
        while ready:
            item = ready.pop(self._random.randrange(len(ready)))
            order.append(bound[item])
            left.done(item)
            ready += left.get_ready()
        return order

    def bind_copy(self, target: Any, source: Any, nbytes: int, to_device: bool) -> Any:
        assert target.nbytes == source.nbytes == nbytes
        return np.copyto, [target, source]

    def replay(
        self, queue: Queue, bound: Sequence[Any], waits: list[Event] | None, events: list[Event]
    ) -> None:
        for item in bound:
            if not isinstance(item, list):
                super().replay(queue, [item], waits, events)
                continue
            calls = [partial(function, *args) for function, args in item]

            def run(calls: list[Callable[[], None]] = calls) -> None:
                for call in calls:
                    call()

            events.append(self._record(queue, run, waits))


pocl_headers.shorten(Path(__file__).parent.parent / ".pytest_cache")

# PoCL, unless the machine has a GPU, or PENSTOCK_TEST_OPENCL has a part of another platform's name.
NATIVE = next(
    device
    for device in find_devices()
    if os.environ.get("PENSTOCK_TEST_OPENCL", "").lower() in device.platform.name.lower()
)


_IS_POCL = NATIVE.platform.name == pocl.PLATFORM
_UNOPTIMIZED = "-cl-opt-disable"


class UnoptimizedDriver(OpenCLDriver):
    """OpenCL without PoCL's optimizer."""

    @property
    def _options(self) -> list[str]:
        return [*super()._options, _UNOPTIMIZED] if _IS_POCL else super()._options


def opencl_threads(name: str = "opencl-threads", memory: MemoryKind | None = None) -> OpenCLDriver:
    """OpenCL with the kernels of a GPU: many threads in a group, and no vectors.

    PoCL's optimizer takes minutes for the large ones, and no GPU has it: the whole suite does without it too.
    """
    driver = UnoptimizedDriver(NATIVE, name, memory)
    driver.capabilities = replace(driver.capabilities, vector_width=1)
    return driver


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


# What the surface means does not depend on who computes: there, WebGPU is in the whole suite.
surface = pytest.mark.slow(*one_opencl.args, "webgpu")


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

    result = webgpu.find_devices()
    if not result and os.environ.get("PENSTOCK_REQUIRE_WEBGPU"):
        raise RuntimeError("PENSTOCK_REQUIRE_WEBGPU is set, and there is no WebGPU adapter on this machine")
    return result


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
        "--slow", action="store_true", help="every test, every example, and some kernels optimized"
    )


def pytest_configure(config: pytest.Config) -> None:
    global whole
    whole = config.getoption("--slow")
    import hypothesis  # not above: many tests start processes that import this file, and need none

    # Without a deadline: on a busy machine, any example may take long.
    hypothesis.settings.register_profile("penstock", deadline=None, derandomize=not whole)
    hypothesis.settings.load_profile("penstock")
    os.environ.setdefault("PENSTOCK_COMPILE_AHEAD", "0")  # what tests compile is enough
    # Processes that tests start need not look for devices: loading WebGPU takes as long as all the rest.
    os.environ.setdefault("PENSTOCK_DEVICE", ps.default_device().name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the slow tests, unless they are asked for; those that run alone come last.

    Each of them waits for what another worker runs at present, which should not be a long test.
    """
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)
    if not config.getoption("--slow"):
        config.hook.pytest_deselected(items=[item for item in items if is_slow(item)])
        items[:] = [item for item in items if not is_slow(item)]


def is_slow(item: pytest.Item) -> bool:
    """Marked with `slow`; or with `slow(value, ...)`, and one of its parameters has such a value or name."""
    call = getattr(item, "callspec", None)
    given = set() if call is None else {*map(str, call.params.values()), *call._idlist}
    return any(not marker.args or given.intersection(marker.args) for marker in item.iter_markers("slow"))


# The files about what kernels compute. In the whole suite PoCL optimizes theirs, as it does for users.
OPTIMIZED = {
    "test_attention",
    "test_bridge",
    "test_column_reductions",
    "test_conformance",
    "test_convolution",
    "test_dtypes",
    "test_exact_sums",
    "test_fusion",
    "test_fuzz",
    "test_horizontal_fusion",
    "test_jit_gradients",
    "test_matmul_kernel",
    "test_number_ranges",
    "test_numpy_arithmetic",
    "test_own_kernels",
    "test_random",
    "test_random_graphs",
    "test_same_bits",
    "test_short_axes",
    "test_special_values",
    "test_teams",
    "test_templates",
    "test_tiles",
    "test_vector_width",
    "test_wide_sums",
}


optimize = False  # whether PoCL optimizes kernels; else it compiles them in a quarter of the time
_driver_options: Any = OpenCLDriver._options


@pytest.fixture(autouse=True, scope="session")
def _unoptimized() -> Iterator[None]:
    """PoCL optimizes only the kernels that are meant to be, here and in processes that tests start.

    Those have a variable for it. PoCL keeps the first value that it sees of it, so this process has a build
    with an empty one before.
    """

    def options(driver: OpenCLDriver) -> list[str]:
        given: list[str] = _driver_options.fget(driver)
        return [*given, _UNOPTIMIZED] if _IS_POCL and not optimize else given

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenCLDriver, "_options", property(options))
        if "POCL_EXTRA_BUILD_FLAGS" not in os.environ:
            patch.setenv("POCL_EXTRA_BUILD_FLAGS", "")
            pocl.extra_flags()
            driver = OpenCLDriver(NATIVE, "first")
            driver._build(cl.Program(driver._context, OPENCL), driver._device)  # and not loaded from the disk
            driver.close()
            patch.setenv("POCL_EXTRA_BUILD_FLAGS", _UNOPTIMIZED)
        yield


def _with_optimized(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules[__name__], "optimize", True)
    patch.delenv("POCL_EXTRA_BUILD_FLAGS", raising=False)


@pytest.fixture(autouse=True, scope="module")
def _optimized_in_whole(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if whole and request.module.__name__ in OPTIMIZED:
            _with_optimized(patch)
        yield


@contextmanager
def for_a_gpu(when: bool) -> Iterator[None]:
    """PoCL does not optimize what is compiled inside: it takes seconds for some kernels of a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if when:
            patch.setattr(sys.modules[__name__], "optimize", False)
        yield


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> None:
    """PoCL optimizes the kernels of drivers that are opened from here on, as it does for users."""
    _with_optimized(monkeypatch)


@pytest.fixture(autouse=True, scope="session")
def _not_durable() -> Iterator[None]:
    """What tests write need not survive a power cut: to wait for the disk after each kernel takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


MEASURED_RATES = step_rates.measured_rates


@pytest.fixture(autouse=True, scope="session")
def _given_step_rates() -> Iterator[None]:
    """The rates inside a step, which take a minute to measure, and which every printed plan asks for."""
    given = StepRates(1e10, {"float32": 1e11}, 1e-5, 1e10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_rates, "measured_rates", lambda device: given)
        patch.setattr(step_rates, "_RATES", "step rates of tests")  # kept beside the user's own
        yield


@pytest.fixture
def given_rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The best rates of devices, which take seconds to measure."""
    monkeypatch.setattr(ceilings, "_measured", lambda device, what: 1e11)
    points = ((4096.0, 5e-6), (1e7, 1e-3))
    machine = Rates(4e-5, 1e-6, points, ((32.0, 1e-5), (1024.0, 1e-2)), 1e-10, points, points)
    monkeypatch.setattr(rates, "measured", lambda device, seconds: machine)
    monkeypatch.setattr(tuning_cache, "cache_folder", lambda: tmp_path / "cache")  # where they are kept


# The command `penstock` in a process of its own, with such rates, which runs measure for their report.
COMMAND_WITH_RATES = """
from penstock.cli import main
from penstock.measuring import ceilings
ceilings._measured = lambda *_: 1e11
main()
"""


@pytest.fixture(autouse=True, scope="module")
def _collections_see_one_file() -> None:
    """Late in a run, a collection of all objects takes 0.15 s, and many tests ask for hundreds.

    What earlier files left stays frozen: to look through it before each file takes a minute in all.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked `alone` run while those of other workers wait, as they judge by times."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None or fcntl is None:
        yield
        return
    alone = request.node.get_closest_marker("alone") is not None
    folder = Path(tempfile.gettempdir())
    with (folder / f"penstock-{run}-gate").open("w") as gate, (folder / f"penstock-{run}").open("w") as room:
        fcntl.flock(gate, fcntl.LOCK_EX)  # so that a test that wants to be alone comes next
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(gate, fcntl.LOCK_UN)
        yield


class Lazy(random.Random):
    """A scheduler that lets nothing run before the host waits for it."""

    def randrange(self, *_: int) -> int:  # type: ignore[override]
        return 0


# Small bounds, so that a short test reaches every bound.
SMALL = Settings(
    max_commands=8, max_bytes=1 << 20, max_in_flight=2, staging_bytes=1 << 16, compile_ahead=False
)


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
