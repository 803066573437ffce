"""Dropout as modules, active in training only."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.nn.functional.dropping import check_probability
from penstock.nn.module import Module
from penstock.tensor.core import Tensor


class Dropout(Module):
    """In training, sets items to 0 with probability `p`, and scales the others by 1 / (1 - p).

    >>> ps.nn.Dropout(0.5).eval()(ps.ones(3)).tolist()
    [1.0, 1.0, 1.0]
    """

    _function: ClassVar[Callable[..., Tensor]] = staticmethod(F.dropout)

    def __init__(self, p: float = 0.5) -> None:
        check_probability(p)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """`x` with dropout."""
        return type(self)._function(x, self.p, self.training)

    def extra_repr(self) -> str:
        """Its probability."""
        return f"p={self.p}"


class Dropout1d(Dropout):
    """Sets whole channels of (batch, channels, length) to 0 in training.

    >>> ps.nn.Dropout1d()(ps.ones((2, 3, 4))).shape
    (2, 3, 4)
    """

    _function = staticmethod(F.dropout1d)


class Dropout2d(Dropout):
    """Sets whole channels of (batch, channels, height, width) to 0 in training.

    >>> ps.nn.Dropout2d()(ps.ones((2, 3, 4, 4))).shape
    (2, 3, 4, 4)
    """

    _function = staticmethod(F.dropout2d)


class Dropout3d(Dropout):
    """Sets whole channels of (batch, channels, depth, height, width) to 0 in training.

    >>> ps.nn.Dropout3d()(ps.ones((2, 3, 2, 2, 2))).shape
    (2, 3, 2, 2, 2)
    """

    _function = staticmethod(F.dropout3d)


class AlphaDropout(Dropout):
    """Dropout for networks with `SELU`: it keeps mean and variance.

    >>> ps.nn.AlphaDropout()(ps.ones((2, 3))).shape
    (2, 3)
    """

    _function = staticmethod(F.alpha_dropout)
