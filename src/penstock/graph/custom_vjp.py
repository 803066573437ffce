"""Values with a gradient of their own, where a better formula is known than that of their operations."""

from __future__ import annotations

from typing import Any, NoReturn

from penstock.graph.node import DType, Kind, Node, Primitive, Shape, Vjp


def custom_vjp(name: str, vjp: Vjp, transient: bool = False) -> Primitive:
    """A primitive whose value is its first input; `vjp` gives the gradients of the other inputs."""
    return Primitive(
        name,
        Kind.IDENTITY,
        lambda value, *_, **__: (value.shape, value.dtype),
        lambda value, *_, **__: value,
        lambda g, n: [None, *vjp(g, n)],
        is_identity=True,
        transient=transient,
    )


def refusing(why: str) -> Primitive:
    """A primitive of given values; asking for their gradient raises a TypeError with the text `why`."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise TypeError(why)

    return Primitive(
        "refused", Kind.LEAF, lambda *_, shape, dtype: (shape, dtype), refuse, refuse, refuses=why
    )


def refused(primitive: Primitive, value: Any, shape: Shape, dtype: DType, *inputs: Node) -> Node:
    """A value of a primitive made by `refusing`, which was computed from these inputs."""
    node = Node(primitive, inputs, {"shape": shape, "dtype": dtype}, value)
    node.tracked = True
    return node
