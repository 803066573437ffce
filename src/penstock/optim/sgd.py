"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.optim.groups import Settings
from penstock.optim.optimizer import Optimizer, Parameters
from penstock.tensor.arithmetic import where
from penstock.tensor.core import Tensor


class SGD(Optimizer):
    """Stochastic gradient descent, with optional momentum.

    >>> w = ps.nn.Parameter(ps.ones(2))
    >>> optimizer = ps.optim.SGD([w], lr=0.25)
    >>> (w * w).sum().backward()
    >>> optimizer.step()
    >>> (w < 1).tolist()
    [True, True]
    """

    elementwise = True

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        clip_norm: float | None = None,
    ) -> None:
        settings = {"momentum": momentum, "weight_decay": weight_decay, "dampening": dampening}
        super().__init__(parameters, lr, clip_norm, **settings, nesterov=nesterov)
        if self._any("momentum"):
            self._add_state("velocity")

    def _check_settings(self, settings: Settings) -> None:
        super()._check_settings(settings)
        if settings["nesterov"] and (not settings["momentum"] or settings["dampening"]):
            raise ValueError("nesterov needs a momentum, and no dampening")
        if settings["dampening"]:
            self._first_counts = (("steps", 0.0),)

    def _next_counts(self, at: int, counts: Sequence[Tensor]) -> Sequence[Tensor]:
        return [counts[0] + 1]

    def _update(self, at: int, value: Tensor, grad: Tensor) -> dict[str, Tensor]:
        grad = self._with_decay(at, value, grad)
        settings, rate = self._of(at), self._rate(at)
        if not settings["momentum"]:
            return {"value": value - grad * rate}
        momentum, dampening = self._setting(at, "momentum"), settings["dampening"]
        kept = self._state["velocity"][at] * momentum
        if dampening:  # the first gradient is not dampened
            velocity = where(self._counts_of(at)[0] == 1, grad, kept + grad * (1 - dampening))
        else:
            velocity = kept + grad
        step = grad + velocity * momentum if settings["nesterov"] else velocity
        return {"velocity": velocity, "value": value - step * rate}
