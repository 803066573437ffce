"""PyTorch's gathers and scatters, masks and diagonals."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.errors import CaptureError
from penstock.graph import shaping
from penstock.graph.contraction import scatter_add as add_rows
from penstock.graph.windows import windows
from penstock.tensor import assigning, dtypes
from penstock.tensor.arguments import integer, of_tensor
from penstock.tensor.arithmetic import add, equal, multiply, where
from penstock.tensor.broadcasting import axes_of, broadcast, common_shape
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor, record
from penstock.tensor.creation import arange, full, ones
from penstock.tensor.indexing import assume_known, get, in_range, least_known
from penstock.tensor.manipulation import (
    astype,
    expand_dims,
    moveaxis,
    reshape,
    take,
    take_along_axis,
)
from penstock.tensor.operands import Array, as_tensors
from penstock.tensor.reduction import max as max_
from penstock.tensor.reduction import sum as sum_


def _check_index(name: str, index: Tensor) -> None:
    if index.dtype.kind not in "iu":
        raise TypeError(f"{name}: an index has integers, and {index.dtype} was given")


def _first_items(x: Tensor, index: Tensor, axis: int, name: str) -> Tensor:
    """The part of `x` that an index can reach: along other axes, the index may be shorter than `x`."""
    if x.ndim != index.ndim or any(a != axis and index.shape[a] > length for a, length in enumerate(x.shape)):
        raise ValueError(f"{name}: an index of shape {index.shape} does not fit shape {x.shape}")
    key = tuple(slice(None) if a == axis else slice(0, n) for a, n in enumerate(index.shape))
    return get(x, key)


def gather(x: Array, /, axis: int, index: Array) -> Tensor:
    """The items at `index` along an axis, in the shape of `index`.

    >>> ps.gather(ps.asarray([[5, 6], [7, 8]]), 1, ps.asarray([[1], [0]])).tolist()
    [[6], [7]]
    """
    x, index = as_tensors("gather", x, index)
    _check_index("gather", index)
    if not index.size:
        return full(index.shape, 0, dtype=x.dtype, device=x.device)
    if not x.ndim:
        return reshape(gather(reshape(x, 1), 0, reshape(index, -1)), index.shape)
    (axis,) = axes_of(x, axis, "gather")
    return take_along_axis(_first_items(x, index, axis, "gather"), index, axis=axis)


def take_along_dim(x: Array, /, indices: Array, axis: int | None = None) -> Tensor:
    """Like `gather`, but the other axes broadcast; without an axis, of the flattened tensors.

    >>> ps.take_along_dim(ps.asarray([[5, 6], [7, 8]]), ps.asarray([[1], [0]]), 1).tolist()
    [[6], [7]]
    """
    x, indices = as_tensors("take_along_dim", x, indices)
    if axis is None:
        return take_along_axis(reshape(x, -1), reshape(indices, -1), axis=0)
    return take_along_axis(x, indices, axis=axis)


def _positions(x: Tensor, index: Tensor, axis: int, name: str) -> Tensor:
    """The flat, row-major indices of the items of `x` at `index` along an axis."""
    return take_along_axis(_first_items(assigning.flat_indices(x), index, axis, name), index, axis=axis)


def _source(name: str, source: Any, index: Tensor, x: Tensor) -> Tensor:
    """The values for an index: of a tensor that may be larger than the index, or a number."""
    if not isinstance(source, (Tensor, np.ndarray)):
        return full(index.shape, source, dtype=x.dtype, device=x.device)
    _, source = as_tensors(name, x, source)
    if source.dtype != x.dtype:
        raise TypeError(f"{name}: values of {source.dtype} do not fit a tensor of {x.dtype}")
    if source.ndim != index.ndim or any(n > m for n, m in zip(index.shape, source.shape, strict=True)):
        raise ValueError(f"{name}: values of shape {source.shape} do not fit an index of shape {index.shape}")
    return get(source, tuple(slice(0, n) for n in index.shape))


def scatter(x: Array, /, axis: int, index: Array, src: Any) -> Tensor:
    """`x` with values of `src`, or a number, at `index` along an axis; the last value for an item wins.

    >>> ps.scatter(ps.zeros(3), 0, ps.asarray([2, 0]), ps.asarray([5.0, 6.0])).tolist()
    [6.0, 0.0, 5.0]
    """
    x, index = as_tensors("scatter", x, index)
    _check_index("scatter", index)
    if not x.ndim:
        return reshape(scatter(reshape(x, 1), 0, reshape(index, -1), _row(src)), ())
    (axis,) = axes_of(x, axis, "scatter")
    source = _source("scatter", src, index, x)
    return assigning.by_indices(x, _positions(x, index, axis, "scatter"), source, distinct=False)


def _row(src: Any) -> Any:
    return reshape(src, -1) if isinstance(src, Tensor) else src


def scatter_add(x: Array, /, axis: int, index: Array, src: Array) -> Tensor:
    """`x` with values of `src` added to the items at `index` along an axis.

    >>> ps.scatter_add(ps.zeros(3), 0, ps.asarray([2, 2]), ps.asarray([5.0, 6.0])).tolist()
    [0.0, 0.0, 11.0]
    """
    x, index = as_tensors("scatter_add", x, index)
    _check_index("scatter_add", index)
    if not x.ndim:
        return reshape(scatter_add(reshape(x, 1), 0, reshape(index, -1), _row(src)), ())
    (axis,) = axes_of(x, axis, "scatter_add")
    source = reshape(_source("scatter_add", src, index, x), -1)
    positions = reshape(_positions(x, index, axis, "scatter_add"), -1)
    return add(x, reshape(_sums(source, positions, x.size), x.shape))


def _sums(values: Tensor, index: Tensor, length: int) -> Tensor:
    return record(add_rows(values._node, index._node, length), values, index)


def index_select(x: Array, /, axis: int, index: Array) -> Tensor:
    """The slices at `index` along an axis.

    >>> ps.index_select(ps.asarray([[1, 2], [3, 4]]), 1, ps.asarray([1])).tolist()
    [[2], [4]]
    """
    x, index = as_tensors("index_select", x, index)
    _check_index("index_select", index)
    if not x.ndim:
        picked = take(reshape(x, 1), reshape(index, -1), axis=0)
        return reshape(picked, ()) if index.size == 1 else picked
    return take(x, index, axis=axis)


def index_add(x: Array, /, axis: int, index: Array, source: Array, *, alpha: float = 1) -> Tensor:
    """`x` with `alpha` times the slices of `source` added to its slices at `index` along an axis.

    >>> ps.index_add(ps.zeros(3), 0, ps.asarray([2, 2]), ps.asarray([5.0, 6.0])).tolist()
    [0.0, 0.0, 11.0]
    """
    x, index, source = as_tensors("index_add", x, index, source)
    _check_index("index_add", index)
    if not x.ndim:
        return reshape(index_add(reshape(x, 1), 0, reshape(index, -1), _row(source), alpha=alpha), ())
    (axis,) = axes_of(x, axis, "index_add")
    rows = moveaxis(source, axis, 0)
    rest = tuple(n for a, n in enumerate(x.shape) if a != axis)
    if index.ndim > 1 or rows.shape != (index.size, *rest):
        raise ValueError(
            f"index_add: values of shape {source.shape} and an index of shape {index.shape} do not fit "
            f"axis {axis} of shape {x.shape}"
        )
    rows_of = take(arange(x.shape[axis], device=x.device), reshape(index, -1), axis=0)
    total = _sums(astype(rows, x.dtype), rows_of, x.shape[axis])
    return add(x, multiply(moveaxis(total, 0, axis), alpha))


def masked_fill(x: Array, /, mask: Array, value: Any) -> Tensor:
    """`x` with a value where a mask is true.

    >>> ps.masked_fill(ps.asarray([1, 2]), ps.asarray([True, False]), 0).tolist()
    [0, 2]
    """
    x, mask = as_tensors("masked_fill", x, mask)
    if mask.dtype != dtypes.bool_:
        raise TypeError(f"masked_fill takes a mask of dtype bool, and {mask.dtype} was given")
    if isinstance(value, Tensor) and value.ndim:
        raise ValueError(f"masked_fill takes a single value, and shape {value.shape} was given; use where")
    return astype(where(mask, value, x), x.dtype)


def masked_select(x: Array, /, mask: Array) -> Tensor:
    """The items where a mask is true, as a vector; reads the mask, as the length depends on its values.

    >>> ps.masked_select(ps.asarray([1, 2]), ps.asarray([False, True])).tolist()
    [2]
    """
    x, mask = as_tensors("masked_select", x, mask)
    if mask.dtype != dtypes.bool_:
        raise TypeError(f"masked_select takes a mask of dtype bool, and {mask.dtype} was given")
    shape = common_shape(x.shape, mask.shape)
    return reshape(get(broadcast(x, shape), broadcast(mask, shape), "masked_select"), -1)


@of_tensor
def narrow(x: Tensor, /, axis: int, start: int | Tensor, length: int) -> Tensor:
    """`length` items of an axis from `start` on.

    >>> ps.narrow(ps.arange(5), 0, 1, 3).tolist()
    [1, 2, 3]
    """
    (axis,) = axes_of(x, axis, "narrow")
    length = integer(length, "narrow", "a length")
    first = integer(start, "narrow", "the start")
    first += x.shape[axis] if first < 0 else 0
    if not (first >= 0 and length >= 0 and first + length <= x.shape[axis]):
        raise IndexError(f"narrow: {length} items from {start} on are not in axis {axis} of shape {x.shape}")
    return get(x, (*[slice(None)] * axis, slice(first, first + length)))


@of_tensor
def one_hot(x: Tensor, /, num_classes: int = -1) -> Tensor:
    """A new last axis with 1 at the class of each item, 0 elsewhere; int64.

    With `num_classes` -1, the greatest item is the last class, and the items are read.

    >>> ps.one_hot(ps.asarray([2, 0]), 3).tolist()
    [[0, 0, 1], [1, 0, 0]]
    """
    _check_index("one_hot", x)
    count = integer(num_classes, "one_hot", "num_classes")
    if count == -1:
        count = 1 + int(_read("one_hot", max_(x), "give num_classes")) if x.size else 0
    if count < 1:
        raise ValueError(f"one_hot needs a class, and num_classes={num_classes} was given for {x.shape}")
    least = least_known(x, count)
    return (_one_hot if least is None or least < 0 else _one_hot_of_known)(x, count)


def _one_hot(x: Tensor, count: int) -> Tensor:
    classes = arange(count, device=x.device)
    known = record(in_range(x._node, (count,), 0, "one_hot", x.device), x)
    return astype(equal(expand_dims(known, -1), classes), dtypes.int64)


@composite
def _one_hot_of_known(x: Tensor, count: int) -> Tensor:
    assume_known(x, count)
    return _one_hot(x, count)


def _read(name: str, x: Tensor, instead: str) -> Any:
    """The value of a tensor that the shape of a result depends on."""
    try:
        return x.item()
    except CaptureError:
        raise CaptureError(
            f"{name}: the length of the result depends on values, which are not known inside a jitted "
            f"function; {instead}"
        ) from None


@of_tensor
def bincount(x: Tensor, /, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """The count of each integer from 0 to the greatest item, or the sum of its weights; reads the items.

    >>> ps.bincount(ps.asarray([0, 2, 2])).tolist()
    [1, 0, 2]
    """
    _check_index("bincount", x)
    if x.ndim != 1 or (weights is not None and weights.shape != x.shape):
        shapes = f"{x.shape}" if weights is None else f"{x.shape} and {weights.shape}"
        raise ValueError(f"bincount takes a vector of integers and as many weights, and {shapes} was given")
    least = integer(minlength, "bincount", "minlength")
    if least < 0:
        raise ValueError(f"bincount: minlength is 0 or more, and {least} was given")
    length = least
    if x.size:
        length = max(least, 1 + int(_read("bincount", max_(x), "use one_hot(x, n) and sum it")))
    values = ones(x.shape, dtype=dtypes.int64, device=x.device) if weights is None else weights
    if values.dtype.kind != "f" and weights is not None:
        values = astype(values, dtypes.float64)  # as PyTorch and NumPy do
    if not length or not x.size:
        return full((length,), 0, dtype=values.dtype, device=x.device)
    return _sums(values, record(in_range(x._node, (length,), 0, "bincount", x.device), x), length)


@of_tensor
@composite
def diagonal(x: Tensor, /, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """The diagonals of the matrices in two axes, as the last axis.

    >>> ps.diagonal(ps.asarray([[1, 2], [3, 4]])).tolist()
    [1, 4]
    """
    (first,), (second,) = axes_of(x, dim1, "diagonal"), axes_of(x, dim2, "diagonal")
    if first == second:
        raise ValueError(f"diagonal needs two axes, and {dim1} and {dim2} are the same axis")
    offset = integer(offset, "diagonal", "an offset")
    matrices = moveaxis(x, (first, second), (-2, -1))
    *batch, rows, columns = matrices.shape
    top, left = max(-offset, 0), max(offset, 0)
    count = max(min(rows - top, columns - left), 0)
    if not count:
        return reshape(get(matrices, (..., slice(0, 0), slice(0, 1))), (*batch, 0))
    # In the flattened matrix, the items of a diagonal are columns + 1 apart.
    flat = reshape(matrices, (*batch, rows * columns))
    start = top * columns + left
    stop = start + (count - 1) * (columns + 1) + 1
    return get(flat, (..., slice(start, stop, columns + 1)))


@of_tensor
def diag(x: Tensor, /, k: int = 0) -> Tensor:
    """The diagonal of a matrix, or a matrix with these items on its diagonal.

    >>> ps.diag(ps.asarray([1, 2])).tolist()
    [[1, 0], [0, 2]]
    """
    offset = integer(k, "diag", "a diagonal")
    if x.ndim == 2:
        return diagonal(x, offset)
    if x.ndim != 1:
        raise ValueError(f"diag takes a vector or a matrix, and the shape is {x.shape}")
    return diag_embed(x, offset)


@of_tensor
def diag_embed(x: Tensor, /, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """Matrices with the items of the last axis on a diagonal, 0 elsewhere, in axes `dim1` and `dim2`.

    >>> ps.diag_embed(ps.zeros((5, 3))).shape
    (5, 3, 3)
    """
    offset = integer(offset, "diag_embed", "an offset")
    if (dim1, dim2) != (-2, -1):
        return moveaxis(diag_embed(x, offset), (-2, -1), (dim1, dim2))
    *batch, count = x.shape
    side = count + abs(offset)
    start = max(offset, 0) + max(-offset, 0) * side
    slices = (*((0, n, 1) for n in batch), (start, count, side + 1))
    if not count:
        return full((*batch, side, side), 0, dtype=x.dtype, device=x.device)
    flat = shaping.pad(x._node, slices, (*batch, side * side))
    return record(shaping.reshape(flat, (*batch, side, side)), x)


@of_tensor
@composite
def trace(x: Tensor, /) -> Tensor:
    """The sum of the diagonal of a matrix.

    >>> ps.trace(ps.asarray([[1, 2], [3, 4]])).item()
    5
    """
    if x.ndim != 2:
        raise ValueError(f"trace takes a matrix, and the shape is {x.shape}; linalg.trace takes several")
    return sum_(diagonal(x))


@of_tensor
def unfold(x: Tensor, /, axis: int, size: int, step: int) -> Tensor:
    """Windows of `size` items along an axis, at distance `step`; the items of a window are the last axis."""
    size, step = integer(size, "unfold", "a size"), integer(step, "unfold", "a step")
    if not x.ndim:
        if axis not in (0, -1) or not 0 <= size <= 1 or step < 1:
            raise ValueError(f"unfold: a window of {size} items does not fit shape ()")
        return get(reshape(x, 1), slice(0, size))
    (axis,) = axes_of(x, axis, "unfold")
    if not 0 <= size <= x.shape[axis] or step < 1:
        raise ValueError(f"unfold: windows of {size} items at distance {step} do not fit shape {x.shape}")
    if not size:
        shape = [*x.shape, size]
        shape[axis] = (x.shape[axis] - size) // step + 1
        return full(shape, 0, dtype=x.dtype, device=x.device)
    return moveaxis(record(windows(x._node, axis, size, step), x), axis + 1, -1)
