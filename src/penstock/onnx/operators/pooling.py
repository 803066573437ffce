"""Pooling."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

import penstock as ps
from penstock.onnx.operators.windows import Windows, covering, parts, windows_of
from penstock.onnx.registry import Call, operator

F = ps.nn.functional
_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_UNPOOL = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}


@operator("MaxPool")
def max_pool(call: Call, x: ps.Tensor) -> Any:
    """The greatest item of each window, and where it stands among all items."""
    windows = windows_of(call, x.shape[2:], call.get("kernel_shape"))
    if call.wants(1):
        return _max_with_indices(call, x, windows)
    if _usual(x, windows) and not call.get("ceil_mode", 0):
        function = _MAX[len(windows.kernel)]
        return function(x, windows.kernel, windows.strides, windows.before, windows.dilations)
    return reduce(ps.maximum, parts(covering(x, windows, _least(x)), windows))


def _usual(x: ps.Tensor, windows: Windows) -> bool:
    """Whether PyTorch's arguments can say it."""
    small = all(2 * pad <= k for pad, k in zip(windows.before, windows.kernel, strict=True))
    return len(windows.kernel) in _MAX and windows.even and small and ps.isdtype(x.dtype, "real floating")


def _least(x: ps.Tensor) -> float | int:
    return -np.inf if ps.isdtype(x.dtype, "real floating") else ps.iinfo(x.dtype).min


def _max_with_indices(call: Call, x: ps.Tensor, windows: Windows) -> tuple[ps.Tensor, ps.Tensor]:
    image = x.shape[2:]
    order = "F" if call.get("storage_order", 0) else "C"
    places = np.arange(np.prod(image)).reshape(image, order=order)  # type: ignore[call-overload]
    shape = (1, 1, *image)
    indices = list(parts(covering(call.tensor(places.reshape(shape)), windows, 0), windows))
    values = list(parts(covering(x, windows, _least(x)), windows))
    best, where = values[0], ps.broadcast_to(indices[0], values[0].shape)
    for value, index in zip(values[1:], indices[1:], strict=True):
        greater = value > best
        best, where = ps.where(greater, value, best), ps.where(greater, index, where)
    planes = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *[1] * len(image)) * np.prod(image)
    return best, where + call.tensor(planes)


@operator("AveragePool")
def average_pool(call: Call, x: ps.Tensor) -> ps.Tensor:
    """The mean of each window."""
    windows = windows_of(call, x.shape[2:], call.get("kernel_shape"))
    inside = bool(call.get("count_include_pad", 0))
    if _usual(x, windows) and set(windows.dilations) == {1} and not call.get("ceil_mode", 0):
        function = _AVERAGE[len(windows.kernel)]
        return function(x, windows.kernel, windows.strides, windows.before, count_include_pad=inside)
    total = reduce(ps.add, parts(covering(x, windows, 0), windows))
    return total / ps.astype(call.tensor(_counts(x.shape[2:], windows, inside)), x.dtype)


def _counts(image: tuple[int, ...], windows: Windows, inside: bool) -> npt.NDArray[Any]:
    """How many items the mean of each window is of; `inside`: those around the image are some, too."""
    counts: Any = np.ones((), np.float32)
    for axis, length in enumerate(image):
        first, last = (-windows.before[axis], length + windows.after[axis]) if inside else (0, length)
        starts = np.arange(windows.lengths[axis]) * windows.strides[axis] - windows.before[axis]
        places = starts[:, None] + np.arange(windows.kernel[axis]) * windows.dilations[axis]
        counts = counts[..., None] * ((places >= first) & (places < last)).sum(1).astype(np.float32)
    return np.asarray(counts)


@operator("LpPool", since=11)
def lp_pool(call: Call, x: ps.Tensor) -> Any:
    """The p-norm of each window."""
    windows = windows_of(call, x.shape[2:], call.get("kernel_shape"))
    p = call.get("p", 2)
    total = reduce(ps.add, parts(covering(ps.abs(x) ** p, windows, 0), windows))
    return total ** (1 / p)


@operator("GlobalAveragePool")
def global_average_pool(call: Call, x: ps.Tensor) -> ps.Tensor:
    """The mean of each image."""
    return ps.mean(x, axis=tuple(range(2, x.ndim)), keepdims=True)


@operator("GlobalMaxPool")
def global_max_pool(call: Call, x: ps.Tensor) -> ps.Tensor:
    """The greatest item of each image."""
    return ps.max(x, axis=tuple(range(2, x.ndim)), keepdims=True)


@operator("GlobalLpPool")
def global_lp_pool(call: Call, x: ps.Tensor) -> Any:
    """The p-norm of each image."""
    p = call.get("p", 2)
    return ps.sum(ps.abs(x) ** p, axis=tuple(range(2, x.ndim)), keepdims=True) ** (1 / p)


@operator("MaxUnpool", since=9, host=(2,))
def max_unpool(call: Call, x: ps.Tensor, indices: ps.Tensor, shape: Any = None) -> ps.Tensor:
    """Items back at the positions that MaxPool took them from, 0 elsewhere."""
    kernel = call.get("kernel_shape")
    count = len(kernel)
    strides, pads = call.get("strides", [1] * count), call.get("pads", [0] * 2 * count)
    lengths = [
        (n - 1) * s + k - a - b
        for n, s, k, a, b in zip(x.shape[2:], strides, kernel, pads[:count], pads[count:], strict=True)
    ]
    if shape is not None:
        # Indices count the items of the small image, as they do in the examples of the standard.
        wanted = shape.tolist()
        small = (*x.shape[:2], *lengths)
        y = _placed(x, indices, small)
        pad = [n for axis in reversed(range(2, x.ndim)) for n in (0, wanted[axis] - small[axis])]
        return ps.pad(y, pad)
    return _placed(x, indices, (*x.shape[:2], *lengths))


def _placed(x: ps.Tensor, indices: ps.Tensor, shape: tuple[int, ...]) -> ps.Tensor:
    flat = ps.zeros((int(np.prod(shape)),), dtype=x.dtype, device=x.device)
    return ps.reshape(ps.scatter(flat, 0, ps.reshape(indices, (-1,)), ps.reshape(x, (-1,))), shape)
