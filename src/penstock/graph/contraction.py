"""Matrix products, gather and scatter."""

from __future__ import annotations

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.graph.dtypes import HALF_PRECISION, bfloat16, float32
from penstock.graph.elementwise import cast, greater_equal, like, logical_and, where
from penstock.graph.node import Array, DType, Kind, Node, Primitive, Rounding, Shape
from penstock.graph.reducing import BLOCK, expand
from penstock.graph.shaping import PERMUTE, permute, reshape

FEW_ROWS = 3  # or columns of a product that a CPU computes as dot products
_PART = 4096  # the longest sum that NumPy's matmul computes; longer sums are added up in parts


def _matmul_shape(x: Node, y: Node, order: tuple[int, ...] = ()) -> tuple[Shape, DType]:
    """`order`: how a CPU adds up the sums, where that is given (see `Problem`)."""
    assert x.ndim == y.ndim >= 2
    assert x.shape[:-2] == y.shape[:-2]
    assert x.shape[-1] == y.shape[-2]
    return (*x.shape[:-1], y.shape[-1]), x.dtype


def _scatter_reference(values: Array, index: Array, length: int) -> Array:
    if values.dtype in HALF_PRECISION:
        return _scatter_reference(values.astype(np.float32), index, length).astype(values.dtype)
    inside = (index >= 0) & (index < length)
    return _added_rows(values[inside], index[inside].astype(np.intp), length)


def _added_rows(values: Array, index: Array, length: int) -> Array:
    """Sums of rows by index. Many rows with the same index are added up in levels, for accuracy."""
    result = np.zeros((length, *values.shape[1:]), values.dtype)
    if values.dtype.kind in "fc" and index.size > BLOCK:
        counts = np.bincount(index, minlength=length)
        if counts.max() > BLOCK:
            order = np.argsort(index, kind="stable")
            rows = index[order]
            begins = (np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]) % BLOCK == 0
            parts = _added_rows(values[order], np.cumsum(begins) - 1, int(begins.sum()))
            return _added_rows(parts, rows[begins], length)
    np.add.at(result, index, values)
    return result


def _matmul_reference(x: Array, y: Array) -> Array:
    """In parts along the contracted axis, for accuracy."""
    length = x.shape[-1]
    if length <= _PART or x.dtype.kind not in "fc":
        return np.asarray(np.matmul(x, y))
    result = np.zeros((*x.shape[:-1], y.shape[-1]), x.dtype)
    for start in range(0, length, _PART):
        result += np.matmul(x[..., start : start + _PART], y[..., start : start + _PART, :])
    return result


def matmul(x: Node, y: Node) -> Node:
    """Products of the matrices in the last two axes; the batch axes before them are equal."""
    return Node(MATMUL, (x, y), {})


def gather(x: Node, index: Node) -> Node:
    """The rows `x[index]`; indices out of range are clipped. `bounds` checks them."""
    return Node(GATHER, (x, index), {})


def scatter_add(values: Node, index: Node, length: int) -> Node:
    """`length` rows of zeros, with `values[i]` added to row `index[i]` for every i, in order.

    Values whose index is out of range are dropped.
    """
    return Node(SCATTER_ADD, (values, index), {"length": length})


def put_rows(x: Node, rows: Node, index: Node) -> Node:
    """`x` with `rows[i]` in the place of row `index[i]`; the indices inside `x` differ from each other.

    Rows whose index is out of range are dropped. Where the memory of `x` is free to be overwritten, only the
    rows are written.
    """
    return Node(PUT_ROWS, (x, rows, index), {})


def _put_shape(x: Node, rows: Node, index: Node) -> tuple[Shape, DType]:
    assert rows.shape == (*index.shape, *x.shape[1:])
    assert rows.dtype == x.dtype
    assert index.ndim == 1
    return x.shape, x.dtype


def _put_reference(x: Array, rows: Array, index: Array) -> Array:
    inside = (index >= 0) & (index < len(x))
    result = x.copy()
    result[index[inside].astype(np.intp)] = rows[inside]
    return result


def _put_gradients(g: Node, node: Node) -> tuple[Node, Node, None]:
    """The slots that were written pass nothing to what they held, and all to the rows."""
    x, rows, index = node.inputs
    count, rest = index.shape[0], tuple(rows.shape[1:])
    inside = logical_and(
        greater_equal(index, like(index, 0)), greater_equal(like(index, x.shape[0] - 1), index)
    )
    kept = expand(reshape(inside, (count, *(1,) * len(rest))), rows.shape)
    return put_rows(g, like(rows, 0), index), where(kept, gather(g, index), like(rows, 0)), None


def _transposed(x: Node) -> Node:
    return permute(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def _in_float32(node: Node, capabilities: Capabilities) -> Node | None:
    """Where no library multiplies bfloat16, many rows are multiplied with a float32 copy of the matrix.

    A CPU reads the matrix of few rows once, and makes it float32 in registers.
    """
    right = node.inputs[1]
    while right.primitive.is_identity and right.value is None:
        right = right.inputs[0]
    few = capabilities.vector_width > 1 and min(node.shape[-2:]) <= FEW_ROWS
    in_place = few and right.primitive is PERMUTE and right.value is None
    if node.dtype is not bfloat16 or capabilities.matmul_library or in_place:
        return None
    return cast(matmul(*(float32_operand(operand) for operand in node.inputs)), bfloat16)


def float32_operand(operand: Node) -> Node:
    """A matrix operand in float32. It is cast before it is transposed, so that products with the matrix and
    with its transpose, as in a gradient, share the cast."""
    if operand.primitive.is_identity and operand.value is None:
        return float32_operand(operand.inputs[0])
    if operand.primitive is PERMUTE and operand.value is None:
        return permute(float32_operand(operand.inputs[0]), operand.attributes["axes"])
    return cast(operand, float32)


MATMUL = Primitive(
    "matmul",
    Kind.CONTRACTION,
    _matmul_shape,
    _matmul_reference,
    lambda g, n: (matmul(g, _transposed(n.inputs[1])), matmul(_transposed(n.inputs[0]), g)),
    operations=lambda n: 2 * n.size * n.inputs[0].shape[-1],
    decompose=_in_float32,
)
GATHER = Primitive(
    "gather",
    Kind.GATHER,
    lambda x, index: ((*index.shape, *x.shape[1:]), x.dtype),
    lambda x, index, out=None: np.take(x, index, axis=0, out=out, mode="clip"),
    lambda g, n: (scatter_add(g, n.inputs[1], n.inputs[0].shape[0]), None),
    weight=1,
    takes_out=True,
)
SCATTER_ADD = Primitive(
    "scatter_add",
    Kind.SCATTER,
    lambda values, index, length: ((length, *values.shape[index.ndim :]), values.dtype),
    _scatter_reference,
    lambda g, n: (gather(g, n.inputs[1]), None),
    weight=4,
)
PUT_ROWS = Primitive(
    "put_rows",
    Kind.UPDATE,
    _put_shape,
    _put_reference,
    _put_gradients,
    operations=lambda n: 0,
    rounding=Rounding.EXACT,
    as_stored=True,
)
