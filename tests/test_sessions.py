"""Sessions of a user, at random, against NumPy: what was cached for one expression must suit the next.

Numbers are such that nothing is rounded, so every value is compared exactly. All sessions of a kind of device
share it, with its programs, launchers, subgraphs and memory.
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, NATIVE, SMALL, examples, surface
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from test_inline import at_once
from test_offload import offloading

import penstock as ps
from penstock import Device, nn, optim
from penstock.drivers.opencl import pocl
from penstock.errors import OutOfDeviceMemory
from penstock.execution import structure

F = nn.functional
Array = np.ndarray[Any, Any]
Full = Callable[..., Any]
LARGE = 200  # rows and columns: more items than NumPy computes for a CPU
OFFLOADING = {"opencl-offloading": "opencl-device", "host-offloading": "host-late"}
INLINE = "opencl-inline"
KINDS = [*(kind for kind in DRIVERS if kind != "opencl-mapped"), *OFFLOADING]
KINDS += [INLINE] if pocl.inline_device(NATIVE) is not None else []

numbers = st.sampled_from([0, 1, 2, -1, 3, 0.5, -0.5, -0.0])
places = st.integers(0, 11)
flags = st.booleans()

# What is computed from a value, a number and a count, by Penstock and by NumPy; `full` makes a constant.
EXPRESSIONS: dict[str, Callable[[Any, Full, Any, Any, int], Any]] = {
    "scaled": lambda xp, full, x, k, n: x * k,
    "subtracted": lambda xp, full, x, k, n: k - x,
    "shifted": lambda xp, full, x, k, n: (x + k) * 2 - n,
    "squared": lambda xp, full, x, k, n: x * x,
    "limited": lambda xp, full, x, k, n: xp.maximum(xp.minimum(x, n), k),
    "chosen": lambda xp, full, x, k, n: xp.where(x > n, x, -x),
    "turned": lambda xp, full, x, k, n: xp.permute_dims(x, (1, 0)) * k,
    "reversed": lambda xp, full, x, k, n: x[::-1] - x,
    "cut": lambda xp, full, x, k, n: x[n:] * 2,
    "part": lambda xp, full, x, k, n: x[:n],
    "joined": lambda xp, full, x, k, n: xp.concat([x, full((n, x.shape[1]), k)]),
    "spread": lambda xp, full, x, k, n: x + full((x.shape[1],), k),
    "summed": lambda xp, full, x, k, n: xp.sum(x, axis=n % 2, keepdims=True) * k,
    "running": lambda xp, full, x, k, n: xp.cumulative_sum(x, axis=n % 2),
    "sorted": lambda xp, full, x, k, n: xp.sort(x, axis=0) + k,
    "multiplied": lambda xp, full, x, k, n: x @ full((x.shape[1], n), k),
    "by itself": lambda xp, full, x, k, n: x @ xp.permute_dims(x, (1, 0)),
    "by the host": lambda xp, full, x, k, n: (x // 0.5) * k,
}


def is_exact(array: Array) -> bool:
    """Whether sums and products of a few such numbers are not rounded in float32."""
    return array.size == 0 or bool(np.abs(array).max() <= 512 and np.all(array * 4 == np.rint(array * 4)))


class Session(RuleBasedStateMachine):
    """What a user may do with one device, in any order."""

    def __init__(self, device: Device, jitted: Jitted) -> None:
        super().__init__()
        self.device, self.jitted = device, jitted
        self.values: list[tuple[ps.Tensor, Array]] = []
        self.arriving: list[tuple[Any, Array]] = []  # futures, and what they will have
        self.exported: list[tuple[Array, Array]] = []
        self.profile: Any = None
        self.seeds = itertools.count()
        jitted.counter[...] = 0.0
        self.counted = np.zeros((4, 4), np.float32)
        self.weight, self.momentum = self.drawn(4), np.zeros((4, 4), np.float32)
        self.parameter = ps.asarray(self.weight, device=device).requires_grad_()
        self.optimizer = optim.SGD([self.parameter], lr=0.5, momentum=0.5)

    # Values

    def drawn(self, rows: int) -> Array:
        return np.random.default_rng(next(self.seeds)).integers(-2, 3, (rows, rows)).astype(np.float32)

    def value(self, at: int) -> tuple[ps.Tensor, Array]:
        if not self.values:
            self.make(4)
        return self.values[at % len(self.values)] if self.values else (ps.zeros((1, 1)), np.zeros((1, 1)))

    def keep(self, tensor: ps.Tensor, array: Array) -> None:
        if is_exact(array):
            self.values = [*self.values[-11:], (tensor, array)]

    def full(self, shape: tuple[int, ...], number: float) -> ps.Tensor:
        return ps.full(shape, number, dtype=ps.float32, device=self.device)

    def check(self, tensor: ps.Tensor, expected: Array) -> None:
        np.testing.assert_array_equal(tensor.numpy(), expected)

    @rule(rows=st.sampled_from([4, 4, LARGE]))
    def make(self, rows: int) -> None:
        array = self.drawn(rows)
        self.within(lambda: self.keep(ps.asarray(array, device=self.device), array))

    @rule(
        at=places,
        names=st.lists(st.sampled_from(list(EXPRESSIONS)), min_size=1, max_size=3),
        number=numbers,
        count=st.integers(1, 3),
        how=st.sampled_from(["pending", "computed", "read"]),
    )
    def compute(self, at: int, names: list[str], number: float, count: int, how: str) -> None:
        def work() -> None:
            tensor, array = self.value(at)
            for name in names:
                expected = EXPRESSIONS[name](np, self._full, array, number, count)
                if not is_exact(expected) or np.abs(array).sum(0).max(initial=0) > 2000:
                    break
                tensor = EXPRESSIONS[name](ps, self.full, tensor, number, count)
                array = expected.astype(np.float32)
            if how == "computed":
                tensor.realize()
            if how == "read":
                self.check(tensor, array)
            self.keep(tensor, array)

        self.within(work)

    @staticmethod
    def _full(shape: tuple[int, ...], number: float) -> Array:
        return np.full(shape, number, np.float32)

    @rule(at=places)
    def read(self, at: int) -> None:
        self.within(lambda: self.check(*self.value(at)))

    @rule(at=places)
    def read_later(self, at: int) -> None:
        def work() -> None:
            tensor, array = self.value(at)
            self.arriving.append((tensor.numpy_async(), array))

        self.within(work)

    @rule()
    def look(self) -> None:
        arriving, self.arriving = self.arriving, []
        for future, array in arriving:
            try:
                np.testing.assert_array_equal(future.wait(), array)
            except OutOfDeviceMemory:  # under a limit of that time
                continue
        for array, expected in self.exported:
            np.testing.assert_array_equal(array, expected)

    @rule(at=places, how=st.sampled_from(["detached", "reshaped", "a row", "exported"]))
    def share(self, at: int, how: str) -> None:
        def work() -> None:
            tensor, array = self.value(at)
            if how == "detached":
                self.keep(tensor.detach(), array)
            elif how == "reshaped":
                self.keep(ps.reshape(tensor, (1, -1)), array.reshape(1, -1))
            elif how == "a row":
                self.keep(tensor[-1:], array[-1:])
            else:
                with suppress(BufferError):  # of devices whose memory the host does not see
                    self.exported = [*self.exported[-2:], (np.from_dlpack(tensor, copy=False), array)]

        self.within(work)

    @rule(at=places, number=numbers, how=st.sampled_from(["rows", "mask", "sum"]))
    def change(self, at: int, number: float, how: str) -> None:
        tensor, array = self.value(at)
        new = array.copy()
        if how == "rows":
            tensor[1:] = number
            new[1:] = number
        elif how == "mask":
            tensor[tensor > 1.0] = number
            new[new > 1] = number
        elif is_exact(new + number):
            tensor += number
            new += np.float32(number)
        self.values = [(other, new if other is tensor else old) for other, old in self.values]

    @rule(at=places)
    def drop(self, at: int) -> None:
        if self.values:
            self.values.pop(at % len(self.values))

    # Jitted functions

    @rule(at=places, times=st.integers(1, 3), needed=flags)
    def count(self, at: int, times: int, needed: bool) -> None:
        """A function that changes a tensor in place, whose old value is perhaps still needed."""

        def work() -> None:
            added = self.drawn(4)
            tensor = ps.asarray(added, device=self.device)
            if needed:
                self.keep(self.jitted.counter * 2, self.counted * 2)
            for _ in range(times if is_exact(self.counted + 8) else 0):
                self.jitted.count(tensor)
                self.counted = self.counted + added

        self.within(work)
        self.within(lambda: self.check(self.jitted.counter, self.counted))

    @rule(at=places, other=places, needed=flags)
    def donate(self, at: int, other: int, needed: bool) -> None:
        def work() -> None:
            (given, array), (added, more) = self.value(at), self.value(other)
            if given is added or array.shape != more.shape or not is_exact(array + more):
                return
            if needed:
                self.keep(given * 2, array * 2)
            result = self.jitted.add(given, added)
            self.values = [value for value in self.values if value[0] is not given]
            self.keep(result, array + more)

        self.within(work)

    @rule()
    def start_something_slow(self) -> None:
        """What follows is recorded while the device is busy, an expression of the result first."""
        self.within(
            lambda: self.keep((self.jitted.slow() * 2).realize()[:4, :4], 2 * np.eye(4, dtype=np.float32))
        )

    # Training

    @rule(before=flags, between=flags, after=flags, held=flags, by_hand=flags)
    def train(self, before: bool, between: bool, after: bool, held: bool, by_hand: bool) -> None:
        rows, slopes = self.drawn(4), self.drawn(4)
        if np.abs(self.weight).max() > 64 or not is_exact(self.weight):
            with ps.no_grad():
                self.parameter[...] = 1.0
            self.weight = np.ones((4, 4), np.float32)
        product = rows @ self.weight
        gradient = rows.T @ (slopes * (product > 0))

        def work() -> None:
            hidden = F.relu(ps.asarray(rows, device=self.device) @ self.parameter)
            loss = ps.sum(hidden * ps.asarray(slopes, device=self.device))
            expected = np.sum(np.maximum(product, 0) * slopes)
            if before:
                self.check(loss, expected)
            loss.backward()
            if between:
                self.check(hidden, np.maximum(product, 0))
            kept = self.parameter.grad if held else None
            self._step(gradient, by_hand)
            if after:
                self.check(loss, expected)
                self.check(self.parameter, self.weight)
            if kept is not None:
                self.check(kept, gradient)

        self.within(work)
        self.parameter.grad = None
        self.within(lambda: self.check(self.parameter, self.weight))

    def _step(self, gradient: Array, by_hand: bool) -> None:
        if by_hand:
            with ps.no_grad():
                assert self.parameter.grad is not None
                self.parameter -= self.parameter.grad * 0.5
            self.weight = self.weight - gradient * np.float32(0.5)
            return
        self.optimizer.step()
        self.momentum = self.momentum * np.float32(0.5) + gradient
        self.weight = self.weight - self.momentum * np.float32(0.5)

    # The device

    def within(self, work: Callable[[], object]) -> None:
        """Do something; under a limit, it may be refused."""
        limited = self.device.limit_bytes is not None
        try:
            work()
        except OutOfDeviceMemory:
            assert limited

    @rule()
    def turn_profile_on_or_off(self) -> None:
        if self.profile is None:
            self.profile = ps.profile(device=self.device)
            self.profile.__enter__()
        else:
            self.profile, profile = None, self.profile
            profile.__exit__(None, None, None)

    @rule(more=st.sampled_from([1 << 10, 1 << 16, 1 << 18, 1 << 20]))
    def set_a_limit(self, more: int) -> None:
        self.device.limit_bytes = self.device.memory_stats().live_bytes + more

    @precondition(lambda self: self.device.limit_bytes is not None)
    @rule()
    def remove_the_limit(self) -> None:
        self.device.limit_bytes = None

    @rule(how=st.sampled_from(["sync", "cleanup", "trim", "collect"]))
    def clean(self, how: str) -> None:
        gc.collect() if how == "collect" else getattr(self.device, how)()

    @rule(at=places, other=places)
    def read_in_threads(self, at: int, other: int) -> None:
        failures: list[BaseException] = []

        def body(at: int) -> None:
            try:
                tensor, array = values[at % 2]
                self.within(lambda: self.check(tensor * 2 + at, array * 2 + at))
                self.within(lambda: self.check(tensor, array))
            except BaseException as error:
                failures.append(error)

        values = [self.value(at), self.value(other)]
        threads = [threading.Thread(target=body, args=(at,)) for at in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures

    def teardown(self) -> None:
        if self.profile is not None:
            self.turn_profile_on_or_off()
        self.device.limit_bytes = None
        self.look()
        for tensor, array in self.values:
            self.check(tensor, array)
        self.check(self.parameter, self.weight)
        self.look()


class Jitted:
    """The functions of all sessions with a device."""

    def __init__(self, device: Device) -> None:
        rows = 8 if device.capabilities.language == "numpy" else 256
        rolled = ps.asarray(np.roll(np.eye(rows, dtype=np.float32), 1, 0), device=device)
        self.counter = counter = ps.zeros((4, 4), device=device)

        @ps.jit
        def count(x: ps.Tensor) -> None:
            nonlocal counter
            counter += x

        @ps.jit(donate=0)
        def add(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
            return x + y

        @ps.jit
        def slow() -> ps.Tensor:
            product = rolled
            for _ in range(rows - 1 if rows < 16 else 15):
                product = product @ rolled
            return product - product + ps.eye(rows, device=device)

        self.count, self.add, self.slow = count, add, slow


@surface
@pytest.mark.slow("opencl-offloading", INLINE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_session_gives_what_numpy_gives(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "MIN_ITEMS", 4 * LARGE)  # kernels for the large, and NumPy in place
    offloads = kind in OFFLOADING
    if kind == INLINE:  # kernels for all that NumPy would compute, in this thread where they may
        at_once(monkeypatch)
        device = Device.over(DRIVERS["opencl-svm"](), replace(SMALL, force_kernels=True))
        device.driver.launch_inline()
    else:
        device = offloading(OFFLOADING[kind]) if offloads else Device.over(DRIVERS[kind](), SMALL)
    jitted = Jitted(device)
    cost = 1 if device.capabilities.language == "numpy" else 8  # kernels are compiled
    run_state_machine_as_test(
        lambda: Session(device, jitted),  # type: ignore[arg-type]
        settings=settings(max_examples=examples(40, 24) // cost, stateful_step_count=25, deadline=None),
    )
    device.close()
