"""Gradients of and inside jitted functions: the same as without jit, or refused by name."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, surface

import penstock as ps
from penstock import Device
from penstock.nn import functional as F  # noqa: N812 - as everybody calls it

pytestmark = surface

KINDS = [kind for kind in ("opencl-svm", "opencl-device", "host-far", "cuda", "webgpu") if kind in DRIVERS]
Function = Callable[..., ps.Tensor]


@pytest.fixture(scope="module", params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device.over(DRIVERS[request.param]())
    yield made
    made.close()


def at(device: Device, *values: Any) -> list[ps.Tensor]:
    return [ps.asarray(np.asarray(value, np.float32), device=device) for value in values]


def numeric(function: Function, x: np.ndarray, device: Device) -> np.ndarray:
    """The gradient by finite differences, of the function without jit."""
    result = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        ends = []
        for change in (0.01, -0.01):
            moved = x.copy()
            moved[place] += change
            ends.append(float(function(ps.asarray(moved, device=device)).item()))
        result[place] = (ends[0] - ends[1]) / 0.02
    return result


FUNCTIONS: dict[str, Function] = {
    "elementwise": lambda x: ps.sum(ps.exp(x) * x),
    "product": lambda x: ps.sum(ps.tanh(x @ x.mT)),
    "softmax": lambda x: ps.sum(F.softmax(x) * x),
    "items": lambda x: ps.sum(x[1:, :] * x[:-1, :]),
    "checkpoint": lambda x: ps.sum(ps.checkpoint(lambda y: ps.tanh(y * y), x)),
    "given gradient": lambda x: ps.sum(F.gelu(x)),
    "jit inside": lambda x: ps.sum(ps.jit(lambda y: y * y)(x) * x),
    "unchanged": lambda x: ps.sum(ps.reshape(x, (-1,))),
}


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradient_of_a_jitted_function(device: Device, name: str) -> None:
    function = FUNCTIONS[name]
    gradient = ps.grad(ps.jit(function))
    for seed in range(2):
        array = np.random.default_rng(seed).normal(size=(3, 3)).astype(np.float32)
        result = gradient(ps.asarray(array, device=device)).numpy()
        np.testing.assert_allclose(result, numeric(function, array, device), rtol=0.05, atol=0.02)
        # And exactly the same as without jit.
        plain = ps.grad(function)(ps.asarray(array, device=device)).numpy()
        np.testing.assert_allclose(result, plain, rtol=1e-5, atol=1e-6)


def test_gradients_go_on_before_and_after(device: Device) -> None:
    """To arguments with a history, to parameters from outside, and beside other uses of them."""
    jitted = ps.jit(lambda x, scale: {"sum": ps.sum(x * weight * scale), "rest": [x * x, scale]})

    def loss(function: Callable[..., Any], before: ps.Tensor, scale: ps.Tensor) -> ps.Tensor:
        result = function(before * 2, scale)
        rest = ps.sum(result["rest"][0] * 3 + result["rest"][1])
        return result["sum"] * result["sum"] + rest + ps.sum(weight * weight) + ps.sum(before)

    def gradients(function: Callable[..., Any]) -> list[np.ndarray]:
        for tensor in (weight, before, scale):
            tensor.grad = None
        loss(function, before, scale).backward()
        return [tensor.grad.numpy() for tensor in (weight, before, scale) if tensor.grad is not None]

    weight, before, scale = (tensor.requires_grad_() for tensor in at(device, [1.0, 2.0], [3.0, -1.0], 0.5))

    def plain(x: ps.Tensor, scale: ps.Tensor) -> dict[str, Any]:
        return {"sum": ps.sum(x * weight * scale), "rest": [x * x, scale]}

    for _ in range(2):
        result, expected = gradients(jitted), gradients(plain)
        assert len(result) == 3
        for value, right in zip(result, expected, strict=True):
            np.testing.assert_allclose(value, right, rtol=1e-5)
        with ps.no_grad():
            weight += 1  # the next call is at other values


def test_the_gradient_is_at_the_values_of_the_call(device: Device) -> None:
    weight, x = at(device, [1.0, 2.0], [3.0, 4.0])
    weight.requires_grad_()
    jitted = ps.jit(lambda x: ps.sum(x * weight * weight))
    first = jitted(x)
    with ps.no_grad():
        weight *= 10
        x *= 10
    with pytest.raises(ValueError, match="was changed after this value was computed"):
        first.backward()  # as it is without jit
    assert weight.grad is None
    y, old = at(device, [3.0, 4.0], [1.0, 2.0])
    y.requires_grad_()
    first = ps.jit(lambda y: ps.sum(y * y * old))(y)
    with ps.no_grad():
        old += 5
    first.backward()
    assert y.grad is not None
    assert y.grad.tolist() == [6, 16]


def test_higher_derivatives(device: Device) -> None:
    def cube(x: ps.Tensor) -> ps.Tensor:
        return ps.sum(x * x * x * x)

    def third(function: Function) -> Callable[[ps.Tensor], ps.Tensor]:
        second = ps.grad(lambda x: ps.sum(ps.grad(function)(x) * x))
        return ps.grad(lambda x: ps.sum(second(x) * x))

    (x,) = at(device, [1.0, 2.0, -1.5])
    np.testing.assert_allclose(third(ps.jit(cube))(x).numpy(), third(cube)(x).numpy(), rtol=1e-5)
    np.testing.assert_allclose(ps.jit(third(ps.jit(cube)))(x).numpy(), third(cube)(x).numpy(), rtol=1e-5)


def test_random_numbers_of_the_call_are_those_of_its_gradient(device: Device) -> None:
    generator = ps.random.Generator(3, device)
    jitted = ps.jit(lambda x: x * generator.uniform((1000,)))
    (x,) = at(device, np.ones(1000))
    x.requires_grad_()
    for _ in range(3):
        x.grad = None
        result = jitted(x)
        ps.sum(result).backward()
        assert x.grad is not None
        np.testing.assert_array_equal(x.grad.numpy(), result.numpy())


def test_a_gradient_inside_of_what_was_jitted_outside(device: Device) -> None:
    (x,) = at(device, [1.0, 2.0])
    x.requires_grad_()
    inner = ps.jit(lambda x: x * x * x)(x)

    @ps.jit
    def outer() -> None:
        ps.sum(inner * 2).backward()

    for turn in range(1, 3):
        outer()
        assert x.grad is not None
        assert x.grad.tolist() == [6 * turn, 24 * turn]


def test_two_arguments_with_one_value_have_a_gradient_each(device: Device) -> None:
    (x,) = at(device, [1.0, 2.0])
    twin = ps.asarray(x, copy=True)
    x.requires_grad_()
    twin.requires_grad_()
    ps.sum(ps.jit(lambda x, y: x * x * y)(x, twin)).backward()
    assert x.grad is not None
    assert twin.grad is not None
    assert (x.grad.tolist(), twin.grad.tolist()) == ([2, 8], [1, 4])


# backward() inside


def test_backward_inside_reaches_the_caller(device: Device) -> None:
    @ps.jit
    def function(x: ps.Tensor) -> ps.Tensor:
        loss = ps.sum(x * x)
        loss.backward()
        return loss.detach()

    (x,) = at(device, [1.0, 2.0])
    x.requires_grad_()
    for turn in range(1, 4):
        function(x)
        assert x.grad is not None
        assert x.grad.tolist() == [2 * turn, 4 * turn]
    (other,) = at(device, [3.0, 4.0])
    other.requires_grad_()
    function(other)
    assert other.grad is not None
    assert other.grad.tolist() == [6, 8]
    (without,) = at(device, [3.0, 4.0])
    with pytest.raises(ValueError, match="requires a gradient"):
        function(without)


def test_a_step_on_an_argument(device: Device) -> None:
    @ps.jit
    def step(x: ps.Tensor) -> None:
        x.grad = None
        ps.sum(x * x).backward()
        with ps.no_grad():
            assert x.grad is not None
            x -= x.grad * 0.25

    (x,) = at(device, [8.0, 4.0])
    x.requires_grad_()
    for _ in range(3):
        step(x)
    assert x.tolist() == [1, 0.5]
    assert x.grad is not None
    assert x.grad.tolist() == [4, 2]
    assert x.requires_grad


def test_what_is_behind_a_tensor_from_outside_is_reached(device: Device) -> None:
    weight, x = at(device, [1.0, 2.0], [3.0, 4.0])
    weight.requires_grad_()
    features = weight * x  # before the capture

    @ps.jit
    def function(y: ps.Tensor) -> None:
        ps.sum(features * y + weight * y).backward()

    (y,) = at(device, [1.0, 10.0])
    for turn in range(1, 3):
        function(y)
        assert weight.grad is not None
        assert weight.grad.tolist() == [4 * turn, 50 * turn]


# Refused


def training(device: Device) -> tuple[Callable[[ps.Tensor], ps.Tensor], ps.Tensor]:
    (weight,) = at(device, [1.0, 2.0])
    weight.requires_grad_()
    optimizer = ps.optim.SGD([weight], lr=0.1)

    @ps.jit
    def step(x: ps.Tensor) -> ps.Tensor:
        loss = ps.sum(x * weight)
        optimizer.backward(loss)
        optimizer.step()
        return loss

    return step, weight


def test_what_changed_its_inputs_refuses(device: Device) -> None:
    step, weight = training(device)
    (x,) = at(device, [1.0, 1.0])
    loss = step(x)
    assert loss.item() == 3
    for use in (loss.backward, (loss * 2 + ps.sum(weight)).backward):
        with pytest.raises(TypeError, match=r"jitted function step .* changes tensors in place"):
            use()
    ps.sum(weight * loss.detach()).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3, 3]
    weight.grad = None
    with pytest.raises(TypeError, match="argument 0"):
        ps.grad(step)(x)
    del use  # which keeps the weight's value
    step(x)
    memory = weight._node.value.memory
    losses = [step(x) for _ in range(5)]
    assert weight._node.value.memory is memory, "the losses keep nothing"
    assert all(loss.requires_grad for loss in losses)


def test_an_argument_in_whose_new_value_gradients_would_end_refuses(device: Device) -> None:
    def changed(a: ps.Tensor) -> ps.Tensor:
        with ps.no_grad():
            a *= 0.5
        return (a * a).sum()

    (x,) = at(device, [1, 2, 3])
    x.requires_grad_()
    result = ps.jit(changed)(x)
    np.testing.assert_array_equal(x.numpy(), [0.5, 1, 1.5])
    with pytest.raises(TypeError, match="changes tensors in place"):
        result.backward()
    assert x.grad is None


def test_a_function_that_calls_backward_itself_refuses(device: Device) -> None:
    (weight,) = at(device, [1.0, 2.0])
    weight.requires_grad_()

    @ps.jit
    def function() -> ps.Tensor:
        loss = ps.sum(weight * weight)
        loss.backward()
        return loss

    with pytest.raises(TypeError, match=r"jitted function function .* calls backward"):
        function().backward()


def test_donated_arguments_refuse(device: Device) -> None:
    (weight, x) = at(device, [1.0, 2.0], [1.0, 1.0])
    weight.requires_grad_()
    result = ps.jit(lambda x: ps.sum(x * weight), donate=0)(x)
    with pytest.raises(TypeError, match="donate"):
        result.backward()


def test_a_tensor_that_was_changed_to_a_value_with_a_gradient(device: Device) -> None:
    total, weight, x = at(device, 0.0, [1.0, 2.0], [1.0, 1.0])
    weight.requires_grad_()

    @ps.jit
    def add(x: ps.Tensor) -> None:
        nonlocal total
        total += ps.sum(x * weight)

    for turn in range(1, 4):
        add(x)
        assert total.item() == 3 * turn
    with pytest.raises(TypeError, match="jitted function add changed a tensor in place"):
        (total + ps.sum(weight)).backward()


def test_backward_through_an_argument_with_a_history(device: Device) -> None:
    (weight,) = at(device, [1.0, 2.0])
    weight.requires_grad_()

    @ps.jit
    def function(x: ps.Tensor) -> None:
        ps.sum(x * x).backward()

    with pytest.raises(TypeError, match="through argument 0"):
        function(weight * 2)
    assert weight.grad is None


def test_gradients_keep_no_memory(device: Device) -> None:
    def live() -> int:
        gc.collect()
        device.cleanup()
        return device.memory_stats().live_bytes

    (weight,) = at(device, np.ones(1000))
    weight.requires_grad_()
    jitted = ps.jit(lambda x: ps.sum(x * weight))
    before = live()
    for _ in range(3):
        jitted(ps.ones(1000, device=device)).backward()
        weight.grad = None
    assert live() == before
