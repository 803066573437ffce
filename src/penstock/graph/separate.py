"""The pass that prevents fusion: every operation reads its inputs from memory."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from penstock.graph.checkpoint import BARRIER
from penstock.graph.node import Kind, Node, topological


class NotSeparable(Exception):
    """Single operations would give other bits than the fused program."""


def separate(
    wanted: Sequence[Node],
    orders: Mapping[Node, tuple[int, ...]],
    biased: Container[Node],
    copied: Container[Node] = (),
) -> list[Node]:
    """The wanted nodes, with an optimization barrier between every operation and its computed inputs.

    There is none before constants, nor before the views through which a product reads its matrices, since
    the order of its sums depends on those views, unless that is given and the matrix is `copied`; nor between
    a product and the addition of a bias in `biased`, which a library computes together. `orders`: those in
    which reductions add up, where it matters.
    """
    barriers: dict[Node, Node] = {}
    new: dict[Node, Node] = {}

    def apart(node: Node) -> Node:
        if node.value is not None or node.primitive.kind is Kind.CREATION or node.primitive is BARRIER:
            return node
        if node not in barriers:
            barriers[node] = Node(BARRIER, (node,), {})
        return barriers[node]

    def matrix(node: Node) -> Node:
        if node.value is None and node.primitive.kind is Kind.VIEW:
            return node.on(tuple(map(matrix, node.inputs)))
        return new[node]

    def term(node: Node) -> Node:
        if node.value is None and node.primitive.kind is Kind.VIEW:
            return node.on(tuple(map(term, node.inputs)))
        return new[node] if node.primitive.multiplies_matrices else apart(new[node])

    for node in topological(wanted):
        if node.value is not None:
            new[node] = node
        elif node.primitive.multiplies_matrices:
            ordered = "order" in node.attributes
            new[node] = node.on(
                tuple(apart(new[x]) if ordered and x in copied else matrix(x) for x in node.inputs)
            )
        elif node in biased:
            new[node] = node.on(tuple(map(term, node.inputs)))
        elif node.primitive.same_bytes:
            new[node] = node.on(tuple(new[parent] for parent in node.inputs))
        else:
            new[node] = node.on(tuple(apart(new[parent]) for parent in node.inputs))
        if node in orders:
            new[node] = Node(node.primitive, new[node].inputs, {**node.attributes, "order": orders[node]})
    return [new[node] for node in wanted]
