"""Functions of tensors against NumPy's formulas in float64, and gradients against finite differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import penstock as ps
from penstock import Device

Case = tuple[Callable[..., ps.Tensor], Callable[..., Any]]  # ours, and the formula


def slopes(formula: Callable[..., Any], arrays: Sequence[np.ndarray], up: np.ndarray) -> list[np.ndarray]:
    """The gradient of sum(formula(*arrays) * up) by each array, by central differences."""
    step = 1e-6
    result = []
    for at, array in enumerate(arrays):
        slope = np.zeros(array.shape)
        for index in np.ndindex(array.shape):
            ends = []
            for sign in (1, -1):
                moved = [part.astype(np.float64) for part in arrays]
                moved[at][index] += sign * step
                ends.append(np.sum(formula(*moved) * up))
            slope[index] = (ends[0] - ends[1]) / (2 * step)
        result.append(slope)
    return result


def check(device: Device, cases: Mapping[str, Case], *arrays: np.ndarray) -> None:
    """All cases of a set of arrays, as a jitted function: values and gradients."""
    random = np.random.default_rng(5)
    exact = [array.astype(np.float64) for array in arrays]
    wanted = {name: np.asarray(formula(*exact)) for name, (_, formula) in cases.items()}
    ups = {name: random.standard_normal(value.shape).astype(np.float32) for name, value in wanted.items()}

    @ps.jit
    def run(*given: ps.Tensor) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, (function, _) in cases.items():
            values: list[ps.Tensor] = []

            def total(
                *given: ps.Tensor, name: str = name, function: Any = function, values: Any = values
            ) -> Any:
                values.append(function(*given))
                return ps.sum(values[-1] * ps.asarray(ups[name], device=device))

            _, grads = ps.value_and_grad(total, tuple(range(len(given))))(*given)
            result[name] = (values[-1], grads)
        return result

    results = run(*(ps.asarray(array, device=device) for array in arrays))
    for name, (value, grads) in results.items():
        np.testing.assert_allclose(value.numpy(), wanted[name], rtol=2e-5, atol=3e-6, err_msg=name)
        expected = slopes(cases[name][1], arrays, ups[name])
        for at, (grad, slope) in enumerate(zip(grads, expected, strict=True)):
            message = f"{name}: gradient {at}"
            np.testing.assert_allclose(grad.numpy(), slope, rtol=5e-5, atol=2e-5, err_msg=message)
