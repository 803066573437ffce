"""Images in other sizes: along each axis, every result is a weighted sum of a few items."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import penstock as ps
from penstock.onnx.registry import Call, operator

Array = npt.NDArray[Any]


@operator("Resize", since=11, host=(1, 2, 3))
def resize(call: Call, x: ps.Tensor, roi: Any = None, scales: Any = None, sizes: Any = None) -> ps.Tensor:
    """An image in another size, which is given as it is or by factors."""
    axes = [axis % x.ndim for axis in call.get("axes", range(x.ndim))]
    lengths = [x.shape[axis] for axis in axes]
    if sizes is not None and sizes.size:
        factors, wanted = _factors(call.get("keep_aspect_ratio_policy", "stretch"), lengths, sizes.tolist())
    else:
        factors = [float(factor) for factor in scales]
        wanted = [int(np.floor(n * factor)) for n, factor in zip(lengths, factors, strict=True)]
    corners = [(0.0, 1.0)] * len(axes)
    if roi is not None and roi.size:
        corners = list(zip(roi[: len(axes)].tolist(), roi[len(axes) :].tolist(), strict=True))
    outside: Array = np.zeros((1,) * x.ndim, bool)
    for axis, factor, length, part in zip(axes, factors, wanted, corners, strict=True):
        how = call.get("coordinate_transformation_mode", "half_pixel")
        at = _positions(how, x.shape[axis], factor, length, part)
        if how == "tf_crop_and_resize":
            beyond = (at < 0) | (at > x.shape[axis] - 1)
            outside = outside | beyond.reshape([-1 if other == axis else 1 for other in range(x.ndim)])
        if length != x.shape[axis] or factor != 1 or part != (0.0, 1.0):
            x = _along(call, x, axis, at, factor)
    if not outside.any():
        return x
    value = ps.full((), call.get("extrapolation_value", 0.0), dtype=x.dtype, device=x.device)
    return ps.where(call.tensor(outside), value, x)


@operator("Resize", since=10, host=(1,))
@operator("Upsample", since=9, host=(1,))
def upsample(call: Call, x: ps.Tensor, scales: Any) -> ps.Tensor:
    """Before opset 11: positions are divided by the factors, and the nearest item is the one before."""
    for axis, factor in enumerate(scales.tolist()):
        if factor < 1 and call.get("mode", "nearest") == "nearest":
            raise call.refuse("a smaller image of the nearest items", "export with opset 11 or later")
        if factor != 1:
            at = np.arange(int(np.floor(x.shape[axis] * factor))) / factor
            x = _along(call, x, axis, at, factor, nearest="floor")
    return x


def _factors(policy: str, lengths: list[int], sizes: list[int]) -> tuple[list[float], list[int]]:
    factors = [size / n for size, n in zip(sizes, lengths, strict=True)]
    if policy == "stretch":
        return factors, sizes
    factor = min(factors) if policy == "not_larger" else max(factors)
    return [factor] * len(sizes), [int(np.floor(n * factor + 0.5)) for n in lengths]


def _positions(how: str, length: int, factor: float, wanted: int, part: tuple[float, float]) -> Array:
    """Where each result stands among the items."""
    position = np.arange(wanted, dtype=np.float64)
    exact = factor * length  # the new length, before it was rounded
    middle = (position + 0.5) / factor - 0.5
    if how == "align_corners":
        return position * (length - 1) / (exact - 1) if exact != 1 else position * 0
    if how == "asymmetric":
        return position / factor
    if how == "pytorch_half_pixel":
        return middle if exact != 1 else position * 0 - 0.5
    if how == "half_pixel_symmetric":
        return length / 2 * (1 - wanted / exact) + middle
    if how == "tf_crop_and_resize":
        begin, end = part
        if exact == 1:
            return position * 0 + (begin + end) * (length - 1) / 2
        return begin * (length - 1) + position * (end - begin) * (length - 1) / (exact - 1)
    return middle


def _along(
    call: Call, x: ps.Tensor, axis: int, at: Array, factor: float, nearest: str | None = None
) -> ps.Tensor:
    """Items at new positions along an axis."""
    length, mode = x.shape[axis], call.get("mode", "nearest")
    if mode == "nearest":
        index = _nearest(at, nearest or call.get("nearest_mode", "round_prefer_floor"))
        return ps.take(x, call.tensor(np.clip(index, 0, length - 1)), axis=axis)
    if not ps.isdtype(x.dtype, "real floating"):
        raise call.refuse(f"{mode} interpolation of {x.dtype}", "cast to float32 before it")
    index, weights = _taps(call, mode, at, min(factor, 1.0) if call.get("antialias", 0) else 1.0)
    if call.get("exclude_outside", 0):
        weights = np.where((index >= 0) & (index < length), weights, 0)
    weights = weights / weights.sum(1, keepdims=True)
    shape = [-1 if other == axis else 1 for other in range(x.ndim)]
    total: Any = 0
    for where, weight in zip(np.clip(index, 0, length - 1).T, weights.T, strict=True):
        if weight.any():
            items = ps.take(x, call.tensor(np.ascontiguousarray(where)), axis=axis)
            total = total + items * ps.astype(call.tensor(weight.reshape(shape)), x.dtype)
    return total  # type: ignore[no-any-return]


def _nearest(at: Array, how: str) -> Array:
    rounded = {
        "round_prefer_floor": lambda: np.ceil(at - 0.5),
        "round_prefer_ceil": lambda: np.floor(at + 0.5),
        "floor": lambda: np.floor(at),
        "ceil": lambda: np.ceil(at),
    }[how]()
    return rounded.astype(np.int64)


def _taps(call: Call, mode: str, at: Array, squeeze: float) -> tuple[Array, Array]:
    """The items around each position, and their weights; `squeeze` below 1 takes in more of them."""
    reach = int(np.ceil((2 if mode == "cubic" else 1) / squeeze))
    index = np.floor(at).astype(np.int64)[:, None] + np.arange(1 - reach, reach + 1)
    distance = np.abs(index - at[:, None]) * squeeze
    if mode != "cubic":
        return index, np.maximum(1 - distance, 0)
    a = call.get("cubic_coeff_a", -0.75)
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    return index, np.where(distance <= 1, near, np.where(distance < 2, far, 0))
