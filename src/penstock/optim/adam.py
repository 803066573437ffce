"""Adam and its variants: updates by the first two moments of the gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.optim.optimizer import Optimizer, Parameters
from penstock.tensor.arithmetic import abs as abs_
from penstock.tensor.arithmetic import exp, expm1, log, maximum, sign, sqrt, where
from penstock.tensor.arithmetic import round as round_
from penstock.tensor.core import Tensor
from penstock.tensor.reduction import sum as sum_

Betas = tuple[float, float]


class _Moments(Optimizer):
    """The base of Adam's variants: moments of the gradients, and the powers of the betas.

    The powers correct the moments for their start at 0.
    """

    elementwise = True

    _first_counts: tuple[tuple[str, float], ...] = (("power1", 1.0), ("power2", 1.0))
    _counted_by: tuple[str, ...] = ("beta1", "beta2")

    def __init__(
        self,
        parameters: Parameters,
        lr: float,
        betas: Betas,
        eps: float,
        weight_decay: float,
        clip_norm: float | None,
        **more: float | bool,
    ) -> None:
        settings = {"weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(parameters, lr, clip_norm, **settings, **more)
        self._add_state("mean")
        self._add_state("square")

    def _next_counts(self, at: int, counts: Sequence[Tensor]) -> Sequence[Tensor]:
        first, second = self._setting(at, "beta1"), self._of(at)["beta2"]
        square = counts[1] * second
        if not isinstance(first, Tensor) or not second:
            return [counts[0] * first, square]
        # A scheduler varies the first, whose present value counts as if it had always been this one, as in
        # PyTorch. The power of the other tells how many steps there were, while those of either are not 0.
        return [first ** round_(log(square) / math.log(second)), square]

    def _moments(self, at: int, grad: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self._setting(at, "beta1"), self._setting(at, "beta2")
        mean = self._state["mean"][at] * first + grad * (1 - first)
        return mean, self._state["square"][at] * second + grad * grad * (1 - second)


class Adam(_Moments):
    """Adam: the mean gradient divided by the root of the mean square.

    With `amsgrad`, by the root of the largest mean square so far.

    >>> w = ps.nn.Parameter(ps.ones(2))
    >>> optimizer = ps.optim.Adam([w], lr=0.1)
    >>> (w * w).sum().backward()
    >>> optimizer.step()
    >>> (w < 1).tolist()
    [True, True]
    """

    _decoupled = False

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        clip_norm: float | None = None,
    ) -> None:
        super().__init__(parameters, lr, betas, eps, weight_decay, clip_norm, amsgrad=amsgrad)
        if self._any("amsgrad"):
            self._add_state("largest")

    def _update(self, at: int, value: Tensor, grad: Tensor) -> dict[str, Tensor]:
        grad = grad if self._decoupled else self._with_decay(at, value, grad)
        mean, square = self._moments(at, grad)
        power1, power2 = self._counts_of(at)[:2]
        size = self._rate(at) / (1 - power1)
        state = {"mean": mean, "square": square}
        if self._of(at)["amsgrad"]:
            square = state["largest"] = maximum(self._state["largest"][at], square)
        denominator = sqrt(square) / sqrt(1 - power2) + self._of(at)["eps"]
        value = self._decayed(at, value) if self._decoupled else value
        return {**state, "value": value - size * mean / denominator}


class AdamW(Adam):
    """Adam with decoupled weight decay.

    >>> w = ps.nn.Parameter(ps.ones(2))
    >>> optimizer = ps.optim.AdamW([w], lr=0.1, weight_decay=0.0)
    >>> (w * w).sum().backward()
    >>> optimizer.step()
    >>> (w < 1).tolist()
    [True, True]
    """

    _decoupled = True

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        clip_norm: float | None = None,
    ) -> None:
        super().__init__(parameters, lr, betas, eps, weight_decay, amsgrad, clip_norm)


class Adamax(_Moments):
    """Adam with a decaying maximum of the absolute gradients instead of the mean square.

    >>> w = ps.nn.Parameter(ps.ones(2))
    >>> optimizer = ps.optim.Adamax([w], lr=0.1)
    >>> (w * w).sum().backward()
    >>> optimizer.step()
    >>> (w < 1).tolist()
    [True, True]
    """

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 2e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
    ) -> None:
        super().__init__(parameters, lr, betas, eps, weight_decay, clip_norm)

    def _update(self, at: int, value: Tensor, grad: Tensor) -> dict[str, Tensor]:
        grad = self._with_decay(at, value, grad)
        mean, _ = self._moments(at, grad)
        faded = self._state["square"][at] * self._setting(at, "beta2")
        most = maximum(faded, abs_(grad) + self._of(at)["eps"])
        size = self._rate(at) / (1 - self._counts_of(at)[0])
        return {"mean": mean, "square": most, "value": value - size * mean / most}


class NAdam(_Moments):
    """Adam with Nesterov's momentum.

    >>> w = ps.nn.Parameter(ps.ones(2))
    >>> optimizer = ps.optim.NAdam([w], lr=0.1)
    >>> (w * w).sum().backward()
    >>> optimizer.step()
    >>> (w < 1).tolist()
    [True, True]
    """

    _first_counts = (("power1", 1.0), ("power2", 1.0), ("steps", 0.0), ("product", 1.0))
    _counted_by = ("beta1", "beta2", "momentum_decay")
    _warming = math.log(0.96)

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 2e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 4e-3,
        clip_norm: float | None = None,
    ) -> None:
        super().__init__(parameters, lr, betas, eps, weight_decay, clip_norm, momentum_decay=momentum_decay)

    def _next_counts(self, at: int, counts: Sequence[Tensor]) -> Sequence[Tensor]:
        steps = counts[2] + 1
        return [*super()._next_counts(at, counts[:2]), steps, counts[3] * self._momentum(at, steps)]

    def _momentum(self, at: int, steps: Tensor) -> Tensor:
        """The momentum of a step, which grows from half of its final value."""
        share = exp(steps * (self._warming * self._of(at)["momentum_decay"]))
        momentum: Tensor = (1 - share * 0.5) * self._setting(at, "beta1")
        return momentum

    def _update(self, at: int, value: Tensor, grad: Tensor) -> dict[str, Tensor]:
        grad = self._with_decay(at, value, grad)
        mean, square = self._moments(at, grad)
        _, power2, steps, product = self._counts_of(at)
        now, following = self._momentum(at, steps), self._momentum(at, steps + 1)
        denominator = sqrt(square / (1 - power2)) + self._of(at)["eps"]
        by_grad = self._rate(at) * (1 - now) / (1 - product)
        by_mean = self._rate(at) * following / (1 - product * following)
        step = (grad * by_grad + mean * by_mean) / denominator
        return {"mean": mean, "square": square, "value": value - step}


class RAdam(_Moments):
    """Adam that does not divide by the mean square until its estimate is reliable (rectified Adam).

    >>> w = ps.nn.Parameter(ps.ones(2))
    >>> optimizer = ps.optim.RAdam([w], lr=0.1)
    >>> (w * w).sum().backward()
    >>> optimizer.step()
    >>> (w < 1).tolist()
    [True, True]
    """

    _first_counts = (("power1", 1.0), ("power2", 1.0), ("steps", 0.0))

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
    ) -> None:
        super().__init__(parameters, lr, betas, eps, weight_decay, clip_norm)

    def _next_counts(self, at: int, counts: Sequence[Tensor]) -> Sequence[Tensor]:
        return [*super()._next_counts(at, counts[:2]), counts[2] + 1]

    def _update(self, at: int, value: Tensor, grad: Tensor) -> dict[str, Tensor]:
        grad = self._with_decay(at, value, grad)
        mean, square = self._moments(at, grad)
        power1, power2, steps = self._counts_of(at)
        most = 2 / (1 - self._of(at)["beta2"]) - 1
        length = _effective_length(steps, self._of(at)["beta2"])
        ratio = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)
        rectified = sqrt(maximum(ratio, 0.0)) * sqrt(1 - power2) / (sqrt(square) + self._of(at)["eps"])
        step = mean * (self._rate(at) / (1 - power1)) * where(length > 5, rectified, 1.0)
        return {"mean": mean, "square": square, "value": value - step}


def _effective_length(steps: Tensor, beta: float) -> Tensor:
    """The effective number of squares in the mean after t steps: 2 / (1 - b) - 1 - 2 t b**t / (1 - b**t).

    With y = -t log(b), the last term is 2 / -log(b) times y / (exp(y) - 1). Its expansion starts with
    1 - y / 2, which is summed exactly with the other terms; for small y the rest is computed as a series.
    """
    if not beta:
        return steps * 0 + 1
    decay = -math.log(beta)
    y = steps * decay
    series = y * y * (1 / 12 - y * y * (1 / 720 - y * y * (1 / 30240 - y * y * (1 / 1209600))))
    beyond = where(y < 1, series, y / maximum(expm1(y), 1.0) - 1 + y * 0.5)
    return steps + (2 / (1 - beta) - 1 - 2 / decay) - beyond * (2 / decay)


class LAMB(_Moments):
    """Adam with steps scaled by the norm of each parameter, for large batches.

    >>> w = ps.nn.Parameter(ps.ones(2))
    >>> optimizer = ps.optim.LAMB([w], lr=0.1)
    >>> (w * w).sum().backward()
    >>> optimizer.step()
    >>> (w < 1).tolist()
    [True, True]
    """

    elementwise = False

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        clip_norm: float | None = None,
    ) -> None:
        super().__init__(parameters, lr, betas, eps, weight_decay, clip_norm)

    def _update(self, at: int, value: Tensor, grad: Tensor) -> dict[str, Tensor]:
        mean, square = self._moments(at, grad)
        power1, power2 = self._counts_of(at)
        denominator = sqrt(square / (1 - power2)) + self._of(at)["eps"]
        step = self._with_decay(at, value, mean / (1 - power1) / denominator)
        norm, length = sqrt(sum_(value * value)), sqrt(sum_(step * step))
        trust = where(norm > 0, where(length > 0, norm / where(length > 0, length, 1.0), 1.0), 1.0)
        return {"mean": mean, "square": square, "value": value - step * (self._rate(at) * trust)}


class Lion(Optimizer):
    """Steps of a constant size, by the sign of a mean of the gradients.

    >>> w = ps.nn.Parameter(ps.ones(2))
    >>> optimizer = ps.optim.Lion([w], lr=0.1)
    >>> (w * w).sum().backward()
    >>> optimizer.step()
    >>> (w < 1).tolist()
    [True, True]
    """

    elementwise = True

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1e-4,
        betas: Betas = (0.9, 0.99),
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
    ) -> None:
        super().__init__(parameters, lr, clip_norm, weight_decay=weight_decay, betas=betas)
        self._add_state("mean")

    def _update(self, at: int, value: Tensor, grad: Tensor) -> dict[str, Tensor]:
        old = self._state["mean"][at]
        first, second = self._setting(at, "beta1"), self._setting(at, "beta2")
        step = sign(old * first + grad * (1 - first)) * self._rate(at)
        mean = old * second + grad * (1 - second)
        return {"mean": mean, "value": self._decayed(at, value) - step}
