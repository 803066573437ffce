"""The interface of a capture (see `Tracing`), and the current capture of this thread."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from penstock.graph.node import Node

if TYPE_CHECKING:
    from penstock.tensor.core import Tensor


class Capture(Protocol):
    """A function that is being captured: only the function sees its changes of tensors from outside."""

    def made(self, tensor: Tensor) -> None:
        """Note a tensor that the function created."""

    def used(self, tensor: Tensor) -> None:
        """Note a tensor that is read, or about to change."""

    def stand_in(self, tensor: Tensor) -> Tensor:
        """The tensor with the state of `tensor` inside the function: itself if the function created it."""

    def grad_of(self, tensor: Tensor) -> Tensor | None:
        """The gradient that the function sees."""

    def set_grad(self, tensor: Tensor, gradient: Tensor | None) -> None:
        """Give a tensor a gradient that the function sees."""

    def still_at(self, tensor: Tensor, node: Node) -> bool:
        """Whether a tensor had this node before the call, and the function has not changed it since."""

    def forget(self, tensor: Tensor) -> None:
        """Have the next use of a tensor from outside make its value anew (see `MadeInside`)."""

    def assume(self, fact: Callable[[], object]) -> None:
        """Note a fact that the capture depends on: a replay is allowed only while it has the same value."""

    def part(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The object that `make` returns, once for each key.

        Its `after_capture` is called when the function has returned, and its `before_replay` by every replay.
        """

    def refuse_value(self, node: Node) -> None:
        """Raise CaptureError if a value that is read depends on inputs of the function."""


capture: ContextVar[Capture | None] = ContextVar("capture", default=None)
