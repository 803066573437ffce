"""Sliding windows, as convolution and pooling read them: views in which an item may occur several times."""

from __future__ import annotations

import numpy as np

from penstock.graph.custom_vjp import custom_vjp
from penstock.graph.node import Array, DType, Kind, Node, Primitive, Shape
from penstock.graph.reducing import sum_
from penstock.graph.shaping import pad, reshape, slice_axis


def window_count(length: int, size: int, stride: int, dilation: int) -> int:
    """How many windows fit into `length` items; 0 or less if there is no room for any."""
    return (length - (size - 1) * dilation - 1) // stride + 1


def windows(x: Node, axis: int, size: int, stride: int = 1, dilation: int = 1) -> Node:
    """Windows along an axis, which becomes two: item (o, k) is item `o * stride + k * dilation` of it."""
    count = window_count(x.shape[axis], size, stride, dilation)
    whole = (*x.shape[:axis], count, size, *x.shape[axis + 1 :])
    if size == 1 or count == 1:
        start_count_step = (0, count, stride) if size == 1 else (0, size, dilation)
        return reshape(slice_axis(x, axis, *start_count_step), whole)
    if dilation == 1 and stride == size:  # adjacent windows
        return reshape(slice_axis(x, axis, 0, count * size), whole)
    return Node(WINDOWS, (x,), {"axis": axis, "size": size, "stride": stride, "dilation": dilation})


def _windows_reference(x: Array, axis: int, size: int, stride: int, dilation: int) -> Array:
    spans = np.lib.stride_tricks.sliding_window_view(x, (size - 1) * dilation + 1, axis)
    before = (slice(None),) * axis
    return np.moveaxis(spans[(*before, slice(None, None, stride))][..., ::dilation], -1, axis + 1)


def overlap_add(g: Node, axis: int, length: int, stride: int = 1, dilation: int = 1) -> Node:
    """For each of `length` items the sum over the windows that contain it: the transpose of `windows`."""
    if g.shape[axis + 1] == 1 or (dilation == 1 and stride == g.shape[axis + 1]):  # windows do not overlap
        return _disjoint(g, axis, length, stride)
    attributes = {"axis": axis, "size": g.shape[axis + 1], "stride": stride, "dilation": dilation}
    return Node(_ADDED, (_diagonal_sums(g, axis, length, stride, dilation), g), attributes)


def _disjoint(g: Node, axis: int, length: int, stride: int) -> Node:
    """Windows that do not overlap, with zeros for items that are in none."""
    count, size = g.shape[axis : axis + 2]
    flat = reshape(g, (*g.shape[:axis], count * size, *g.shape[axis + 2 :]))
    if flat.shape[axis] == length:
        return flat
    slices = [(0, n, 1) for n in flat.shape]
    slices[axis] = (0, count * size, stride if size == 1 else 1)
    return pad(flat, tuple(slices), (*flat.shape[:axis], length, *flat.shape[axis + 1 :]))


def _diagonal_sums(g: Node, axis: int, length: int, stride: int, dilation: int) -> Node:
    """The overlap-add as sums along diagonals of the (windows, items) matrix, which are windows themselves.

    Item l of the result is the sum over k of item k of the window that begins at l - k * dilation. Spread the
    windows `stride` apart with zeros between, before and after them, and reverse their items: then these
    addends are at l * size + k * (dilation * size + 1) of the flattened matrix.
    """
    size = g.shape[axis + 1]
    reach = (size - 1) * dilation
    reverse = slice_axis(g, axis + 1, size - 1, size, -1)
    shape = (*g.shape[:axis], length + reach, *g.shape[axis + 1 :])
    slices = [(0, count, 1) for count in g.shape]
    slices[axis] = (reach, g.shape[axis], stride)
    apart = pad(reverse, tuple(slices), shape)
    flat = reshape(apart, (*shape[:axis], shape[axis] * size, *shape[axis + 2 :]))
    return sum_(windows(flat, axis, size, size, dilation * size + 1), (axis + 1,))


def _windows_gradient(g: Node, n: Node) -> tuple[Node]:
    axis, stride, dilation = (n.attributes[name] for name in ("axis", "stride", "dilation"))
    return (overlap_add(g, axis, n.inputs[0].shape[axis], stride, dilation),)


def _windows_shape(x: Node, *, axis: int, size: int, stride: int, dilation: int) -> tuple[Shape, DType]:
    count = window_count(x.shape[axis], size, stride, dilation)
    assert count >= 1
    return (*x.shape[:axis], count, size, *x.shape[axis + 1 :]), x.dtype


WINDOWS = Primitive("windows", Kind.VIEW, _windows_shape, _windows_reference, _windows_gradient)
_ADDED = custom_vjp("overlap_add", lambda g, n: (windows(g, **n.attributes),))
