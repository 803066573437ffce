"""What a function does while `jit` captures it, seen by itself only.

For every tensor from outside (an argument, one that the function finds, a gradient) there is a stand-in, by
the tensor and not by its value: two tensors with one value are two. The stand-in has what the function sees
and assigns; the tensor itself does not change, so no other thread notices a capture.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import CaptureError
from penstock.graph.custom_vjp import custom_vjp, refusing
from penstock.graph.node import Node, leaf, topological
from penstock.tensor.core import Tensor, ends_at, leaf_of, outside_capture


class NoValue:
    """Stands for a value that is not there: whatever is asked of it, it says why."""

    def __init__(self, error: type[Exception], why: str) -> None:
        vars(self).update(error=error, why=why)

    def __getattr__(self, name: str) -> Any:
        raise self.error(self.why)

    def __setattr__(self, name: str, value: Any) -> None:
        raise self.error(self.why)


# While a function is captured.
UNKNOWN = NoValue(
    CaptureError,
    "this tensor was made while a jitted function was captured, and has no value outside of it: let the "
    "function return it, or change a tensor in place, instead of keeping it",
)


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a replay finds a tensor: among the arguments, outside, or as the gradient of another."""

    argument: int = -1
    outside: Tensor | None = None
    gradient_of: Origin | None = None

    def tensor(self, arguments: Sequence[Tensor]) -> Tensor:
        """The tensor in a call with these arguments."""
        if self.outside is not None:
            return self.outside
        if self.gradient_of is None:
            return arguments[self.argument]
        gradient = self.gradient_of.tensor(arguments)._actual_grad
        assert gradient is not None, "a capture is for a gradient that is there"
        return gradient


@dataclass(eq=False)
class StandIn:
    """What a function sees of a tensor from outside, and what it was at the start."""

    tensor: Tensor
    actual: Tensor
    origin: Origin
    first: Node  # stands for the value at the start of a call
    requires_grad: bool
    ends: bool  # whether gradients end in it
    first_grad: Tensor | None = None  # the gradient at the start, once the function has asked for it
    grad_seen: bool = False  # whether it has, before it assigned one
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
        self.aliases: dict[int, Tensor] = {}  # arguments that the function also finds outside, by number
        self._here: dict[int, Tensor] = {}  # what stands for each tensor, by id; its own for themselves
        self._kept: list[Tensor] = []  # so that an id stays that of one tensor
        self._by_tensor: dict[int, StandIn] = {}  # by the stand-in's id
        self._by_node: dict[Node, StandIn] = {}
        # Tensors that have a stand-in which the function came by in another way, by id.
        self._arguments: dict[int, int] = {}
        self._gradients: dict[int, StandIn] = {}
        self.inside: list[Tensor] = []  # what the function is given instead of its arguments
        for number, argument in enumerate(arguments):
            first = self._arguments.setdefault(id(argument), number)
            if first == number:
                self.inside.append(self._adopted(argument, Origin(argument=number)).tensor)
            else:
                self.inside.append(self.inside[first])

    # What tensors ask

    def made(self, tensor: Tensor) -> None:
        """A tensor that belongs to the function."""
        self._here[id(tensor)] = tensor

    def used(self, tensor: Tensor) -> None:
        """A tensor that is read, or is about to change."""
        self.stand_in(tensor)

    def stand_in(self, tensor: Tensor) -> Tensor:
        """What the function sees of a tensor."""
        found = self._here.get(id(tensor))
        return self._found_outside(tensor) if found is None else found

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

    def assume(self, fact: Callable[[], object]) -> None:
        """Something outside that the function asks for, and that is no tensor."""
        self.facts.append((fact, fact()))

    def part(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` makes, once for each key: something that replays call; see `Captured.parts`."""
        if key not in self.parts:
            self.parts[key] = make()
        return self.parts[key]

    def refuse_value(self, node: Node) -> None:
        """Only what depends on constants alone has a value now."""
        for part in topological([node]):
            if part.value is UNKNOWN:
                raise CaptureError(
                    f"the value of {part.dtype}{list(part.shape)} was asked for inside a jitted function, "
                    f"where only shapes and dtypes are known; read it outside, or use where() instead of if"
                )

    # What the capture is made of

    def of_node(self, node: Node) -> StandIn | None:
        """Whose value at the start of a call a node stands for."""
        return self._by_node.get(node)

    def of_tensor(self, tensor: Tensor) -> StandIn | None:
        """What is known of a stand-in."""
        return self._by_tensor.get(id(tensor))

    def _found_outside(self, tensor: Tensor) -> Tensor:
        number = self._arguments.get(id(tensor))
        owner = self._gradients.get(id(tensor))
        if number is not None:
            self.aliases[number] = tensor
            found = self.inside[number]
        elif owner is not None:
            assert owner.first_grad is not None
            self._assume_gradient(owner, tensor)
            found = owner.first_grad
        else:
            found = self._adopted(tensor, Origin(outside=tensor)).tensor
        self._here[id(tensor)] = found
        return found

    def _gradient(self, gradient: Tensor, owner: StandIn) -> Tensor:
        """The stand-in of the gradient that another has."""
        found = self._here.get(id(gradient))
        if found is not None:
            self._assume_gradient(owner, gradient)
            return found
        self._gradients[id(gradient)] = owner
        return self._adopted(gradient, Origin(gradient_of=owner.origin)).tensor

    def _adopted(self, actual: Tensor, origin: Origin) -> StandIn:
        node, requires_grad = actual._actual_node, actual._actual_requires_grad
        first = leaf(UNKNOWN, node.shape, node.dtype)
        ends = requires_grad and ends_in(actual, node)
        if requires_grad and not ends:
            first = self._with_history(actual, node, first, origin)
        tensor = Tensor(first, actual.device, requires_grad)
        if ends:
            ends_at(first, tensor)
        found = StandIn(tensor, actual, origin, first, requires_grad, ends)
        self._kept.append(actual)
        self._by_tensor[id(tensor)] = self._by_node[first] = found
        if first.inputs:
            self._by_node[first.inputs[0]] = found  # what a copy of the node has the value of
        self._here[id(tensor)] = tensor
        self.stand_ins.append(found)
        return found

    def _with_history(self, actual: Tensor, node: Node, first: Node, origin: Origin) -> Node:
        """What stands for a value through which gradients pass to tensors behind it."""
        if origin.outside is None:
            what = f"argument {origin.argument}" if origin.argument >= 0 else "a gradient"
            why = refusing(
                f"backward() inside a jitted function would have to go on through {what}, to the tensors "
                f"that it was computed from; call backward() outside, compute it inside, or give its detach()"
            )
            made = Node(why, (), {"shape": first.shape, "dtype": first.dtype}, UNKNOWN)
            made.tracked = True
            return made

        def passed(g: Node, n: Node) -> list[Node]:
            self._assume_node(actual, node)  # what is behind it is part of the program then
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
    """Whether gradients end in a tensor, at a node that it has outside of captures."""
    with outside_capture():
        return leaf_of(node) is tensor
