"""What a single operation costs between Python's operator and the launch, counted and not timed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import Device

OPERATIONS: dict[str, Callable[[ps.Tensor], ps.Tensor]] = {
    "exp": ps.exp,
    "power": lambda x: x**x,
    "product": lambda x: x @ x,
    "sum": lambda x: ps.sum(x, axis=1),
}
MOST_CALLS = 15  # of Python functions after an operation was recorded; each takes about 0.1 µs


class Counted:
    """The launches of a device, and the Python functions of the package that are called outside of them."""

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches = self.calls = 0
        self._launch, self._launching = device.driver.launch, False
        self._package = os.path.dirname(ps.__file__)
        monkeypatch.setattr(device.driver, "launch", self._launched)

    def _launched(self, *args: Any) -> Any:
        self.launches += 1
        self._launching = True
        try:
            return self._launch(*args)
        finally:
            self._launching = False

    def of(self, work: Callable[[], object]) -> int:
        """The calls of `work`."""
        self.calls = 0
        sys.setprofile(self._note)
        try:
            work()
        finally:
            sys.setprofile(None)
        return self.calls

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call" and not self._launching and frame.f_code.co_filename.startswith(self._package):
            self.calls += 1


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_is_known_is_a_launch_and_a_buffer(
    device: Device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = OPERATIONS[name]
    x = ps.asarray(np.linspace(1, 2, 64, dtype=np.float32).reshape(8, 8), device=device)
    for _ in range(12):
        operation(x).realize()
    counted = Counted(device, monkeypatch)
    before = device.pool.stats()
    operation(x).realize()
    after = device.pool.stats()
    assert counted.launches == 1
    assert after.hits + after.misses == before.hits + before.misses + 1
    assert after.allocation_count == before.allocation_count
    recorded = counted.of(lambda: operation(x))
    # The least, as now and then a batch of commands is submitted.
    assert min(counted.of(lambda: operation(x).realize()) for _ in range(5)) - recorded <= MOST_CALLS
