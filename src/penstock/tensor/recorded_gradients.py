"""Gradients of graphs like others: they are recorded once, and called from then on (`graph/calls.py`).

Graphs that differ only in where slices start have the same gradients. The starts that gradients depend on are
arguments of the subgraph, if they differ from those of the first such graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from penstock.graph.bounds import BOUNDED
from penstock.graph.calls import Subgraph, subgraph_between
from penstock.graph.decompose import decompose
from penstock.graph.gradient import gradients
from penstock.graph.moving_slices import (
    Family,
    differing_axes,
    free_axes,
    least_index,
    lengths,
    may_move,
    moved,
    starts_of,
)
from penstock.graph.node import Node
from penstock.graph.shaping import SLICE, Axes
from penstock.runtime import Device
from penstock.tensor.recording import recorded_once

# The subgraph of gradients, the nodes that it is called with, and which leaves have a gradient.
Gradients = tuple[Subgraph, list[Node], list[bool]]
# The same for all such graphs, with positions: first in the graph, then among the starts that are arguments.
_Positions = tuple[Subgraph, list[int], list[bool]]


def recorded_gradients(history: list[Node], leaves: Sequence[Node], device: Device) -> Gradients | None:
    """The gradients of the last node of a graph with respect to the leaves; None if they cannot be reused."""
    slices = [node for node in history if node.primitive is SLICE and node.inputs and may_move(node)]
    key = _key(history, leaves, slices)
    if key is None:
        return None
    moving: dict[Node, Axes] = {}
    if slices:
        passed = [node for node in slices if node.tracked]
        starts = starts_of(passed)
        family = recorded_once(device, (Family, key), lambda: Family(starts))
        if family is None:
            return None
        family.note(starts)
        fixed = tuple([None if at in family.differing else start for at, start in enumerate(starts)])
        key = (key, fixed)
        moving = differing_axes(passed, family.differing)
        moving |= {node: free_axes(node) for node in slices if not node.tracked}
    known = recorded_once(device, key, lambda: _recorded(history, leaves, moving, device))
    if known is None:
        return None
    subgraph, taken, present = known
    where = [(node, axis) for node in slices for axis in moving[node]]
    of_graph = len(history)
    inputs = [history[at] if at < of_graph else least_index(*where[at - of_graph]) for at in taken]
    return subgraph, inputs, present


def _recorded(
    history: list[Node], leaves: Sequence[Node], moving: Mapping[Node, Axes], device: Device
) -> _Positions | None:
    """The subgraph of the gradients; None if it cannot be reused."""
    new = _moved(history, moving)
    graph = [new[node] for node in history]
    starts = [start for node in history if moving.get(node) for start in new[node].inputs[1:]]
    parts = gradients(graph[-1], None, [new[node] for node in leaves])
    outputs = decompose([part for part in parts if part is not None], device.capabilities)
    position = {node: number for number, node in enumerate((*graph, *starts))}
    made = subgraph_between(position, outputs)
    if made is None:
        return None
    return made[0], [position[node] for node in made[1]], [part is not None for part in parts]


def _moved(history: Sequence[Node], moving: Mapping[Node, Axes]) -> dict[Node, Node]:
    """For each node of a graph the same, of slices whose starts along some axes are arguments."""
    new: dict[Node, Node] = {}
    for node in history:
        inputs = tuple([new[parent] for parent in node.inputs])
        if axes := moving.get(node):
            copy = moved(node, inputs[0], axes)
        elif inputs != node.inputs:
            copy = Node(node.primitive, inputs, node.attributes)
        else:
            new[node] = node
            continue
        copy.value, copy.span, copy.tracked = node.value, node.span, node.tracked
        new[node] = copy
    return new


def _key(history: list[Node], leaves: Sequence[Node], slices: Sequence[Node]) -> Hashable | None:
    """The key of a graph by all that its gradients depend on, without the starts of some slices.

    None if that is unknown.
    """
    position: dict[Node, int] = {}
    parts: list[Hashable] = []
    moving = {*slices}
    for node in history:
        position[node] = len(parts)
        computed = node.value is not None
        if computed and not node.inputs:
            parts.append((node.shape, node.dtype.name, node.tracked))
            continue
        primitive, attributes = node.primitive, node.attributes
        if primitive.transient:
            return None
        where = tuple([position[parent] for parent in node.inputs])
        values: list[Hashable] = []
        if node in moving:
            values = [lengths(attributes["slices"])]
        elif attributes and primitive is not BOUNDED:  # its attribute is the line that recorded it
            # The values of constants may differ: they are inputs of the subgraph, and no gradient rule looks
            # at them. But a checkpoint recomputes nodes with inputs, including their constants.
            known = () if node.inputs else primitive.constants
            values = [value for name, value in attributes.items() if name not in known]
        parts.append((primitive, where, computed, node.tracked, *values))
    return tuple(parts), tuple([position[node] for node in leaves])
