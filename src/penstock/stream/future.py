"""Futures: results that are pending, and then ready or failed."""

from __future__ import annotations

import asyncio
import enum
import threading
import time
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

T = TypeVar("T")


class FutureState(enum.Enum):
    """The three states of a future.

    >>> [state.name for state in ps.FutureState]
    ['PENDING', 'READY', 'FAILED']
    """

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"


class Future(Generic[T]):
    """A result of the device. Every call of `wait` returns it, or raises the device's error.

    >>> future = (ps.ones(2) + 1).numpy_async()
    >>> future.wait().tolist()
    [2.0, 2.0]
    """

    def __init__(self, poll: Callable[[], bool], block: Callable[[], None], finish: Callable[[], T]) -> None:
        self._poll = poll  # whether the device is done; never waits
        self._block: Callable[[], None] | None = block  # waits until the device is done
        self._finish: Callable[[], T] | None = finish  # the result, or the error as an exception
        self._lock = threading.Lock()
        self._state = FutureState.PENDING
        self._result: T | None = None
        self._error: Exception | None = None

    @classmethod
    def ready(cls, result: T) -> Future[T]:
        """A future that is ready."""
        future = cls(lambda: True, lambda: None, lambda: result)
        future._resolve()
        return future

    @classmethod
    def of_work(
        cls, work: Callable[[], Future[T]], start: Callable[[Callable[[], None]], object]
    ) -> Future[T]:
        """A future with the result of the future that `work` returns; `start` runs `work` in a thread."""
        busy = (
            threading.Lock()
        )  # until the work is done; waited for by `with`, which an interrupt leaves free
        busy.acquire()
        outcome: list[Future[T] | BaseException] = []

        def run() -> None:
            try:
                outcome.append(work())
            except BaseException as error:
                outcome.append(error)
            finally:
                busy.release()

        def poll() -> bool:
            return not busy.locked() and (isinstance(outcome[0], BaseException) or outcome[0].is_ready())

        def block() -> None:
            with busy:
                pass

        def finish() -> T:
            block()
            if isinstance(outcome[0], BaseException):
                raise outcome[0]
            return outcome[0].wait()

        start(run)
        return cls(poll, block, finish)

    @property
    def state(self) -> FutureState:
        """Pending, ready or failed, as of now."""
        self.is_ready()
        return self._state

    def is_ready(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        if self._state is FutureState.PENDING and self._poll():
            self._resolve()
        return self._state is not FutureState.PENDING

    def wait(self, timeout: float | None = None) -> T:
        """The result. Raises the device's error, or TimeoutError if it is pending after `timeout` seconds."""
        if self._state is FutureState.PENDING:
            block = self._block  # a local copy, since another thread may resolve the future at any moment
            if timeout is not None:
                self._poll_until(time.monotonic() + timeout, timeout)
            elif block is not None:
                block()
            self._resolve()
        return self._outcome()

    def try_get(self) -> T | None:
        """The result; None while it is pending. Raises the device's error."""
        return self._outcome() if self.is_ready() else None

    def __await__(self) -> Generator[None, None, T]:
        delay = 0.0
        while not self.is_ready():
            yield from asyncio.sleep(delay).__await__()
            delay = min(delay + 50e-6, 2e-3)
        return self._outcome()

    def _poll_until(self, deadline: float, timeout: float) -> None:
        delay = 10e-6
        while not self._poll():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the device was not done after {timeout} s; the work goes on")
            time.sleep(min(delay, max(deadline - time.monotonic(), 0)))
            delay = min(2 * delay, 2e-3)

    def _resolve(self) -> None:
        with self._lock:
            if self._finish is None:
                return
            try:
                self._result = self._finish()
                self._state = FutureState.READY
            except Exception as error:
                self._error = error
                self._state = FutureState.FAILED
            self._finish = self._block = None  # releases what they reference
            self._poll = lambda: True

    def _outcome(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]
