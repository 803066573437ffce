"""Leaves: the tensors in which gradients end and are accumulated."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

from penstock.graph.node import Node
from penstock.tensor.capture import capture

if TYPE_CHECKING:
    from penstock.tensor.core import Tensor


def ends_at(node: Node, tensor: Tensor) -> None:
    """Make a node a leaf, whose gradient goes to `tensor`."""
    node.tracked = True
    node.owner = weakref.ref(tensor)


def leaf_of(node: Node) -> Tensor | None:
    """The tensor that accumulates the gradient of a node, or None."""
    tensor = _owner(node)
    if tensor is None or tensor._node is node:
        return tensor
    capturing = capture.get()
    return tensor if capturing is not None and capturing.still_at(tensor, node) else None


def changed_since(node: Node) -> bool:
    """Whether a node was the leaf of a tensor that still requires a gradient but has another value now."""
    return _owner(node) is not None and leaf_of(node) is None


def _owner(node: Node) -> Tensor | None:
    """The tensor that a node was made a leaf for, if it still requires a gradient."""
    if node.owner is None:
        return None
    tensor: Tensor | None = node.owner()
    return tensor if tensor is not None and tensor.requires_grad else None


def check_gradient(tensor: Tensor, gradient: Tensor | None) -> None:
    """Raise unless a tensor may have this gradient."""
    if gradient is None:
        return
    if not isinstance(getattr(gradient, "_actual_node", None), Node):
        raise TypeError(f"a gradient is a tensor or None, and {type(gradient).__name__} was given")
    if gradient.device is not tensor.device:
        names = f"{tensor.device.name} and its gradient is on {gradient.device.name}"
        raise ValueError(f"a tensor is on {names}; use to_device first")
    if gradient.shape != tensor.shape or gradient.dtype != tensor.dtype:
        given = f"{gradient.dtype} and the shape {gradient.shape}"
        raise ValueError(f"a gradient of {given} is not for a tensor of {tensor.dtype} and {tensor.shape}")


def sources_of(gradients: Iterable[Tensor]) -> list[Tensor]:
    """Of what gradients were computed from, if it is still in use: the values `backward` was called on.

    And small tensors behind these, such as predictions, that were pending then.
    """
    sources = {id(source): source for grad in gradients if (source := getattr(grad, "_source", None))}
    return [tensor for reference in chain(*sources.values()) if (tensor := reference()) is not None]
