"""Products of vectors, matrices and tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.graph import contraction, elementwise
from penstock.tensor import dtypes
from penstock.tensor.arithmetic import conj, multiply
from penstock.tensor.broadcasting import axes_of, broadcast, common_shape
from penstock.tensor.capture import capture
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor, install, record
from penstock.tensor.manipulation import expand_dims, moveaxis, permute_dims, reshape, squeeze, stack
from penstock.tensor.operands import Array, as_tensors, values_only
from penstock.tensor.reduction import narrowed, widened
from penstock.tensor.reduction import sum as sum_
from penstock.tensor.repeated import again


def matmul(x1: Array, x2: Array, /) -> Tensor:
    """The matrix product over the last two axes; a vector is a row on the left, a column on the right.

    >>> ps.matmul(ps.asarray([[1, 2], [3, 4]]), ps.asarray([1, 1])).tolist()
    [3, 7]
    """
    if isinstance(x1, Tensor) and isinstance(x2, Tensor):
        if not (x1._actual_requires_grad or x2._actual_requires_grad):
            repeated = again(_matmul, x1, x2)
            if repeated is not None:
                return repeated
            if values_only(x1, x2):
                return _matmul_of_values(x1, x2)
        a, b = x1._node, x2._node
        matrices = len(a.shape) == len(b.shape) == 2 and a.shape[1] == b.shape[0]
        if matrices and a.dtype is b.dtype and a.dtype.kind in "iufc":
            return record(contraction.matmul(a, b), x1, x2)
    return _matmul_of_values(x1, x2)


def _matmul(x1: Array, x2: Array) -> Tensor:
    """The product of tensors of any dtypes and numbers of axes."""
    x1, x2 = as_tensors("matmul", x1, x2)
    for x in (x1, x2):
        if x.dtype.kind not in "iufc":
            raise TypeError(f"matmul does not take {x.dtype}")
        if not x.ndim:
            raise ValueError("matmul needs tensors with an axis")
    a = expand_dims(x1, axis=0) if x1.ndim == 1 else x1
    b = expand_dims(x2, axis=1) if x2.ndim == 1 else x2
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"matmul: shapes {x1.shape} and {x2.shape} do not fit together")
    if b.ndim == 2 and a.ndim > 2:
        # A single product with more rows: b is not repeated, and its gradient needs no sum over batches.
        rows = matmul(reshape(a, (math.prod(a.shape[:-1]), a.shape[-1])), b)
        result = reshape(rows, (*a.shape[:-1], b.shape[-1]))
        return squeeze(result, -1) if x2.ndim == 1 else result
    dtype = dtypes.promote(a.dtype, b.dtype)
    batch = common_shape(a.shape[:-2], b.shape[:-2])
    a, b = broadcast(a, batch + a.shape[-2:]), broadcast(b, batch + b.shape[-2:])
    result = record(contraction.matmul(*(elementwise.cast(x._node, dtype) for x in (a, b))), a, b)
    if x1.ndim == 1:
        result = squeeze(result, -2)
    return squeeze(result, -1) if x2.ndim == 1 else result


_matmul_of_values = composite(_matmul)


def matmul_batch(lefts: Sequence[Tensor], rights: Sequence[Tensor], /) -> list[Tensor]:
    """The products of independent pairs of matrices, `lefts[i] @ rights[i]`.

    Pairs of equal shapes are stacked and computed by one launch; inside a jitted function, a CPU needs no
    copies for that. Outside of a jitted function they are computed immediately, so that reading one result
    does not recompute the others. For matrices in one tensor, `matmul` does the same.

    >>> a, b = ps.matmul_batch([ps.zeros((2, 3)), ps.zeros((4, 5))], [ps.zeros((3, 1)), ps.zeros((5, 6))])
    >>> a.shape, b.shape
    ((2, 1), (4, 6))
    """
    if len(lefts) != len(rights):
        raise ValueError(f"matmul_batch takes pairs, and {len(lefts)} and {len(rights)} matrices were given")
    alike: dict[tuple[Any, ...], list[int]] = {}
    for position, matrices in enumerate(zip(lefts, rights, strict=True)):
        for x in matrices:
            if not isinstance(x, Tensor) or x.ndim != 2:
                given = f"shape {x.shape}" if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"matmul_batch takes matrices, and {given} was given in pair {position}")
        key = tuple((x.shape, x.dtype, x.device) for x in matrices)
        alike.setdefault(key, []).append(position)
    results: dict[int, Tensor] = {}
    for pairs in alike.values():
        left, right = [lefts[pair] for pair in pairs], [rights[pair] for pair in pairs]
        if len(pairs) == 1:
            results[pairs[0]] = matmul(left[0], right[0])
            continue
        product = matmul(stack(left), stack(right))
        if capture.get() is None:
            product.realize()
        results.update((pair, product[index]) for index, pair in enumerate(pairs))
    return [results[pair] for pair in range(len(lefts))]


def vecdot(x1: Array, x2: Array, /, axis: int = -1) -> Tensor:
    """The dot products of vectors along an axis; complex numbers of the first are conjugated.

    >>> ps.vecdot(ps.asarray([1, 2]), ps.asarray([3, 4])).item()
    11
    """
    x1, x2 = as_tensors("vecdot", x1, x2)
    return _vecdot(x1, x2, axis)


@composite
def _vecdot(x1: Tensor, x2: Tensor, axis: int) -> Tensor:
    if x1.dtype.kind not in "iufc" or x2.dtype.kind not in "iufc":
        raise TypeError(f"vecdot does not take {x1.dtype} and {x2.dtype}")
    (first,), (second,) = axes_of(x1, axis, "vecdot"), axes_of(x2, axis, "vecdot")
    if x1.shape[first] != x2.shape[second]:
        raise ValueError(f"vecdot: shapes {x1.shape} and {x2.shape} differ along axis {axis}")
    a, b = moveaxis(x1, first, -1), moveaxis(x2, second, -1)
    wide = widened(a)
    product = multiply(conj(wide) if wide.dtype.kind == "c" else wide, widened(b))
    return narrowed(sum_(product, axis=-1, dtype=product.dtype), dtypes.promote(x1.dtype, x2.dtype))


def tensordot(x1: Array, x2: Array, /, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Tensor:
    """The sum of products over the last `axes` axes of x1 and the first of x2, or over lists of axes.

    >>> ps.linalg.tensordot(ps.zeros((2, 3, 4)), ps.zeros((4, 5)), axes=1).shape
    (2, 3, 5)
    """
    x1, x2 = as_tensors("tensordot", x1, x2)
    return _tensordot(x1, x2, axes)


@composite
def _tensordot(x1: Tensor, x2: Tensor, axes: int | tuple[Sequence[int], Sequence[int]]) -> Tensor:
    if isinstance(axes, int):
        if not 0 <= axes <= min(x1.ndim, x2.ndim):
            raise ValueError(f"tensordot: shapes {x1.shape} and {x2.shape} have no {axes} axes to sum over")
        left, right = list(range(x1.ndim - axes, x1.ndim)), list(range(axes))
    else:
        left, right = (
            [axes_of(x, axis, "tensordot")[0] for axis in given]
            for x, given in zip((x1, x2), axes, strict=True)
        )
    if [x1.shape[a] for a in left] != [x2.shape[b] for b in right]:
        raise ValueError(f"tensordot: axes {axes} of shapes {x1.shape} and {x2.shape} differ in length")
    rows = [a for a in range(x1.ndim) if a not in left]
    columns = [b for b in range(x2.ndim) if b not in right]
    inner = math.prod(x1.shape[a] for a in left)
    a = reshape(permute_dims(x1, rows + left), (math.prod(x1.shape[i] for i in rows), inner))
    b = reshape(permute_dims(x2, right + columns), (inner, math.prod(x2.shape[i] for i in columns)))
    return reshape(matmul(a, b), [x1.shape[i] for i in rows] + [x2.shape[i] for i in columns])


def _matmul_operator(self: Tensor, other: Any) -> Any:
    return matmul(self, other) if isinstance(other, _OPERANDS) else NotImplemented


def _reflected_matmul(self: Tensor, other: Any) -> Any:
    return matmul(other, self) if isinstance(other, _OPERANDS) else NotImplemented


def _in_place_matmul(self: Tensor, other: Any) -> Any:
    if not isinstance(other, _OPERANDS):
        return NotImplemented
    self._rebind(matmul(self, other))
    return self


_OPERANDS = (Tensor, np.ndarray)
install("__matmul__", _matmul_operator)
install("__rmatmul__", _reflected_matmul)
install("__imatmul__", _in_place_matmul)
