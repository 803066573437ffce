"""The pass that turns products of a matrix and a vector into elementwise products and a sum.

Such a sum reads the matrix once, at the bandwidth of memory, and can be fused with other operations.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.graph.contraction import MATMUL, float32_operand
from penstock.graph.dtypes import HALF_PRECISION
from penstock.graph.elementwise import cast, multiply
from penstock.graph.node import Node, rewrite
from penstock.graph.reducing import expand, sum_
from penstock.graph.shaping import PERMUTE, permute, reshape


def vectors_as_sums(outputs: Sequence[Node]) -> list[Node]:
    """For each output a node with the same value, in a graph without products with vectors."""
    return rewrite(outputs, lambda node: _as_sum(*node.inputs) if _is_with_vector(node) else node)


def _is_with_vector(node: Node) -> bool:
    return node.primitive is MATMUL and node.dtype.kind == "f" and node.ndim == 2 and 1 in node.shape


def _as_sum(x: Node, y: Node) -> Node:
    dtype, shape = x.dtype, (x.shape[0], y.shape[1])
    if dtype in HALF_PRECISION:  # as in a matmul, nothing is rounded before the sum
        x, y = float32_operand(x), float32_operand(y)
    matrix, vector, axis = (x, _transposed(y), 1) if shape[1] == 1 else (_transposed(y), x, 1)
    if matrix.primitive is PERMUTE and matrix.value is None:  # read the matrix in the order of its memory
        matrix, vector, axis = _transposed(matrix), _transposed(vector), 0
    products = multiply(matrix, expand(vector, matrix.shape))
    total = products if products.shape[axis] == 1 else sum_(products, (axis,))
    return reshape(total if total.dtype is dtype else cast(total, dtype), shape)


def _transposed(x: Node) -> Node:
    """The transpose of a matrix; that of a transpose is the original."""
    return x.inputs[0] if x.primitive is PERMUTE and x.value is None else permute(x, (1, 0))
