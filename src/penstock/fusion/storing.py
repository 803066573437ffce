"""Decides which values clusters store in memory, and which their users recompute.

A cheap map is recomputed where it is needed. So is a value that can be computed from stored values without
reading more bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.fusion.clusters import Cluster, Clustering, in_order
from penstock.fusion.costs import CHEAP_NODES, MAX_NODES, RECOMPUTED_NODES
from penstock.fusion.kinds import GroupKind
from penstock.fusion.prologues import Prologues
from penstock.fusion.views import trailing
from penstock.graph.elementwise import CAST
from penstock.graph.node import Kind, Node

_AS_MUCH = 1.1  # times the bytes of a value: vectors of means and the like are small beside it


class Storing:
    """Which values are stored, and which are recomputed wherever they are needed."""

    def __init__(self, clustering: Clustering, prologues: Callable[[Node], bool] | None = None) -> None:
        """With `prologues`, kernels of rows may compute a vector before, once for all of their rows.

        So may the products for which it returns True.
        """
        self._clustering = clustering
        self.stored = set(clustering.required)
        self._recomputed: set[Node] = set()  # values that are not stored, since their users recompute them
        self.inlined: dict[Cluster, set[Node]] = {}  # nodes that a cluster computes besides its own
        self._times: dict[Cluster, int] = {}  # how often an inlined cluster is computed for an item
        for node, cluster in clustering.cluster.items():
            if any(clustering.cluster[user] is not cluster for user in clustering.users(node)):
                self.stored.add(node)
        clusters = list(dict.fromkeys(clustering.cluster.values()))
        for cluster in clusters:
            self._recompute(cluster)
        homes = {cluster: {cluster} for cluster in clusters}
        for cluster in sorted(clusters, key=lambda cluster: -cluster.last):
            self._inline(cluster, homes)
        if prologues is not None:
            alive = (cluster for cluster in clusters if cluster in homes[cluster])
            Prologues(clustering, self.stored, self._recomputed, prologues).move(alive)
        self.clusters = [
            cluster
            for cluster in in_order(cluster for cluster in clusters if cluster in homes[cluster])
            if any(node in self.stored for node in cluster.nodes)
        ]
        for cluster in self.clusters:
            if self._keeps_column_sums_only(cluster):
                cluster.kind, cluster.columns = GroupKind.COLUMN, 0

    def _keeps_column_sums_only(self, cluster: Cluster) -> bool:
        """Whether a kernel of rows would store sums of columns only: a kernel of columns is faster."""
        outputs = [node for node in cluster.nodes if node in self.stored]
        sums = [node for node in cluster.nodes if node.primitive.kind is Kind.REDUCTION]
        spaces = {(node.inputs[0].shape, node.attributes["axes"]) for node in sums}
        if not cluster.kind.has_rows or cluster.kind.is_map or outputs != sums or len(spaces) != 1:
            return False
        ((shape, axes),) = spaces
        return not trailing(shape, axes)

    def _inline(self, cluster: Cluster, homes: dict[Cluster, set[Cluster]]) -> None:
        """Compute a map where it is needed instead of storing it, if that is no more work."""
        outputs = [node for node in cluster.nodes if node in self.stored]
        required = any(node in self._clustering.required for node in outputs)
        if not cluster.kind.is_map or not outputs or required:
            return
        users = {user for node in outputs for user in self._readers(node)}
        targets = {home for user in users for home in homes[self._clustering.cluster[user]]} - {cluster}
        inside = self.inlined.get(cluster, set()) | set(cluster.nodes)
        cheap = len(inside) <= CHEAP_NODES and not any(node.primitive.costly for node in inside)
        same_size = all(target.size <= cluster.size for target in targets)
        large = [source for source in self._sources(inside) if source.size >= cluster.size]
        if cluster.size == 1 and not self._sources(inside):
            cheap = True  # a constant
        pays = (len(targets) == 1 and (same_size or cheap)) or (cheap and len(large) <= 1)
        times = self._times_read(outputs)
        if times > 1:  # the number of recomputations would multiply along a chain of clusters
            pays = pays and cheap and times * len(inside) <= RECOMPUTED_NODES
        fits = all(
            len(inside.union(target.nodes, self.inlined.get(target, ()))) <= 2 * MAX_NODES
            for target in targets
        )
        if not pays or not fits:
            return
        homes[cluster] = targets
        self._times[cluster] = times
        self.stored.difference_update(outputs)
        for target in targets:
            self.inlined.setdefault(target, set()).update(inside)
            target.deps = (target.deps - {cluster}) | cluster.deps

    def _readers(self, node: Node) -> set[Node]:
        """The nodes that read a value, also by way of values that are recomputed from it."""
        readers: set[Node] = set()
        stack = [node]
        while stack:
            for user in self._clustering.users(stack.pop()):
                if user in self._recomputed and user not in readers:
                    stack.append(user)
                readers.add(user)
        return readers

    def _recompute(self, cluster: Cluster) -> None:
        """Do not store values that their users can compute from stored values without reading more."""
        if not cluster.kind.keeps_items:
            return
        for node in cluster.nodes:
            if node.primitive.is_slow and node not in self.stored:
                self._store_instead(node, cluster)
        for node in reversed(cluster.nodes):
            if node in self.stored and node not in self._clustering.required:
                self._store_narrow(node, cluster)
        for node in cluster.nodes:
            if node in self.stored and not self._must_stay(node):
                leaves = self._leaves_to_read(node, cluster)
                if leaves is not None:
                    self.stored.discard(node)
                    self._recomputed.add(node)
                    self.stored.update(leaf for leaf in leaves if leaf in self._clustering.cluster)

    def _store_narrow(self, node: Node, cluster: Cluster) -> None:
        """Store what a wider dtype was cast from instead."""
        if node.primitive is not CAST:
            return
        source, spread = self._clustering.aligned(node.inputs[0])
        own = self._clustering.cluster.get(source) is cluster and source.size == node.size and spread == 1
        if own and source.nbytes < node.nbytes:
            self.stored.discard(node)
            self._recomputed.add(node)
            self.stored.add(source)

    def _leaves_to_read(self, node: Node, cluster: Cluster) -> set[Node] | None:
        """What users would read to recompute a node; None if that is more to read or takes long."""
        inside, leaves = self._tree(node, cluster)
        large = [leaf for leaf in leaves if leaf.size >= node.size]
        simple = not any(part.primitive.is_slow or part.primitive.reads_elsewhere for part in inside)
        little = len(large) <= 1 or sum(leaf.nbytes for leaf in large) <= node.nbytes
        if any(self._clustering.cluster.get(part) is not cluster for part in inside):
            # By way of what others recompute: only if that is no more to read than the value itself.
            little = sum(leaf.nbytes for leaf in leaves) <= _AS_MUCH * node.nbytes
        return leaves if simple and little and len(inside) <= RECOMPUTED_NODES else None

    def _store_instead(self, node: Node, cluster: Cluster) -> None:
        """Store a value instead of two or more that can be computed from it."""
        after = [
            user
            for user in cluster.nodes
            if user in self.stored and not self._must_stay(user) and node in self._tree(user, cluster)[0]
        ]
        self.stored.add(node)
        if len(after) < 2 or any(self._leaves_to_read(user, cluster) is None for user in after):
            self.stored.discard(node)

    def _must_stay(self, node: Node) -> bool:
        clustering = self._clustering
        return (
            node in clustering.required
            or node in clustering.reduced
            or node.primitive.kind is Kind.CONTRACTION
        )

    def _tree(self, output: Node, cluster: Cluster) -> tuple[set[Node], set[Node]]:
        """The nodes that compute `output`, of its cluster or recomputed, and the values that they read."""
        inside: set[Node] = set()
        leaves: set[Node] = set()
        stack = [output]
        while stack:
            node = stack.pop()
            known = node is not output and (node in self.stored or self._must_stay(node))
            own = self._clustering.cluster.get(node) is cluster or node in self._recomputed
            if known or not own:
                leaves.add(node)
            elif node not in inside:
                inside.add(node)
                stack += [self._clustering.aligned(parent)[0] for parent in node.inputs]
        return inside, {leaf for leaf in leaves if leaf.primitive.kind is not Kind.CREATION}

    def _times_read(self, outputs: list[Node]) -> int:
        """How often a kernel would compute these nodes for a single item."""
        reads: dict[tuple[Node, Node | None], int] = {}
        for user in {user for node in outputs for user in self._clustering.users(node)}:
            for parent in user.inputs:
                producer, spread = self._clustering.aligned(parent)
                if producer in outputs:
                    seen = producer if spread == 1 else parent
                    key = (seen, user if user.primitive.reads_elsewhere else None)
                    reads[key] = max(reads.get(key, 1), self._times.get(self._clustering.cluster[user], 1))
        by_node: dict[Node, int] = {}
        for (seen, _), times in reads.items():
            producer = self._clustering.aligned(seen)[0]
            by_node[producer] = by_node.get(producer, 0) + times
        return max(by_node.values(), default=1)

    def _sources(self, inside: set[Node]) -> set[Node]:
        """The values that nodes read from outside their set."""
        sources = {self._clustering.aligned(parent)[0] for node in inside for parent in node.inputs}
        return {source for source in sources - inside if source.primitive.kind is not Kind.CREATION}
