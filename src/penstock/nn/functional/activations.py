"""Activations: elementwise functions, and softmax and its variants along an axis."""

from __future__ import annotations

import math
from collections.abc import Callable

from penstock.graph import attention as graph
from penstock.graph.node import DType
from penstock.nn.functional.common import check_floating, takes_dim, wide, with_slope
from penstock.tensor.arithmetic import abs as abs_
from penstock.tensor.arithmetic import erf, exp, expm1, log, log1p, tanh, where
from penstock.tensor.broadcasting import axes_of
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor, record
from penstock.tensor.dtypes import float32
from penstock.tensor.manipulation import astype, reshape
from penstock.tensor.reduction import max as max_
from penstock.tensor.reduction import sum as sum_


@composite
def relu(x: Tensor) -> Tensor:
    """`x` where it is positive, else 0; at 0 the gradient is 0.

    >>> ps.nn.functional.relu(ps.asarray([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    return where(x <= 0, 0, x)


@composite
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), accurate for large negative x too; integers give float32.

    >>> ps.nn.functional.sigmoid(ps.asarray([0.0])).tolist()
    [0.5]
    """
    x = astype(x, float32) if x.dtype.kind in "biu" else x
    return with_slope(_sigmoid, _sigmoid_slope, x)


def _sigmoid(x: Tensor) -> Tensor:
    """With an exponential of at most 1, so that nothing cancels or overflows."""
    e = exp(-abs_(x))
    return where(x < 0, e, 1) / (e + 1)


def _sigmoid_slope(x: Tensor) -> Tensor:
    e = exp(-abs_(x))
    return e / ((e + 1) * (e + 1))


@composite
def silu(x: Tensor) -> Tensor:
    """`x * sigmoid(x)`.

    >>> ps.nn.functional.silu(ps.asarray([0.0])).tolist()
    [0.0]
    """
    return with_slope(lambda x: x * _sigmoid(x), _silu_slope, x)


def _silu_slope(x: Tensor) -> Tensor:
    return _sigmoid(x) * (1 + x * (1 - _sigmoid(x)))


@composite
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """`x` times the normal distribution function of `x`; exact, or with 'tanh' the approximation of GPT-2.

    >>> ps.nn.functional.gelu(ps.asarray([0.0])).tolist()
    [0.0]
    """
    if approximate == "tanh":
        return with_slope(lambda x: x * _approximate_cdf(x), _gelu_slope, x)
    if approximate != "none":
        raise ValueError(f"gelu: approximate is 'none' or 'tanh', and {approximate!r} was given")
    return with_slope(lambda x: x * _normal_cdf(x), _exact_gelu_slope, x)


_GELU, _GELU_CUBE = math.sqrt(2 / math.pi), 0.044715


def _approximate_cdf(x: Tensor) -> Tensor:
    """(1 + tanh(y)) / 2 with a single exponential, so that nothing cancels near 0 and 1."""
    return 1 / (exp(x * (x * x * (-2 * _GELU * _GELU_CUBE) - 2 * _GELU)) + 1)


def _gelu_slope(x: Tensor) -> Tensor:
    cdf, inner = _approximate_cdf(x), x * x * (6 * _GELU * _GELU_CUBE) + 2 * _GELU
    return cdf + x * cdf * (1 - cdf) * inner


def _exact_gelu_slope(x: Tensor) -> Tensor:
    return _normal_cdf(x) + x * exp(x * x * -0.5) * (0.5 * _GELU)


def _normal_cdf(x: Tensor) -> Tensor:
    """The distribution function of the standard normal distribution."""
    return (erf(x * math.sqrt(0.5)) + 1) * 0.5


@composite
def relu6(x: Tensor) -> Tensor:
    """`x` limited to the range from 0 to 6.

    >>> ps.nn.functional.relu6(ps.asarray([-1.0, 9.0])).tolist()
    [0.0, 6.0]
    """
    return hardtanh(x, 0.0, 6.0)


@composite
def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """`x` where it is positive, else `x * negative_slope`.

    >>> ps.nn.functional.leaky_relu(ps.asarray([-4.0, 2.0]), 0.5).tolist()
    [-2.0, 2.0]
    """
    return where(x > 0, x, x * negative_slope)


@composite
def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """`x` where it is positive, else `x * weight`; a single weight, or one for each channel (axis 1).

    >>> ps.nn.functional.prelu(ps.asarray([-4.0, 2.0]), ps.asarray([0.5])).tolist()
    [-2.0, 2.0]
    """
    if weight.ndim > 1 or (weight.size != 1 and (x.ndim < 2 or weight.size != x.shape[1])):
        raise ValueError(f"prelu: a weight of shape {weight.shape} does not fit items of shape {x.shape}")
    if weight.size != 1:
        weight = reshape(weight, (-1, *[1] * (x.ndim - 2)))
    elif not x.ndim:
        weight = reshape(weight, ())
    return where(x > 0, x, x * weight)


@composite
def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """`x` where it is positive, else `alpha * (exp(x) - 1)`.

    >>> ps.nn.functional.elu(ps.asarray([0.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    return where(x > 0, x, expm1(_not_above_zero(x)) * alpha)


@composite
def celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """`x` where it is positive, else `alpha * (exp(x / alpha) - 1)`.

    >>> ps.nn.functional.celu(ps.asarray([0.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    return where(x > 0, x, expm1(_not_above_zero(x) / alpha) * alpha)


_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772


@composite
def selu(x: Tensor) -> Tensor:
    """`elu` scaled so that activations keep mean 0 and variance 1.

    >>> ps.nn.functional.selu(ps.asarray([0.0])).tolist()
    [0.0]
    """
    return elu(x, _SELU_ALPHA) * _SELU_SCALE


def _not_above_zero(x: Tensor) -> Tensor:
    """`x` with 0 for positive items, whose exponential is not used and could overflow."""
    return where(x > 0, 0, x)


@composite
def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + exp(beta * x)) / beta; `x` where `beta * x` is above the threshold.

    >>> round(ps.nn.functional.softplus(ps.asarray([0.0])).item(), 4)
    0.6931
    """
    smooth = with_slope(_softplus, _sigmoid, x * beta) / beta
    return where(x * beta > threshold, x, smooth)


def _softplus(x: Tensor) -> Tensor:
    return where(x > 0, x, 0) + log1p(exp(-abs_(x)))


@composite
def logsigmoid(x: Tensor) -> Tensor:
    """The logarithm of `sigmoid(x)`, finite where `sigmoid(x)` underflows.

    >>> round(ps.nn.functional.logsigmoid(ps.asarray([0.0])).item(), 4)
    -0.6931
    """
    return -with_slope(_softplus, _sigmoid, -x)


@composite
def mish(x: Tensor) -> Tensor:
    """`x * tanh(softplus(x))`.

    >>> ps.nn.functional.mish(ps.asarray([0.0])).tolist()
    [0.0]
    """
    return with_slope(lambda x: x * tanh(_softplus(x)), _mish_slope, x)


def _mish_slope(x: Tensor) -> Tensor:
    part = tanh(_softplus(x))
    return part + x * _sigmoid(x) * (1 - part * part)


@composite
def softsign(x: Tensor) -> Tensor:
    """`x / (1 + abs(x))`.

    >>> ps.nn.functional.softsign(ps.asarray([1.0])).tolist()
    [0.5]
    """
    return x / (abs_(x) + 1)


@composite
def tanhshrink(x: Tensor) -> Tensor:
    """`x - tanh(x)`.

    >>> ps.nn.functional.tanhshrink(ps.asarray([0.0])).tolist()
    [0.0]
    """
    return x - tanh(x)


@composite
def hardtanh(x: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """`x` limited to the range from `min_val` to `max_val`; at these limits the gradient is 0.

    >>> ps.nn.functional.hardtanh(ps.asarray([-3.0, 0.5])).tolist()
    [-1.0, 0.5]
    """
    if not min_val < max_val:
        raise ValueError(f"hardtanh needs min_val < max_val, and {min_val}, {max_val} were given")
    if x.dtype.kind in "iu":
        if min_val != int(min_val) or max_val != int(max_val):
            raise TypeError(f"hardtanh of {x.dtype} takes integers, and {min_val}, {max_val} were given")
        min_val, max_val = int(min_val), int(max_val)
    return where(x <= min_val, min_val, where(x >= max_val, max_val, x))


@composite
def hardsigmoid(x: Tensor) -> Tensor:
    """`relu6(x + 3) / 6`.

    >>> ps.nn.functional.hardsigmoid(ps.asarray([-3.0, 0.0])).tolist()
    [0.0, 0.5]
    """
    return relu6(x + 3) / 6


@composite
def hardswish(x: Tensor) -> Tensor:
    """`x * hardsigmoid(x)`.

    >>> ps.nn.functional.hardswish(ps.asarray([0.0, 3.0])).tolist()
    [0.0, 3.0]
    """
    return x * hardsigmoid(x)


@composite
def softshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    """`x` moved towards 0 by `lambd`; 0 where abs(x) is at most `lambd`.

    >>> ps.nn.functional.softshrink(ps.asarray([-2.0, 0.25])).tolist()
    [-1.5, 0.0]
    """
    if lambd < 0:
        raise ValueError(f"softshrink needs lambd of 0 or more, and {lambd} was given")
    return where(x > lambd, x - lambd, where(x < -lambd, x + lambd, 0))


@composite
def hardshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    """`x`; 0 where abs(x) is at most `lambd`.

    >>> ps.nn.functional.hardshrink(ps.asarray([-2.0, 0.25])).tolist()
    [-2.0, 0.0]
    """
    return where(abs_(x) > lambd, x, 0)


@composite
def threshold(x: Tensor, threshold: float, value: float) -> Tensor:
    """`x` where it is above the threshold, else `value`.

    >>> ps.nn.functional.threshold(ps.asarray([0.5, 2.0]), 1, 0).tolist()
    [0.0, 2.0]
    """
    return where(x > threshold, x, value)


@composite
@takes_dim
def glu(x: Tensor, axis: int = -1) -> Tensor:
    """The first half along an axis, times the sigmoid of the second.

    >>> ps.nn.functional.glu(ps.zeros((3, 4))).shape
    (3, 2)
    """
    (at,) = axes_of(x, axis, "glu")
    half, rest = divmod(x.shape[at], 2)
    if rest:
        raise ValueError(f"glu halves an axis, and axis {axis} of shape {x.shape} is of odd length")
    before = (slice(None),) * at
    return x[(*before, slice(0, half))] * sigmoid(x[(*before, slice(half, None))])


@composite
@takes_dim
def softmax(x: Tensor, axis: int = -1, *, dtype: DType | None = None) -> Tensor:
    """exp(x) / sum(exp(x)) along an axis; `x` is converted to `dtype` first, if that is given.

    >>> ps.nn.functional.softmax(ps.zeros((2, 4))).tolist()[0]
    [0.25, 0.25, 0.25, 0.25]
    """
    x = x if dtype is None else astype(x, dtype)
    check_floating("softmax", x)
    (at,) = axes_of(x, axis, "softmax")
    return record(graph.softmax(x._node, at), x)


@composite
@takes_dim
def log_softmax(x: Tensor, axis: int = -1, *, dtype: DType | None = None) -> Tensor:
    """The logarithm of `softmax`.

    >>> ps.nn.functional.log_softmax(ps.zeros((2, 1))).tolist()
    [[0.0], [0.0]]
    """
    x = x if dtype is None else astype(x, dtype)
    check_floating("log_softmax", x)
    (at,) = axes_of(x, axis, "log_softmax")
    if not x.shape[at]:
        return astype(x, x.dtype)
    values = wide(x)
    shifted = values - max_(values, axis=axis, keepdims=True).detach()
    return astype(shifted - log(sum_(exp(shifted), axis=axis, keepdims=True)), x.dtype)


@composite
@takes_dim
def softmin(x: Tensor, axis: int = -1, *, dtype: DType | None = None) -> Tensor:
    """`softmax(-x)`.

    >>> ps.nn.functional.softmin(ps.zeros((2, 4))).tolist()[0]
    [0.25, 0.25, 0.25, 0.25]
    """
    return softmax(-x, axis, dtype=dtype)


NAMED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": relu,
    "gelu": gelu,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "silu": silu,
    "elu": elu,
    "leaky_relu": leaky_relu,
    "mish": mish,
    "relu6": relu6,
    "selu": selu,
    "softplus": softplus,
}


def named_activation(name: str) -> Callable[[Tensor], Tensor]:
    """An activation by its name.

    >>> ps.nn.functional.named_activation("relu")(ps.asarray([-1.0])).tolist()
    [0.0]
    """
    if name not in NAMED:
        raise ValueError(f"{name!r} is no activation; there are {', '.join(NAMED)}")
    return NAMED[name]
