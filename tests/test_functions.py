"""Activations, losses, norms and attention against NumPy's formulas and finite differences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import CUDA_KINDS, DRIVERS, WEBGPU_KINDS
from oracles import Case, check

import penstock as ps
from penstock import Device, nn
from penstock.nn import functional as F  # noqa: N812

OPENCL = next(name for name in DRIVERS if name.startswith("opencl"))


@pytest.fixture(scope="module", params=[OPENCL, "host-far", *CUDA_KINDS, *WEBGPU_KINDS])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = Device.over(DRIVERS[request.param]())
    yield made
    made.close()


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def softmax(x: Any, axis: int = -1) -> Any:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def log_softmax(x: Any) -> Any:
    return np.log(softmax(x))


ACTIVATIONS: dict[str, Case] = {
    "relu6": (F.relu6, lambda x: np.clip(x, 0, 6)),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), lambda x: np.where(x > 0, x, 0.2 * x)),
    "elu": (lambda x: F.elu(x, 1.5), lambda x: np.where(x > 0, x, 1.5 * np.expm1(np.minimum(x, 0)))),
    "celu": (lambda x: F.celu(x, 0.5), lambda x: np.where(x > 0, x, 0.5 * np.expm1(np.minimum(x, 0) / 0.5))),
    "selu": (
        F.selu,
        lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0))),
    ),
    "softplus": (lambda x: F.softplus(x, 2.0), lambda x: np.log1p(np.exp(2 * x)) / 2),
    "logsigmoid": (F.logsigmoid, lambda x: np.log(sigmoid(x))),
    "mish": (F.mish, lambda x: x * np.tanh(np.log1p(np.exp(x)))),
    "softsign": (F.softsign, lambda x: x / (1 + np.abs(x))),
    "tanhshrink": (F.tanhshrink, lambda x: x - np.tanh(x)),
    "hardtanh": (lambda x: F.hardtanh(x, -2.0, 3.0), lambda x: np.clip(x, -2, 3)),
    "hardsigmoid": (F.hardsigmoid, lambda x: np.clip(x + 3, 0, 6) / 6),
    "hardswish": (F.hardswish, lambda x: x * np.clip(x + 3, 0, 6) / 6),
    "softshrink": (F.softshrink, lambda x: np.sign(x) * np.maximum(np.abs(x) - 0.5, 0)),
    "hardshrink": (F.hardshrink, lambda x: np.where(np.abs(x) > 0.5, x, 0)),
    "threshold": (lambda x: F.threshold(x, 0.1, 20.0), lambda x: np.where(x > 0.1, x, 20)),
    "glu": (lambda x: F.glu(x, dim=0), lambda x: x[:2] * sigmoid(x[2:])),
    "softmin": (lambda x: F.softmin(x, 0), lambda x: softmax(-x, 0)),
    "normalize": (F.normalize, lambda x: x / np.sqrt((x**2).sum(1, keepdims=True))),
    "normalize 0": (
        lambda x: F.normalize(x, 0.0, dim=0),
        lambda x: x / (x != 0).sum(0, keepdims=True),
    ),
    "normalize 3": (
        lambda x: F.normalize(x, 3.0, dim=0),
        lambda x: x / (np.abs(x) ** 3).sum(0, keepdims=True) ** (1 / 3),
    ),
}


@pytest.mark.slow("webgpu")
def test_activations(device: Device) -> None:
    check(device, ACTIVATIONS, np.linspace(-4.3, 7.77, 24).reshape(4, 6).astype(np.float32))


def test_activations_far_away_are_finite_with_their_gradients() -> None:
    x = ps.asarray(np.array([[-1e4, -200, 200, 1e4]], np.float32), device="host")
    for name in ("elu", "celu", "selu", "softplus", "logsigmoid", "mish", "softsign", "hardswish"):
        value, grad = ps.value_and_grad(lambda x, name=name: ps.sum(getattr(F, name)(x)))(x)
        assert np.isfinite(grad.numpy()).all(), name
        assert np.isfinite(value.item()), name


TARGET = normal(3, 4, seed=1)
CHANCES = sigmoid(TARGET.astype(np.float64)).astype(np.float32)
LABELS = np.array([2, 0, 3])
EVEN = np.ones(4)
WEIGHTS = np.array([0.5, 1.0, 2.0, 0.25], np.float32)


def entropy(x: Any, weights: Any = EVEN, smoothing: float = 0.0, kept: Any = (True,) * 3) -> Any:
    """By hand: the weighted mean over the rows that are kept."""
    logs, shares = log_softmax(x), np.where(kept, weights[LABELS], 0)
    picked = -logs[np.arange(3), LABELS] * shares
    even = np.where(kept, -(logs * weights).sum(1), 0) / 4
    return ((1 - smoothing) * picked.sum() + smoothing * even.sum()) / shares.sum()


@pytest.mark.slow("webgpu")
def test_losses(device: Device) -> None:
    target, chances, labels, weights = (
        ps.asarray(array, device=device) for array in (TARGET, CHANCES, LABELS, WEIGHTS)
    )

    def huber(x: Any, delta: float) -> Any:
        size = np.abs(x - TARGET)
        return np.where(size <= delta, size**2 / 2, delta * (size - delta / 2))

    def kl(x: Any) -> Any:
        return CHANCES * (np.log(CHANCES) - x)

    def cosine(x: Any) -> Any:
        return (x * TARGET).sum(1) / np.sqrt((x**2).sum(1) * (TARGET**2).sum(1))

    sides = ps.asarray(np.array([1, -1, 1]), device=device)
    apart = np.array([True, False, True])
    cases: dict[str, Case] = {
        "l1": (lambda x: F.l1_loss(x, target), lambda x: np.abs(x - TARGET).mean()),
        "mse sum": (lambda x: F.mse_loss(x, target, "sum"), lambda x: ((x - TARGET) ** 2).sum()),
        "huber": (lambda x: F.huber_loss(x, target, "none", 0.7), lambda x: huber(x, 0.7)),
        "smooth_l1": (lambda x: F.smooth_l1_loss(x, target, beta=0.7), lambda x: huber(x, 0.7).mean() / 0.7),
        "bce logits": (
            lambda x: F.binary_cross_entropy_with_logits(x, chances, weights, pos_weight=weights),
            lambda x: (
                -(
                    (WEIGHTS * CHANCES * np.log(sigmoid(x)) + (1 - CHANCES) * np.log(sigmoid(-x))) * WEIGHTS
                ).mean()
            ),
        ),
        "kl": (lambda x: F.kl_div(x, chances), lambda x: kl(x).mean()),
        "kl batchmean": (lambda x: F.kl_div(x, chances, "batchmean"), lambda x: kl(x).sum() / 3),
        "kl log": (
            lambda x: F.kl_div(x, target, "sum", log_target=True),
            lambda x: (np.exp(TARGET) * (TARGET - x)).sum(),
        ),
        "cosine": (lambda x: F.cosine_similarity(x, target), cosine),
        "cosine_embedding": (
            lambda x: F.cosine_embedding_loss(x, target, sides, -0.9),
            lambda x: np.where(apart, 1 - cosine(x), np.maximum(cosine(x) + 0.9, 0)).mean(),
        ),
        "cross_entropy": (lambda x: F.cross_entropy(x, labels), entropy),
        "cross_entropy weights": (
            lambda x: F.cross_entropy(x, labels, weight=weights, label_smoothing=0.1, ignore_index=0),
            lambda x: entropy(x, WEIGHTS, 0.1, LABELS != 0),
        ),
        "cross_entropy none": (
            lambda x: F.cross_entropy(x, labels, reduction="none"),
            lambda x: -log_softmax(x)[np.arange(3), LABELS],
        ),
        "cross_entropy axis 1": (
            lambda x: F.cross_entropy(x.T.reshape(1, 4, 3), labels.reshape(1, 3), reduction="sum"),
            lambda x: -log_softmax(x)[np.arange(3), LABELS].sum(),
        ),
        "nll axis 1": (
            lambda x: F.nll_loss(x.T.reshape(1, 4, 3), labels.reshape(1, 3), reduction="none"),
            lambda x: -x[np.arange(3), LABELS].reshape(1, 3),
        ),
        "cross_entropy chances": (
            lambda x: F.cross_entropy(x, chances, label_smoothing=0.2, weight=weights),
            lambda x: -(log_softmax(x) * (CHANCES * 0.8 + 0.05) * WEIGHTS).sum(1).mean(),
        ),
        "nll": (
            lambda x: F.nll_loss(x, labels, weights),
            lambda x: -(x[np.arange(3), LABELS] * WEIGHTS[LABELS]).sum() / WEIGHTS[LABELS].sum(),
        ),
    }
    check(device, cases, normal(3, 4, seed=2))


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize(
    ("first", "second", "dim"), [((1, 2, 3), (2, 1, 3), -2), ((4, 1), (1, 3), 0), ((2, 3), (2, 3), 1)]
)
def test_the_cosine_is_along_an_axis_of_both_together(
    device: Device, first: tuple[int, ...], second: tuple[int, ...], dim: int
) -> None:
    def formula(a: Any, b: Any) -> Any:
        a, b = np.broadcast_arrays(a, b)
        return (a * b).sum(dim) / np.sqrt((a * a).sum(dim) * (b * b).sum(dim))

    case: Case = (lambda a, b: F.cosine_similarity(a, b, dim=dim), formula)
    check(device, {"cosine": case}, normal(*first), normal(*second, seed=1))


def test_integers_are_refused_where_they_would_be_cut_off() -> None:
    x = ps.asarray([[1, 2], [3, 4]])
    calls = (F.softmax, F.log_softmax, F.softmin, F.gelu, F.silu, F.mish, F.logsigmoid, F.normalize)
    norms = (lambda x: F.layer_norm(x, 2), lambda x: F.rms_norm(x, 2), lambda x: F.group_norm(x, 1))
    for function in (*calls, *norms, lambda x: F.batch_norm(x, None, None, training=True)):
        with pytest.raises(TypeError, match=r"floating point, and int64 was given; x\.float\(\) converts it"):
            function(x)
    assert F.softmax(x, 1, dtype=ps.float64).dtype == ps.float64
    assert F.relu6(x * 3).tolist() == [[3, 6], [6, 6]]
    with pytest.raises(TypeError, match="hardtanh of int64 takes integers"):
        F.hardtanh(x, 0.5, 2)


def test_everything_may_be_dropped() -> None:
    x = ps.ones((2, 3, 4)).requires_grad_()
    for drop in (F.dropout, F.dropout1d, F.alpha_dropout):
        assert not drop(x, 1.0, True).numpy().any()
    ps.sum(F.dropout(x, 1.0) + x).backward()
    assert x.grad is not None
    assert x.grad.numpy().tolist() == np.ones((2, 3, 4)).tolist()
    for drop in (F.dropout, F.dropout1d, F.alpha_dropout):
        x.grad = None
        drop(x, 1.0, True).sum().backward()
        assert x.grad is not None
        assert x.grad.numpy().tolist() == np.zeros((2, 3, 4)).tolist()


def test_a_single_item_has_a_slope() -> None:
    assert F.prelu(ps.asarray(-2.0), ps.asarray([0.25])).shape == ()
    assert F.normalize(ps.asarray(-2.0), dim=0).item() == -1


@pytest.mark.slow("webgpu")
def test_binary_cross_entropy_of_both_its_inputs(device: Device) -> None:
    def formula(x: Any, t: Any) -> Any:
        return -(t * np.log(x) + (1 - t) * np.log(1 - x)).mean()

    chances = sigmoid(normal(3, 4, seed=4).astype(np.float64)).astype(np.float32)
    check(device, {"bce": (F.binary_cross_entropy, formula)}, chances, CHANCES)


def test_losses_at_the_ends_of_their_settings() -> None:
    x, labels = ps.asarray([[1.0, 2.0, 4.0]]), ps.asarray([2])
    uniform = -log_softmax(x.numpy()).mean()
    for weight in (None, ps.ones(3)):
        loss = F.cross_entropy(x, labels, weight, label_smoothing=1.0)
        assert loss.item() == pytest.approx(uniform, rel=1e-5)
    assert np.isnan(F.kl_div(ps.zeros(2), ps.asarray([-0.5, 0.5]), "none").numpy()).tolist() == [True, False]
    assert F.kl_div(ps.asarray(0.5), ps.asarray(1.0), "batchmean").item() == -0.5


def test_binary_cross_entropy_of_certain_chances_is_finite() -> None:
    x = ps.asarray(np.array([0.0, 1.0, 0.0, 1.0], np.float32))
    target = ps.asarray(np.array([0.0, 1.0, 1.0, 0.0], np.float32))
    value, grad = ps.value_and_grad(lambda x: F.binary_cross_entropy(x, target, reduction="sum"))(x)
    assert value.item() == 200
    assert np.isfinite(grad.numpy()).all()


def test_every_reduction_and_class_is_checked() -> None:
    x, labels = ps.zeros((2, 3)), ps.asarray([0, 2])
    assert F.cross_entropy(x, labels, reduction="none").shape == (2,)
    assert F.nll_loss(x, labels, reduction="none").shape == (2,)
    with pytest.raises(ValueError, match="'mean', 'sum' or 'none', and 'all'"):
        F.mse_loss(x, x, "all")
    with pytest.raises(ValueError, match="3 classes and weights of shape"):
        F.cross_entropy(x, labels, weight=ps.zeros((2,)))
    for loss in (F.cross_entropy, F.nll_loss):
        with pytest.raises(ValueError, match=r"fit classes along axis 2; give .* or flatten .*\(-1, 5\)"):
            loss(ps.zeros((2, 3, 5)), ps.zeros((2, 3), dtype=ps.int64))
        with pytest.raises(ValueError, match=r"targets of shape \(2, 4\) were given, not \(2, 5\)"):
            loss(ps.zeros((2, 3, 5)), ps.zeros((2, 4), dtype=ps.int64))
        with pytest.raises(TypeError, match="weight is a tensor of 3 items, and -100 was given"):
            loss(x, labels, -100)
    with pytest.raises(ValueError, match=r"takes rows; flatten the shape \(2, 3, 5\): x.reshape\(-1, 5\)"):
        F.linear_cross_entropy(ps.zeros((2, 3, 5)), ps.zeros((4, 5)), ps.zeros((2, 3), dtype=ps.int64))
    with pytest.raises(TypeError, match="axis or dim, and both"):
        F.softmax(x, axis=0, dim=0)
    with pytest.raises(IndexError):
        F.nll_loss(x, ps.asarray([0, 3])).numpy()


# CTC: the sum over all ways to spell the target


def spelled(way: tuple[int, ...]) -> tuple[int, ...]:
    merged = [label for label, _ in itertools.groupby(way)]
    return tuple(label for label in merged if label)


def ctc_by_hand(x: Any, targets: Any, times: Any, lengths: Any) -> Any:
    logs = log_softmax(x)
    losses = []
    for at in range(x.shape[1]):
        wanted = tuple(targets[at][: lengths[at]])
        ways = itertools.product(range(x.shape[2]), repeat=int(times[at]))
        chance = sum(
            np.exp(sum(logs[time, at, label] for time, label in enumerate(way)))
            for way in ways
            if spelled(way) == wanted
        )
        losses.append(-np.log(chance))
    return np.array(losses)


@pytest.mark.slow("webgpu")
def test_ctc(device: Device) -> None:
    targets, times, lengths = np.array([[1, 1], [2, 1], [2, 0]]), [4, 3, 4], [2, 2, 1]
    given = ps.asarray(targets, device=device)

    def ours(x: ps.Tensor, reduction: str) -> ps.Tensor:
        return F.ctc_loss(F.log_softmax(x), given, times, lengths, reduction=reduction)

    cases: dict[str, Case] = {
        "none": (lambda x: ours(x, "none"), lambda x: ctc_by_hand(x, targets, times, lengths)),
        "mean": (
            lambda x: ours(x, "mean"),
            lambda x: (ctc_by_hand(x, targets, times, lengths) / [2, 2, 1]).mean(),
        ),
    }
    check(device, cases, normal(4, 3, 3))


def test_ctc_of_what_cannot_be_spelled() -> None:
    x = ps.asarray(normal(2, 1, 3), device="host")
    targets = ps.asarray(np.array([[1, 1]]), device="host")  # which needs a blank between, and 3 times
    assert F.ctc_loss(F.log_softmax(x), targets, [2], [2], reduction="sum").item() == math.inf

    def loss(x: ps.Tensor) -> ps.Tensor:
        return F.ctc_loss(F.log_softmax(x), targets, [2], [2], reduction="sum", zero_infinity=True)

    value, grad = ps.value_and_grad(loss)(x)
    assert value.item() == 0
    assert (grad.numpy() == 0).all()
    with pytest.raises(ValueError, match=r"target_lengths are from 0 to 2, and \[3\]"):
        F.ctc_loss(x, targets, [2], [3])


# Norms


def normed(x: Any, axes: tuple[int, ...], eps: float = 1e-5) -> Any:
    centred = x - x.mean(axis=axes, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=axes, keepdims=True) + eps)


def by_channel(values: Any, x: Any) -> Any:
    return values.reshape(-1, *[1] * (x.ndim - 2))


@pytest.mark.slow("webgpu")
def test_norms(device: Device) -> None:
    still, spread = (ps.asarray(array, device=device) for array in (normal(4, seed=3), WEIGHTS))

    def group(x: Any, w: Any, b: Any) -> Any:
        rows = normed(x.reshape(2, 2, -1), (2,)).reshape(x.shape)
        return rows * by_channel(w, x) + by_channel(b, x)

    cases: dict[str, Case] = {
        "batch": (
            lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
            lambda x, w, b: normed(x, (0, 2)) * by_channel(w, x) + by_channel(b, x),
        ),
        "batch in use": (
            lambda x, w, b: F.batch_norm(x, still, spread, w, b),
            lambda x, w, b: (
                ((x - by_channel(normal(4, seed=3), x)) / np.sqrt(by_channel(WEIGHTS, x) + 1e-5))
                * by_channel(w, x)
                + by_channel(b, x)
            ),
        ),
        "group": (lambda x, w, b: F.group_norm(x, 2, w, b), group),
        "instance": (
            lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
            lambda x, w, b: normed(x, (2,)) * by_channel(w, x) + by_channel(b, x),
        ),
    }
    check(device, cases, normal(2, 4, 5), normal(4, seed=1), normal(4, seed=2))


@pytest.mark.slow("webgpu")
def test_layer_norms_over_several_axes(device: Device) -> None:
    cases: dict[str, Case] = {
        "layer": (lambda x, w, b: F.layer_norm(x, (3, 4), w, b), lambda x, w, b: normed(x, (1, 2)) * w + b),
        "plain": (
            lambda x, w, b: F.layer_norm(x, (3, 4)) + 0 * ps.sum(w * b),
            lambda x, w, b: normed(x, (1, 2)),
        ),
        "rms": (
            lambda x, w, b: F.rms_norm(x, w.shape, w, 1e-5) + b,
            lambda x, w, b: x / np.sqrt((x**2).mean((1, 2), keepdims=True) + 1e-5) * w + b,
        ),
    }
    check(device, cases, normal(2, 3, 4), normal(3, 4, seed=1), normal(3, 4, seed=2))


@pytest.mark.slow("webgpu")
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("momentum", [0.3, None])
def test_running_statistics_follow_the_batches(device: Device, jitted: bool, momentum: float | None) -> None:
    layer = nn.BatchNorm1d(3, momentum=momentum, device=device)
    run = ps.jit(layer.__call__) if jitted else layer
    mean, spread = np.zeros(3), np.ones(3)
    for number in range(4):
        x = normal(5, 3, seed=number) * 2 + number
        np.testing.assert_allclose(run(ps.asarray(x, device=device)).numpy(), normed(x, (0,)), atol=1e-4)
        share = 1 / (number + 1) if momentum is None else momentum
        mean = mean * (1 - share) + x.mean(0) * share
        spread = spread * (1 - share) + x.var(0, ddof=1) * share
    np.testing.assert_allclose(layer.running_mean.numpy(), mean, rtol=1e-5)  # type: ignore[union-attr]
    np.testing.assert_allclose(layer.running_var.numpy(), spread, rtol=1e-5)  # type: ignore[union-attr]
    assert layer.num_batches_tracked.item() == 4  # type: ignore[union-attr]
    layer.eval()
    result = run(ps.asarray(x, device=device)).numpy()
    np.testing.assert_allclose(result, (x - mean) / np.sqrt(spread + 1e-5), rtol=1e-4, atol=1e-5)
    assert layer.num_batches_tracked.item() == 4  # type: ignore[union-attr]


def test_running_statistics_are_computed_with_the_loss_and_not_kept_pending() -> None:
    layer = nn.BatchNorm1d(3)
    optimizer = ps.optim.SGD(layer.parameters(), lr=0.1)
    for number in range(3):
        ps.sum(layer(ps.asarray(normal(5, 3, seed=number))) ** 2).backward()
        optimizer.step()
        assert all(tensor._node.value is not None for tensor in layer.buffers())


# Attention


def attention_by_hand(q: Any, k: Any, v: Any, seen: Any, added: Any = 0.0) -> Any:
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]) + added
    e = np.where(seen, np.exp(scores), 0)
    total = e.sum(-1, keepdims=True)
    return e / np.where(total == 0, 1, total) @ v


@pytest.mark.slow("webgpu")
def test_attention_with_masks(device: Device) -> None:
    seen = np.random.default_rng(1).random((2, 3, 5)) < 0.6
    seen[1, 2] = False  # a query that sees nothing
    added = normal(3, 5, seed=7)
    never = np.where(seen[0], added, -np.inf).astype(np.float32)
    boolean, bias, cut = (ps.asarray(array, device=device) for array in (seen, added, never))
    causal, lower = np.tril(np.ones((3, 5), bool)), np.tril(np.ones((3, 5), bool), 2)
    sdpa = F.scaled_dot_product_attention
    cases: dict[str, Case] = {
        "boolean": (lambda q, k, v: sdpa(q, k, v, boolean), lambda q, k, v: attention_by_hand(q, k, v, seen)),
        "added": (
            lambda q, k, v: sdpa(q, k, v, bias),
            lambda q, k, v: attention_by_hand(q, k, v, True, added),
        ),
        "cut": (
            lambda q, k, v: sdpa(q, k, v, cut),
            lambda q, k, v: attention_by_hand(q, k, v, seen[0], added),
        ),
        "both": (
            lambda q, k, v: sdpa(q, k, v, boolean, is_causal=True),
            lambda q, k, v: attention_by_hand(q, k, v, seen & causal),
        ),
        "lower right": (
            lambda q, k, v: sdpa(q, k, v, boolean, is_causal=True, lower_right=True),
            lambda q, k, v: attention_by_hand(q, k, v, seen & lower),
        ),
    }
    check(device, cases, normal(2, 3, 4), normal(2, 5, 4, seed=1), normal(2, 5, 4, seed=2))


@pytest.mark.slow("webgpu", "4")
@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (5, 3), (1, 4), (4, 4), (3, 0)])
def test_causal_attention_begins_at_the_first_key(device: Device, queries: int, keys: int) -> None:
    sdpa, pairs = F.scaled_dot_product_attention, np.ones((queries, keys), bool)
    cases: dict[str, Case] = {
        "causal": (
            lambda q, k, v: sdpa(q, k, v, is_causal=True),
            lambda q, k, v: attention_by_hand(q, k, v, np.tril(pairs)),
        )
    }
    if queries <= keys:
        cases["lower right"] = (
            lambda q, k, v: sdpa(q, k, v, is_causal=True, lower_right=True),
            lambda q, k, v: attention_by_hand(q, k, v, np.tril(pairs, keys - queries)),
        )
    check(device, cases, normal(2, queries, 4), normal(2, keys, 4, seed=1), normal(2, keys, 4, seed=2))


def test_lower_right_needs_enough_keys() -> None:
    q, k = ps.zeros((1, 3, 4)), ps.zeros((1, 2, 4))
    with pytest.raises(ValueError, match="is_causal=True and no more queries than keys"):
        F.scaled_dot_product_attention(q, k, k, is_causal=True, lower_right=True)
    with pytest.raises(ValueError, match="is_causal=True and no more queries than keys"):
        F.scaled_dot_product_attention(k, q, q, lower_right=True)


def test_norms_refuse_weights_in_the_place_of_lengths() -> None:
    x, weight = ps.zeros((2, 3)), ps.ones(3)
    for norm in (F.layer_norm, F.rms_norm):
        with pytest.raises(TypeError, match=r"lengths of the last axes first, such as \(3,\)"):
            norm(x, weight)
        with pytest.raises(TypeError, match="weight and bias are tensors, and 1e-05"):
            norm(x, 3, 1e-5)
        with pytest.raises(ValueError, match=r"shape \(4,\) do not fit normalized_shape \(3,\)"):
            norm(x, 3, ps.ones(4))


def test_attention_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (ps.asarray(normal(2, 40, 4, seed=seed), device="host") for seed in range(3))
    mask = ps.asarray(np.random.default_rng(1).random((2, 40, 40)) < 0.5, device="host")

    def run() -> list[np.ndarray]:
        both = ps.value_and_grad(
            lambda *qkv: ps.sum(F.scaled_dot_product_attention(*qkv, mask, is_causal=True) ** 2), (0, 1, 2)
        )
        value, grads = both(q, k, v)
        return [value.numpy(), *(grad.numpy() for grad in grads)]

    whole = run()
    monkeypatch.setattr("penstock.nn.functional.attention._SCORES_AT_ONCE", 1)
    for part, item in zip(run(), whole, strict=True):
        np.testing.assert_allclose(part, item, rtol=1e-4, atol=1e-5)


def test_grouped_queries_are_repeated_keys() -> None:
    q, k, v = (ps.asarray(normal(2, heads, 5, 4)) for heads in (6, 2, 2))
    result = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    repeated = [ps.asarray(np.repeat(x.numpy(), 3, axis=1)) for x in (k, v)]
    wanted = F.scaled_dot_product_attention(q, *repeated, is_causal=True)
    np.testing.assert_allclose(result.numpy(), wanted.numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="the heads of shapes"):
        F.scaled_dot_product_attention(q[:, :5], k, v, enable_gqa=True)


def attended_by_definition(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray | None,
    offset: int | None,
    window: int | None,
    softcap: float | None,
) -> np.ndarray:
    """Attention in NumPy's float64, of heads that share keys."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1).astype(np.float64) for x in (k, v))
    scores = q.astype(np.float64) @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    if offset is not None:
        last, index = np.arange(q.shape[2])[:, np.newaxis] + offset, np.arange(k.shape[2])
        scores = np.where((index <= last) & (index > last - (window or 1 << 30)), scores, -np.inf)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


@pytest.mark.parametrize("mask", [None, "of a batch", "of heads", "added", "flat"])
@pytest.mark.parametrize(("offset", "window"), [(None, None), (0, None), (0, 3), (4, 3)])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("heads", [2, 6])
def test_masks_windows_and_soft_caps(
    heads: int, softcap: float | None, offset: int | None, window: int | None, mask: str | None
) -> None:
    rows, keys = 6, 6 + (offset or 0)
    q, k, v = normal(2, heads, rows, 8), normal(2, 2, keys, 8), normal(2, 2, keys, 5)
    given = None
    if mask is not None:
        shapes = {"of a batch": (2, 1), "of heads": (2, heads), "added": (1, 1), "flat": ()}
        given = np.random.default_rng(1).random((*shapes[mask], rows, keys)) > 0.4
        given[..., np.arange(rows), np.arange(rows) + (offset or 0)] = True
        if mask == "added":
            given = np.where(given, normal(*given.shape), -np.inf).astype(np.float32)
    result = F.scaled_dot_product_attention(
        *(ps.asarray(x, device="host") for x in (q, k, v)),
        None if given is None else ps.asarray(given, device="host"),
        is_causal=offset is not None,
        lower_right=bool(offset),
        enable_gqa=True,
        window=window,
        softcap=softcap,
    )
    wanted = attended_by_definition(q, k, v, given, offset, window, softcap)
    np.testing.assert_allclose(result.numpy(), wanted, rtol=1e-5, atol=1e-5)


def test_gradients_of_grouped_queries_with_a_window_and_a_soft_cap() -> None:
    arrays = [normal(1, heads, 5, 3).astype(np.float64) for heads in (4, 2, 2)]
    slope = normal(1, 4, 5, 3).astype(np.float64)
    tensors = [ps.asarray(array, device="host").requires_grad_() for array in arrays]
    result = F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True, window=3, softcap=1.5)
    (result * ps.asarray(slope, device="host")).sum().backward()
    for number, tensor in enumerate(tensors):
        for place in range(0, tensor.size, 7):
            values = []
            for step in (1e-6, -1e-6):
                moved = [array.copy() for array in arrays]
                moved[number].flat[place] += step
                values.append((attended_by_definition(*moved, None, 0, 3, 1.5) * slope).sum())
            slopes = (values[0] - values[1]) / 2e-6
            assert tensor.grad is not None
            assert tensor.grad.numpy().flat[place] == pytest.approx(slopes, rel=1e-5, abs=1e-7)


def test_windows_and_soft_caps_that_make_no_sense() -> None:
    x = ps.zeros((1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"a window is 1 or more and takes is_causal=True, and 2 was given"):
        F.scaled_dot_product_attention(x, x, x, window=2)
    with pytest.raises(ValueError, match="a softcap is more than 0, and -1"):
        F.scaled_dot_product_attention(x, x, x, softcap=-1.0)


def test_dropout_of_attention_keeps_the_mean() -> None:
    ps.random.manual_seed(0)
    q, k = ps.zeros((4, 64, 8)), ps.zeros((4, 64, 8))
    v = ps.ones((4, 64, 8))
    result = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25).numpy()
    assert result.mean() == pytest.approx(1, abs=0.03)
    assert result.std() > 0.02


# Sizes


@pytest.mark.slow("webgpu")
def test_upsampling(device: Device) -> None:
    def linear(x: Any, length: int) -> Any:
        places = np.clip((np.arange(length) + 0.5) * x.shape[-1] / length - 0.5, 0, x.shape[-1] - 1)
        low = np.minimum(places.astype(int), x.shape[-1] - 2)
        return x[..., low] * (1 - (places - low)) + x[..., low + 1] * (places - low)

    def bilinear(x: Any, height: int, width: int) -> Any:
        return linear(linear(x, width).swapaxes(2, 3), height).swapaxes(2, 3)

    cases: dict[str, Case] = {
        "nearest": (lambda x: F.interpolate(x, scale_factor=2), lambda x: x.repeat(2, 2).repeat(2, 3)),
        "nearest size": (
            lambda x: F.interpolate(x, size=(2, 5)),
            lambda x: x[:, :, [0, 1]][..., [0, 0, 1, 2, 3]],
        ),
        "bilinear": (lambda x: F.interpolate(x, (7, 3), mode="bilinear"), lambda x: bilinear(x, 7, 3)),
        "area": (lambda x: F.interpolate(x, (3, 2), mode="area"), lambda x: (x[..., ::2] + x[..., 1::2]) / 2),
    }
    check(device, cases, normal(2, 2, 3, 4))


def test_dropout_of_channels_and_of_selu() -> None:
    ps.random.manual_seed(1)
    result = F.dropout2d(ps.ones((50, 20, 3, 4)), 0.3).numpy()
    channels = result.reshape(1000, 12)
    assert (channels == channels[:, :1]).all()
    assert np.mean(channels[:, 0] == 0) == pytest.approx(0.3, abs=0.05)
    whole = nn.Dropout3d(0.5)(ps.ones((40, 20, 2, 1, 3))).numpy().reshape(800, 6)
    assert set(map(tuple, whole.tolist())) == {(0.0,) * 6, (2.0,) * 6}
    x = ps.asarray(normal(200, 200))
    assert F.alpha_dropout(x, 0.3) is x, "as in PyTorch, where it is off unless training=True"
    dropped = F.alpha_dropout(x, 0.3, training=True).numpy()
    assert dropped.mean() == pytest.approx(0, abs=0.02)
    assert dropped.std() == pytest.approx(1, abs=0.02)
    assert nn.AlphaDropout(0.3).eval()(x) is x
    with pytest.raises(ValueError, match="dropout1d takes 2 or 3 axes"):
        F.dropout1d(ps.ones((2,)))


def test_the_row_of_a_padding_index_gets_no_gradient() -> None:
    layer = nn.Embedding(5, 2, padding_idx=-2)
    assert layer.padding_idx == 3
    assert (layer.weight.numpy()[3] == 0).all()
    ps.sum(layer(ps.asarray([1, 3, 3]))).backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0], [0, 0]]
    frozen = nn.Embedding.from_pretrained(ps.ones((2, 3)))
    assert not frozen.weight.requires_grad
    assert frozen(ps.asarray([1])).tolist() == [[1, 1, 1]]


def test_classes_as_rows_of_zeros_and_a_one() -> None:
    targets = np.array([[2, 0], [1, 2]])
    assert F.one_hot(ps.asarray(targets), 4).tolist() == np.eye(4, dtype=int)[targets].tolist()
