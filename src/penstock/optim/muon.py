"""Muon: orthogonalized momentum of matrices."""

from __future__ import annotations

import math

from penstock.optim.groups import Settings
from penstock.optim.optimizer import Optimizer, Parameters
from penstock.tensor.arithmetic import maximum, sqrt
from penstock.tensor.core import Tensor
from penstock.tensor.linear import matmul
from penstock.tensor.reduction import sum as sum_

_COEFFICIENTS = (3.4445, -4.775, 2.0315)  # of the Newton-Schulz iteration
_ITERATIONS = 5


class Muon(Optimizer):
    """For matrices only: orthogonalized momentum, so that a step has about the same size in all directions.

    `adjust_lr_fn` scales the rate: "original" by the shape of the matrix, "match_rms_adamw" so that rates of
    AdamW fit. The Newton-Schulz iteration runs in float32.

    >>> w = ps.nn.Parameter(ps.eye(2))
    >>> optimizer = ps.optim.Muon([w], lr=0.1)
    >>> w.sum().backward()
    >>> optimizer.step()
    >>> w.shape
    (2, 2)
    """

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr_fn: str = "original",
        clip_norm: float | None = None,
    ) -> None:
        settings = {"weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__(parameters, lr, clip_norm, **settings, adjust_lr_fn=adjust_lr_fn)
        for tensor in self.parameters:
            if tensor.ndim != 2:
                raise ValueError(f"Muon is for matrices, and a parameter of shape {tensor.shape} was given")
        self._add_state("velocity")

    def _check_settings(self, settings: Settings) -> None:
        super()._check_settings(settings)
        if settings["adjust_lr_fn"] not in ("original", "match_rms_adamw"):
            given = settings["adjust_lr_fn"]
            raise ValueError(f"adjust_lr_fn is 'original' or 'match_rms_adamw', and {given!r} was given")

    def _update(self, at: int, value: Tensor, grad: Tensor) -> dict[str, Tensor]:
        settings, momentum = self._of(at), self._setting(at, "momentum")
        velocity = self._state["velocity"][at] * momentum + grad * (1 - momentum)
        step = grad * (1 - momentum) + velocity * momentum if settings["nesterov"] else velocity
        rows, columns = value.shape
        if settings["adjust_lr_fn"] == "original":
            size = math.sqrt(max(1, rows / columns))
        else:
            size = 0.2 * math.sqrt(max(rows, columns))
        changed = self._decayed(at, value) - _orthogonal(step) * (self._rate(at) * size)
        return {"velocity": velocity, "value": changed}


def _orthogonal(x: Tensor) -> Tensor:
    """A matrix whose singular values are all about 1, with the same singular vectors."""
    if x.shape[0] > x.shape[1]:
        return _orthogonal(x.T).T
    a, b, c = _COEFFICIENTS
    x = x / maximum(sqrt(sum_(x * x)), 1e-7)
    for _ in range(_ITERATIONS):
        square = matmul(x, x.T)
        x = x * a + matmul(square * b + matmul(square, square) * c, x)
    return x
