"""Values that are computed again for the gradient rather than kept for it.

A checkpoint is the value of a region of the graph. Its gradient is that of a copy of the region, whose inputs
pass through `again`: an identity that keeps the copy from being taken for the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.graph.gradient import gradients
from penstock.graph.node import Array, DType, Node, Primitive, Shape, topological


def _first_rule(x: Node, *_: Node) -> tuple[Shape, DType]:
    return x.shape, x.dtype


def _first(x: Array, *_: Array) -> Array:
    return x


def _checkpoint_gradient(g: Node, n: Node) -> list[Node | None]:
    value, inputs = n.inputs[0], n.inputs[1:]
    again = {node: Node(AGAIN, (node, g), {}) for node in inputs}
    for node in again.values():
        node.tracked = True
    copy = _copied(value, again)
    return [None, *gradients(copy, g, [again[node] for node in inputs])]


def _copied(value: Node, new: dict[Node, Node]) -> Node:
    """The region behind `value` on other inputs; what does not depend on them stays."""
    known = dict(new)
    for node in topological([value], through_values=True, until=new):
        if node in known:
            continue
        inputs = tuple(known[parent] for parent in node.inputs)
        known[node] = node if inputs == node.inputs else Node(node.primitive, inputs, node.attributes)
    return known[value]


CHECKPOINT = Primitive("checkpoint", _first_rule, _first, _checkpoint_gradient)
AGAIN = Primitive("again", _first_rule, _first, lambda g, n: (g, None))


def checkpoint(value: Node, inputs: Sequence[Node]) -> Node:
    """`value`, whose gradient by the inputs computes it again instead of keeping what is between."""
    return Node(CHECKPOINT, (value, *inputs), _NOTHING)


_NOTHING: dict[str, Any] = {}
