"""Fuses column reductions into kernels that compute or read the same values row by row.

The gradients of biases and of the scales of norms are sums along columns of values that another kernel has in
registers. A separate kernel would read these from memory once more. Such sums were divided into parts before
(see `splitting`), and a workgroup adds up the rows of a part.
"""

from __future__ import annotations

import math

from penstock.drivers.driver import Capabilities
from penstock.fusion.clusters import Cluster, Clustering, reaches
from penstock.fusion.costs import MAX_NODES
from penstock.graph.dtypes import HALF_PRECISION, float32
from penstock.graph.elementwise import CAST
from penstock.graph.node import Kind, Node

ROWS = 8  # the rows of a part are a multiple of it
_MAX_COLUMNS = 4096  # so that a workgroup keeps a whole row of sums in registers
# The same for kernels that also reduce rows. Up to this width, a workgroup processes all rows of a part at a
# time. Wider rows would need more registers than there are, which is slower than a separate kernel.
_NARROW = 512
_GROUPS = 4  # workgroups per compute unit, for wide rows
_STRETCH = 128  # rows of a part that are added up sequentially, if the rows can be divided so
_MAX_SUMS = 3  # of a kernel: each takes a register for every item of a row that a thread holds
_MAX_ROWS = 1 << 17  # of narrow sums; with more, there would be as many partial sums as items to read
_NEAR = 16  # how many nodes before a sum are inspected


def column_units(capabilities: Capabilities) -> int:
    """The compute units of a device whose row kernels can hold column sums; 0 for other devices."""
    return capabilities.compute_units if capabilities.register_arrays else 0


def is_column_part(node: Node) -> bool:
    """Whether a node reduces the rows of each part, in a form that a row kernel can fuse."""
    if node.primitive.kind is not Kind.REDUCTION or node.dtype != float32 or node.attributes["axes"] != (1,):
        return False
    parts, rows, *columns = node.inputs[0].shape
    return parts > 1 and rows % ROWS == 0 and 1 < math.prod(columns) <= _MAX_COLUMNS


def column_parts(node: Node, capabilities: Capabilities) -> int:
    """Into how many parts a reduction of the first axes is divided to be fused; 1 if it cannot be."""
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
    """Whether a value is not computed yet, so that a kernel may have it at hand."""
    while source.value is None and (source.primitive.kind is Kind.VIEW or source.primitive is CAST):
        source = source.inputs[0]
    return source.value is None


def _is_elementwise(source: Node) -> bool:
    """Whether a value is computed elementwise, and not from reductions of its rows."""
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
    """Move column reductions into clusters of rows that have at hand all values that they read.

    Each part of a sum is a workgroup. There have to be enough of them for so many compute `units`.
    """
    clusters = sorted(set(clustering.cluster.values()), key=lambda cluster: cluster.first)
    hosts: dict[int, list[Cluster]] = {}  # by size
    for cluster in clusters:
        if cluster.kind.has_rows and cluster.nodes[0] not in clustering.for_columns:
            hosts.setdefault(cluster.size, []).append(cluster)
    for cluster in clusters:
        if cluster.kind.has_columns and all(_keeps_busy(node, units) for node in cluster.nodes):
            moved = _with_own_maps(cluster, clustering)
            host = _host(cluster, moved, hosts.get(cluster.size, []), clustering)
            if host is not None:
                for member in moved:
                    clustering.absorb(host, member)
                host.reduce_rows(_columns(cluster))


def _keeps_busy(node: Node, units: int) -> bool:
    """Whether a column sum has enough parts for all compute units, or as many as possible."""
    if not is_column_part(node):
        return False
    parts, rows = node.inputs[0].shape[:2]
    return 2 * parts >= _GROUPS * units or rows == ROWS


def _columns(cluster: Cluster) -> int:
    return math.prod(cluster.nodes[0].inputs[0].shape[2:])


def _with_own_maps(cluster: Cluster, clustering: Clustering) -> list[Cluster]:
    """A cluster, preceded by the maps that nothing else needs, directly or not."""
    members: dict[Cluster, None] = {}
    stack = [cluster]
    while stack:
        member = stack.pop()
        members[member] = None
        own = (other for other in member.deps if other.nodes[0] in clustering.for_columns)
        stack += [other for other in own if other not in members and other.users <= members.keys()]
    return list(reversed(members))


def _host(
    cluster: Cluster, moved: list[Cluster], hosts: list[Cluster], clustering: Clustering
) -> Cluster | None:
    """The last cluster that has at hand the values that another sums up, and can absorb `moved`."""
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
    """Whether a host can process the rows of a cluster, and they are narrow enough if it reduces them."""
    reduces = any(node.primitive.kind is Kind.REDUCTION and not is_column_part(node) for node in host.nodes)
    return host.may_have_rows(_columns(cluster)) and (host.columns <= _NARROW or not reduces)


def _has_room(cluster: Cluster, host: Cluster) -> bool:
    """Whether a host has registers for the sums of a cluster, beside its sums over the same parts."""
    sums = [node for node in host.nodes if is_column_part(node)]
    same = all(node.shape == cluster.nodes[0].shape for node in sums)
    few = len(sums) + len(cluster.nodes) <= _MAX_SUMS
    return same and few and len(host.nodes) + len(cluster.nodes) <= MAX_NODES


def _at_hand(source: Node, host: Cluster, clustering: Clustering) -> bool:
    """Whether the host has at hand, computed or read, all large values that a source is computed from."""
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
        elif node in clustering.for_columns or (node.size >= source.size and node not in reads):
            recomputed = node in clustering.for_columns or _may_recompute(node, clustering)
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
    """Whether a value of another cluster may be recomputed from what that cluster reads or stores."""
    cluster = clustering.cluster.get(node)
    own = node in clustering.required or node in clustering.reduced
    fused = cluster is not None and cluster.kind.has_rows
    return fused and node.primitive.kind is Kind.ELEMENTWISE and not own


def _unreshaped(value: Node, clustering: Clustering) -> Node:
    """The value below reshapes, which keep the order of its items."""
    while value.primitive.same_bytes and value.value is None and value not in clustering.cluster:
        value = value.inputs[0]
    return value
