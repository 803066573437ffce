"""Small kernels that PoCL runs in the calling thread: the same bits, in order with those on its threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, NATIVE, SIGNATURES, SMALL, compiled, source_for, until
from test_machines import python

import penstock as ps
from penstock import Device
from penstock.drivers.driver import Cost
from penstock.drivers.opencl import find_devices, inline, pocl

F = ps.nn.functional
pytestmark = pytest.mark.skipif(pocl.inline_device(NATIVE) is None, reason="another OpenCL than PoCL's wheel")
EXPRESSIONS: dict[str, Callable[[ps.Tensor], ps.Tensor]] = {
    "softmax": lambda x: F.softmax(x, axis=1),
    "norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "product": lambda x: ps.tanh(x @ x),
    "running": lambda x: ps.cumulative_sum(ps.exp(x), axis=1),
    "several": lambda x: ps.sum(x / ps.sum(x @ x, axis=0)) * ps.cumulative_sum(x, axis=0),
    "quotient": lambda x: ps.astype(x * 4, ps.int32) // ps.astype(x, ps.int32),  # by zero, too
}


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device.over(DRIVERS["opencl-svm"](), replace(SMALL, force_kernels=True))
    made.driver.launch_inline()
    yield made
    made.close()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels that ran in the calling thread; small ones may from the second launch on."""
    at_once(monkeypatch)
    return counted(monkeypatch)


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have small kernels compiled at the first launch, in this thread, and however slow they are."""
    monkeypatch.setattr(inline, "_OFTEN", 1)
    monkeypatch.setattr(inline, "_QUICK_SECONDS", np.inf)
    monkeypatch.setattr(inline.InlineDevice, "compile", lambda _, program: program.build())


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    run = inline.InlineLaunch.run

    def counting(launch: inline.InlineLaunch, *args: Any) -> Any:
        names.append(launch._kernel.name)
        return run(launch, *args)

    monkeypatch.setattr(inline.InlineLaunch, "run", counting)
    return names


def matrix(device: Device, size: int = 16, seed: int = 0) -> ps.Tensor:
    return ps.asarray(
        np.random.default_rng(seed).standard_normal((size, size), dtype=np.float32), device=device
    )


def slow(device: Device, size: int = 256) -> Callable[[ps.Tensor], ps.Tensor]:
    """What adds one, and takes the device its time for it."""
    rolled = ps.asarray(np.roll(np.eye(size, dtype=np.float32), 1, 0), device=device)

    @ps.jit
    def compute(x: ps.Tensor) -> ps.Tensor:
        product = rolled
        for _ in range(15):
            product = product @ rolled
        return ps.sum(product, axis=1, keepdims=True) + x

    return compute


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_the_calling_thread_computes_the_same_bits(
    device: Device, runs: list[str], name: str, jitted: bool
) -> None:
    x, y = matrix(device), matrix(device, seed=1)
    compute = ps.jit(EXPRESSIONS[name]) if jitted else EXPRESSIONS[name]
    first = compute(x).numpy()
    runs.clear()  # a kernel that is there twice has run
    second, other = compute(x).numpy(), compute(y).numpy()  # an executable gets other arguments
    again = compute(x).numpy()
    assert runs
    np.testing.assert_array_equal(second, first)
    np.testing.assert_array_equal(again, first)
    device.driver._may_run_inline = lambda queue: False  # type: ignore[attr-defined]
    np.testing.assert_array_equal(compute(y).numpy(), other)


def test_numbers_change_from_call_to_call(device: Device, runs: list[str]) -> None:
    x, scaled = matrix(device), ps.jit(lambda x, k: ps.exp(x * k))
    for number in (0.5, 2.0, -1.0, 0.25):
        np.testing.assert_allclose(scaled(x, number).numpy(), np.exp(x.numpy() * number), rtol=1e-5)
    assert runs


def test_a_small_kernel_waits_for_what_it_reads(device: Device, runs: list[str]) -> None:
    compute, x = slow(device), ps.zeros((256, 1), device=device)
    for value in range(6):
        large = compute(x + value)
        small = F.softmax(large[:4], axis=0)
        np.testing.assert_array_equal(small.numpy(), np.full((4, 1), 0.25))
        np.testing.assert_array_equal(large.numpy(), np.full((256, 1), value + 1.0))
        F.softmax(x[:4], axis=0).realize()  # while nothing else is to be done
    assert runs


def test_a_small_kernel_does_not_write_what_others_read(device: Device, runs: list[str]) -> None:
    compute = slow(device)
    state = ps.zeros((256, 1), device=device)

    @ps.jit
    def step() -> None:
        nonlocal state
        state += ps.exp(state * 0)

    for value in range(0, 12, 2):
        large = compute(state)
        step()  # writes over what `large` is still computed from
        np.testing.assert_array_equal(large.numpy(), np.full((256, 1), value + 1.0))
        device.sync()  # the first step ends later than `large`
        step()
        np.testing.assert_array_equal(state.numpy(), np.full((256, 1), value + 2.0))
    assert runs


def test_threads_that_launch_small_and_large_kernels(device: Device, runs: list[str]) -> None:
    compute, failures = slow(device), []

    def work(number: int) -> None:
        try:
            x = ps.full((256, 1), float(number), device=device)
            for _ in range(15):
                np.testing.assert_array_equal(ps.exp(x * 0).numpy() * number, x.numpy())
                if number == 1:
                    np.testing.assert_array_equal((compute(x) - 1).numpy(), x.numpy())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert runs


def test_what_has_much_to_do_or_does_not_say_stays_with_the_threads(device: Device, runs: list[str]) -> None:
    large = matrix(device, 600)
    kernels, buffer = compiled(device), device.empty(64)
    for _ in range(4):
        ps.exp(large).realize()
        device.stream.launch(kernels["fill"], (16,), (1,), (buffer, 3, 16))
        device.sync()
    assert not runs


def test_what_turns_out_slow_goes_back_to_the_threads(
    device: Device, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inline, "_QUICK_SECONDS", 0.0)
    x = matrix(device)
    for _ in range(2 * inline._TRIALS):
        ps.exp(x).realize()
        device.sync()
    assert len(runs) == inline._TRIALS


def test_a_thread_compiles_what_is_launched_often(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, x = counted(monkeypatch), matrix(device)

    def has_run() -> bool:
        ps.exp(x).numpy()
        return bool(runs)

    until(has_run)


def test_without_compiling_ahead_nothing_is_compiled_twice(runs: list[str]) -> None:
    device = Device.over(DRIVERS["opencl-svm"](), SMALL)
    x = matrix(device)
    for _ in range(4):
        ps.exp(x).numpy()
    device.close()
    assert not runs


def test_a_profile_has_the_times_of_kernels_in_the_calling_thread(device: Device, runs: list[str]) -> None:
    x = matrix(device)
    for _ in range(2):
        ps.exp(x).numpy()
    with ps.profile(device=device) as profile:
        runs.clear()
        for _ in range(3):
            ps.exp(x).numpy()
    assert len(runs) == 3
    (kernel,) = profile.kernels()
    assert kernel.calls == 3
    assert 0 < kernel.seconds < profile.seconds
    ps.exp(x).numpy()
    assert len(runs) == 4


def test_compiled_kernels_are_released(device: Device, runs: list[str]) -> None:
    buffer, handles = device.empty(64), []
    for _ in range(3):
        kernel = device.compile(source_for(device), {"fill": SIGNATURES["fill"]})["fill"]
        kernel.cost = Cost(16, 0, 64, "")
        for value in range(3):
            device.stream.launch(kernel, (16,), (1,), (buffer, value, 16))
            device.sync()
        del kernel
        gc.collect()
        handles.append(device.driver.native_handles())
    assert len(runs) == 6
    assert handles[0] == handles[1] == handles[2]


def test_a_user_sees_one_device() -> None:
    of_pocl = [device for device in find_devices() if device.platform.name == pocl.PLATFORM]
    assert len(of_pocl) == 1 < len(NATIVE.platform.get_devices())


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["basic", "pthread"])
def test_devices_that_the_user_chose_are_those_that_there_are(tmp_path: Path, chosen: str) -> None:
    text = (
        "import os, penstock as ps\nx = ps.ones((4, 4), device='opencl')\n"
        "for _ in range(100): assert (ps.exp(x * 0).numpy() == 1).all()\n"
        "print(ps.use('opencl').capabilities.description.split('-')[0], os.environ['POCL_DEVICES'])"
    )
    assert python(text, tmp_path, POCL_DEVICES=chosen).stdout.split() == [chosen, chosen]
