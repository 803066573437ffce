"""An interrupt (Ctrl-C) at any moment leaves no lock taken, no queue out of order and no memory lost.

CPython handles signals when a C function returned, when a Python function starts, and at the end of a loop's
turn. A profile function that raises does so at the first two, and at the very instruction. Each test repeats
its work with an interrupt at the first such moment, at the second, and so on, until the work is through.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from conftest import SMALL, GraphingHost, Lazy, compiled, examples

import penstock as ps
from penstock.data.prefetch import Prefetch
from penstock.runtime import Device

PACKAGE = Path(ps.__file__).parent
WATCHED = tuple(
    str(PACKAGE / part)
    for part in ("stream", "memory", "runtime.py", "realize.py", "drivers/host.py", "data/prefetch.py")
)
SIZE = 500  # items of every buffer, so that memory is reused
PATIENCE = 30.0  # seconds, after which something hangs


class Interrupt:
    """Raises KeyboardInterrupt at one moment of a `with` block."""

    def __init__(self, moment: int) -> None:
        self.moment = moment
        self.passed = 0

    def __enter__(self) -> Interrupt:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event in ("call", "c_return") and code.co_filename.startswith(WATCHED):
            if spared(frame):
                return
            self.passed += 1
            if self.passed == self.moment:
                sys.setprofile(None)
                raise KeyboardInterrupt


def spared(frame: FrameType | None) -> bool:
    """Whether a frame is in a finaliser, where Python drops exceptions, or in the work of the device."""
    while frame is not None:
        if frame.f_code.co_name in ("__del__", "_run_next", "execute"):
            return True
        frame = frame.f_back
    return False


def moments(work: Callable[[], Any], step: int = 1) -> Iterator[int]:
    """Repeat the work with an interrupt at every moment (or every n-th), with a callback after each."""
    moment, interrupted = 1, True
    while interrupted:
        try:
            with Interrupt(moment) as interrupt:
                work()
            interrupted = False
            assert interrupt.passed < moment, "the interrupt was lost"
        except KeyboardInterrupt:
            pass
        if interrupted:  # not in the handler, where the exception still holds references
            yield moment
        moment += step


def in_a_thread(check: Callable[[], None]) -> None:
    """Run a check in another thread, which would block at locks that this thread has not released."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            check()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "a lock was left taken"
    if errors:
        raise errors[0]


def made(far: bool, seed: int = 0) -> Device:
    scheduler = random.Random(seed) if far else Lazy()
    driver = GraphingHost("interrupted", shared_memory=not far, scheduler=scheduler)
    return Device.over(driver, SMALL)


def still_computes(device: Device, kernels: dict[str, Any]) -> None:
    """Later commands of the interrupted size are right, and all memory is accounted for."""
    for lane in (device.stream.compute, device.stream.incoming, device.stream.outgoing):
        assert len(lane.opened.events) == len(lane.opened.commands)
    for _ in range(2):
        x, y = device.upload(np.full(SIZE, 3, np.float32)), device.upload(np.ones(SIZE, np.float32))
        device.stream.launch(kernels["axpy"], (1,), (1,), (x, y, 2.0, SIZE))
        result = device.download(y, np.float32)
        np.testing.assert_array_equal(result.wait(), np.full(SIZE, 7, np.float32))
        with device.view(x, np.float32) as array:
            np.testing.assert_array_equal(array, np.full(SIZE, 3, np.float32))
    device.sync()
    assert device.stream.pending == 0
    assert device.memory_stats().unaccounted_bytes == 0


@pytest.mark.slow("far")
@pytest.mark.parametrize("far", [False, True], ids=["shared", "far"])
def test_commands_and_copies(far: bool) -> None:
    device = made(far)
    kernels = compiled(device)
    kept = device.upload(np.arange(SIZE, dtype=np.float32))

    def work() -> None:
        x = device.upload(np.full(SIZE, 2, np.float32))
        y = device.empty(4 * SIZE)
        device.stream.launch(kernels["fill"], (1,), (1,), (y, 0, SIZE))
        device.stream.launch(kernels["axpy"], (1,), (1,), (x, y, 3.0, SIZE))
        device.copy(x, y)
        del y
        np.testing.assert_array_equal(device.download(x, np.float32).wait(), np.full(SIZE, 6))
        with device.view(x, np.float32, writable=True) as array:
            array[:5] = 1
        with device.view(x, np.float32) as array:
            assert array[:6].tolist() == [1, 1, 1, 1, 1, 6]
        device.sync()
        device.trim()

    for moment in moments(work, step=examples(1, quick=3)):
        in_a_thread(lambda: still_computes(device, kernels))
        if moment % 20 == 0:
            result = device.download(kept, np.float32).wait()
            np.testing.assert_array_equal(result, np.arange(SIZE, dtype=np.float32))
    del kept
    device.close()
    assert device.driver.allocated_bytes == 0


def test_programs_and_graphs() -> None:
    device = made(far=True)
    kernels = compiled(device)
    x, y = device.upload(np.ones(SIZE, np.float32)), device.upload(np.zeros(SIZE, np.float32))
    launches = [(kernels["fill"], (1,), (1,), (y, 0, SIZE)), (kernels["axpy"], (1,), (1,), (x, y, 2.0, SIZE))]
    program = device.stream.bind(launches)

    def work() -> None:
        for _ in range(4):
            device.stream.replay(program)
        np.testing.assert_array_equal(device.download(y, np.float32).wait(), np.full(SIZE, 2))
        device.cleanup()

    for _ in moments(work, step=examples(1, quick=3)):
        in_a_thread(lambda: still_computes(device, kernels))
        device.stream.replay(program)
        np.testing.assert_array_equal(device.download(y, np.float32).wait(), np.full(SIZE, 2))
    device.close()


@pytest.mark.parametrize("far", [False, True], ids=["shared", "far"])
def test_tensors(far: bool) -> None:
    device = made(far)
    x = ps.asarray(np.arange(12, dtype=np.float32).reshape(3, 4), device=device)

    def work() -> None:
        y = ps.exp(x - ps.max(x, axis=1, keepdims=True))
        z = (y @ x.T).realize()
        float(ps.sum(z * 2))

    def check() -> None:
        assert float(ps.sum(x)) == 66
        assert (x[1] * 2).tolist() == [8, 10, 12, 14]

    work()  # a program that was built is known from here on
    for _ in moments(work, step=3):
        in_a_thread(check)
    device.close()


def test_a_close_that_was_interrupted_is_made_again() -> None:
    moment = 0
    while True:
        moment += 1
        device = made(far=True, seed=moment)
        buffer = device.upload(np.ones(100, np.float32))
        device.stream.launch(compiled(device)["fill"], (1,), (1,), (buffer, 1, 100))
        del buffer
        try:
            with Interrupt(moment):
                device.close()
            break
        except KeyboardInterrupt:
            in_a_thread(device.close)
        assert device.driver.allocated_bytes == 0
        assert device.stream.unavailable


class Numbers:
    """Batches 0, 1, 2 and so on."""

    def __init__(self) -> None:
        self._next = 0

    def __next__(self) -> np.ndarray:
        self._next += 1
        return np.full(4, self._next - 1, np.int32)

    def state(self) -> int:
        return self._next


def test_prefetched_batches_are_neither_lost_nor_doubled() -> None:
    device = made(far=False)
    seen: list[int] = []
    batches = Prefetch(Numbers(), device, depth=2)

    def take() -> None:
        for _ in range(2):
            batch = next(batches)
            sys.setprofile(None)  # from here on it is the user's
            seen.append(int(batch[0]))

    for _ in moments(take):
        assert batches.state() == len(seen) + (seen != list(range(len(seen))))
    in_a_thread(take)
    assert seen == list(range(len(seen)))
    in_a_thread(batches.close)
    device.close()


SCRIPT = """
import sys, threading, time
import numpy as np
import penstock as ps
x = ps.asarray(np.ones((64, 64), np.float32))
float(ps.sum(x * 2.0))  # imports the rest: an interrupt in there is a RuntimeError before 3.12
print("ready", flush=True)
count = 0
while True:
    try:
        print("goes on", flush=True)  # here, where the next interrupt is caught
        while True:
            y = ps.sum(x * 2.0 + float(count % 7))
            assert float(y) == 64 * 64 * (2 + count % 7), float(y)
            count += 1
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        if sys.argv[1] == "once":
            raise
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="has no signal that interrupts another process's Python")
def test_a_script_survives_many_interrupts_and_ends_after_the_last() -> None:
    """Real signals, at any time, on the default device."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", SCRIPT, "often"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        rng = random.Random(0)
        for _ in range(30):
            watchdog = threading.Timer(PATIENCE, process.kill)
            watchdog.start()
            assert process.stdout.readline() == "goes on\n"
            time.sleep(rng.random() * 0.01)
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
            watchdog.cancel()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="has no signal that interrupts another process's Python")
def test_an_interrupted_script_ends() -> None:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    for number in range(2):
        command = [sys.executable, "-c", SCRIPT, "once"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.02 * number)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=2 * PATIENCE)
        assert "KeyboardInterrupt" in errors
        assert process.returncode == -signal.SIGINT
