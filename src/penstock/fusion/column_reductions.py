"""Fused column reductions: sums down the columns of values that a kernel has at hand, row by row.

The gradients of biases, and of the scales of norms, are such sums, over values that another kernel has just
computed or read. A kernel of their own would read these from memory once more. The sums are in parts already
(see `splitting`), and each part covers a stretch of rows that one workgroup goes over.
"""

from __future__ import annotations

import math

from penstock.drivers.driver import Capabilities
from penstock.fusion.clusters import Cluster, Clustering, reaches
from penstock.fusion.costs import MAX_NODES
from penstock.graph.dtypes import HALF_PRECISION, float32
from penstock.graph.elementwise import CAST
from penstock.graph.node import Kind, Node

ROWS = 8  # of a part, or a multiple of it
_MAX_COLUMNS = 4096  # so that a workgroup keeps a whole row of sums in registers
# The same where rows are reduced, too. Of so narrow ones a workgroup has the rows of a part all at a time; to
# go over wider ones it would need more registers than there are, and takes longer than to read them again.
_NARROW = 512
_GROUPS = 4  # workgroups that go over wide rows, for each compute unit of a device
_STRETCH = 128  # rows of a part that are added up one after the other, unless it cannot be cut so
_MAX_SUMS = 3  # of a kernel: each takes a register for every item that a thread has of a row
_MAX_ROWS = 1 << 17  # of narrow sums; with more, there would be as many partial sums as items read elsewhere
_NEAR = 16  # nodes behind a sum that are looked at


def column_units(capabilities: Capabilities) -> int:
    """The compute units of a device whose row kernels can keep column sums; else 0."""
    return capabilities.compute_units if capabilities.register_arrays else 0


def is_column_part(node: Node) -> bool:
    """Whether a node is a reduction in parts, as a row kernel can keep it: over the rows of each part."""
    if node.primitive.kind is not Kind.REDUCTION or node.dtype != float32 or node.attributes["axes"] != (1,):
        return False
    parts, rows, *columns = node.inputs[0].shape
    return parts > 1 and rows % ROWS == 0 and 1 < math.prod(columns) <= _MAX_COLUMNS


def column_parts(node: Node, capabilities: Capabilities) -> int:
    """Into how many parts a reduction of the first axes is cut, if it may be fused; 1 if not."""
    source, units = node.inputs[0], column_units(capabilities)
    length = source.size // node.size
    if not units or not (node.dtype == float32 or node.dtype in HALF_PRECISION) or node.size == 1:
        return 1
    if node.size <= _NARROW:
        return length // ROWS if length % ROWS == 0 and length <= _MAX_ROWS and _is_pending(source) else 1
    if node.size > _MAX_COLUMNS or not _is_elementwise(source):
        return 1
    most = min(max(_GROUPS * units, length // _STRETCH), length // ROWS)
    return next((parts for parts in range(most, 1, -1) if length % (parts * ROWS) == 0), 1)


def _is_pending(source: Node) -> bool:
    """Whether a value is not there yet, so that a kernel may have it at hand."""
    while source.value is None and (source.primitive.kind is Kind.VIEW or source.primitive is CAST):
        source = source.inputs[0]
    return source.value is None


def _is_elementwise(source: Node) -> bool:
    """Whether a value is computed item by item, and not from reductions of its rows."""
    seen: dict[Node, None] = {}
    stack = [source]
    while stack and len(seen) < _NEAR:
        node = stack.pop()
        if node in seen or node.value is not None:
            continue
        seen[node] = None
        if node.primitive.kind is Kind.REDUCTION:
            return False
        if node.primitive.kind in (Kind.VIEW, Kind.ELEMENTWISE):
            stack += node.inputs
    return any(node.primitive.kind is Kind.ELEMENTWISE and node.primitive is not CAST for node in seen)


def fuse_column_reductions(clustering: Clustering, units: int) -> None:
    """Move column reductions into clusters of rows that have at hand all that they read.

    Each part of a sum is one workgroup, of which a device with so many compute `units` needs enough.
    """
    clusters = sorted(set(clustering.cluster.values()), key=lambda cluster: cluster.first)
    hosts: dict[int, list[Cluster]] = {}  # by size
    for cluster in clusters:
        if cluster.kind.has_rows and not clustering.only_for_columns(cluster.nodes[0]):
            hosts.setdefault(cluster.size, []).append(cluster)
    for cluster in clusters:
        if cluster.kind.has_columns and all(_keeps_busy(node, units) for node in cluster.nodes):
            moved = _with_own_maps(cluster, clustering)
            host = _host(cluster, moved, hosts.get(cluster.size, []), clustering)
            if host is not None:
                for member in moved:
                    clustering.take_in(host, member)
                host.reduce_rows(_columns(cluster))


def _keeps_busy(node: Node, units: int) -> bool:
    """Whether the parts of a column sum are many, or as short as can be."""
    if not is_column_part(node):
        return False
    parts, rows = node.inputs[0].shape[:2]
    return 2 * parts >= _GROUPS * units or rows == ROWS


def _columns(cluster: Cluster) -> int:
    return math.prod(cluster.nodes[0].inputs[0].shape[2:])


def _with_own_maps(cluster: Cluster, clustering: Clustering) -> list[Cluster]:
    """A cluster after the maps that only it needs, directly or not."""
    members: dict[Cluster, None] = {}
    stack = [cluster]
    while stack:
        member = stack.pop()
        members[member] = None
        own = (other for other in member.deps if clustering.only_for_columns(other.nodes[0]))
        stack += [other for other in own if other not in members and other.users <= members.keys()]
    return list(reversed(members))


def _host(
    cluster: Cluster, moved: list[Cluster], hosts: list[Cluster], clustering: Clustering
) -> Cluster | None:
    """The last cluster that has at hand all that another adds up, and can take in `moved` without a cycle."""
    sources = [node.inputs[0] for node in cluster.nodes]
    needed = {other for member in moved for other in member.deps}.difference(moved)
    able = [
        host
        for host in hosts
        if _may_have_rows(cluster, host)
        and _has_room(cluster, host)
        and all(_at_hand(source, host, clustering) for source in sources)
        and not reaches(host, cluster)
        and not any(reaches(other, host) for other in needed - {host})
    ]
    return max(able, key=lambda host: host.last, default=None)


def _may_have_rows(cluster: Cluster, host: Cluster) -> bool:
    """Whether a host can have the rows of a cluster, and they are not too wide to be added up, too."""
    reduces = any(node.primitive.kind is Kind.REDUCTION and not is_column_part(node) for node in host.nodes)
    return host.may_have_rows(_columns(cluster)) and (host.columns <= _NARROW or not reduces)


def _has_room(cluster: Cluster, host: Cluster) -> bool:
    """Whether there is room for the sums of a cluster, beside others over the same parts."""
    sums = [node for node in host.nodes if is_column_part(node)]
    same = all(node.shape == cluster.nodes[0].shape for node in sums)
    few = len(sums) + len(cluster.nodes) <= _MAX_SUMS
    return same and few and len(host.nodes) + len(cluster.nodes) <= MAX_NODES


def _at_hand(source: Node, host: Cluster, clustering: Clustering) -> bool:
    """Whether a cluster computes or reads, at the item it is at, all large values behind a source."""
    reads = {_unreshaped(parent, clustering) for node in host.nodes for parent in node.inputs}
    large = 0
    seen: set[Node] = set()
    stack = [source]
    while stack:
        value = stack.pop()
        node, spread = clustering.aligned(value)
        if clustering.cluster.get(node) is host:
            if not clustering.at_hand(node, spread, host, False):
                return False
            large += 1
        elif clustering.only_for_columns(node) or (node.size >= source.size and node not in reads):
            recomputed = clustering.only_for_columns(node) or _may_recompute(node, clustering)
            if spread != 1 or not recomputed:
                return False
            if node not in seen:
                seen.add(node)
                stack += node.inputs
        elif node.size >= source.size:
            if _unreshaped(value, clustering) is not node:
                return False
            large += 1
    return large > 0


def _may_recompute(node: Node, clustering: Clustering) -> bool:
    """Whether a value of another cluster may be recomputed from what that one reads or stores."""
    cluster = clustering.cluster.get(node)
    own = node in clustering.required or node in clustering.reduced
    fused = cluster is not None and cluster.kind.has_rows
    return fused and node.primitive.kind is Kind.ELEMENTWISE and not own


def _unreshaped(value: Node, clustering: Clustering) -> Node:
    """What is read item by item through views that leave every item at its number."""
    while value.primitive.same_bytes and value.value is None and value not in clustering.cluster:
        value = value.inputs[0]
    return value
