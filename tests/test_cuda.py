"""What only CUDA devices have: graphs, memory mapped in pieces, times, and failures that end them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SIGNATURES, _cuda, _cuda_devices, compiled, source_for
from cuda.bindings import driver as cu

import penstock as ps
from penstock import Device, nn, optim
from penstock.drivers import cuda
from penstock.drivers.binaries import Binaries
from penstock.drivers.cuda import CudaDriver
from penstock.drivers.host import HostDriver
from penstock.errors import CompileError, DeviceError, OutOfDeviceMemory, PenstockWarning


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device.over(_cuda())
    yield made
    made.close()


class Recorded:
    """The replays of a driver: how many launches each had, and the graphs that were made."""

    def __init__(self, driver: Any) -> None:
        self.replays: list[int] = []
        self.captures = 0
        replay, capture = driver.replay, driver.capture

        def counted(queue: Any, bound: Sequence[Any], *rest: Any) -> None:
            self.replays.append(len(bound))
            replay(queue, bound, *rest)

        def counted_capture(*args: Any) -> Any:
            self.captures += 1
            return capture(*args)

        driver.replay, driver.capture = counted, counted_capture


def test_large_kernels_that_follow_one_another_read_what_the_one_before_wrote(device: Device) -> None:
    """Without jit: each workgroup reads what many workgroups of the kernel before wrote."""
    start = np.random.default_rng(0).integers(0, 1000, (4096, 2048)).astype(np.float32)
    x, expected = ps.asarray(start, device=device), start
    for _ in range(40):
        x, expected = (x.T + 1).realize(), expected.T + 1
    np.testing.assert_array_equal(x.numpy(), expected)


def test_a_training_step_is_one_launch_with_new_data_and_rates(device: Device) -> None:
    """Against the same training on the host: no step after the second takes more than one launch."""
    losses = {}
    for where in (device, Device.over(HostDriver())):
        ps.random.manual_seed(3)
        model = nn.GPT(vocab_size=50, context=16, width=32, layers=2, heads=2, device=where)
        optimizer = optim.AdamW(model.parameters(), lr=1e-3, clip_norm=1.0)

        def learn(x: ps.Tensor, y: ps.Tensor, model: Any = model, optimizer: Any = optimizer) -> ps.Tensor:
            loss = nn.functional.cross_entropy(model(x).reshape(-1, 50), y.reshape(-1))
            loss.backward()
            optimizer.step()
            return loss

        step = ps.jit(learn)
        draw = np.random.default_rng(0)
        recorded = Recorded(where.driver) if where is device else None
        told = []
        for number in range(12):
            batch = draw.integers(0, 50, (4, 17)).astype(np.int32)
            optimizer.lr = 1e-3 * (1 + number % 3)
            x, y = (ps.asarray(part, device=where) for part in (batch[:, :-1], batch[:, 1:]))
            told.append(float(step(x, y)))
            if recorded is not None and number == 4:
                recorded.replays.clear()
                recorded.captures = 0
        losses[where.name] = told
        if recorded is not None:
            assert recorded.replays == [1] * 7
            assert recorded.captures == 0
    on_cuda, on_host = losses.values()
    np.testing.assert_allclose(on_cuda, on_host, rtol=1e-3)


def test_launches_at_the_same_time_give_the_same_bits(device: Device) -> None:
    """A graph runs independent launches in parallel; without a graph, launches run in sequence."""
    losses = []
    for graphs in (True, False):
        device.driver.graphs = graphs
        ps.random.manual_seed(3)
        model = nn.GPT(vocab_size=512, context=64, width=192, layers=4, heads=3, device=device)
        model.to(ps.bfloat16)
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)

        def learn(tokens: ps.Tensor, model: Any = model, optimizer: Any = optimizer) -> ps.Tensor:
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            return loss

        step = ps.jit(learn)
        batches = np.random.default_rng(0).integers(0, 512, (20, 16, 65))
        losses.append([step(ps.asarray(batch, device=device)).item() for batch in batches])
    assert losses[0] == losses[1]


class Set:
    """A launch of a library, in the shortest form: CUDA sets words itself."""

    def __init__(self, kernels: int = 1) -> None:
        self.prepared: Any = None
        self.launches = kernels

    def prepare(self, driver: Any) -> None:
        self.prepared = driver

    def __call__(self, queue: int, out: int, place: int, value: int) -> None:
        for _ in range(self.launches):
            (code,) = cu.cuMemsetD32Async(out + 256 * place, value, 16, queue)
            assert not code


def test_launches_of_libraries_are_part_of_a_graph(device: Device) -> None:
    library = Set()
    kernel = device.compile({"set": library}, {"set": ("int32*", "int32", "int32")})["set"]
    assert library.prepared is device.driver
    kernels = compiled(device)
    ones = device.upload(np.ones(16, np.float32).view(np.int32))
    y, z = device.upload(np.zeros(80, np.int32)), device.upload(np.zeros(80, np.int32))
    half = int(np.float32(0.5).view(np.int32))
    recorded = Recorded(device.driver)

    def values(buffer: Any) -> list[float]:
        return device.download(buffer, np.float32).wait()[64:].tolist()

    add_to_part = (kernels["axpy"], (1,), (16,), (ones, y.view(256, 64), 1.0, 16))
    program = device.stream.bind([(kernel, (1,), (1,), (y, 1, half)), add_to_part, add_to_part])
    for _ in range(3):
        device.stream.replay(program)
        assert values(y) == [2.5] * 16
    assert recorded.replays == [3, 1, 1]
    device.stream.rebind(program, [(0, 2)], 0)
    device.stream.replay(program)
    assert values(y) == [2.0] * 16
    library.launches = 2  # a change that the existing graph cannot take
    device.stream.rebind(program, [(0, 0)], z)
    device.stream.replay(program, (ones, y, z))
    assert values(y) == [4.0] * 16
    assert values(z) == [0.0] * 16
    device.stream.rebind(program, [(1, 2)], 3.0)
    device.stream.replay(program, (ones, y, z))
    assert values(y) == [8.0] * 16
    with pytest.raises(CompileError, match="no such method"):
        device.compile({"set": print}, {"set": ("int32*", "int32", "int32")})


def test_a_library_that_fails_is_told(device: Device) -> None:
    class Failing(Set):
        def __call__(self, queue: int, *args: Any) -> None:
            raise ArithmeticError("the library's own trouble")

    kernel = device.compile({"set": Failing()}, {"set": ("int32*", "int32", "int32")})["set"]
    y = device.empty(1000)
    with pytest.raises(DeviceError, match=r"kernel 'set'.*1000-byte buffer.*ArithmeticError"):
        device.stream.launch(kernel, (1,), (1,), (y, 0, 1))
    device.stream.launch(compiled(device)["fill"], (1,), (1,), (y, 3, 250))
    assert np.all(device.download(y, np.int32).wait() == 3)


def test_a_large_block_is_found_between_holes(device: Device) -> None:
    """Memory is filled, every other block is freed, and then half of it is requested as one block."""
    driver = device.driver
    assert isinstance(driver, CudaDriver)
    block, held = 4 << 30, []
    with suppress(OutOfDeviceMemory):
        while True:
            held.append(driver.allocate(block))
    assert len(held) > 3
    for memory in held[::2]:
        driver.free(memory)
    large = driver.allocate(len(held[::2]) * block - (64 << 20))
    kernels = compiled(device)
    items = 1000
    last = large.native + large.nbytes // 256 * 256 - 4096
    event = driver.launch(driver.compute, kernels["fill"], (1,), (256,), [last, 5, items], None)
    driver.wait(event)
    assert not driver.failures([event])
    driver.free(large)
    for memory in held[1::2]:
        driver.free(memory)
    assert driver.allocated_bytes == 0


def test_times_are_told_where_they_were_asked_for() -> None:
    driver = CudaDriver(_cuda_devices()[0], "cuda-timing")
    device = Device.over(driver)
    spin = compiled(device)["spin"]
    memory = driver.allocate(1024)
    driver.time_commands(True)
    handles = driver.native_handles()
    first = driver.launch(driver.compute, spin, (1,), (1,), [memory.native, 1], None)
    last = driver.launch(driver.compute, spin, (1,), (1,), [memory.native, 1_000_000], None)
    driver.wait(last)
    assert driver.is_done(first)
    (_, end), (start, after) = driver.ran(first) or (0, 0), driver.ran(last) or (0, 0)
    assert end <= start + 1e-6
    assert 1e-4 < after - start < 10
    assert abs(after - time.perf_counter()) < 10
    del first, last
    driver.time_commands(False)
    untimed = driver.launch(driver.compute, spin, (1,), (1,), [memory.native, 1], None)
    driver.wait(untimed)
    assert driver.ran(untimed) is None
    assert driver.native_handles() <= handles + 1
    driver.free(memory)
    device.close()


def test_events_are_used_again_and_few_are_kept(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.events, "_MAX_IDLE_EVENTS", 16)
    kernels = compiled(device)
    driver = device.driver
    assert isinstance(driver, CudaDriver)
    out = [device.empty(64) for _ in range(100)]
    for _ in range(20):
        for item in out:
            device.stream.launch(kernels["fill"], (1,), (1,), (item, 1, 16))
    device.sync()
    assert driver._events.count < 600
    out.clear()
    device.sync()
    device.upload(np.ones(4))
    device.sync()
    assert len(driver._events.idle) <= 20


def test_compiled_code_is_kept_and_damaged_code_made_again(device: Device, tmp_path: Path) -> None:
    driver = device.driver
    assert isinstance(driver, CudaDriver)
    driver._compiler.binaries = Binaries(tmp_path)
    compiled(device)
    (kept,) = tmp_path.iterdir()
    before = kept.read_bytes()
    kept.write_bytes(b"nothing of use")
    with pytest.warns(PenstockWarning, match="was damaged"):
        compiled(device)
    assert kept.read_bytes() == before
    with pytest.raises(CompileError, match="4 bytes"):
        device.compile(source_for(device), {"fill": ("int32*", "int64", "int32")})
    assert device.compile(source_for(device), SIGNATURES)["fill"].name == "fill"


def test_any_thread_may_use_a_device(device: Device) -> None:
    kernels = compiled(device)
    failures: list[BaseException] = []

    def work(value: int) -> None:
        try:
            for _ in range(50):
                out = device.empty(4000)
                device.stream.launch(kernels["fill"], (4,), (64,), (out, value, 1000))
                assert np.all(device.download(out, np.int32).wait() == value)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_another_device_may_be_current_meanwhile(device: Device) -> None:
    """Other libraries may leave a thread with another context, or without one."""
    kernels = compiled(device)
    out = device.empty(4000)
    code, other = cu.cuCtxCreate(None, 0, _cuda_devices()[0])
    assert not code
    try:
        for value, context in enumerate((other, None, other)):
            device.stream.launch(kernels["fill"], (4,), (64,), (out, 9, 1000))
            cu.cuCtxSetCurrent(context)
            device.stream.launch(kernels["fill"], (4,), (64,), (out, value, 1000))
            cu.cuCtxSetCurrent(context)
            assert np.all(device.download(out, np.int32).wait() == value)
    finally:
        cu.cuCtxDestroy(other)


FAILING = """
import sys
import numpy as np
from conftest import _cuda, compiled
from penstock import Device
from penstock.errors import DeviceError

device = Device.over(_cuda())
kernels = compiled(device)
text = 'extern "C" __global__ void stray(int *out) { out[(size_t)1 << 40] = 1; }'
stray = device.compile(text, {"stray": ("int32*",)})["stray"]
good, bad = device.upload(np.zeros(8, np.int32)), device.upload(np.zeros(16, np.int32))
if "first" not in sys.argv:
    device.stream.launch(kernels["fill"], (1,), (8,), (good, 1, 8))
device.stream.launch(stray, (1,), (1,), (bad,))
for attempt in (
    device.sync,
    lambda: device.stream.launch(kernels["fill"], (1,), (8,), (good, 1, 8)),
    device.sync,
    lambda: device.empty(1 << 20),
    lambda: device.download(good).wait(),
    device.cleanup,
    device.close,
):
    try:
        attempt()
        print("fine")
    except DeviceError as error:
        print(error)
del good, bad
device.pool.clear()
assert device.driver.allocated_bytes == 0
"""


@pytest.mark.parametrize("blocking", [False, True])
def test_a_kernel_that_strays_ends_the_device_and_is_named(blocking: bool) -> None:
    environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": str(int(blocking))}
    command = [sys.executable, "-c", FAILING, *(() if blocking else ("first",))]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=Path(__file__).parent,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    told = done.stdout.splitlines()
    assert told[0].startswith("kernel 'stray', grid (1,), group (1,), arguments (64-byte buffer)")
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in told[0]
    assert told[1] == "fine"
    assert "kernel 'fill'" in told[2]
    assert "a command before it failed" in told[3]
