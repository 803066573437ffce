"""The trace of a function that `jit` captures, which only that function sees.

Every tensor from outside (an argument, a global or closed-over tensor, a gradient) has a stand-in, even if
two tensors have the same value. The stand-in holds the state that the function sees and assigns; the tensor
itself does not change, so other threads do not notice a capture.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import CaptureError
from penstock.graph.custom_vjp import custom_vjp, refusing
from penstock.graph.node import Node, leaf, topological
from penstock.tensor.core import Tensor, outside_capture
from penstock.tensor.leaves import ends_at, leaf_of


class NoValue:
    """Replaces a value that does not exist: any use of it raises an error with the reason."""

    def __init__(self, error: type[Exception], why: str) -> None:
        vars(self).update(error=error, why=why)

    def __getattr__(self, name: str) -> Any:
        raise self.error(self.why)

    def __setattr__(self, name: str, value: Any) -> None:
        raise self.error(self.why)


class MadeInside(NoValue):
    """Replaces a value that only captured functions have, which compute it: `make` records it there."""

    def __init__(self, error: type[Exception], why: str, make: Callable[[], Node]) -> None:
        super().__init__(error, why)
        vars(self).update(make=make)


# The value of tensors during a capture.
UNKNOWN = NoValue(
    CaptureError,
    "this tensor was made while a jitted function was captured, and has no value outside of it: let the "
    "function return it, or change a tensor in place, instead of keeping it",
)


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a replay finds a tensor: among the arguments, outside, or as the gradient of another tensor."""

    argument: int = -1
    outside: Tensor | None = None
    gradient_of: Origin | None = None

    @property
    def lasts(self) -> bool:
        """Whether it is no argument, nor the gradient of an argument."""
        return self.outside is not None or (self.gradient_of is not None and self.gradient_of.lasts)

    def tensor(self, arguments: Sequence[Tensor]) -> Tensor:
        """The tensor in a call with these arguments."""
        if self.outside is not None:
            return self.outside
        if self.gradient_of is None:
            return arguments[self.argument]
        gradient = self.gradient_of.tensor(arguments)._actual_grad
        assert gradient is not None, "the guards of a capture check that the gradient exists"
        return gradient


@dataclass(eq=False)
class StandIn:
    """A tensor from outside as the function sees it, and its state at the start."""

    tensor: Tensor
    actual: Tensor
    origin: Origin
    first: Node  # the node of its value at the start of a call
    requires_grad: bool
    ends: bool  # whether it is a leaf
    made: bool  # whether the function makes its value (see `MadeInside`)
    first_grad: Tensor | None = (
        None  # the stand-in of its gradient at the start, once the function has read that
    )
    grad_seen: bool = False  # whether the function read the gradient before it assigned one
    grad_assigned: bool = False

    @property
    def changed(self) -> bool:
        """Whether the function has given it another value."""
        return self.tensor._actual_node is not self.first


class Tracing:
    """The tensors of a function that is being captured; see `tensor.core.Capture`."""

    def __init__(self, arguments: Sequence[Tensor] = ()) -> None:
        self.facts: list[tuple[Callable[[], object], object]] = []
        self.parts: dict[Hashable, Any] = {}
        self.stand_ins: list[StandIn] = []
        self.aliases: dict[
            int, Tensor
        ] = {}  # by position: arguments that the function also uses from outside
        self._here: dict[
            int, Tensor
        ] = {}  # the stand-in of each tensor, by id; its own tensors stand for themselves
        self._kept: list[Tensor] = []  # keeps tensors alive, so that their ids stay unique
        self._by_tensor: dict[int, StandIn] = {}  # by the stand-in's id
        self._by_node: dict[Node, StandIn] = {}
        # By id, tensors that have a stand-in as an argument (its position) or as a gradient (its owner).
        self._arguments: dict[int, int] = {}
        self._gradients: dict[int, StandIn] = {}
        self.inside: list[Tensor] = []  # the stand-ins that the function is given as its arguments
        for position, argument in enumerate(arguments):
            first = self._arguments.setdefault(id(argument), position)
            if first == position:
                self.inside.append(self._adopted(argument, Origin(argument=position)).tensor)
            else:
                self.inside.append(self.inside[first])

    # The interface for tensors

    def made(self, tensor: Tensor) -> None:
        """Note a tensor that the function created."""
        self._here[id(tensor)] = tensor

    def used(self, tensor: Tensor) -> None:
        """Note a tensor that is read, or about to change."""
        self.stand_in(tensor)

    def stand_in(self, tensor: Tensor) -> Tensor:
        """The stand-in of a tensor."""
        known = self._here.get(id(tensor))
        return self._from_outside(tensor) if known is None else known

    def grad_of(self, tensor: Tensor) -> Tensor | None:
        """The gradient of a tensor, as the function sees it."""
        seen = self.stand_in(tensor)
        known = self._by_tensor.get(id(seen))
        if known is not None and not known.grad_seen and not known.grad_assigned:
            known.grad_seen = True
            gradient = known.actual._actual_grad
            if gradient is not None:
                known.first_grad = seen._actual_grad = self._gradient(gradient, known)
        return seen._actual_grad

    def set_grad(self, tensor: Tensor, gradient: Tensor | None) -> None:
        """Give a tensor a gradient that only the function sees."""
        seen = self.stand_in(tensor)
        known = self._by_tensor.get(id(seen))
        if known is not None:
            known.grad_assigned = True
        seen._actual_grad = gradient

    def still_at(self, tensor: Tensor, node: Node) -> bool:
        """Whether a tensor had this node before the call, and the function has not changed it since."""
        known = self._by_tensor.get(id(self.stand_in(tensor)))
        if known is None or known.changed or known.actual._actual_node is not node:
            return False
        self._assume_node(known.actual, node)
        return True

    def forget(self, tensor: Tensor) -> None:
        """Have the next use of a tensor from outside make its value anew (see `MadeInside`)."""
        self._here.pop(id(tensor), None)

    def assume(self, fact: Callable[[], object]) -> None:
        """Note a fact outside that is no tensor, and its present value."""
        noted = fact, fact()
        if noted not in self.facts:
            self.facts.append(noted)

    def part(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The object that `make` returns, once for each key; see `Captured.parts`."""
        if key not in self.parts:
            self.parts[key] = make()
        return self.parts[key]

    def refuse_value(self, node: Node) -> None:
        """Raise unless a node depends on constants only."""
        for part in topological([node]):
            if part.value is UNKNOWN:
                raise CaptureError(
                    f"the value of {part.dtype}{list(part.shape)} was read inside a jitted function, "
                    f"where only shapes and dtypes are known; read it outside, or use where() instead of if"
                )

    # For the captured program

    def of_node(self, node: Node) -> StandIn | None:
        """The stand-in whose value at the start of a call is this node."""
        return self._by_node.get(node)

    def of_tensor(self, tensor: Tensor) -> StandIn | None:
        """The record of a stand-in tensor."""
        return self._by_tensor.get(id(tensor))

    def _from_outside(self, tensor: Tensor) -> Tensor:
        position = self._arguments.get(id(tensor))
        owner = self._gradients.get(id(tensor))
        if position is not None:
            self.aliases[position] = tensor
            stand_in = self.inside[position]
        elif owner is not None:
            assert owner.first_grad is not None
            self._assume_gradient(owner, tensor)
            stand_in = owner.first_grad
        else:
            stand_in = self._adopted(tensor, Origin(outside=tensor)).tensor
        self._here[id(tensor)] = stand_in
        return stand_in

    def _gradient(self, gradient: Tensor, owner: StandIn) -> Tensor:
        """The stand-in of the gradient of `owner`."""
        known = self._here.get(id(gradient))
        if known is not None:
            self._assume_gradient(owner, gradient)
            return known
        self._gradients[id(gradient)] = owner
        return self._adopted(gradient, Origin(gradient_of=owner.origin)).tensor

    def _adopted(self, actual: Tensor, origin: Origin) -> StandIn:
        node, requires_grad = actual._actual_node, actual._actual_requires_grad
        made = isinstance(node.value, MadeInside)
        first = node.value.make() if made else leaf(UNKNOWN, node.shape, node.dtype)
        ends = requires_grad and ends_in(actual, node)
        if requires_grad and not ends:
            first = self._with_history(actual, node, first, origin)
        tensor = Tensor(first, actual.device, requires_grad)
        if ends:
            ends_at(first, tensor)
        stand_in = StandIn(tensor, actual, origin, first, requires_grad, ends, made)
        self._kept.append(actual)
        self._by_tensor[id(tensor)] = self._by_node[first] = stand_in
        if first.inputs and not made:
            self._by_node[first.inputs[0]] = stand_in  # the value of copies of the node
        self._here[id(tensor)] = tensor
        self.stand_ins.append(stand_in)
        return stand_in

    def _with_history(self, actual: Tensor, node: Node, first: Node, origin: Origin) -> Node:
        """The node of a value through which gradients pass to the tensors that it was computed from."""
        if origin.outside is None:
            what = f"argument {origin.argument}" if origin.argument >= 0 else "a gradient"
            why = refusing(
                f"backward() inside a jitted function would have to go on through {what}, to the tensors "
                f"that it was computed from; call backward() outside, compute it inside, or give its detach()"
            )
            refusal = Node(why, (), {"shape": first.shape, "dtype": first.dtype}, UNKNOWN)
            refusal.tracked = True
            return refusal

        def passed(g: Node, n: Node) -> list[Node]:
            self._assume_node(actual, node)  # its history becomes part of the program
            return [g]

        return Node(custom_vjp("outside", passed, transient=True), (first, node), {}, UNKNOWN)

    def _assume_node(self, tensor: Tensor, node: Node) -> None:
        known = weakref.ref(node)
        self.assume(lambda: tensor._actual_node is known())

    def _assume_gradient(self, owner: StandIn, gradient: Tensor) -> None:
        if owner.origin.outside is None:
            raise CaptureError(
                "a jitted function uses a gradient of one of its arguments that it also finds outside; "
                "give it as an argument"
            )
        tensor = owner.origin.outside
        self.assume(lambda: tensor._actual_grad is gradient)


def ends_in(tensor: Tensor, node: Node) -> bool:
    """Whether a tensor is a leaf at a node, outside of captures."""
    with outside_capture():
        return leaf_of(node) is tensor
