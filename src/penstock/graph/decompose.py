"""The pass that fits a graph to its target: what the target has no kernel for, from what it has.

The graph that a user records is the same for every device. A primitive that can be made of others says so in
its row (`decompose`), given what the target can do. This pass comes before all others, so that simplification
finds what the parts have in common, and NumPy computes the same steps as kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node, topological


def decompose(outputs: Sequence[Node], capabilities: Capabilities) -> list[Node]:
    """For each output a node with the same value, of primitives that the target computes by themselves."""
    return _Decomposition(capabilities).of(outputs)


class _Decomposition:
    """Goes through a graph once; what a decomposition gives is decomposed in turn."""

    def __init__(self, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        self._new: dict[Node, Node] = {}  # nodes that are final stand for themselves

    def of(self, outputs: Sequence[Node]) -> list[Node]:
        """The nodes that take the place of the outputs."""
        for node in topological(outputs, until=self._new):
            if node not in self._new:
                result = node if node.value is not None else self._final(node)
                self._new[node] = self._new[result] = result
        return [self._new[node] for node in outputs]

    def _final(self, node: Node) -> Node:
        same = node.on(tuple(self._new[parent] for parent in node.inputs))
        rule = node.primitive.decompose
        parts = None if rule is None else rule(same, self._capabilities)
        return same if parts is None else self.of([parts])[0]
