"""From a graph to groups: sets of nodes that a kernel computes together, and single nodes.

The kinds of group are in `kinds`. Views and constants belong to no group, since they only change which item
is read. `clusters` decides which nodes are fused, and `storing` which cheap maps are recomputed rather than
stored.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.fusion.clusters import Cluster, Clustering
from penstock.fusion.column_reductions import fuse_column_reductions
from penstock.fusion.kinds import GroupKind
from penstock.fusion.storing import Storing
from penstock.fusion.views import base, operand_reader, operand_source
from penstock.graph.node import Kind, Node, topological
from penstock.graph.raw import all_parts


@dataclass(frozen=True)
class Group:
    """Nodes that a kernel computes together: `outputs` from `inputs`, by `nodes` in topological order."""

    kind: GroupKind
    outputs: tuple[Node, ...]
    inputs: tuple[Node, ...]
    nodes: tuple[Node, ...]
    columns: int = 0  # of a row group: the items of a row

    @cached_property
    def structure(self) -> tuple[Any, ...]:
        """All that kernels depend on: equal for groups that differ in values and constants only."""
        number = {node: position for position, node in enumerate((*self.inputs, *self.nodes))}
        leaves = tuple((node.shape, str(node.dtype)) for node in self.inputs)
        inside = tuple(
            (
                node.primitive.name,
                tuple(number[parent] for parent in node.inputs),
                node.shape,
                str(node.dtype),
                tuple(
                    value for name, value in node.attributes.items() if name not in node.primitive.constants
                ),
            )
            for node in self.nodes
        )
        return self.kind.value, leaves, inside, tuple(number[node] for node in self.outputs)

    @cached_property
    def sharing(self) -> tuple[int, ...]:
        """For each output and input, the number of the first that is held by the same value."""
        holders = [base(node) for node in (*self.outputs, *self.inputs)]
        first = {node: at for at, node in reversed([*enumerate(holders)])}
        return tuple(first[node] for node in holders)

    @cached_property
    def work(self) -> int:
        """About how many items times operations it takes."""
        total = 0
        for node in self.nodes:
            if node.primitive.kind is Kind.CONTRACTION:
                total += node.size * node.inputs[0].shape[-1] // 8  # in vectors
            elif not node.primitive.is_free:
                largest = max(value.size for value in (node, *node.inputs))
                total += largest * (8 if node.primitive.costly or not self.kind.fuses else 1)
        return total

    def on(self, values: Mapping[Node, Node]) -> Group:
        """The same group on other values: for each node another of the same kind."""
        outputs, inputs, nodes = (
            tuple([values[node] for node in own]) for own in (self.outputs, self.inputs, self.nodes)
        )
        moved = Group(self.kind, outputs, inputs, nodes, self.columns)
        for same in ("structure", "sharing", "work"):  # which depend on kinds, and on which values are one
            vars(moved)[same] = getattr(self, same)
        return moved


def partition(
    wanted: Sequence[Node],
    fusible: Callable[[Node], bool],
    by_library: Callable[[Node], bool] = lambda product: False,
    column_units: int = 0,
    beside: bool = False,
    computes_row: Callable[[Node], bool] = lambda product: False,
) -> list[Group]:
    """The groups that compute the wanted nodes, in order; `fusible` says which nodes a kernel may contain.

    Products that are computed `by_library` read matrices only in layouts that the library takes.
    `column_units` are the compute units of a device whose row kernels have arrays in registers, for column
    sums and for vectors that all of their rows read, and 0 for others. `beside`: see `Clustering`.
    On such a device, products for which `computes_row` may compute the row that they multiply.
    A wanted reshape is in no group: its value is that of its `base`.
    """
    order = [node for node in topological(wanted) if node.value is None]
    clustering = Clustering(order, wanted, fusible, by_library, column_units > 0, beside)
    if column_units:
        fuse_column_reductions(clustering, column_units)
    storing = Storing(clustering, computes_row if column_units else None)
    return [_group(cluster, clustering, storing) for cluster in storing.clusters]


def _group(cluster: Cluster, clustering: Clustering, storing: Storing) -> Group:
    if cluster.kind.reads_whole:
        opaque = cluster.nodes[0].primitive.kind is Kind.OPAQUE
        nodes = all_parts(cluster.nodes) if opaque else tuple(cluster.nodes)
        return Group(cluster.kind, nodes, nodes[0].inputs, nodes)
    outputs = [node for node in cluster.nodes if node in storing.stored]
    own = storing.inlined.get(cluster, set()) | set(cluster.nodes)
    for node in cluster.nodes:
        if node.primitive.multiplies_matrices:
            own.update(
                view for operand in node.inputs for view in _operand_views(node, operand, clustering.required)
            )
    inputs: dict[Node, None] = {}
    inside: dict[Node, None] = {}
    stack = [(node, False) for node in reversed(outputs)]
    while stack:
        node, ready = stack.pop()
        if ready:
            inside[node] = None
        elif node.value is not None or (node in storing.stored and node not in own):
            inputs[node] = None
        elif node not in inside:
            stack.append((node, True))
            stack += [(parent, False) for parent in reversed(node.inputs)]
    return Group(cluster.kind, tuple(outputs), tuple(inputs), tuple(inside), cluster.columns)


def _operand_views(node: Node, operand: Node, stored: Container[Node]) -> Iterator[Node]:
    """The views through which a matrix operand is read, even if some are stored for another use."""
    last = operand_source(operand, stored, operand_reader(node))
    while operand is not last:
        yield operand
        operand = operand.inputs[0]
