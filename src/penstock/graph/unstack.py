"""The pass that turns products of stacked matrices into separate products, for CPUs.

`matmul_batch` records a single product of stacked matrices on every device. On a GPU that saves launches. A
CPU runs separate products in a single launch too, and needs no copies into stacks for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from penstock.graph.contraction import MATMUL, matmul
from penstock.graph.elementwise import CAST, PRIMITIVES, cast
from penstock.graph.node import Node, Shape, topological
from penstock.graph.shaping import CONCAT, PAD, PERMUTE, RESHAPE, SLICE, permute, reshape, slice_axis


def unstack(outputs: Sequence[Node]) -> list[Node]:
    """The same values, with separate products in place of stacked products that are only read by index."""
    return _Unstacking(outputs).outputs


class _Unstacking:
    """Rewrites a graph."""

    def __init__(self, outputs: Sequence[Node]) -> None:
        self._new: dict[Node, Node] = {}
        self._stacks: dict[Node, dict[int, Node]] = {}  # of each stack, the matrices that are known, by index
        self._known: dict[tuple[Node, int], Node] = {}  # matrices in the new graph, by stack and index
        order = topological(outputs)
        products = self._products_read_by_index(order, outputs)
        self.outputs = list(outputs)
        if products:
            for node in order:
                self._new[node] = self._rewritten(node, products)
            self.outputs = [self._new[node] for node in outputs]

    def _products_read_by_index(self, order: Sequence[Node], outputs: Sequence[Node]) -> set[Node]:
        """The products of two stacks that are not outputs, and whose readers take a single matrix each."""
        products = {node for node in order if node.primitive is MATMUL and self._multiplies_stacks(node)}
        if not products:
            return products
        readers = defaultdict[Node, list[Node]](list)
        for node in order:
            for parent in node.inputs if node.value is None else ():
                readers[parent].append(node)

        def read_by_index(node: Node) -> bool:
            return node not in outputs and all(
                _index(reader) is not None or (reader.primitive is CAST and read_by_index(reader))
                for reader in readers[node]
            )

        return {node for node in products if read_by_index(node)}

    def _multiplies_stacks(self, node: Node) -> bool:
        if node.value is not None or node.ndim != 3:
            return False
        return all(self._matrices(_base(operand)) for operand in node.inputs)

    def _matrices(self, node: Node) -> dict[int, Node]:
        if node not in self._stacks:
            self._stacks[node] = _concatenated(node) if node.primitive is CONCAT else _padded(node)
        return self._stacks[node]

    def _rewritten(self, node: Node, products: set[Node]) -> Node:
        if node.value is not None:
            return node
        index = _index(node)
        if index is not None and _base(node.inputs[0]) in products:
            return reshape(self._matrix(node.inputs[0], index), node.shape)
        inputs = tuple(self._new[parent] for parent in node.inputs)
        if node.primitive is RESHAPE and inputs != node.inputs:
            return _reshaped(inputs[0], node.shape)
        return node.on(inputs)

    def _matrix(self, node: Node, index: int) -> Node:
        """Matrix `index` of a stack, or of a product of stacks, in the new graph."""
        if (node, index) not in self._known:
            self._known[node, index] = self._new_matrix(node, index)
        return self._known[node, index]

    def _new_matrix(self, node: Node, index: int) -> Node:
        if node.primitive is MATMUL:
            return matmul(*(self._matrix(operand, index) for operand in node.inputs))
        if node.primitive is CAST:
            return cast(self._matrix(node.inputs[0], index), node.dtype)
        if node.primitive is PERMUTE:
            axes = tuple(axis - 1 for axis in node.attributes["axes"][1:])
            return permute(self._matrix(node.inputs[0], index), axes)
        matrix = self._matrices(node).get(index)
        if matrix is None:
            return reshape(slice_axis(self._new[node], 0, index, 1), node.shape[1:])
        return _reshaped(self._new[matrix], node.shape[1:])


def _reshaped(node: Node, shape: Shape) -> Node:
    """A node in another shape, skipping a reshape before it."""
    if node.primitive is RESHAPE and node.value is None:
        node = node.inputs[0]
    return reshape(node, shape)


def _base(node: Node) -> Node:
    """The stack below casts and transposes that act on each matrix."""
    while node.value is None and (
        node.primitive is CAST or (node.primitive is PERMUTE and node.attributes["axes"][0] == 0)
    ):
        node = node.inputs[0]
    return node


def _index(node: Node) -> int | None:
    """The index of the matrix that a node takes from a stack; None for any other node."""
    return _row(node, node.inputs[0]) if node.primitive is SLICE and node.value is None else None


def _row(node: Node, stack: Node) -> int | None:
    """The index along the first axis, if the slices of a node select the whole of a single matrix."""
    (start, count, _), *rest = node.attributes["slices"]
    whole = all(part == (0, length, 1) for part, length in zip(rest, stack.shape[1:], strict=True))
    return start if whole and count == 1 else None


def _concatenated(node: Node) -> dict[int, Node]:
    """The matrices of a concatenation; {} if its parts are not single matrices."""
    stacked = node.value is None and node.attributes["axis"] == 0
    return dict(enumerate(node.inputs)) if stacked and all(x.shape[0] == 1 for x in node.inputs) else {}


def _padded(node: Node) -> dict[int, Node]:
    """The matrices of a sum of padded matrices, as gradients are; without indices that occur twice."""
    matrices = defaultdict[int, list[Node]](list)
    terms = [node]
    while terms:
        term = terms.pop()
        if term.value is None and term.primitive is PRIMITIVES["add"]:
            terms += term.inputs
            continue
        index = _row(term, term) if term.value is None and term.primitive is PAD else None
        if index is None:
            return {}
        matrices[index].append(term.inputs[0])
    return {index: nodes[0] for index, nodes in matrices.items() if len(nodes) == 1}
