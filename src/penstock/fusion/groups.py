"""From a graph to groups: sets of nodes that one kernel computes, and nodes that stand alone.

There are four kinds of group. A *map* computes every item by itself. A *row* group mixes elementwise work
with reductions over the trailing axes, so that one row after another is read, reduced and written. A *column*
group reduces over other axes. A *matmul* group is a matrix product and what is done to each of its items.
Views and constants belong to no group: they only say where a value is read.

Nodes join the group of what they read, wherever they read exactly the item that is at hand. Cheap maps that
remain are computed again where they are needed, rather than stored.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.fusion.index import ZERO, Index, SplitNeeded, Variables, flat, source_place, variable
from penstock.graph.contraction import GATHER, MATMUL
from penstock.graph.creating import SEQUENCE
from penstock.graph.elementwise import FULL, PRIMITIVES
from penstock.graph.node import Node, Shape, topological
from penstock.graph.random import RANDOM_BITS
from penstock.graph.reducing import EXPAND, REDUCTIONS
from penstock.graph.shaping import CONCAT, PAD, PERMUTE, RESHAPE, SLICE

Kind = Literal["map", "row", "column", "matmul", "lone"]
VIEWS = frozenset((RESHAPE, PERMUTE, EXPAND, SLICE))
FREE = VIEWS | {FULL, SEQUENCE}  # cost less to compute again than to keep
_PLACED = frozenset((PAD, CONCAT, GATHER, RANDOM_BITS))  # read items at other places than their own
# What takes many instructions, so that it is not done twice for nothing.
_COSTLY_NAMES = """exp expm1 log log1p log2 log10 sqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh
atanh pow atan2 hypot logaddexp divide remainder floor_divide"""
COSTLY = frozenset(PRIMITIVES[name] for name in _COSTLY_NAMES.split())
_LONG = COSTLY - {PRIMITIVES["divide"], PRIMITIVES["sqrt"]}  # take longer than reading a value from memory
_AGAIN_NODES = 16  # as many are computed again at the same size, rather than stored
_MAX_NODES = 96  # in one group; beyond that a kernel takes long to compile and runs out of registers
_CHEAP_NODES = 6  # as many are computed again, at a smaller size, rather than stored


@dataclass(frozen=True)
class Group:
    """One kernel: the values of `outputs` from those of `inputs`, through `nodes`, which stand in order."""

    kind: Kind
    outputs: tuple[Node, ...]
    inputs: tuple[Node, ...]
    nodes: tuple[Node, ...]
    columns: int = 1  # of a row group: the items of one row


class _Cluster:
    """A group while it grows."""

    def __init__(self, kind: Kind, size: int) -> None:
        self.kind: Kind = kind
        self.size = size  # items that its nodes have before any reduction
        self.columns = 1
        self.nodes: list[Node] = []
        self.deps: set[_Cluster] = set()  # the clusters whose values it reads
        self.users: set[_Cluster] = set()  # those that read its values
        # The places of its first and last node in the order of all.
        self.first, self.last = sys.maxsize, 0
        self.latest = 0  # the last place in itself and in all that it needs, directly or not


def partition(wanted: Sequence[Node], fusible: Callable[[Node], bool]) -> list[Group]:
    """The groups that compute the wanted nodes, in order; `fusible` tells what a kernel can hold.

    A wanted node that only reshapes is not computed: its value is that of its `base`.
    """
    order = [node for node in topological(wanted) if node.value is None]
    return _Partition(order, wanted, fusible).groups()


def base(node: Node) -> Node:
    """The node whose bytes are those of `node` too: reshaping moves nothing."""
    while node.primitive is RESHAPE and node.value is None:
        node = node.inputs[0]
    return node


def trailing(shape: Shape, axes: tuple[int, ...]) -> bool:
    """Whether the axes are the last ones, leaving out those of length 1."""
    long = [axis for axis, length in enumerate(shape) if length > 1]
    reduced = [axis for axis in long if axis in axes]
    return not reduced or long[-len(reduced) :] == reduced


def operand_index(operand: Node, stored: Container[Node]) -> tuple[Node, Index, Variables] | None:
    """What a matrix operand looks at, and where its item (b0, b1, ..., i, j) lies there, in items.

    Views in `stored` are looked at as they are, since they are written out.
    None if the place is not a sum of these, times constants: then the operand has to be written out.
    """
    names = [*(f"b{axis}" for axis in range(operand.ndim - 2)), "i", "j"]
    variables = Variables(dict(zip(names, operand.shape, strict=True)))
    place = tuple(ZERO if n == 1 else variable(v) for v, n in zip(names, operand.shape, strict=True))
    node = operand
    try:
        while node.primitive in VIEWS and node.value is None and node not in stored:
            source = base(node)
            if source is not node and (source.primitive not in FREE or source in stored):
                return source, flat(place, node.shape), variables
            place = source_place(node, place, variables)
            node = node.inputs[0]
    except SplitNeeded:
        return None
    if variables.computed or (node.primitive in FREE and node.value is None and node not in stored):
        return None
    return node, flat(place, node.shape), variables


class _Partition:
    def __init__(self, order: list[Node], wanted: Sequence[Node], fusible: Callable[[Node], bool]) -> None:
        self._order = order
        self._number = {node: number for number, node in enumerate(order)}
        self._fusible = fusible
        self._consumers: dict[Node, list[Node]] = {node: [] for node in order}
        self._cluster: dict[Node, _Cluster] = {}
        self._columns: dict[tuple[Shape, tuple[int, ...]], _Cluster] = {}  # the latest of each space
        self._reduced: set[Node] = set()  # nodes after a reduction, with one item for each row
        self._inlined: dict[_Cluster, set[Node]] = {}
        self._times: dict[_Cluster, int] = {}  # how often what is inlined is computed for one item
        for node in order:
            for parent in dict.fromkeys(node.inputs):
                if parent.value is None:
                    self._consumers[parent].append(node)
        self._required = {base(node) for node in wanted if node.value is None}  # stored whatever happens
        for node in order:
            self._required.update(one for one in self._read_whole(node) if one.value is None)
            if self._stands_alone(node):
                self._required.add(node)
        self._stored = set(self._required)
        self._for_columns = self._only_for_columns()

    def groups(self) -> list[Group]:
        for node in self._order:
            self._place(node)
        for node, cluster in self._cluster.items():
            if any(self._cluster[user] is not cluster for user in self._users(node)):
                self._stored.add(node)
        clusters = list(dict.fromkeys(self._cluster.values()))
        for cluster in clusters:
            self._compute_again(cluster)
        homes = {cluster: {cluster} for cluster in clusters}
        for cluster in sorted(clusters, key=lambda one: -one.last):
            self._inline(cluster, homes)
        return [
            self._group(cluster)
            for cluster in _in_order(cluster for cluster in clusters if cluster in homes[cluster])
            if any(node in self._stored for node in cluster.nodes)
        ]

    # Before there are clusters

    def _read_whole(self, node: Node) -> Iterator[Node]:
        """What a node reads from memory by itself: a view on the way there is written out."""
        if self._stands_alone(node):
            yield from map(base, node.inputs)
        elif node.primitive in FREE:
            return
        elif node.primitive is MATMUL:
            for operand in node.inputs:
                found = operand_index(operand, self._required)
                yield base(operand) if found is None else found[0]
        elif node.primitive in (GATHER, RANDOM_BITS):
            yield base(node.inputs[0])

    def _stands_alone(self, node: Node) -> bool:
        return node.primitive is not RESHAPE and not self._fusible(node)

    def _only_for_columns(self) -> set[Node]:
        """Elementwise nodes that only reductions to columns need, which compute them by themselves."""
        found: set[Node] = set()
        for node in reversed(self._order):
            users = list(self._users(node))
            if node not in self._required and users and all(self._is_column(u) or u in found for u in users):
                found.add(node)
        return found

    def _is_column(self, node: Node) -> bool:
        return (
            node.primitive in REDUCTIONS
            and self._fusible(node)
            and not trailing(node.inputs[0].shape, node.attributes["axes"])
        )

    def _users(self, node: Node) -> Iterator[Node]:
        """The nodes that need a value, also through views."""
        for consumer in self._consumers[node]:
            if consumer.primitive in FREE and consumer not in self._stored:
                yield from self._users(consumer)
            else:
                yield consumer

    # Clusters

    def _place(self, node: Node) -> None:
        """Put a node into a cluster: that of what it reads, or a new one."""
        if self._stands_alone(node):
            self._enter(node, _Cluster("lone", node.size))
        elif node.primitive in FREE:
            if node in self._stored:
                self._enter(node, _Cluster("map", node.size))
        elif node.primitive is MATMUL:
            self._enter(node, _Cluster("matmul", node.size))
        elif node.primitive in REDUCTIONS:
            self._place_reduction(node)
        else:
            self._place_elementwise(node)

    def _place_elementwise(self, node: Node) -> None:
        found = self._candidates(node)
        for cluster in sorted(found, key=lambda one: (-one.size, -one.last)):
            if self._may_join(node, cluster, found[cluster]):
                for other, reduced in found.items():
                    if (
                        reduced == found[cluster]
                        and _mergeable(cluster, other)
                        and self._may_join(node, other, reduced)
                    ):
                        self._merge(cluster, other)
                if found[cluster]:
                    self._reduced.add(node)
                self._enter(node, cluster)
                return
        self._enter(node, _Cluster("map", node.size))

    def _place_reduction(self, node: Node) -> None:
        source, axes = node.inputs[0], node.attributes["axes"]
        self._reduced.add(node)
        if not trailing(source.shape, axes):
            space = (source.shape, axes)
            columns = self._columns.get(space)
            if columns is None or columns in self._read(node) or not self._may_join(node, columns, False):
                columns = self._columns[space] = _Cluster("column", source.size)
            self._enter(node, columns)
            return
        width = math.prod(source.shape[axis] for axis in axes)
        cluster = self._cluster.get(self._aligned(source)[0])
        if cluster is None or not (
            (cluster.kind == "map" or (cluster.kind == "row" and cluster.columns == width))
            and self._may_join(node, cluster, False)
        ):
            cluster = _Cluster("row", source.size)
        cluster.kind, cluster.columns = "row", width
        self._enter(node, cluster)

    def _candidates(self, node: Node) -> dict[_Cluster, bool]:
        """The clusters that have an input at hand, item by item; True where it is one item for each row."""
        found: dict[_Cluster, bool] = {}
        if node.primitive in _PLACED or node in self._for_columns:
            return found
        for parent in node.inputs:
            producer, spread = self._aligned(parent)
            cluster = self._cluster.get(producer)
            if cluster is None or cluster.kind == "lone" or producer in self._for_columns:
                continue
            reduced = producer in self._reduced and spread == 1
            if self._at_hand(producer, spread, cluster, reduced):
                found[cluster] = reduced
        return found

    def _at_hand(self, producer: Node, spread: int, cluster: _Cluster, reduced: bool) -> bool:
        """Whether a node in `cluster`, after a reduction or not, reads the item of its own place."""
        if producer in self._reduced:
            return spread == 1 if reduced else cluster.kind == "row" and spread == cluster.columns
        return spread == 1 and not reduced and cluster.kind != "column"

    def _may_join(self, node: Node, cluster: _Cluster, reduced: bool) -> bool:
        """No circle of clusters must arise, and nothing inside be read at another place than its own."""
        if len(cluster.nodes) >= _MAX_NODES:
            return False
        for parent in node.inputs:
            producer, spread = self._aligned(parent)
            if self._cluster.get(producer) is cluster and not self._at_hand(
                producer, spread, cluster, reduced
            ):
                return False
        return not any(_reaches(other, cluster) for other in self._read(node) if other is not cluster)

    def _aligned(self, node: Node) -> tuple[Node, int]:
        """What a node looks at through views, and how many items in a row see one there; 0: any."""
        spread = 1
        while node.primitive in VIEWS and node.value is None and node not in self._cluster:
            source = node.inputs[0]
            if node.primitive is EXPAND:
                spread *= _spread(source.shape, node.shape)
            elif node.primitive is not RESHAPE and not _in_place(node):
                spread = 0
            node = source
        return node, spread

    def _read(self, node: Node) -> set[_Cluster]:
        """The clusters whose values a node needs."""
        found = (self._cluster.get(self._aligned(parent)[0]) for parent in node.inputs)
        return {cluster for cluster in found if cluster is not None}

    def _enter(self, node: Node, cluster: _Cluster) -> None:
        number = self._number[node]
        cluster.first = min(cluster.first, number)
        cluster.last = number
        for other in self._read(node) - {cluster}:
            cluster.deps.add(other)
            other.users.add(cluster)
        cluster.nodes.append(node)
        self._cluster[node] = cluster
        stack = [cluster]
        while stack:
            one = stack.pop()
            if one.latest < number:
                one.latest = number
                stack += one.users

    def _merge(self, cluster: _Cluster, other: _Cluster) -> None:
        if other.kind == "row":
            cluster.kind, cluster.columns = "row", other.columns
        cluster.nodes = sorted(cluster.nodes + other.nodes, key=self._number.__getitem__)
        cluster.deps |= other.deps
        cluster.users |= other.users
        cluster.first = min(cluster.first, other.first)
        for node in other.nodes:
            self._cluster[node] = cluster
        for third in other.users:
            third.deps = (third.deps - {other}) | {cluster}
        for third in other.deps:
            third.users = (third.users - {other}) | {cluster}

    # After there are clusters

    def _inline(self, cluster: _Cluster, homes: dict[_Cluster, set[_Cluster]]) -> None:
        """Compute a map where it is needed instead of storing it, if that is not more work."""
        outputs = [node for node in cluster.nodes if node in self._stored]
        if cluster.kind != "map" or not outputs or any(node in self._required for node in outputs):
            return
        users = {user for node in outputs for user in self._users(node)}
        targets = {home for user in users for home in homes[self._cluster[user]]} - {cluster}
        inside = self._inlined.get(cluster, set()) | set(cluster.nodes)
        cheap = len(inside) <= _CHEAP_NODES and not any(node.primitive in COSTLY for node in inside)
        same_size = all(target.size <= cluster.size for target in targets)
        large = [one for one in self._sources(inside) if one.size >= cluster.size]
        if cluster.size == 1 and not self._sources(inside):
            cheap = True  # a constant
        pays = (len(targets) == 1 and (same_size or cheap)) or (cheap and len(large) <= 1)
        times = self._times_read(outputs)
        if times > 1:  # again and again through clusters in a chain, it would be ever more
            pays = pays and cheap and times * len(inside) <= _AGAIN_NODES
        fits = all(
            len(inside.union(target.nodes, self._inlined.get(target, ()))) <= 2 * _MAX_NODES
            for target in targets
        )
        if not pays or not fits:
            return
        homes[cluster] = targets
        self._times[cluster] = times
        self._stored.difference_update(outputs)
        for target in targets:
            self._inlined.setdefault(target, set()).update(inside)
            target.deps = (target.deps - {cluster}) | cluster.deps

    def _compute_again(self, cluster: _Cluster) -> None:
        """Do not store what others can compute from what is stored anyway, with no more to read."""
        if cluster.kind not in ("map", "row", "matmul"):
            return
        for node in cluster.nodes:
            if node.primitive in _LONG and node not in self._stored:
                self._store_instead(node, cluster)
        for node in cluster.nodes:
            if node in self._stored and not self._must_stay(node):
                leaves = self._leaves_to_read(node, cluster)
                if leaves is not None:
                    self._stored.discard(node)
                    self._stored.update(leaf for leaf in leaves if leaf in self._cluster)

    def _leaves_to_read(self, node: Node, cluster: _Cluster) -> set[Node] | None:
        """What others would read to compute a node again; None if that is more, or takes long."""
        inside, leaves = self._tree(node, cluster)
        large = [leaf for leaf in leaves if leaf.size >= node.size]
        simple = not any(one.primitive in _LONG or one.primitive in _PLACED for one in inside)
        return leaves if simple and len(large) <= 1 and len(inside) <= _AGAIN_NODES else None

    def _store_instead(self, node: Node, cluster: _Cluster) -> None:
        """Store one value in place of two or more that can be computed from it."""
        after = [
            one
            for one in cluster.nodes
            if one in self._stored and not self._must_stay(one) and node in self._tree(one, cluster)[0]
        ]
        self._stored.add(node)
        if len(after) < 2 or any(self._leaves_to_read(one, cluster) is None for one in after):
            self._stored.discard(node)

    def _must_stay(self, node: Node) -> bool:
        return node in self._required or node in self._reduced or node.primitive is MATMUL

    def _tree(self, output: Node, cluster: _Cluster) -> tuple[set[Node], set[Node]]:
        """The nodes of a cluster behind one of its own, and the values that these read."""
        inside: set[Node] = set()
        leaves: set[Node] = set()
        stack = [output]
        while stack:
            node = stack.pop()
            known = node is not output and (node in self._stored or self._must_stay(node))
            if self._cluster.get(node) is not cluster or known:
                leaves.add(node)
            elif node not in inside:
                inside.add(node)
                stack += [self._aligned(parent)[0] for parent in node.inputs]
        return inside, {leaf for leaf in leaves if leaf.primitive not in (FULL, SEQUENCE)}

    def _times_read(self, outputs: list[Node]) -> int:
        """At how many places a kernel that computes one item would compute these nodes."""
        places: dict[tuple[Node, Node | None], int] = {}
        for user in {user for node in outputs for user in self._users(node)}:
            for parent in user.inputs:
                producer, spread = self._aligned(parent)
                if producer in outputs:
                    seen = producer if spread == 1 else parent
                    key = (seen, user if user.primitive in _PLACED else None)
                    places[key] = max(places.get(key, 1), self._times.get(self._cluster[user], 1))
        by_node: dict[Node, int] = {}
        for (seen, _), times in places.items():
            producer = self._aligned(seen)[0]
            by_node[producer] = by_node.get(producer, 0) + times
        return max(by_node.values(), default=1)

    def _sources(self, inside: set[Node]) -> set[Node]:
        """What nodes read that is not among them."""
        found = {self._aligned(parent)[0] for node in inside for parent in node.inputs}
        return {one for one in found if one not in inside and one.primitive not in (FULL, SEQUENCE)}

    def _operand_views(self, operand: Node) -> Iterator[Node]:
        """The views through which a matrix operand is read, even where one is stored for another use."""
        found = operand_index(operand, self._required)
        last = base(operand) if found is None else found[0]
        while operand is not last:
            yield operand
            operand = operand.inputs[0]

    def _group(self, cluster: _Cluster) -> Group:
        outputs = [node for node in cluster.nodes if node in self._stored]
        if cluster.kind == "lone":
            (node,) = outputs
            return Group("lone", (node,), node.inputs, (node,))
        own = self._inlined.get(cluster, set()) | set(cluster.nodes)
        for node in cluster.nodes:
            if node.primitive is MATMUL:
                own.update(view for operand in node.inputs for view in self._operand_views(operand))
        inputs: dict[Node, None] = {}
        inside: dict[Node, None] = {}
        stack = [(node, False) for node in reversed(outputs)]
        while stack:
            node, ready = stack.pop()
            if ready:
                inside[node] = None
            elif node.value is not None or (node in self._stored and node not in own):
                inputs[node] = None
            elif node not in inside:
                stack.append((node, True))
                stack += [(parent, False) for parent in reversed(node.inputs)]
        return Group(cluster.kind, tuple(outputs), tuple(inputs), tuple(inside), cluster.columns)


def _spread(shape: Shape, wide: Shape) -> int:
    """How often each item is repeated in a row by an expansion; 0 if they are not repeated in a row."""
    same = 0
    while same < len(shape) and shape[same] == wide[same]:
        same += 1
    return math.prod(wide[same:]) if math.prod(shape[same:]) == 1 else 0


def _in_place(view: Node) -> bool:
    """Whether an order of axes, or a slice, leaves every item at its number."""
    if view.primitive is SLICE:
        return view.shape == view.inputs[0].shape and all(part[2] == 1 for part in view.attributes["slices"])
    long = [axis for axis in view.attributes["axes"] if view.inputs[0].shape[axis] > 1]
    return view.primitive is PERMUTE and long == sorted(long)


def _reaches(start: _Cluster, target: _Cluster) -> bool:
    """Whether one cluster needs another, directly or not."""
    seen = {start}
    stack = [start]
    while stack:
        for other in stack.pop().deps:
            if other is target:
                return True
            # Nothing that ends before the target begins, with all that it needs, can need it.
            if other not in seen and other.latest > target.first:
                seen.add(other)
                stack.append(other)
    return False


def _mergeable(cluster: _Cluster, other: _Cluster) -> bool:
    """Whether two clusters of one space can be one: neither needs the other, and there is room."""
    spaces = {cluster.kind, other.kind}
    return (
        other is not cluster
        and spaces <= {"map", "row"}
        and cluster.size == other.size
        and (len(spaces) == 2 or cluster.columns == other.columns)
        and len(cluster.nodes) + len(other.nodes) <= _MAX_NODES
        and not _reaches(cluster, other)
        and not _reaches(other, cluster)
    )


def _in_order(clusters: Iterable[_Cluster]) -> list[_Cluster]:
    """Each cluster after those that it needs."""
    result: dict[_Cluster, None] = {}
    stack = [(cluster, False) for cluster in reversed(list(clusters))]
    while stack:
        cluster, ready = stack.pop()
        if ready:
            result[cluster] = None
        elif cluster not in result:
            stack.append((cluster, True))
            stack += [(other, False) for other in sorted(cluster.deps, key=lambda one: -one.first)]
    return list(result)
