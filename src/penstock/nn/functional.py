"""Networks' functions, composed of tensor operations; the fuser makes them few kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from penstock.graph import attention as graph
from penstock.graph import cross_entropy as graph_losses
from penstock.tensor import attention, random
from penstock.tensor.arithmetic import abs as abs_
from penstock.tensor.arithmetic import erf, exp, log, sqrt, tanh, where
from penstock.tensor.autograd import lasting_vjp
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor, axes_of, record
from penstock.tensor.creation import zeros_like
from penstock.tensor.dtypes import float32, promote
from penstock.tensor.indexing import in_range, table_rows
from penstock.tensor.info import iinfo
from penstock.tensor.linear import matmul
from penstock.tensor.manipulation import astype, reshape
from penstock.tensor.operands import device_of
from penstock.tensor.reduction import max as max_
from penstock.tensor.reduction import mean
from penstock.tensor.reduction import sum as sum_

# Activations


@composite
def relu(x: Tensor) -> Tensor:
    """`x` where it is positive, else 0; at 0 the gradient is 0."""
    return where(x <= 0, 0, x)


@composite
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), exact down to the smallest numbers."""
    return _with_slope(_sigmoid, _sigmoid_slope, x)


def _sigmoid(x: Tensor) -> Tensor:
    """By an exponential that is at most 1, so that nothing cancels or overflows."""
    e = exp(-abs_(x))
    return where(x < 0, e, 1) / (e + 1)


def _sigmoid_slope(x: Tensor) -> Tensor:
    e = exp(-abs_(x))
    return e / ((e + 1) * (e + 1))


@composite
def silu(x: Tensor) -> Tensor:
    """`x * sigmoid(x)`."""
    return _with_slope(lambda x: x * _sigmoid(x), _silu_slope, x)


def _silu_slope(x: Tensor) -> Tensor:
    return _sigmoid(x) * (1 + x * (1 - _sigmoid(x)))


@composite
def gelu(x: Tensor, approximate: str = "tanh") -> Tensor:
    """`x` times the chance that a normal number is below it; exactly, or by a tanh as in GPT-2."""
    if approximate == "tanh":
        return _with_slope(lambda x: x * _about_below(x), _gelu_slope, x)
    if approximate != "none":
        raise ValueError(f"gelu is computed by 'tanh' or by 'none', and {approximate!r} was given")
    return _with_slope(lambda x: x * _below(x), _exact_gelu_slope, x)


_GELU, _GELU_CUBE = math.sqrt(2 / math.pi), 0.044715


def _about_below(x: Tensor) -> Tensor:
    """(1 + tanh(y)) / 2 by one exponential: near 0 and 1 nothing cancels."""
    return 1 / (exp(x * (x * x * (-2 * _GELU * _GELU_CUBE) - 2 * _GELU)) + 1)


def _gelu_slope(x: Tensor) -> Tensor:
    chance, inner = _about_below(x), x * x * (6 * _GELU * _GELU_CUBE) + 2 * _GELU
    return chance + x * chance * (1 - chance) * inner


def _exact_gelu_slope(x: Tensor) -> Tensor:
    return _below(x) + x * exp(x * x * -0.5) * (0.5 * _GELU)


def _below(x: Tensor) -> Tensor:
    """The chance that a normal number is below `x`."""
    return (erf(x * math.sqrt(0.5)) + 1) * 0.5


Function = Callable[[Tensor], Tensor]


def _with_slope(function: Function, slope: Function, x: Tensor) -> Tensor:
    """A function of each item with its derivative, which does not wait for the gradient to come.

    So it is computed where `x` is at hand, and it alone is kept for the way back.
    """
    y = astype(function(_wide(x)), x.dtype)
    return lasting_vjp(y, [x], _slope_rule(slope))


@cache
def _slope_rule(slope: Function) -> Callable[..., list[Tensor]]:
    return lambda g, _, x: [g * astype(slope(_wide(x)), x.dtype)]


def _wide(x: Tensor) -> Tensor:
    """float16 and bfloat16 as float32: what has several steps rounds its result only."""
    return astype(x, float32) if x.dtype.itemsize == 2 else x


@composite
def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """exp(x), made to sum to 1 along an axis."""
    (place,) = axes_of(x, axis, "softmax")
    return record(graph.softmax(x._node, place), x)


@composite
def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """The logarithm of softmax."""
    (place,) = axes_of(x, axis, "log_softmax")
    if not x.shape[place]:
        return astype(x, x.dtype)
    wide = _wide(x)
    shifted = wide - max_(wide, axis=axis, keepdims=True).detach()
    return astype(shifted - log(sum_(exp(shifted), axis=axis, keepdims=True)), x.dtype)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": relu,
    "gelu": gelu,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "silu": silu,
}


def named_activation(name: str) -> Callable[[Tensor], Tensor]:
    """An activation by its name."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"{name!r} is no activation; there are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


# Layers


@composite
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """`x @ weight.T + bias`, and an activation of it; the weight has a row for each output, as in PyTorch."""
    result = matmul(x, weight.T)
    if bias is not None:
        result = result + bias
    return result if activation is None else named_activation(activation)(result)


@composite
def add_relu(x: Tensor, y: Tensor) -> Tensor:
    """`relu(x + y)`."""
    return relu(x + y)


@composite
def mul_relu(x: Tensor, y: Tensor) -> Tensor:
    """`relu(x * y)`."""
    return relu(x * y)


@composite
def affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`x * scale + shift`."""
    return x * scale + shift


@composite
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Mean 0 and variance 1 along the last axis, then scaled and shifted."""
    _check_width("layer_norm", x, weight, bias)
    wide = _wide(x)
    centred = wide - mean(wide, axis=-1, keepdims=True)
    scaled = centred * (1 / sqrt(mean(centred * centred, axis=-1, keepdims=True) + eps))
    scaled = scaled if weight is None else scaled * weight
    return astype(scaled if bias is None else scaled + bias, x.dtype)


@composite
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Mean square 1 along the last axis, then scaled."""
    _check_width("rms_norm", x, weight)
    wide = _wide(x)
    scaled = wide * (1 / sqrt(mean(wide * wide, axis=-1, keepdims=True) + eps))
    return astype(scaled if weight is None else scaled * weight, x.dtype)


def _check_width(name: str, x: Tensor, *parameters: Tensor | None) -> None:
    for one in parameters:
        if one is not None and one.shape != x.shape[-1:]:
            raise ValueError(f"{name}: parameters of shape {one.shape} do not fit items of shape {x.shape}")


def embedding(index: Tensor, weight: Tensor) -> Tensor:
    """The rows of `weight` that the integers in `index` name, from 0 on; others are refused."""
    if index._node.dtype.kind not in "iu":
        raise TypeError(f"embedding looks up integers, and {index.dtype} was given")
    return table_rows(weight, index, "embedding")


def dropout(x: Tensor, probability: float = 0.5, training: bool = True) -> Tensor:
    """Some items 0, each with the given probability, and the others larger to make up for it."""
    if not 0 <= probability < 1:
        raise ValueError(f"dropout needs a probability in [0, 1), and {probability} was given")
    if not training or probability == 0:
        return x
    keep = random.bernoulli(1 - probability, x.shape, x.device)
    return where(keep, x * (1 / (1 - probability)), zeros_like(x))


@composite
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """softmax(query @ key.T * scale) @ value, over the last two axes; a causal one looks at no later key.

    The scores of all queries are never there at once: where the device has no kernel for attention, long
    contexts are done in parts of the queries, and each part is recomputed for the gradient. With fewer
    queries than keys, the last query goes with the last key.
    """
    if query.ndim < 2 or query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        shapes = f"{query.shape}, {key.shape} and {value.shape}"
        raise ValueError(f"attention: shapes {shapes} do not fit together")
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return attention.attention(query, key, value, is_causal, factor)


@composite
def packed_attention(packed: Tensor, is_causal: bool = False, scale: float | None = None) -> Tensor:
    """The same of queries, keys and values in one tensor: (batch, length, 3, heads, width of a head).

    The result has the shape (batch, length, heads, width of a head): one row holds all heads of a position.
    """
    if packed.ndim != 5 or packed.shape[2] != 3:
        raise ValueError(f"attention: shape {packed.shape} is not (batch, length, 3, heads, width)")
    factor = packed.shape[-1] ** -0.5 if scale is None else scale
    return attention.packed_attention(packed, is_causal, factor)


# Losses


@composite
def mse_loss(x: Tensor, target: Tensor) -> Tensor:
    """The mean of the squared differences."""
    if x.shape != target.shape:
        raise ValueError(f"mse_loss: shapes {x.shape} and {target.shape} differ")
    difference = x - target
    return mean(difference * difference)


def cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """The mean of -log softmax(logits)[target], over the targets that are not `ignore_index`.

    Any other target that is no class is refused. The result is float32 for float16 and bfloat16.
    """
    _check_targets(logits.shape[:-1], target, label_smoothing)
    target = reshape(target, (-1,))
    kept = _kept(target, ignore_index)
    labels = _labels(target, kept, logits.shape, "cross_entropy")
    rows = reshape(logits, (-1, logits.shape[-1]))
    known = None if kept is None else kept._node
    losses = record(graph_losses.row_losses(rows._node, labels._node, known, label_smoothing), rows)
    return sum_(losses) / _count(target, kept)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """`cross_entropy(x @ weight.T, target)`, of which only part of the logits is there at a time."""
    _check_targets(x.shape[:-1], target, label_smoothing)
    _check_linear(x, weight)
    items, target = reshape(x, (-1, x.shape[-1])), reshape(target, (-1,))
    kept = _kept(target, ignore_index)
    labels = _labels(target, kept, (*x.shape[:-1], weight.shape[0]), "linear_cross_entropy")
    if kept is not None:
        # The weight's gradient is a sum over all rows, in which 0 times NaN would be NaN. The gradient of the
        # rows themselves is 0 already where they are ignored.
        there = where(reshape(kept, (-1, 1)), items.detach(), 0)
        items = lasting_vjp(there, [items], _unchanged)
    dtype = promote(items.dtype, weight.dtype)
    items, weight = astype(items, dtype), astype(weight, dtype)
    known = None if kept is None else kept._node
    total = graph_losses.linear_cross_entropy(items._node, weight._node, labels._node, known, label_smoothing)
    return record(total, items, weight) / _count(target, kept)


def _unchanged(g: Tensor, *_: Tensor) -> list[Tensor]:
    return [g]


def _check_targets(rows: tuple[int, ...], target: Tensor, smoothing: float) -> None:
    if target.shape != rows:
        raise ValueError(f"cross_entropy: {rows} rows of logits and targets of shape {target.shape}")
    if target._node.dtype.kind not in "iu":
        raise TypeError(f"targets are integers, and {target.dtype} was given")
    if not 0 <= smoothing < 1:
        raise ValueError(f"label_smoothing is in [0, 1), and {smoothing} was given")


def _check_linear(x: Tensor, weight: Tensor) -> None:
    device_of("linear_cross_entropy", x, weight)
    if weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear_cross_entropy: shapes {x.shape} and {weight.shape} do not fit together")
    for given in (x, weight):
        if given.dtype.kind != "f":
            raise TypeError(f"linear_cross_entropy does not take {given.dtype}")


def _kept(target: Tensor, ignore_index: int) -> Tensor | None:
    """Which targets are not ignored; None where the dtype cannot hold `ignore_index`, so that none is."""
    limits = iinfo(target.dtype)
    return target != ignore_index if limits.min <= ignore_index <= limits.max else None


def _labels(target: Tensor, kept: Tensor | None, shape: tuple[int, ...], operation: str) -> Tensor:
    """The targets, with class 0 for those that are ignored; what is no class is refused."""
    labels = target if kept is None else where(kept, target, 0)
    return record(in_range(labels._node, shape, len(shape) - 1, operation, target.device), labels)


def _count(target: Tensor, kept: Tensor | None) -> Tensor | int:
    """How many targets are not ignored."""
    return target.size if kept is None else sum_(astype(kept, float32))
