"""Values that are recomputed for the gradient rather than kept for it.

A checkpoint is the value of a region of the graph. Its gradient is that of a copy of the region, whose inputs
pass through an optimization barrier: an identity that keeps equal nodes from becoming one, so that the copy
is not taken for the original. Its second input is what it waits for.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.drivers.driver import Capabilities
from penstock.graph.custom_vjp import custom_vjp
from penstock.graph.gradient import gradients
from penstock.graph.node import Kind, Node, Primitive, topological


def _checkpoint_gradient(g: Node, n: Node) -> Sequence[Node | None]:
    value, inputs = n.inputs[0], n.inputs[1:]
    barriers = {node: Node(BARRIER, (node, g), {}) for node in inputs}
    for node in barriers.values():
        node.tracked = True
    copy = copied(value, barriers)
    return gradients(copy, g, [barriers[node] for node in inputs])


def copied(value: Node, new: dict[Node, Node]) -> Node:
    """The region behind `value` on other inputs; what does not depend on them stays."""
    known = dict(new)
    for node in topological([value], through_values=True, until=new):
        if node in known:
            continue
        known[node] = node.on(tuple(known[parent] for parent in node.inputs))
    return known[value]


def _without_barrier(node: Node, capabilities: Capabilities) -> Node | None:
    """A barrier that is for kernels of a GPU only is left out of those of a CPU."""
    return node.inputs[0] if node.attributes.get("gpu_only") and capabilities.vector_width > 1 else None


CHECKPOINT = custom_vjp("checkpoint", _checkpoint_gradient)
BARRIER = Primitive(
    "optimization_barrier",
    Kind.VIEW,
    CHECKPOINT.shape_rule,
    CHECKPOINT.reference,
    lambda g, n: (g, None),
    same_bytes=True,
    decompose=_without_barrier,
)


def checkpoint(value: Node, inputs: Sequence[Node]) -> Node:
    """`value`, whose gradient by the inputs recomputes what lies between instead of keeping it."""
    return Node(CHECKPOINT, (value, *inputs), {})
