"""Reading a value that gradients may come from: what they need of the forward pass is computed with it, once.

A loss is often read before its gradients are computed. What the backward pass will need is kept then, as it
would have to be computed again otherwise, until an optimizer has updated its parameters.
"""

from __future__ import annotations

from contextlib import suppress
from weakref import WeakKeyDictionary

from penstock.errors import OutOfDeviceMemory
from penstock.execution.realize import realize
from penstock.graph.calls import CALL
from penstock.graph.dtypes import HALF_PRECISION
from penstock.graph.node import Node, topological
from penstock.runtime import Device
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor
from penstock.tensor.leaves import changed_since, leaf_of
from penstock.tensor.recorded_gradients import recorded_gradients

# By device, the nodes with the inputs that they had while they were pending.
_kept: WeakKeyDictionary[Device, WeakKeyDictionary[Node, tuple[Node, ...]]] = WeakKeyDictionary()


def realize_to_read(tensor: Tensor) -> None:
    """Compute a tensor, and what gradients will need of the values behind it, where there is memory for both.

    Otherwise nothing is computed.
    """
    node, device = tensor._actual_node, tensor.device
    if node.value is None and node.depth > 1 and capture.get() is None and _has_room(device):
        with device.running, suppress(OutOfDeviceMemory):  # other threads may be about to compute the same
            needed = {part: part.inputs for part in _needed(node, device)}
            realize([node, *needed], device)
            _kept.setdefault(device, WeakKeyDictionary()).update(needed)


def release(device: Device) -> None:
    """Let go of what was kept for gradients and is no tensor's: these nodes are pending again."""
    with device.running:
        for node, inputs in _kept.pop(device, WeakKeyDictionary()).items():
            if node.holder is None or node.holder() is None:
                node.inputs, node.value = inputs, None


def _has_room(device: Device) -> bool:
    """Whether values may be kept: a limit is for what has to be there, and `auto` would move them."""
    return device.dispatcher is None and device.limit_bytes is None


def _needed(read: Node, device: Device) -> list[Node]:
    """What gradients take of the pending values behind a node: those that are called, and those to come.

    These are the gradients of the outermost values through which any may pass.
    """
    behind = [node for node in topological([read]) if node.value is None]
    if any(node.dtype in HALF_PRECISION for node in behind):
        return []  # what is kept would be rounded, and what is fused with the gradients is not
    tracked = [node for node in behind if node.tracked and node.dtype.kind == "f"]
    called = [parent for node in behind if node.primitive is CALL for parent in node.inputs]
    inner = {*called, *(parent for node in tracked for parent in node.inputs)}
    needed = [node for node in called if node.tracked]
    for node in tracked:
        if node not in inner:
            needed += (node, *_taken(node, device))
    stored = dict.fromkeys(map(_stored, needed))
    return [node for node in stored if node is not None and node.value is None and node is not read]


def _taken(node: Node, device: Device) -> list[Node]:
    """What the gradients of a node take of the graph behind it."""
    history = topological([node], through_values=True)
    owned = [node for node in history if node.owner is not None]
    leaves = [node for node in owned if leaf_of(node) is not None]
    if not leaves or any(map(changed_since, owned)) or any(node.primitive.refuses for node in history):
        return []
    try:
        known = recorded_gradients(history, leaves, device)
    except TypeError:  # an operation has no gradient, which only `backward` has to tell
        return []
    return [] if known is None else known[1]


def _stored(node: Node) -> Node | None:
    """The node itself, or what it is a view of; None for what is made of numbers only."""
    while node.value is None and (node.primitive.is_free or node.primitive.is_identity):
        if not node.inputs:
            return None
        node = node.inputs[0]
    return node
