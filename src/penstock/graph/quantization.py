"""Products with matrices of packed integers, which have a scale for each group along the contracted axis.

A packed matrix of N rows and K columns is N x K * bits / 32 words. Integers are stored with 2^(bits - 1)
added, so that none is negative. A word has four integers of 8 bits, the first in its lowest bits, or eight of
4 bits: the even ones in the lower half, and the odd ones in the upper, so that a mask gives neighbours as
pairs of 16 bits. The scales are N x groups.
"""

from __future__ import annotations

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.graph.checkpoint import BARRIER
from penstock.graph.contraction import matmul
from penstock.graph.creating import sequence
from penstock.graph.dtypes import HALF_PRECISION, bfloat16, float16, float32, uint32
from penstock.graph.elementwise import (
    add,
    bitwise_and,
    bitwise_right_shift,
    cast,
    like,
    multiply,
    subtract,
    widened,
)
from penstock.graph.node import Array, DType, Kind, Node, Primitive, Shape
from penstock.graph.reducing import expand
from penstock.graph.shaping import permute, reshape

WORD_BITS = 32
SHIFTS = {4: (0, 16, 4, 20, 8, 24, 12, 28), 8: (0, 8, 16, 24)}  # of the integers of a word, by their bits
# Rows of the other operand up to which kernels unpack integers in registers. For more rows the matrix is
# unpacked to memory once: a product of many rows takes longer than that.
MOST_ROWS = 16
MOST_TENSOR_ROWS = 32  # the same, for kernels that multiply on tensor cores
# Of a product that computes its row: with more features, each of many workgroups would wait for the row.
_MOST_FEATURES = 128  # for each compute unit
_MOST_INPUTS = 4096  # so that threads have few of them each
_SUM_BYTES = 256
_KERNEL_DTYPES = (float32, float16, bfloat16)


def packed_matmul(x: Node, words: Node, scales: Node) -> Node:
    """`x @ unpacked(words, scales).T`, in the dtype of `x`; sums are float32 where `x` is no wider."""
    return Node(PACKED_MATMUL, (x, words, scales), {})


def bits_of(columns: int, words: Shape) -> int:
    """The bits of the integers in the words of a matrix with so many columns."""
    return WORD_BITS * words[1] // columns


def unpacked(words: Node, scales: Node, columns: int, dtype: DType) -> Node:
    """The matrix that words and scales stand for, rounded to a dtype."""
    (rows, count), groups = words.shape, scales.shape[1]
    bits = bits_of(columns, words.shape)
    shape = (rows, count, len(SHIFTS[bits]))
    spread = expand(reshape(words, (rows, count, 1)), shape)
    lowest = bitwise_right_shift(spread, expand(reshape(_shifts(bits), (1, 1, shape[2])), shape))
    numbers = cast(bitwise_and(lowest, like(lowest, 2**bits - 1)), float32)
    numbers = subtract(numbers, like(numbers, 2.0 ** (bits - 1)))
    grouped = reshape(numbers, (rows, groups, columns // groups))
    scale = expand(reshape(widened(scales), (rows, groups, 1)), grouped.shape)
    return reshape(cast(multiply(cast(grouped, scale.dtype), scale), dtype), (rows, columns))


def _shifts(bits: int) -> Node:
    """The shifts of a word's integers."""
    place = sequence(0, 1, len(SHIFTS[bits]), uint32)
    twice = add(place, place)
    if bits == 4:  # an odd integer is 16 bits after the one before it
        return add(twice, multiply(bitwise_and(place, like(place, 1)), like(place, 14)))
    times_four = add(twice, twice)
    return add(times_four, times_four)


def _shape(x: Node, words: Node, scales: Node) -> tuple[Shape, DType]:
    assert x.ndim == words.ndim == scales.ndim == 2
    assert words.dtype is uint32
    assert words.shape[0] == scales.shape[0]
    assert bits_of(x.shape[1], words.shape) in (4, 8)
    assert x.shape[1] % scales.shape[1] == 0
    return (x.shape[0], words.shape[0]), x.dtype


def _reference(x: Array, words: Array, scales: Array) -> Array:
    columns = x.shape[1]
    bits = bits_of(columns, words.shape)
    shifts = np.array(SHIFTS[bits], np.uint32)
    numbers = (words[:, :, None] >> shifts & np.uint32(2**bits - 1)).astype(x.dtype) - 2 ** (bits - 1)
    grouped = numbers.reshape(*scales.shape, columns // scales.shape[1])
    matrix = (grouped * scales[:, :, None].astype(x.dtype)).reshape(len(words), columns)
    return np.asarray(x @ matrix.T)


def _gradients(g: Node, n: Node) -> tuple[Node, None, None]:
    """Of the first operand only. The matrix is unpacked anew, rather than kept from the forward pass."""
    x, words, scales = n.inputs
    again = Node(BARRIER, (words, g), {})
    return matmul(g, unpacked(again, scales, x.shape[1], g.dtype)), None, None


def on_tensor_cores(node: Node, capabilities: Capabilities) -> bool:
    """Whether tensor cores compute a product of few rows."""
    x, _, scales = node.inputs
    return capabilities.tensor_cores and x.dtype in HALF_PRECISION and x.dtype is scales.dtype


def computes_row(node: Node, capabilities: Capabilities) -> bool:
    """Whether the kernel of a product may compute the row that it multiplies, in every workgroup."""
    if node.primitive is not PACKED_MATMUL or not on_tensor_cores(node, capabilities):
        return False
    x, words, *_ = node.inputs
    few = words.shape[0] <= _MOST_FEATURES * capabilities.compute_units
    return few and x.shape[0] == 1 and x.shape[1] <= _MOST_INPUTS


def _many_rows(node: Node, capabilities: Capabilities) -> Node | None:
    """A product with the unpacked matrix in memory."""
    x, words, scales = node.inputs
    few = 0 < x.shape[0] <= (MOST_TENSOR_ROWS if on_tensor_cores(node, capabilities) else MOST_ROWS)
    # A CPU lays a row out in local memory, and with up to four items one more, beside a few sums.
    fits = capabilities.vector_width == 1 or 5 * x.shape[1] + _SUM_BYTES <= capabilities.local_bytes
    in_dtypes = x.dtype in _KERNEL_DTYPES and scales.dtype in _KERNEL_DTYPES
    if not capabilities.compiles or (few and fits and in_dtypes):
        return None
    return matmul(x, permute(unpacked(words, scales, x.shape[1], x.dtype), (1, 0)))


PACKED_MATMUL = Primitive(
    "packed_matmul",
    Kind.CONTRACTION,
    _shape,
    _reference,
    _gradients,
    operations=lambda n: 2 * n.size * n.inputs[0].shape[-1],
    few_rows=True,
    decompose=_many_rows,
)
