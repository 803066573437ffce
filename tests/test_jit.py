"""Jitted functions: the same results as without, whatever they read, change or are given."""

from __future__ import annotations

import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, surface

import penstock as ps
from penstock import Device
from penstock.errors import CaptureError

pytestmark = surface


@pytest.fixture(params=[kind for kind in DRIVERS if kind != "opencl-mapped"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device.over(DRIVERS[request.param]())
    yield made
    made.close()


def at(device: Device, *values: Any) -> list[ps.Tensor]:
    return [ps.asarray(np.asarray(value, np.float32), device=device) for value in values]


def counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """The function jitted, and a list that grows whenever it is captured."""
    calls: list[int] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    return ps.jit(counting), calls


def test_it_gives_what_the_function_gives_and_runs_it_once(device: Device) -> None:
    jitted, calls = counted(lambda x, y: ps.sum(ps.exp(x) * y, axis=1))
    for seed in range(4):
        a, b = np.random.default_rng(seed).random((2, 5, 7), np.float32)
        result = jitted(*at(device, a, b))
        np.testing.assert_allclose(result.numpy(), np.sum(np.exp(a) * b, axis=1), rtol=1e-5)
    assert len(calls) == 1


def test_other_shapes_dtypes_and_python_values_are_captured_anew(device: Device) -> None:
    jitted, calls = counted(lambda x, power: x * power)
    (x,) = at(device, [1, 2, 3])
    for power, times in [(2, 1), (2, 1), (3, 2), (2.0, 3), (2, 3)]:
        np.testing.assert_array_equal(jitted(x, power).numpy(), np.array([1, 2, 3]) * power)
        assert len(calls) == times
    jitted(x[:2], 2)
    jitted(ps.astype(x, ps.int32), 2)
    assert len(calls) == 5


def test_tuples_lists_dicts_and_keywords_go_in_and_out(device: Device) -> None:
    pair = namedtuple("pair", "left right")

    @ps.jit
    def function(given: dict[str, Any], *, scale: ps.Tensor) -> Any:
        return {"sum": given["parts"][0] + given["parts"][1], "rest": (scale, [2, None], pair(scale * 2, 1))}

    a, b, c = at(device, [1, 2], [3, 4], 5)
    for _ in range(2):
        result = function({"parts": [a, b]}, scale=c)
        np.testing.assert_array_equal(result["sum"].numpy(), [4, 6])
        assert result["rest"][0].item() == 5
        assert result["rest"][1] == [2, None]
        assert result["rest"][2].left.item() == 10


def test_tensors_from_outside_are_read_as_they_are_at_each_call(device: Device) -> None:
    (weight, x) = at(device, [1, 1], [1, 2])
    jitted, calls = counted(lambda x: x * weight)
    assert jitted(x).tolist() == [1, 2]
    weight += 1
    assert jitted(x).tolist() == [2, 4]
    weight[0] = 10
    assert jitted(x).tolist() == [10, 4]
    assert len(calls) == 1


def test_constants_from_outside_are_read_at_each_call_too(device: Device) -> None:
    count = ps.zeros((), device=device)

    @ps.jit
    def step(x: ps.Tensor) -> ps.Tensor:
        nonlocal count
        result = x + count
        count += 1
        return result

    assert [step(ps.ones(2, device=device)).tolist()[0] for _ in range(3)] == [1, 2, 3]


def test_changes_in_place_happen_at_every_call_and_not_at_the_capture(device: Device) -> None:
    total, history, x = at(device, 0, [0, 0, 0], [1, 2, 3])

    @ps.jit
    def add(x: ps.Tensor) -> None:
        nonlocal total
        total += ps.sum(x)
        history[1:] = history[:-1]
        history[0] = total

    for turn in range(1, 4):
        add(x)
        assert total.item() == 6 * turn
    assert history.tolist() == [18, 12, 6]


def test_an_argument_changes_in_place(device: Device) -> None:
    @ps.jit
    def double(x: ps.Tensor) -> None:
        x *= 2

    (x,) = at(device, [1, 2])
    kept = x + 0
    double(x)
    double(x)
    assert (x.tolist(), kept.tolist()) == ([4, 8], [1, 2])


def test_memory_is_reused_in_place_unless_somebody_else_refers_to_it(device: Device) -> None:
    (weight,) = at(device, np.ones(1000))

    @ps.jit
    def step() -> None:
        nonlocal weight
        weight *= 2

    step()
    step()
    memory = weight._node.value.memory
    step()
    assert weight._node.value.memory is memory, "written over itself"
    old = weight.detach()
    pending = weight + 1
    step()
    assert weight._node.value.memory is not memory
    assert old.numpy()[0] == 8
    assert pending.numpy()[0] == 9
    assert weight.numpy()[0] == 16


@pytest.mark.slow("webgpu", "host-far")
def test_training_is_the_same_with_and_without(device: Device) -> None:
    x, y = at(device, [[0, 0], [0, 1], [1, 0], [1, 1]], [[0], [1], [1], [0]])

    def train(wrap: Callable[[Any], Any]) -> list[float]:
        draw = np.random.default_rng(3).standard_normal
        weights = [
            tensor.requires_grad_() for tensor in at(device, *(draw(s) for s in [(2, 8), (8,), (8, 1)]))
        ]

        def step(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
            for weight in weights:
                weight.grad = None
            difference = ps.tanh(x @ weights[0] + weights[1]) @ weights[2] - y
            loss = ps.mean(difference * difference)
            loss.backward()
            with ps.no_grad():
                for weight in weights:
                    assert weight.grad is not None
                    weight -= weight.grad * 0.3
            return loss

        run = wrap(step)
        losses = [run(x, y).item() for _ in range(40)]
        assert all(weight.grad is not None and weight.requires_grad for weight in weights)
        return losses

    plain, jitted = train(lambda step: step), train(ps.jit)
    np.testing.assert_allclose(jitted, plain, rtol=2e-3)
    assert jitted[-1] < jitted[0] / 2


def test_gradients_add_up_over_calls(device: Device) -> None:
    (weight,) = at(device, [1.0, 2.0])
    weight.requires_grad_()

    @ps.jit
    def backward() -> None:
        ps.sum(weight * weight).backward()

    for turn in range(1, 4):
        backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0 * turn, 4.0 * turn]


def test_gradients_inside(device: Device) -> None:
    jitted = ps.jit(ps.value_and_grad(lambda x: ps.sum(x * x * x)))
    (x,) = at(device, [1, 2])
    for _ in range(2):
        value, gradient = jitted(x)
        assert (value.item(), gradient.tolist()) == (9, [3, 12])


def test_donated_memory_is_used_for_the_result(device: Device) -> None:
    @ps.jit(donate=0)
    def step(state: ps.Tensor, x: ps.Tensor) -> ps.Tensor:
        return state * 0.5 + x

    state, x = at(device, np.zeros(4096), np.ones(4096))
    for _ in range(3):
        before, memory = state, state._node.value.memory
        state = step(state, x)
        assert state._node.value.memory is memory
    assert state.numpy()[0] == 1.75
    for use in (before.numpy, lambda: (before + 1).numpy(), lambda: step(before, x)):
        with pytest.raises(ValueError, match="donated"):
            use()


def test_what_cannot_be_captured_says_why_and_leaves_nothing_behind(device: Device) -> None:
    (x, outside) = at(device, [1, 2], [3, 4])

    @ps.jit
    def reads(x: ps.Tensor) -> ps.Tensor:
        nonlocal outside
        outside += 1
        return x if float(ps.sum(x)) > 0 else -x

    with pytest.raises(CaptureError, match="only shapes and dtypes are known"):
        reads(x)
    assert outside.tolist() == [3, 4]
    for function in (lambda x: outside.numpy(), lambda x: bool(x[0]), lambda x: x[x > 1], lambda x: print(x)):
        with pytest.raises(CaptureError):
            ps.jit(function)(x)
    with pytest.raises(CaptureError, match="return or change a tensor"):
        ps.jit(lambda x: 1)(x)
    with pytest.raises(CaptureError, match="by value"):
        ps.jit(lambda x, y: x)(x, {1, 2})
    with pytest.raises(TypeError, match="takes a function"):
        ps.jit(3)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="donate names argument 1"):
        ps.jit(lambda x: x * 2, donate=1)(x)
    assert ps.jit(lambda x: x + outside)(x).tolist() == [4, 6]


def test_constants_are_part_of_the_program(device: Device) -> None:
    table = np.array([10, 20], np.float32)

    @ps.jit
    def look(x: ps.Tensor) -> ps.Tensor:
        return x + ps.asarray(table, device=device)

    (x,) = at(device, [1, 2])
    assert look(x).tolist() == look(x).tolist() == [11, 22]


def test_one_inside_another_and_methods(device: Device) -> None:
    class Model:
        def __init__(self) -> None:
            (self.scale,) = at(device, 3)

        @ps.jit
        def __call__(self, x: ps.Tensor) -> ps.Tensor:
            return triple(x) * self.scale

    @ps.jit
    def triple(x: ps.Tensor) -> ps.Tensor:
        return x * 3

    model = Model()
    assert model(at(device, 2)[0]).item() == model(at(device, 2)[0]).item() == 18


def test_random_numbers_go_on_from_call_to_call(device: Device) -> None:
    generator = ps.random.Generator(7, device)
    draw = ps.jit(lambda: generator.uniform((100,)))
    first, second = draw().numpy(), draw().numpy()
    assert not np.intersect1d(first, second).size
    assert not np.intersect1d(first, generator.uniform((100,)).numpy()).size
    state = generator.state()
    third = draw().numpy()
    generator.set_state(state)
    np.testing.assert_array_equal(draw().numpy(), third)
    other = ps.random.Generator(7, device)
    again = ps.jit(lambda: other.uniform((100,)))
    np.testing.assert_array_equal(again().numpy(), first)


def test_captures_are_bounded_and_keep_no_memory(device: Device) -> None:
    jitted, _ = counted(lambda x: x * 2)
    live = device.memory_stats().live_bytes
    for length in range(1, 50):
        jitted(ps.ones(length, device=device)).numpy()
    assert len(jitted._captured) == 32  # type: ignore[attr-defined]
    device.cleanup()
    assert device.memory_stats().live_bytes == live


def test_threads_share_a_function(device: Device) -> None:
    jitted, _ = counted(lambda x, y: ps.sum(x * y, axis=0))
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(10):
                a, b = np.random.default_rng(seed + turn).random((2, 6, 50), np.float32)
                np.testing.assert_allclose(jitted(*at(device, a, b)).numpy(), (a * b).sum(0), rtol=1e-5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(100 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
