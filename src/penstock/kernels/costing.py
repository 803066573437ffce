"""What the launches of a group compute and move, so that a profile can tell how well they use the device.

Counted is what has to be done: an item that is read from memory twice counts once, and so does an operation
that a kernel may compute for several of its threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.drivers.driver import Cost
from penstock.fusion.groups import Group
from penstock.fusion.views import base
from penstock.graph.node import Kind, Node
from penstock.kernels.lower import Lowering

_SHOWN = 4  # values of a side in the text of shapes
_DIGEST = 13  # characters at the end of a kernel's name, which no person reads


def costs(group: Group, lowering: Lowering) -> list[Cost]:
    """Of each launch of a group."""
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
    operations = sum(node.primitive.operations_of(node) for node in group.nodes) // len(lowering.launches)
    result = []
    for launch in lowering.launches:
        # One memory may hold several of the buffers: it is moved once.
        holders = {at: base(nodes[at]) if at < len(nodes) else at for at in launch.buffers}
        moved = dict(zip(holders.values(), holders, strict=True))
        outputs = sum(sizes[at] for at in moved.values() if at < len(group.outputs))
        # Scratch is lowering by one launch and read by another, so each has half of that.
        scratch = (
            sum(sizes[at] for at in moved.values() if at >= len(nodes)) if len(lowering.launches) > 1 else 0
        )
        inputs = sum(sizes[at] for at in moved.values() if len(group.outputs) <= at < len(nodes))
        own = operations if launch.operations is None else launch.operations
        result.append(Cost(own, inputs + scratch // 2, outputs + scratch - scratch // 2, shapes, product))
    return result


def merged(names: Sequence[str], parts: Sequence[Cost | None]) -> Cost | None:
    """Of kernels that became one, by their names."""
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
    # What a group reads through its base may be named by a view of it.
    return {node: items_of.get(node, node.size) for node in (*group.inputs, *inside)}


def _listed(nodes: Sequence[Node]) -> str:
    shown = [f"{node.dtype}{list(node.shape)}" for node in nodes[:_SHOWN]]
    return ", ".join([*shown, *([f"{len(nodes) - _SHOWN} more"] if len(nodes) > _SHOWN else [])])
