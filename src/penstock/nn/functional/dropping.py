"""Dropout of items, or of whole channels, in training."""

from __future__ import annotations

import math

from penstock.tensor import random
from penstock.tensor.arithmetic import where
from penstock.tensor.core import Tensor
from penstock.tensor.creation import zeros_like
from penstock.tensor.dtypes import bool_


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Set items to 0 with probability `p`, and scale the others by 1 / (1 - p).

    >>> ps.nn.functional.dropout(ps.ones(3), 0.5, training=False).tolist()
    [1.0, 1.0, 1.0]
    """
    return _dropped(x, p, training, x.shape)


def dropout1d(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Dropout of whole channels of (batch, channels, length), or without the batch.

    >>> ps.nn.functional.dropout1d(ps.ones((2, 3, 4))).shape
    (2, 3, 4)
    """
    return _dropped_channels("dropout1d", x, p, training, 1)


def dropout2d(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Dropout of whole channels of (batch, channels, height, width), or without the batch.

    >>> ps.nn.functional.dropout2d(ps.ones((2, 3, 4, 4))).shape
    (2, 3, 4, 4)
    """
    return _dropped_channels("dropout2d", x, p, training, 2)


def dropout3d(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Dropout of whole channels of (batch, channels, depth, height, width), or without the batch.

    >>> ps.nn.functional.dropout3d(ps.ones((2, 3, 2, 2, 2))).shape
    (2, 3, 2, 2, 2)
    """
    return _dropped_channels("dropout3d", x, p, training, 3)


_ALPHA = -1.7580993408473766  # the limit of selu at minus infinity


def alpha_dropout(x: Tensor, p: float = 0.5, training: bool = False) -> Tensor:
    """Set items to the lower limit of selu, and scale all so that mean and variance stay the same.

    >>> ps.nn.functional.alpha_dropout(ps.ones((2, 3))).shape
    (2, 3)
    """
    check_probability(p)
    if not training or p == 0:
        return x
    if p == 1:
        return _nothing_of(x)
    keep = random.bernoulli(1 - p, x.shape, x.device)
    scale = 1 / math.sqrt((1 - p) * (1 + p * _ALPHA**2))
    return where(keep, x, _ALPHA) * scale - scale * _ALPHA * p


def _nothing_of(x: Tensor) -> Tensor:
    """Zeros that are a function of `x`, so that its gradient is zeros, too."""
    return where(zeros_like(x, dtype=bool_), x, zeros_like(x))


def check_probability(p: float) -> None:
    """Raise unless a probability is from 0 to 1."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout needs a probability from 0 to 1, and {p} was given")


def _dropped_channels(name: str, x: Tensor, p: float, training: bool, axes: int) -> Tensor:
    if x.ndim not in (axes + 1, axes + 2):
        raise ValueError(f"{name} takes {axes + 1} or {axes + 2} axes, and the shape {x.shape} was given")
    return _dropped(x, p, training, (*x.shape[:-axes], *[1] * axes))


def _dropped(x: Tensor, p: float, training: bool, shape: tuple[int, ...]) -> Tensor:
    check_probability(p)
    if not training or p == 0:
        return x
    if p == 1:
        return _nothing_of(x)
    keep = random.bernoulli(1 - p, shape, x.device)
    return where(keep, x * (1 / (1 - p)), zeros_like(x))
