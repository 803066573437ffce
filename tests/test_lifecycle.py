"""Threads, forks, the interpreter's exit, cleaning up at any moment: right results, clear errors, no hang."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, SIGNATURES, SMALL, Lazy, compiled, source_for

from penstock.drivers.driver import Driver, Kernel
from penstock.drivers.host import HostDriver, host_capabilities
from penstock.errors import DeviceUnavailable
from penstock.memory.buffer import Buffer
from penstock.runtime import Device

ITEMS = 96
ONES = np.ones(ITEMS, np.float32)
NATIVE_KINDS = [kind for kind in DRIVERS if kind.startswith(("opencl", "cuda", "webgpu"))]
PATIENCE = 120  # seconds after which a script hangs


def axpy(device: Device, kernels: dict[str, Kernel], x: Buffer, y: Buffer, a: float) -> None:
    device.stream.launch(kernels["axpy"], (1,), (4,), (x, y, a, ITEMS))


def floats(device: Device, buffer: Buffer) -> np.ndarray:
    return device.download(buffer, np.float32).wait()


def assert_works(device: Device, kernels: dict[str, Kernel]) -> None:
    x, y = device.upload(ONES), device.upload(2 * ONES)
    axpy(device, kernels, x, y, 3.0)
    np.testing.assert_array_equal(floats(device, y), 5 * ONES)


def in_threads(work: Callable[[int], None], count: int = 4) -> None:
    """Run `work(0)`, `work(1)`, … at the same time, and raise what any of them raised."""
    start = threading.Barrier(count)

    def run(number: int) -> None:
        start.wait()
        work(number)

    with ThreadPoolExecutor(count) as pool:
        for result in [pool.submit(run, number) for number in range(count)]:
            result.result(timeout=PATIENCE)


# Threads


def test_threads_on_one_device_get_their_own_results_and_the_counters_agree(
    device: Device, kernels: dict[str, Kernel]
) -> None:
    rounds = 100

    def work(number: int) -> None:
        draw = random.Random(number)
        for _ in range(rounds):
            a, b = draw.randrange(100), draw.randrange(100)
            x, y = device.upload(a * ONES), device.empty(ONES.nbytes)
            device.upload(b * ONES, into=y)
            axpy(device, kernels, x, y, 2.0)
            np.testing.assert_array_equal(floats(device, y), (2 * a + b) * ONES)

    in_threads(work)
    device.sync()
    stats = device.memory_stats()
    assert device.stream.pending == 0
    assert (stats.live_bytes, stats.unaccounted_bytes) == (0, 0)
    assert stats.pool.hits + stats.pool.misses == 4 * rounds * 2
    device.cleanup()
    assert device.driver.allocated_bytes == 0


def test_threads_can_read_one_buffer_at_the_same_time(device: Device, kernels: dict[str, Kernel]) -> None:
    shared = device.upload(ONES)

    def work(number: int) -> None:
        for step in range(100):
            y = device.upload(step * ONES)
            axpy(device, kernels, shared, y, number)
            np.testing.assert_array_equal(floats(device, shared), ONES)
            np.testing.assert_array_equal(floats(device, y), (step + number) * ONES)

    in_threads(work)


def test_buffers_made_in_one_thread_can_be_dropped_in_another(device: Device) -> None:
    mine = [[device.upload(ONES) for _ in range(50)] for _ in range(4)]
    in_threads(lambda number: mine[number].clear())
    device.cleanup()
    assert device.memory_stats().driver_bytes == 0


# Cleaning up and closing


def test_cleanup_twice_leaves_nothing_and_the_device_usable(
    device: Device, kernels: dict[str, Kernel]
) -> None:
    assert_works(device, kernels)
    for _ in range(2):
        device.cleanup()
        assert device.memory_stats().driver_bytes == 0
        assert device.driver.allocated_bytes == 0
    assert_works(device, kernels)


def test_cleanup_in_the_middle_of_work_finishes_it_and_loses_nothing(
    device: Device, kernels: dict[str, Kernel]
) -> None:
    x, y = device.upload(ONES), device.upload(ONES)
    for _ in range(5):
        axpy(device, kernels, x, y, 1.0)
    early = device.download(y, np.float32)
    axpy(device, kernels, x, y, 1.0)
    device.cleanup()
    assert device.stream.pending == 0
    assert early.is_ready()
    axpy(device, kernels, x, y, 1.0)
    np.testing.assert_array_equal(early.wait(), 6 * ONES)
    np.testing.assert_array_equal(floats(device, y), 8 * ONES)


def test_cleanup_inside_a_view_leaves_the_view_valid(device: Device) -> None:
    buffer = device.upload(ONES)
    with device.view(buffer, np.float32, writable=True) as array:
        device.cleanup()
        array += 1
    np.testing.assert_array_equal(floats(device, buffer), 2 * ONES)


def test_cleanup_during_the_work_of_other_threads_disturbs_none_of_it(
    device: Device, kernels: dict[str, Kernel]
) -> None:
    def work(number: int) -> None:
        for step in range(100):
            if number == 0:
                device.cleanup()
            else:
                x, y = device.upload(step * ONES), device.upload(number * ONES)
                axpy(device, kernels, x, y, 1.0)
                np.testing.assert_array_equal(floats(device, y), (step + number) * ONES)

    in_threads(work, count=3)
    device.cleanup()
    assert device.memory_stats().driver_bytes == 0


class Overtaken(HostDriver):
    """Calls `meanwhile` from another thread once, at the end of a wait."""

    meanwhile: Callable[[], Any] | None = None

    def wait(self, event: Any) -> None:
        super().wait(event)
        if self.meanwhile:
            thread = threading.Thread(target=self.meanwhile)
            self.meanwhile = None
            thread.start()
            thread.join(PATIENCE)


def test_cleanup_copes_with_a_copy_that_begins_after_it_has_waited() -> None:
    driver = Overtaken(shared_memory=False, scheduler=Lazy())
    device = Device.over(driver, SMALL)
    late = device.empty(ONES.nbytes)
    early = device.upload(ONES)
    driver.meanwhile = lambda: device.upload(2 * ONES, into=late)
    device.cleanup()
    assert driver.meanwhile is None
    np.testing.assert_array_equal(floats(device, early), ONES)
    np.testing.assert_array_equal(floats(device, late), 2 * ONES)


def test_cleanup_before_the_first_use_does_not_open_the_device() -> None:
    opened: list[Driver] = []

    def open_driver() -> Driver:
        opened.append(HostDriver())
        return opened[-1]

    device = Device("late", host_capabilities(), open_driver, SMALL)
    device.cleanup()
    device.sync()
    assert opened == []
    assert_works(device, compiled(device))
    assert len(opened) == 1


def test_close_twice_is_as_good_as_once(device: Device, kernels: dict[str, Kernel]) -> None:
    assert_works(device, kernels)
    device.close()
    device.close()
    device.cleanup()
    assert device.driver.allocated_bytes == 0


USES: dict[str, Callable[[Device, dict[str, Kernel], Buffer, Buffer], Any]] = {
    "empty": lambda device, kernels, x, y: device.empty(1),
    "upload": lambda device, kernels, x, y: device.upload(ONES),
    "upload into": lambda device, kernels, x, y: device.upload(ONES, into=x),
    "download": lambda device, kernels, x, y: device.download(x).wait(),
    "copy": lambda device, kernels, x, y: device.copy(x, y),
    "view": lambda device, kernels, x, y: device.view(x).__enter__(),
    "launch": lambda device, kernels, x, y: axpy(device, kernels, x, y, 1.0),
    "bind": lambda device, kernels, x, y: device.stream.bind(
        [(kernels["axpy"], (1,), (4,), (x, y, 1.0, ITEMS))]
    ),
    "compile": lambda device, kernels, x, y: device.compile(source_for(device), SIGNATURES),
    "commit": lambda device, kernels, x, y: device.stream.commit(),
    "sync": lambda device, kernels, x, y: device.sync(),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_after_close_says_that_the_device_is_unavailable(
    device: Device, kernels: dict[str, Kernel], use: str
) -> None:
    x, y = device.upload(ONES), device.upload(ONES)
    device.close()
    with pytest.raises(DeviceUnavailable, match="closed"):
        USES[use](device, kernels, x, y)


def test_a_buffer_dropped_after_close_gives_its_memory_back(device: Device) -> None:
    buffer = device.upload(ONES)
    device.close()
    assert device.driver.allocated_bytes > 0
    del buffer
    assert device.memory_stats().driver_bytes == 0


def test_a_future_of_before_close_still_has_its_result(device: Device, kernels: dict[str, Kernel]) -> None:
    x, y = device.upload(ONES), device.upload(ONES)
    axpy(device, kernels, x, y, 1.0)
    future = device.download(y, np.float32)
    device.close()
    np.testing.assert_array_equal(future.wait(), 2 * ONES)


@pytest.mark.parametrize("writable", [False, True])
def test_an_interrupt_inside_a_view_leaves_the_buffer_usable(
    device: Device, kernels: dict[str, Kernel], writable: bool
) -> None:
    x, y = device.upload(ONES), device.upload(ONES)
    with pytest.raises(KeyboardInterrupt), device.view(y, np.float32, writable=writable):
        raise KeyboardInterrupt
    axpy(device, kernels, x, y, 1.0)
    np.testing.assert_array_equal(floats(device, y), 2 * ONES)
    with device.view(y, np.float32, writable=True) as array:
        array[:] = 7
    np.testing.assert_array_equal(floats(device, y), 7 * ONES)


# Scripts in a process of their own

PRELUDE = """
import gc, os, signal, sys, threading
import numpy as np
import penstock as ps
from penstock.errors import DeviceUnavailable
from penstock.runtime import Device

def in_child(action):
    # The exit code of a forked child that does `action` and exits; negative where a signal ended it.
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)  # ends a child that hangs, even inside native code
        action()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

ALL_KINDS = """
from conftest import DRIVERS, SMALL, compiled
devices = [Device.over(make(), SMALL) for make in DRIVERS.values()]
parts = [(device, compiled(device)) for device in devices]

def begin(device, kernels, rounds=50_000_000):
    # Work that is still pending when this returns.
    target = device.upload(np.zeros(1 << 16, np.int32))
    device.stream.launch(kernels["spin"], (1,), (1,), (target, rounds))
    device.stream.launch(kernels["fill"], (1,), (4,), (target, 7, 1 << 16))
    return target
"""


def run_script(*parts: str) -> subprocess.CompletedProcess[str]:
    """Run the parts as one program; a hang of it, or of a child that it forked, fails."""
    program = "\n".join(textwrap.dedent(part) for part in (PRELUDE, *parts))
    # Python 3.12 warns of forks in processes with threads, and OpenCL always has threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"the script hung after {out!r} and {err!r}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def assert_quiet_success(*parts: str) -> None:
    done = run_script(*parts)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr


# Forks


@pytest.mark.slow
@pytest.mark.parametrize("kind", NATIVE_KINDS)
def test_a_forked_child_is_refused_the_device_that_it_inherited_and_the_parent_goes_on(kind: str) -> None:
    assert_quiet_success(
        f"kind = {kind!r}",
        """
        from test_lifecycle import DRIVERS, ONES, SMALL, USES, assert_works, compiled

        device = Device.over(DRIVERS[kind](), SMALL)
        kernels = compiled(device)
        x, y = device.upload(ONES), device.upload(ONES)

        def pending():
            device.stream.launch(kernels["spin"], (1,), (1,), (y, 50_000_000))
            return device.download(y)

        def refused(use):
            try:
                use(device, kernels, x, y)
            except DeviceUnavailable as error:
                assert "fork" in str(error), error
            else:
                sys.exit("nothing was raised")

        future = pending()
        codes = {}
        if kind != "webgpu" or not future.is_ready():  # Mesa's software Vulkan takes one submission at a time
            codes["wait"] = in_child(lambda: refused(lambda *_: future.wait()))
        device.sync()
        uses = USES | {"part": lambda *_: device.download(x.view(0, 128)).wait()}
        codes["uses"] = in_child(lambda: [refused(use) for use in uses.values()])
        wrong = {name: code for name, code in codes.items() if code}
        assert not wrong, wrong
        future.wait()
        assert_works(device, kernels)
        """,
    )


@pytest.mark.slow
def test_a_forked_child_that_drops_what_it_inherited_exits_without_a_hang() -> None:
    assert_quiet_success(
        ALL_KINDS,
        """
        held, futures = [], []

        def only_exit():
            pass

        def drop_all():
            for inherited in (held, futures, parts, devices):
                inherited.clear()
            gc.collect()
            ps.memory.stats()
            ps.memory.trim()

        def clean_up():
            for device in devices:
                device.cleanup()
                device.close()

        codes = {}
        for action in (only_exit, drop_all, clean_up):
            held += [begin(*part, rounds=200_000_000) for part in parts]
            futures += [device.download(target) for device, target in zip(devices, held[-len(parts):])]
            codes[action.__name__] = in_child(action)
        assert not any(codes.values()), codes
        for future in futures:
            assert (future.wait().view(np.int32) == 7).all()
        """,
    )


def test_a_forked_child_gets_a_fresh_host_device() -> None:
    assert_quiet_success(
        """
        from test_lifecycle import assert_works, compiled

        ps.use("opencl").upload(np.ones(5))
        host = ps.use("host")
        held = host.upload(np.ones(1000))

        def use_host():
            fresh = ps.use("host")
            assert fresh is not host
            assert_works(fresh, compiled(fresh))
            fresh.sync()
            assert fresh.memory_stats().live_bytes == 0
            assert ps.memory.stats().unaccounted_bytes == 0
            try:
                ps.use("opencl").empty(1)
            except DeviceUnavailable:
                return
            sys.exit("the child was given a device of the parent")

        assert in_child(use_host) == 0
        assert_works(host, compiled(host))
        assert (host.download(held, np.float64).wait() == 1).all()
        """,
    )


def test_a_child_of_a_process_that_touched_no_device_can_open_opencl() -> None:
    assert_quiet_success(
        """
        def use_opencl():
            device = ps.use("opencl")
            assert device.capabilities.language == "opencl"
            array = np.arange(1000.0)
            assert (device.download(device.upload(array), np.float64).wait() == array).all()

        assert [in_child(use_opencl) for _ in range(2)] == [0, 0]
        use_opencl()
        """
    )


@pytest.mark.slow
def test_a_fork_while_another_thread_holds_the_locks_does_not_hang_the_child() -> None:
    assert_quiet_success(
        """
        from test_lifecycle import HostDriver, SMALL

        inside, go_on = threading.Event(), threading.Event()

        class Slow(HostDriver):
            def allocate(self, nbytes, pinned=False):
                inside.set()
                go_on.wait()
                return super().allocate(nbytes, pinned)

        device = Device.over(Slow(), SMALL)
        thread = threading.Thread(target=device.empty, args=(1000,))
        thread.start()
        inside.wait()

        def ask():
            ps.memory.stats()
            ps.memory.trim()
            device.cleanup()
            try:
                device.empty(1)
            except DeviceUnavailable:
                return
            sys.exit("nothing was raised")

        code = in_child(ask)
        go_on.set()
        thread.join()
        assert code == 0, code
        """
    )


# The interpreter's exit

EXITS = {
    "with pending work and futures that nobody waits for": """
        futures = [device.download(begin(device, kernels)) for device, kernels in parts]
        sys.exit(0)
    """,
    "with commands that were never submitted": """
        for device, kernels in parts:
            device.stream.launch(kernels["fill"], (1,), (4,), (device.empty(64), 1, 16))
    """,
    "with buffers in reference cycles": """
        class Node:
            pass

        for device, kernels in parts:
            node = Node()
            node.itself, node.buffer = node, begin(device, kernels)
            node.part = node.buffer.view(0, 1024)
        del node
    """,
    "inside a view": """
        views = [device.view(begin(device, kernels), np.int32, writable=True) for device, kernels in parts]
        arrays = [view.__enter__() for view in views]
        with devices[0].view(devices[0].empty(64)):
            sys.exit(0)
    """,
    "after some devices were closed": """
        held = [begin(device, kernels) for device, kernels in parts]
        for device in devices[::2]:
            device.close()
    """,
    "while a daemon thread works": """
        started = threading.Barrier(len(parts) + 1)

        def work(device, kernels):
            begin(device, kernels)
            started.wait()
            try:
                while True:
                    begin(device, kernels, rounds=1_000)
            except DeviceUnavailable:
                pass

        for part in parts:
            threading.Thread(target=work, args=part, daemon=True).start()
        started.wait()
    """,
    "with an atexit function that still uses a buffer": """
        import atexit

        held = [begin(device, kernels) for device, kernels in parts]
        atexit.register(lambda: [device.download(b).wait() for device, b in zip(devices, held)])
    """,
}


@pytest.mark.slow(
    "inside a view",
    "after some devices were closed",
    "with buffers in reference cycles",
    "with commands that were never submitted",
    "with pending work and futures that nobody waits for",
    "with an atexit function that still uses a buffer",
)
@pytest.mark.parametrize("moment", EXITS)
def test_the_interpreter_exits_quietly(moment: str) -> None:
    assert_quiet_success(ALL_KINDS, EXITS[moment])


@pytest.mark.slow
def test_an_exit_waits_for_kernels_that_pocl_has_yet_to_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles them in a folder of the process; the cached files serve the next process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        assert_quiet_success(
            """
            import numpy as np
            import penstock as ps

            device = ps.use("opencl")
            x = device.upload(np.zeros(64, np.float32))
            rest = "float v = x[0]; for (int i = 0; i < n; i++) v = v * 1.0001f + 1; x[get_global_id(0)] = v;"
            for name in ("first", "second"):
                text = f"kernel void {name}(global float *x, int n) {{ {rest} }}"
                kernel = device.compile(text, {name: ["float32*", "int32"]})[name]
                device.stream.launch(kernel, (1,), (64,), (x, 1_000_000))
            """
        )
    assert list((tmp_path / "penstock").glob("pocl/programs/*")), "nothing was kept"


def test_a_failure_that_is_pending_at_exit_is_told_in_one_line() -> None:
    done = run_script(
        ALL_KINDS,
        """
        def bad(out):
            raise ZeroDivisionError("a bad kernel")

        device = devices[list(DRIVERS).index("host-late")]
        kernel = device.compile({"bad": bad}, {"bad": ("int32*",)})["bad"]
        device.stream.launch(kernel, (1,), (1,), (device.empty(64),))
        """,
    )
    assert (done.returncode, done.stdout) == (0, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("penstock: at exit, host-late: kernel 'bad'")
    assert "ZeroDivisionError: a bad kernel" in line


def test_an_interrupt_while_a_process_ends_leaves_no_traceback() -> None:
    done = run_script(
        """
        import penstock as ps
        from penstock.drivers.driver import at_end

        def interrupted():
            raise KeyboardInterrupt

        at_end[:0] = [interrupted, lambda: print("the rest ends, too")]
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the rest ends, too\n", "")
