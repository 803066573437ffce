"""Tallies: sums down the columns of what a kernel has at hand, row by row, added up on its way.

The gradients of biases, and of the scales of norms, are such sums, over values that another kernel has just
computed or read. A kernel of their own would read them from memory once more. The sums are in parts already
(see `splitting`), and each part is a stretch of rows that one group of threads goes over.
"""

from __future__ import annotations

import math

from penstock.drivers.driver import Capabilities
from penstock.fusion.clusters import Cluster, Clustering, reaches
from penstock.fusion.costs import MAX_NODES
from penstock.graph.dtypes import HALVES, float32
from penstock.graph.elementwise import CAST
from penstock.graph.node import Kind, Node

ROWS = 8  # of a part, or a multiple of it
_MOST_COLUMNS = 4096  # so that a group of threads keeps a whole row of sums in registers
# The same where rows are reduced, too. Of so narrow ones a group has the rows of a part all at a time; to go
# over wider ones it would need more registers than there are, and takes longer than to read them again.
_NARROW = 512
_GROUPS = 4  # that go over wide rows, for each unit of a device
_STRETCH = 128  # rows of a part that are added up one after the other, unless it cannot be cut so
_MOST = 3  # tallies of a kernel: each takes a register for every item that a thread has of a row
_LONGEST = 1 << 17  # rows of narrow sums; of more, the parts would be as long as what others read
_NEAR = 16  # nodes behind a sum that are looked at


def units_with_tallies(capabilities: Capabilities) -> int:
    """The units of a device whose kernels can keep tallies: of a GPU, but not in WGSL; 0 for others."""
    able = capabilities.vector_width == 1 and capabilities.language in ("opencl", "cuda")
    return capabilities.compute_units if able else 0


def is_tally(node: Node) -> bool:
    """Whether a node is a sum in parts, as a kernel can keep it: over the rows of each part."""
    if node.primitive.kind is not Kind.REDUCTION or node.dtype != float32 or node.attributes["axes"] != (1,):
        return False
    parts, rows, *columns = node.inputs[0].shape
    return parts > 1 and rows % ROWS == 0 and 1 < math.prod(columns) <= _MOST_COLUMNS


def stretches(node: Node, capabilities: Capabilities) -> int:
    """Into how many parts a reduction of the first axes is cut, if it may become a tally; 1 if not."""
    source, units = node.inputs[0], units_with_tallies(capabilities)
    length = source.size // node.size
    if not units or not (node.dtype == float32 or node.dtype in HALVES) or node.size == 1:
        return 1
    if node.size <= _NARROW:
        return length // ROWS if length % ROWS == 0 and length <= _LONGEST and _computed(source) else 1
    if node.size > _MOST_COLUMNS or not _of_a_map(source):
        return 1
    most = min(max(_GROUPS * units, length // _STRETCH), length // ROWS)
    return next((parts for parts in range(most, 1, -1) if length % (parts * ROWS) == 0), 1)


def _computed(source: Node) -> bool:
    """Whether a value is not there yet, so that a kernel may have it at hand."""
    while source.value is None and (source.primitive.kind is Kind.VIEW or source.primitive is CAST):
        source = source.inputs[0]
    return source.value is None


def _of_a_map(source: Node) -> bool:
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


def keep_tallies(clustering: Clustering, units: int) -> None:
    """Let clusters that go over rows keep the sums of others, where these would read nothing else.

    Each part of a sum is one group of threads, of which a device with so many `units` needs enough.
    """
    clusters = sorted(set(clustering.cluster.values()), key=lambda one: one.first)
    homes: dict[int, list[Cluster]] = {}  # by size
    for cluster in clusters:
        if cluster.kind in ("map", "row") and not clustering.only_for_columns(cluster.nodes[0]):
            homes.setdefault(cluster.size, []).append(cluster)
    for cluster in clusters:
        if cluster.kind == "column" and all(_busy(node, units) for node in cluster.nodes):
            moved = _with_own_maps(cluster, clustering)
            home = _home(cluster, moved, homes.get(cluster.size, []), clustering)
            if home is not None:
                for one in moved:
                    clustering.take_in(home, one)
                home.kind, home.columns = "row", _columns(cluster)


def _busy(node: Node, units: int) -> bool:
    """Whether a node is a tally whose parts are many, or as short as can be."""
    if not is_tally(node):
        return False
    parts, rows = node.inputs[0].shape[:2]
    return 2 * parts >= _GROUPS * units or rows == ROWS


def _columns(cluster: Cluster) -> int:
    return math.prod(cluster.nodes[0].inputs[0].shape[2:])


def _with_own_maps(cluster: Cluster, clustering: Clustering) -> list[Cluster]:
    """A cluster after the maps that only it needs, directly or not."""
    found: dict[Cluster, None] = {}
    grown = [cluster]
    while grown:
        one = grown.pop()
        found[one] = None
        own = (other for other in one.deps if clustering.only_for_columns(other.nodes[0]))
        grown += [other for other in own if other not in found and other.users <= found.keys()]
    return list(reversed(found))


def _home(
    cluster: Cluster, moved: list[Cluster], homes: list[Cluster], clustering: Clustering
) -> Cluster | None:
    """The cluster that has at hand all that another adds up, of those in which `moved` makes no circle."""
    sources = [node.inputs[0] for node in cluster.nodes]
    needed = {other for one in moved for other in one.deps}.difference(moved)
    found = [
        home
        for home in homes
        if (home.kind == "map" or _same_rows(cluster, home))
        and _fits(cluster, home)
        and all(_at_hand(source, home, clustering) for source in sources)
        and not reaches(home, cluster)
        and not any(reaches(other, home) for other in needed - {home})
    ]
    return max(found, key=lambda home: home.last, default=None)


def _same_rows(cluster: Cluster, home: Cluster) -> bool:
    """Whether a cluster of rows has those of another, and they are not too wide to be added up, too."""
    folds = any(node.primitive.kind is Kind.REDUCTION and not is_tally(node) for node in home.nodes)
    return home.columns == _columns(cluster) and (home.columns <= _NARROW or not folds)


def _fits(cluster: Cluster, home: Cluster) -> bool:
    """Whether there is room for the tallies of a cluster, beside others over the same parts."""
    tallies = [node for node in home.nodes if is_tally(node)]
    same = all(node.shape == cluster.nodes[0].shape for node in tallies)
    few = len(tallies) + len(cluster.nodes) <= _MOST
    return same and few and len(home.nodes) + len(cluster.nodes) <= MAX_NODES


def _at_hand(source: Node, home: Cluster, clustering: Clustering) -> bool:
    """Whether a cluster computes or reads, at the item it is at, all large values behind a source."""
    reads = {_straight(parent, clustering) for node in home.nodes for parent in node.inputs}
    large = 0
    seen: set[Node] = set()
    stack = [source]
    while stack:
        value = stack.pop()
        node, spread = clustering.aligned(value)
        if clustering.cluster.get(node) is home:
            if not clustering.at_hand(node, spread, home, False):
                return False
            large += 1
        elif clustering.only_for_columns(node) or (node.size >= source.size and node not in reads):
            again = clustering.only_for_columns(node) or _again(node, clustering)
            if spread != 1 or not again:
                return False
            if node not in seen:
                seen.add(node)
                stack += node.inputs
        elif node.size >= source.size:
            if _straight(value, clustering) is not node:
                return False
            large += 1
    return large > 0


def _again(node: Node, clustering: Clustering) -> bool:
    """Whether a value of another cluster may be computed again from what that one reads or stores."""
    cluster = clustering.cluster.get(node)
    own = node in clustering.required or node in clustering.reduced
    fused = cluster is not None and cluster.kind in ("map", "row")
    return fused and node.primitive.kind is Kind.ELEMENTWISE and not own


def _straight(value: Node, clustering: Clustering) -> Node:
    """What is read item by item through views that leave every item at its number."""
    while value.primitive.same_bytes and value.value is None and value not in clustering.cluster:
        value = value.inputs[0]
    return value
