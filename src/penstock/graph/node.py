"""Nodes and primitives: what a graph is made of.

A primitive is a row of a table: its shape rule, its meaning in NumPy (the oracle of every test) and its
gradient, built from primitives. Inputs of one node that must agree in shape or dtype do: broadcasting and
promotion are nodes of their own, put there by the tensor layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from penstock.graph.dtypes import DType as DType
from penstock.graph.dtypes import checked

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Rule = Callable[..., tuple[Shape, DType]]
Gradient = Callable[["Node", "Node"], "Sequence[Node | None]"]


@dataclass(frozen=True, eq=False)
class Primitive:
    """One operation; equal only to itself."""

    name: str
    rule: Rule  # (inputs, **attributes) -> shape and dtype of the result
    numpy: Callable[..., Array]  # (arrays, **attributes) -> the result
    gradient: Gradient | None = None  # (gradient of the result, node) -> gradient of each input
    stops: bool = False  # no gradient passes, so what is behind it need not be kept
    unchanged: bool = False  # the value is that of the first input
    constants: tuple[str, ...] = ()  # attributes that are numbers, given to a program as arguments
    dtypes: Mapping[str, DType] = field(default_factory=dict)  # of constants that do not have the node's
    compiled: bool = False  # only a kernel computes it: NumPy does not know its meaning
    refuses: str = ""  # why nothing can be said of its gradient; `backward` raises that if one arrives here


class Node:
    """One application of a primitive. It never changes what it stands for; `settle` fills in its value."""

    __slots__ = (
        "__weakref__",
        "attributes",
        "depth",
        "dtype",
        "inputs",
        "pending_bytes",
        "primitive",
        "shape",
        "tracked",
        "value",
    )

    def __init__(
        self, primitive: Primitive, inputs: tuple[Node, ...], attributes: dict[str, Any], value: Any = None
    ) -> None:
        self.primitive = primitive
        self.inputs = inputs
        self.attributes = attributes
        self.shape, self.dtype = primitive.rule(*inputs, **attributes)
        self.value = value  # where the result is, once it was computed
        tracked, depth, pending = False, 0, 0
        for node in inputs:
            tracked = tracked or node.tracked
            if node.value is None:
                depth = node.depth if node.depth > depth else depth
                pending = node.pending_bytes if node.pending_bytes > pending else pending
        self.tracked: bool = tracked and not primitive.stops  # a gradient may pass
        # Along the longest and the heaviest chain of nodes that are not computed yet.
        self.depth: int = 1 + depth
        self.pending_bytes: int = pending + math.prod(self.shape) * self.dtype.itemsize

    def settle(self, value: Any) -> None:
        """Note where the result is. What it was computed from is let go, unless a gradient may pass there."""
        self.value = value
        if not self.tracked or self.primitive.stops:
            self.inputs = ()

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of items."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes that the result takes."""
        return self.size * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"<{self.primitive.name} {self.dtype}{list(self.shape)}>"


def topological(
    outputs: Iterable[Node], *, through_values: bool = False, until: Container[Node] = ()
) -> list[Node]:
    """Every node that the outputs need, each after its inputs.

    The walk ends at computed nodes by default, and at those in `until`.
    """
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(node, False) for node in reversed(list(outputs))]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            if (node.value is None or through_values) and node not in until:
                stack += [(parent, False) for parent in reversed(node.inputs)]
    return order


def _leaf_rule(*, shape: Shape, dtype: DType) -> tuple[Shape, DType]:
    return shape, dtype


def _leaf_meaning(*, shape: Shape, dtype: DType) -> Array:
    raise AssertionError("a leaf has its value from the start")


LEAF = Primitive("leaf", _leaf_rule, _leaf_meaning)


def leaf(value: Any, shape: Shape, dtype: DType) -> Node:
    """A node whose result is there already."""
    return Node(LEAF, (), {"shape": shape, "dtype": checked(dtype)}, value)


class _Placeholder:
    """The value of a leaf that stands for the input of a program."""


_PLACEHOLDER = _Placeholder()


def placeholder(shape: Shape, dtype: DType) -> Node:
    """A leaf that stands for an input, whatever its value is."""
    return leaf(_PLACEHOLDER, shape, dtype)


def same(*inputs: Node, **_: Any) -> tuple[Shape, DType]:
    """The shape rule of elementwise primitives: all inputs agree, and so does the result."""
    first = inputs[0]
    for other in inputs[1:]:
        agree = other.dtype is first.dtype or other.dtype == first.dtype
        if not agree or other.shape != first.shape:
            raise AssertionError(f"inputs differ: {first!r}, {other!r}")
    return first.shape, first.dtype
