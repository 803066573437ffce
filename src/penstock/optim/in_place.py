"""A step outside of jitted functions: what it changes, what it may write over, and how it is undone."""

from __future__ import annotations

from collections.abc import Sequence
from sys import getrefcount

from penstock.errors import DamagedTensor
from penstock.execution.realize import Replaced
from penstock.graph.node import Node, leaf
from penstock.memory.buffer import Buffer
from penstock.tensor.core import Tensor
from penstock.tensor.tracing import NoValue


class Step:
    """The tensors that a step changes, as they are before it."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._nodes = [tensor._actual_node for tensor in tensors]
        self._gradients = [tensor._actual_grad for tensor in tensors]
        self._replaced = Replaced({})

    def replaced(self) -> Replaced:
        """The old values that only the recorded step refers to, such as moments."""
        nodes, values = self._nodes, dict[Node, Node]()
        for at, tensor in enumerate(self._tensors):
            # Three references: of the list, of the recorded step, and of the argument here.
            if getrefcount(nodes[at]) <= 3 and tensor._actual_node is not nodes[at]:
                value = nodes[at].value
                if isinstance(value, Buffer) and not value.hosted:
                    values[tensor._actual_node] = nodes[at]
        self._replaced = Replaced(values)
        return self._replaced

    def undo(self, error: BaseException) -> None:
        """Give the tensors their old values, unless the step has taken effect as a whole."""
        if self._replaced.done:
            return
        lost = {id(node) for node in self._replaced.values.values()} if self._replaced.damaged else set()
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        for tensor, node, gradient in zip(self._tensors, self._nodes, self._gradients, strict=True):
            tensor._actual_node, tensor._actual_grad = node, gradient
            if id(node) in lost:
                why = (
                    f"the value of this tensor is lost, as a step of its optimizer failed while it was "
                    f"overwriting it ({reason}); load the last checkpoint, or give it another value"
                )
                tensor._become(leaf(NoValue(DamagedTensor, why), node.shape, node.dtype))
