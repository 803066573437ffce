"""Tensors in flat allocations, and optimizers over such tensors, on every kind of device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import DRIVERS, surface

import penstock as ps
from penstock import Device, nn, optim
from penstock.config import Settings
from penstock.tensor.core import Tensor
from penstock.tensor.gathering import Reused, gather, gathered, reading

pytestmark = surface


@pytest.fixture(params=DRIVERS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device.over(DRIVERS[request.param]())
    yield made
    made.close()


@pytest.fixture
def host() -> Iterator[Device]:
    made = Device.over(DRIVERS["host-late"]())
    yield made
    made.close()


SHAPES = [(3, 5), (), (0, 4), (200,), (1,), (2, 3, 4)]


def arrays(seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    dtypes = ["float32", "int8", "float32", "float64", "bool", "float16"]
    return [(10 * draw.random(shape)).astype(dtype) for shape, dtype in zip(SHAPES, dtypes, strict=True)]


def memories(tensors: list[ps.Tensor]) -> int:
    return len({id(tensor._node.value.whole) for tensor in tensors})


def same(tensors: list[ps.Tensor], expected: list[np.ndarray]) -> None:
    for tensor, array in zip(tensors, expected, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
    for result, array in zip(reading(tensors)(), expected, strict=True):
        np.testing.assert_array_equal(result, array)
        assert result.dtype == array.dtype


# Values whose memory others have in between


SIZES = [((3, 70), "float32"), ((5,), "int32"), ((64, 2), "float16")]


def taken(reused: Reused, device: Device, value: int) -> list[ps.Tensor]:
    """Values that were taken, as tensors that have another value in their memory."""
    tensors = [Tensor(node, device) for node in reused.take()]
    for tensor in tensors:
        array = np.full(tensor.shape, value, tensor.dtype.numpy)
        device.upload(array, into=tensor._node.value)
    return tensors


@pytest.fixture
def reused(device: Device) -> Reused:
    return Reused([shape for shape, _ in SIZES], [getattr(ps, dtype) for _, dtype in SIZES], device)


def test_values_that_were_given_back_are_taken_again(device: Device, reused: Reused) -> None:
    tensors = taken(reused, device, 1)
    nodes = [tensor._node for tensor in tensors]
    same(tensors, [np.full(shape, 1, dtype) for shape, dtype in SIZES])
    held = device.memory_stats().live_bytes
    del tensors
    reused.give_back(nodes)
    assert device.memory_stats().live_bytes < held
    places = [node.value.place for node in nodes]
    again = taken(reused, device, 2)
    assert [tensor._node.value.place for tensor in again] == places
    assert [tensor._node for tensor in again] == nodes, "programs that had them find nothing changed"
    assert device.memory_stats().live_bytes == held
    same(again, [np.full(shape, 2, dtype) for shape, dtype in SIZES])
    del again, nodes
    gc.collect()
    assert device.memory_stats().live_bytes < held, "their memory is freed once"


def test_memory_that_another_has_meanwhile_is_not_taken(device: Device, reused: Reused) -> None:
    tensors = taken(reused, device, 1)
    nbytes = tensors[0]._node.value.whole.nbytes
    nodes = [tensor._node for tensor in tensors]
    place = nodes[0].value.place
    del tensors
    reused.give_back(nodes)
    del nodes
    other = device.upload(np.full(nbytes, 7, np.uint8))
    again = taken(reused, device, 2)
    assert place != again[0]._node.value.place or other.place != place
    same(again, [np.full(shape, 2, dtype) for shape, dtype in SIZES])
    np.testing.assert_array_equal(device.download(other).wait(), np.full(nbytes, 7))


def test_values_that_others_replaced_are_not_given_back(device: Device, reused: Reused) -> None:
    tensors = taken(reused, device, 1)
    held = device.memory_stats().live_bytes
    reused.give_back([ps.zeros((2,), device=device)._node, *[tensor._node for tensor in tensors[1:]]])
    assert device.memory_stats().live_bytes >= held
    same(tensors, [np.full(shape, 1, dtype) for shape, dtype in SIZES])


def test_values_that_moved_are_not_given_back(device: Device, reused: Reused) -> None:
    tensors = taken(reused, device, 1)
    others = gathered([np.full(9, 5, np.float32)], device)
    gather([*tensors, *others])  # into one allocation, if they are not in one
    for tensor in tensors[:1]:
        tensor._node.value = device.upload(np.full((3, 70), 1, np.float32))
    reused.give_back([tensor._node for tensor in tensors])
    device.upload(np.full(4096, 9, np.uint8))
    same(tensors, [np.full(shape, 1, dtype) for shape, dtype in SIZES])
    same(others, [np.full(9, 5, np.float32)])


# Tensors


def test_new_tensors_lie_in_one_memory(device: Device) -> None:
    made = gathered(arrays(), device)
    assert memories(made) == 1
    assert all(tensor._node.value.offset % 256 == 0 for tensor in made)
    assert not any(tensor._node.value.shared for tensor in made)
    same(made, arrays())
    assert gathered([], device) == []


def test_tensors_are_moved_with_what_depends_on_them(device: Device) -> None:
    tensors = [ps.asarray(array, device=device) for array in arrays()]
    pending, alias = tensors[0] + 1, tensors[3].detach()
    alias.realize()
    for tensor in tensors:
        tensor.realize()
    gather(tensors)
    assert memories(tensors) == 1
    same(tensors, arrays())
    np.testing.assert_array_equal(pending.numpy(), arrays()[0] + 1)
    np.testing.assert_array_equal(alias.numpy(), arrays()[3])
    places = [tensor._node.value for tensor in tensors]
    gather(tensors)
    assert [tensor._node.value for tensor in tensors] == places, "what is there already stays"
    gather(tensors[:1])
    gather([])


def test_one_memory_is_read_in_one_copy(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = gathered(arrays(), device)
    copies: list[int] = []
    download = Device.download
    monkeypatch.setattr(Device, "download", lambda *args: copies.append(1) or download(*args))
    same_arrays = reading(tensors)()
    assert len(copies) == 1
    assert [array.shape for array in same_arrays] == SHAPES
    rest = reading(tensors[:2])()
    assert len(copies) == 3, "a memory of which little is wanted is not read whole"
    np.testing.assert_array_equal(rest[0], arrays()[0])


def test_more_than_an_allocation_may_have_is_several(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "capabilities", replace(host.capabilities, max_allocation_bytes=1024))
    made = gathered([np.full(100, at, np.float32) for at in range(5)], host)
    assert memories(made) == 3
    same(made, [np.full(100, at, np.float32) for at in range(5)])
    apart = [ps.asarray(np.full(100, at, np.float32), device=host) for at in range(5)]
    gather(apart)
    assert memories(apart) == 3
    places = [tensor._node.value for tensor in apart]
    gather(apart)
    assert [tensor._node.value for tensor in apart] == places


def test_without_memory_for_it_they_stay(host: Device) -> None:
    tensors = [ps.asarray(np.full(1000, at, np.float32), device=host) for at in range(8)]
    host.sync()
    host.limit_bytes = host.memory_stats().live_bytes + 1000
    gather(tensors)
    assert memories(tensors) == 8
    same(tensors, [np.full(1000, at, np.float32) for at in range(8)])
    host.limit_bytes = None
    gather(tensors)
    assert memories(tensors) == 1


# Optimizers


class Training:
    """A small network, and steps of it that are captured or not."""

    def __init__(self, device: Device, make: Callable[[Any], optim.Optimizer], jit: bool = True) -> None:
        draw = np.random.default_rng(3)
        self.device = device
        self.weights = [
            ps.asarray(0.5 * draw.standard_normal(shape).astype(np.float32), device=device).requires_grad_()
            for shape in [(3, 4), (4,), (4, 2)]
        ]
        self.optimizer = make(self.weights)
        self.step = ps.jit(self._step) if jit else self._step
        self._number = 0

    def _step(self, x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        first, bias, second = self.weights
        loss = ps.mean((ps.tanh(x @ first + bias) @ second - y) ** 2)
        self.optimizer.backward(loss)
        self.optimizer.step()
        return loss

    def run(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            self._number += 1
            x, y = np.random.default_rng(self._number).random((2, 6, 3), np.float32)
            given = [ps.asarray(array, device=self.device) for array in (x, y[:, :2])]
            losses.append(self.step(*given).item())
        return losses

    def kinds(self) -> list[list[ps.Tensor]]:
        return [self.weights, *self.optimizer._state.values()]

    def values(self) -> list[np.ndarray]:
        return [weight.numpy() for weight in self.weights]


MAKERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "momentum": lambda weights: optim.SGD(weights, lr=0.1, momentum=0.9, clip_norm=1.0),
    "adam": lambda weights: optim.Adam(weights, lr=0.05),
    "adamw": lambda weights: optim.AdamW(weights, lr=0.05, clip_norm=0.2),
}


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("name", MAKERS)
def test_training_is_the_same_in_one_memory(
    device: Device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(device, MAKERS[name])
    losses = training.run(1)
    places = [[tensor._node.value for tensor in tensors] for tensors in training.kinds()]
    losses += training.run(5)
    for tensors, before in zip(training.kinds(), places, strict=True):
        assert memories(tensors) == 1
        assert [tensor._node.value for tensor in tensors] == before, "replays write in place"
    plain = Training(device, MAKERS[name], jit=False)
    np.testing.assert_allclose(plain.run(6), losses, rtol=1e-4)
    monkeypatch.setattr(optim.Optimizer, "_gather", lambda self: None)
    apart = Training(device, MAKERS[name])
    assert apart.run(6) == losses
    assert memories(apart.weights) == 3


def test_what_is_replaced_leaves_and_all_else_goes_on(device: Device) -> None:
    training, other = (Training(device, MAKERS["adam"]) for _ in range(2))
    training.run(2)
    other.run(2)
    with ps.no_grad():
        for item in (training, other):
            item.weights[1][...] = ps.asarray(np.ones(4, np.float32), device=device)
    kept = training.weights[0].detach()
    kept.realize()
    pending = training.weights[2] * 2
    before = training.values()
    assert training.run(3) == other.run(3)
    np.testing.assert_array_equal(kept.numpy(), before[0])
    np.testing.assert_array_equal(pending.numpy(), 2 * before[2])
    assert memories(training.weights) > 1
    assert memories(training.kinds()[1]) == 1
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    assert memories(training.weights) == 1, "they come back when a state is loaded"
    assert training.run(3) == other.run(3)


def test_a_model_that_is_loaded_after_the_optimizer_was_made_is_gathered(device: Device) -> None:
    class Model(nn.Module):
        def __init__(self, weights: list[ps.Tensor]) -> None:
            self.weights = weights

    training, other = (Training(device, MAKERS["adamw"]) for _ in range(2))
    training.run(3)
    Model(other.weights).load_state_dict(Model(training.weights).state_dict())
    other.optimizer.load_state_dict(training.optimizer.state_dict())
    other._number = training._number
    assert training.run(3) == other.run(3)
    assert memories(other.weights) == 1


def test_a_state_is_one_copy_for_each_kind(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(device, MAKERS["adam"])
    training.run(2)
    copies: list[int] = []
    download = Device.download
    monkeypatch.setattr(Device, "download", lambda *args: copies.append(args[1].nbytes) or download(*args))
    state = training.optimizer.state_dict()
    powers = copies.count(4)  # where the host sees memory, they are read in place
    assert powers in (0, 2)
    assert len(copies) - powers == 2, "means and squares"
    again = Training(device, MAKERS["adam"])
    again.optimizer.load_state_dict(state)
    for name, array in again.optimizer.state_dict().items():
        np.testing.assert_array_equal(array, state[name])
    assert list(state) == [
        *(f"{kind}.{at}" for kind in ("mean", "square") for at in range(3)),
        *("power1", "power2", "lr"),
    ]


def test_steps_before_the_first_that_is_captured(device: Device) -> None:
    training, other = (Training(device, MAKERS["adam"], jit=False) for _ in range(2))
    training.run(2)
    other.run(2)
    training.step = ps.jit(training._step)
    np.testing.assert_allclose(training.run(4), other.run(4), rtol=1e-4)
    assert all(memories(tensors) == 1 for tensors in training.kinds())


def test_two_steps_in_one_capture(device: Device) -> None:
    training, other = (Training(device, MAKERS["adam"], jit=jit) for jit in (False, True))

    def twice(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        training._step(x, y)
        return training._step(x, y)

    training.step = ps.jit(twice)
    given = [ps.asarray(np.full(shape, 0.3, np.float32), device=device) for shape in ((6, 3), (6, 2))]
    for _ in range(2):
        training.step(*given)
        other.step(*given)
        other.step(*given)
    for value, right in zip(training.values(), other.values(), strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-4)


def test_one_tensor_that_is_used_twice_is_one_parameter(device: Device) -> None:
    weight = ps.asarray(np.eye(3, dtype=np.float32), device=device).requires_grad_()
    twin = ps.asarray(np.eye(3, dtype=np.float32), device=device).requires_grad_()
    twin._node = weight._node  # another tensor with the same value
    twin.requires_grad_()
    bias = ps.asarray(np.zeros(3, np.float32), device=device).requires_grad_()
    optimizer = optim.SGD([weight, twin, bias], lr=0.5, momentum=0.5)

    @ps.jit
    def step() -> None:
        x = ps.asarray(np.ones((1, 3), np.float32), device=device)
        optimizer.backward(ps.sum((x @ weight + bias) @ weight))
        optimizer.step()

    before = twin.numpy()
    step()
    step()
    np.testing.assert_array_equal(twin.numpy(), before)
    assert (weight.numpy() != before).any()


def test_gradients_of_what_was_computed_before_the_capture(device: Device) -> None:
    training = Training(device, MAKERS["adam"])
    first = training.weights[0]
    loss = ps.sum(first * first)
    training.run(1)
    expected = first.numpy()
    again = ps.sum(first * first)
    gather(training.weights)
    again.backward()
    assert first.grad is not None
    np.testing.assert_allclose(first.grad.numpy(), 2 * expected)
    assert loss.item() != again.item()


@pytest.mark.parametrize("jit", [True, False])
def test_nothing_is_left_when_model_and_optimizer_are_gone(device: Device, jit: bool) -> None:
    def live() -> int:
        gc.collect()
        device.cleanup()
        return device.memory_stats().live_bytes

    before = live()
    training = Training(device, MAKERS["adamw"], jit)
    training.run(3)
    held = live()
    training.run(6)
    assert live() == held or not jit, "what is pending keeps what it needs"
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    training.run(3)
    # Loaded tensors share an allocation, each at a multiple of the device's alignment.
    assert live() <= held + device.capabilities.offset_alignment or not jit
    del training
    assert live() == before
    assert device.memory_stats().unaccounted_bytes == 0


def test_eager_steps_keep_no_memory_that_they_left(device: Device) -> None:
    size = 1 << 16
    weights = [ps.asarray(np.ones(size, np.float32), device=device).requires_grad_() for _ in range(4)]
    optimizer = optim.Adam(weights, lr=0.1)
    for _ in range(3):
        for weight in weights:
            weight.grad = ps.ones(size, device=device)
        optimizer.step()
        for tensors in (weights, *optimizer._state.values()):
            for tensor in tensors:
                tensor.realize()
    device.cleanup()
    assert device.memory_stats().live_bytes < 13 * 4 * size, "values, means and squares, each once"


def test_settings_of_the_pool_do_not_matter() -> None:
    made = Device.over(DRIVERS["host-late"](), Settings(max_commands=4, max_bytes=1 << 12, max_in_flight=2))
    assert Training(made, MAKERS["adamw"]).run(4)[-1] < 1
    made.close()
