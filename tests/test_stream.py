"""The stream's bounds, and a state machine that checks them against the simplest model."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, SMALL, WEBGPU_KINDS, compiled
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock import Device
from penstock.config import Settings
from penstock.drivers.driver import Kernel
from penstock.drivers.host import HostDriver
from penstock.errors import DeviceError, OutOfDeviceMemory
from penstock.stream.waits import MAX_SITES, OTHER, WaitLedger

Kernels = dict[str, Kernel]


class Watched(HostDriver):
    """A host driver that runs commands only when the host waits, and counts its flushes."""

    def __init__(self) -> None:
        super().__init__("watched", scheduler=random.Random(0))
        self.flushes = 0

    def flush(self, queue: Any) -> None:
        self.flushes += queue is self.compute
        super().flush(queue)

    def is_done(self, event: Any) -> bool:
        done: bool = event.done
        return done


def watched(**bounds: int) -> tuple[Device, Watched, Kernels]:
    driver = Watched()
    device = Device.over(driver, Settings(**{"max_in_flight": 1000, **bounds}))
    return device, driver, compiled(device)


def fill(device: Device, kernels: Kernels, nbytes: int = 64) -> None:
    device.stream.launch(kernels["fill"], (1,), (1,), (device.empty(nbytes), 1, 1))


def test_commands_gather_until_there_are_max_commands() -> None:
    device, driver, kernels = watched()
    out = device.empty(64)
    for count in range(1, 250):
        device.stream.launch(kernels["fill"], (1,), (1,), (out, count, 1))
        assert driver.flushes == count // 100
        assert device.stream.pending == count


def test_max_commands_can_be_set_per_device() -> None:
    device, driver, kernels = watched()
    device.stream.policy.max_commands = 3
    for _ in range(7):
        fill(device, kernels)
    assert driver.flushes == 2


def test_commands_gather_until_max_bytes_hang_on_them() -> None:
    device, driver, kernels = watched(max_bytes=10 * 1024)
    held = [device.empty(1024) for _ in range(25)]
    for buffer in held:
        device.stream.launch(kernels["fill"], (1,), (1,), (buffer, 1, 1))
    assert driver.flushes == 2


def test_the_bytes_of_all_batches_in_flight_are_bounded() -> None:
    device, _, kernels = watched(max_bytes=10 * 1024)
    held = [device.empty(1024) for _ in range(200)]
    for number, buffer in enumerate(held, start=1):
        device.stream.launch(kernels["fill"], (1,), (1,), (buffer, 1, 1))
        assert device.stream.pending <= min(number, 2 * 10 + 10), "two batches of 10 KiB, and the open one"
    assert {site.why for site in device.stream.waits.sites()} == {"back-pressure"}


def test_a_buffer_that_many_commands_use_hangs_on_them_once() -> None:
    device, driver, kernels = watched(max_bytes=10 * 1024)
    out = device.empty(1024)
    for _ in range(50):
        device.stream.launch(kernels["fill"], (1,), (1,), (out, 1, 1))
    assert driver.flushes == 0


def test_commit_submits_at_once_and_nothing_twice() -> None:
    device, driver, kernels = watched()
    device.stream.commit()
    assert driver.flushes == 0
    fill(device, kernels)
    device.stream.commit()
    device.stream.commit()
    assert driver.flushes == 1


def test_the_host_cannot_run_away_from_the_device() -> None:
    device, _, kernels = watched(max_commands=10, max_in_flight=3)
    for _ in range(200):
        fill(device, kernels)
        assert device.stream.pending <= 10 * 3 + 10
    assert {site.why for site in device.stream.waits.sites()} == {"back-pressure"}


def test_a_dropped_buffer_is_not_for_an_upload_before_the_device_is_done_with_it() -> None:
    device, driver, kernels = watched()
    out = device.empty(4096)
    address = out.memory
    device.stream.launch(kernels["fill"], (1,), (1,), (out, 1, 1))
    del out
    taken = [device.upload(np.zeros(4096, np.uint8)) for _ in range(20)]
    assert all(buffer.memory is not address for buffer in taken)
    device.sync()
    assert device.upload(np.zeros(4096, np.uint8)).memory is address
    assert driver.allocated_bytes == 21 * 4096


def test_memory_that_an_upload_uses_is_not_for_the_next_kernel() -> None:
    device, _, kernels = watched()
    out = device.empty(1 << 17)
    device.stream.launch(kernels["fill"], (1,), (1,), (out, 1, 1))
    device.upload(np.zeros(1 << 15, np.int32), into=out)  # waits on the device, not on the host
    address = out.memory
    del out
    assert device.empty(1 << 17).memory is not address, "the kernel would have to wait for the copy"
    assert device.stream.waits.count == 0


def test_a_short_upload_after_a_kernel_goes_along_with_kernels() -> None:
    device, driver, kernels = watched()
    out = device.empty(4096)
    for value in range(20):
        device.stream.launch(kernels["fill"], (1,), (1,), (out, value, 1024))
        device.upload(np.full(1000, -value, np.int32), into=out)
    flushes = driver.flushes
    values = device.download(out, np.int32).wait()
    assert flushes == 0, "no queue waits for another"
    np.testing.assert_array_equal(values, [-19] * 1000 + [19] * 24)


def test_scalars_allocate_nothing(device: Device, kernels: Kernels) -> None:
    out = device.empty(64)
    before = device.pool.stats().misses + device.pool.stats().hits
    for value in range(100):
        device.stream.launch(kernels["fill"], (1,), (1,), (out, value, 1))
    stats = device.pool.stats()
    assert stats.misses + stats.hits == before
    assert device.memory_stats().staging_bytes == 0


@pytest.mark.parametrize("kind", ["host-far", *CUDA_KINDS])
def test_a_program_becomes_one_command_whose_arguments_still_change(kind: str) -> None:
    device = Device.over(DRIVERS[kind]())
    kernels = compiled(device)
    n = 100
    x, y = device.upload(np.ones(n, np.float32)), device.upload(np.zeros(n, np.float32))
    program = device.stream.bind([(kernels["axpy"], (2,), (16,), (x, y, 0.5, n))] * 4)
    replays = []
    real = device.driver.replay

    def counted(queue: Any, bound: Any, *rest: Any) -> None:
        replays.append(len(bound))
        real(queue, bound, *rest)

    device.driver.replay = counted  # type: ignore[method-assign]
    for _ in range(3):
        device.stream.replay(program)
    assert replays == [4, 1, 1]
    assert np.all(device.download(y, np.float32).wait() == 6)
    device.stream.rebind(program, [(0, 2), (3, 2)], 1.0)
    device.stream.replay(program)
    other = device.upload(np.full(n, 10, np.float32))
    device.stream.rebind(program, [(1, 0)], other)
    device.stream.replay(program, (x, y, other))
    assert np.all(device.download(y, np.float32).wait() == 6 + 3 + 7.5)
    device.cleanup()
    assert program.graph is None
    device.stream.replay(program, (x, y, other))
    assert np.all(device.download(y, np.float32).wait() == 16.5 + 7.5)
    assert replays == [4, 1, 1, 1, 1, 1]
    device.close()


def test_a_program_for_which_there_is_no_graph_is_replayed_without() -> None:
    device = Device.over(DRIVERS["host-far"]())
    out = device.upload(np.zeros(16, np.float32))
    ones = device.upload(np.ones(16, np.float32))
    program = device.stream.bind([(compiled(device)["axpy"], (1,), (1,), (ones, out, 1.0, 16))] * 2)
    tries = []

    def refused(*args: Any) -> None:
        tries.append(args)
        raise DeviceError("no memory for it")

    device.driver.capture = refused  # type: ignore[method-assign]
    for _ in range(5):
        device.stream.replay(program)
    assert np.all(device.download(out, np.float32).wait() == 10)
    assert len(tries) == 1
    device.close()


@pytest.mark.parametrize("kind", ["host-far", *CUDA_KINDS])
def test_a_failure_of_a_program_tells_where_it_begins(kind: str) -> None:
    device = Device.over(DRIVERS[kind]())
    launch = (compiled(device)["fill"], (1,), (1,), (device.empty(64), 1, 16))
    program = device.stream.bind([launch, launch])
    device.stream.replay(program)
    real = device.driver.replay

    def refused(*_: Any) -> None:
        raise DeviceError("injected")

    device.driver.replay = refused  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match=r"<program of 2 launches, from <Kernel fill.* 64-byte buffer.*inj"):
        device.stream.replay(program)
    device.driver.replay = real  # type: ignore[method-assign]
    device.close()


def test_staging_memory_is_bounded_and_not_rounded_up() -> None:
    for nbytes in (1, 100_000, 3_000_000):
        device = Device.over(DRIVERS["opencl-device"](), Settings(staging_bytes=2_600_000))
        futures = [device.download(device.upload(np.ones(nbytes, np.uint8))) for _ in range(5)]
        assert device.memory_stats().staging_bytes == 2 * 1_300_224  # two rings, each a multiple of 256
        for future in futures:
            assert np.all(future.wait() == 1)
        device.cleanup()
        assert device.memory_stats().staging_bytes == 0


def test_results_that_nobody_waits_for_do_not_block_the_ring() -> None:
    for kind in ("opencl-device", "host-far", *CUDA_KINDS, *WEBGPU_KINDS):
        device = Device.over(DRIVERS[kind](), SMALL)
        forgotten = [device.download(device.upload(np.full(40_000, i, np.uint8))) for i in range(30)]
        assert np.all(device.download(device.upload(np.full(9, 7, np.uint8))).wait() == 7)
        for value, future in enumerate(forgotten):
            assert np.all(future.wait() == value)
        device.close()


def test_shared_memory_needs_no_staging() -> None:
    for kind in ("opencl-svm", "opencl-mapped", "host"):
        device = Device.over(DRIVERS[kind]()) if kind in DRIVERS else Device.over(DRIVERS["host"]())
        buffer = device.upload(np.ones(1 << 20, np.uint8))
        assert np.all(device.download(buffer).wait() == 1)
        with device.view(buffer, writable=True) as view:
            view[:] = 2
        assert np.all(device.download(buffer).wait() == 2)
        assert device.memory_stats().staging_bytes == 0
        device.close()


def test_the_ledger_of_waits_is_bounded() -> None:
    ledger = WaitLedger()
    namespace = {"add": ledger.add}
    exec("\n".join(["add('sync', 0.5)"] * (MAX_SITES + 50)), namespace)
    sites = ledger.sites()
    assert len(sites) == MAX_SITES + 1
    assert (sites[0].where, sites[0].count) == (OTHER, 50)
    assert ledger.count == MAX_SITES + 50
    assert ledger.seconds == (MAX_SITES + 50) / 2


class StreamMachine(RuleBasedStateMachine):
    """Reserve, drop, launch, upload, download, commit, fail, trim in any order on a late device.

    Every buffer carries a value of its own in all its bytes. A buffer that is reused while the device still
    writes to it, or two that overlap, show up as a wrong value; bytes that are lost, in the account.
    """

    @initialize(
        kind=st.sampled_from(["host-late", "host-far", "opencl-svm", *CUDA_KINDS, *WEBGPU_KINDS]),
        seed=st.integers(0, 1000),
    )
    def start(self, kind: str, seed: int) -> None:
        if kind.startswith("host"):
            driver = HostDriver(kind, shared_memory=kind == "host-late", scheduler=random.Random(seed))
        else:
            driver = DRIVERS[kind if kind in DRIVERS else "opencl-device"]()
        bounds = Settings(
            max_commands=5, max_in_flight=2, staging_bytes=1 << 12, pool_capacity=2, memory_limit=1 << 19
        )
        self.device = Device.over(driver, bounds)
        self.kernels = compiled(self.device)
        self.buffers: list[tuple[Any, int]] = []
        self.futures: list[tuple[Any, int]] = []
        self.next = 0

    def teardown(self) -> None:
        if hasattr(self, "device"):
            self.buffers.clear()
            self.device.close()
            assert self.device.driver.allocated_bytes == 0

    def value(self) -> int:
        self.next += 1
        return self.next

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.buffers) - 1))

    @rule(items=st.integers(1, 40_000))
    def reserve(self, items: int) -> None:
        value = self.value()
        live = sum(buffer.memory.nbytes for buffer, _ in self.buffers)
        try:
            buffer = self.device.empty(4 * items)
        except OutOfDeviceMemory:
            assert live + 4 * items > 1 << 19, "refused what fits"
            return
        self.device.stream.launch(self.kernels["fill"], (2,), (8,), (buffer, value, items))
        self.buffers.append((buffer, value))

    @precondition(lambda self: self.buffers)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.buffers.pop(self.pick(data))

    @precondition(lambda self: self.buffers)
    @rule(data=st.data(), how=st.sampled_from(["launch", "upload", "view", "copy"]))
    def write(self, data: st.DataObject, how: str) -> None:
        at, value = self.pick(data), self.value()
        buffer, _ = self.buffers[at]
        items = buffer.nbytes // 4
        if how == "launch":
            self.device.stream.launch(self.kernels["fill"], (2,), (8,), (buffer, value, items))
        elif how == "upload":
            self.device.upload(np.full(items, value, np.int32), into=buffer)
        elif how == "view":
            with self.device.view(buffer, np.int32, writable=True) as view:
                view[:] = value
        else:
            source, source_value = self.buffers[self.pick(data)]
            if source is buffer or source.nbytes < buffer.nbytes:
                return
            self.device.copy(buffer, source, buffer.nbytes)
            value = source_value
        self.buffers[at] = (buffer, value)

    @precondition(lambda self: self.buffers)
    @rule(data=st.data())
    def download(self, data: st.DataObject) -> None:
        buffer, value = self.buffers[self.pick(data)]
        self.futures.append((self.device.download(buffer, np.int32), value))

    @precondition(lambda self: self.futures)
    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        future, value = self.futures.pop(data.draw(st.integers(0, len(self.futures) - 1)))
        assert np.all(future.wait() == value)

    @precondition(lambda self: self.buffers)
    @rule(data=st.data())
    def a_refused_launch(self, data: st.DataObject) -> None:
        buffer, _ = self.buffers[self.pick(data)]
        with pytest.raises(DeviceError):
            self.device.stream.launch(self.kernels["fill"], (1,), (1 << 30,), (buffer, 0, 1))

    @rule(verb=st.sampled_from(["commit", "sync", "trim", "cleanup"]))
    def steer(self, verb: str) -> None:
        getattr(self.device.stream if verb == "commit" else self.device, verb)()
        if verb in ("sync", "cleanup"):
            assert self.device.stream.pending == 0

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        if hasattr(self, "device"):
            stats = self.device.memory_stats()
            assert stats.unaccounted_bytes == 0
            assert stats.live_bytes >= sum(buffer.memory.nbytes for buffer, _ in self.buffers)
            assert stats.live_bytes + stats.pooled_bytes <= 1 << 19
            held = [id(buffer.memory) for buffer, _ in self.buffers]
            assert len(set(held)) == len(held)
            assert self.device.stream.pending <= 2 * (5 * 2 + 5)


TestStreamMachine = StreamMachine.TestCase
TestStreamMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
