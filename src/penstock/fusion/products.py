"""Matrix products by a BLAS library: which products it computes, and the layouts of their operands.

The library expects matrices in column-major order, with a leading dimension. A row-major matrix is the
transpose of a column-major matrix, so the library computes transposed(right) @ transposed(left), which is the
transposed product.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

from penstock.drivers.driver import Capabilities
from penstock.fusion.index import ZERO, variable
from penstock.fusion.views import operand_index
from penstock.graph.dtypes import HALF_PRECISION, bfloat16, float16, float32, float64
from penstock.graph.elementwise import CAST
from penstock.graph.node import Kind, Node, rewrite

LIBRARY_DTYPES = (bfloat16, float16, float32, float64)
# Multiplications up to which a generated kernel is faster, measured on an H200. For square matrices of 64,
# 128 and 256 rows it takes 1.9, 3.7 and 24.5 us in float32, and the library with a map after it 4.7, 6.0 and
# 8.5; in bfloat16 2.1, 3.6 and 24.3 us, and the library 3.5, 4.0 and 4.2. The map takes 1.2 us of these.
_SMALL = {float32: 1 << 21, float16: 1 << 20, bfloat16: 1 << 20, float64: 0}


def by_library(product: Node, capabilities: Capabilities) -> bool:
    """Whether a device's library computes a product. Small products are faster in generated kernels."""
    if product.primitive.few_rows:
        return False
    if not capabilities.matmul_library or product.dtype not in LIBRARY_DTYPES:
        return False
    return product.size * product.inputs[0].shape[-1] > _SMALL[product.dtype]


def read_as_stored(wanted: Sequence[Node], capabilities: Capabilities) -> list[Node]:
    """For each node one with the same value; argmax and argmin of a library's product read no wider copy.

    A cast to a wider dtype keeps the order. What a generated kernel computes it need not round before.
    """

    def narrow(node: Node) -> Node:
        if node.primitive.kind is not Kind.ARG_REDUCTION:
            return node
        wide = node.inputs[0]
        if wide.primitive is not CAST or wide.value is not None or wide.dtype not in (float32, float64):
            return node
        given = wide.inputs[0]
        stored = given.primitive.kind is Kind.CONTRACTION and given.value is None
        if not stored or given.dtype not in HALF_PRECISION or not by_library(given, capabilities):
            return node
        return Node(node.primitive, (given,), node.attributes)

    return rewrite(wanted, narrow)


@dataclass(frozen=True)
class Matrix:
    """A column-major matrix in memory: columns of `rows` contiguous items, `leading` items apart."""

    rows: int
    columns: int
    leading: int
    transposed: bool  # whether the library has to transpose it for the product
    batch_stride: int  # items between successive matrices of a batch; 0: they are the same
    offset: int  # items before the first

    @property
    def extent(self) -> int:
        """The items from the start of the memory to the end of the first matrix."""
        return self.offset + (self.columns - 1) * self.leading + self.rows


def laid_out(
    rows: int, columns: int, row_stride: int, column_stride: int, batch_stride: int = 0, offset: int = 0
) -> Matrix | None:
    """The layout of an operand of `rows` x `columns`; None if it is contiguous along neither axis.

    The stride of an axis of length 1 is ignored.
    """
    by_rows = (column_stride == 1 or columns == 1) and (rows == 1 or row_stride >= columns)
    by_columns = (row_stride == 1 or rows == 1) and (columns == 1 or column_stride >= rows)
    if by_rows and (columns >= rows or not by_columns):
        return Matrix(columns, rows, row_stride if rows > 1 else columns, False, batch_stride, offset)
    if by_columns:
        return Matrix(rows, columns, column_stride if columns > 1 else rows, True, batch_stride, offset)
    return None


def batch_stride(lengths: Sequence[int], factors: Sequence[int]) -> int | None:
    """The stride of all batch axes taken together as a single axis; None if there is none."""
    after = [math.prod(lengths[axis + 1 :]) for axis in range(len(lengths))]
    long = [axis for axis, length in enumerate(lengths) if length > 1]
    stride = factors[long[-1]] // after[long[-1]] if long else 0
    return stride if all(factors[axis] == stride * after[axis] for axis in long) else None


def library_operand(operand: Node, stored: Container[Node]) -> tuple[Node, Matrix] | None:
    """The value below an operand's views, and the operand's layout there; None if it has to be copied.

    Views in `stored` are in memory, so they are not looked through.
    """
    in_place = operand_index(operand, stored)
    if in_place is None:
        return None
    node, index = in_place
    lengths = operand.shape[:-2]
    stride = batch_stride(lengths, [index.factor(f"b{axis}") for axis in range(len(lengths))])
    if stride is None or stride < 0:
        return None
    rows, columns = operand.shape[-2:]
    matrix = laid_out(rows, columns, index.factor("i"), index.factor("j"), stride, index.constant)
    return None if matrix is None else (node, matrix)


def bias_vector(operand: Node, columns: int, stored: Container[Node]) -> Node | None:
    """The vector of `columns` items that an operand broadcasts along all axes but the last, if it does."""
    if operand.ndim < 2 or operand.shape[-1] != columns:
        return None
    in_place = operand_index(operand, stored)
    if in_place is None or in_place[0].size != columns:
        return None
    node, index = in_place
    return node if index == (variable("j") if columns > 1 else ZERO) else None
