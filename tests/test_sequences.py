"""Recurrent layers, attention with heads and transformers: NumPy's formulas, PyTorch's names, masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, WEBGPU_KINDS
from oracles import slopes

import penstock as ps
from penstock import Device, nn
from penstock.nn import functional as F  # noqa: N812
from penstock.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

OPENCL = next(name for name in DRIVERS if name.startswith("opencl"))


@pytest.fixture(scope="module", params=[OPENCL, "host-far", *CUDA_KINDS, *WEBGPU_KINDS])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device.over(DRIVERS[request.param]())
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    ps.random.manual_seed(7)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


# One step of each kind, from the products with the input and the hidden state


def rnn_step(x: Any, h: Any, state: Any) -> Any:
    return (np.tanh(x + h),)


def lstm_step(x: Any, h: Any, state: Any) -> Any:
    i, f, g, o = np.split(x + h, 4, axis=-1)
    cell = sigmoid(f) * state[1] + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(cell), cell


def gru_step(x: Any, h: Any, state: Any) -> Any:
    (xr, xz, xn), (hr, hz, hn) = np.split(x, 3, axis=-1), np.split(h, 3, axis=-1)
    update = sigmoid(xz + hz)
    return ((1 - update) * np.tanh(xn + sigmoid(xr + hr) * hn) + update * state[0],)


STEPS: dict[str, Callable[..., Any]] = {"RNN": rnn_step, "LSTM": lstm_step, "GRU": gru_step}


def recurrent(kind: str, x: Any, weights: dict[str, Any], layers: int, lengths: Any = None) -> Any:
    """The result of a layer in both directions, and the last states, by the formulas."""
    ends = []
    for layer in range(layers):
        sides = []
        for suffix in ("", "_reverse"):
            name = f"l{layer}{suffix}"
            w, u, b, c = (
                weights[f"{part}_{name}"] for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            state = (np.zeros((x.shape[1], u.shape[1])),) * (2 if kind == "LSTM" else 1)
            outputs: list[Any] = [None] * len(x)
            for time in reversed(range(len(x))) if suffix else range(len(x)):
                new = STEPS[kind](x[time] @ w.T + b, state[0] @ u.T + c, state)
                there = np.ones((x.shape[1], 1), bool) if lengths is None else (lengths > time)[:, None]
                outputs[time] = np.where(there, new[0], 0)
                state = tuple(np.where(there, part, old) for part, old in zip(new, state, strict=True))
            sides.append(np.stack(outputs))
            ends.append(state)
        x = np.concatenate(sides, axis=-1)
    return x, [np.stack(parts) for parts in zip(*ends, strict=True)]


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("kind", STEPS)
def test_recurrent_layers(kind: str, device: Device) -> None:
    layers = 2 if device.name.startswith("host") else 1  # kernels of fewer are compiled sooner
    layer: Any = getattr(nn, kind)(2, 2, num_layers=layers, bidirectional=True, device=device)
    x, up = normal(3, 2, 2), normal(3, 2, 4, seed=1)
    names = ["weight_hh_l0", "bias_hh_l0_reverse", f"weight_ih_l{layers - 1}_reverse"]

    @ps.jit
    def run(x: ps.Tensor, up: ps.Tensor) -> Any:
        out, last = layer(x)
        ps.sum(out * up).backward()
        grads = [getattr(layer, name).grad for name in names]
        layer.zero_grad()
        return out, last, grads

    out, last, grads = run(*(ps.asarray(array, device=device) for array in (x, up)))
    weights = {name: array.astype(np.float64) for name, array in layer.state_dict().items()}
    wanted, ends = recurrent(kind, x, weights, layers)
    np.testing.assert_allclose(out.numpy(), wanted, rtol=1e-5, atol=1e-6)
    for result, end in zip(last if kind == "LSTM" else [last], ends, strict=True):
        np.testing.assert_allclose(result.numpy(), end, rtol=1e-5, atol=1e-6)
    for name, grad in zip(names, grads, strict=True):
        (slope,) = slopes(
            lambda array, name=name: recurrent(kind, x, weights | {name: array}, layers)[0],
            [weights[name]],
            up,
        )
        np.testing.assert_allclose(grad.numpy(), slope, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", STEPS)
def test_sequences_of_several_lengths(kind: str) -> None:
    layer: Any = getattr(nn, kind)(2, 3, bidirectional=True, device="host")
    lengths = np.array([2, 4, 1])
    x = ps.asarray(normal(4, 3, 2), device="host")
    packed, last = layer(pack_padded_sequence(x, lengths.tolist()))
    out, known = pad_packed_sequence(packed, padding_value=-1.0)
    weights = layer.state_dict()
    wanted, ends = recurrent(kind, x.numpy(), weights, 1, lengths)
    there = (np.arange(4)[:, None] < lengths)[..., None]
    np.testing.assert_allclose(out.numpy(), np.where(there, wanted, -1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose((last[0] if kind == "LSTM" else last).numpy(), ends[0], rtol=1e-5, atol=1e-6)
    assert known.tolist() == lengths.tolist()
    alone = layer(x[:2, 0])[0]
    np.testing.assert_allclose(out.numpy()[:2, 0], alone.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", STEPS)
def test_a_cell_is_a_step_of_its_layer(kind: str) -> None:
    layer: Any = getattr(nn, kind)(3, 2, device="host")
    cell: Any = getattr(nn, f"{kind}Cell")(3, 2, device="host")
    cell.load_state_dict({name.removesuffix("_l0"): array for name, array in layer.state_dict().items()})
    x = ps.asarray(normal(4, 2, 3), device="host")
    out, last = layer(x)
    state = None
    for time in range(4):
        state = cell(x[time], state)
        hidden = state[0] if kind == "LSTM" else state
        np.testing.assert_allclose(hidden.numpy(), out[time].numpy(), rtol=1e-6, atol=1e-7)
    assert (last[0] if kind == "LSTM" else last).shape == (1, 2, 2)


def test_a_loop_that_carries_states_does_not_compute_its_past_again() -> None:
    """The gradient still goes through what was computed."""
    layer = nn.LSTM(3, 4)
    items, steps = normal(6, 1, 2, 3), []
    state: Any = None
    for item in items:
        out, state = layer(ps.asarray(item), state)
        steps.append(ps.explain(out))
    assert steps[-1] == steps[1]
    out.sum().backward()
    carried = layer.weight_hh_l0.grad.numpy()
    layer.zero_grad()
    layer(ps.asarray(items[:, 0]))[0][-1].sum().backward()
    np.testing.assert_allclose(carried, layer.weight_hh_l0.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_layouts_of_sequences() -> None:
    layer, other = nn.LSTM(3, 2, device="host"), nn.LSTM(3, 2, batch_first=True, device="host")
    other.load_state_dict(layer.state_dict())
    x = ps.asarray(normal(4, 2, 3), device="host")
    turned = ps.permute_dims(x, (1, 0, 2))
    np.testing.assert_array_equal(layer(x)[0].numpy(), other(turned)[0].numpy().swapaxes(0, 1))
    assert [tuple(part.shape) for part in layer(x[:, 0])[1]] == [(1, 2), (1, 2)]
    assert list(layer.state_dict()) == ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]
    first = layer(x)
    again = layer(x[2:], layer(x[:2])[1])
    np.testing.assert_allclose(first[0][2:].numpy(), again[0].numpy(), rtol=1e-6, atol=1e-7)
    padded = pad_sequence([x[:2, 0], x[:, 1]], batch_first=True, padding_value=9.0)
    assert padded.shape == (2, 4, 3)
    assert (padded.numpy()[0, 2:] == 9).all()
    for message, call in {
        "a width of 3, and the shape": lambda: layer(x[..., :2]),
        "2 states of shape": lambda: layer(x, x),
        "sequences have 2 or 3 axes": lambda: layer(x[0, 0]),
        r"lengths are from 1 to 4, and \[5, 1\]": lambda: pack_padded_sequence(x, [5, 1]),
        "'tanh' or 'relu', and 'sin'": lambda: nn.RNN(1, 1, nonlinearity="sin"),
        "sizes of 1 or more": lambda: nn.GRU(0, 1),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_dropout_between_layers_is_off_in_use() -> None:
    layer = nn.GRU(3, 4, num_layers=2, dropout=0.5, device="host")
    x = ps.asarray(normal(3, 2, 3), device="host")
    assert (layer(x)[0].numpy() != layer(x)[0].numpy()).any()
    layer.eval()
    np.testing.assert_array_equal(layer(x)[0].numpy(), layer(x)[0].numpy())


# Attention


def heads_by_hand(q: Any, k: Any, v: Any, state: dict[str, Any], heads: int, seen: Any) -> tuple[Any, Any]:
    """(batch, length, width): the result, and the weights of all heads."""
    width = q.shape[-1]
    parts = []
    for at, x in enumerate((q, k, v)):
        rows = slice(at * width, (at + 1) * width)
        y = x @ state["in_proj_weight"][rows].T + state["in_proj_bias"][rows]
        parts.append(y.reshape(*y.shape[:2], heads, width // heads).swapaxes(1, 2))
    scores = parts[0] @ parts[1].swapaxes(-1, -2) / math.sqrt(width // heads)
    e = np.where(seen, np.exp(scores), 0)
    weights = e / e.sum(-1, keepdims=True)
    mixed = (weights @ parts[2]).swapaxes(1, 2).reshape(q.shape)
    return mixed @ state["out_proj.weight"].T + state["out_proj.bias"], weights


@pytest.mark.slow("webgpu")
def test_attention_with_heads(device: Device) -> None:
    layer = nn.MultiheadAttention(4, 2, batch_first=True, device=device)
    query, other = normal(2, 3, 4), normal(2, 5, 4, seed=1)
    padding = np.array([[False] * 5, [False, False, True, True, True]])
    hidden = np.triu(np.ones((3, 5), bool), 2)
    state = layer.state_dict()
    assert list(state) == ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"]
    seen = ~padding[:, None, None] & ~hidden
    wanted, weights = heads_by_hand(query, other, other, state, 2, seen)
    q, o, p, h = (ps.asarray(array, device=device) for array in (query, other, padding, hidden))
    result, shares = ps.jit(layer.__call__)(q, o, o, p, True, h)
    np.testing.assert_allclose(result.numpy(), wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(shares.numpy(), weights.mean(1), rtol=1e-4, atol=1e-5)
    plain, nothing = layer(q, o, o, p, need_weights=False, attn_mask=h)
    np.testing.assert_allclose(plain.numpy(), wanted, rtol=1e-4, atol=1e-5)
    assert nothing is None


def test_sequences_are_as_long_as_the_longest() -> None:
    x = ps.asarray(normal(5, 2, 3), device="host")
    for lengths, whole in (([2, 3], 3), (np.array([2, 3]), 3), (ps.asarray([2, 3], device="host"), 5)):
        out, known = pad_packed_sequence(pack_padded_sequence(x, lengths))  # type: ignore[arg-type]
        assert out.shape == (whole, 2, 3)
        assert known.tolist() == [2, 3]
    packed = pack_padded_sequence(x, [2, 3])
    out, _ = pad_packed_sequence(packed, batch_first=True, padding_value=7.0, total_length=4)
    assert (out.numpy()[0, 2:] == 7).all()
    np.testing.assert_array_equal(out.numpy()[1, :3], x.numpy()[:3, 1])
    with pytest.raises(ValueError, match="total_length is 3 or more, and 2 was given"):
        pad_packed_sequence(packed, total_length=2)
    parts = [ps.asarray([1.0]), ps.asarray([2.0, 3.0])]
    assert pad_sequence(parts, True, padding_side="left").tolist() == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="padding_side is 'left' or 'right'"):
        pad_sequence(parts, padding_side="both")


def test_weights_of_attention_are_those_after_dropout() -> None:
    layer = nn.MultiheadAttention(4, 1, dropout=0.5, batch_first=True, device="host")
    x = ps.asarray(normal(2, 8, 4), device="host")
    result, weights = layer(x, x, x)
    value = layer._projected(x, x, x)[2].numpy()
    np.testing.assert_allclose(result.numpy(), layer.out_proj(weights @ value).numpy(), rtol=1e-5, atol=1e-6)
    assert (weights.numpy() == 0).any()


def test_attention_of_other_widths_and_one_sequence() -> None:
    layer = nn.MultiheadAttention(4, 2, kdim=3, vdim=5, device="host")
    names = ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    assert list(layer.state_dict()) == [*names, "in_proj_bias", "out_proj.weight", "out_proj.bias"]
    q, k, v = (ps.asarray(normal(*shape), device="host") for shape in ((3, 4), (6, 3), (6, 5)))
    alone, weights = layer(q, k, v)
    assert (alone.shape, weights.shape) == ((3, 4), (3, 6))
    batched, _ = layer(*(ps.expand_dims(x, axis=1) for x in (q, k, v)))
    np.testing.assert_allclose(batched.numpy()[:, 0], alone.numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="8 cannot be divided among 3 heads"):
        nn.MultiheadAttention(8, 3)
    with pytest.raises(ValueError, match=r"attn_mask is of shape \(3, 6\) or"):
        layer(q, k, v, attn_mask=ps.zeros((2, 2), device="host"))


# Transformers


def layer_norm(x: Any, state: dict[str, Any], name: str) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]


def within(state: dict[str, Any], name: str) -> dict[str, Any]:
    return {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}


def feed(x: Any, state: dict[str, Any]) -> Any:
    wide = np.maximum(x @ state["linear1.weight"].T + state["linear1.bias"], 0)
    return wide @ state["linear2.weight"].T + state["linear2.bias"]


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_layers(norm_first: bool) -> None:
    settings: dict[str, Any] = {
        "dropout": 0.0,
        "batch_first": True,
        "norm_first": norm_first,
        "device": "host",
    }
    encoder, decoder = (
        nn.TransformerEncoderLayer(4, 2, 6, **settings),
        nn.TransformerDecoderLayer(4, 2, 6, **settings),
    )
    x, memory = normal(2, 3, 4), normal(2, 5, 4, seed=1)
    state, causal = encoder.state_dict(), np.tril(np.ones((3, 3), bool))

    def beside(x: Any, path: Any, state: Any, name: str) -> Any:
        if norm_first:
            return x + path(layer_norm(x, state, name))
        return layer_norm(x + path(x), state, name)

    def attend(own: Any, name: str, seen: Any, other: Any = None) -> Any:
        def path(x: Any) -> Any:
            keys = x if other is None else other
            return heads_by_hand(x, keys, keys, within(own, name), 2, seen)[0]

        return path

    wanted = beside(x, attend(state, "self_attn", causal), state, "norm1")
    wanted = beside(wanted, lambda x: feed(x, state), state, "norm2")
    result = encoder(ps.asarray(x, device="host"), is_causal=True).numpy()
    np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-5)
    own = decoder.state_dict()
    wanted = beside(x, attend(own, "self_attn", causal), own, "norm1")
    wanted = beside(wanted, attend(own, "multihead_attn", True, memory), own, "norm2")
    wanted = beside(wanted, lambda x: feed(x, own), own, "norm3")
    both = (ps.asarray(array, device="host") for array in (x, memory))
    np.testing.assert_allclose(decoder(*both, tgt_is_causal=True).numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_stacks_of_transformer_layers_train() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, activation="gelu", batch_first=True, device="host")
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(4, device="host"))
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8, batch_first=True, device="host"), 2)
    names = list(encoder.state_dict())
    assert names[0] == "layers.0.self_attn.in_proj_weight"
    assert names[-1] == "norm.bias"
    assert len(names) == 2 * 12 + 2
    assert "layers.1.multihead_attn.out_proj.bias" in decoder.state_dict()
    optimizer = ps.optim.AdamW(encoder.parameters(), lr=0.01)
    x = ps.asarray(normal(2, 3, 4), device="host")

    def step(x: ps.Tensor) -> ps.Tensor:
        loss = F.mse_loss(encoder(x), x)
        loss.backward()
        optimizer.step()
        return loss

    losses = [step(x).item() for _ in range(15)]
    assert losses[-1] < losses[0]
    with ps.no_grad():
        assert decoder(x, encoder(x)).shape == (2, 3, 4)
