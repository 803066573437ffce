"""Values that lie in the memory of other values: what is computed without any command."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from penstock.graph.node import Node, Shape
from penstock.graph.shaping import RESHAPE, SLICE
from penstock.memory.buffer import Buffer
from penstock.runtime import Device

Slices = Sequence[tuple[int, int, int]]  # (start, count, step) of each axis


def shared(node: Node, device: Device) -> bool:
    """Give a pending node the memory of a value, or a part of it, that has its items in their order.

    A part keeps all of the memory, so under a limit it is copied.
    """
    source, start = node, 0
    while source.value is None:
        if source.primitive is SLICE:
            first = first_item(source.inputs[0].shape, source.attributes["slices"])
            if first is None:
                return False
            start += first
        elif not source.primitive.is_identity and source.primitive is not RESHAPE:
            return False
        source = source.inputs[0]
    buffer, size = source.value, prod(node.shape)
    if size == prod(source.shape):
        buffer.shared = True
        node.set_value(buffer)
        return True
    offset = start * node.dtype.itemsize
    if not size or not _may_be_part(buffer, offset, device):
        return False
    node.set_value(buffer.view(offset, size * node.dtype.itemsize))
    return True


def first_item(shape: Shape, slices: Slices) -> int | None:
    """The number of the first item, if those of a slice follow one another in memory; else None."""
    first, stride, ended = 0, 1, False  # ended: an axis after this one is not whole
    for length, (start, count, step) in zip(reversed(shape), reversed(slices), strict=True):
        if count != 1 and (ended or step != 1):
            return None
        ended = ended or count != length
        first += start * stride
        stride *= length
    return first


def _may_be_part(buffer: Buffer, offset: int, device: Device) -> bool:
    """Whether a part of a buffer from `offset` on can be a value of its own.

    A tensor in an allocation with others would move out of it at its next update, if it were shared.
    """
    if device.dispatcher is not None or (buffer.offset + offset) % device.capabilities.offset_alignment:
        return False
    alone = buffer.shared or buffer.whole is buffer
    return alone and not buffer.hosted and device.limit_bytes is None


def source(node: Node) -> Node:
    """The node whose whole value is that of `node` too."""
    while node.value is None and (node.primitive.is_identity or node.primitive is RESHAPE):
        node = node.inputs[0]
    return node
