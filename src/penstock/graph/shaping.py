"""Primitives that move items without computing: views, padding and concatenation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.graph.node import Array, DType, Kind, Node, Primitive, Shape

Axes = tuple[int, ...]
Slices = tuple[tuple[int, int, int], ...]  # (start, count, step) of each axis


def _reshape_shape(x: Node, *, shape: Shape) -> tuple[Shape, DType]:
    assert math.prod(shape) == math.prod(x.shape)
    return shape, x.dtype


def _concat_shape(*inputs: Node, axis: int) -> tuple[Shape, DType]:
    shape = list(inputs[0].shape)
    shape[axis] = sum([node.shape[axis] for node in inputs])
    return tuple(shape), inputs[0].dtype


def _indices(slices: Slices) -> tuple[slice, ...]:
    """(start, count, step) of each axis as NumPy slices; a step may be negative."""
    return tuple(
        slice(start, end if (end := start + count * step) >= 0 else None, step) if count else slice(0, 0)
        for start, count, step in slices
    )


def _known(starts: Sequence[Array], slices: Slices, axes: Axes) -> Slices:
    """The slices once the least indices along some axes are known."""
    known = list(slices)
    for least, axis in zip(starts, axes, strict=True):
        _, count, step = slices[axis]
        known[axis] = int(least) - min((count - 1) * step, 0), count, step
    return tuple(known)


def _slice_at_reference(
    x: Array, *starts: Array, slices: Slices, axes: Axes, out: Array | None = None
) -> Array:
    part = x[_indices(_known(starts, slices, axes))]
    if out is None:
        return part
    np.copyto(out, part)
    return out


def _pad_reference(x: Array, slices: Slices, shape: Shape) -> Array:
    result = np.zeros(shape, x.dtype)
    result[_indices(slices)] = x
    return result


def _pad_at_reference(x: Array, *starts: Array, slices: Slices, shape: Shape, axes: Axes) -> Array:
    return _pad_reference(x, _known(starts, slices, axes), shape)


def reshape(x: Node, shape: Shape) -> Node:
    """The items of `x` in another shape, in row-major order."""
    return x if x.shape == shape else Node(RESHAPE, (x,), {"shape": shape})


def permute(x: Node, axes: tuple[int, ...]) -> Node:
    """Axis `axes[i]` of `x` becomes axis `i`."""
    return x if axes == tuple(range(len(axes))) else Node(PERMUTE, (x,), {"axes": axes})


def slice_(x: Node, slices: Slices) -> Node:
    """A slice of each axis, given as (start, count, step)."""
    whole = slices == tuple([(0, length, 1) for length in x.shape])
    return x if whole else Node(SLICE, (x,), {"slices": slices})


def slice_axis(x: Node, axis: int, start: int, count: int, step: int = 1) -> Node:
    """`count` items of an axis from `start` on, and all items of the other axes."""
    slices = [(0, length, 1) for length in x.shape]
    slices[axis] = (start, count, step)
    return slice_(x, tuple(slices))


def slice_at(x: Node, starts: Sequence[Node], slices: Slices, axes: Axes) -> Node:
    """A slice whose least indices along some axes are known only when it runs: integers, one for each axis.

    The host has checked that they are in range. The starts of these axes in `slices` are 0.
    """
    return Node(SLICE_AT, (x, *starts), {"slices": slices, "axes": axes})


def pad(x: Node, slices: Slices, shape: Shape) -> Node:
    """Zeros with `x` written to the slices: the transpose of `slice_`."""
    return Node(PAD, (x,), {"slices": slices, "shape": shape})


def concat(inputs: list[Node], axis: int) -> Node:
    """The inputs concatenated along an axis."""
    return inputs[0] if len(inputs) == 1 else Node(CONCAT, tuple(inputs), {"axis": axis})


def _slice_at_gradient(g: Node, n: Node) -> list[Node | None]:
    x, *starts = n.inputs
    padded = Node(PAD_AT, (g, *starts), {**n.attributes, "shape": x.shape})
    return [padded, *(None for _ in starts)]


def _permute_gradient(g: Node, n: Node) -> tuple[Node]:
    axes = n.attributes["axes"]
    return (permute(g, tuple(axes.index(axis) for axis in range(len(axes)))),)


def _concat_gradient(g: Node, n: Node) -> list[Node]:
    axis, start, parts = n.attributes["axis"], 0, []
    for x in n.inputs:
        parts.append(slice_axis(g, axis, start, x.shape[axis]))
        start += x.shape[axis]
    return parts


RESHAPE = Primitive(
    "reshape",
    Kind.VIEW,
    _reshape_shape,
    lambda x, shape: x.reshape(shape),
    lambda g, n: (reshape(g, n.inputs[0].shape),),
    same_bytes=True,
)
PERMUTE = Primitive(
    "permute",
    Kind.VIEW,
    lambda x, axes: (tuple([x.shape[axis] for axis in axes]), x.dtype),
    lambda x, axes: x.transpose(axes),
    _permute_gradient,
)
SLICE = Primitive(
    "slice",
    Kind.VIEW,
    lambda x, slices: (tuple([count for _, count, _ in slices]), x.dtype),
    lambda x, slices: x[_indices(slices)],
    lambda g, n: (pad(g, n.attributes["slices"], n.inputs[0].shape),),
)
# No view: what is computed from it does not depend on where it starts. It is made of slices when a program is
# chosen, or their gradient is recorded.
SLICE_AT = Primitive(
    "slice_at",
    Kind.MOVE,
    lambda x, *starts, slices, axes: (tuple([count for _, count, _ in slices]), x.dtype),
    _slice_at_reference,
    _slice_at_gradient,
    takes_out=True,
)
PAD = Primitive(
    "pad",
    Kind.MOVE,
    lambda x, slices, shape: (shape, x.dtype),
    _pad_reference,
    lambda g, n: (slice_(g, n.attributes["slices"]),),
)
# Zeros with the first input where the starts say: the transpose of `slice_at`. It is in recorded gradients
# only, through which no gradient passes.
PAD_AT = Primitive(
    "pad_at",
    Kind.MOVE,
    lambda x, *starts, slices, shape, axes: (shape, x.dtype),
    _pad_at_reference,
)
CONCAT = Primitive(
    "concat",
    Kind.MOVE,
    _concat_shape,
    lambda *arrays, axis, out=None: np.concatenate(arrays, axis, out=out),
    _concat_gradient,
    takes_out=True,
)
