"""The backward pass from a tensor: gradients for the tensors behind it that require one.

A training loop repeatedly needs the gradients of the same graph, which are recorded once
(`recorded_gradients.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from penstock.execution.realize import realize
from penstock.graph import elementwise
from penstock.graph.calls import call
from penstock.graph.gradient import gradients
from penstock.graph.node import Node, topological
from penstock.runtime import Device
from penstock.tensor.broadcasting import broadcast
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor, install, much_pending
from penstock.tensor.leaves import changed_since, leaf_of
from penstock.tensor.recorded_gradients import recorded_gradients

_SMALL_BYTES = 1 << 20  # of a value that costs little to keep


def backward(self: Tensor, gradient: Tensor | None = None) -> None:
    """Add the gradient of this value to `.grad` of every tensor behind it that requires one.

    A value of several items needs `gradient`, the gradient of the loss with respect to it.
    """
    if gradient is None and self.size != 1:
        raise ValueError(f"backward() is for one value, and the shape is {self.shape}; give its gradient")
    if not self.requires_grad:
        raise ValueError("nothing that this value was computed from requires a gradient")
    with self.device.running:  # a step in another thread lets go of values, and of what they were made of
        history = topological([self._node], through_values=True)
        arrived = _arrived(self, history, gradient)
    if capture.get() is None:
        _compute_if_much(self, arrived)
    source = [weakref.ref(self), *_small(history)]  # so that they can be computed together
    for tensor, part in arrived:
        before = tensor.grad  # from earlier calls, or another node of the same tensor
        total = Tensor(part if before is None else elementwise.add(before._node, part), tensor.device)
        total._source = source
        tensor.grad = total


def _arrived(value: Tensor, history: list[Node], gradient: Tensor | None) -> list[tuple[Tensor, Node]]:
    """The leaves behind a value that a gradient arrives at, each with its gradient."""
    leaves: list[tuple[Node, Tensor]] = []
    refusing: list[Node] = []
    for node in history:
        if node.owner is not None and (tensor := leaf_of(node)) is not None:
            leaves.append((node, tensor))
        elif node.primitive.refuses or (node.owner is not None and changed_since(node)):
            refusing.append(node)
    nodes = [node for node, _ in leaves]
    if gradient is None and not refusing and capture.get() is None:
        parts = _repeated(history, nodes, value.device)
    else:
        seed = None if gradient is None else broadcast(gradient, value.shape)._node
        parts = gradients(value._node, seed, [*nodes, *refusing])
        _refuse(refusing, parts[len(leaves) :])
        parts = _stopped(parts)
    return [(tensor, part) for (_, tensor), part in zip(leaves, parts, strict=False) if part is not None]


def _small(history: Sequence[Node]) -> list[weakref.ref[Tensor]]:
    """The tensors of small pending nodes."""
    return [
        node.holder
        for node in history
        if node.value is None and node.holder is not None and node.nbytes <= _SMALL_BYTES
    ]


def _compute_if_much(value: Tensor, gradients: Sequence[tuple[Tensor, Node]]) -> None:
    """Compute the value and its gradients in one run if much is pending: they share most of the work."""
    by_device: dict[Device, list[Node]] = {value.device: [value._node]}
    for tensor, node in gradients:
        by_device.setdefault(tensor.device, []).append(node)
    for device, nodes in by_device.items():
        if any(map(much_pending, nodes)):
            realize(nodes, device)


def _refuse(refusing: Sequence[Node], parts: Sequence[Node | None]) -> None:
    """Raise if a gradient reaches a node that does not allow it."""
    for node, part in zip(refusing, parts, strict=True):
        if part is not None and node.primitive.refuses:
            raise TypeError(node.primitive.refuses)
        if part is not None:
            raise ValueError(
                f"a tensor of shape {node.shape} that requires a gradient was changed after this value "
                f"was computed from it; compute the value again, or call backward() before the change"
            )


def _repeated(history: list[Node], leaves: Sequence[Node], device: Device) -> list[Node | None]:
    """The gradients of the last node with respect to the leaves; those of an equal graph are reused."""
    known = recorded_gradients(history, leaves, device)
    if known is None:
        return _stopped(gradients(history[-1], None, leaves))
    subgraph, inputs, present = known
    results = iter(call(subgraph, inputs))
    return [next(results) if there else None for there in present]


def _stopped(parts: Sequence[Node | None]) -> list[Node | None]:
    """Gradients through which no gradient passes, as none passes through a call either."""
    return [None if part is None else elementwise.stop(part) for part in parts]


install("backward", backward)
