"""Norms of a single row, computed by the products that read them.

A product of a vector and a matrix is a sum for each row of the matrix. Where the vector is a norm of what
another kernel stored, each workgroup computes the norm itself, once for all of its rows: that takes less time
than a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.fusion.clusters import Cluster, Clustering
from penstock.fusion.costs import MAX_NODES
from penstock.fusion.kinds import GroupKind
from penstock.fusion.views import base
from penstock.graph.elementwise import CAST
from penstock.graph.node import Kind, Node
from penstock.graph.reducing import EXPAND
from penstock.graph.shaping import RESHAPE

_MOST_COLUMNS = 1 << 13  # so that a workgroup has the whole vector in registers
_FEWEST_ROWS = 32  # of a matrix: with fewer, most threads would compute the vector and nothing else
_MOST_NODES = 48  # of a prologue


class Prologues:
    """Which vectors are computed by their readers, rather than stored."""

    def __init__(
        self,
        clustering: Clustering,
        stored: set[Node],
        recomputed: set[Node],
        by_products: Callable[[Node], bool],
    ) -> None:
        """`stored` is what clusters store so far, which changes; `recomputed`: values that users compute.

        `by_products`: products that may compute the row that they multiply with a matrix.
        """
        self._clustering, self._stored, self._recomputed = clustering, stored, recomputed
        self._by_products = by_products

    def move(self, clusters: Iterable[Cluster]) -> None:
        """Move vectors of these clusters into the kernels that read them."""
        emptied: set[Cluster] = set()
        leaves: set[Node] = set()
        for cluster in clusters:
            if cluster.kind is GroupKind.ROW and 1 < cluster.size == cluster.columns <= _MOST_COLUMNS:
                known = len(leaves)
                for vector in [node for node in cluster.nodes if self._may_move(node, cluster)]:
                    leaves |= self._moved(vector, cluster)
                if len(leaves) > known and self._stored.isdisjoint(cluster.nodes):
                    emptied.add(cluster)
                elif len(leaves) > known and not self._reduces(cluster):
                    cluster.kind, cluster.columns = GroupKind.MAP, 0
        self._discard(emptied, leaves)

    def _reduces(self, cluster: Cluster) -> bool:
        """Whether what a cluster stores needs a reduction."""
        stack = [node for node in cluster.nodes if node in self._stored]
        seen: set[Node] = set()
        while stack:
            node = stack.pop()
            if node.primitive.kind is Kind.REDUCTION:
                return True
            own = self._clustering.cluster.get(node, cluster) is cluster and node.value is None
            if node not in seen and own:
                seen.add(node)
                stack += node.inputs
        return False

    def _may_move(self, vector: Node, cluster: Cluster) -> bool:
        """Whether a value is a vector that only products with it as each of their rows read."""
        if vector not in self._stored or vector in self._clustering.wanted or vector.size != cluster.size:
            return False
        readers = [node for node in self._readers(vector) if self._clustering.cluster[node] is not cluster]
        return bool(readers) and all(
            self._reads_as_row(node, vector) or self._multiplies(node, vector) for node in readers
        )

    def _readers(self, node: Node) -> set[Node]:
        """The nodes that read a value, also by way of values that are recomputed from it."""
        readers: set[Node] = set()
        for user in self._clustering.users(node):
            readers |= self._readers(user) if user in self._recomputed else {user}
        return readers

    def _reads_as_row(self, reader: Node, vector: Node) -> bool:
        """Whether a node of a kernel with many rows reads a vector along each of them."""
        host = self._clustering.cluster[reader]
        wide = host.size >= _FEWEST_ROWS * vector.size and reader.size == host.size
        fits = host.kind is GroupKind.ROW and host.columns == vector.size
        small = len(host.nodes) + _MOST_NODES <= MAX_NODES
        return wide and fits and small and all(self._is_row(parent, vector) for parent in reader.inputs)

    def _multiplies(self, reader: Node, vector: Node) -> bool:
        """Whether a node multiplies a vector with a matrix, by a kernel that may compute the vector."""
        small = len(self._clustering.cluster[reader].nodes) + _MOST_NODES <= MAX_NODES
        row, *others = reader.inputs
        own = base(row) is vector and not any(self._has(other, vector) for other in others)
        return small and own and self._by_products(reader)

    def _is_row(self, node: Node, vector: Node) -> bool:
        """Whether a value repeats the vector in its last axis, if it has anything of it at all."""
        columns = vector.size
        while node is not vector:
            if node.primitive is EXPAND:
                source = node.inputs[0]
                if source.size < columns or source.shape[-1] != node.shape[-1]:
                    return not self._has(node, vector)
            elif node in self._recomputed:
                return all(self._is_row(parent, vector) for parent in node.inputs)
            elif node.primitive is not RESHAPE:
                return not self._has(node, vector)
            node = node.inputs[0]
        return True

    def _has(self, node: Node, vector: Node) -> bool:
        """Whether a value is computed from a vector, by views and what is recomputed."""
        stack = [node]
        while stack:
            node = stack.pop()
            if node is vector:
                return True
            if node.primitive.kind is Kind.VIEW or node in self._recomputed:
                stack += node.inputs
        return False

    def _moved(self, vector: Node, cluster: Cluster) -> set[Node]:
        """Have the readers of a vector compute it; the values that they read then, none if they do not."""
        inside, leaves = self._tree(vector, cluster)
        reduces = [node for node in inside if node.primitive.kind is Kind.REDUCTION]
        whole = all(node.inputs[0].size == vector.size and node.size == 1 for node in reduces)
        own = [leaf for leaf in leaves if self._clustering.cluster.get(leaf) is cluster]
        if not reduces or not whole or len(inside) > _MOST_NODES or not self._stored.issuperset(own):
            return set()
        self._stored.discard(vector)
        self._stored.update(leaves)
        return leaves

    def _tree(self, vector: Node, cluster: Cluster) -> tuple[set[Node], set[Node]]:
        """The nodes that compute a vector, and the values that they read."""
        inside: set[Node] = set()
        leaves: set[Node] = set()
        stack = [vector]
        while stack:
            node = stack.pop()
            if node in inside or node in leaves or node.value is not None:
                continue
            if node.primitive.kind is Kind.VIEW and node not in self._clustering.cluster:
                stack += node.inputs
            elif node is vector or self._is_inside(node, cluster):
                inside.add(node)
                stack += node.inputs
            elif node in self._clustering.cluster:
                leaves.add(node)
        return inside, leaves

    def _is_inside(self, node: Node, cluster: Cluster) -> bool:
        """Whether a node is computed again: one of the vector's cluster, or of a single stored value."""
        if self._clustering.cluster.get(node) is cluster:
            computes = node.primitive.kind in (Kind.ELEMENTWISE, Kind.REDUCTION)
            return computes and (node not in self._stored or node.primitive is CAST)
        inputs = {parent for parent in node.inputs if parent.primitive.kind is not Kind.CREATION}
        same = len(inputs) == 1 and all(parent.size == node.size for parent in inputs)
        return node.primitive.kind is Kind.ELEMENTWISE and same and not node.primitive.is_slow

    def _discard(self, emptied: set[Cluster], leaves: set[Node]) -> None:
        """Do not store what only clusters read that compute nothing any more."""
        clustering = self._clustering
        for source in {source for cluster in emptied for source in cluster.deps}:
            for node in [*source.nodes]:
                if node not in self._stored or node in clustering.required or node in leaves:
                    continue
                users = {clustering.cluster[user] for user in clustering.users(node)}
                if users <= emptied | {source}:
                    self._stored.discard(node)
