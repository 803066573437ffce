"""Long runs of random operations, after which nothing may be left: native handles, bytes, Python objects."""

from __future__ import annotations

import ctypes
import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pyopencl as cl
import pytest
from conftest import DRIVERS, compiled, examples, until

from penstock.config import Settings
from penstock.drivers.driver import Kernel
from penstock.memory.buffer import Buffer
from penstock.runtime import Device
from penstock.stream.future import Future

# Bounds small enough for a run to pass through them often; the pool's keeps the resident size still.
BOUNDS = Settings(
    max_commands=32, max_bytes=4 << 20, max_in_flight=3, staging_bytes=1 << 18, pool_bytes=4 << 20
)
# On WebGPU, the resident size is flat only after some ten thousand operations.
OPERATIONS = {
    kind: examples(100_000 if kind == "opencl-svm" else 50_000, quick=50_000 if kind == "webgpu" else 20_000)
    for kind in DRIVERS
}
SAMPLES = 20  # readings of the resident size in a run
FLAT_BYTES = 1 << 20  # allowed drift of the resident size over the second half of a run
LARGEST = 3 << 20
PATTERN = np.arange(LARGEST, dtype=np.uint32).astype(np.uint8)
OPENCL_KINDS = [kind for kind in DRIVERS if kind.startswith("opencl")]


class Churn:
    """Random operations on a few buffers that come and go."""

    def __init__(self, device: Device, kernels: dict[str, Kernel], seed: int) -> None:
        self._device = device
        self._kernels = kernels
        self._random = random.Random(seed)
        self._held: list[Buffer] = []
        self._futures: list[Future[np.ndarray]] = []
        self._verbs: list[Callable[[], None]] = [
            self._empty,
            self._upload,
            self._overwrite,
            self._launch,
            self._launch_on_part,
            self._download,
            self._copy,
            self._view,
            self._drop,
            self._drop,
        ]

    def run(self, operations: int) -> None:
        """Run so many operations, then release everything."""
        for _ in range(operations):
            self._random.choice(self._verbs)()
        self._held.clear()
        self._futures.clear()

    def _size(self) -> int:
        """From 1 byte to 3 MiB, the half under 100 bytes and one in fifty over 100 KiB."""
        octaves = self._random.choices((6.6, 13.0, 17.0, 21.58), (50, 35, 13, 2))[0]
        return min(int(2 ** self._random.uniform(0, octaves)), LARGEST)

    def _any(self) -> Buffer:
        if not self._held:
            self._empty()
        return self._random.choice(self._held)

    def _hold(self, buffer: Buffer) -> None:
        self._held.append(buffer)
        if len(self._held) > 24:
            self._drop()

    def _empty(self) -> None:
        self._hold(self._device.empty(self._size()))

    def _drop(self) -> None:
        if self._held:
            self._held.pop(self._random.randrange(len(self._held)))

    def _upload(self) -> None:
        self._hold(self._device.upload(PATTERN[: self._size()]))

    def _overwrite(self) -> None:
        buffer = self._any()
        self._device.upload(PATTERN[: buffer.nbytes], into=buffer)

    def _launch(self) -> None:
        self._fill(self._any())

    def _launch_on_part(self) -> None:
        buffer = self._any()
        items = self._random.randint(0, buffer.nbytes // 4)
        if items:  # the host driver takes whole items only
            self._fill(buffer.view(0, 4 * items))

    def _fill(self, buffer: Buffer) -> None:
        args = (buffer, self._random.randrange(99), buffer.nbytes // 4)
        self._device.stream.launch(self._kernels["fill"], (1,), (4,), args)

    def _download(self) -> None:
        self._futures.append(self._device.download(self._any()))
        if len(self._futures) > 5:
            future = self._futures.pop(self._random.randrange(5))
            if self._random.random() < 0.7:  # the others are never asked
                future.wait()

    def _copy(self) -> None:
        source, target = self._any(), self._any()
        if source is not target:
            self._device.copy(target, source, min(source.nbytes, target.nbytes))

    def _view(self) -> None:
        writable = self._random.random() < 0.5
        with self._device.view(self._any(), writable=writable) as array:
            if writable:
                array[0] = 1


def resident_bytes() -> int:
    """The resident size without the free pages that the C library keeps for later."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    return int(psutil.Process().memory_info().rss)


def drift(samples: list[int]) -> float:
    """The rise of a straight line fitted to the second half of the samples."""
    half = samples[len(samples) // 2 :]
    slope = np.polyfit(range(len(half)), half, 1)[0]
    return float(slope * (len(half) - 1))


def own_objects() -> Counter[str]:
    """How many objects of each of the package's types there are, without a garbage collection."""
    kinds = map(type, gc.get_objects())
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("penstock."))


@pytest.fixture(params=DRIVERS)
def churned(request: pytest.FixtureRequest) -> Iterator[tuple[Device, dict[str, Kernel], int]]:
    """A device of each kind with its kernels, warm, and how many operations it is worth."""
    device = Device.over(DRIVERS[request.param](), BOUNDS)
    kernels = compiled(device)
    Churn(device, kernels, seed=0).run(2_000)
    device.cleanup()
    yield device, kernels, OPERATIONS[request.param]
    device.close()


@pytest.mark.slow("opencl-mapped", "webgpu")
def test_random_operations_leave_no_handle_no_byte_and_a_flat_resident_size(
    churned: tuple[Device, dict[str, Kernel], int],
) -> None:
    device, kernels, operations = churned
    handles = device.driver.native_handles()
    churn = Churn(device, kernels, seed=1)
    samples = []
    for _ in range(SAMPLES):
        churn.run(operations // SAMPLES)
        assert device.memory_stats().unaccounted_bytes == 0  # with work pending
        device.cleanup()
        samples.append(resident_bytes())
    until(lambda: device.driver.native_handles() <= handles)
    assert device.driver.allocated_bytes == 0
    assert device.memory_stats().unaccounted_bytes == 0
    assert drift(samples) < FLAT_BYTES, samples


def test_random_operations_leave_no_python_object_even_without_a_garbage_collection(
    churned: tuple[Device, dict[str, Kernel], int],
) -> None:
    device, kernels, _ = churned
    gc.collect()
    before = own_objects()
    gc.disable()
    try:
        Churn(device, kernels, seed=2).run(3_000)
        device.cleanup()
        after = own_objects()
    finally:
        gc.enable()
    assert after == before


@pytest.mark.parametrize("polled", [False, True])
def test_a_finished_future_and_its_array_go_as_soon_as_they_are_dropped(
    churned: tuple[Device, dict[str, Kernel], int], polled: bool
) -> None:
    device, _, _ = churned
    buffer = device.upload(PATTERN)
    future = device.download(buffer)
    while polled and not future.is_ready():
        pass
    array = future.wait()
    gone = weakref.ref(future), weakref.ref(array)
    device.cleanup()  # the command that fills the array holds it until then
    gc.disable()
    try:
        del future, array
        assert all(reference() is None for reference in gone)
    finally:
        gc.enable()


def use_and_close(kind: str) -> tuple[weakref.ref[Device], weakref.ref[object], cl.Context | None]:
    """A whole life of a device: references to it and its driver, and the test's reference to its context."""
    device = Device.over(DRIVERS[kind](), BOUNDS)
    driver = device.driver
    context = None
    if kind in OPENCL_KINDS:
        context = cl.Context.from_int_ptr(driver.compute.context.int_ptr)
    target, source = device.empty(1 << 20), device.upload(PATTERN)
    device.copy(target, source, 1 << 20)
    future = device.download(target)
    np.testing.assert_array_equal(future.wait(), PATTERN[: 1 << 20])
    device.close()
    return weakref.ref(device), weakref.ref(driver), context


@pytest.mark.slow("host-late", "host-far", "opencl-mapped", "opencl-device", "webgpu")
@pytest.mark.parametrize("kind", DRIVERS)
def test_a_hundred_devices_opened_and_closed_leave_a_flat_resident_size(kind: str) -> None:
    samples = []
    for _ in range(100):
        use_and_close(kind)
        gc.collect()
        samples.append(resident_bytes())
    assert drift(samples) < FLAT_BYTES, samples


@pytest.mark.parametrize("kind", DRIVERS)
def test_a_closed_device_and_its_driver_can_be_collected(kind: str) -> None:
    device, driver, _ = use_and_close(kind)
    gc.collect()
    assert (device(), driver()) == (None, None)


@pytest.mark.parametrize("kind", OPENCL_KINDS)
def test_a_closed_device_gives_its_context_back_to_opencl(kind: str) -> None:
    _, _, context = use_and_close(kind)
    gc.collect()
    assert context is not None
    until(lambda: context.reference_count == 1)  # the one of this test
