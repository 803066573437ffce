"""Memory that pending commands use is reused in order, and no live byte is overwritten."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, GraphingHost, Lazy, compiled

import penstock as ps
from penstock.config import Settings
from penstock.drivers.driver import Memory
from penstock.drivers.host import HostDriver
from penstock.errors import DeviceError, OutOfDeviceMemory
from penstock.runtime import Device

MIB = 1 << 20


def lazy(shared_memory: bool = True, **settings: Any) -> Device:
    """A device that runs commands only when the host waits, and poisons freed memory."""
    driver = HostDriver("lazy", shared_memory=shared_memory, scheduler=Lazy())
    return Device.over(driver, Settings(**settings))


def peak_of(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The peak of the driver's allocations, as a list of a single number."""
    driver, most = device.driver, [0]
    allocate = driver.allocate

    def allocating(nbytes: int, pinned: bool = False) -> Memory:
        memory = allocate(nbytes, pinned)
        most[0] = max(most[0], driver.allocated_bytes)
        return memory

    monkeypatch.setattr(driver, "allocate", allocating)
    return most


def test_dropped_buffers_of_kernels_take_the_memory_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    device = lazy()
    fill, most = compiled(device)["fill"], peak_of(device, monkeypatch)
    for number in range(600):
        device.stream.launch(fill, (1,), (1,), (device.empty(16 * MIB), number, 4))
    assert most[0] == 16 * MIB
    device.close()


@pytest.mark.parametrize("kind", ["host-far", "host-late", "opencl-device", "opencl-mapped"])
def test_dropped_results_take_the_memory_of_a_few(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device.over(DRIVERS[kind]())
    x = ps.asarray(np.arange(MIB // 4, dtype=np.float32), device=device)
    (x * 0.5).realize()  # NumPy may compute it the first time
    most = peak_of(device, monkeypatch)
    for number in range(1, 100):
        y = (x * float(number)).realize()
        if number % 33 == 0:
            np.testing.assert_array_equal(y.numpy()[::1000], number * np.arange(0, MIB // 4, 1000))
        del y
    staging = device.memory_stats().staging_bytes
    assert most[0] <= staging + 6 * MIB
    device.close()


def test_memory_of_a_kernel_that_is_pending_is_freed_only_when_it_is_done() -> None:
    """A lazy device poisons what is freed: the driver must not see it before the kernel ran."""
    device = lazy()
    kernels = compiled(device)
    x, y = device.upload(np.ones(64, np.float32)), device.upload(np.zeros(64, np.float32))
    device.stream.launch(kernels["axpy"], (1,), (1,), (x, y, 2.0, 64))
    del x
    assert device.trim() == 256, "counted as given back"
    assert device.driver.allocated_bytes == 512, "and still there"
    assert device.memory_stats().unaccounted_bytes == 0
    np.testing.assert_array_equal(device.download(y, np.float32).wait(), np.full(64, 2, np.float32))
    device.trim()
    assert device.driver.allocated_bytes == 256
    device.close()


def test_a_limit_is_kept_by_giving_back_what_is_needed() -> None:
    device = lazy()
    held = [device.empty(MIB * size) for size in range(1, 9)]
    del held
    device.limit_bytes = 36 * MIB
    device.empty(int(1.5 * MIB))
    stats = device.pool.stats()
    assert stats.pooled_bytes >= 28 * MIB, "one block went, and not all"
    assert device.driver.allocated_bytes <= 36 * MIB
    device.close()


def test_under_a_limit_an_upload_waits_for_a_block_of_its_size() -> None:
    device = lazy(memory_limit=8192)
    fill = compiled(device)["fill"]
    device.empty(4096)
    first, second = device.empty(4096), device.empty(4096)
    for number, buffer in enumerate((first, second)):
        device.stream.launch(fill, (1,), (1,), (buffer, number, 1024))
    del buffer, first
    new = device.upload(np.full(1024, 7, np.int32))
    stats = device.memory_stats()
    assert stats.live_bytes + stats.pooled_bytes == 8192
    np.testing.assert_array_equal(device.download(new, np.int32).wait(), np.full(1024, 7))
    np.testing.assert_array_equal(device.download(second, np.int32).wait(), np.full(1024, 1))
    with pytest.raises(OutOfDeviceMemory):
        device.empty(4096)
    device.close()


def test_the_failure_of_a_command_is_not_that_of_the_next_buffer_there() -> None:
    device = lazy()

    def fails(out: np.ndarray) -> None:
        raise RuntimeError("broken")

    kernel = device.compile({"fails": fails}, {"fails": ("int32*",)})["fails"]
    out = device.empty(256)
    address = out.memory
    device.stream.launch(kernel, (1,), (1,), (out,))
    del out
    again = device.empty(256)
    assert again.memory is address
    with device.view(again, np.int32, writable=True) as array:  # once the kernel is done, or has failed
        array[:] = 3
    assert device.download(again, np.int32).wait().tolist() == [3] * 64
    with pytest.raises(DeviceError, match="broken"):
        device.sync()
    device.close()


class Model:
    """Buffers of a device and arrays with their expected content, which random commands change alike."""

    SIZES = (64, 64, 64, 1024, 4096)  # items; mostly of one size class, so that memory goes from hand to hand

    def __init__(self, device: Device, seed: int) -> None:
        self.device, self.random = device, random.Random(seed)
        self.kernels = compiled(device)
        self.held: list[tuple[Any, np.ndarray]] = []
        self.futures: list[tuple[Any, np.ndarray]] = []

    def step(self, number: int) -> None:
        choice = self.random.choice
        verb = choice(
            ("upload", "fill", "fill", "axpy", "copy", "fetch", "view", "drop", "drop", "take", "trim")
        )
        n = choice(self.SIZES)
        if verb == "upload":
            array = np.full(n, number, np.float32)
            self.held.append((self.device.upload(array), array))
        elif verb == "fill":
            self.held.append(self.filled(n, number))
        elif verb == "take":  # a temporary that one kernel writes and the next reads
            temporary, array = self.filled(n, -number)
            target, value = self.filled(n, 1)
            self.launch("axpy", temporary, target, 2.0, n)
            self.held.append((target, value + 2 * array))
        elif self.held:
            self.change(verb, self.random.randrange(len(self.held)))

    def filled(self, n: int, number: int) -> tuple[Any, np.ndarray]:
        buffer = self.device.empty(4 * n)
        self.launch("fill", buffer, int(np.float32(number).view(np.int32)), n)
        return buffer, np.full(n, number, np.float32)

    def change(self, verb: str, at: int) -> None:
        buffer, array = self.held[at]
        if verb == "drop":
            del self.held[at]
        elif verb == "fetch":
            self.futures.append((self.device.download(buffer, np.float32), array))
        elif verb == "view":
            with self.device.view(buffer, np.float32) as seen:
                np.testing.assert_array_equal(seen, array)
        elif verb == "copy":
            target = self.device.empty(buffer.nbytes)
            self.device.copy(target, buffer)
            self.held.append((target, array))
        elif verb == "axpy":
            other, value = self.filled(array.size, 3)
            self.launch("axpy", other, buffer, 1.0, array.size)
            self.held[at] = buffer, array + value
        elif verb == "trim":
            self.device.trim()

    def launch(self, name: str, *args: Any) -> None:
        self.device.stream.launch(self.kernels[name], (1,), (1,), args)

    def check(self) -> None:
        self.futures += [(self.device.download(buffer, np.float32), array) for buffer, array in self.held]
        for future, array in self.futures:
            np.testing.assert_array_equal(future.wait(), array)
        self.futures.clear()


@pytest.mark.parametrize("far", [False, True], ids=["shared", "far"])
def test_no_live_byte_is_written_over(far: bool) -> None:
    """Random commands on all queues, run as late and as reordered as the contract permits."""
    for seed in range(25):
        scheduler = Lazy(seed) if seed % 5 == 0 else random.Random(seed)
        driver = GraphingHost("fuzzed", shared_memory=not far, scheduler=scheduler)
        limit = None if seed % 3 else 4 * MIB
        bounds = Settings(max_commands=9, max_bytes=1 << 16, max_in_flight=3, staging_bytes=1 << 15)
        device = Device.over(driver, bounds)
        device.limit_bytes = limit
        model = Model(device, seed)
        for number in range(1, 120):
            model.step(number)
            assert device.memory_stats().unaccounted_bytes == 0
        model.check()
        model.held.clear()
        device.close()
        assert driver.allocated_bytes == 0
