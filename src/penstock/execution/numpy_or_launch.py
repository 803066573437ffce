"""Whether NumPy or a launch computes a small expression that has kernels, found out by trials of both."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any

from penstock.drivers.driver import Driver
from penstock.execution.host_program import HostProgram
from penstock.memory.buffer import Buffer

if TYPE_CHECKING:
    from penstock.execution.launched import RunProgram

_TRIALS = 8  # runs by NumPy of an expression that has kernels, the least time of which counts
_QUICK_LAUNCHES = 8  # after which launches are preferred
_IN_A_ROW = 4  # that are tried: the first has not run for a while, and takes longer than those after it
_MOST_BETWEEN = 1 << 12  # runs by NumPy between launches that are tried
_MORE_TRIALS, _FAR = 64, 4.0  # if it took longer than a launch, but not by this factor
_OFTEN = 80  # launches, after which the driver compiles for the calling thread what has little to do


class NumpyOrLaunch:
    """A program of kernels, or NumPy where the device is done with the inputs and it takes less time.

    Both give the same bits. A launch takes less time once its kernel is compiled for the calling thread, as
    some drivers do if it has little to do. So it is tried now and then, until it takes less time than NumPy.
    """

    def __init__(
        self, on_host: HostProgram, launch: RunProgram, launch_seconds: float, driver: Driver
    ) -> None:
        """`launch_seconds`: what a launch takes, beside its work, that other threads run."""
        self._on_host, self._launch, self._launch_seconds = on_host, launch, launch_seconds
        self._driver = driver
        self._trials, self._more_trials = _TRIALS, _MORE_TRIALS  # of NumPy
        self._seconds = inf  # the least time that it took
        self._launches = self._quick_launches = 0  # those that were tried
        self._between, self._until_next = 1, 0  # runs by NumPy between launches, and before the next
        self._slow_in_a_row = 0  # launches that were done at once, but took longer
        self._launches_only = self._tries_launches = False

    def run(self, inputs: Sequence[Buffer], numbers: Sequence[Any]) -> list[Buffer]:
        """The values of the wanted nodes, from buffers of the inputs and the constants."""
        if self._launches_only:
            return self._launch(inputs, numbers)
        if self._tries_launches:
            if not self._until_next:
                return self._try_launch(inputs, numbers)
            self._until_next -= 1
        start = perf_counter()
        results = self._on_host.run_in_place(inputs, numbers)
        if results is None:
            return self._launch(inputs, numbers)
        seconds = perf_counter() - start
        if seconds < self._seconds:
            self._seconds = seconds
        if self._trials:
            self._trials -= 1
            if not self._trials:
                self._decide()
        return results

    def _decide(self) -> None:
        """Choose after the trials of NumPy; after some more if the machine may have been busy."""
        if self._launch_seconds <= self._seconds < _FAR * self._launch_seconds:
            self._trials, self._more_trials = self._more_trials, 0
        if not self._trials:
            self._launches_only = self._seconds >= self._launch_seconds
            # If NumPy takes still less time, no launch is as quick.
            self._tries_launches = self._seconds > self._driver.launch_seconds / 2

    def _try_launch(self, inputs: Sequence[Buffer], numbers: Sequence[Any]) -> list[Buffer]:
        """A launch; they are preferred once several were done in less time than NumPy ever took."""
        start = perf_counter()
        results = self._launch(inputs, numbers)
        seconds, event = perf_counter() - start, results[0].usage.event
        self._launches += 1
        is_done = event is None or self._driver.is_done(event)
        if is_done and seconds < self._seconds:
            self._quick_launches += 1
            self._launches_only = self._quick_launches == _QUICK_LAUNCHES
            self._between = self._slow_in_a_row = 0
        elif is_done and self._slow_in_a_row < _IN_A_ROW:
            self._slow_in_a_row += 1
            return results
        elif self._launches > _OFTEN:
            self._between = min(max(2 * self._between, 1), _MOST_BETWEEN)
        self._slow_in_a_row = 0
        self._until_next = self._between
        return results
