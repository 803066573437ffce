"""The arithmetic and memory traffic of launches, for profiles.

Necessary work is counted: an item that is read twice counts once, and so does an operation that several
threads repeat.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.drivers.driver import Cost
from penstock.fusion.groups import Group
from penstock.fusion.views import base
from penstock.graph.node import Kind, Node
from penstock.kernels.lower import Lowering

_SHOWN = 4  # values of a side in the text of shapes
_DIGEST = 13  # characters of the digest at the end of a kernel's name


def costs(group: Group, lowering: Lowering) -> list[Cost]:
    """The cost of each launch of a group."""
    if group.sharing not in lowering.known_costs:
        lowering.known_costs[group.sharing] = _costs(group, lowering)
    return lowering.known_costs[group.sharing]


def _costs(group: Group, lowering: Lowering) -> list[Cost]:
    needed = _needed(group)
    nodes = [*group.outputs, *group.inputs]
    sizes = [node.nbytes for node in group.outputs]
    sizes += [needed[node] * node.dtype.itemsize for node in group.inputs]
    sizes += lowering.scratch
    sides = (_listed(group.inputs), _listed(group.outputs))
    shapes = " -> ".join(side for side in sides if side)
    product = next(
        (str(node.inputs[0].dtype) for node in group.nodes if node.primitive.multiplies_matrices), ""
    )
    attends = any(node.primitive.kind is Kind.ATTENTION for node in group.nodes)
    operations = sum(node.primitive.operations_of(node) for node in group.nodes) // len(lowering.launches)
    inputs_at, scratch_at = len(group.outputs), len(nodes)
    result = []
    for launch in lowering.launches:
        # Several buffers may be the same memory, which is moved once.
        holders = {at: base(nodes[at]) if at < scratch_at else at for at in launch.buffers}
        moved = [*dict(zip(holders.values(), holders, strict=True)).values()]
        outputs = sum(sizes[at] for at in moved if at < inputs_at)
        inputs = sum(sizes[at] for at in moved if inputs_at <= at < scratch_at)
        # Scratch is written by a launch and read by another, so each has half of the bytes.
        scratch = sum(sizes[at] for at in moved if at >= scratch_at and len(lowering.launches) > 1)
        own = operations if launch.operations is None else launch.operations
        read, written = inputs + scratch // 2, outputs + scratch - scratch // 2
        result.append(Cost(own, read, written, shapes, product, attends))
    return result


def merged(names: Sequence[str], parts: Sequence[Cost | None]) -> Cost | None:
    """The cost of merged kernels, given their names."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or not known:
        return None
    what = dict.fromkeys(name[:-_DIGEST] for name in names)
    listed = ", ".join([*list(what)[:_SHOWN], *(["..."] if len(what) > _SHOWN else [])])
    return Cost(
        sum(part.operations for part in known),
        sum(part.read_bytes for part in known),
        sum(part.written_bytes for part in known),
        f"{len(known)} in one ({listed}), the first {known[0].shapes}",
        next((part.product for part in known if part.product), ""),
        any(part.attends for part in known),
    )


def _needed(group: Group) -> dict[Node, int]:
    """How many items of each input, and of each node inside, have to be read."""
    items_of = {node: node.size for node in group.outputs}
    inside = set(group.nodes)
    for node in reversed(group.nodes):
        items = items_of.setdefault(node, 0)
        kind = node.primitive.kind
        for position, parent in enumerate(node.inputs):
            part = kind in (Kind.VIEW, Kind.ELEMENTWISE) or (kind is Kind.GATHER and not position)
            read = min(items, parent.size) if part else parent.size
            items_of[parent] = min(items_of.get(parent, 0) + read, parent.size)
    # A group may name what it reads by a view of the input.
    return {node: items_of.get(node, node.size) for node in (*group.inputs, *inside)}


def _listed(nodes: Sequence[Node]) -> str:
    shown = [f"{node.dtype}{list(node.shape)}" for node in nodes[:_SHOWN]]
    return ", ".join([*shown, *([f"{len(nodes) - _SHOWN} more"] if len(nodes) > _SHOWN else [])])
