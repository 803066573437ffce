"""What a single operation costs between Python's operator and the launch, counted and not timed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, SMALL

import penstock as ps
from penstock import Device

OPERATIONS: dict[str, Callable[[ps.Tensor], ps.Tensor]] = {
    "exp": ps.exp,
    "power": lambda x: x**x,
    "product": lambda x: x @ x,
    "sum": lambda x: ps.sum(x, axis=1),
}
FUNCTIONS: dict[str, Callable[[ps.Tensor], ps.Tensor]] = {
    "sum": lambda x: ps.sum(x, axis=1),
    "max": lambda x: ps.max(x, axis=1),
    "variance": lambda x: ps.var(x, axis=1),
    "softmax": lambda x: ps.nn.functional.softmax(x, axis=1),
    "layer norm": lambda x: ps.nn.functional.layer_norm(x, (8,)),
    "concat": lambda x: ps.concat([x, x]),
}
# What is frequent, and how many Python functions it calls in all, but for the launch.
FREQUENT: dict[str, tuple[Callable[[ps.Tensor, ps.Tensor], ps.Tensor], int]] = {
    "add": (lambda x, y: x + y, 11),
    "broadcast": (lambda x, row: x + row, 11),
    "number": (lambda x, y: x * 2.0, 13),
    "number first": (lambda x, y: 1 / x, 13),
    "function": (lambda x, y: ps.exp(x), 11),
    "transpose": (lambda x, y: x.T + 1.0, 18),
    "slice": (lambda x, y: x[3], 16),
    "block": (lambda x, y: x[:4, 1:], 14),
    "softmax": (lambda x, y: ps.nn.functional.softmax(x, axis=1), 11),
    "function and number": (lambda x, y: ps.nn.functional.relu(x) + 1, 19),
    "product": (lambda x, y: x @ y, 12),
    "concat": (lambda x, y: ps.concat([x, y]), 14),
    "rows by index": (lambda x, index: ps.take(x, index, axis=0), 23),
}
# What is frequent on values that are not computed yet, and how many Python functions record it.
PENDING: dict[str, tuple[Callable[[ps.Tensor, ps.Tensor], ps.Tensor], int]] = {
    "add": (lambda x, y: x + x, 6),
    "function": (lambda x, y: ps.nn.functional.sigmoid(x), 6),
    "product": (lambda x, y: x @ y, 7),
    "block": (lambda x, y: x[:4, 1:], 8),
    "reshape": (lambda x, y: ps.reshape(x, (2, 4, 8)), 8),
    "permute": (lambda x, y: ps.permute_dims(x, (1, 0)), 8),
}
# Of Python functions, to record a function and after that; each takes about 0.1 µs.
MOST_TO_RECORD = 8
MOST_CALLS = 14


class Counted:
    """The launches of a device, and the Python functions of the package that are called outside of them."""

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches = self.calls = 0
        self._launcher, self._launching = device.driver.launcher, False
        self._package = os.path.dirname(ps.__file__)
        monkeypatch.setattr(device.driver, "launcher", self._counting)

    def _counting(self, *kernel: Any) -> Any:
        launch = self._launcher(*kernel)

        def launched(*args: Any) -> Any:
            self.launches += 1
            self._launching = True
            try:
                return launch(*args)
            finally:
                self._launching = False

        return launched

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


def small(device: Device) -> ps.Tensor:
    return ps.asarray(np.linspace(1, 2, 64, dtype=np.float32).reshape(8, 8), device=device)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_is_known_is_a_launch_and_a_buffer(
    device: Device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = OPERATIONS[name]
    x = small(device)
    counted = Counted(device, monkeypatch)
    for _ in range(12):
        operation(x).realize()
    counted.launches = 0
    before = device.pool.stats()
    operation(x).realize()
    after = device.pool.stats()
    assert counted.launches == 1
    assert after.hits + after.misses == before.hits + before.misses + 1
    assert after.allocation_count == before.allocation_count
    recorded = counted.of(lambda: operation(x))
    # The least, as now and then a batch of commands is submitted.
    assert min(counted.of(lambda: operation(x).realize()) for _ in range(5)) - recorded <= MOST_CALLS


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_is_known_is_a_node(
    device: Device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = FUNCTIONS[name]
    x = small(device)
    function(x)
    counted = Counted(device, monkeypatch)
    assert counted.of(lambda: function(x)) <= MOST_TO_RECORD


@pytest.mark.parametrize("kind", sorted({*DRIVERS} & {"opencl-device"}))  # of memory that the host cannot see
@pytest.mark.parametrize("name", FREQUENT)
def test_a_frequent_operation_takes_few_calls(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device.over(DRIVERS[kind](), SMALL)
    operation, most = FREQUENT[name]
    x, y = small(device), small(device)
    if name == "broadcast":
        y = y[3].realize()
    if name == "rows by index":
        y = ps.asarray(np.arange(8), device=device)
        ps.take(x, y, axis=0).numpy()  # after which it is known that they are in range
    counted = Counted(device, monkeypatch)
    for _ in range(12):
        operation(x, y).realize()
    assert min(counted.of(lambda: operation(x, y).realize()) for _ in range(5)) <= most
    device.close()


@pytest.mark.parametrize("name", PENDING)
def test_a_frequent_operation_on_what_is_pending_takes_few_calls(
    device: Device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation, most = PENDING[name]
    y = small(device)
    counted = Counted(device, monkeypatch)
    x = ps.exp(small(device) @ small(device))
    operation(x, y)
    assert counted.of(lambda: operation(x, y)) <= most
