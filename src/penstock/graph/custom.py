"""Values whose gradient is given, where a better one is known than that of the operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from penstock.graph.node import Array, DType, Node, Primitive, Shape

Rule = Callable[[Node, Node], "Sequence[Node | None]"]  # (gradient of the value, the value) -> of each input


def _first_rule(value: Node, *_: Node) -> tuple[Shape, DType]:
    return value.shape, value.dtype


def _first(value: Array, *_: Array) -> Array:
    return value


def custom(name: str, rule: Rule) -> Primitive:
    """A primitive that is its first input; gradients go to the others, as the rule has them."""
    return Primitive(name, _first_rule, _first, lambda g, n: [None, *rule(g, n)], unchanged=True)


def _given_rule(*_: Node, shape: Shape, dtype: DType) -> tuple[Shape, DType]:
    return shape, dtype


def refusing(why: str) -> Primitive:
    """A primitive of values that are there from the start; asking for their gradient raises `why`."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise TypeError(why)

    return Primitive("refused", _given_rule, refuse, refuse, refuses=why)


def refused(primitive: Primitive, value: Any, shape: Shape, dtype: DType, *inputs: Node) -> Node:
    """A value of such a primitive, which was computed from these inputs."""
    node = Node(primitive, inputs, {"shape": shape, "dtype": dtype}, value)
    node.tracked = True
    return node
