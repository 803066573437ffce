"""Cross-entropy: the negative logarithm of the probability of the target class."""

from __future__ import annotations

from typing import Any

from penstock.graph import cross_entropy as graph_losses
from penstock.nn.functional.activations import log_softmax
from penstock.nn.functional.common import wide
from penstock.nn.functional.losses import reduced
from penstock.tensor.arithmetic import where
from penstock.tensor.autograd import lasting_vjp
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor, record
from penstock.tensor.dtypes import float32, promote
from penstock.tensor.indexing import assume_known, in_range, least_known
from penstock.tensor.info import iinfo
from penstock.tensor.manipulation import (
    astype,
    expand_dims,
    moveaxis,
    reshape,
    squeeze,
    take,
    take_along_axis,
)
from penstock.tensor.operands import device_of
from penstock.tensor.reduction import sum as sum_


def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """-log softmax(x)[target], by default the mean over the targets that are not `ignore_index`.

    The classes are along axis 1, as in PyTorch: (rows, classes), (batch, classes, ...), or (classes). Other
    targets out of range raise. Targets may be probabilities, in the shape of `x`. With a weight for each
    class, the mean is weighted by the classes of the targets. float16 and bfloat16 give float32.

    >>> round(ps.nn.functional.cross_entropy(ps.zeros((3, 2)), ps.asarray([0, 1, 1])).item(), 4)
    0.6931
    """
    _check_smoothing(label_smoothing)
    if _are_probabilities("cross_entropy", x, target):
        if ignore_index >= 0:
            raise ValueError(f"cross_entropy: ignore_index={ignore_index} is for classes, not probabilities")
        logits, probabilities = _classes_last(x), _classes_last(target)
        return _of_probabilities(logits, probabilities, label_smoothing, weight, reduction)
    _check_classes("cross_entropy", x, target)
    of_classes = _of_known_classes if _are_known(x, target) else _of_classes
    return of_classes(x, target, weight, ignore_index, reduction, label_smoothing)


def _of_classes(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    logits = _classes_last(x)
    if weight is not None:
        logs = log_softmax(wide(logits))
        return _of_logs("cross_entropy", logs, target, ignore_index, label_smoothing, weight, reduction)
    target, shape = reshape(target, (-1,)), target.shape
    kept = _kept(target, ignore_index)
    labels = _labels(target, kept, logits.shape, "cross_entropy")
    rows = reshape(logits, (-1, logits.shape[-1]))
    known = None if kept is None else kept._node
    losses = record(graph_losses.row_losses(rows._node, labels._node, known, label_smoothing), rows)
    if reduction == "mean":
        return sum_(losses) / _count(target, kept)
    return reduced(reshape(losses, shape), reduction)


@composite
def _of_known_classes(x: Tensor, target: Tensor, *settings: Any) -> Tensor:
    assume_known(target, _classes(x))
    return _of_classes(x, target, *settings)


def nll_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """-x[target], with the classes along axis 1: `cross_entropy`, if `x` is a `log_softmax`.

    >>> ps.nn.functional.nll_loss(ps.asarray([[-1.0, -2.0]]), ps.asarray([1])).item()
    2.0
    """
    _check_classes("nll_loss", x, target)
    of_classes = _nll_of_known_classes if _are_known(x, target) else _nll_of_classes
    return of_classes(x, target, weight, ignore_index, reduction)


def _nll_of_classes(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str
) -> Tensor:
    return _of_logs("nll_loss", _classes_last(x), target, ignore_index, 0.0, weight, reduction)


@composite
def _nll_of_known_classes(x: Tensor, target: Tensor, *settings: Any) -> Tensor:
    assume_known(target, _classes(x))
    return _nll_of_classes(x, target, *settings)


def linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """`cross_entropy(x @ linear_weight.T, target)` of rows; the logits are never in memory as a whole.

    >>> x, weight, target = ps.zeros((3, 8)), ps.zeros((2, 8)), ps.asarray([0, 1, 1])
    >>> round(ps.nn.functional.linear_cross_entropy(x, weight, target).item(), 4)
    0.6931
    """
    _check_smoothing(label_smoothing)
    _check_linear(x, linear_weight)
    _check_integers("linear_cross_entropy", target)
    if x.ndim > 2:
        rows = f"x.reshape(-1, {x.shape[-1]}) and target.reshape(-1)"
        raise ValueError(f"linear_cross_entropy takes rows; flatten the shape {x.shape}: {rows}")
    if target.shape != x.shape[:-1]:
        raise ValueError(f"linear_cross_entropy: shape {x.shape} and targets of shape {target.shape}")
    weight = linear_weight
    items, target = reshape(x, (-1, x.shape[-1])), reshape(target, (-1,))
    kept = _kept(target, ignore_index)
    labels = _labels(target, kept, (*x.shape[:-1], weight.shape[0]), "linear_cross_entropy")
    if kept is not None:
        # The weight's gradient is a sum over all rows, in which a NaN in an ignored row would give NaN (0 *
        # NaN). The gradient of ignored rows themselves is 0 already.
        masked = where(reshape(kept, (-1, 1)), items.detach(), 0)
        items = lasting_vjp(masked, [items], _unchanged)
    dtype = promote(items.dtype, weight.dtype)
    items, weight = astype(items, dtype), astype(weight, dtype)
    known = None if kept is None else kept._node
    total = graph_losses.linear_cross_entropy(items._node, weight._node, labels._node, known, label_smoothing)
    return record(total, items, weight) / _count(target, kept)


def _of_logs(
    name: str,
    logs: Tensor,
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    weight: Tensor | None,
    reduction: str,
) -> Tensor:
    """The losses from log-probabilities, weighted by class."""
    classes = logs.shape[-1]
    _check_weight(name, weight, classes)
    kept = _kept(target, ignore_index)
    labels = _labels(target, kept, logs.shape, name)
    losses = -squeeze(take_along_axis(logs, expand_dims(labels, axis=-1), axis=-1), -1)
    weights = None if weight is None else take(weight, labels, axis=0)
    losses = losses if weights is None else losses * weights
    if smoothing:
        uniform = -sum_(logs if weight is None else logs * weight, axis=-1)
        losses = losses * (1 - smoothing) + uniform * (smoothing / classes)
    losses = losses if kept is None else where(kept, losses, 0.0)
    if reduction != "mean":
        return reduced(losses, reduction)
    if weights is None:
        return sum_(losses) / _count(target, kept)
    return sum_(losses) / sum_(weights if kept is None else where(kept, weights, 0.0))


def _of_probabilities(
    logits: Tensor, target: Tensor, smoothing: float, weight: Tensor | None, reduction: str
) -> Tensor:
    classes = logits.shape[-1]
    _check_weight("cross_entropy", weight, classes)
    wanted = target * (1 - smoothing) + smoothing / classes if smoothing else target
    logs = log_softmax(wide(logits))
    losses = -sum_(logs * (wanted if weight is None else wanted * weight), axis=-1)
    return reduced(losses, reduction)


def _unchanged(g: Tensor, *_: Tensor) -> list[Tensor]:
    return [g]


def _classes_last(x: Tensor) -> Tensor:
    return x if x.ndim < 3 else moveaxis(x, 1, -1)


def _classes(x: Tensor) -> int:
    return x.shape[1 if x.ndim > 1 else 0]


def _are_known(x: Tensor, target: Tensor) -> bool:
    """Whether all targets are known to be classes."""
    least = least_known(target, _classes(x))
    return least is not None and least >= 0


def _check_classes(name: str, x: Tensor, target: Tensor) -> None:
    """Raise unless targets are integers in the shape of `x` without axis 1, the classes."""
    _check_integers(name, target)
    if not x.ndim:
        raise ValueError(f"{name} needs an axis of classes, and the shape is {x.shape}")
    wanted = x.shape[:1] + x.shape[2:] if x.ndim > 1 else ()
    if target.shape == wanted:
        return
    message = f"{name}: classes are along axis 1 of shape {x.shape}, and targets of shape {target.shape}"
    if x.ndim > 2 and target.shape == x.shape[:-1]:
        message += (
            f" fit classes along axis {x.ndim - 1}; give ps.moveaxis(x, -1, 1), or flatten both to rows: "
        )
        raise ValueError(message + f"x.reshape(-1, {x.shape[-1]}) and target.reshape(-1)")
    raise ValueError(f"{message} were given, not {wanted}")


def _are_probabilities(name: str, x: Tensor, target: Tensor) -> bool:
    if not isinstance(target, Tensor):
        raise TypeError(f"{name} takes tensors, and {type(target).__name__} was given as the target")
    return target.dtype.kind == "f" and target.shape == x.shape and x.ndim > 0


def _check_integers(name: str, target: Tensor) -> None:
    if not isinstance(target, Tensor) or target._node.dtype.kind not in "iu":
        given = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise TypeError(f"{name}: targets are integers, and {given} was given")


def _check_smoothing(smoothing: float) -> None:
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing is from 0 to 1, and {smoothing} was given")


def _check_weight(name: str, weight: Tensor | None, classes: int) -> None:
    if weight is None:
        return
    if not isinstance(weight, Tensor):
        raise TypeError(f"{name}: weight is a tensor of {classes} items, and {weight!r} was given")
    if weight.shape != (classes,):
        raise ValueError(f"{name}: {classes} classes and weights of shape {weight.shape}")


def _check_linear(x: Tensor, weight: Tensor) -> None:
    device_of("linear_cross_entropy", x, weight)
    if not x.ndim or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear_cross_entropy: shapes {x.shape} and {weight.shape} do not fit together")
    for given in (x, weight):
        if given.dtype.kind != "f":
            raise TypeError(f"linear_cross_entropy does not take {given.dtype}")


def _kept(target: Tensor, ignore_index: int) -> Tensor | None:
    """Which targets are not ignored; None if the dtype cannot hold `ignore_index`, so that all count."""
    limits = iinfo(target.dtype)
    return target != ignore_index if limits.min <= ignore_index <= limits.max else None


def _labels(target: Tensor, kept: Tensor | None, shape: tuple[int, ...], operation: str) -> Tensor:
    """The targets, with class 0 for ignored targets; other targets out of range raise."""
    labels = target if kept is None else where(kept, target, 0)
    return record(in_range(labels._node, shape, len(shape) - 1, operation, target.device), labels)


def _count(target: Tensor, kept: Tensor | None) -> Tensor | int:
    """How many targets are not ignored."""
    return target.size if kept is None else sum_(astype(kept, float32))
