"""Gradient checkpointing: values that are recomputed for the gradient instead of being kept for it.

A checkpoint is the value of a region of the graph. Its gradient is computed through a copy of the region,
whose inputs pass through optimization barriers: identities that keep common subexpression elimination from
merging the copy with the original. The second input of a barrier is a value that it waits for.
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
    ends = [barriers[node] for node in inputs]
    return gradients(copied(value, barriers), g, ends, until=frozenset(ends))


def copied(value: Node, inputs: dict[Node, Node]) -> Node:
    """A copy of the nodes that compute `value`, with inputs replaced; nodes that need none of them stay."""
    new = dict(inputs)
    for node in topological([value], through_values=True, until=inputs):
        if node not in new:
            new[node] = node.on(tuple(new[parent] for parent in node.inputs))
    return new[value]


def _without_barrier(node: Node, capabilities: Capabilities) -> Node | None:
    """A CPU does without the barriers that are meant for GPUs only."""
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
    """`value`, whose gradient recomputes everything between inputs and value instead of keeping it."""
    return Node(CHECKPOINT, (value, *inputs), {})
