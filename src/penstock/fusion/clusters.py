"""Clusters: sets of nodes that can be fused into a kernel.

A node joins the cluster of an input if, for each of its items, it reads just the item that the loop of that
cluster has in registers ("at hand"), through any views, and if no cycle of clusters arises.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from penstock.fusion.costs import MAX_NODES
from penstock.fusion.kinds import GroupKind
from penstock.fusion.products import bias_vector, library_operand
from penstock.fusion.views import (
    base,
    crosses_rows,
    keeps_order,
    operand_reader,
    operand_source,
    repeats,
    trailing,
)
from penstock.graph.checkpoint import BARRIER
from penstock.graph.elementwise import PRIMITIVES
from penstock.graph.node import Kind, Node, Shape
from penstock.graph.reducing import EXPAND
from penstock.graph.shaping import CONCAT, RESHAPE

# The kinds of node that start a cluster of their own.
_BEGUN_BY = {
    Kind.CONTRACTION: GroupKind.MATMUL,
    Kind.CONVOLUTION: GroupKind.CONVOLUTION,
    Kind.ATTENTION: GroupKind.ATTENTION,
    Kind.PAGED_STEP: GroupKind.PAGED,
    Kind.OPAQUE: GroupKind.RAW,
}


class Cluster:
    """A group while it grows."""

    def __init__(self, kind: GroupKind, size: int, by_library: bool = False) -> None:
        self.kind = kind
        self.size = size  # items that its nodes have before any reduction
        self.by_library = by_library  # its first node is a product that a library computes
        self.copies = False  # its only node is a view that is copied to memory, in the order of the view
        self.columns = 0  # of a row; 0 as long as no rows are reduced
        self.nodes: list[Node] = []
        self.deps: set[Cluster] = set()  # the clusters whose values it reads
        self.users: set[Cluster] = set()  # those that read its values
        # The positions of its first and last node in the topological order.
        self.first, self.last = sys.maxsize, 0
        self.latest = 0  # the last position in itself and in all that it needs, directly or not

    def may_have_rows(self, columns: int) -> bool:
        """Whether it can reduce rows of so many items: it reduces no rows of another length."""
        return self.kind.has_rows and not self.copies and self.columns in (0, columns)

    def reduce_rows(self, columns: int) -> None:
        """Make it a group that reduces rows of so many items."""
        self.kind, self.columns = GroupKind.ROW, columns


class Clustering:
    """Assigns every pending node to a cluster: that of an input, or a new cluster."""

    def __init__(
        self,
        order: list[Node],
        wanted: Sequence[Node],
        fusible: Callable[[Node], bool],
        by_library: Callable[[Node], bool],
        pairs: bool = False,
        beside: bool = False,
    ) -> None:
        """`pairs`: two products of the same few rows may be in a kernel.

        `beside`: a product's kernel may store what it computes from an item side by side.
        """
        self._order = order
        self._number = {node: number for number, node in enumerate(order)}
        self._fusible = fusible
        self._by_library = by_library
        self._pairs, self._beside = pairs, beside
        self._joined: set[Node] = set()  # concatenations in the cluster of all of their parts
        self._consumers: dict[Node, list[Node]] = {node: [] for node in order}
        self.cluster: dict[Node, Cluster] = {}
        # The latest cluster of columns in each space, and what it reads.
        self._columns: dict[tuple[Shape, tuple[int, ...]], tuple[Cluster, frozenset[Node]]] = {}
        self._joint: dict[Any, Cluster] = {}  # clusters of nodes that differ in `part` only
        self.reduced: set[Node] = set()  # nodes after a reduction, with an item for each row
        for node in order:
            for parent in dict.fromkeys(node.inputs):
                if parent.value is None:
                    self._consumers[parent].append(node)
        self.wanted = {base(node) for node in wanted if node.value is None}
        self.required = {*self.wanted}  # stored in any case
        products = [node for node in order if node.primitive.multiplies_matrices]
        for node in order:
            if not node.primitive.multiplies_matrices or self._stands_alone(node):
                self._require(node)
            if self._stands_alone(node):
                self.required.add(node)
        for node in products:  # which may read through views of what is stored in any case
            self._require(node)
        self._copied = set(self._read_across())
        self.required |= self._copied
        for node in products:  # once more, now that it is known which views are stored
            self._require(node)
        self.for_columns = self._only_for_columns()  # computed by the column reductions that need them
        for node in order:
            self._assign(node)

    # Which values have to be stored

    def _require(self, node: Node) -> None:
        """Store what a node needs in memory."""
        self.required.update(read for read in self._read_whole(node) if read.value is None)

    def _read_whole(self, node: Node) -> Iterator[Node]:
        """The values that a node needs in memory; views that it cannot read through are stored."""
        if self._stands_alone(node) or node.primitive.kind in (Kind.OPAQUE, Kind.CONVOLUTION):
            yield from map(base, node.inputs)
        elif node.primitive.kind is Kind.PAGED_STEP:
            yield from map(base, node.inputs[3:])
        elif node.primitive.multiplies_matrices:
            read = library_operand if self._is_by_library(node) else operand_reader(node)
            yield from (operand_source(operand, self.required, read) for operand in node.inputs)
        elif node.primitive is BARRIER or node.primitive.kind in (Kind.GATHER, Kind.RANDOM):
            yield base(node.inputs[0])

    def _read_across(self) -> Iterator[Node]:
        """Views that reductions read completely, but in an order in which reading memory is slow."""
        reductions = (node for node in self._order if node.primitive.kind is Kind.REDUCTION)
        stack = [node.inputs[0] for node in reductions if self._fusible(node)]
        seen: set[Node] = set()
        while stack:
            node = stack.pop()
            if node in seen or node.value is not None or node in self.required:
                continue
            seen.add(node)
            if crosses_rows(node):
                yield node
            elif node.primitive.kind is Kind.ELEMENTWISE or node.primitive is RESHAPE:
                stack += node.inputs

    def _is_by_library(self, node: Node) -> bool:
        return node.primitive.kind is Kind.CONTRACTION and self._by_library(node)

    def _stands_alone(self, node: Node) -> bool:
        return not node.primitive.same_bytes and not self._fusible(node)

    def _only_for_columns(self) -> set[Node]:
        """Nodes that only column reductions use, which recompute them."""
        result: set[Node] = set()
        for node in reversed(self._order):
            users = list(self.users(node))
            if node not in self.required and users and all(self._is_column(u) or u in result for u in users):
                result.add(node)
        return result

    def _is_column(self, node: Node) -> bool:
        return (
            node.primitive.kind is Kind.REDUCTION
            and self._fusible(node)
            and not trailing(node.inputs[0].shape, node.attributes["axes"])
        )

    def users(self, node: Node) -> Iterator[Node]:
        """The nodes that read a value, also through views."""
        for consumer in self._consumers[node]:
            if consumer.primitive.is_free and consumer not in self.required:
                yield from self.users(consumer)
            else:
                yield consumer

    # Clusters

    def _assign(self, node: Node) -> None:
        """Add a node to the cluster of an input, or to a new cluster."""
        kind = node.primitive.kind
        if self._stands_alone(node):
            self._enter(node, Cluster(GroupKind.SINGLE, node.size))
        elif node.primitive.is_free:
            if node in self.required:
                cluster = Cluster(GroupKind.MAP, node.size)
                cluster.copies = node in self._copied
                self._enter(node, cluster)
        elif kind in _BEGUN_BY:
            # A paged step computes few items of what it reads, whatever is inlined.
            size = 1 if kind is Kind.PAGED_STEP else node.size
            cluster = Cluster(_BEGUN_BY[kind], size, self._is_by_library(node))
            if "part" in node.attributes:  # an output of a kernel that has several
                cluster = self._joint.setdefault(_joint_key(node), cluster)
            self._enter(node, cluster)
        elif kind is Kind.REDUCTION:
            self._assign_reduction(node)
        elif self._beside and node.primitive is CONCAT and (parts := self._product_of(node)):
            self._joined.add(node)
            self._enter(node, parts)
        else:
            self._assign_elementwise(node)

    def _assign_elementwise(self, node: Node) -> None:
        candidates = self._candidates(node)
        for cluster in sorted(candidates, key=lambda candidate: (-candidate.size, -candidate.last)):
            if self._may_join(node, cluster, candidates[cluster]):
                for other, reduced in candidates.items():
                    if (
                        reduced == candidates[cluster]
                        and (mergeable(cluster, other) or (self._pairs and pairable(cluster, other)))
                        and self._may_join(node, other, reduced)
                    ):
                        self._merge(cluster, other)
                if candidates[cluster]:
                    self.reduced.add(node)
                self._enter(node, cluster)
                if cluster.by_library:
                    bias = self._bias(node, cluster.nodes[0])
                    if bias is not None and bias.value is None:
                        self.required.add(bias)
                return
        self._enter(node, Cluster(GroupKind.MAP, node.size))

    def _product_of(self, concat: Node) -> Cluster | None:
        """The cluster of a product that has all parts of a concatenation, if nothing else reads these."""
        parts = concat.inputs
        cluster = self.cluster.get(parts[0])
        if cluster is None or cluster.kind is not GroupKind.MATMUL or len(set(parts)) < len(parts):
            return None
        alone = all(
            self.cluster.get(part) is cluster
            and part.shape == cluster.nodes[0].shape
            and part not in self.required
            and self._consumers[part] == [concat]
            for part in parts
        )
        return cluster if alone and not cluster.by_library and len(cluster.nodes) < MAX_NODES else None

    def _assign_reduction(self, node: Node) -> None:
        source, axes = node.inputs[0], node.attributes["axes"]
        self.reduced.add(node)
        if not trailing(source.shape, axes):
            space = (source.shape, axes)
            columns, known = self._columns.get(space, (None, frozenset()))
            read = self.column_sources(source)
            # Fused only if they read the same values: else a value would have to live until the last of them.
            if (
                columns is None
                or "order" in node.attributes  # it has a kernel of its own
                or not read & known
                or columns in self._read(node)
                or not self._may_join(node, columns, False)
            ):
                columns, known = Cluster(GroupKind.COLUMN, source.size), frozenset()
            self._columns[space] = columns, read | known
            self._enter(node, columns)
            return
        width = math.prod(source.shape[axis] for axis in axes)
        cluster = self.cluster.get(self.aligned(source)[0])
        if cluster is None or not (cluster.may_have_rows(width) and self._may_join(node, cluster, False)):
            cluster = Cluster(GroupKind.ROW, source.size)
        cluster.reduce_rows(width)
        self._enter(node, cluster)

    def column_sources(self, source: Node) -> frozenset[Node]:
        """The large values that a column reduction reads, directly or through nodes that it recomputes.

        It recomputes no more nodes than a kernel may have; those beyond are counted as read.
        """
        seen: set[Node] = set()
        stack, recomputed = [source], self.for_columns
        while stack:
            node = stack.pop()
            if node.primitive.kind is Kind.VIEW:
                node = self.aligned(node)[0]
            if node not in seen:
                seen.add(node)
                stack += node.inputs if node in recomputed and len(seen) <= MAX_NODES else ()
        return frozenset(node for node in seen - self.for_columns if node.size >= source.size)

    def _candidates(self, node: Node) -> dict[Cluster, bool]:
        """The clusters that have an input at hand, and whether it has an item for each row only."""
        candidates: dict[Cluster, bool] = {}
        if node.primitive.reads_elsewhere or node in self.for_columns:
            return candidates
        for parent in node.inputs:
            producer, spread = self.aligned(parent)
            cluster = self.cluster.get(producer)
            if cluster is None or not cluster.kind.fuses or cluster.copies or producer in self.for_columns:
                continue
            if cluster.by_library and not self._may_add_bias(node, cluster):
                continue
            reduced = producer in self.reduced and spread == 1
            if self.at_hand(producer, spread, cluster, reduced):
                candidates[cluster] = reduced
        return candidates

    def _may_add_bias(self, node: Node, cluster: Cluster) -> bool:
        """Whether a node becomes the epilogue of a library's product: it adds a bias.

        That is faster than a kernel of its own, but slower than adding the bias in a kernel that does more.
        So it is done only for sums that are stored in any case.
        """
        product = cluster.nodes[0]
        if node.primitive is not PRIMITIVES["add"] or node not in self.required or product in self.required:
            return False
        if len(cluster.nodes) > 1 or list(self.users(product)) != [node]:
            return False
        return self._bias(node, product) is not None

    def _bias(self, node: Node, product: Node) -> Node | None:
        """The vector that is added to the rows of a product."""
        vectors = (bias_vector(parent, product.shape[-1], self.required) for parent in node.inputs)
        stored = (vector for vector in vectors if vector is not None and vector is not product)
        return next((v for v in stored if v.value is not None or v in self.cluster), None)

    def at_hand(self, producer: Node, spread: int, cluster: Cluster, reduced: bool) -> bool:
        """Whether a node in `cluster`, after a reduction or not, reads just the item that the loop is at."""
        if producer in self._joined:
            return False
        if producer in self.reduced:
            return spread == 1 if reduced else 0 < spread == cluster.columns
        return spread == 1 and not reduced and cluster.kind.keeps_items

    def _may_join(self, node: Node, cluster: Cluster, reduced: bool) -> bool:
        """Whether no cycle of clusters arises, and what the node reads of the cluster is at hand."""
        if len(cluster.nodes) >= MAX_NODES:
            return False
        for parent in node.inputs:
            producer, spread = self.aligned(parent)
            if self.cluster.get(producer) is cluster and not self.at_hand(producer, spread, cluster, reduced):
                return False
        return not any(reaches(other, cluster) for other in self._read(node) if other is not cluster)

    def aligned(self, node: Node) -> tuple[Node, int]:
        """The value below views, and how many successive items of the node read each of its items.

        The count is 0 if the node reads them in any other order.
        """
        spread = 1
        while node.primitive.kind is Kind.VIEW and node.value is None and node not in self.cluster:
            source = node.inputs[0]
            if node.primitive is EXPAND:
                spread *= repeats(source.shape, node.shape)
            elif node.primitive is BARRIER:
                spread = 0  # its input is read from memory, so nothing after it is fused with what is before
            elif node.primitive is not RESHAPE and not keeps_order(node):
                spread = 0
            node = source
        return node, spread

    def _read(self, node: Node) -> set[Cluster]:
        """The clusters whose values a node reads."""
        sources = (self.aligned(parent)[0] for parent in node.inputs)
        return {self.cluster[source] for source in sources if source in self.cluster}

    def _enter(self, node: Node, cluster: Cluster) -> None:
        number = self._number[node]
        cluster.first = min(cluster.first, number)
        cluster.last = number
        for other in self._read(node) - {cluster}:
            cluster.deps.add(other)
            other.users.add(cluster)
        cluster.nodes.append(node)
        self.cluster[node] = cluster
        self._reach(cluster, number)

    @staticmethod
    def _reach(cluster: Cluster, number: int) -> None:
        """Update `latest` of a cluster and of all that need it, after a node was added to the cluster."""
        stack = [cluster]
        while stack:
            reached = stack.pop()
            if reached.latest < number:
                reached.latest = number
                stack += reached.users

    def absorb(self, cluster: Cluster, other: Cluster) -> None:
        """Merge another cluster, which may depend on the first, into the first."""
        self._merge(cluster, other)
        cluster.deps.discard(cluster)
        cluster.users.discard(cluster)
        cluster.last = max(cluster.last, other.last)
        self._reach(cluster, other.latest)

    def _merge(self, cluster: Cluster, other: Cluster) -> None:
        if other.columns:
            cluster.reduce_rows(other.columns)
        cluster.nodes = sorted(cluster.nodes + other.nodes, key=self._number.__getitem__)
        cluster.deps |= other.deps
        cluster.users |= other.users
        cluster.first = min(cluster.first, other.first)
        for node in other.nodes:
            self.cluster[node] = cluster
        for third in other.users:
            third.deps = (third.deps - {other}) | {cluster}
        for third in other.deps:
            third.users = (third.users - {other}) | {cluster}


def _joint_key(node: Node) -> Any:
    """Equal for nodes that differ in `part` only, which a single kernel computes."""
    rest = tuple(value for name, value in node.attributes.items() if name != "part")
    return node.primitive, node.inputs, repr(rest)  # repr, because 0 == -0


def reaches(start: Cluster, target: Cluster) -> bool:
    """Whether a cluster depends on another, directly or not."""
    seen = {start}
    stack = [start]
    while stack:
        for other in stack.pop().deps:
            if other is target:
                return True
            # A cluster cannot depend on the target if it and all that it needs end before the target begins.
            if other not in seen and other.latest > target.first:
                seen.add(other)
                stack.append(other)
    return False


def mergeable(cluster: Cluster, other: Cluster) -> bool:
    """Whether two clusters over the same items can be merged: independent, and not too large together."""
    return (
        other is not cluster
        and not (cluster.copies or other.copies)
        and cluster.kind.has_rows
        and other.kind.has_rows
        and cluster.size == other.size
        and len({cluster.columns, other.columns} - {0}) <= 1
        and _independent(cluster, other)
    )


def _independent(cluster: Cluster, other: Cluster) -> bool:
    """Whether neither needs the other, and they are not too large together."""
    return (
        len(cluster.nodes) + len(other.nodes) <= MAX_NODES
        and not reaches(cluster, other)
        and not reaches(other, cluster)
    )


def pairable(cluster: Cluster, other: Cluster) -> bool:
    """Whether each multiplies the same few rows with a matrix of one shape; neither needs the other."""
    if other is cluster:
        return False
    products = [
        [node for node in each.nodes if node.primitive.kind is Kind.CONTRACTION] for each in (cluster, other)
    ]
    if [len(own) for own in products] != [1, 1]:
        return False
    (left,), (right,) = products
    shapes = [[operand.shape for operand in product.inputs] for product in (left, right)]
    few = left.primitive.few_rows and left.primitive is right.primitive
    same = few and base(left.inputs[0]) is base(right.inputs[0]) and shapes[0] == shapes[1]
    return same and _independent(cluster, other)


def in_order(clusters: Iterable[Cluster]) -> list[Cluster]:
    """The clusters in topological order."""
    result: dict[Cluster, None] = {}
    stack = [(cluster, False) for cluster in reversed(list(clusters))]
    while stack:
        cluster, ready = stack.pop()
        if ready:
            result[cluster] = None
        elif cluster not in result:
            stack.append((cluster, True))
            stack += [(other, False) for other in sorted(cluster.deps, key=lambda needed: -needed.first)]
    return list(result)
