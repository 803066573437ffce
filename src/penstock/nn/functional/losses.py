"""Loss functions of predictions and targets."""

from __future__ import annotations

from penstock.nn.functional.activations import logsigmoid
from penstock.nn.functional.common import takes_dim, wide
from penstock.tensor.arithmetic import abs as abs_
from penstock.tensor.arithmetic import equal, exp, log, log1p, maximum, sqrt, where
from penstock.tensor.autograd import lasting_vjp
from penstock.tensor.broadcasting import broadcast, common_shape
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor
from penstock.tensor.reduction import mean
from penstock.tensor.reduction import sum as sum_


def reduced(losses: Tensor, reduction: str) -> Tensor:
    """The mean or the sum of losses, or the losses for 'none'."""
    if reduction == "mean":
        return mean(losses)
    if reduction == "sum":
        return sum_(losses)
    if reduction != "none":
        raise ValueError(f"a reduction is 'mean', 'sum' or 'none', and {reduction!r} was given")
    return losses


@composite
def mse_loss(x: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """The squared differences.

    >>> ps.nn.functional.mse_loss(ps.asarray([1.0, 3.0]), ps.asarray([1.0, 1.0])).item()
    2.0
    """
    _check_shapes("mse_loss", x, target)
    difference = x - target
    return reduced(difference * difference, reduction)


@composite
def l1_loss(x: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """The absolute differences.

    >>> ps.nn.functional.l1_loss(ps.asarray([1.0, 3.0]), ps.asarray([1.0, 1.0])).item()
    1.0
    """
    _check_shapes("l1_loss", x, target)
    return reduced(abs_(x - target), reduction)


@composite
def smooth_l1_loss(x: Tensor, target: Tensor, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """Absolute differences less beta / 2; below `beta`, half their squares divided by `beta`.

    >>> ps.nn.functional.smooth_l1_loss(ps.asarray([1.0, 3.0]), ps.asarray([1.0, 1.0])).item()
    0.75
    """
    _check_shapes("smooth_l1_loss", x, target)
    if beta < 0:
        raise ValueError(f"beta is 0 or more, and {beta} was given")
    size = abs_(x - target)
    return reduced(where(size < beta, size * size * (0.5 / (beta or 1.0)), size - 0.5 * beta), reduction)


@composite
def huber_loss(x: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0) -> Tensor:
    """Half the squared differences up to `delta`, and linear above it.

    >>> ps.nn.functional.huber_loss(ps.asarray([1.0, 3.0]), ps.asarray([1.0, 1.0])).item()
    0.75
    """
    _check_shapes("huber_loss", x, target)
    if delta <= 0:
        raise ValueError(f"delta is above 0, and {delta} was given")
    size = abs_(x - target)
    return reduced(where(size <= delta, size * size * 0.5, (size - 0.5 * delta) * delta), reduction)


# Losses of probabilities

_LEAST_LOG = -100.0  # of probability 0
_LEAST_SPREAD = 1e-12


@composite
def binary_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """-(target * log(x) + (1 - target) * log(1 - x)) of probabilities; logarithms are at least -100.

    >>> round(ps.nn.functional.binary_cross_entropy(ps.asarray([0.5]), ps.asarray([1.0])).item(), 4)
    0.6931
    """
    _check_shapes("binary_cross_entropy", x, target)
    value = target * _log_of(x) + (1 - target) * _log_not(x)
    losses = lasting_vjp(-value.detach(), [x, target], _probability_gradients)
    return reduced(_weighted("binary_cross_entropy", losses, weight), reduction)


def _log_not(x: Tensor) -> Tensor:
    """log(1 - x)."""
    return maximum(log1p(-x), _LEAST_LOG)


def _log_of(x: Tensor) -> Tensor:
    return maximum(log(x), _LEAST_LOG)


def _probability_gradients(g: Tensor, _: Tensor, x: Tensor, target: Tensor) -> list[Tensor]:
    return [g * (x - target) / maximum(x * (1 - x), _LEAST_SPREAD), g * (_log_not(x) - _log_of(x))]


@composite
def binary_cross_entropy_with_logits(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """`binary_cross_entropy(sigmoid(x), target)`, accurate for any `x`; `pos_weight`: of positive targets.

    >>> x, target = ps.asarray([0.0]), ps.asarray([1.0])
    >>> round(ps.nn.functional.binary_cross_entropy_with_logits(x, target).item(), 4)
    0.6931
    """
    _check_shapes("binary_cross_entropy_with_logits", x, target)
    less = logsigmoid(x)
    if pos_weight is not None:
        less = _weighted("binary_cross_entropy_with_logits", less, (pos_weight - 1) * target + 1)
    losses = (1 - target) * x - less
    return reduced(_weighted("binary_cross_entropy_with_logits", losses, weight), reduction)


@composite
def kl_div(x: Tensor, target: Tensor, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """The Kullback-Leibler divergence of probabilities `target` from those with logarithms `x`.

    'batchmean', the sum divided by the length of the first axis, is the mathematical definition.

    >>> p = ps.asarray([0.5, 0.5])
    >>> ps.nn.functional.kl_div(ps.log(p), p, reduction="sum").item()
    0.0
    """
    if common_shape(x.shape, target.shape) != x.shape:
        raise ValueError(f"kl_div: shapes {x.shape} and {target.shape} do not fit together")
    if log_target:
        losses = exp(target) * (target - x)
    else:
        nothing = equal(target, 0)
        losses = where(nothing, 0.0, target * (log(where(nothing, 1.0, target)) - x))
    if reduction == "batchmean":
        return sum_(losses) / (x.shape[0] if x.ndim else 1)
    return reduced(losses, reduction)


# Losses of directions


@composite
@takes_dim
def cosine_similarity(x1: Tensor, x2: Tensor, axis: int = 1, eps: float = 1e-8) -> Tensor:
    """The cosine of the angle between vectors along an axis.

    >>> ps.nn.functional.cosine_similarity(ps.asarray([[1.0, 0.0]]), ps.asarray([[0.0, 1.0]])).tolist()
    [0.0]
    """
    shape = common_shape(x1.shape, x2.shape)  # first, since the axis counts in the common shape
    first, second = broadcast(wide(x1), shape), broadcast(wide(x2), shape)
    product = sum_(first * second, axis=axis)
    lengths = sum_(first * first, axis=axis), sum_(second * second, axis=axis)
    return product / (sqrt(maximum(lengths[0], eps * eps)) * sqrt(maximum(lengths[1], eps * eps)))


@composite
def cosine_embedding_loss(
    x1: Tensor, x2: Tensor, target: Tensor, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """1 - cosine where `target` is 1; max(0, cosine - margin) where it is -1.

    >>> x1, x2 = ps.asarray([[1.0, 0.0]]), ps.asarray([[0.0, 1.0]])
    >>> ps.nn.functional.cosine_embedding_loss(x1, x2, ps.asarray([1])).item()
    1.0
    """
    _check_shapes("cosine_embedding_loss", x1, x2)
    cosine = cosine_similarity(x1, x2, -1)
    if target.shape != cosine.shape:
        raise ValueError(f"cosine_embedding_loss: {cosine.shape} pairs and targets of shape {target.shape}")
    apart = where(cosine > margin, cosine - margin, 0.0)
    return reduced(where(equal(target, 1), 1 - cosine, apart), reduction)


def _weighted(name: str, losses: Tensor, weight: Tensor | None) -> Tensor:
    """Losses times weights that broadcast to their shape."""
    if weight is not None and common_shape(losses.shape, weight.shape) != losses.shape:
        raise ValueError(f"{name}: weights of shape {weight.shape} for losses of shape {losses.shape}")
    return losses if weight is None else losses * weight


def _check_shapes(name: str, x: Tensor, target: Tensor) -> None:
    if x.shape != target.shape:
        raise ValueError(f"{name}: shapes {x.shape} and {target.shape} differ")
