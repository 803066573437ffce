"""Convolutions, their transposes, and windows of images."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from penstock.graph import shaping
from penstock.graph.convolution import columns, convolution, convolution_transpose, from_columns, padded
from penstock.graph.convolution_reference import Geometry
from penstock.tensor import dtypes
from penstock.tensor.arguments import integers
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor, record
from penstock.tensor.manipulation import astype, reshape
from penstock.tensor.operands import device_of

Rest = ParamSpec("Rest")
Result = TypeVar("Result")
Sizes = int | Sequence[int]


def sizes_of(given: Sizes, axes: int, name: str, what: str, least: int = 1) -> tuple[int, ...]:
    """An integer for each axis, given as a single integer or as several."""
    several = integers(given, name, what)
    several = several * axes if len(several) == 1 else several
    if len(several) != axes or min(several) < least:
        raise ValueError(
            f"{name}: {what} is an integer of {least} or more, or {axes} of them, and {given} was given"
        )
    return several


def for_axes(function: Callable[Concatenate[int, Rest], Result], axes: int) -> Callable[Rest, Result]:
    """Bind the first argument of a function, the number of axes, which is appended to its name."""

    @wraps(function)
    def of_axes(*args: Rest.args, **kwargs: Rest.kwargs) -> Result:
        return function(axes, *args, **kwargs)

    of_axes.__name__ = of_axes.__qualname__ = f"{function.__name__.removeprefix('_')}{axes}d"
    signature = inspect.signature(function)
    of_axes.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore
    return of_axes


def same_padding(sizes: Sequence[int], dilation: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The padding of 'same' before and after each axis; an odd item goes after."""
    total = [(size - 1) * apart for size, apart in zip(sizes, dilation, strict=True)]
    return tuple((n // 2, n - n // 2) for n in total)


def padding_of(
    padding: Sizes | str, sizes: Sequence[int], stride: Sequence[int], dilation: Sequence[int], name: str
) -> tuple[tuple[int, int], ...]:
    """The padding before and after each axis."""
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise ValueError(f"{name}: padding is integers, 'same' or 'valid', and {padding!r} was given")
        if padding == "same" and set(stride) != {1}:
            raise ValueError(f"{name}: padding 'same' needs a stride of 1, and {tuple(stride)} was given")
        return same_padding(sizes, dilation) if padding == "same" else ((0, 0),) * len(sizes)
    return tuple((n, n) for n in sizes_of(padding, len(sizes), name, "padding", 0))


def _checked(name: str, axes: int, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The input with a batch axis, and the weight, in a common dtype."""
    for what, given in (("x", x), ("the weight", weight)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{name}: {what} is a tensor, and {type(given).__name__} was given")
        if given.dtype.kind != "f":
            raise TypeError(f"{name} does not take {given.dtype}; it computes in floating point")
    device_of(name, x, weight)
    if weight.ndim != axes + 2 or x.ndim not in (axes + 1, axes + 2):
        raise ValueError(
            f"{name} takes (batch, channels, {axes} more axes) and a weight of {axes + 2} axes, and the "
            f"shapes {x.shape} and {weight.shape} were given"
        )
    if not x.size or not weight.size:
        raise ValueError(f"{name} needs items, and the shapes {x.shape} and {weight.shape} were given")
    dtype = dtypes.promote(x.dtype, weight.dtype)
    batched = x if x.ndim == axes + 2 else reshape(x, (1, *x.shape))
    return astype(batched, dtype), astype(weight, dtype)


def _with_bias(name: str, result: Tensor, bias: Tensor | None, batched: bool) -> Tensor:
    if bias is not None:
        if bias.shape != (result.shape[1],):
            raise ValueError(f"{name}: {result.shape[1]} channels and a bias of shape {bias.shape}")
        result = result + reshape(bias, (-1, *(1,) * (result.ndim - 2)))
    return result if batched else reshape(result, result.shape[1:])


@composite
def _conv(
    axes: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """(batch, channels, ...) convolved with a weight (outputs, channels of a group, window), as in PyTorch.

    Settings are an integer for all axes after the channels, or one for each. The padding may be 'same', which
    keeps the lengths, or 'valid', which is none. The batch axis may be left out.

    >>> ps.nn.functional.conv2d(ps.zeros((2, 3, 8, 8)), ps.zeros((5, 3, 3, 3)), padding=1).shape
    (2, 5, 8, 8)
    """
    name = f"conv{axes}d"
    images, weight = _checked(name, axes, x, weight)
    sizes = weight.shape[2:]
    steps = sizes_of(stride, axes, name, "stride")
    apart = sizes_of(dilation, axes, name, "dilation")
    geometry = Geometry(steps, padding_of(padding, sizes, steps, apart, name), apart, groups)
    fits = groups >= 1 and images.shape[1] == weight.shape[1] * groups and weight.shape[0] % groups == 0
    if not fits:
        raise ValueError(
            f"{name}: a weight of shape {weight.shape} in {groups} groups takes {weight.shape[1] * groups} "
            f"channels and gives a multiple of {groups}, and the shape {x.shape} was given"
        )
    if min(geometry.counts(images.shape[2:], sizes)) < 1:
        raise ValueError(
            f"{name}: windows of {sizes} with dilation {apart} do not fit into shape {x.shape} with padding "
            f"{padding}"
        )
    result = record(convolution(images._node, weight._node, geometry), images, weight)
    return _with_bias(name, result, bias, x.ndim == axes + 2)


def _conv_transpose(
    axes: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Tensor:
    """The transpose of a convolution, with a weight (channels, outputs of a group, window), as in PyTorch.

    `output_padding` adds items at the end of each axis: several lengths convolve to the same length.

    >>> ps.nn.functional.conv_transpose2d(ps.zeros((2, 3, 4, 4)), ps.zeros((3, 5, 2, 2)), stride=2).shape
    (2, 5, 8, 8)
    """
    name = f"conv_transpose{axes}d"
    images, weight = _checked(name, axes, x, weight)
    steps = sizes_of(stride, axes, name, "stride")
    apart = sizes_of(dilation, axes, name, "dilation")
    ends = sizes_of(padding, axes, name, "padding", 0)
    more = sizes_of(output_padding, axes, name, "output_padding", 0)
    if groups < 1 or images.shape[1] != weight.shape[0] or weight.shape[0] % groups:
        raise ValueError(
            f"{name}: a weight of shape {weight.shape} takes {weight.shape[0]} channels, in {groups} groups "
            f"of the same size, and the shape {x.shape} was given"
        )
    if any(extra >= max(step, gap) for extra, step, gap in zip(more, steps, apart, strict=True)):
        raise ValueError(f"{name}: output_padding is less than stride or dilation, and {more} was given")
    along = zip(images.shape[2:], weight.shape[2:], steps, apart, ends, more, strict=True)
    lengths = tuple(
        (n - 1) * step + (size - 1) * gap + 1 - 2 * end + extra for n, size, step, gap, end, extra in along
    )
    if min(lengths) < 1:
        raise ValueError(f"{name}: nothing is left of shape {x.shape} with padding {ends}: {lengths}")
    # An output padding is padding after the last window, which the convolution does not read.
    pairs = tuple((end, end - extra) for end, extra in zip(ends, more, strict=True))
    geometry = Geometry(steps, pairs, apart, groups)
    node = convolution_transpose(images._node, weight._node, geometry, lengths)
    result = record(node, images, weight)
    return _with_bias(name, result, bias, x.ndim == axes + 2)


conv1d, conv2d, conv3d = (for_axes(_conv, axes) for axes in (1, 2, 3))
conv_transpose1d, conv_transpose2d, conv_transpose3d = (for_axes(_conv_transpose, n) for n in (1, 2, 3))


def unfold(
    x: Tensor, kernel_size: Sizes, dilation: Sizes = 1, padding: Sizes = 0, stride: Sizes = 1
) -> Tensor:
    """Windows of (batch, channels, height, width) as (batch, channels * items of a window, windows).

    >>> ps.nn.functional.unfold(ps.zeros((2, 3, 4, 4)), 2).shape
    (2, 12, 9)
    """
    sizes, apart, ends, steps = _window_settings("unfold", kernel_size, dilation, padding, stride)
    if x.ndim not in (3, 4):
        raise ValueError(f"unfold takes (batch, channels, height, width), and the shape {x.shape} was given")
    images = x if x.ndim == 4 else reshape(x, (1, *x.shape))
    geometry = Geometry(steps, tuple((n, n) for n in ends), apart)
    if min(geometry.counts(images.shape[2:], sizes)) < 1:
        raise ValueError(f"unfold: windows of {sizes} do not fit into shape {x.shape}")
    parts = columns(padded(images._node, geometry.padding), sizes, steps, apart)
    flat = shaping.reshape(parts, (*x.shape[:-3], parts.shape[1] * parts.shape[2], parts.shape[3]))
    return record(flat, x)


def fold(
    x: Tensor,
    output_size: Sizes,
    kernel_size: Sizes,
    dilation: Sizes = 1,
    padding: Sizes = 0,
    stride: Sizes = 1,
) -> Tensor:
    """The transpose of `unfold`: images in which items of overlapping windows are summed.

    >>> ps.nn.functional.fold(ps.zeros((2, 12, 9)), (4, 4), 2).shape
    (2, 3, 4, 4)
    """
    sizes, apart, ends, steps = _window_settings("fold", kernel_size, dilation, padding, stride)
    lengths = sizes_of(output_size, 2, "fold", "output_size")
    counts = Geometry(steps, tuple((n, n) for n in ends), apart).counts(lengths, sizes)
    items = math.prod(sizes)
    if x.ndim not in (2, 3) or min(counts) < 1 or x.shape[-1] != math.prod(counts) or x.shape[-2] % items:
        raise ValueError(
            f"fold: images of {lengths} have {counts} windows of {sizes}, so (batch, a multiple of {items}, "
            f"{math.prod(counts)}) is needed, and the shape {x.shape} was given"
        )
    parts = shaping.reshape(x._node, (math.prod(x.shape[:-2]), x.shape[-2] // items, items, x.shape[-1]))
    whole = tuple(n + 2 * end for n, end in zip(lengths, ends, strict=True))
    added = padded(from_columns(parts, whole, sizes, steps, apart), [(-n, -n) for n in ends])
    return record(shaping.reshape(added, (*x.shape[:-2], *added.shape[1:])), x)


def _window_settings(name: str, *given: Sizes) -> list[tuple[int, ...]]:
    names = ("kernel_size", "dilation", "padding", "stride")
    return [sizes_of(n, 2, name, what, what != "padding") for n, what in zip(given, names, strict=True)]
