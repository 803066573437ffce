"""Tensors, modules and optimizers under `copy` and `pickle`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import nn, optim


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


WAYS: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": pickled}
DTYPES = ["bool", "int8", "uint64", "bfloat16", "float16", "float32", "float64", "complex64"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return WAYS[request.param]


@pytest.mark.parametrize("device", ["host", "opencl", "auto"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_has_values_dtype_and_device(way: Callable[[Any], Any], dtype: str, device: str) -> None:
    x = ps.asarray(np.array([[0, 1, 1], [1, 0, 1]]), dtype=dtype, device=device)
    for tensor in (x, x[:, ::2], ps.flip(x)):
        result = way(tensor)
        assert result.dtype == tensor.dtype
        assert result.device is tensor.device
        assert result.tolist() == tensor.tolist()
        assert not result.requires_grad
        assert result.grad is None


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_copies_of_few_items(way: Callable[[Any], Any], shape: tuple[int, ...]) -> None:
    assert way(ps.zeros(shape)).shape == shape
    assert copy.copy(ps.zeros(shape)).shape == shape


@pytest.mark.parametrize("way", [*WAYS.values(), copy.copy])
def test_a_copy_and_its_original_change_apart(way: Callable[[Any], Any]) -> None:
    x = ps.asarray([1.0, 2.0])
    result = way(x)
    add = ps.jit(lambda: (x.__iadd__(1.0), result.__imul__(2.0)))
    x += 1
    result *= 10
    add()
    add()
    assert x.tolist() == [4, 5]
    assert result.tolist() == [40, 80]


@pytest.mark.parametrize("way", [*WAYS.values(), copy.copy])
def test_a_parameter_stays_one(way: Callable[[Any], Any]) -> None:
    x = ps.asarray([1.0, 2.0]).requires_grad_()
    ps.sum(x * x).backward()
    result = way(x)
    assert result.requires_grad
    assert result.grad.tolist() == [2, 4]
    ps.sum(result * 3).backward()
    assert result.grad.tolist() == [5, 7]
    assert x.grad is not None
    assert x.grad.tolist() == [2, 4]
    with pytest.raises(ValueError, match="cannot change"):
        result += 1


@pytest.mark.parametrize("way", [*WAYS.values(), copy.copy])
def test_a_result_with_a_history_is_refused(way: Callable[[Any], Any]) -> None:
    x = ps.asarray([1.0]).requires_grad_()
    with pytest.raises(ValueError, match=r"float32\[1\] was computed from .* copy x.detach\(\) instead"):
        way(x * 2)
    assert way((x * 2).detach()).tolist() == [2]


def test_what_is_shared_stays_shared(way: Callable[[Any], Any]) -> None:
    x = ps.asarray([1.0])
    first, (second, other) = way([x, (x, ps.asarray([1.0]))])
    assert first is second
    assert other is not first


class Tied(nn.Module):
    """Shared weights, parts in containers, a cycle, a device, and things that are no tensors."""

    def __init__(self) -> None:
        self.embedding = nn.Embedding(5, 4)
        self.layers = {"a": nn.Linear(4, 4), "b": [nn.LayerNorm(4), nn.Dropout(0.0)]}
        self.tied = self.embedding.weight
        self.me = self
        self.device = ps.default_device()
        self.words = ["x", "y"]

    def forward(self, ids: ps.Tensor) -> ps.Tensor:
        norm, dropout = self.layers["b"]  # type: ignore[misc]
        x = dropout(norm(self.layers["a"](self.embedding(ids))))  # type: ignore[operator]
        result: ps.Tensor = x @ self.tied.T
        return result


@pytest.mark.parametrize("used", [False, True])
def test_a_copied_module_computes_the_same_and_is_trained_alone(
    way: Callable[[Any], Any], used: bool
) -> None:
    model, ids = Tied(), ps.asarray([1, 4, 2])
    if used:
        model(ids).realize()
    twin = way(model)
    np.testing.assert_array_equal(twin(ids).numpy(), model(ids).numpy())
    assert twin.tied is twin.embedding.weight
    assert twin.me is twin
    assert twin.device is model.device
    assert len(twin.parameters()) == len(model.parameters())
    before = model.state_dict()
    optimizer = optim.AdamW(twin.parameters(), lr=0.1)
    ps.sum(twin(ids) ** 2).backward()
    optimizer.step()
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(array, before[name])
    assert any(np.any(array != before[name]) for name, array in twin.state_dict().items())


def test_a_gpt_can_be_copied(way: Callable[[Any], Any]) -> None:
    model = nn.GPT(vocab_size=11, context=6, width=8, layers=1, heads=2)
    twin = way(model.eval())
    assert not twin.training
    assert twin.generate([1, 2], 3, temperature=0).ids == model.generate([1, 2], 3, temperature=0).ids


@pytest.mark.slow("bfloat16", "float16")
@pytest.mark.parametrize("dtype", [ps.float32, ps.bfloat16, ps.float16])
@pytest.mark.parametrize("jitted", [False, True])
def test_training_goes_on_bit_by_bit_in_a_copy(way: Callable[[Any], Any], dtype: Any, jitted: bool) -> None:
    """Model and optimizer, copied together after some steps."""

    def step(model: nn.Module, optimizer: optim.Optimizer) -> Callable[[ps.Tensor], ps.Tensor]:
        def run(x: ps.Tensor) -> ps.Tensor:
            loss = ps.mean(model(x).astype(ps.float32) ** 2)
            optimizer.backward(loss)
            optimizer.step()
            return loss

        return ps.jit(run) if jitted else run

    ps.random.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    pair = (model, optim.AdamW(model.parameters(), lr=0.01))
    x = ps.asarray(np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)).astype(dtype)
    first = step(*pair)
    for _ in range(3):
        first(x)
    twins = way(pair)
    assert twins[1].parameters[0] is twins[0].parameters()[0]
    second = step(*twins)
    for _ in range(3):
        assert first(x).item() == second(x).item()
    for name, array in twins[0].state_dict().items():
        np.testing.assert_array_equal(array, pair[0].state_dict()[name])


def test_inside_a_jitted_function_values_are_copied_and_not_read() -> None:
    twice = ps.jit(lambda x: copy.deepcopy(x) + copy.copy(x))
    assert twice(ps.asarray([1.0])).tolist() == twice(ps.asarray([1.0])).tolist() == [2]
    weight = ps.asarray([3.0]).requires_grad_()
    outside = ps.jit(lambda: copy.deepcopy(weight).detach() * 2)
    assert outside().tolist() == [6]
    with ps.no_grad():
        weight += 1
    assert outside().tolist() == [8]
    with pytest.raises(ps.errors.CaptureError, match="was read inside a jitted function"):
        ps.jit(lambda x: pickled(x))(ps.asarray([1.0]))


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    x = ps.asarray([1.0], device="host")
    monkeypatch.setattr(x.device, "name", "cuda:7")
    data = pickle.dumps(x)
    monkeypatch.undo()
    with pytest.raises(ps.errors.DeviceNotFound, match="there is no device 'cuda:7'; there are"):
        pickle.loads(data)
    assert copy.deepcopy(x.device) is x.device
