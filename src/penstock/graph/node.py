"""Nodes and primitives: what a graph is made of.

A primitive is one row: all that any part of the compiler knows about an operation. Passes, fusion, code
generation and prices ask for its traits, never for its name, so a new primitive is a new row.
Inputs of one node that must agree in shape or dtype do: broadcasting and promotion are nodes of their own,
recorded by the tensor layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from penstock.graph.dtypes import DType as DType
from penstock.graph.dtypes import checked

if TYPE_CHECKING:
    from penstock.drivers.driver import Capabilities

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
ShapeRule = Callable[..., tuple[Shape, DType]]
Vjp = Callable[["Node", "Node"], "Sequence[Node | None]"]


class Kind(Enum):
    """The class of a primitive: which items of its inputs an item of its result needs."""

    LEAF = auto()  # none: the value is there from the start
    IDENTITY = auto()  # its own, unchanged; simplification removes the node
    ELEMENTWISE = auto()  # those at its own index
    VIEW = auto()  # one item of the input, found by arithmetic on indices
    MOVE = auto()  # one item of an input, or none: padding and concatenation
    GATHER = auto()  # rows that another input names
    CREATION = auto()  # none: constants and sequences
    RANDOM = auto()  # the state of a generator
    REDUCTION = auto()  # all along axes that are dropped
    CONTRACTION = auto()  # a row of one matrix and a column of another
    ATTENTION = auto()  # one query and all keys and values
    SCAN = auto()  # all up to its own along an axis
    ARG_REDUCTION = auto()  # all along an axis; the result is an index
    SORT = auto()  # all along an axis
    SCATTER = auto()  # all rows that another input sends to it
    HOST = auto()  # NumPy alone computes it
    OPAQUE = auto()  # a kernel that the user wrote; nothing is known of it
    CALL = auto()  # a part of a graph that was recorded before; it is put back before anything is compiled


class Rounding(Enum):
    """How far the bits of a floating-point result depend on who computes it."""

    EXACT = auto()  # nothing is rounded
    PRODUCT = auto()  # rounded to nearest, but a kernel may skip it before a sum (a fused multiply-add)
    SUM = auto()  # rounded to nearest, but perhaps together with a product before it
    VARIES = auto()  # the order of operations, or a function, has an error of its own


_MOVES = (Kind.IDENTITY, Kind.VIEW, Kind.MOVE, Kind.GATHER)


@dataclass(frozen=True, eq=False)
class Primitive:
    """One operation with its traits; equal only to itself."""

    name: str  # of elementwise primitives: their name in the tables of expressions, too
    kind: Kind
    shape_rule: ShapeRule  # (inputs, **attributes) -> shape and dtype of the result
    reference: Callable[..., Array]  # (arrays, **attributes) -> the result by NumPy: the oracle of every test
    vjp: Vjp | None = None  # (gradient of the result, node) -> gradient of each input
    stop_gradient: bool = False  # no gradient passes, so what is behind it need not be kept
    is_identity: bool = False  # the value is that of the first input
    same_bytes: bool = False  # a view of all items of the first input in their order
    constants: tuple[str, ...] = ()  # attributes that are scalar arguments of a program, not part of its text
    dtypes: Mapping[str, DType] = field(default_factory=dict)  # of constants that do not have the node's
    operations: Callable[[Node], int] | None = None  # None: one on each item of the largest operand
    costly: bool = False  # takes many instructions, so that fusion does not compute it twice for nothing
    weight: float = 0  # time for an item beyond reading and writing it, as a multiple of an exponential's
    rounding: Rounding | None = None  # None: exact where items are only moved
    as_stored: bool = False  # the reference takes float16 and bfloat16 as they are, not widened to float32
    no_kernel: tuple[DType, ...] = ()  # dtypes for which kernels, which widen them, would give other results
    # (node, capabilities) -> the same of other primitives, for targets without a kernel of its own; else None
    decompose: Callable[[Node, Capabilities], Node | None] | None = None
    combine: str = ""  # of reductions and scans: the elementwise primitive that takes in one more item
    transient: bool = False  # made for one node, and may hold values: nothing may keep it
    refuses: str = ""  # why nothing can be said of its gradient; `backward` raises that if one arrives here

    @cached_property
    def is_free(self) -> bool:
        """Whether it costs less to recompute than to store."""
        return self.kind in (Kind.VIEW, Kind.CREATION)

    @cached_property
    def is_slow(self) -> bool:
        """Whether computing an item takes longer than reading one from memory."""
        return self.costly and self.weight >= 1

    @cached_property
    def reads_elsewhere(self) -> bool:
        """Whether an item is computed from items at other indices, and it is no view."""
        return self.kind in (Kind.MOVE, Kind.GATHER, Kind.RANDOM)

    @cached_property
    def multiplies_matrices(self) -> bool:
        """Whether its time is that of matrix products."""
        return self.kind in (Kind.CONTRACTION, Kind.ATTENTION)

    def operations_of(self, node: Node) -> int:
        """How many arithmetic operations a node of this primitive takes."""
        if self.operations is not None:
            return self.operations(node)
        if self.is_free or self.reads_elsewhere or self.is_identity or self.kind is Kind.OPAQUE:
            return 0
        return max(operand.size for operand in (node, *node.inputs))

    @cached_property
    def widens(self) -> bool:
        """Whether it computes float16 and bfloat16 in float32."""
        return not (self.as_stored or self.is_identity or self.kind in _MOVES)

    @cached_property
    def error(self) -> Rounding:
        """How its results are rounded."""
        if self.rounding is not None:
            return self.rounding
        return Rounding.EXACT if self.kind in _MOVES or self.is_identity else Rounding.VARIES


class Node:
    """One application of a primitive. It never changes what it stands for; `settle` fills in its value."""

    __slots__ = (
        "__weakref__",
        "attributes",
        "depth",
        "dtype",
        "inputs",
        "owner",
        "pending_bytes",
        "primitive",
        "shape",
        "span",
        "tracked",
        "value",
    )

    def __init__(
        self, primitive: Primitive, inputs: tuple[Node, ...], attributes: dict[str, Any], value: Any = None
    ) -> None:
        self.primitive = primitive
        self.inputs = inputs
        self.attributes = attributes
        self.shape, self.dtype = primitive.shape_rule(*inputs, **attributes)
        self.value = value  # where the result is, once it was computed
        self.span: tuple[int, int] | None = None  # what its items are known to lie between, once one looked
        self.owner: Any = None  # a weak reference to whatever collects the gradients that end here
        tracked, depth, pending = False, 0, 0
        for node in inputs:
            if node.tracked:
                tracked = True
            if node.value is None:
                if node.depth > depth:
                    depth = node.depth
                if node.pending_bytes > pending:
                    pending = node.pending_bytes
        self.tracked: bool = tracked and not primitive.stop_gradient  # a gradient may pass
        # Along the longest and the heaviest chain of nodes that are not computed yet.
        self.depth: int = 1 + depth
        self.pending_bytes: int = pending + math.prod(self.shape) * self.dtype.itemsize

    def settle(self, value: Any) -> None:
        """Note where the result is. What it was computed from is let go, unless a gradient may pass there."""
        self.value = value
        if not self.tracked or self.primitive.stop_gradient:
            self.inputs = ()

    def on(self, inputs: tuple[Node, ...]) -> Node:
        """The same of other inputs; itself where they are its own."""
        return self if inputs == self.inputs else Node(self.primitive, inputs, self.attributes)

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


def _leaf_shape(*, shape: Shape, dtype: DType) -> tuple[Shape, DType]:
    return shape, dtype


def _leaf_reference(*, shape: Shape, dtype: DType) -> Array:
    raise AssertionError("a leaf has its value from the start")


LEAF = Primitive("leaf", Kind.LEAF, _leaf_shape, _leaf_reference)


def leaf(value: Any, shape: Shape, dtype: DType) -> Node:
    """A node whose result is there already."""
    return Node(LEAF, (), {"shape": shape, "dtype": checked(dtype)}, value)


class PlaceholderRead(AttributeError):
    """A value was asked for that is only known when a recorded graph is used."""


class _Placeholder:
    """The value of a leaf that stands for the input of a program."""

    def __getattr__(self, name: str) -> Any:
        raise PlaceholderRead(name)


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
