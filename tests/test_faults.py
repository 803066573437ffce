"""Faults at every n-th call of the driver, and commands that fail on the device: nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from conftest import DRIVERS, SMALL, compiled, source_for

from penstock import Device, FutureState
from penstock.config import Settings
from penstock.drivers.driver import Driver, Kernel
from penstock.drivers.host import HostDriver
from penstock.errors import CompileError, DeviceError, OutOfDeviceMemory, PenstockError

Kernels = dict[str, Kernel]
VERBS = ["allocate", "compile", "launch", "replay", "write", "read", "copy", "map", "flush"]
N = 20_000  # float32 values of a buffer: larger than the small staging ring
FAULTS: dict[str, Callable[[], PenstockError]] = {
    "allocate": lambda: OutOfDeviceMemory("injected", asked=0),
    "compile": lambda: CompileError("injected"),
}


@contextmanager
def every(n: int, verb: str, driver: Driver) -> Iterator[None]:
    """Let every n-th call of `verb` fail."""
    calls = 0

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % n == 0:
                raise FAULTS.get(verb, lambda: DeviceError("injected"))()
            return real(*args, **kwargs)

        return call

    name = "launcher" if verb == "launch" else verb
    real = getattr(driver, name)
    setattr(driver, name, (lambda *kernel: failing(real(*kernel))) if verb == "launch" else failing(real))
    try:
        yield
    finally:
        delattr(driver, name)


class Workload:
    """Random operations with expected failures, and the content that surviving buffers must have."""

    def __init__(self, device: Device, kernels: Kernels) -> None:
        self.device, self.kernels, self.random = device, kernels, random.Random(5)
        self.buffers: list[tuple[Any, float | None]] = []  # None: a failed call left any content

    def step(self) -> None:
        device, value = self.device, self.random.randrange(100)
        verb = self.random.choice(["new", "new", "upload", "axpy", "program", "copy", "edit", "read", "drop"])
        if verb == "new":
            self.buffers.append((device.upload(np.full(N, value, np.float32)), float(value)))
        elif verb == "drop" and self.buffers:
            self.buffers.pop(self.random.randrange(len(self.buffers)))
        elif self.buffers:
            self.change(verb, self.random.randrange(len(self.buffers)), float(value))
        compiled(device) if self.random.random() < 0.1 else None

    def change(self, verb: str, at: int, value: float) -> None:
        device, (buffer, before) = self.device, self.buffers[at]
        if verb == "read":
            result = device.download(buffer, np.float32).wait()
            assert before is None or np.all(result == before)
            return
        if verb in ("axpy", "program"):
            other, known = self.buffers[self.random.randrange(len(self.buffers))]
            if other is buffer:
                return
            launch = (self.kernels["axpy"], (4,), (16,), (other, buffer, 1.0, N))
            after = None if known is None or before is None else known + before
            if verb == "axpy":
                self.attempt(at, after, lambda: device.stream.launch(*launch), changes=False)
            else:
                program = device.stream.bind([launch])
                self.attempt(at, after, lambda: device.stream.replay(program), changes=False)
        elif verb == "upload":
            array = np.full(N, value, np.float32)
            self.attempt(at, value, lambda: device.upload(array, into=buffer), changes=True)
        elif verb == "copy":
            source, known = self.buffers[self.random.randrange(len(self.buffers))]
            if source is not buffer:
                self.attempt(at, known, lambda: device.copy(buffer, source), changes=False)
        elif verb == "edit":
            self.attempt(at, value, lambda: self.edit(buffer, value), changes=True)

    def edit(self, buffer: Any, value: float) -> None:
        with self.device.view(buffer, np.float32, writable=True) as view:
            view[:] = value

    def attempt(self, at: int, after: float | None, call: Callable[[], None], changes: bool) -> None:
        """Call; after a failure the buffer is unchanged, or unknown if the call had started to change it."""
        buffer, before = self.buffers[at]
        recorded = self.device.stream.pending
        try:
            call()
        except PenstockError:
            # A flush fails after its commands were recorded, so they will still run.
            unknown = changes or self.device.stream.pending != recorded
            self.buffers[at] = (buffer, None if unknown else before)
            raise
        self.buffers[at] = (buffer, after)

    def check(self) -> None:
        for buffer, value in self.buffers:
            result = self.device.download(buffer, np.float32).wait()
            assert value is None or np.all(result == value)


@pytest.mark.slow("opencl-mapped", "webgpu")
@pytest.mark.parametrize("n", [1, 2, 3, 7])
@pytest.mark.parametrize("verb", VERBS)
def test_a_fault_at_every_nth_call_leaves_the_state_consistent(device: Device, verb: str, n: int) -> None:
    work = Workload(device, compiled(device))
    for _ in range(10):
        work.step()
    with every(n, verb, device.driver):
        for _ in range(40):
            with suppress(PenstockError):
                work.step()
    work.check()
    for _ in range(10):
        work.step()
    work.check()
    device.sync()
    stats = device.memory_stats()
    assert stats.unaccounted_bytes == 0
    assert stats.live_bytes == sum(buffer.memory.nbytes for buffer, _ in work.buffers)
    work.buffers.clear()
    device.cleanup()
    assert device.driver.allocated_bytes == 0


def failing_device(kind: str) -> tuple[Device, Kernels, Callable[[Any], None]]:
    """A device, its kernels, and a launch on a buffer that the device accepts and then fails."""
    if kind.startswith("host"):
        driver = DRIVERS[kind]()
        device = Device.over(driver, SMALL)

        def explode(out: np.ndarray) -> None:
            raise FloatingPointError("the kernel's own trouble")

        kernel = device.compile({"explode": explode}, {"explode": ("int32*",)})["explode"]
        return device, compiled(device), lambda out: device.stream.launch(kernel, (1,), (1,), (out,))
    device = Device.over(DRIVERS[kind](), SMALL)
    driver = device.driver
    kernel = device.compile(source_for(device), {"fill": ("int32*", "int32", "int32")})["fill"]
    if kind == "cuda":
        # A real failure of a kernel ends CUDA for the process (see test_cuda.py); here it is only reported.
        return device, compiled(device), lambda out: launch_and_fail(device, kernel, out)
    if kind == "webgpu":
        return device, compiled(device), lambda out: launch_too_much(device, kernel, out)
    gates = []  # an unfinished gate may not be let go

    def launch(out: Any) -> None:
        gate = cl.UserEvent(driver._context)
        gates.append(gate)
        real = driver.launch
        driver.launch = lambda queue, k, grid, group, args, waits: real(  # type: ignore[method-assign]
            queue, k, grid, group, args, [*(waits or []), gate]
        )
        try:
            device.stream.launch(kernel, (1,), (1,), (out, 1, 1))
        finally:
            del driver.launch
        gate.set_status(-5)  # the command fails as one does whose input never came

    return device, compiled(device), launch


def launch_too_much(device: Device, kernel: Kernel, out: Any) -> None:
    """Record a dispatch of more groups than WebGPU permits, past the driver's own check."""
    driver = device.driver

    def launch(queue: Any, kernel: Any, grid: Any, group: Any, args: Any, waits: Any) -> Any:
        bound = driver.bind(kernel, grid, group, args)
        bound.dispatch = (*bound.dispatch[:-3], 1 << 17, 1, 1)
        events: list[Any] = []
        driver.replay(queue, [bound], waits, events)
        return events[0]

    driver.launch = launch  # type: ignore[method-assign]
    try:
        device.stream.launch(kernel, (1,), (1,), (out, 1, 1))
    finally:
        del driver.launch


def launch_and_fail(device: Device, kernel: Kernel, out: Any) -> None:
    """Record nothing, with an event that has failed."""
    driver = device.driver

    def launch(queue: Any, *_: Any) -> Any:
        driver.flush(queue)  # so that the event is of this alone
        event = driver._event(queue)
        driver.wait(event)
        event.error = "the kernel's own trouble"
        return event

    driver.launcher = lambda *_: launch  # type: ignore[method-assign]
    try:
        device.stream.launch(kernel, (1,), (1,), (out, 1, 1))
    finally:
        del driver.launcher


@pytest.fixture(params=DRIVERS)
def failing(request: pytest.FixtureRequest) -> Iterator[tuple[Device, Kernels, Callable[[Any], None]]]:
    device, kernels, launch = failing_device(request.param)
    yield device, kernels, launch
    with suppress(DeviceError):
        device.close()


def test_a_failure_on_the_device_reaches_sync_with_the_kernels_name(failing: Any) -> None:
    device, kernels, launch_failing = failing
    good, bad = device.upload(np.zeros(8, np.int32)), device.empty(12)
    device.stream.launch(kernels["fill"], (1,), (1,), (good, 3, 8))
    launch_failing(bad)
    with pytest.raises(DeviceError, match=r"kernel '(explode|fill)', grid \(1,\).*12-byte buffer"):
        device.sync()
    device.sync()  # raised once, and the device goes on
    device.stream.launch(kernels["fill"], (1,), (1,), (bad, 4, 3))
    assert np.all(device.download(good, np.int32).wait() == 3)
    assert np.all(device.download(bad, np.int32).wait() == 4)


def test_a_download_of_what_failed_fails_and_keeps_failing(failing: Any) -> None:
    device, _, launch_failing = failing
    bad = device.empty(64)
    launch_failing(bad)
    with pytest.raises(DeviceError, match="64-byte buffer"):
        device.download(bad).wait()
    launch_failing(bad)
    future = None
    with suppress(DeviceError):  # a device that has finished reports it immediately
        future = device.download(bad)
    if future is not None:
        for _ in range(3):
            with pytest.raises(DeviceError, match="64-byte buffer"):
                future.wait()
        assert future.state is FutureState.FAILED
        assert future.is_ready()
        with pytest.raises(DeviceError):
            future.try_get()


def test_cleanup_gives_everything_back_before_it_raises(failing: Any) -> None:
    device, _, launch_failing = failing
    bad = device.empty(1 << 16)
    launch_failing(bad)
    del bad
    with pytest.raises(DeviceError):
        device.cleanup()
    assert device.driver.allocated_bytes == 0
    device.cleanup()


def test_the_first_of_many_failures_is_told() -> None:
    def explode(out: np.ndarray, value: int) -> None:
        raise ArithmeticError(value)

    device = Device.over(HostDriver("late", scheduler=random.Random(3)), SMALL)
    kernel = device.compile({"explode": explode}, {"explode": ("int32*", "int32")})["explode"]
    out = device.empty(16)
    for value in range(7):  # fewer than are submitted together
        device.stream.launch(kernel, (1,), (1,), (out, value))
    with pytest.raises(DeviceError, match="ArithmeticError: 0"):
        device.sync()
    device.sync()


def test_out_of_memory_tells_who_holds_what_and_leaves_all_usable() -> None:
    for kind in DRIVERS:
        device = Device.over(
            DRIVERS[kind](), Settings(memory_limit=1 << 20, trace_memory=True, compile_ahead=False)
        )
        kernels = compiled(device)
        held = [device.upload(np.full(n, 1, np.int32)) for n in (100, 50_000, 100_000)]
        for _ in range(3):  # the same every time: failures lose nothing
            with pytest.raises(OutOfDeviceMemory) as caught:
                device.empty(1 << 19)
            error = caught.value
            assert error.asked == 1 << 19
            assert (
                error.live == sum(buffer.memory.nbytes for buffer in held) == device.pool.stats().live_bytes
            )
            assert error.free == (1 << 20) - error.live
            assert error.pooled == 0
            assert [site.split(":")[-2].endswith("test_faults.py") for site, _ in error.owners] == [True]
            assert str(1 << 19) in str(error)
            assert "limit" in str(error)
            assert error.owners[0][0] in str(error)
        device.stream.launch(kernels["fill"], (1,), (16,), (held[1], 2, 50_000))
        assert np.all(device.download(held[1], np.int32).wait() == 2)
        assert isinstance(error, MemoryError)
        device.empty(error.free)
        del held
        device.close()


def test_memory_that_pending_commands_hold_is_waited_for(device: Device, kernels: Kernels) -> None:
    """More than half of the limit, many times over: each buffer is dropped while its kernel is pending."""
    device.limit_bytes = 1 << 20
    for value in range(20):
        out = None
        out = device.empty(600_000)
        device.stream.launch(kernels["fill"], (4,), (16,), (out, value, 150_000))
    assert np.all(device.download(out, np.int32).wait() == 19)


def test_unreachable_cycles_do_not_count_as_live(device: Device) -> None:
    device.limit_bytes = 1000
    cycle: list[Any] = [device.empty(900)]
    cycle.append(cycle)
    del cycle
    assert device.empty(1000).nbytes == 1000


def test_the_limit_can_be_set_at_any_time(device: Device) -> None:
    idle = [device.empty(1000) for _ in range(4)]
    kept = device.empty(1000)
    del idle
    device.limit_bytes = "2KiB"
    assert device.limit_bytes == 2048
    assert device.driver.allocated_bytes <= 2048
    kept2 = device.empty(1024)
    with pytest.raises(OutOfDeviceMemory):
        device.empty(1)
    device.limit_bytes = 1000  # below the live bytes: the next request raises
    with pytest.raises(OutOfDeviceMemory):
        device.empty(1)
    device.limit_bytes = None
    assert device.empty(1 << 20).nbytes == 1 << 20
    assert kept is not kept2


@pytest.mark.parametrize("kind", [kind for kind in DRIVERS if kind.startswith(("opencl", "cuda", "webgpu"))])
def test_more_than_the_device_allows_at_once_is_out_of_memory(kind: str) -> None:
    device = Device.over(DRIVERS[kind]())
    largest = device.capabilities.max_allocation_bytes
    with pytest.raises(OutOfDeviceMemory, match=str(largest)):
        device.empty(4 * largest)
    assert device.upload(np.ones(10)).nbytes == 80
