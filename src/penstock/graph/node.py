"""Nodes and primitives: what a graph is made of.

A primitive is a row of a table: its shape rule, its meaning in NumPy (the oracle of every test) and its
gradient, built from primitives. Inputs of one node that must agree in shape or dtype do: broadcasting and
promotion are nodes of their own, put there by the tensor layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
DType = np.dtype[Any]
Rule = Callable[..., tuple[Shape, DType]]
Gradient = Callable[["Node", "Node"], "Sequence[Node | None]"]


@dataclass(frozen=True)
class Primitive:
    """One operation."""

    name: str
    rule: Rule  # (inputs, **attributes) -> shape and dtype of the result
    numpy: Callable[..., Array]  # (arrays, **attributes) -> the result
    gradient: Gradient | None = None  # (gradient of the result, node) -> gradient of each input
    stops: bool = False  # no gradient passes, so what is behind it need not be kept


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
        self.tracked: bool = not primitive.stops and any(
            node.tracked for node in inputs
        )  # a gradient may pass
        waiting = [node for node in inputs if node.value is None]
        # Along the longest and the heaviest chain of nodes that are not computed yet.
        self.depth: int = 1 + max((node.depth for node in waiting), default=0)
        self.pending_bytes: int = self.nbytes + max((node.pending_bytes for node in waiting), default=0)

    def settle(self, value: Any) -> None:
        """Note where the result is. What it was computed from is let go, unless a gradient may pass there."""
        self.value = value
        if not self.tracked:
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


def topological(outputs: Iterable[Node], *, through_values: bool = False) -> list[Node]:
    """Every node that the outputs need, each after its inputs. A computed one ends the walk by default."""
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
            if node.value is None or through_values:
                stack += [(parent, False) for parent in reversed(node.inputs)]
    return order


def _leaf_rule(*, shape: Shape, dtype: DType) -> tuple[Shape, DType]:
    return shape, dtype


def _leaf_meaning(*, shape: Shape, dtype: DType) -> Array:
    raise AssertionError("a leaf has its value from the start")


LEAF = Primitive("leaf", _leaf_rule, _leaf_meaning)


def leaf(value: Any, shape: Shape, dtype: DType) -> Node:
    """A node whose result is there already."""
    return Node(LEAF, (), {"shape": shape, "dtype": dtype}, value)


def same(*inputs: Node, **_: Any) -> tuple[Shape, DType]:
    """The shape rule of elementwise primitives: all inputs agree, and so does the result."""
    first = inputs[0]
    for other in inputs[1:]:
        if other.shape != first.shape or other.dtype != first.dtype:
            raise AssertionError(f"inputs differ: {first!r}, {other!r}")
    return first.shape, first.dtype
