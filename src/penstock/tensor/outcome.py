"""What a replay of a captured function results in: its result, and changes of tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.graph.node import Node, leaf
from penstock.tensor.core import Tensor
from penstock.tensor.tracing import NoValue

_DONATED = NoValue(ValueError, "this tensor was donated to a jitted function, which may have overwritten it")


@dataclass
class Outcome:
    """The result of a replay, and its changes of tensors; to apply them twice is the same as once."""

    result: Any
    values: list[tuple[Tensor, Node, bool]] = field(default_factory=list)
    grads: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    flags: list[tuple[Tensor, bool]] = field(default_factory=list)
    donated: list[Tensor] = field(default_factory=list)

    def take_effect(self) -> None:
        """Change the tensors."""
        for tensor in self.donated:
            node = tensor._actual_node
            tensor._actual_node = leaf(_DONATED, node.shape, node.dtype)
        for tensor, node, has_history in self.values:
            if has_history:
                tensor._actual_node, tensor._actual_requires_grad = node, True
            else:
                tensor._become(node)
        for tensor, gradient in self.grads:
            tensor._actual_grad = gradient
        for tensor, flag in self.flags:
            tensor.requires_grad_(flag)
