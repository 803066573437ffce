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

# Products of matrices in each pass of attention: the gradients compute the scores again, each for itself.
_PASSES = {"attention_forward": 2, "attention_query_gradients": 3, "attention_key_gradients": 4}
_SHOWN = 4  # values of a side in the text of shapes
_DIGEST = 13  # characters at the end of a kernel's name, which no person reads


def costs(group: Group, written: Lowering) -> list[Cost]:
    """Of each launch of a group."""
    needed = _needed(group)
    nodes = [*group.outputs, *group.inputs]
    sizes = [node.nbytes for node in group.outputs]
    sizes += [needed[node] * node.dtype.itemsize for node in group.inputs]
    sizes += written.scratch
    sides = (_listed(group.inputs), _listed(group.outputs))
    shapes = " -> ".join(side for side in sides if side)
    product = next(
        (str(node.inputs[0].dtype) for node in group.nodes if node.primitive.multiplies_matrices), ""
    )
    operations = sum(node.primitive.operations_of(node) for node in group.nodes) // len(written.launches)
    found = []
    for launch in written.launches:
        # One memory may hold several of the buffers: it is moved once.
        holders = {at: base(nodes[at]) if at < len(nodes) else at for at in launch.buffers}
        moved = dict(zip(holders.values(), holders, strict=True))
        outputs = sum(sizes[at] for at in moved.values() if at < len(group.outputs))
        # Scratch is written by one launch and read by another, so each has half of that.
        scratch = (
            sum(sizes[at] for at in moved.values() if at >= len(nodes)) if len(written.launches) > 1 else 0
        )
        inputs = sum(sizes[at] for at in moved.values() if len(group.outputs) <= at < len(nodes))
        own = _attention_operations(group, launch.source.name) if group.kind == "attention" else operations
        found.append(Cost(own, inputs + scratch // 2, outputs + scratch - scratch // 2, shapes, product))
    return found


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


def _attention_operations(group: Group, name: str) -> int:
    """Of one pass: pairs of a query and a key that it sees, times the width, for each product."""
    node = group.outputs[0]
    batch, queries, heads, width = node.inputs[0].shape
    keys = node.inputs[1].shape[1]
    unseen = queries * (queries - 1) // 2 if node.attributes["causal"] else 0
    products = next((count for start, count in _PASSES.items() if name.startswith(start)), 2)
    return 2 * products * batch * heads * width * (queries * keys - unseen)


def _needed(group: Group) -> dict[Node, int]:
    """How many items of each input, and of each node inside, have to be read."""
    found = {node: node.size for node in group.outputs}
    inside = set(group.nodes)
    for node in reversed(group.nodes):
        items = found.setdefault(node, 0)
        kind = node.primitive.kind
        for position, parent in enumerate(node.inputs):
            part = kind in (Kind.VIEW, Kind.ELEMENTWISE) or (kind is Kind.GATHER and not position)
            read = min(items, parent.size) if part else parent.size
            found[parent] = min(found.get(parent, 0) + read, parent.size)
    # What a group reads through its base may be named by a view of it.
    return {node: found.get(node, node.size) for node in (*group.inputs, *inside)}


def _listed(nodes: Sequence[Node]) -> str:
    shown = [f"{node.dtype}{list(node.shape)}" for node in nodes[:_SHOWN]]
    return ", ".join([*shown, *([f"{len(nodes) - _SHOWN} more"] if len(nodes) > _SHOWN else [])])
