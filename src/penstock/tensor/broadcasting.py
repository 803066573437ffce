"""Broadcasting of shapes, and checks of axes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.graph import elementwise, reducing, shaping
from penstock.graph.node import Node, Shape
from penstock.tensor.arguments import integers
from penstock.tensor.core import Tensor, note_used, record


def broadcast(x: Tensor, shape: Shape) -> Tensor:
    """`x` broadcast to `shape`; a ValueError names both shapes if that is impossible."""
    note_used(x)
    return record(broadcast_node(x._node, shape), x)


def broadcast_node(node: Node, shape: Shape) -> Node:
    """See `broadcast`."""
    if node.shape == shape:
        return node
    if not node.shape and node.primitive is elementwise.FULL and node.value is None:
        return elementwise.full(shape, node.dtype, node.attributes["number"])
    padded = (1,) * (len(shape) - len(node.shape)) + node.shape
    fits = len(padded) == len(shape)
    for length, wanted in zip(padded, shape):  # noqa: B905 - the lengths were compared
        fits = fits and (length == wanted or length == 1)
    if not fits:
        raise ValueError(f"shape {node.shape} does not broadcast to {shape}")
    return reducing.expand(shaping.reshape(node, padded), shape)


def common_shape(*shapes: Shape) -> Shape:
    """The shape to which all of them broadcast, or a ValueError that names them."""
    if all(shape == shapes[0] for shape in shapes):
        return shapes[0]
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(f"shapes {' and '.join(map(str, shapes))} do not broadcast together") from None


def axes_of(x: Tensor, axis: int | Sequence[int] | None, name: str) -> tuple[int, ...]:
    """Axes as sorted non-negative integers; None is all axes. Invalid or repeated axes raise."""
    count = len(x._node.shape)
    if axis is None:
        return tuple(range(count))
    if type(axis) is int:
        if -count <= axis < count:
            return (axis % count,)
        given: tuple[int, ...] = (axis,)
    else:
        given = integers(axis, name, "an axis")
    for position in given:
        if not -x.ndim <= position < x.ndim:
            raise IndexError(f"{name}: axis {position} is out of range for shape {x.shape}")
    axes = tuple(sorted(position % x.ndim for position in given))
    if len(set(axes)) != len(axes):
        raise ValueError(f"{name}: axes {given} have an axis twice")
    return axes
