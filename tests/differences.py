"""Gradients against differences of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import penstock as ps

Function = Callable[..., Any]


def slopes(function: Function, arrays: list[np.ndarray], step: float = 1e-5) -> list[np.ndarray]:
    """The gradients of a function of float64 arrays by differences."""
    result = []
    for at, array in enumerate(arrays):
        slope = np.zeros_like(array)
        for place in np.ndindex(array.shape):
            values = []
            for by in (step, -step):
                moved = [other.copy() for other in arrays]
                moved[at][place] += by
                values.append(function(*moved))
            slope[place] = (values[0] - values[1]) / (2 * step)
        result.append(slope)
    return result


def check_gradients(function: Function, *arrays: np.ndarray, tolerance: float = 1e-6) -> None:
    """Of a sum in which every item has another weight, against differences."""

    def total(*tensors: ps.Tensor) -> ps.Tensor:
        result = function(*tensors)
        parts = (
            [result]
            if isinstance(result, ps.Tensor)
            else [part for part in result if part.dtype == ps.float64]
        )
        weights = [np.cos(np.arange(part.size, dtype=np.float64)).reshape(part.shape) + 2 for part in parts]
        return sum(
            (part * ps.asarray(w, device="host")).sum() for part, w in zip(parts, weights, strict=True)
        )

    wide = [array.astype(np.float64) for array in arrays]
    actual = ps.grad(total, tuple(range(len(wide))))(*(ps.asarray(array, device="host") for array in wide))

    def value(*moved: np.ndarray) -> float:
        return total(*(ps.asarray(array, device="host") for array in moved)).item()

    for ours, theirs in zip(actual, slopes(value, wide), strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=tolerance, atol=tolerance)
