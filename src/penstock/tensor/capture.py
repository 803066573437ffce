"""The interface of a function that is being captured, and which one this thread captures: see `Tracing`."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from penstock.graph.node import Node

if TYPE_CHECKING:
    from penstock.tensor.core import Tensor


class Capture(Protocol):
    """A function that is being captured: what it does to tensors from outside is seen by itself only."""

    def made(self, tensor: Tensor) -> None:
        """A tensor that belongs to it."""

    def used(self, tensor: Tensor) -> None:
        """A tensor that is read, or is about to change."""

    def stand_in(self, tensor: Tensor) -> Tensor:
        """The tensor that holds what the function sees in `tensor`: itself where the function made it."""

    def grad_of(self, tensor: Tensor) -> Tensor | None:
        """The gradient that the function sees."""

    def set_grad(self, tensor: Tensor, gradient: Tensor | None) -> None:
        """Give a tensor a gradient that the function sees."""

    def still_at(self, tensor: Tensor, node: Node) -> bool:
        """Whether a tensor had this node before the call, and the function has not changed it since."""

    def assume(self, fact: Callable[[], object]) -> None:
        """What the function is captured for: a replay is for a fact that is still the same."""

    def part(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` makes, once for each key: its `before_replay` is called by every replay."""

    def refuse_value(self, node: Node) -> None:
        """Raise CaptureError if a value that is asked for depends on what is not known yet."""


capture: ContextVar[Capture | None] = ContextVar("capture", default=None)
