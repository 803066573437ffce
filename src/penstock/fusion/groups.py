"""From a graph to steps: groups of nodes that one kernel computes, and nodes that stand alone.

A *map* group computes every item of its output by itself, through elementwise primitives and through views of
its inputs, whatever their order or repetition. What several others need is computed once and kept, unless it
costs nothing to compute again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.graph.creating import SEQUENCE
from penstock.graph.elementwise import CAST, FULL
from penstock.graph.node import Node, topological
from penstock.graph.reducing import EXPAND
from penstock.graph.shaping import PERMUTE, RESHAPE, SLICE

VIEWS = frozenset((RESHAPE, PERMUTE, EXPAND, SLICE))
_FREE = VIEWS | {FULL, SEQUENCE, CAST}  # costs less to compute again than to keep
_MAX_NODES = 64  # in one group; beyond that a kernel takes long to compile and runs out of registers


@dataclass(frozen=True)
class Group:
    """One kernel: `output` from the values of `inputs`, through `nodes`, which stand in order."""

    output: Node
    inputs: tuple[Node, ...]
    nodes: tuple[Node, ...]


def partition(wanted: Sequence[Node], fusible: Callable[[Node], bool]) -> list[Group | Node]:
    """The steps that compute the wanted nodes, in order; `fusible` tells what a kernel can hold."""
    order = [node for node in topological(wanted) if node.value is None]
    kept = _kept(order, wanted, fusible)
    return [_group(node, kept) if fusible(node) else node for node in order if node in kept]


def _kept(order: Sequence[Node], wanted: Sequence[Node], fusible: Callable[[Node], bool]) -> set[Node]:
    """The nodes whose values are stored: outputs, what stands alone and its inputs, and what many need."""
    consumers = Counter(parent for node in order for parent in set(node.inputs))
    kept = set(wanted)
    weight: dict[Node, int] = {}
    for node in order:
        if not fusible(node):
            kept.add(node)
            kept.update(parent for parent in node.inputs if parent.value is None)
    for node in order:
        inside = [parent for parent in node.inputs if parent.value is None and parent not in kept]
        weight[node] = 1 + sum(weight[parent] for parent in inside)
        shared = consumers[node] > 1 and node.primitive not in _FREE
        if shared or weight[node] >= _MAX_NODES:
            kept.add(node)
    return kept


def _group(output: Node, kept: set[Node]) -> Group:
    inputs: dict[Node, None] = {}
    inside: dict[Node, None] = {}
    stack = [(output, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            inside[node] = None
        elif node is not output and (node.value is not None or node in kept):
            inputs[node] = None
        elif node not in inside:
            stack.append((node, True))
            stack += [(parent, False) for parent in reversed(node.inputs)]
    return Group(output, tuple(inputs), tuple(inside))
