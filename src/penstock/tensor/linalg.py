"""Linear algebra: the `linalg` extension of the array API standard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from penstock.graph import host
from penstock.graph.node import DType
from penstock.tensor import dtypes
from penstock.tensor import products as _products
from penstock.tensor import selecting as _selecting
from penstock.tensor.arguments import integer, of_tensor
from penstock.tensor.arithmetic import (
    abs as abs_,
)
from penstock.tensor.arithmetic import (
    equal,
    greater,
    multiply,
    not_equal,
    sqrt,
    square,
    subtract,
    where,
)
from penstock.tensor.arithmetic import pow as pow_
from penstock.tensor.broadcasting import axes_of, broadcast
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor
from penstock.tensor.creation import eye
from penstock.tensor.decompositions import (
    check_matrices,
    cholesky,
    det,
    eigh,
    eigvalsh,
    inv,
    pinv,
    qr,
    relative_tolerance,
    slogdet,
    solve,
    svd,
    svdvals,
)
from penstock.tensor.linear import matmul, tensordot, vecdot
from penstock.tensor.manipulation import (
    astype,
    expand_dims,
    matrix_transpose,
    moveaxis,
    reshape,
    stack,
)
from penstock.tensor.operands import Array, as_tensors
from penstock.tensor.reduction import max as max_
from penstock.tensor.reduction import min as min_
from penstock.tensor.reduction import narrowed, widened
from penstock.tensor.reduction import sum as sum_
from penstock.tensor.spelling import spelled

__all__ = [
    "cholesky",
    "cross",
    "det",
    "diagonal",
    "eigh",
    "eigvalsh",
    "inv",
    "matmul",
    "matrix_norm",
    "matrix_power",
    "matrix_rank",
    "matrix_transpose",
    "norm",
    "outer",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "svd",
    "svdvals",
    "tensordot",
    "trace",
    "vecdot",
    "vector_norm",
]


@of_tensor
def matrix_rank(x: Tensor, /, *, rtol: Any = None) -> Tensor:
    """The ranks of matrices: how many singular values exceed `rtol` times the greatest.

    >>> ps.linalg.matrix_rank(ps.ones((3, 3))).item()
    1
    """
    check_matrices("matrix_rank", x)
    s = svdvals(x.detach())
    if not s.shape[-1]:
        return sum_(astype(s, dtypes.int64), axis=-1)
    limit = multiply(max_(s, axis=-1, keepdims=True), expand_dims(relative_tolerance(x, rtol), -1))
    return sum_(astype(greater(s, limit), dtypes.int64), axis=-1)


@of_tensor
def matrix_power(x: Tensor, n: int, /) -> Tensor:
    """The `n`-th power of square matrices; of their inverses if `n` is negative.

    >>> ps.linalg.matrix_power(ps.asarray([[2.0, 0.0], [0.0, 3.0]]), 2).tolist()
    [[4.0, 0.0], [0.0, 9.0]]
    """
    check_matrices("matrix_power", x, square_=True)
    n = integer(n, "linalg.matrix_power", "n")
    base, left = (inv(x), -n) if n < 0 else (astype(x, x.dtype), n)
    result: Tensor | None = None
    while left:
        if left & 1:
            result = base if result is None else matmul(result, base)
        left >>= 1
        base = matmul(base, base) if left else base
    return broadcast(eye(x.shape[-1], dtype=x.dtype, device=x.device), x.shape) if result is None else result


# Diagonals, products of vectors, norms


@of_tensor
def diagonal(x: Tensor, /, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """The diagonals of the matrices in the last two axes, or in the axes `dim1` and `dim2`.

    >>> ps.linalg.diagonal(ps.asarray([[1, 2], [3, 4]])).tolist()
    [1, 4]
    """
    if x.ndim < 2:
        raise ValueError(f"linalg.diagonal takes matrices, and the shape is {x.shape}")
    return _selecting.diagonal(x, offset, dim1, dim2)


@of_tensor
def trace(x: Tensor, /, *, offset: int = 0, dtype: DType | None = None) -> Tensor:
    """The sums of the diagonals of the matrices in the last two axes.

    >>> ps.linalg.trace(ps.asarray([[1, 2], [3, 4]])).item()
    5
    """
    return sum_(diagonal(x, offset=offset), axis=-1, dtype=dtype)


def outer(x1: Array, x2: Array, /) -> Tensor:
    """All products of an item of one vector and an item of another.

    >>> ps.linalg.outer(ps.asarray([1, 2]), ps.asarray([3, 4])).tolist()
    [[3, 4], [6, 8]]
    """
    return _products.outer(x1, x2)


def cross(x1: Array, x2: Array, /, *, axis: int = -1) -> Tensor:
    """The cross products of vectors of three items along an axis.

    >>> ps.linalg.cross(ps.asarray([1, 0, 0]), ps.asarray([0, 1, 0])).tolist()
    [0, 0, 1]
    """
    x1, x2 = as_tensors("linalg.cross", x1, x2)
    return _cross(x1, x2, axis)


@composite
def _cross(x1: Tensor, x2: Tensor, axis: int) -> Tensor:
    for x in (x1, x2):
        if x.shape[axes_of(x, axis, "linalg.cross")[0]] != 3:
            raise ValueError(f"linalg.cross takes vectors of three items, and the shape is {x.shape}")
    a, b = (moveaxis(x, axis, -1) for x in (x1, x2))
    parts = [
        subtract(multiply(a[..., i], b[..., j]), multiply(a[..., j], b[..., i]))
        for i, j in ((1, 2), (2, 0), (0, 1))
    ]
    return moveaxis(stack(parts, axis=-1), -1, axis)


Axis = int | Sequence[int] | None


@of_tensor
def vector_norm(
    x: Tensor, /, ord: float = 2, axis: Axis = None, keepdims: bool = False, *, dtype: DType | None = None
) -> Tensor:
    """The norm of vectors: the sum of the absolute values to the power `ord`, to the power `1 / ord`.

    At 0, where norms have no derivative, the gradient is 0.

    >>> ps.linalg.vector_norm(ps.asarray([3.0, 4.0])).item()
    5.0
    """
    norm = _usual_norm if ord in _USUAL_ORDERS else _vector_norm
    return norm(x, ord, axis, keepdims, dtype)


def _vector_norm(x: Tensor, ord: float, axis: Axis, keepdims: bool, dtype: DType | None) -> Tensor:
    x = x if dtype is None else astype(x, dtype)
    if x.dtype.kind not in "fc":
        raise TypeError(f"linalg.vector_norm takes floating point, and {x.dtype} was given")
    axes = axes_of(x, axis, "linalg.vector_norm")
    sizes = widened(abs_(x))
    real_dtype = host.real_of(x.dtype)
    if ord in (math.inf, -math.inf):
        if not axes:
            return narrowed(sizes, real_dtype)
        return narrowed((max_ if ord > 0 else min_)(sizes, axis=axes, keepdims=keepdims), real_dtype)
    if ord == 0:
        return sum_(astype(not_equal(sizes, 0.0), real_dtype), axis=axes, keepdims=keepdims)
    if ord == 1:
        return narrowed(sum_(sizes, axis=axes, keepdims=keepdims), real_dtype)
    is_zero = equal(sizes, 0.0)
    if ord == 2:
        total = sum_(square(sizes), axis=axes, keepdims=keepdims)
    else:
        powers = pow_(where(is_zero, 1.0, sizes), float(ord))
        total = sum_(where(is_zero, 0.0 if ord > 0 else math.inf, powers), axis=axes, keepdims=keepdims)
    zero_norm = equal(total, 0.0)
    root = where(zero_norm, 1.0, total)
    root = sqrt(root) if ord == 2 else pow_(root, 1 / float(ord))
    return narrowed(where(zero_norm, 0.0 if ord > 0 else math.inf, root), real_dtype)


_USUAL_ORDERS = (0, 1, 2, math.inf, -math.inf)  # each of which has a program of its own
_usual_norm = composite(_vector_norm)


@of_tensor
def matrix_norm(
    x: Tensor,
    /,
    ord: float | str | None = "fro",
    axis: Sequence[int] = (-2, -1),
    keepdims: bool = False,
    *,
    dtype: DType | None = None,
) -> Tensor:
    """The norm of matrices. 'fro' is that of all items as a vector, 'nuc' the sum of the singular values.

    The greatest (with a minus sign the least) singular value is 2, sum of a column 1, sum of a row inf.

    >>> ps.linalg.matrix_norm(ps.asarray([[3.0, 0.0], [0.0, 4.0]])).item()
    5.0
    """
    check_matrices("matrix_norm", x)
    x = x if dtype is None else astype(x, dtype)
    if tuple(axis) != (-2, -1):
        return _matrices(x, axis, keepdims, ord)
    if ord in (None, "fro"):
        return vector_norm(x, axis=(-2, -1), keepdims=keepdims)
    if ord in ("nuc", 2, -2):
        s = svdvals(x)
        result = sum_(s, axis=-1) if ord == "nuc" else (max_ if ord == 2 else min_)(s, axis=-1)
    elif ord in (1, -1, math.inf, -math.inf):
        sums = sum_(abs_(x), axis=-2 if abs(ord) == 1 else -1)
        result = (max_ if ord > 0 else min_)(sums, axis=-1)
    else:
        raise ValueError(f"linalg.matrix_norm has no ord={ord!r}; fro, nuc, 1, 2, inf, -1, -2, -inf")
    return reshape(result, (*result.shape, 1, 1)) if keepdims else result


@of_tensor
def norm(
    x: Tensor,
    /,
    ord: float | str | None = None,
    axis: Axis = None,
    keepdims: bool = False,
    *,
    dtype: DType | None = None,
) -> Tensor:
    """The norm of vectors, by default of all items; of matrices if `ord` is given for two axes.

    >>> ps.linalg.norm(ps.asarray([3.0, 4.0])).item()
    5.0
    """
    given = x if dtype is None else astype(x, dtype)
    axes = axes_of(given, axis, "linalg.norm")
    if isinstance(ord, str) or (ord is not None and len(axes) == 2):
        return _matrices(given, axes if isinstance(ord, str) else axis, keepdims, ord)
    return vector_norm(given, axis=axis, keepdims=keepdims, ord=2 if ord is None else ord)


def _matrices(x: Tensor, axis: Any, keepdims: bool, ord: float | str | None) -> Tensor:
    pair = [axes_of(x, given, "norm")[0] for given in (range(x.ndim) if axis is None else axis)]
    if len(pair) != 2 or pair[0] == pair[1]:
        raise ValueError(f"norm: {ord!r} is for two axes, and {axis} was given for shape {x.shape}")
    result = matrix_norm(moveaxis(x, pair, (-2, -1)), keepdims=keepdims, ord=ord)
    return moveaxis(result, (-2, -1), pair) if keepdims else result


@of_tensor
def torch_norm(
    x: Tensor,
    /,
    p: float | str | None = "fro",
    axis: Axis = None,
    keepdims: bool = False,
    *,
    dtype: DType | None = None,
) -> Tensor:
    """PyTorch's `norm`: the vector norm over axes, by default of all items; 'nuc' is for matrices.

    >>> ps.norm(ps.asarray([3.0, 4.0])).item()
    5.0
    """
    given = x if dtype is None else astype(x, dtype)
    if p == "nuc":
        return _matrices(given, axis, keepdims, p)
    if isinstance(p, str) and p != "fro":
        raise ValueError(f"norm: p is a number, 'fro' or 'nuc', and {p!r} was given")
    order = 2.0 if p is None or isinstance(p, str) else p
    return vector_norm(given, axis=axis, keepdims=keepdims, ord=order)


for _name in __all__:  # accept PyTorch's keywords as well
    globals()[_name] = spelled(globals()[_name])
