"""Programs: rerun with other values, in bounded memory, from several threads, and after failures."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, WEBGPU_KINDS, opencl_threads, surface

import penstock as ps
from penstock import Device
from penstock.config import Settings
from penstock.drivers.driver import Driver
from penstock.errors import CompileError, OutOfDeviceMemory
from penstock.execution import cache, realize
from penstock.execution.structure import Structure

pytestmark = surface


KINDS: dict[str, Callable[[], Driver]] = {**DRIVERS, "opencl-threads": opencl_threads}


@pytest.fixture(autouse=True)
def _programs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which programs compute everything, the first time too, and however small."""
    monkeypatch.setattr("penstock.execution.structure.MIN_ITEMS", 1)
    monkeypatch.setattr("penstock.execution.structure.LARGE_ITEMS", 1)


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device.over(KINDS[request.param]())
    yield made
    made.close()


@pytest.fixture
def host() -> Iterator[Device]:
    made = Device.over(DRIVERS["host-late"]())
    yield made
    made.close()


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def count(device: Device) -> int:
    return len(realize.executables(device)._programs)


def work(m: Any, x: Any, y: Any, scale: float, offset: float) -> Any:
    """A product, a row and a map, with values between them; the same for NumPy and for tensors."""
    product = m.tanh(x @ y * scale)
    powers = m.exp(product - m.max(product, axis=1, keepdims=True))
    return powers / m.sum(powers, axis=1, keepdims=True) + offset


def run(device: Device, x: np.ndarray, y: np.ndarray, scale: float, offset: float) -> np.ndarray:
    return work(ps, ps.asarray(x, device=device), ps.asarray(y, device=device), scale, offset).numpy()


# Repeated runs


def test_a_program_runs_with_other_values_and_constants(device: Device) -> None:
    kept = []
    for turn in range(5):
        x, y = array(6, 5, seed=turn), array(5, 9, seed=turn + 10)
        result = run(device, x, y, 0.5 + turn, 3.0 - turn)
        np.testing.assert_allclose(result, work(np, x, y, 0.5 + turn, 3.0 - turn), rtol=1e-5, atol=1e-6)
        if turn % 2:
            kept.append(ps.asarray(x, device=device))  # so that the next run gets other memory
    assert count(device) == 1


def test_constants_are_told_apart_by_their_bits(device: Device) -> None:
    x = ps.asarray(np.ones(9, np.float32), device=device)
    for constant in (0.0, -0.0, 0.0, float("nan"), 1.0, float("nan"), -0.0):
        result = ps.copysign(x, constant).numpy()
        np.testing.assert_array_equal(result, np.copysign(np.ones(9), constant))
    assert count(device) == 1


def test_results_stay_as_they_are(device: Device) -> None:
    results = [ps.asarray(array(8, 8, seed=k), device=device) * 2 + k for k in range(6)]
    for result in results:
        realize.realize([result._node], device)
    for k, result in enumerate(results):
        np.testing.assert_allclose(result.numpy(), array(8, 8, seed=k) * 2 + k, rtol=1e-6)


def test_one_value_under_two_names(device: Device) -> None:
    a = array(4, 6)
    x = ps.asarray(a, device=device)
    double = x * 2
    wanted = [double, ps.reshape(double, (24,)), x * 2, ps.reshape(x, (24,)), double + 1]
    realize.realize([node._node for node in wanted], device)
    expected = [a * 2, (a * 2).reshape(24), a * 2, a.reshape(24), a * 2 + 1]
    for node, right in zip(wanted, expected, strict=True):
        np.testing.assert_allclose(node.numpy(), right)


def test_a_computed_value_is_an_input_of_the_next_program(device: Device) -> None:
    a = array(6, 6)
    x = ps.asarray(a, device=device)
    for _ in range(4):
        x = ps.tanh(x @ x)
        a = np.tanh(a @ a)
        np.testing.assert_allclose(x.numpy(), a, rtol=1e-4, atol=1e-6)
    assert count(device) == 1


def test_gradients_run_again(device: Device) -> None:
    for turn in range(3):
        a = array(5, 7, seed=turn)
        x = ps.asarray(a, device=device).requires_grad_()
        loss = ps.sum(ps.tanh(x) * (turn + 3.0))
        loss.backward()
        assert x.grad is not None
        np.testing.assert_allclose(x.grad.numpy(), (1 - np.tanh(a) ** 2) * (turn + 3), rtol=1e-4, atol=1e-6)
    assert count(device) == 1


def test_graphs_without_inputs_run_again(device: Device) -> None:
    for turn in range(3):
        total = ps.sum(ps.ones(100, device=device) * (turn + 2.0))
        assert total.item() == 100 * (turn + 2)
        memory = weakref.ref(total._node.value.memory)
        del total
        gc.collect()
        device.cleanup()
        assert memory() is None, "the program keeps no result"
    assert count(device) == 1


# Memory


def test_programs_keep_no_memory(device: Device) -> None:
    x, y = array(40, 30), array(30, 50)
    run(device, x, y, 1.0, 0.0)
    gc.collect()
    device.sync()
    before = device.memory_stats().live_bytes
    for turn in range(3):
        run(device, x, y, turn + 2.0, turn)
        result = work(ps, ps.asarray(x, device=device), ps.asarray(y, device=device), 1.0, turn)
        realize.realize([result._node], device)
        del result
        gc.collect()
        device.sync()
        assert device.memory_stats().live_bytes == before
    device.cleanup()
    stats = device.memory_stats()
    assert (stats.live_bytes, stats.pooled_bytes, stats.driver_bytes) == (0, 0, 0)
    np.testing.assert_allclose(run(device, x, y, 1.0, 0.0), work(np, x, y, 1.0, 0.0), rtol=1e-4, atol=1e-5)


def test_inputs_that_are_dropped_are_free(device: Device) -> None:
    x = ps.asarray(array(64, 64), device=device)
    y = x * 3 + 1
    realize.realize([y._node], device)
    inside = [weakref.ref(tensor._node.value.memory) for tensor in (x, y)]
    del x, y
    gc.collect()
    device.cleanup()
    assert [memory() for memory in inside] == [None, None]


def test_temporaries_share_one_arena(device: Device) -> None:
    a = array(64, 64)
    x = ps.asarray(a, device=device)
    for _ in range(6):
        x = ps.cumulative_sum(ps.tanh(x), axis=0) * 0.01
        a = np.cumsum(np.tanh(a), axis=0) * np.float32(0.01)
    (program,) = [realize.executables(device).build(Structure([x._node]))]
    assert program.plan.arena_bytes <= 4 * a.nbytes, "values that are dead leave their places to others"
    np.testing.assert_allclose(x.numpy(), a, rtol=1e-4, atol=1e-6)


def test_tables_are_bounded(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MAX_PROGRAMS", 3)
    monkeypatch.setattr(cache, "_MAX_HOST_PROGRAMS", 4)
    for _ in range(2):
        for length in range(1, 8):
            x = ps.asarray(np.ones(length, np.float32), device=host)
            assert (x * 2 + 1).numpy().tolist() == [3.0] * length
            assert count(host) <= 3
            assert len(realize.executables(host).singles) <= 3
    monkeypatch.setattr("penstock.execution.structure.MIN_ITEMS", 1 << 20)
    monkeypatch.setattr("penstock.execution.structure.LARGE_ITEMS", 1 << 20)
    for length in range(1, 8):
        assert (ps.asarray(np.ones(length, np.float32), device=host) * 5).numpy().tolist() == [5.0] * length
        assert len(realize.executables(host)._host_programs) <= 4


def test_what_was_used_last_is_kept(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MAX_PROGRAMS", 2)

    def compute(length: int) -> None:
        x = ps.asarray(np.ones(length, np.float32), device=host)
        for _ in range(40):  # no small expression, whose programs have another key, too
            x = x * 2 + 1
        x.numpy()

    built: list[Any] = []
    real = cache.Executable
    monkeypatch.setattr(cache, "Executable", lambda *given: (built.append(given), real(*given))[1])
    for length in (1, 2, 1, 3, 1, 2):
        compute(length)
    assert len(built) == 4, "the program for one item was never forgotten"


def test_a_device_that_is_dropped_is_let_go() -> None:
    device = Device.over(DRIVERS["host"]())
    assert (ps.asarray(np.ones(3, np.float32), device=device) * 2).numpy().tolist() == [2, 2, 2]
    device.close()
    gone = weakref.ref(device)
    del device
    gc.collect()
    assert gone() is None


# Small things are not worth a program


def test_small_expressions_wait_for_no_compiler(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.execution.structure.MIN_ITEMS", 100)
    monkeypatch.setattr("penstock.execution.structure.LARGE_ITEMS", 10_000)
    far = not device.capabilities.shared_memory  # there everything is a program
    for turn in range(3):
        small = ps.asarray(array(99, seed=turn), device=device)
        np.testing.assert_allclose((small * (9 + turn)).numpy(), array(99, seed=turn) * (9 + turn), rtol=1e-5)
        assert count(device) == far
    for turn in range(3):
        x = ps.asarray(array(200, seed=turn), device=device)
        np.testing.assert_allclose(ps.abs(x * 2).numpy(), np.abs(array(200, seed=turn) * 2), rtol=1e-6)
        expected = far + (far or turn > 0)
        assert count(device) == expected, "from the second time on, where NumPy gives the same bits"
    assert ps.sum(ps.ones(10_000, device=device)).item() == 10_000
    assert count(device) == far + 2, "large programs immediately"
    inexact = ps.exp(ps.ones(200, device=device))
    np.testing.assert_allclose(inexact.numpy(), np.e, rtol=1e-6)
    assert count(device) == far + 3, "others at once, too"


# Steps of the host


def test_a_step_of_the_host_in_the_middle(device: Device) -> None:
    a = array(9, 7)
    for turn in range(3):
        b, divisor = a + turn, 0.25 * (turn + 1)
        x = ps.asarray(b, device=device)
        result = ps.sum(ps.tanh((x * 2) // divisor), axis=0) + 1
        expected = np.tanh(b * 2 // np.float32(divisor)).sum(0) + 1
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert count(device) == 1


def test_complex_numbers_pass_through_the_host(device: Device) -> None:
    for turn in range(2):
        a, b = array(5, 4, seed=turn), array(5, 4, seed=turn + 5)
        x, y = ps.asarray(a, device=device), ps.asarray(b, device=device)
        z = ps.astype(x * 2, ps.complex64) * 1j + ps.astype(y, ps.complex64)
        result = [(ps.abs(ps.exp(z)) + x), ps.sum(ps.real(z) * ps.imag(z), axis=1)]
        realize.realize([tensor._node for tensor in result], device)
        right = a * 2j + b
        np.testing.assert_allclose(result[0].numpy(), np.abs(np.exp(right)) + a, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(result[1].numpy(), (right.real * right.imag).sum(1), rtol=1e-4, atol=1e-5)


def test_whole_numbers_from_fractions(device: Device) -> None:
    a = array(33) * 100
    x = ps.asarray(a, device=device)
    result = ps.cumulative_sum(ps.astype(x * 2, ps.int32) * 3, axis=0) - 1
    assert result.numpy().tolist() == (np.cumsum((a * 2).astype(np.int32) * 3) - 1).tolist()


# Empty graphs


def test_tensors_of_size_zero(device: Device) -> None:
    a = array(6, 5)
    for turn in range(2):
        x = ps.asarray(a + turn, device=device)
        none = x[:0] * 2
        empty = ps.asarray(np.empty((0, 5), np.float32), device=device)
        wanted = [
            none,
            ps.sum(none, axis=0) + x[0],
            ps.sum(empty + 1),
            ps.concat([none, x, empty], axis=0) + 1,
            x[:, :0] @ x[:0],
            x[:0] @ x.T,
            ps.reshape(none, (5, 0)),
            ps.exp(x),
            ps.all(none > 0),
            ps.cumulative_sum(none, axis=1),
            ps.take(x, ps.asarray(np.empty(0, np.int64), device=device), axis=0),
        ]
        realize.realize([node._node for node in wanted], device)
        b = a + turn
        nothing = np.empty((0, 5), np.float32)
        expected = [
            nothing,
            b[0],
            np.float32(0),
            b + 1,
            np.zeros((6, 5)),
            np.empty((0, 6)),
            np.empty((5, 0)),
            np.exp(b),
            np.True_,
            nothing,
            nothing,
        ]
        for node, right in zip(wanted, expected, strict=True):
            assert node.shape == right.shape
            np.testing.assert_allclose(node.numpy(), right, rtol=1e-5)


def test_nothing_but_nothing(device: Device) -> None:
    x = ps.asarray(np.empty((3, 0), np.float32), device=device)
    assert (x * 2 + 1).numpy().shape == (3, 0)
    assert ps.sum(x, axis=1).numpy().tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match=r".+"):
        ps.max(x, axis=1).numpy()
    assert (x - 1).numpy().shape == (3, 0)


# Threads


def in_threads(job: Callable[[int], None], number: int = 3) -> None:
    """The same job in several threads that start together; the first failure is raised."""
    start, failures = threading.Barrier(number), []

    def body(which: int) -> None:
        try:
            start.wait()
            job(which)
        except BaseException as error:  # told by the thread that waits
            failures.append(error)

    threads = [threading.Thread(target=body, args=(which,)) for which in range(number)]
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    finally:
        sys.setswitchinterval(switching)
    if failures:
        raise failures[0]


def test_threads_run_one_program(device: Device) -> None:
    def job(which: int) -> None:
        for turn in range(8):
            x, y = array(6, 5, seed=which), array(5, 4, seed=turn)
            result = run(device, x, y, 1.0 + which, turn)
            np.testing.assert_allclose(result, work(np, x, y, 1.0 + which, turn), rtol=1e-4, atol=1e-5)

    in_threads(job)


@pytest.mark.parametrize("kind", ["host", "host-late", *CUDA_KINDS, *WEBGPU_KINDS])
def test_threads_build_and_forget_programs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MAX_PROGRAMS", 2)
    device = Device.over(DRIVERS[kind]())

    def job(which: int) -> None:
        for turn in range(60):
            length = 1 + (turn * (which + 1)) % 5
            x = ps.asarray(np.full(length, which, np.float32), device=device)
            assert (x * 2 + turn).numpy().tolist() == [which * 2 + turn] * length

    in_threads(job)
    assert count(device) <= 2
    device.close()


@pytest.mark.parametrize("kind", ["host", "host-late", *CUDA_KINDS, *WEBGPU_KINDS])
def test_threads_ask_for_one_value(kind: str) -> None:
    device = Device.over(DRIVERS[kind]())
    for turn in range(20):
        a = array(8, 8, seed=turn)
        x = ps.asarray(a, device=device)
        value = ps.sum(ps.tanh(x * 2) + x, axis=1)
        for _ in range(20):
            value = value * 0.5 + 1
        expected = (np.tanh(a * 2) + a).sum(1)
        for _ in range(20):
            expected = expected * np.float32(0.5) + 1

        def job(which: int, value: ps.Tensor = value, expected: np.ndarray = expected) -> None:
            np.testing.assert_allclose(value.numpy(), expected, rtol=1e-5)

        in_threads(job)
    device.close()


# Failures


@pytest.mark.parametrize("kind", ["host", "host-far", "opencl-device", *CUDA_KINDS, *WEBGPU_KINDS])
def test_out_of_memory_in_the_middle_leaves_everything_usable(kind: str) -> None:
    device = Device.over(KINDS[kind](), Settings(pool_capacity=0, compile_ahead=False))
    a = array(64, 64)
    x = ps.asarray(a, device=device)
    kept = x * 3
    realize.realize([kept._node], device)
    failures = 0
    for step in range(7):
        device.limit_bytes = (2 + step) * a.nbytes
        result = ps.cumulative_sum(ps.tanh(x @ x), axis=0) * 0.5 + step
        result = ps.concat([result, ps.cumulative_sum(result, axis=1) // 0.3], axis=0) * 2
        expected = (np.cumsum(np.tanh(a @ a), axis=0) * 0.5 + step) * 2  # its first half
        try:
            np.testing.assert_allclose(result.numpy()[:64], expected, rtol=1e-4, atol=1e-4)
        except OutOfDeviceMemory:
            failures += 1
        np.testing.assert_allclose(kept.numpy(), a * 3)
        device.limit_bytes = None
        np.testing.assert_allclose(result.numpy()[:64], expected, rtol=1e-4, atol=1e-4)
        del result
        gc.collect()
        device.cleanup()
    assert 2 <= failures < 7
    del x, kept
    gc.collect()
    device.cleanup()
    assert device.memory_stats().driver_bytes == 0
    device.close()


def test_a_kernel_that_does_not_compile_is_asked_for_again(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = ps.asarray(array(5, 5), device=device)
    real, calls = device.driver.compile, []

    def broken(source: Any, signatures: Any) -> Any:
        calls.append(signatures)
        if len(calls) == 1:
            raise CompileError("not today")
        return real(source, signatures)

    monkeypatch.setattr(device.driver, "compile", broken)
    result = ps.cumulative_sum(ps.tanh(x), axis=1)
    with pytest.raises(CompileError, match="not today"):
        result.numpy()
    np.testing.assert_allclose(result.numpy(), np.cumsum(np.tanh(array(5, 5)), axis=1), rtol=1e-5, atol=1e-6)
    assert count(device) == 1


@pytest.mark.parametrize(
    "dtype", ["float64", "float16", "int8", "uint8", "int16", "uint16", "int64", "uint64"]
)
def test_a_product_whose_ending_is_of_another_dtype(device: Device, dtype: str) -> None:
    x = np.random.default_rng(0).random((9, 9), np.float32)

    @ps.jit
    def both(x: ps.Tensor) -> tuple[ps.Tensor, ps.Tensor]:
        product = x @ x
        return product, ps.astype(product * 2, getattr(ps, dtype))

    product, ending = both(ps.asarray(x, device=device))
    np.testing.assert_allclose(product.numpy(), x @ x, rtol=1e-5)
    np.testing.assert_array_equal(ending.numpy(), (product.numpy() * 2).astype(dtype))


def test_small_kernels_that_repeat(device: Device) -> None:
    """Steps of a chain that differ in their memory only: on a CPU, a loop over a table of it."""
    steps = 60 if device.capabilities.vector_width > 1 else 20  # elsewhere each has a launch of its own
    a = array(5, 7)
    w = array(7, seed=1) + np.float32(1.5)
    weight = ps.asarray(w, device=device).requires_grad_()

    @ps.jit
    def gradient(x: ps.Tensor) -> ps.Tensor:
        for _ in range(steps):
            x = ps.checkpoint(lambda x: ps.tanh(x * weight), x)
        ps.sum(x).backward()
        found, weight.grad = weight.grad, None
        assert found is not None
        return found

    values = [a.astype(np.float64)]
    for _ in range(steps):
        values.append(np.tanh(values[-1] * w))
    passed, wanted = np.ones_like(values[0]), np.zeros(7)
    for before, after in zip(values[-2::-1], values[:0:-1], strict=True):
        passed = passed * (1 - after * after)
        wanted += np.sum(passed * before, axis=0)
        passed = passed * w
    for x in (a, a[::-1].copy()):
        np.testing.assert_allclose(gradient(ps.asarray(x, device=device)).numpy(), wanted, 1e-4, 1e-5)
    ((captured,),) = gradient._captured.values()
    if device.capabilities.vector_width > 1:
        assert captured.program is not None
        assert captured.program.launches < 20


def test_constants_of_other_shapes_are_other_expressions(device: Device) -> None:
    x = ps.asarray(np.arange(6, dtype=np.float32).reshape(2, 3), device=device)
    for rows in (1, 2, 3, 2, 1):
        for _ in range(3):
            joined = ps.concat([x, ps.full((rows, 3), 2.0, device=device)]).realize().numpy()
            product = (x @ ps.full((3, rows), 2.0, device=device)).realize().numpy()
        assert np.array_equal(joined, np.concatenate([x.numpy(), np.full((rows, 3), 2.0)]))
        assert np.array_equal(product, x.numpy() @ np.full((3, rows), 2.0))
