"""Pooling: the maximum or the mean of each window, computed axis by axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from penstock.graph import windows as graph_windows
from penstock.nn.functional.common import wide
from penstock.nn.functional.convolution import Sizes, for_axes, sizes_of
from penstock.tensor.arithmetic import not_equal, where
from penstock.tensor.autograd import lasting_vjp
from penstock.tensor.broadcasting import broadcast
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor, from_numpy, record
from penstock.tensor.creation import arange, zeros
from penstock.tensor.dtypes import int32, int64
from penstock.tensor.indexing import looked_up
from penstock.tensor.manipulation import astype, expand_dims, moveaxis, reshape, take_along_axis
from penstock.tensor.padding import averaged, pad
from penstock.tensor.reduction import max as max_
from penstock.tensor.reduction import min as min_
from penstock.tensor.reduction import sum as sum_
from penstock.tensor.selecting import scatter

_Windows = Callable[[Tensor], Tensor]  # splits an axis into windows and their items


def _checked(name: str, axes: int, x: Tensor) -> Tensor:
    """The input with a batch axis."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} takes a tensor, and {type(x).__name__} was given")
    if x.dtype.kind != "f":
        raise TypeError(f"{name} does not take {x.dtype}; it computes in floating point")
    if x.ndim not in (axes + 1, axes + 2) or not x.size:
        raise ValueError(
            f"{name} takes (batch, channels, {axes} more axes) with items, and the shape {x.shape} was given"
        )
    return x if x.ndim == axes + 2 else reshape(x, (1, *x.shape))


def _like(x: Tensor, result: Tensor) -> Tensor:
    """A result without the batch axis, if the input had none."""
    return result if result.ndim == x.ndim else reshape(result, result.shape[1:])


def _windowed(x: Tensor, axis: int, size: int, stride: int, dilation: int = 1) -> Tensor:
    return record(graph_windows.windows(x._node, axis, size, stride, dilation), x)


def _settings(
    name: str,
    x: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None,
    padding: Sizes,
    dilation: Sizes,
    ceil_mode: bool,
) -> list[tuple[int, int, int, int, int]]:
    """For each axis: window size, dilation, stride, padding before and after."""
    axes = x.ndim - 2
    sizes = sizes_of(kernel_size, axes, name, "kernel_size")
    steps = (
        sizes if stride is None or stride == [] or stride == () else sizes_of(stride, axes, name, "stride")
    )
    ends = sizes_of(padding, axes, name, "padding", 0)
    apart = sizes_of(dilation, axes, name, "dilation")
    settings = []
    for length, size, step, end, gap in zip(x.shape[2:], sizes, steps, ends, apart, strict=True):
        reach = (size - 1) * gap + 1
        if 2 * end > reach:
            raise ValueError(f"{name}: padding is at most half of a window, and {padding} was given")
        rest = length + 2 * end - reach
        count = (-(-rest // step) if ceil_mode else rest // step) + 1
        if ceil_mode and (count - 1) * step >= length + end:  # a window has to start inside the input
            count -= 1
        if rest < 0 and (not ceil_mode or count < 1):
            raise ValueError(f"{name}: windows of {sizes} do not fit into shape {x.shape}")
        settings.append((size, gap, step, end, max((count - 1) * step + reach - length - end, 0)))
    return settings


@cache
def _first_greatest(axis: int) -> Callable[..., list[Tensor]]:
    """The gradient goes to the first of equal items, as in PyTorch."""

    def rule(g: Tensor, value: Tensor, items: Tensor) -> list[Tensor]:
        return [where(_is_first(items, value, axis), expand_dims(g, axis=axis), 0.0)]

    return rule


def _is_first(items: Tensor, greatest: Tensor, axis: int) -> Tensor:
    size = items.shape[axis]
    # As wide as float32, so that vectors of both have the same length.
    numbers = reshape(arange(size, device=items.device, dtype=int32), (size, *(1,) * (items.ndim - axis - 1)))
    hit = (items == expand_dims(greatest, axis=axis)) | not_equal(items, items)
    return numbers == min_(where(hit, numbers, size), axis=axis, keepdims=True)


def _greatest(x: Tensor, number: Tensor | None, axis: int, windows: _Windows) -> tuple[Tensor, Tensor | None]:
    """The maximum of each window along an axis, and its flat index in the image if indices are given."""
    items = windows(x)
    value = lasting_vjp(max_(items, axis=axis + 1), [items], _first_greatest(axis + 1))
    if number is None:
        return value, None
    first = _is_first(items.detach(), value.detach(), axis + 1)
    return value, sum_(where(first, windows(number), 0), axis=axis + 1)


def _numbers(x: Tensor) -> Tensor:
    """The flat index of each item in its image."""
    numbers = arange(math.prod(x.shape[2:]), device=x.device, dtype=int64)
    return broadcast(reshape(numbers, x.shape[2:]), x.shape)


@composite
def _max_pool(
    axes: int,
    x: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The maximum of each window; the stride is the window size by default.

    With `return_indices`, also its flat index in the image.

    >>> ps.nn.functional.max_pool2d(ps.zeros((2, 3, 8, 8)), 2).shape
    (2, 3, 4, 4)
    """
    name = f"max_pool{axes}d"
    images = _checked(name, axes, x)
    settings = _settings(name, images, kernel_size, stride, padding, dilation, ceil_mode)
    around = [n for *_, before, after in reversed(settings) for n in (before, after)]
    number = _numbers(images) if return_indices else None
    if any(around):
        images = pad(images, around, value=-math.inf)
        number = None if number is None else pad(number, around)
    for axis in range(axes + 1, 1, -1):
        size, apart, step, _, _ = settings[axis - 2]
        along = _along(axis, size, step, apart)
        images, number = _greatest(images, number, axis, along)
    return _like(x, images) if number is None else (_like(x, images), _like(x, number))


def _along(axis: int, size: int, step: int, apart: int) -> _Windows:
    return lambda x: _windowed(x, axis, size, step, apart)


@composite
def _avg_pool(
    axes: int,
    x: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """The mean of each window; the stride is the window size by default.

    Padding counts as items of 0; with `count_include_pad=False` it does not count.

    >>> ps.nn.functional.avg_pool2d(ps.zeros((2, 3, 8, 8)), 2).shape
    (2, 3, 4, 4)
    """
    name = f"avg_pool{axes}d"
    if divisor_override is not None and divisor_override == 0:
        raise ValueError(f"{name}: divisor_override is not 0, and {divisor_override} was given")
    images = _checked(name, axes, x)
    settings = _settings(name, images, kernel_size, stride, padding, 1, ceil_mode)
    around = [n for *_, before, after in reversed(settings) for n in (before, after)]
    sums = pad(wide(images), around) if any(around) else wide(images)
    counts = np.ones(())
    for axis, (size, _, step, before, _) in reversed(list(enumerate(settings, 2))):
        length = images.shape[axis]
        sums = sum_(_windowed(sums, axis, size, step), axis=axis + 1)
        begin = np.arange(sums.shape[axis]) * step - before
        end = np.minimum(begin + size, length + before)
        own = end - begin if count_include_pad else np.minimum(end, length) - np.maximum(begin, 0)
        counts = np.multiply.outer(own, counts)
    if divisor_override is not None or (counts == counts.flat[0]).all():
        means = sums / float(divisor_override or counts.flat[0])
    else:
        means = sums / from_numpy(counts.astype(np.float32), x.device)
    return _like(x, astype(means, x.dtype))


def _adaptive_sizes(name: str, x: Tensor, output_size: Any) -> list[int]:
    axes = x.ndim - 2
    given = list(output_size) if isinstance(output_size, (tuple, list)) else [output_size] * axes
    if len(given) == axes:
        kept = zip(given, x.shape[2:], strict=True)
        return list(sizes_of([n if size is None else size for size, n in kept], axes, name, "output_size"))
    raise ValueError(f"{name}: output_size is a single size or {axes}, and {output_size} was given")


@composite
def _adaptive_avg_pool(axes: int, x: Tensor, output_size: int | Sequence[int | None] | None) -> Tensor:
    """The means of `output_size` windows that cover each axis; None keeps the length of an axis.

    >>> ps.nn.functional.adaptive_avg_pool2d(ps.zeros((2, 3, 7, 7)), 1).shape
    (2, 3, 1, 1)
    """
    name = f"adaptive_avg_pool{axes}d"
    images = _checked(name, axes, x)
    means = wide(images)
    for axis, count in enumerate(_adaptive_sizes(name, images, output_size), 2):
        length = images.shape[axis]
        if length % count:
            means = averaged(means, axis, count)
        elif length != count:
            size = length // count
            means = sum_(_windowed(means, axis, size, size), axis=axis + 1) / float(size)
    return _like(x, astype(means, x.dtype))


def _adaptive_max_pool(
    axes: int, x: Tensor, output_size: int | Sequence[int | None] | None, return_indices: bool = False
) -> Any:
    """The maximum of `output_size` windows that cover each axis; None keeps the length of an axis.

    >>> ps.nn.functional.adaptive_max_pool2d(ps.zeros((2, 3, 7, 7)), 1).shape
    (2, 3, 1, 1)
    """
    name = f"adaptive_max_pool{axes}d"
    images = _checked(name, axes, x)
    number = _numbers(images) if return_indices else None
    sizes = _adaptive_sizes(name, images, output_size)
    for axis in range(axes + 1, 1, -1):
        if images.shape[axis] != sizes[axis - 2]:
            along = _covering(axis, images.shape[axis], sizes[axis - 2])
            images, number = _greatest(images, number, axis, along)
    return _like(x, images) if number is None else (_like(x, images), _like(x, number))


def _covering(axis: int, length: int, count: int) -> _Windows:
    """Windows that cover an axis. If their sizes differ, the shorter windows repeat their last item."""
    if length % count == 0:
        return _along(axis, length // count, length // count, 1)
    begin = np.arange(count) * length // count
    end = -(-(np.arange(count) + 1) * length // count)
    items = np.minimum(begin[:, None] + np.arange((end - begin).max()), end[:, None] - 1)
    return lambda x: moveaxis(
        looked_up(moveaxis(x, axis, 0), from_numpy(items, x.device)), (0, 1), (axis, axis + 1)
    )


def _max_unpool(
    axes: int,
    x: Tensor,
    indices: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    output_size: Sequence[int] | None = None,
) -> Tensor:
    """Items at the `indices` of max pooling, and 0 elsewhere.

    Images of several sizes are pooled to the same size; `output_size` selects one of them.

    >>> x, at = ps.nn.functional.max_pool2d(ps.zeros((1, 2, 4, 4)), 2, return_indices=True)
    >>> ps.nn.functional.max_unpool2d(x, at, 2).shape
    (1, 2, 4, 4)
    """
    name = f"max_unpool{axes}d"
    images = _checked(name, axes, x)
    if indices.shape != x.shape:
        raise ValueError(f"{name}: items of shape {x.shape} and indices of shape {indices.shape}")
    sizes = sizes_of(kernel_size, axes, name, "kernel_size")
    steps = sizes if stride in (None, [], ()) else sizes_of(stride, axes, name, "stride")
    ends = sizes_of(padding, axes, name, "padding", 0)
    lengths = [
        (length - 1) * step - 2 * end + size
        for length, size, step, end in zip(images.shape[2:], sizes, steps, ends, strict=True)
    ]
    if output_size is not None:
        wanted = list(output_size)[-axes:]
        near = zip(wanted, lengths, steps, strict=True)
        if len(wanted) != axes or not all(abs(own - usual) < step for own, usual, step in near):
            raise ValueError(
                f"{name}: output_size is {lengths}, give or take less than a stride of {steps}, "
                f"and {output_size} was given"
            )
        lengths = wanted
    rows = (*images.shape[:2], math.prod(images.shape[2:]))
    nothing = zeros((*images.shape[:2], math.prod(lengths)), dtype=x.dtype, device=x.device)
    index, items = reshape(indices, rows), reshape(images, rows)
    # An item may be the maximum of several windows; each gets the gradient at its index.
    filled = lasting_vjp(scatter(nothing, 2, index, items.detach()), [items, index], _of_places)
    return _like(x, reshape(filled, (*images.shape[:2], *lengths)))


def _of_places(g: Tensor, _: Tensor, items: Tensor, index: Tensor) -> list[Tensor | None]:
    return [take_along_axis(g, index, axis=2), None]


max_pool1d, max_pool2d, max_pool3d = (for_axes(_max_pool, axes) for axes in (1, 2, 3))
max_unpool1d, max_unpool2d, max_unpool3d = (for_axes(_max_unpool, axes) for axes in (1, 2, 3))
avg_pool1d, avg_pool2d, avg_pool3d = (for_axes(_avg_pool, axes) for axes in (1, 2, 3))
adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = (
    for_axes(_adaptive_avg_pool, axes) for axes in (1, 2, 3)
)
adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = (
    for_axes(_adaptive_max_pool, axes) for axes in (1, 2, 3)
)
