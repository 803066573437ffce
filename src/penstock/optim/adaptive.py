"""Updates by squared gradients: RMSprop, Adagrad, Adadelta, Adafactor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.optim.optimizer import Optimizer, Parameters
from penstock.tensor.arithmetic import maximum, minimum, sqrt
from penstock.tensor.arithmetic import pow as pow_
from penstock.tensor.core import Tensor
from penstock.tensor.creation import full_like
from penstock.tensor.reduction import mean


class RMSprop(Optimizer):
    """The gradient divided by the root of its mean square; `centered`: by its standard deviation.

    >>> w = ps.nn.Parameter(ps.ones(2))
    >>> optimizer = ps.optim.RMSprop([w], lr=0.1)
    >>> (w * w).sum().backward()
    >>> optimizer.step()
    >>> (w < 1).tolist()
    [True, True]
    """

    elementwise = True

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 0.01,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        clip_norm: float | None = None,
    ) -> None:
        settings = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(parameters, lr, clip_norm, **settings, centered=centered)
        self._add_state("square")
        if self._any("momentum"):
            self._add_state("velocity")
        if self._any("centered"):
            self._add_state("mean")

    def _update(self, at: int, value: Tensor, grad: Tensor) -> dict[str, Tensor]:
        grad = self._with_decay(at, value, grad)
        settings, alpha = self._of(at), self._of(at)["alpha"]
        square = self._state["square"][at] * alpha + grad * grad * (1 - alpha)
        changed = {"square": square}
        spread = square
        if settings["centered"]:
            changed["mean"] = self._state["mean"][at] * alpha + grad * (1 - alpha)
            spread = square - changed["mean"] * changed["mean"]
        step = grad / (sqrt(spread) + settings["eps"])
        if settings["momentum"]:
            step = self._state["velocity"][at] * self._setting(at, "momentum") + step
            changed["velocity"] = step
        return changed | {"value": value - step * self._rate(at)}


class Adagrad(Optimizer):
    """The gradient divided by the root of the sum of all its squares.

    >>> w = ps.nn.Parameter(ps.ones(2))
    >>> optimizer = ps.optim.Adagrad([w], lr=0.1)
    >>> (w * w).sum().backward()
    >>> optimizer.step()
    >>> (w < 1).tolist()
    [True, True]
    """

    elementwise = True

    _first_counts = (("steps", 0.0),)

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 0.01,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        clip_norm: float | None = None,
    ) -> None:
        settings = {"lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        settings["initial_accumulator_value"] = initial_accumulator_value
        super().__init__(parameters, lr, clip_norm, **settings)
        first = self._of(0)["initial_accumulator_value"]
        self._add_state("sum", first)
        for at, total in enumerate(self._state["sum"]):
            if (own := self._of(at)["initial_accumulator_value"]) != first:
                self._state["sum"][at] = full_like(total, own)

    def _next_counts(self, at: int, counts: Sequence[Tensor]) -> Sequence[Tensor]:
        return [counts[0] + 1]

    def _update(self, at: int, value: Tensor, grad: Tensor) -> dict[str, Tensor]:
        grad = self._with_decay(at, value, grad)
        settings = self._of(at)
        total = self._state["sum"][at] + grad * grad
        rate = self._rate(at) / ((self._counts_of(at)[0] - 1) * settings["lr_decay"] + 1)
        return {"sum": total, "value": value - grad * rate / (sqrt(total) + settings["eps"])}


class Adadelta(Optimizer):
    """Steps as large as those before them, by how the gradient is to its mean square.

    >>> w = ps.nn.Parameter(ps.ones(2))
    >>> optimizer = ps.optim.Adadelta([w], lr=1.0)
    >>> (w * w).sum().backward()
    >>> optimizer.step()
    >>> (w < 1).tolist()
    [True, True]
    """

    elementwise = True

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
    ) -> None:
        super().__init__(parameters, lr, clip_norm, rho=rho, eps=eps, weight_decay=weight_decay)
        self._add_state("square")
        self._add_state("step")

    def _update(self, at: int, value: Tensor, grad: Tensor) -> dict[str, Tensor]:
        grad = self._with_decay(at, value, grad)
        rho, eps = self._of(at)["rho"], self._of(at)["eps"]
        square = self._state["square"][at] * rho + grad * grad * (1 - rho)
        step = sqrt(self._state["step"][at] + eps) / sqrt(square + eps) * grad
        steps = self._state["step"][at] * rho + step * step * (1 - rho)
        return {"square": square, "step": steps, "value": value - step * self._rate(at)}


_LEAST = float(np.finfo(np.float32).eps)


class Adafactor(Optimizer):
    """Mean squares of a matrix, estimated from their means over rows and columns to save memory.

    >>> w = ps.nn.Parameter(ps.ones(2))
    >>> optimizer = ps.optim.Adafactor([w], lr=0.1)
    >>> (w * w).sum().backward()
    >>> optimizer.step()
    >>> (w < 1).tolist()
    [True, True]
    """

    _first_counts = (("steps", 0.0),)

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 0.01,
        beta2_decay: float = -0.8,
        eps: float = 1e-3,
        d: float = 1.0,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
    ) -> None:
        settings = {"beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay}
        super().__init__(parameters, lr, clip_norm, **settings)
        shapes = [tensor.shape for tensor in self.parameters]
        rows = [(*shape[:-1], 1) if len(shape) > 1 else shape for shape in shapes]
        columns = [(*shape[:-2], 1, shape[-1]) if len(shape) > 1 else () for shape in shapes]
        self._add_state("rows", shapes=rows)
        self._add_state("columns", shapes=columns)

    def _next_counts(self, at: int, counts: Sequence[Tensor]) -> Sequence[Tensor]:
        return [counts[0] + 1]

    def _update(self, at: int, value: Tensor, grad: Tensor) -> dict[str, Tensor]:
        settings, steps = self._of(at), self._counts_of(at)[0]
        share = pow_(steps, settings["beta2_decay"])
        square, old = grad * grad, self._state["rows"][at]
        if grad.ndim > 1:
            rows = old + (mean(square, axis=-1, keepdims=True) - old) * share
            before = self._state["columns"][at]
            columns = before + (mean(square, axis=-2, keepdims=True) - before) * share
            estimate = rows * columns / maximum(mean(rows, axis=-2, keepdims=True), _LEAST)
        else:
            rows, columns = old + (square - old) * share, self._state["columns"][at]
            estimate = rows
        step = grad / sqrt(maximum(estimate, _LEAST * _LEAST))
        size = minimum(self._rate(at), 1 / sqrt(steps)) * maximum(_root_mean_square(value), settings["eps"])
        size = size / maximum(_root_mean_square(step) / settings["d"], 1.0)
        return {"rows": rows, "columns": columns, "value": self._decayed(at, value) - step * size}


def _root_mean_square(x: Tensor) -> Tensor:
    return sqrt(mean(x * x))
