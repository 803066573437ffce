"""Convolutions as primitives, and their decompositions into products of matrices.

Three bilinear functions are each other's gradients: the convolution, its transpose, and the gradient by the
weight, which is a sum over windows. Images are (batch, channels, ...), weights (outputs, channels of a group,
window). They are always decomposed: into primitives for images with the channels last, where a device has
kernels for these (`implicit_convolution`); into products that read windows in place; or, where a library
multiplies matrices, into products of matrices whose rows are windows with the channels last, which the
library reads fastest. `channels_last` keeps what follows in that order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.drivers.driver import Capabilities
from penstock.graph.checkpoint import BARRIER
from penstock.graph.contraction import matmul
from penstock.graph.convolution_reference import (
    Geometry,
    Pairs,
    convolution_reference,
    reached,
    transpose_reference,
    weight_reference,
)
from penstock.graph.creating import sequence
from penstock.graph.dtypes import int32
from penstock.graph.elementwise import full, greater, like, where
from penstock.graph.implicit_convolution import channels_from_end, channels_to_end, implicit
from penstock.graph.node import DType, Kind, Node, Primitive, Shape
from penstock.graph.reducing import expand, reverse
from penstock.graph.shaping import concat, pad, permute, reshape, slice_, slice_axis
from penstock.graph.windows import overlap_add, window_count, windows

Decomposition = Callable[[Node, Capabilities], Node]

_FEW = 64  # windows of an image; with fewer, the images of a batch are columns of a single product
_MOST_PHASES = 16  # products that a transpose with a stride is computed by
_ALIGNED = 8  # items that a library reads at once; rows of other lengths are padded with zeros


def convolution(x: Node, weight: Node, geometry: Geometry) -> Node:
    """(batch, channels, ...) convolved with a weight (outputs, channels of a group, window)."""
    return Node(CONVOLUTION, (x, weight), {"geometry": geometry})


def convolution_transpose(x: Node, weight: Node, geometry: Geometry, lengths: tuple[int, ...]) -> Node:
    """The gradient of a convolution by its first argument, which has these lengths."""
    return Node(CONVOLUTION_TRANSPOSE, (x, weight), {"geometry": geometry, "lengths": lengths})


def convolution_weight(x: Node, g: Node, geometry: Geometry, sizes: tuple[int, ...]) -> Node:
    """The gradient of a convolution by its weight: the sum over all windows of their products with `g`."""
    return Node(CONVOLUTION_WEIGHT, (x, g), {"geometry": geometry, "sizes": sizes})


def columns(x: Node, sizes: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Node:
    """(batch, channels, ...) as (batch, channels, each item of a window, each window)."""
    node, axes = x, len(sizes)
    for at in range(axes):
        node = windows(node, 2 + 2 * at, sizes[at], stride[at], dilation[at])
    items, places = range(3, 3 + 2 * axes, 2), range(2, 2 + 2 * axes, 2)
    counts = node.shape[2::2]
    node = permute(node, (0, 1, *items, *places))
    return reshape(node, (*node.shape[:2], math.prod(sizes), math.prod(counts)))


def from_columns(
    x: Node,
    lengths: tuple[int, ...],
    sizes: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Node:
    """The transpose of `columns`: items of overlapping windows are summed."""
    axes = len(sizes)
    counts = [window_count(*along) for along in zip(lengths, sizes, stride, dilation, strict=True)]
    node = reshape(x, (*x.shape[:2], *sizes, *counts))
    order = [axis for at in range(axes) for axis in (2 + axes + at, 2 + at)]
    return _added(permute(node, (0, 1, *order)), 2, lengths, stride, dilation)


def _added(
    node: Node, first: int, lengths: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Node:
    """Pairs of axes from `first` on, (window, item), as single axes of these lengths."""
    for at in range(len(lengths) - 1, -1, -1):
        node = overlap_add(node, first + 2 * at, lengths[at], stride[at], dilation[at])
    return node


def padded(x: Node, pairs: Sequence[tuple[int, int]], first: int = 2) -> Node:
    """Zeros before and after the axes from `first` on; a negative number removes items."""
    every = [(0, 0)] * first + [*pairs]
    every += [(0, 0)] * (x.ndim - len(every))
    cut = [
        (max(0, -before), n - max(0, -before) - max(0, -after), 1)
        for n, (before, after) in zip(x.shape, every, strict=True)
    ]
    x = slice_(x, tuple(cut))
    slices = tuple((max(0, before), n, 1) for n, (before, _) in zip(x.shape, every, strict=True))
    shape = tuple(
        n + max(0, before) + max(0, after) for n, (before, after) in zip(x.shape, every, strict=True)
    )
    return x if shape == x.shape else pad(x, slices, shape)


# Products that read windows in place


def _in_place(x: Node, weight: Node, geometry: Geometry) -> Node:
    batch, groups, outputs = x.shape[0], geometry.groups, weight.shape[0]
    sizes = weight.shape[2:]
    counts = geometry.counts(x.shape[2:], sizes)
    right = _grouped_columns(x, sizes, geometry)
    left = reshape(weight, (groups, outputs // groups, right.shape[2]))
    if batch > 1 and right.shape[3] < _FEW:
        wide = reshape(permute(right, (1, 2, 0, 3)), (groups, right.shape[2], batch * right.shape[3]))
        product = reshape(matmul(left, wide), (outputs, batch, *counts))
        return permute(product, (1, 0, *range(2, product.ndim)))
    product = matmul(_repeated(left, batch), right)
    return reshape(product, (batch, outputs, *counts))


def _grouped_columns(x: Node, sizes: tuple[int, ...], geometry: Geometry) -> Node:
    """The columns of each group of channels: (batch, groups, channels and items of a window, windows)."""
    parts = columns(padded(x, geometry.padding), sizes, geometry.stride, geometry.dilation)
    inner = x.shape[1] // geometry.groups * parts.shape[2]
    return reshape(parts, (x.shape[0], geometry.groups, inner, parts.shape[3]))


def _repeated(x: Node, count: int) -> Node:
    """`count` times the same, along a new first axis."""
    return expand(reshape(x, (1, *x.shape)), (count, *x.shape))


def _transpose_in_place(x: Node, weight: Node, geometry: Geometry, lengths: tuple[int, ...]) -> Node:
    """The transpose by sums over windows that are computed one by one."""
    groups, (outputs, channels), sizes = geometry.groups, weight.shape[:2], weight.shape[2:]
    inner = channels * math.prod(sizes)
    left = permute(reshape(weight, (groups, outputs // groups, inner)), (0, 2, 1))
    right = reshape(x, (x.shape[0], groups, outputs // groups, math.prod(x.shape[2:])))
    product = matmul(_repeated(left, x.shape[0]), right)
    flat = reshape(product, (x.shape[0], groups * channels, math.prod(sizes), right.shape[3]))
    ends = reached(x.shape[2:], sizes, geometry)
    added = from_columns(flat, ends, sizes, geometry.stride, geometry.dilation)
    return padded(added, _to_lengths(lengths, ends, geometry))


def _to_lengths(lengths: Sequence[int], reached: Sequence[int], geometry: Geometry) -> Pairs:
    """What is added or removed at the ends, so that images with padding become images of `lengths`."""
    along = zip(lengths, reached, geometry.padding, strict=True)
    return tuple((-before, length + before - end) for length, end, (before, _) in along)


def _turned(x: Node, weight: Node, geometry: Geometry, lengths: tuple[int, ...]) -> Node:
    """The transpose for a stride of 1: with the weight turned round, it is a convolution."""
    groups, (outputs, channels), sizes = geometry.groups, weight.shape[:2], weight.shape[2:]
    parts = reshape(weight, (groups, outputs // groups, channels, *sizes))
    for axis in range(3, parts.ndim):
        parts = reverse(parts, axis)
    turned = permute(parts, (0, 2, 1, *range(3, parts.ndim)))
    turned = reshape(turned, (groups * channels, outputs // groups, *sizes))
    reach = [(size - 1) * dilation for size, dilation in zip(sizes, geometry.dilation, strict=True)]
    ends = [
        (most - before, length - count + before)
        for most, (before, _), length, count in zip(
            reach, geometry.padding, lengths, x.shape[2:], strict=True
        )
    ]
    return convolution(x, turned, Geometry(geometry.stride, tuple(ends), geometry.dilation, groups))


@dataclass(frozen=True)
class _Phase:
    """Along an axis, the items of a transpose whose indices have the same remainder by the stride."""

    first: int  # of the items of the window that reach them; they are this transpose with a stride of 1
    step: int
    dilation: int
    before: int  # of its padding


def _phases(size: int, stride: int, dilation: int, before: int) -> list[_Phase | None]:
    """The phases by remainder; None for those that no window reaches."""
    step = stride // math.gcd(stride, dilation)  # from an item of the window to the next of the same phase
    phases: list[_Phase | None] = []
    for remainder in range(stride):
        reached = remainder + before  # in the image with its padding, which windows count from
        first = next((k for k in range(min(size, step)) if (reached - k * dilation) % stride == 0), None)
        if first is None:
            phases.append(None)
            continue
        phases.append(_Phase(first, step, step * dilation // stride, (reached - first * dilation) // stride))
    return phases


def _by_phases(x: Node, weight: Node, geometry: Geometry, lengths: tuple[int, ...], last: bool) -> Node:
    """The transpose where windows overlap: a convolution for each combination of phases, interleaved.

    `last`: they are interleaved with the channels as the last axis.
    """
    axes, sizes = len(lengths), weight.shape[2:]
    along = zip(sizes, geometry.stride, geometry.dilation, geometry.padding, strict=True)
    phases = [_phases(size, step, apart, before) for size, step, apart, (before, _) in along]
    counts = tuple(-(-n // step) for n, step in zip(lengths, geometry.stride, strict=True))
    shape = (x.shape[0], geometry.groups * weight.shape[1], *counts)
    results = []
    for chosen in itertools.product(*phases):
        reaching = [phase for phase in chosen if phase is not None]
        if len(reaching) < axes:
            results.append(full(shape, x.dtype, 0))
            continue
        items = weight
        for axis, phase in enumerate(reaching, 2):
            count = -(-(weight.shape[axis] - phase.first) // phase.step)
            items = slice_axis(items, axis, phase.first, count, phase.step)
        spacing = Geometry(
            (1,) * axes,
            tuple((phase.before, 0) for phase in reaching),
            tuple(phase.dilation for phase in reaching),
            geometry.groups,
        )
        results.append(_turned(x, items, spacing, counts))
    if last:
        results = [channels_to_end(result) for result in results]
    whole = _interleaved(results, 1 if last else 2, geometry.stride)
    whole = slice_(
        whole, tuple((0, n, 1) for n in ((shape[0], *lengths, shape[1]) if last else (*shape[:2], *lengths)))
    )
    return channels_from_end(whole) if last else whole


def _interleaved(parts: Sequence[Node], first: int, stride: tuple[int, ...]) -> Node:
    """Images, for each combination of remainders by the stride, as a single image along axes from `first`."""
    axes, shape = len(stride), parts[0].shape
    counts, rest = shape[first : first + axes], shape[first + axes :]
    stacked = concat([reshape(part, (*shape[: first + axes], 1, *rest)) for part in parts], first + axes)
    whole = reshape(stacked, (*shape[: first + axes], *stride, *rest))
    order = (axis for at in range(axes) for axis in (first + at, first + axes + at))
    whole = permute(whole, (*range(first), *order, *range(first + 2 * axes, whole.ndim)))
    lengths = (count * step for count, step in zip(counts, stride, strict=True))
    return reshape(whole, (*shape[:first], *lengths, *rest))


def _weight_in_place(x: Node, g: Node, geometry: Geometry, sizes: tuple[int, ...]) -> Node:
    groups, outputs, count = geometry.groups, g.shape[1], math.prod(g.shape[2:])
    right = permute(_grouped_columns(x, sizes, geometry), (1, 0, 3, 2))
    right = reshape(right, (groups, x.shape[0] * count, right.shape[3]))
    left = permute(reshape(g, (g.shape[0], groups, outputs // groups, count)), (1, 2, 0, 3))
    product = matmul(reshape(left, (groups, outputs // groups, x.shape[0] * count)), right)
    return reshape(product, (outputs, x.shape[1] // groups, *sizes))


# Products of matrices whose rows are windows, with the channels last


def _rows(x: Node, sizes: tuple[int, ...], geometry: Geometry) -> Node:
    """Every window as a row of a matrix: the channels of its first item, then of its second, and so on."""
    if _in_runs(x.shape[1], sizes, geometry):
        return _rows_of_runs(x, sizes, geometry)
    axes = len(sizes)
    last = channels_to_end(x)
    # Windows read the channels of an item together, so that they should be neighbours in memory.
    ordered = Node(BARRIER, (last,), {"ordered": True}) if math.prod(sizes) > 1 else last
    node = padded(ordered, geometry.padding, 1)
    for at in range(axes):
        node = windows(node, 1 + 2 * at, sizes[at], geometry.stride[at], geometry.dilation[at])
    order = (*range(1, 1 + 2 * axes, 2), *range(2, 2 + 2 * axes, 2))
    node = permute(node, (0, *order, node.ndim - 1))
    inner = math.prod(node.shape[1 + axes :])
    return _widened(reshape(node, (math.prod(node.shape[: 1 + axes]), inner)))


def _in_runs(channels: int, sizes: tuple[int, ...], geometry: Geometry) -> bool:
    """Whether the items of a window along its last axis, with few channels each, are read as a single run."""
    return sizes[-1] > 1 and channels < _ALIGNED <= channels * sizes[-1] and geometry.dilation[-1] == 1


def _run(channels: int, sizes: tuple[int, ...]) -> int:
    """The items of a run, with those that are read beyond it, up to what is read at once."""
    return -(-channels * sizes[-1] // _ALIGNED) * _ALIGNED


def _rows_of_runs(x: Node, sizes: tuple[int, ...], geometry: Geometry) -> Node:
    """The same, with zeros after each run. The image is padded first, so that runs are read as they lie."""
    channels, axes, run = x.shape[1], len(sizes), _run(x.shape[1], sizes)
    node = padded(channels_to_end(x), geometry.padding, 1)
    node = reshape(node, (*node.shape[:-2], node.shape[-2] * channels))
    node = padded(node, [(0, run - channels * sizes[-1])], axes)  # the last run is read beyond the image
    node = Node(BARRIER, (node,), {})
    for at in range(axes - 1):
        node = windows(node, 1 + 2 * at, sizes[at], geometry.stride[at], geometry.dilation[at])
    node = windows(node, 2 * axes - 1, run, geometry.stride[-1] * channels)
    order = (*range(1, 1 + 2 * axes, 2), *range(2, 1 + 2 * axes, 2))
    node = permute(node, (0, *order))
    inside = greater(full((run,), int32, channels * sizes[-1]), sequence(0, 1, run, int32))
    inside = expand(reshape(inside, (1,) * (node.ndim - 1) + (run,)), node.shape)
    node = where(inside, node, like(node, 0))
    return reshape(node, (math.prod(node.shape[: 1 + axes]), math.prod(node.shape[1 + axes :])))


def _widened(matrix: Node) -> Node:
    """With zeros at the end of each row, up to a multiple of what a library reads at once."""
    short = matrix.shape[1] % _ALIGNED == 0 or matrix.shape[1] < 2 * _ALIGNED
    return matrix if short else padded(matrix, [(0, -matrix.shape[1] % _ALIGNED)], 1)


def _weight_rows(weight: Node, geometry: Geometry) -> Node:
    last, outputs, sizes = channels_to_end(weight), weight.shape[0], weight.shape[2:]
    if not _in_runs(weight.shape[1], sizes, geometry):
        return _widened(reshape(last, (outputs, weight.size // outputs)))
    length, run = weight.shape[1] * sizes[-1], _run(weight.shape[1], sizes)
    runs = padded(reshape(last, (outputs, *sizes[:-1], length)), [(0, run - length)], len(sizes))
    return reshape(runs, (outputs, runs.size // outputs))


def _by_rows(x: Node, weight: Node, geometry: Geometry) -> Node:
    rows, matrix = _rows(x, weight.shape[2:], geometry), _weight_rows(weight, geometry)
    product = matmul(rows, permute(matrix, (1, 0)))
    counts = geometry.counts(x.shape[2:], weight.shape[2:])
    return channels_from_end(reshape(product, (x.shape[0], *counts, weight.shape[0])))


def _transpose_by_rows(x: Node, weight: Node, geometry: Geometry, lengths: tuple[int, ...]) -> Node:
    """The transpose where windows do not overlap, or by sums over windows that are computed one by one."""
    sizes, axes = weight.shape[2:], len(lengths)
    g = channels_to_end(x)
    matrix = reshape(g, (g.size // g.shape[-1], g.shape[-1]))
    last = channels_to_end(weight)
    product = matmul(matrix, reshape(last, (weight.shape[0], weight.size // weight.shape[0])))
    node = reshape(product, (*g.shape[:-1], *last.shape[1:]))
    order = [axis for at in range(axes) for axis in (1 + at, 1 + axes + at)]
    node = permute(node, (0, *order, node.ndim - 1))
    ends = reached(x.shape[2:], sizes, geometry)
    added = _added(node, 1, ends, geometry.stride, geometry.dilation)
    return channels_from_end(padded(added, _to_lengths(lengths, ends, geometry), 1))


def _weight_by_rows(x: Node, g: Node, geometry: Geometry, sizes: tuple[int, ...]) -> Node:
    if math.prod(sizes) > 1:
        # Behind a barrier, so that the rows are computed once more and not kept since the convolution.
        x = Node(BARRIER, (x, g), {})
    rows, last = _rows(x, sizes, geometry), channels_to_end(g)
    matrix = reshape(last, (last.size // last.shape[-1], last.shape[-1]))
    product = matmul(permute(matrix, (1, 0)), rows)
    inner = x.shape[1] * math.prod(sizes)
    if _in_runs(x.shape[1], sizes, geometry):
        length, run = x.shape[1] * sizes[-1], _run(x.shape[1], sizes)
        runs = reshape(product, (g.shape[1], product.shape[1] // run, run))
        product = reshape(slice_axis(runs, 2, 0, length), (g.shape[1], inner))
    return channels_from_end(reshape(slice_axis(product, 1, 0, inner), (g.shape[1], *sizes, x.shape[1])))


# The primitives


def _by_library(geometry: Geometry, capabilities: Capabilities) -> bool:
    return capabilities.matmul_library and geometry.groups == 1


def _convolution_parts(node: Node, capabilities: Capabilities) -> Node:
    (x, weight), geometry = node.inputs, node.attributes["geometry"]
    return (_by_rows if _by_library(geometry, capabilities) else _in_place)(x, weight, geometry)


def _transpose_parts(node: Node, capabilities: Capabilities) -> Node:
    (x, weight), geometry, lengths = node.inputs, node.attributes["geometry"], node.attributes["lengths"]
    if set(geometry.stride) == {1}:
        return _turned(x, weight, geometry, lengths)
    last = _by_library(geometry, capabilities)
    along = zip(weight.shape[2:], geometry.stride, geometry.dilation, strict=True)
    overlap = any((size - 1) * apart >= step for size, step, apart in along)
    if overlap and math.prod(geometry.stride) <= _MOST_PHASES:
        return _by_phases(x, weight, geometry, lengths, last)
    return (_transpose_by_rows if last else _transpose_in_place)(x, weight, geometry, lengths)


def _weight_parts(node: Node, capabilities: Capabilities) -> Node:
    (x, g), geometry, sizes = node.inputs, node.attributes["geometry"], node.attributes["sizes"]
    by_rows = _by_library(geometry, capabilities)
    return (_weight_by_rows if by_rows else _weight_in_place)(x, g, geometry, sizes)


def _implicit_or(parts: Decomposition) -> Decomposition:
    """The decomposition for kernels that read windows from the image, or this one."""
    return lambda node, capabilities: implicit(node, capabilities) or parts(node, capabilities)


def _operations(node: Node) -> int:
    """Two for each product of an item of a window with an item of the weight."""
    x, y = node.inputs
    weight, images = {
        CONVOLUTION: (y, node),
        CONVOLUTION_TRANSPOSE: (y, x),
        CONVOLUTION_WEIGHT: (node, y),
    }[node.primitive]
    return 2 * weight.size * images.size // images.shape[1]


def _shape(x: Node, weight: Node, *, geometry: Geometry) -> tuple[Shape, DType]:
    return (x.shape[0], weight.shape[0], *geometry.counts(x.shape[2:], weight.shape[2:])), x.dtype


def _transpose_shape(
    x: Node, weight: Node, *, geometry: Geometry, lengths: tuple[int, ...]
) -> tuple[Shape, DType]:
    return (x.shape[0], weight.shape[1] * geometry.groups, *lengths), x.dtype


def _weight_shape(x: Node, g: Node, *, geometry: Geometry, sizes: tuple[int, ...]) -> tuple[Shape, DType]:
    return (g.shape[1], x.shape[1] // geometry.groups, *sizes), x.dtype


def _gradient(g: Node, n: Node) -> tuple[Node, Node]:
    (x, weight), geometry = n.inputs, n.attributes["geometry"]
    by_image = convolution_transpose(g, weight, geometry, x.shape[2:])
    return by_image, convolution_weight(x, g, geometry, weight.shape[2:])


def _transpose_gradient(g: Node, n: Node) -> tuple[Node, Node]:
    (x, weight), geometry = n.inputs, n.attributes["geometry"]
    return convolution(g, weight, geometry), convolution_weight(g, x, geometry, weight.shape[2:])


def _weight_gradient(g: Node, n: Node) -> tuple[Node, Node]:
    (x, slope), geometry = n.inputs, n.attributes["geometry"]
    return convolution_transpose(slope, g, geometry, x.shape[2:]), convolution(x, g, geometry)


CONVOLUTION = Primitive(
    "convolution",
    Kind.CONTRACTION,
    _shape,
    convolution_reference,
    _gradient,
    operations=_operations,
    decompose=_implicit_or(_convolution_parts),
)
CONVOLUTION_TRANSPOSE = Primitive(
    "convolution_transpose",
    Kind.CONTRACTION,
    _transpose_shape,
    transpose_reference,
    _transpose_gradient,
    operations=_operations,
    decompose=_implicit_or(_transpose_parts),
)
CONVOLUTION_WEIGHT = Primitive(
    "convolution_weight",
    Kind.CONTRACTION,
    _weight_shape,
    weight_reference,
    _weight_gradient,
    operations=_operations,
    decompose=_implicit_or(_weight_parts),
)
