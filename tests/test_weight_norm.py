"""Weight norm."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from differences import check_gradients

import penstock as ps
from penstock import nn
from penstock.nn.utils.parametrizations import weight_norm


def normed(weight: np.ndarray, g: np.ndarray, dim: int | None) -> np.ndarray:
    axes = tuple(axis for axis in range(weight.ndim) if axis != dim)
    return g * weight / np.sqrt((weight**2).sum(axes, keepdims=dim is not None))


@pytest.mark.parametrize("dim", [0, 1, -1, None])
def test_a_weight_is_a_length_times_a_direction(dim: int | None) -> None:
    layer = nn.Linear(3, 4, device="host")
    before, x = layer.weight.numpy(), ps.asarray(np.ones((2, 3), np.float32), device="host")
    plain = layer(x).numpy()
    assert weight_norm(layer, dim=dim) is layer
    np.testing.assert_allclose(layer(x).numpy(), plain, rtol=1e-5, atol=1e-6)
    names = {name for name, _ in layer.named_parameters()}
    assert names == {"bias", "parametrizations.weight.original0", "parametrizations.weight.original1"}
    state = layer.state_dict()
    g = state["parametrizations.weight.original0"] * 2
    layer.load_state_dict({**state, "parametrizations.weight.original0": g})
    at = dim if dim is None else dim % 2
    np.testing.assert_allclose(layer.weight.numpy(), normed(before, g, at), rtol=1e-5)


def test_its_gradients() -> None:
    layer = weight_norm(nn.Linear(3, 2, bias=False, device="host"))
    parts = layer.parametrizations["weight"]  # type: ignore[index]

    def loss(g: ps.Tensor, v: ps.Tensor) -> ps.Tensor:
        parts["original0"], parts["original1"] = g, v
        return ps.sum(layer.weight**3)

    check_gradients(loss, np.array([[0.5], [2.0]]), np.array([[1.0, 2.0, -1.0], [0.5, 0.3, 2.0]]))


def test_it_is_trained_in_a_jitted_step_and_copied() -> None:
    ps.random.manual_seed(0)
    layer = weight_norm(nn.Linear(3, 1, device="host"))
    optimizer = ps.optim.SGD(layer.parameters(), lr=0.05)
    x = ps.asarray(np.random.default_rng(0).standard_normal((16, 3)).astype(np.float32), device="host")
    y = ps.sum(x, axis=1, keepdims=True)

    @ps.jit
    def step(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        loss = nn.functional.mse_loss(layer(x), y)
        loss.backward()
        optimizer.step()
        return loss

    losses = [step(x, y).item() for _ in range(60)]
    assert losses[-1] < 0.05 * losses[0]
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        np.testing.assert_array_equal(other(x).numpy(), layer(x).numpy())
        assert repr(other) == repr(layer)


def test_several_weights_of_one_module() -> None:
    layer = nn.LSTM(2, 3, device="host")
    x = ps.asarray(np.random.default_rng(0).standard_normal((4, 1, 2)).astype(np.float32), device="host")
    plain = layer(x)[0].numpy()
    for name in ("weight_ih_l0", "weight_hh_l0"):
        weight_norm(layer, name)
    np.testing.assert_allclose(layer(x)[0].numpy(), plain, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(copy.deepcopy(layer)(x)[0].numpy(), layer(x)[0].numpy())


def test_what_is_no_parameter_is_refused() -> None:
    layer = weight_norm(nn.Linear(3, 2, device="host"))
    for name in ("weight", "wait"):
        with pytest.raises(ValueError, match=f"has no parameter '{name}'"):
            weight_norm(layer, name)
