"""A backward pass that reads parameters that were gathered for it, not those of the forward pass.

Its nodes are copied, with other nodes for the parameters. So are those of the forward pass that depend on
parameters only, such as their transposes: kept, they would keep the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from penstock.graph.node import Kind, Node, topological


class Backward:
    """The nodes of a backward pass.

    `losses` are the ends of the forward pass. `made` are the parameters by their nodes, and `row_of` the
    rows in which they are gathered.
    """

    def __init__(self, losses: Sequence[Node], made: Mapping[Node, int], row_of: Mapping[int, int]) -> None:
        self._made = {node: at for node, at in made.items() if at in row_of}
        self._row_of = row_of
        self.fetched: set[int] = set()  # rows that were gathered again
        self._new: dict[Node, Node] = {}  # copies
        self._rows: dict[Node, frozenset[int]] = {}  # that a node needs
        nothing: frozenset[int] = frozenset()
        neutral: set[Node] = set()  # constants
        for node in topological(losses, until=self._made):
            if node in self._made:
                self._rows[node] = frozenset({row_of[self._made[node]]})
            elif node.value is None and node.primitive.kind is Kind.CREATION and not node.inputs:
                neutral.add(node)
                self._rows[node] = nothing
            elif node.inputs and all(self._rows[parent] or parent in neutral for parent in node.inputs):
                self._rows[node] = self._union(node)
            else:  # a value that the forward pass has computed
                self._rows[node] = nothing
                self._new[node] = node

    def _union(self, node: Node) -> frozenset[int]:
        return frozenset().union(*(self._rows[parent] for parent in node.inputs))

    def needs(self, nodes: Iterable[Node]) -> list[int]:
        """The rows that some nodes of the backward pass need, in the order of their first use."""
        order: dict[int, int] = {}
        for node in topological(nodes, until=self._new.keys() | self._made.keys()):
            if node in self._new or node in self._made:
                continue
            if node not in self._rows:
                self._rows[node] = self._union(node)
            for parent in node.inputs:
                for row in self._rows[parent]:
                    order[row] = min(order.get(row, node.depth), node.depth)
        return sorted(order, key=lambda row: (order[row], row))

    def take(self, row: int, values: Mapping[int, Node]) -> None:
        """Use other nodes for the parameters of a row from here on."""
        self.fetched.add(row)
        self._new.update({node: values[at] for node, at in self._made.items() if at in values})

    def on(self, node: Node) -> Node:
        """The copy of a node that reads what was gathered again."""
        for each in topological([node], until=self._new):
            if each not in self._new:
                self._new[each] = each.on(tuple(self._new[parent] for parent in each.inputs))
        return self._new[node]
