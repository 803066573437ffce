"""Simplification: the same values with fewer nodes. Every rule keeps results equal to the last bit.

Equal nodes become one, what depends on constants alone becomes a constant, and what changes nothing is left
out. Nodes that no output needs are never reached, and so are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.graph.elementwise import CAST, FULL, PRIMITIVES, full
from penstock.graph.node import Node, topological
from penstock.graph.reducing import EXPAND
from penstock.graph.shaping import PERMUTE, RESHAPE

_MOVES = (RESHAPE, PERMUTE, EXPAND)  # what leaves one number everywhere as it is
_ELEMENTWISE = frozenset(PRIMITIVES.values()) - {FULL}
_SAME = (PRIMITIVES["stop"], PRIMITIVES["positive"])


def simplify(outputs: Sequence[Node]) -> list[Node]:
    """For each output a node with the same value. Computed nodes are taken as they are."""
    new: dict[Node, Node] = {}
    known: dict[Any, Node] = {}
    for node in topological(outputs):
        if node.value is not None:
            new[node] = node
            continue
        inputs = tuple(new[parent] for parent in node.inputs)
        key = (node.primitive, inputs, _hashable(node.attributes))
        if key not in known:
            known[key] = _reduced(node, inputs)
        new[node] = known[key]
    return [new[node] for node in outputs]


def _reduced(node: Node, inputs: tuple[Node, ...]) -> Node:
    """One node on simplified inputs, itself simplified."""
    primitive = node.primitive
    if primitive in _SAME or (primitive is CAST and inputs[0].dtype == node.dtype):
        return inputs[0]
    if inputs and all(parent.primitive is FULL for parent in inputs):
        if primitive in _MOVES:
            return full(node.shape, node.dtype, inputs[0].attributes["number"])
        if primitive in _ELEMENTWISE:
            return full(node.shape, node.dtype, _fold(node, inputs))
    if primitive in (RESHAPE, PERMUTE) and inputs[0].primitive is primitive and inputs[0].value is None:
        return _joined(node, inputs[0])
    return node if inputs == node.inputs else Node(primitive, inputs, node.attributes)


def _fold(node: Node, inputs: tuple[Node, ...]) -> Any:
    """The number that an elementwise primitive makes of numbers."""
    scalars = [np.asarray(parent.attributes["number"]).astype(parent.dtype) for parent in inputs]
    with np.errstate(all="ignore"):
        return np.asarray(node.primitive.numpy(*scalars, **node.attributes)).astype(node.dtype)[()]


def _joined(node: Node, before: Node) -> Node:
    """Two reshapes, or two orders of axes, as one; none at all where they cancel."""
    source = before.inputs[0]
    if node.primitive is RESHAPE:
        return source if source.shape == node.shape else Node(RESHAPE, (source,), node.attributes)
    axes = tuple(before.attributes["axes"][axis] for axis in node.attributes["axes"])
    return source if axes == tuple(range(len(axes))) else Node(PERMUTE, (source,), {"axes": axes})


def _hashable(attributes: dict[str, Any]) -> Any:
    """Attributes as part of a key; numbers by their type and bits, so that 0 and -0 or 1 and True differ."""
    return tuple(
        (name, type(value), np.asarray(value).tobytes() if name in ("number", "start", "step") else value)
        for name, value in attributes.items()
    )
