"""Convolutions as matrix products of windows with the weight.

Three bilinear functions are each other's gradients: the convolution, its transpose, and the gradient by the
weight, which is a sum over windows.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Concatenate, ParamSpec, TypeVar

from penstock.graph import shaping
from penstock.graph.node import Node
from penstock.graph.windows import overlap_add, window_count, windows
from penstock.tensor import dtypes
from penstock.tensor.arguments import integers
from penstock.tensor.autograd import lasting_vjp
from penstock.tensor.broadcasting import broadcast
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor, record
from penstock.tensor.creation import zeros
from penstock.tensor.linear import matmul
from penstock.tensor.manipulation import astype, flip, permute_dims, reshape, stack
from penstock.tensor.operands import device_of
from penstock.tensor.padding import pad

Rest = ParamSpec("Rest")
Result = TypeVar("Result")
Sizes = int | Sequence[int]
_FEW = 64  # windows of an image; with fewer, the images of a batch are columns of a single product
_MOST_PHASES = 16  # products that a transpose with a stride is computed by


@dataclass(frozen=True)
class Geometry:
    """The settings of windows, for each axis."""

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # zeros before and after
    dilation: tuple[int, ...]
    groups: int = 1


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


def _padded(x: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    return pad(x, [n for pair in reversed(pairs) for n in pair]) if any(map(any, pairs)) else x


def columns(x: Tensor, sizes: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    """(batch, channels, ...) as (batch, channels, each item of a window, each window)."""
    node, axes = x._node, len(sizes)
    for at in range(axes):
        node = windows(node, 2 + 2 * at, sizes[at], stride[at], dilation[at])
    items, places = range(3, 3 + 2 * axes, 2), range(2, 2 + 2 * axes, 2)
    counts = node.shape[2::2]
    node = shaping.permute(node, (0, 1, *items, *places))
    flat = (*node.shape[:2], math.prod(sizes), math.prod(counts))
    return record(shaping.reshape(node, flat), x)


def from_columns(
    x: Tensor,
    lengths: tuple[int, ...],
    sizes: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Tensor:
    """The transpose of `columns`: items of overlapping windows are summed."""
    axes = len(sizes)
    spaced = zip(lengths, sizes, stride, dilation, strict=True)
    counts = [window_count(*along) for along in spaced]
    node: Node = shaping.reshape(x._node, (*x.shape[:2], *sizes, *counts))
    order = [axis for at in range(axes) for axis in (2 + axes + at, 2 + at)]
    node = shaping.permute(node, (0, 1, *order))
    for at in range(axes - 1, -1, -1):
        node = overlap_add(node, 2 + 2 * at, lengths[at], stride[at], dilation[at])
    return record(node, x)


def _grouped_columns(x: Tensor, sizes: tuple[int, ...], geometry: Geometry) -> Tensor:
    """The columns of each group of channels: (batch, groups, channels and items of a window, windows)."""
    parts = columns(_padded(x, geometry.padding), sizes, geometry.stride, geometry.dilation)
    inner = x.shape[1] // geometry.groups * parts.shape[2]
    return reshape(parts, (x.shape[0], geometry.groups, inner, parts.shape[3]))


def _counts(lengths: Sequence[int], sizes: Sequence[int], geometry: Geometry) -> tuple[int, ...]:
    whole = [n + before + after for n, (before, after) in zip(lengths, geometry.padding, strict=True)]
    along = zip(whole, sizes, geometry.stride, geometry.dilation, strict=True)
    return tuple(window_count(*axis) for axis in along)


def convolved(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """The convolution of (batch, channels, ...) with (outputs, channels of a group, ...)."""
    value = _convolved(x.detach(), weight.detach(), geometry)
    return lasting_vjp(value, [x, weight], _convolved_rule(geometry))


@composite
def _convolved(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    batch, groups, outputs = x.shape[0], geometry.groups, weight.shape[0]
    sizes = weight.shape[2:]
    counts = _counts(x.shape[2:], sizes, geometry)
    right = _grouped_columns(x, sizes, geometry)
    left = reshape(weight, (groups, outputs // groups, right.shape[2]))
    if batch > 1 and right.shape[3] < _FEW:
        wide = reshape(permute_dims(right, (1, 2, 0, 3)), (groups, right.shape[2], -1))
        product = reshape(matmul(left, wide), (outputs, batch, *counts))
        return permute_dims(product, (1, 0, *range(2, product.ndim)))
    product = matmul(broadcast(left, (batch, *left.shape)), right)
    return reshape(product, (batch, outputs, *counts))


@cache
def _convolved_rule(geometry: Geometry) -> Callable[..., list[Tensor]]:
    return lambda g, _, x, weight: [
        transposed(g, weight, geometry, x.shape[2:]),
        over_windows(x, g, geometry, weight.shape[2:]),
    ]


def transposed(x: Tensor, weight: Tensor, geometry: Geometry, lengths: tuple[int, ...]) -> Tensor:
    """The gradient of `convolved` by its first argument, of these lengths."""
    value = _transposed(x.detach(), weight.detach(), geometry, lengths)
    return lasting_vjp(value, [x, weight], _transposed_rule(geometry))


@composite
def _transposed(x: Tensor, weight: Tensor, geometry: Geometry, lengths: tuple[int, ...]) -> Tensor:
    groups, (outputs, channels), sizes = geometry.groups, weight.shape[:2], weight.shape[2:]
    parts = reshape(weight, (groups, outputs // groups, channels, *sizes))
    if set(geometry.stride) == {1}:
        return _turned(x, parts, geometry, lengths)
    along = zip(sizes, geometry.stride, geometry.dilation, strict=True)
    overlap = any((size - 1) * apart >= step for size, step, apart in along)
    if overlap and math.prod(geometry.stride) <= _MOST_PHASES:
        return _by_phases(x, parts, geometry, lengths)
    inner = channels * math.prod(sizes)
    left = permute_dims(reshape(parts, (groups, outputs // groups, inner)), (0, 2, 1))
    right = reshape(x, (x.shape[0], groups, outputs // groups, -1))
    product = matmul(broadcast(left, (x.shape[0], *left.shape)), right)
    flat = reshape(product, (x.shape[0], groups * channels, math.prod(sizes), -1))
    # Up to the last window; the items after it, of an output padding, are 0.
    spaced = zip(x.shape[2:], sizes, geometry.stride, geometry.dilation, strict=True)
    reached = tuple((n - 1) * step + (size - 1) * apart + 1 for n, size, step, apart in spaced)
    added = from_columns(flat, reached, sizes, geometry.stride, geometry.dilation)
    cut = zip(lengths, reached, geometry.padding, strict=True)
    return _padded(added, [(-before, length + before - end) for length, end, (before, _) in cut])


def _turned(x: Tensor, parts: Tensor, geometry: Geometry, lengths: tuple[int, ...]) -> Tensor:
    """The transpose for a stride of 1: with the weight turned round, it is a convolution."""
    (groups, outputs, channels), sizes = parts.shape[:3], parts.shape[3:]
    turned = permute_dims(flip(parts, tuple(range(3, parts.ndim))), (0, 2, 1, *range(3, parts.ndim)))
    turned = reshape(turned, (groups * channels, outputs, *sizes))
    reach = [(size - 1) * dilation for size, dilation in zip(sizes, geometry.dilation, strict=True)]
    ends = [
        (most - before, length - count + before)
        for most, (before, _), length, count in zip(
            reach, geometry.padding, lengths, x.shape[2:], strict=True
        )
    ]
    return _convolved(x, turned, Geometry(geometry.stride, tuple(ends), geometry.dilation, groups))


@dataclass(frozen=True)
class _Phase:
    """Along an axis, the items of a transpose whose indices have the same remainder by the stride."""

    items: slice  # of the window that reach them; they are this transpose with a stride of 1
    dilation: int
    before: int  # of its padding
    length: int


def _phases(size: int, stride: int, dilation: int, before: int, length: int) -> list[_Phase | None]:
    """The phases by remainder, each as long as the longest; None for those that no window reaches."""
    step = stride // math.gcd(stride, dilation)  # from an item of the window to the next of the same phase
    phases: list[_Phase | None] = []
    for remainder in range(stride):
        padded = remainder + before  # in the image with its padding, which windows count from
        first = next((k for k in range(min(size, step)) if (padded - k * dilation) % stride == 0), None)
        if first is None:
            phases.append(None)
            continue
        apart = step * dilation // stride
        start = (padded - first * dilation) // stride
        phases.append(_Phase(slice(first, None, step), apart, start, -(-length // stride)))
    return phases


def _by_phases(x: Tensor, parts: Tensor, geometry: Geometry, lengths: tuple[int, ...]) -> Tensor:
    """The transpose where windows overlap: a convolution for each combination of phases, interleaved."""
    axes, groups, channels = len(lengths), geometry.groups, parts.shape[2]
    along = zip(parts.shape[3:], geometry.stride, geometry.dilation, geometry.padding, lengths, strict=True)
    phases = [_phases(size, step, apart, before, n) for size, step, apart, (before, _), n in along]
    counts = tuple(-(-n // step) for n, step in zip(lengths, geometry.stride, strict=True))
    shape = (x.shape[0], groups * channels, *counts)
    results = []
    for chosen in itertools.product(*phases):
        reaching = [phase for phase in chosen if phase is not None]
        if len(reaching) < axes:
            results.append(zeros(shape, dtype=x.dtype, device=x.device))
            continue
        items = parts[(..., *(phase.items for phase in reaching))]
        spacing = Geometry(
            (1,) * axes,
            tuple((phase.before, 0) for phase in reaching),
            tuple(phase.dilation for phase in reaching),
            groups,
        )
        results.append(_turned(x, items, spacing, counts))
    whole = reshape(stack(results, axis=-1), (*shape, *geometry.stride))
    order = (axis for at in range(axes) for axis in (2 + at, 2 + axes + at))
    whole = permute_dims(whole, (0, 1, *order))
    whole = reshape(whole, (*shape[:2], *(n * s for n, s in zip(counts, geometry.stride, strict=True))))
    return whole[(..., *(slice(n) for n in lengths))]


@cache
def _transposed_rule(geometry: Geometry) -> Callable[..., list[Tensor]]:
    return lambda g, _, x, weight: [
        convolved(g, weight, geometry),
        over_windows(g, x, geometry, weight.shape[2:]),
    ]


def over_windows(x: Tensor, g: Tensor, geometry: Geometry, sizes: tuple[int, ...]) -> Tensor:
    """The gradient of `convolved` by its weight: the sum over all windows of their products with `g`."""
    value = _over_windows(x.detach(), g.detach(), geometry, sizes)
    return lasting_vjp(value, [x, g], _over_windows_rule(geometry))


@composite
def _over_windows(x: Tensor, g: Tensor, geometry: Geometry, sizes: tuple[int, ...]) -> Tensor:
    groups, outputs = geometry.groups, g.shape[1]
    right = permute_dims(_grouped_columns(x, sizes, geometry), (1, 0, 3, 2))
    right = reshape(right, (groups, -1, right.shape[3]))
    left = permute_dims(reshape(g, (g.shape[0], groups, outputs // groups, -1)), (1, 2, 0, 3))
    product = matmul(reshape(left, (*left.shape[:2], -1)), right)
    return reshape(product, (outputs, x.shape[1] // groups, *sizes))


@cache
def _over_windows_rule(geometry: Geometry) -> Callable[..., list[Tensor]]:
    return lambda h, _, x, g: [
        transposed(g, h, geometry, x.shape[2:]),
        convolved(x, h, geometry),
    ]


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
    if min(_counts(images.shape[2:], sizes, geometry)) < 1:
        raise ValueError(
            f"{name}: windows of {sizes} with dilation {apart} do not fit into shape {x.shape} with padding "
            f"{padding}"
        )
    return _with_bias(name, convolved(images, weight, geometry), bias, x.ndim == axes + 2)


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
    result = transposed(images, weight, Geometry(steps, pairs, apart, groups), lengths)
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
    if min(_counts(images.shape[2:], sizes, geometry)) < 1:
        raise ValueError(f"unfold: windows of {sizes} do not fit into shape {x.shape}")
    parts = _grouped_columns(images, sizes, geometry)
    return reshape(parts, (*x.shape[:-3], *parts.shape[2:]))


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
    counts = _counts(lengths, sizes, Geometry(steps, tuple((n, n) for n in ends), apart))
    items = math.prod(sizes)
    if x.ndim not in (2, 3) or min(counts) < 1 or x.shape[-1] != math.prod(counts) or x.shape[-2] % items:
        raise ValueError(
            f"fold: images of {lengths} have {counts} windows of {sizes}, so (batch, a multiple of {items}, "
            f"{math.prod(counts)}) is needed, and the shape {x.shape} was given"
        )
    parts = reshape(x, (-1, x.shape[-2] // items, items, x.shape[-1]))
    whole = tuple(n + 2 * end for n, end in zip(lengths, ends, strict=True))
    added = _padded(from_columns(parts, whole, sizes, steps, apart), [(-n, -n) for n in ends])
    return reshape(added, (*x.shape[:-2], *added.shape[1:]))


def _window_settings(name: str, *given: Sizes) -> list[tuple[int, ...]]:
    names = ("kernel_size", "dilation", "padding", "stride")
    return [sizes_of(n, 2, name, what, what != "padding") for n, what in zip(given, names, strict=True)]
