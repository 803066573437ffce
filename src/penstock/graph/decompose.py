"""The pass that replaces primitives for which the target has no kernel by others.

The graph that a user records is the same for every device. A primitive that can be expressed by others has a
rule for it (`Primitive.decompose`), which gets the capabilities of the target. This pass is the first, so
that simplification merges what the parts have in common, and NumPy computes the same steps as kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node, topological


def decompose(outputs: Sequence[Node], capabilities: Capabilities) -> list[Node]:
    """For each output a node with the same value, made of primitives for which the target has kernels."""
    new: dict[Node, Node] = {}  # the result for each node; a node of the result maps to itself

    def decomposed(nodes: Sequence[Node]) -> list[Node]:
        for node in topological(nodes, until=new):
            if node not in new:
                result = node
                if node.value is None:
                    result = node.on(tuple(new[parent] for parent in node.inputs))
                    rule = node.primitive.decompose
                    parts = None if rule is None else rule(result, capabilities)
                    if parts is not None:
                        (result,) = decomposed([parts])  # the parts are decomposed in turn
                new[node] = new[result] = result
        return [new[node] for node in nodes]

    return decomposed(outputs)
