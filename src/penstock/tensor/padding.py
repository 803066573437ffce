"""Padding, and resizing by interpolation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.graph import shaping
from penstock.graph.node import Node
from penstock.tensor import dtypes
from penstock.tensor.arguments import integers, of_tensor
from penstock.tensor.arithmetic import abs as abs_
from penstock.tensor.arithmetic import add, clip, maximum, multiply, subtract, where
from penstock.tensor.broadcasting import broadcast, broadcast_node
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor, from_numpy, record
from penstock.tensor.creation import arange, ones_like
from penstock.tensor.indexing import looked_up
from penstock.tensor.linear import matmul
from penstock.tensor.manipulation import moveaxis, reshape
from penstock.tensor.reduction import narrowed, widened

_Pairs = list[tuple[int, int]]  # items added before and after, for each axis


@of_tensor
def pad(x: Tensor, /, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Pad a tensor with (before, after) items of the last axis, then of the axis before it, and so on.

    The new items are a constant `value` (0 by default), mirrored items ('reflect'), the outermost item
    ('replicate') or the items of the other end ('circular'). A negative number removes items.

    >>> ps.pad(ps.asarray([1, 2]), (1, 2)).tolist()
    [0, 1, 2, 0, 0]
    """
    pairs = _pairs(x, pad)
    if mode == "constant":
        return _constant(x, pairs, _filling(x, value))
    if mode not in _PARTS:
        raise ValueError(f"pad: mode is 'constant', {', '.join(map(repr, _PARTS))}, and {mode!r} was given")
    if value is not None and value != 0:
        raise ValueError(f"pad: a value is for the mode 'constant', and the mode is {mode!r}")
    node = x._node
    for axis, (before, after) in enumerate(pairs):
        node = _PARTS[mode](node, axis, before, after)
    return record(node, x)


def _filling(x: Tensor, value: float | None) -> float:
    """The padding value, checked for the dtype of `x`."""
    if value is None:
        return 0
    if x.dtype.kind == "b":
        return bool(value)
    if x.dtype.kind in "iu" and isinstance(value, float):
        if value != int(value):
            raise TypeError(f"pad: a value for {x.dtype} is an integer, and {value} was given")
        return int(value)
    return value


def _pairs(x: Tensor, pad: Any) -> _Pairs:
    given = integers(pad, "pad", "what is added") if not _nested(pad) else ()
    if len(given) % 2 or len(given) > 2 * x.ndim or _nested(pad):
        raise ValueError(
            f"pad takes a flat tuple: (before, after) of the last axis, then of the one before, and so on; "
            f"{pad} was given for shape {x.shape}"
        )
    pairs = [(0, 0)] * (x.ndim - len(given) // 2)
    for at in range(len(given) - 2, -1, -2):
        pairs.append((given[at], given[at + 1]))
    for length, (before, after) in zip(x.shape, pairs, strict=True):
        if length + before + after < 0:
            raise ValueError(f"pad: nothing is left of shape {x.shape} with {tuple(given)}")
    return pairs


def _nested(pad: Any) -> bool:
    return isinstance(pad, (tuple, list)) and any(isinstance(part, (tuple, list)) for part in pad)


def _cropped(node: Node, axis: int, before: int, after: int) -> Node:
    """Without the items that negative numbers remove."""
    start, end = max(-before, 0), max(-after, 0)
    return shaping.slice_axis(node, axis, start, node.shape[axis] - start - end)


def _constant(x: Tensor, pairs: _Pairs, value: float) -> Tensor:
    node = x._node
    for axis, (before, after) in enumerate(pairs):
        if min(before, after) < 0 and node.shape[axis] + min(before, 0) + min(after, 0) < 0:
            raise ValueError(f"pad: {before} and {after} remove more than axis {axis} of shape {x.shape} has")
        node = _cropped(node, axis, before, after)
    shape = tuple(n + max(b, 0) + max(a, 0) for n, (b, a) in zip(node.shape, pairs, strict=True))
    if shape == node.shape:
        return record(node, x)
    slices = tuple((max(b, 0), n, 1) for n, (b, _) in zip(node.shape, pairs, strict=True))
    padded = record(shaping.pad(node, slices, shape), x)
    if value == 0:
        return padded
    inside = ones_like(Tensor(node, x.device), dtype=dtypes.bool_)
    return where(record(shaping.pad(inside._node, slices, shape), inside), padded, value)


def _reflected(node: Node, axis: int, before: int, after: int) -> Node:
    node = _cropped(node, axis, before, after)
    length = node.shape[axis]
    if max(before, after) >= length and max(before, after) > 0:
        raise ValueError(f"pad: 'reflect' has {length - 1} items to mirror, and {(before, after)} was given")
    return _joined(
        [
            shaping.slice_axis(node, axis, before, before, -1) if before > 0 else None,
            node,
            shaping.slice_axis(node, axis, length - 2, after, -1) if after > 0 else None,
        ],
        axis,
    )


def _replicated(node: Node, axis: int, before: int, after: int) -> Node:
    length = node.shape[axis]
    if not length and max(before, after) > 0:
        raise ValueError(f"pad: 'replicate' repeats the outermost items, and axis {axis} has none")

    def repeated(item: int, count: int) -> Node | None:
        if count <= 0:
            return None
        edge = shaping.slice_axis(node, axis, item, 1)
        return broadcast_node(edge, tuple(count if a == axis else n for a, n in enumerate(node.shape)))

    padded = _joined([repeated(0, before), node, repeated(length - 1, after)], axis)
    return _cropped(padded, axis, min(before, 0), min(after, 0))


def _circular(node: Node, axis: int, before: int, after: int) -> Node:
    node = _cropped(node, axis, before, after)
    length = node.shape[axis]
    if max(before, after) > length:
        raise ValueError(f"pad: 'circular' has {length} items to repeat, and {(before, after)} was given")
    parts = [
        shaping.slice_axis(node, axis, length - before, before) if before > 0 else None,
        node,
        shaping.slice_axis(node, axis, 0, after) if after > 0 else None,
    ]
    return _joined(parts, axis)


def _joined(parts: Sequence[Node | None], axis: int) -> Node:
    return shaping.concat([part for part in parts if part is not None], axis)


_PARTS = {"reflect": _reflected, "replicate": _replicated, "circular": _circular}


# Interpolation: along each axis, an item is a weighted sum of a few items, with fixed indices and weights.

_AXES = {"linear": 1, "bilinear": 2, "trilinear": 3, "bicubic": 2}
_MODES = ("nearest", "nearest-exact", "area", *_AXES)
_Taps = list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]  # indices and weights


@of_tensor
def interpolate(
    x: Tensor,
    /,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
) -> Tensor:
    """Resize images (batch, channels, ...) to a `size`, or by a `scale_factor`.

    >>> ps.interpolate(ps.zeros((1, 1, 2, 2)), scale_factor=2).shape
    (1, 1, 4, 4)
    """
    axes = x.ndim - 2
    if mode not in _MODES or axes < 1 or _AXES.get(mode, axes) != axes:
        raise ValueError(
            f"interpolate: mode {mode!r} does not fit shape {x.shape}; there are {', '.join(_MODES)}; "
            f"linear is for 3 axes, bilinear and bicubic for 4, trilinear for 5"
        )
    if align_corners and mode not in _AXES:
        raise ValueError(f"interpolate: align_corners is for linear and cubic modes, and mode is {mode!r}")
    sizes, factors = _sizes(x.shape[2:], size, scale_factor, bool(recompute_scale_factor))
    if x.dtype.kind != "f":
        raise TypeError(f"interpolate does not take {x.dtype}")
    result = widened(x)
    for axis, (length, factor) in enumerate(zip(sizes, factors, strict=True), 2):
        scale = _scale(x.shape[axis], length, factor, bool(align_corners))
        if mode == "area":
            result = averaged(result, axis, length)
        elif mode == "nearest" and not length % x.shape[axis] and scale == x.shape[axis] / length:
            result = _repeated(result, axis, length)
        elif mode in ("linear", "bilinear", "trilinear"):
            result = _linear(result, axis, length, scale, bool(align_corners))
        else:
            position = _positions(length, scale, mode, bool(align_corners))
            result = _weighted(result, axis, _taps(position, x.shape[axis], mode))
    return narrowed(result, x.dtype)


def _repeated(x: Tensor, axis: int, length: int) -> Tensor:
    """Repeat each item an integer number of times, by views, whose gradient is a sum."""
    before, old, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    wide = broadcast(reshape(x, (*before, old, 1, *after)), (*before, old, length // old, *after))
    return reshape(wide, (*before, length, *after))


@composite
def _linear(x: Tensor, axis: int, length: int, scale: float, align_corners: bool) -> Tensor:
    """Linear interpolation as a product with a matrix of weights, at most two for each new item."""
    old = x.shape[axis]
    new = arange(length, dtype=x.dtype, device=x.device)
    positions = multiply(new, scale) if align_corners else subtract(multiply(add(new, 0.5), scale), 0.5)
    positions = reshape(clip(positions, 0.0, float(old - 1)), (1, length))
    distance = abs_(subtract(positions, reshape(arange(old, dtype=x.dtype, device=x.device), (old, 1))))
    weights = maximum(subtract(1.0, distance), 0.0)
    return moveaxis(matmul(moveaxis(x, axis, -1), weights), -1, axis)


def _sizes(
    shape: tuple[int, ...], size: Any, scale_factor: Any, recompute: bool
) -> tuple[tuple[int, ...], list[float | None]]:
    """The new lengths, and the scale factors if they were given and are not recomputed."""
    if (size is None) == (scale_factor is None):
        raise TypeError("interpolate takes a size or a scale_factor")
    if size is not None:
        sizes = integers(size, "interpolate", "a size")
        sizes = sizes * len(shape) if len(sizes) == 1 else sizes
        factors: list[float | None] = [None] * len(shape)
    else:
        given = scale_factor if isinstance(scale_factor, (tuple, list)) else [scale_factor] * len(shape)
        sizes = tuple(math.floor(n * f) for n, f in zip(shape, given, strict=True))
        factors = [None] * len(shape) if recompute else [float(factor) for factor in given]
    if len(sizes) != len(shape) or min(sizes) < 1:
        raise ValueError(f"interpolate: a size of {sizes} does not fit {len(shape)} axes of {shape}")
    return sizes, factors


def _scale(length: int, new: int, factor: float | None, align_corners: bool) -> float:
    """The distance between neighbouring new items, in old items."""
    if align_corners:
        return (length - 1) / (new - 1) if new > 1 else 0.0
    return 1 / factor if factor else length / new


def _positions(new: int, scale: float, mode: str, align_corners: bool) -> npt.NDArray[Any]:
    """The positions of new items among the old; in float32, so that the nearest is the same as PyTorch's."""
    items = np.arange(new, dtype=np.float32)
    step = np.float32(scale)
    if align_corners or mode == "nearest":
        return items * step
    return (items + np.float32(0.5)) * step - np.float32(0.5)


def _taps(position: npt.NDArray[Any], length: int, mode: str) -> _Taps:
    if mode in ("nearest", "nearest-exact"):
        at = position if mode == "nearest" else position + np.float32(0.5)
        return [(np.minimum(np.floor(at).astype(np.int64), length - 1), np.ones_like(position))]
    first = np.floor(position).astype(np.int64)
    part = (position - first).astype(np.float64)
    weights = [_cubic(part + 1), _cubic(part), _cubic(1 - part), _cubic(2 - part)]
    items = [first + by for by in (-1, 0, 1, 2)]
    return [(np.clip(item, 0, length - 1), w) for item, w in zip(items, weights, strict=True)]


def _cubic(distance: npt.NDArray[Any], a: float = -0.75) -> npt.NDArray[Any]:
    """The kernel of cubic convolution."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = a * (((distance - 5) * distance + 8) * distance - 4)
    return np.asarray(np.where(distance <= 1, near, far))


def _weighted(x: Tensor, axis: int, taps: _Taps) -> Tensor:
    front, total = moveaxis(x, axis, 0), None
    for items, weights in taps:
        part = looked_up(front, from_numpy(items, x.device))
        if len(taps) > 1:
            shape = (len(weights), *(1,) * (x.ndim - 1))
            part = multiply(part, from_numpy(weights.astype(x.dtype).reshape(shape), x.device))
        total = part if total is None else add(total, part)
    assert total is not None
    return moveaxis(total, 0, axis)


def averaged(x: Tensor, axis: int, new: int) -> Tensor:
    """Means over the old items that each new item covers."""
    length = x.shape[axis]
    weights = np.zeros((length, new))
    for item in range(new):
        start, stop = item * length // new, -(-(item + 1) * length // new)
        weights[start:stop, item] = 1 / (stop - start)
    last = moveaxis(x, axis, -1)
    rows = reshape(last, (-1, length))
    means = matmul(rows, from_numpy(weights.astype(x.dtype), x.device))
    return moveaxis(reshape(means, (*last.shape[:-1], new)), -1, axis)
