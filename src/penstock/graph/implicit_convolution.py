"""Convolutions of images with the channels last, for devices with kernels that read windows from the image.

Such a kernel is a product of matrices one of which is implicit: its rows are windows, which are never
written. There are two kinds of kernel. On tensor cores a workgroup has a tile of the product; groups of few
channels, where such a tile would be mostly empty, are summed up directly. Where written windows and a library
are faster, or the dtype has no such kernel, `convolution` decomposes into those.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.graph.convolution_reference import (
    Geometry,
    convolution_reference,
    transpose_reference,
    weight_reference,
)
from penstock.graph.dtypes import HALF_PRECISION, float32
from penstock.graph.node import Array, DType, Kind, Node, Primitive, Shape
from penstock.graph.shaping import permute, reshape

_READ_BYTES = 16  # that a thread reads at once: of neighbouring channels
_FEW_CHANNELS = 16  # of a group; with fewer, tiles of tensor cores are mostly empty
# Bytes of a pixel's channels up to which tiles are faster than written windows and a library. Writing and
# reading windows takes as long for any number of outputs, and the library multiplies faster than tiles do.
# On an H200, windows of 3 x 3 of 64, 128, 256 and 512 channels in bfloat16, with as many products each, take
# 541, 280, 167 and 135 us on the other road. Tiles take 244 us with 64 channels; with 128, other sizes of
# tiles took 168 to 217 us. The gradient by a weight of 64 channels takes 543 us there, and 294 us by tiles.
_MOST_BYTES = 256
_MOST_TAPS = 64  # items of a window; a thread has a bit for each that says whether it is in the image
_MOST_AXES = 3  # of an image
_MOST_ITEMS = 1 << 30  # of a value, so that no index overflows an int32


def implicit(node: Node, capabilities: Capabilities) -> Node | None:
    """A convolution, its transpose or its gradient by the weight by such a kernel; None if others are faster.

    The node is a primitive of `convolution`, with the channels as the second axis.
    """
    values = (node, *node.inputs)
    if not capabilities.tensor_cores or not all(0 < value.size < _MOST_ITEMS for value in values):
        return None
    outputs, channels, *sizes = _weight_shape_of(node)
    groups = node.attributes["geometry"].groups
    if len(sizes) > _MOST_AXES:
        return None
    build = _BUILD[node.primitive.name]
    if groups > 1 and max(outputs // groups, channels) < _FEW_CHANNELS:
        return build(node, tiled=False) if node.dtype in (float32, *HALF_PRECISION) else None
    return build(node, tiled=True) if _has_tiles(node, capabilities) else None


def _has_tiles(node: Node, capabilities: Capabilities) -> bool:
    """Whether tensor cores compute a convolution, and faster than a library multiplies written windows."""
    geometry: Geometry = node.attributes["geometry"]
    outputs, channels, *sizes = _weight_shape_of(node)
    sides = [count * node.dtype.itemsize for count in (outputs // geometry.groups, channels)]
    few = min(outputs // geometry.groups, channels) < _FEW_CHANNELS
    rounded = node.dtype in HALF_PRECISION or (node.dtype is float32 and capabilities.tf32)
    if few or not rounded or any(side % _READ_BYTES for side in sides) or math.prod(sizes) > _MOST_TAPS:
        return False
    along = zip(sizes, geometry.stride, geometry.dilation, strict=True)
    overlap = any((size - 1) * apart >= step for size, step, apart in along)
    return geometry.groups > 1 or (overlap and max(sides) <= _MOST_BYTES)


def _weight_shape_of(node: Node) -> Shape:
    """The shape of the weight: (outputs, channels of a group, window)."""
    return node.shape if node.primitive.name == "convolution_weight" else node.inputs[1].shape


def channels_to_end(x: Node) -> Node:
    """(batch, channels, ...) with the channels last."""
    return permute(x, (0, *range(2, x.ndim), 1))


def channels_from_end(x: Node) -> Node:
    """(batch, ..., channels) with the channels as the second axis."""
    return permute(x, (0, x.ndim - 1, *range(1, x.ndim - 1)))


def _convolution(node: Node, tiled: bool) -> Node:
    x, weight = node.inputs
    axes = range(2, weight.ndim)
    order = (0, *axes, 1) if tiled else (*axes, 1, 0)
    attributes = {**node.attributes, "tiled": tiled}
    inputs = (channels_to_end(x), permute(weight, order))
    return channels_from_end(Node(IMPLICIT_CONVOLUTION, inputs, attributes))


def _transpose(node: Node, tiled: bool) -> Node:
    x, weight = node.inputs
    groups, (outputs, channels, *sizes) = node.attributes["geometry"].groups, weight.shape
    parts = reshape(weight, (groups, outputs // groups, channels, *sizes))
    axes = range(3, parts.ndim)
    whole = groups * channels
    if tiled:
        turned = reshape(permute(parts, (0, 2, *axes, 1)), (whole, *sizes, outputs // groups))
    else:
        turned = reshape(permute(parts, (*axes, 1, 0, 2)), (*sizes, outputs // groups, whole))
    attributes = {**node.attributes, "tiled": tiled}
    return channels_from_end(Node(IMPLICIT_TRANSPOSE, (channels_to_end(x), turned), attributes))


def _weight(node: Node, tiled: bool) -> Node:
    x, g = map(channels_to_end, node.inputs)
    result = Node(IMPLICIT_WEIGHT, (x, g), {**node.attributes, "tiled": tiled})
    axes = result.ndim
    order = (0, axes - 1, *range(1, axes - 1)) if tiled else (axes - 1, axes - 2, *range(axes - 2))
    return permute(result, order)


_BUILD = {
    "convolution": _convolution,
    "convolution_transpose": _transpose,
    "convolution_weight": _weight,
}


# The primitives


def window_of(weight: Node, tiled: bool) -> Shape:
    """The lengths of a window, given the weight in the order that its kernel reads."""
    return weight.shape[1:-1] if tiled else weight.shape[:-2]


def _shape(x: Node, weight: Node, *, geometry: Geometry, tiled: bool) -> tuple[Shape, DType]:
    counts = geometry.counts(x.shape[1:-1], window_of(weight, tiled))
    return (x.shape[0], *counts, weight.shape[0 if tiled else -1]), x.dtype


def _transpose_shape(
    x: Node, weight: Node, *, geometry: Geometry, lengths: tuple[int, ...], tiled: bool
) -> tuple[Shape, DType]:
    return (x.shape[0], *lengths, weight.shape[0 if tiled else -1]), x.dtype


def _weight_shape(
    x: Node, g: Node, *, geometry: Geometry, sizes: tuple[int, ...], tiled: bool
) -> tuple[Shape, DType]:
    outputs, channels = g.shape[-1], x.shape[-1] // geometry.groups
    return (outputs, *sizes, channels) if tiled else (*sizes, channels, outputs), x.dtype


def _from_end(x: Array) -> Array:
    return np.moveaxis(x, -1, 1)


def _to_end(x: Array) -> Array:
    return np.moveaxis(x, 1, -1)


def _usual(weight: Array, tiled: bool) -> Array:
    """A weight as (outputs, channels of a group, window)."""
    return np.moveaxis(weight, -1, 1) if tiled else np.moveaxis(weight, (-1, -2), (0, 1))


def _reference(x: Array, weight: Array, geometry: Geometry, tiled: bool) -> Array:
    return _to_end(convolution_reference(_from_end(x), _usual(weight, tiled), geometry))


def _transpose_reference(
    x: Array, weight: Array, geometry: Geometry, lengths: tuple[int, ...], tiled: bool
) -> Array:
    turned, groups = _usual(weight, tiled), geometry.groups  # (channels, outputs of a group, window)
    parts = turned.reshape(groups, turned.shape[0] // groups, *turned.shape[1:]).swapaxes(1, 2)
    usual = parts.reshape(-1, *parts.shape[2:])
    return _to_end(transpose_reference(_from_end(x), usual, geometry, lengths))


def _weight_reference(x: Array, g: Array, geometry: Geometry, sizes: tuple[int, ...], tiled: bool) -> Array:
    result = weight_reference(_from_end(x), _from_end(g), geometry, sizes)
    return np.moveaxis(result, 1, -1) if tiled else np.moveaxis(result, (0, 1), (-1, -2))


def _operations(node: Node) -> int:
    """Two for each product of an item of a window with an item of the weight."""
    x, y = node.inputs
    weight, images = {
        IMPLICIT_CONVOLUTION: (y, node),
        IMPLICIT_TRANSPOSE: (y, x),
        IMPLICIT_WEIGHT: (node, y),
    }[node.primitive]
    return 2 * weight.size * math.prod(images.shape[:-1])


def _primitive(name: str, shape_rule: Any, reference: Any) -> Primitive:
    return Primitive(name, Kind.CONVOLUTION, shape_rule, reference, operations=_operations)


IMPLICIT_CONVOLUTION = _primitive("implicit_convolution", _shape, _reference)
IMPLICIT_TRANSPOSE = _primitive("implicit_transpose", _transpose_shape, _transpose_reference)
IMPLICIT_WEIGHT = _primitive("implicit_weight", _weight_shape, _weight_reference)
