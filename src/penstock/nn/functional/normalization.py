"""Normalization by mean and variance."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cache

from penstock.nn.functional.common import check_floating, takes_dim, wide
from penstock.tensor.arithmetic import abs as abs_
from penstock.tensor.arithmetic import maximum, sqrt
from penstock.tensor.arithmetic import pow as pow_
from penstock.tensor.autograd import lasting_vjp
from penstock.tensor.capture import capture
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor
from penstock.tensor.info import finfo
from penstock.tensor.manipulation import astype, reshape
from penstock.tensor.recording import no_grad
from penstock.tensor.reduction import count_nonzero, mean
from penstock.tensor.reduction import max as max_
from penstock.tensor.reduction import min as min_
from penstock.tensor.reduction import sum as sum_

# Called with each running statistic that is about to change, if there is a function.
changing: ContextVar[Callable[[Tensor], None] | None] = ContextVar("changing", default=None)

Shape = int | Sequence[int]


@composite
def layer_norm(
    x: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Mean 0 and variance 1 along the last axes, whose lengths are given, then scaled and shifted.

    >>> ps.nn.functional.layer_norm(ps.ones((2, 4)), 4).tolist()[0]
    [0.0, 0.0, 0.0, 0.0]
    """
    axes = _normed_axes("layer_norm", x, normalized_shape, weight, bias)
    return _layer_norm(x, weight, bias, eps, axes)


@composite
def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, axes: Shape) -> Tensor:
    values = wide(x)
    centred = values - mean(values, axis=axes, keepdims=True)
    scaled = centred * (1 / sqrt(mean(centred * centred, axis=axes, keepdims=True) + eps))
    return astype(_affine(scaled, weight, bias), x.dtype)


@composite
def rms_norm(
    x: Tensor, normalized_shape: Shape, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Mean square 1 along the last axes, whose lengths are given, then scaled.

    The default of `eps` is the machine epsilon of the dtype of the computation.

    >>> ps.nn.functional.rms_norm(ps.zeros((2, 4)), 4).tolist()[0]
    [0.0, 0.0, 0.0, 0.0]
    """
    axes = _normed_axes("rms_norm", x, normalized_shape, weight)
    return _rms_norm(x, weight, float(finfo(wide(x).dtype).eps) if eps is None else eps, axes)


@composite
def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, axes: Shape) -> Tensor:
    values = wide(x)
    scaled = values * (1 / sqrt(mean(values * values, axis=axes, keepdims=True) + eps))
    return astype(_affine(scaled, weight, None), x.dtype)


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Mean 0 and variance 1 of each group of channels (axis 1) of an example, then scaled and shifted.

    >>> ps.nn.functional.group_norm(ps.zeros((2, 6, 4)), 3).shape
    (2, 6, 4)
    """
    check_floating("group_norm", x)
    if x.ndim < 2 or num_groups < 1 or x.shape[1] % num_groups:
        raise ValueError(f"group_norm: the channels of shape {x.shape} do not make {num_groups} groups")
    _check_channels("group_norm", x, weight, bias)
    return _group_norm(x, num_groups, weight, bias, eps)


@composite
def _group_norm(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    rows = reshape(wide(x), (x.shape[0], groups, math.prod(x.shape[1:]) // groups))
    normed = reshape(_layer_norm(rows, None, None, eps, (2,)), x.shape)
    return astype(_affine(normed, _by_channel(weight, x), _by_channel(bias, x)), x.dtype)


def instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Mean 0 and variance 1 of each channel of each example, then scaled and shifted.

    Running statistics, if given, are moved towards those of the input, or used without `use_input_stats`.

    >>> ps.nn.functional.instance_norm(ps.zeros((2, 3, 4))).shape
    (2, 3, 4)
    """
    _check_channels("instance_norm", x, running_mean, running_var, weight, bias)
    if x.ndim < 3 or (use_input_stats and math.prod(x.shape[2:]) == 1):
        raise ValueError(f"instance_norm needs several items in each channel, and the shape is {x.shape}")
    if not use_input_stats:
        if running_mean is None or running_var is None:
            raise ValueError("instance_norm needs running statistics, or those of its input")
        return _normed_by(x, running_mean, running_var, weight, bias, eps)
    if running_mean is not None and running_var is not None:
        with no_grad():
            centre, variance = _statistics(x, tuple(range(2, x.ndim)))
            count = math.prod(x.shape[2:])
            _move(running_mean, mean(centre, axis=0), momentum)
            _move(running_var, mean(variance, axis=0) * (count / (count - 1)), momentum)
    return _group_norm(x, x.shape[1], weight, bias, eps)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Mean 0 and variance 1 of each channel (axis 1) over all examples, then scaled and shifted.

    Training uses the statistics of the batch, and moves running statistics towards them; otherwise the
    running statistics are used.

    >>> ps.nn.functional.batch_norm(ps.ones((2, 3)), ps.zeros(3), ps.ones(3), training=True).tolist()[0]
    [0.0, 0.0, 0.0]
    """
    _check_channels("batch_norm", x, running_mean, running_var, weight, bias)
    if not training:
        if running_mean is None or running_var is None:
            raise ValueError("batch_norm needs running statistics where it is not training")
        return _normed_by(x, running_mean, running_var, weight, bias, eps)
    count = x.size // max(1, x.shape[1])
    if count < 2:
        raise ValueError(f"batch_norm needs several items of each channel in training, not shape {x.shape}")
    fixed = x.detach()
    centre, variance = _statistics(fixed, _but_channels(x))
    if running_mean is not None and running_var is not None:
        with no_grad():
            _move(running_mean, centre, momentum)
            _move(running_var, variance * (count / (count - 1)), momentum)
    parameters = [parameter for parameter in (weight, bias) if parameter is not None]
    scales, shifts = (None if parameter is None else parameter.detach() for parameter in (weight, bias))
    value = _normed_by(fixed, centre, variance, scales, shifts, eps)
    return lasting_vjp(value, [x, *parameters], _batch_norm_rule(weight is not None, bias is not None, eps))


def _but_channels(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


@cache
def _batch_norm_rule(weighted: bool, biased: bool, eps: float) -> Callable[..., list[Tensor]]:
    """The gradient by its formula: two sums and a map, where that of the operations takes five sums."""

    def rule(g: Tensor, _: Tensor, x: Tensor, *parameters: Tensor) -> list[Tensor]:
        axes, count = _but_channels(x), x.size // x.shape[1]
        centre, variance = _statistics(x, axes)
        scale = _of_channels(1 / sqrt(variance + eps), x)
        slope, normed = wide(g), (wide(x) - _of_channels(centre, x)) * scale
        by_bias, by_weight = sum_(slope, axis=axes), sum_(slope * normed, axis=axes)
        means = (_of_channels(part * (1 / count), x) for part in (by_bias, by_weight))
        by_normed = slope - next(means) - normed * next(means)
        factor = scale * _of_channels(wide(parameters[0]), x) if weighted else scale
        result = [astype(by_normed * factor, x.dtype)]
        result += [astype(by_weight, parameters[0].dtype)] if weighted else []
        return result + ([astype(by_bias, parameters[-1].dtype)] if biased else [])

    return rule


def _statistics(x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The mean and the variance over axes."""
    values = wide(x)
    centre = mean(values, axis=axes, keepdims=True)
    centred = values - centre
    kept = [length for axis, length in enumerate(x.shape) if axis not in axes]
    return reshape(centre, kept), mean(centred * centred, axis=axes)


@composite
def _normed_by(
    x: Tensor, centre: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    scale = 1 / sqrt(wide(variance) + eps)
    normed = (wide(x) - _of_channels(wide(centre), x)) * _of_channels(scale, x)
    return astype(_affine(normed, _by_channel(weight, x), _by_channel(bias, x)), x.dtype)


def _move(running: Tensor, new: Tensor, momentum: float | Tensor) -> None:
    """Move a running statistic towards a new value."""
    replace_running(running, running * (1 - momentum) + new.detach() * momentum)


def replace_running(running: Tensor, value: Tensor) -> None:
    """Give a buffer another value, which is computed in the next run of the device."""
    if (note := changing.get()) is not None:
        note(running)
    running._rebind(astype(value, running.dtype))
    if capture.get() is None:  # a pending value would keep the history of the batch, and recompute it
        running.device.updated[id(running)] = weakref.ref(running._node)


@takes_dim
def normalize(x: Tensor, p: float = 2.0, axis: int = 1, eps: float = 1e-12) -> Tensor:
    """`x` divided by its p-norm along an axis, or by `eps` where that is larger.

    The norm for p = 0 is the number of items that are not 0.

    >>> ps.nn.functional.normalize(ps.asarray([[3.0, 0.0]])).tolist()
    [[1.0, 0.0]]
    """
    check_floating("normalize", x)
    if not x.ndim:  # as in PyTorch, a tensor without axes counts as a vector
        return reshape(_normalized(reshape(x, (1,)), p, axis, eps), ())
    return _normalized(x, p, axis, eps)


@composite
def _normalized(x: Tensor, p: float, axis: int, eps: float) -> Tensor:
    values = wide(x)
    if p == 2:
        length = sqrt(maximum(sum_(values * values, axis=axis, keepdims=True), eps * eps))
    elif p == math.inf:
        length = maximum(max_(abs_(values), axis=axis, keepdims=True), eps)
    elif p == -math.inf:
        length = maximum(min_(abs_(values), axis=axis, keepdims=True), eps)
    elif p == 0:
        length = maximum(astype(count_nonzero(values, axis=axis, keepdims=True), values.dtype), eps)
    else:
        length = maximum(pow_(sum_(pow_(abs_(values), p), axis=axis, keepdims=True), 1 / p), eps)
    return astype(values / length, x.dtype)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _by_channel(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    return None if parameter is None else _of_channels(parameter, x)


def _of_channels(values: Tensor, x: Tensor) -> Tensor:
    """A value for each channel, with axes of length 1 to broadcast over the items."""
    return reshape(values, (-1, *[1] * (x.ndim - 2)))


def _normed_axes(name: str, x: Tensor, shape: Shape, *parameters: Tensor | None) -> tuple[int, ...]:
    """The last axes, which a norm is computed over."""
    check_floating(name, x)
    if isinstance(shape, Tensor):
        raise TypeError(
            f"{name}(x, normalized_shape, weight, ...) takes the lengths of the last axes first, "
            f"such as {x.shape[-1:]}, and a tensor was given"
        )
    for parameter in parameters:
        if parameter is not None and not isinstance(parameter, Tensor):
            raise TypeError(f"{name}: weight and bias are tensors, and {parameter!r} was given")
    normed = (shape,) if isinstance(shape, int) else tuple(shape)
    if not normed or x.shape[-len(normed) :] != normed:
        raise ValueError(f"{name}: normalized_shape {normed} does not fit items of shape {x.shape}")
    for parameter in parameters:
        if parameter is not None and parameter.shape != normed:
            raise ValueError(
                f"{name}: parameters of shape {parameter.shape} do not fit normalized_shape {normed}"
            )
    return tuple(range(-len(normed), 0))


def _check_channels(name: str, x: Tensor, *parameters: Tensor | None) -> None:
    check_floating(name, x)
    if x.ndim < 2:
        raise ValueError(f"{name} takes (batch, channels, ...), and the shape {x.shape} was given")
    for parameter in parameters:
        if parameter is not None and parameter.shape != x.shape[1:2]:
            raise ValueError(
                f"{name}: parameters of shape {parameter.shape} do not fit the channels of shape {x.shape}"
            )
