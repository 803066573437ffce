"""Values that are computed again for the gradient rather than kept for it.

A checkpoint is the value of a region of the graph. Its gradient is that of a copy of the region, whose inputs
pass through `again`: an identity that keeps the copy from being taken for the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.graph.custom import custom
from penstock.graph.gradient import gradients
from penstock.graph.node import Node, Primitive, topological


def _checkpoint_gradient(g: Node, n: Node) -> Sequence[Node | None]:
    value, inputs = n.inputs[0], n.inputs[1:]
    again = {node: Node(AGAIN, (node, g), {}) for node in inputs}
    for node in again.values():
        node.tracked = True
    copy = copied(value, again)
    return gradients(copy, g, [again[node] for node in inputs])


def copied(value: Node, new: dict[Node, Node]) -> Node:
    """The region behind `value` on other inputs; what does not depend on them stays."""
    known = dict(new)
    for node in topological([value], through_values=True, until=new):
        if node in known:
            continue
        inputs = tuple(known[parent] for parent in node.inputs)
        known[node] = node if inputs == node.inputs else Node(node.primitive, inputs, node.attributes)
    return known[value]


CHECKPOINT = custom("checkpoint", _checkpoint_gradient)
AGAIN = Primitive("again", CHECKPOINT.rule, CHECKPOINT.numpy, lambda g, n: (g, None))


def checkpoint(value: Node, inputs: Sequence[Node]) -> Node:
    """`value`, whose gradient by the inputs computes it again instead of keeping what is between."""
    return Node(CHECKPOINT, (value, *inputs), _NOTHING)


_NOTHING: dict[str, Any] = {}
