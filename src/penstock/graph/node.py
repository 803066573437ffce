"""Nodes and primitives: what a graph is made of.

A `Primitive` holds all that any part of the compiler knows about an operation. Passes, fusion, code
generation and cost models ask for its traits, never for its name, so a new primitive is a new row of a table.
The inputs of an elementwise node have the same shape and dtype: broadcasting and promotion are nodes of their
own, which the tensor layer records.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import numpy.typing as npt

from penstock.graph.dtypes import DType as DType
from penstock.graph.dtypes import checked

if TYPE_CHECKING:
    from penstock.drivers.driver import Capabilities
    from penstock.graph.example import Example

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
ShapeRule = Callable[..., tuple[Shape, DType]]
Vjp = Callable[["Node", "Node"], "Sequence[Node | None]"]


class Kind(Enum):
    """The class of a primitive: from which items of the inputs each item of the result is computed."""

    LEAF = auto()  # none: the value is known from the start
    IDENTITY = auto()  # the item itself, unchanged; simplification removes the node
    ELEMENTWISE = auto()  # the items at the same index
    VIEW = auto()  # an item of the input at an index that is computed from its own
    MOVE = auto()  # an item of an input, or none: padding and concatenation
    GATHER = auto()  # an item of a row whose index another input holds
    CREATION = auto()  # none: constants and sequences
    RANDOM = auto()  # the state of a random generator
    REDUCTION = auto()  # all items along axes, which are dropped
    CONTRACTION = auto()  # a row of a matrix and a column of another
    PRODUCTS = auto()  # the same, of several matrices with the same rows
    CONVOLUTION = auto()  # a window of an image, or all windows, with the channels last
    ATTENTION = auto()  # a query and all keys and values
    PAGED_ATTENTION = auto()  # a query, and the keys and values of pages that another input names
    PAGED_STEP = auto()  # the same, after a key and a value were put into a page
    SCAN = auto()  # all items up to its index along an axis
    ARG_REDUCTION = auto()  # all items along an axis; the result is an index
    SORT = auto()  # all items along an axis
    SCATTER = auto()  # all rows that another input assigns to it
    UPDATE = auto()  # the item of the first input, or of a row that another input assigns to it
    HOST = auto()  # computed by NumPy only
    OPAQUE = auto()  # a kernel that the user wrote; nothing is known of it
    CALL = auto()  # a subgraph that was recorded before; it is inlined before anything is compiled


class Rounding(Enum):
    """How the bits of a floating-point result may differ between NumPy, kernels and devices."""

    EXACT = auto()  # not at all: nothing is rounded
    PRODUCT = auto()  # rounded to nearest, unless a sum after it makes it a fused multiply-add
    SUM = auto()  # rounded to nearest, unless a product before it makes it a fused multiply-add
    QUOTIENT = auto()  # rounded to nearest on devices that say so, for real numbers
    VARIES = auto()  # they depend on the order of operations, or on a library's function


_MOVES = (Kind.IDENTITY, Kind.VIEW, Kind.MOVE, Kind.GATHER)


@dataclass(frozen=True, eq=False)
class Primitive:
    """An operation with its traits; equal only to itself."""

    name: str  # dialects look up the expression of an elementwise primitive by it
    kind: Kind
    # (inputs, **attributes) -> shape and dtype of the result; None: those of all inputs, which agree
    shape_rule: ShapeRule | None
    reference: Callable[..., Array]  # (arrays, **attributes) -> the result by NumPy, the oracle of every test
    vjp: Vjp | None = None  # (gradient of the result, node) -> gradient of each input
    stop_gradient: bool = False  # no gradient passes, so its inputs need not be kept
    is_identity: bool = False  # the value is that of the first input
    result: DType | None = None  # without a shape rule: the dtype of the result, if it is another
    same_bytes: bool = False  # a view of all items of the first input in the same order
    constants: tuple[str, ...] = ()  # attributes that are scalar arguments of kernels, not part of their text
    dtypes: Mapping[str, DType] = field(default_factory=dict)  # of constants whose dtype is not the node's
    operations: Callable[[Node], int] | None = None  # None: as many as the largest operand has items
    costly: bool = False  # takes many instructions, so fusion avoids computing it twice
    weight: float = 0  # time per item beyond reading and writing it; that of an exponential is 1
    rounding: Rounding | None = None  # None: exact if items are only moved
    takes_out: bool = False  # the reference may be given memory for its result, as `out`
    as_stored: bool = False  # the reference takes float16 and bfloat16 as they are, not widened to float32
    no_kernel: tuple[DType, ...] = ()  # dtypes for which kernels, which widen them, would give other results
    # (node, capabilities) -> the same value from other primitives; None if the target has a kernel for it
    decompose: Callable[[Node, Capabilities], Node | None] | None = None
    combine: str = ""  # of reductions and scans: the elementwise primitive that combines two items
    transient: bool = False  # made for a single node and may hold values, so no cache may keep it
    few_rows: bool = False  # it multiplies few rows with a matrix, and reads operands as they lie in memory
    # Starts an exchange between ranks, or waits for its result; a fetch is a start that comes in time for the
    # use of its result, and not as early as possible.
    collective: Literal["", "start", "fetch", "wait"] = ""
    refuses: str = ""  # why it has no gradient; `backward` raises this if a gradient arrives here

    @cached_property
    def is_free(self) -> bool:
        """Whether recomputing it costs less than storing it."""
        return self.kind in (Kind.VIEW, Kind.CREATION)

    @cached_property
    def is_slow(self) -> bool:
        """Whether computing an item takes longer than reading it from memory."""
        return self.costly and self.weight >= 1

    @cached_property
    def reads_elsewhere(self) -> bool:
        """Whether it is no view, and an item is computed from items at other indices."""
        return self.kind in (Kind.MOVE, Kind.GATHER, Kind.RANDOM)

    @cached_property
    def multiplies_matrices(self) -> bool:
        """Whether matrix products dominate its time."""
        return self.kind in (Kind.CONTRACTION, Kind.PRODUCTS, Kind.CONVOLUTION, Kind.ATTENTION)

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
    """The application of a primitive to inputs. It is immutable, except for `set_value`."""

    __slots__ = (
        "__weakref__",
        "attributes",
        "depth",
        "dtype",
        "holder",
        "inputs",
        "like",
        "owner",
        "pending_bytes",
        "primitive",
        "shape",
        "span",
        "tracked",
        "value",
    )

    def __init__(
        self,
        primitive: Primitive,
        inputs: tuple[Node, ...],
        attributes: dict[str, Any],
        value: Any = None,
        like: Node | None = None,
    ) -> None:
        """`like`: a node of the same operation on computed inputs of the same shapes and dtypes."""
        self.primitive = primitive
        self.inputs = inputs
        self.attributes = attributes
        rule, first = primitive.shape_rule, None
        if like is not None:
            shape, dtype = like.shape, like.dtype
        elif rule is None:
            first = inputs[0]
            shape, dtype = first.shape, primitive.result or first.dtype
        else:
            shape, dtype = rule(*inputs, **attributes) if attributes else rule(*inputs)
        self.shape: Shape = shape
        self.dtype: DType = dtype
        self.value = value  # the result, once it is computed
        self.span: tuple[int, int] | None = None  # least and largest possible item, once that is known
        self.owner: Any = None  # a weak reference to the tensor that accumulates the gradients of this node
        self.holder: Any = None  # a weak reference to the tensor that was made of it, if a gradient passes
        self.like: Example | None = None  # of a frequent operation
        tracked, depth, pending = False, 0, 0
        for node in inputs:
            if first is not None and node is not first:
                agree = node.dtype is first.dtype or node.dtype == first.dtype
                if not agree or node.shape != shape:
                    raise AssertionError(f"inputs differ: {first!r}, {node!r}")
            if node.tracked:
                tracked = True
            if node.value is None:
                if node.depth > depth:
                    depth = node.depth
                if node.pending_bytes > pending:
                    pending = node.pending_bytes
        self.tracked: bool = tracked and not primitive.stop_gradient  # a gradient may pass
        # The number and the bytes of pending nodes along the longest path that ends here.
        self.depth: int = depth + (1 if like is None else like.depth)
        self.pending_bytes: int = pending + prod(shape) * dtype.itemsize

    def set_value(self, value: Any) -> None:
        """Set the value. The inputs are released, unless a gradient may pass to them."""
        self.value = value
        if not self.tracked or self.primitive.stop_gradient:
            self.inputs = ()

    def on(self, inputs: tuple[Node, ...]) -> Node:
        """The same operation on other inputs; the node itself if these are its own."""
        return self if inputs == self.inputs else Node(self.primitive, inputs, self.attributes)

    def alike(self, inputs: tuple[Node, ...]) -> Node:
        """The same operation on other values of the same shapes and dtypes; its result is not known."""
        node = _new_node(Node)
        node.primitive = self.primitive
        node.inputs = inputs
        node.attributes = self.attributes
        node.shape = self.shape
        node.dtype = self.dtype
        node.span = self.span
        node.value = node.owner = node.holder = None
        node.like = self.like
        node.tracked = self.tracked
        node.depth = self.depth
        node.pending_bytes = self.pending_bytes
        return node

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of items."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes that the result takes."""
        return self.size * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"<{self.primitive.name} {self.dtype}{list(self.shape)}>"


_new_node = Node.__new__


def topological(
    outputs: Iterable[Node], *, through_values: bool = False, until: Container[Node] = ()
) -> list[Node]:
    """Every node that the outputs depend on, each after its inputs.

    The walk does not go beyond nodes in `until`, nor beyond computed nodes unless `through_values` is set.
    """
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[Node | None] = [*reversed([*outputs])]  # None: the inputs of the node before it are done
    while stack:
        node = stack.pop()
        if node is None:
            order.append(stack.pop())  # type: ignore[arg-type]
        elif node not in seen:
            seen.add(node)
            if node.inputs and (node.value is None or through_values) and node not in until:
                stack += (node, None)
                stack += node.inputs[::-1]
            else:
                order.append(node)
    return order


def rewrite(outputs: Iterable[Node], rule: Callable[[Node], Node]) -> list[Node]:
    """For each output, the node that `rule` gives for it; computed nodes stay.

    The rule gets every node once, with inputs that were rewritten before.
    """
    outputs, new = list(outputs), dict[Node, Node]()
    for node in topological(outputs):
        pending = node.value is None
        new[node] = rule(node.on(tuple([new[parent] for parent in node.inputs]))) if pending else node
    return [new[node] for node in outputs]


def _leaf_shape(*, shape: Shape, dtype: DType) -> tuple[Shape, DType]:
    return shape, dtype


def _leaf_reference(*, shape: Shape, dtype: DType) -> Array:
    raise AssertionError("the value of a leaf is given, not computed")


LEAF = Primitive("leaf", Kind.LEAF, _leaf_shape, _leaf_reference)


def leaf(value: Any, shape: Shape, dtype: DType) -> Node:
    """A node whose value is given."""
    return Node(LEAF, (), {"shape": shape, "dtype": checked(dtype)}, value)


class PlaceholderRead(AttributeError):
    """The value of a placeholder was read: it is only known when the recorded graph runs."""


class _Placeholder:
    """The value of a leaf that stands for an input of a recorded graph."""

    def __getattr__(self, name: str) -> Any:
        raise PlaceholderRead(name)


_PLACEHOLDER = _Placeholder()


def placeholder(shape: Shape, dtype: DType) -> Node:
    """A leaf that stands for an input of a recorded graph."""
    return leaf(_PLACEHOLDER, shape, dtype)


def same(*inputs: Node, **_: Any) -> tuple[Shape, DType]:
    """A shape rule: all inputs and the result have the same shape and dtype."""
    first = inputs[0]
    for other in inputs[1:]:
        agree = other.dtype is first.dtype or other.dtype == first.dtype
        if not agree or other.shape != first.shape:
            raise AssertionError(f"inputs differ: {first!r}, {other!r}")
    return first.shape, first.dtype
