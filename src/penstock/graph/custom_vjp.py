"""Values whose gradient is given, where a better one is known than that of the operations."""

from __future__ import annotations

from typing import Any, NoReturn

from penstock.graph.node import Array, DType, Kind, Node, Primitive, Shape, Vjp


def _first_shape(value: Node, *_: Node, **__: Any) -> tuple[Shape, DType]:
    return value.shape, value.dtype


def _first(value: Array, *_: Array, **__: Any) -> Array:
    return value


def custom_vjp(name: str, vjp: Vjp, transient: bool = False) -> Primitive:
    """A primitive whose value is its first input; `vjp` gives the gradients of the other inputs."""
    return Primitive(
        name,
        Kind.IDENTITY,
        _first_shape,
        _first,
        lambda g, n: [None, *vjp(g, n)],
        is_identity=True,
        transient=transient,
    )


def _given_shape(*_: Node, shape: Shape, dtype: DType) -> tuple[Shape, DType]:
    return shape, dtype


def refusing(why: str) -> Primitive:
    """A primitive of values that are there from the start; asking for their gradient raises `why`."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise TypeError(why)

    return Primitive("refused", Kind.LEAF, _given_shape, refuse, refuse, refuses=why)


def refused(primitive: Primitive, value: Any, shape: Shape, dtype: DType, *inputs: Node) -> Node:
    """A value of such a primitive, which was computed from these inputs."""
    node = Node(primitive, inputs, {"shape": shape, "dtype": dtype}, value)
    node.tracked = True
    return node
