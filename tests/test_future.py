"""Futures: their three states, and the ways to wait."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS

import penstock as ps
from penstock import Future, FutureState
from penstock.errors import CompileError, DeviceError
from penstock.runtime import Device


class Work:
    """Something that finishes when told to, with 42 or with an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.done = threading.Event()
        self.error = error
        self.finished = 0
        self.future: Future[int] = Future(self.done.is_set, lambda: self.done.wait() and None, self.finish)

    def finish(self) -> int:
        self.finished += 1
        if self.error:
            raise self.error
        return 42


def test_pending_then_ready() -> None:
    work = Work()
    assert work.future.state is FutureState.PENDING
    assert not work.future.is_ready()
    assert work.future.try_get() is None
    work.done.set()
    assert work.future.is_ready()
    assert work.future.state is FutureState.READY
    assert work.future.try_get() == work.future.wait() == work.future.wait(timeout=0) == 42
    assert work.finished == 1


def test_wait_blocks_until_the_work_is_done() -> None:
    work = Work()
    timer = threading.Timer(0.05, work.done.set)
    timer.start()
    assert work.future.wait() == 42
    timer.join()


def test_wait_gives_up_after_its_timeout_and_can_be_asked_again() -> None:
    work = Work()
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError, match=str(timeout)):
            work.future.wait(timeout=timeout)
    assert work.future.state is FutureState.PENDING
    work.done.set()
    assert work.future.wait(timeout=0) == 42


def test_a_failed_future_raises_every_time_in_every_way() -> None:
    work = Work(DeviceError("broke", "kernel 'x'"))
    work.done.set()
    for ask in (work.future.wait, lambda: work.future.wait(timeout=1), work.future.try_get):
        for _ in range(2):
            with pytest.raises(DeviceError, match="kernel 'x': broke"):
                ask()
    assert work.future.state is FutureState.FAILED
    assert work.future.is_ready()
    assert work.finished == 1


def test_await() -> None:
    async def main() -> tuple[int, int]:
        first, second = Work(), Work()
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, first.done.set)
        loop.call_later(0.02, second.done.set)

        async def both(future: Future[int]) -> int:
            return await future

        return tuple(await asyncio.gather(both(second.future), both(first.future)))

    assert asyncio.run(main()) == (42, 42)


def test_await_raises_the_error_and_can_be_cancelled() -> None:
    async def main() -> None:
        failed = Work(DeviceError("broke"))
        failed.done.set()
        with pytest.raises(DeviceError):
            await failed.future
        pending = Work()
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.01):
                await pending.future

    asyncio.run(main())


def test_many_threads_may_wait_for_one_future() -> None:
    work, results = Work(), []
    threads = [threading.Thread(target=lambda: results.append(work.future.wait())) for _ in range(8)]
    for thread in threads:
        thread.start()
    work.done.set()
    for thread in threads:
        thread.join()
    assert results == [42] * 8
    assert work.finished == 1


def test_a_future_that_is_ready_from_the_start() -> None:
    assert Future.ready("x").try_get() == "x"


@pytest.mark.parametrize("kind", ["opencl-device", "host-far"])
def test_numpy_async_does_not_wait_for_a_compiler(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device.over(DRIVERS[kind]())
    x = ps.asarray(np.arange(6, dtype=np.float32), device=device)
    compiling, goes_on = threading.Event(), threading.Event()
    compile_ = device.compile

    def slowly(*args: Any) -> Any:
        compiling.set()
        assert goes_on.wait(60)
        return compile_(*args)

    monkeypatch.setattr(device, "compile", slowly)
    y = x * 3 + 1
    future = y.numpy_async()  # would hang here
    assert compiling.wait(60)
    assert future.state is FutureState.PENDING
    assert future.try_get() is None
    with pytest.raises(TimeoutError):
        future.wait(timeout=0.01)
    goes_on.set()
    x += 100  # values never change: what was asked for is what it was
    np.testing.assert_array_equal(future.wait(), np.arange(6) * 3 + 1)
    np.testing.assert_array_equal(y.numpy(), np.arange(6) * 3 + 1)
    np.testing.assert_array_equal(x.numpy(), np.arange(6) + 100)
    monkeypatch.undo()
    assert (x * 3 + 1).numpy_async().wait().tolist() == [301, 304, 307, 310, 313, 316]
    device.close()


def test_an_error_of_the_compiler_is_the_futures(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device.over(DRIVERS["host-far"]())
    x = ps.asarray(np.arange(6, dtype=np.float32), device=device)

    def refuses(*_: Any) -> Any:
        raise CompileError("no such thing")

    monkeypatch.setattr(device, "compile", refuses)
    future = (x * 3).numpy_async()
    for _ in range(2):
        with pytest.raises(CompileError, match="no such thing"):
            future.wait()
    assert future.state is FutureState.FAILED
    monkeypatch.undo()
    assert (x * 3).numpy_async().wait().tolist() == [0, 3, 6, 9, 12, 15]
    device.close()
