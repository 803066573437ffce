"""The pass that writes out what a fused program computes in a way of its own.

A fused kernel computes float16 and bfloat16 in float32. It rounds what it stores, and what the graph casts to
16 bits. So operations in float32 with casts between them give its bits, whatever shares a kernel. On a CPU,
products add up in the order that suits how the fused program reads their matrices. On a GPU, kernels that
read 16 bits have quick functions, which is an attribute of such operations in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.drivers.driver import Capabilities
from penstock.fusion.groups import Group
from penstock.fusion.products import by_library
from penstock.fusion.views import is_scattered
from penstock.graph.checkpoint import BARRIER
from penstock.graph.contraction import GATHER, MATMUL
from penstock.graph.dtypes import HALF_PRECISION, DType, float32
from penstock.graph.elementwise import CAST, FULL, PRIMITIVES, cast
from penstock.graph.node import Kind, Node, topological
from penstock.graph.reference import constant_key, constant_value
from penstock.graph.separate import NotSeparable
from penstock.graph.shaping import SLICE_AT
from penstock.kernels.dialects.c_expressions import QUICK
from penstock.kernels.lowering.loop_nest import is_quick
from penstock.kernels.matmul_group import cpu_order

_IN_16_BITS = (FULL, GATHER, SLICE_AT)  # exact, and these may read little of a large array
_QUICK = tuple(PRIMITIVES[name] for name in QUICK)


def depends_on_fusion(wanted: Iterable[Node]) -> bool:
    """Whether a graph has float16 or bfloat16, or products of matrices that lie unevenly in memory."""
    nodes = topological(wanted)
    return has_half_precision(nodes) or bool(scattered_operands(nodes))


def has_half_precision(nodes: Iterable[Node]) -> bool:
    """Whether some nodes are float16 or bfloat16."""
    return any(map(_is_half, nodes))


def scattered_operands(nodes: Iterable[Node]) -> set[Node]:
    """The matrices of products that lie unevenly in memory, as the windows of images do."""
    products = [node for node in nodes if node.primitive is MATMUL and node.value is None]
    return {operand for node in products for operand in node.inputs if is_scattered(operand)}


class AsFused:
    """The values of a fused program, by operations that need not share kernels."""

    def __init__(self, groups: Sequence[Group], capabilities: Capabilities) -> None:
        self._capabilities, self._gpu = capabilities, capabilities.vector_width == 1
        self.constants: dict[Node, Node] = {}  # those in float32, and the 16-bit ones that they stand for
        self.reductions: dict[Node, Node] = {}  # those in float32, and the nodes of the graph
        self._quick = False  # whether the kernel of the current group has quick functions
        self._wide_constants: dict[Node, Node] = {}
        self._stored: dict[Node, Node] = {}
        self._copies: dict[Node, Node] = {}
        self._casts: dict[tuple[Node, DType], Node] = {}
        self._operations: dict[tuple[Node, tuple[Node, ...], bool], Node] = {}
        for group in groups:
            if group.kind.fuses and not any(map(self._is_by_library, group.nodes)):
                self._quick = self._gpu and is_quick(group)
                self._fused(group)
            else:  # its kernel reads and writes the values as they are
                for node in group.nodes:
                    self._stored[node] = node.on(tuple(map(self.stored, node.inputs)))

    def stored(self, node: Node) -> Node:
        """What the fused program has in memory for a node: a value, or a view of one."""
        if node.value is not None:
            return node
        if node not in self._stored:
            self._stored[node] = node.on(tuple(map(self.stored, node.inputs)))
        return self._stored[node]

    def _is_by_library(self, node: Node) -> bool:
        return node.primitive.multiplies_matrices and by_library(node, self._capabilities)

    def _fused(self, group: Group) -> None:
        values = {node: self.stored(node) for node in group.inputs}
        for node in group.nodes:
            inputs = tuple(values[parent] for parent in node.inputs)
            if node.primitive.multiplies_matrices:
                values[node] = self._product(node, inputs, group)
            else:
                values[node] = self._value(node, inputs)
        for node in group.outputs:
            self._stored[node] = self._cast(values[node], node.dtype)

    def _value(self, node: Node, inputs: tuple[Node, ...]) -> Node:
        """A value as a fused kernel has it: in 16 bits only if nothing was rounded."""
        if node.primitive is CAST:
            (source,) = inputs
            if _is_half(node) and source.dtype is not node.dtype:
                source = self._cast(source, float32)
            return self._cast(source, node.dtype)
        if node.primitive in _IN_16_BITS or node.primitive.kind is Kind.VIEW:
            if all(value.dtype is of.dtype for value, of in zip(inputs, node.inputs, strict=True)):
                return self._on(node, inputs)
        elif node.primitive.kind is Kind.CREATION:
            return self._wide(node)
        return self._on(node, tuple(map(self._wide, inputs)))

    def _product(self, node: Node, inputs: tuple[Node, ...], group: Group) -> Node:
        """A product, which reads matrices through the views that are not in memory, and no further."""
        in_memory = set(map(self.stored, group.inputs))

        def matrix(operand: Node) -> Node:
            is_view = operand.primitive.kind is Kind.VIEW and operand.value is None
            if is_view and operand not in in_memory:
                return self._on(operand, tuple(map(matrix, operand.inputs)))
            wide = self._wide(operand)
            return self._copied(wide) if is_view and wide is operand and not self._gpu else wide

        if node.primitive is not MATMUL:
            if has_half_precision((node, *node.inputs)):
                raise NotSeparable(f"{node} reads 16-bit floats in a way of its own")
            return self._on(node, inputs)
        key = node, tuple(map(matrix, inputs)), False
        if key not in self._operations:
            # A GPU's kernels add up in an order of the sizes only.
            order = () if self._gpu else cpu_order(group, node, self._capabilities)
            self._operations[key] = Node(MATMUL, key[1], {"order": order} if order else {})
        return self._operations[key]

    def _copied(self, view: Node) -> Node:
        """A view that is in memory."""
        if view not in self._copies:
            self._copies[view] = Node(BARRIER, (view,), {})
        return self._copies[view]

    def _wide(self, value: Node) -> Node:
        """A value in the dtype in which kernels compute."""
        return self._cast(value, float32) if _is_half(value) else value

    def _cast(self, value: Node, dtype: DType) -> Node:
        if value.dtype is dtype:
            return value
        if value.primitive.kind is Kind.CREATION and _is_half(value):
            value = self._constant(value)
        key = value, dtype
        if key not in self._casts:
            self._casts[key] = cast(value, dtype)
        return self._casts[key]

    def _constant(self, node: Node) -> Node:
        """A constant in float32, as kernels have it: its numbers are rounded to 16 bits."""
        if node not in self._wide_constants:
            rounded = {name: constant_value(constant_key(node, name)) for name in node.primitive.constants}
            wide = Node(node.primitive, (), {**node.attributes, "dtype": float32, **rounded})
            self._wide_constants[node], self.constants[wide] = wide, node
        return self._wide_constants[node]

    def _on(self, node: Node, inputs: tuple[Node, ...]) -> Node:
        """An operation on other inputs; a single node, however many kernels compute it alike."""
        quick = self._quick and node.primitive in _QUICK and node.dtype in (float32, *HALF_PRECISION)
        key = node, inputs, quick
        if key not in self._operations:
            made = Node(node.primitive, inputs, {"quick": True}) if quick else node.on(inputs)
            self._operations[key] = made
            if node.primitive.kind is Kind.REDUCTION:
                self.reductions[made] = node
        return self._operations[key]


def _is_half(node: Node) -> bool:
    return node.dtype in HALF_PRECISION
