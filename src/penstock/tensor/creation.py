"""Creation of tensors: from values, constants and sequences."""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from penstock.graph import elementwise, reducing, shaping
from penstock.graph.creating import sequence
from penstock.graph.node import DType
from penstock.runtime import Device
from penstock.tensor import dtypes
from penstock.tensor.arguments import integer, of_tensor, shape_of
from penstock.tensor.broadcasting import broadcast
from penstock.tensor.composite import composite
from penstock.tensor.core import Scalar, Tensor, from_numpy, record, resolve
from penstock.tensor.dlpack import imported
from penstock.tensor.operands import as_number, as_tensors, fitted, note_constant

Where: TypeAlias = Device | str | None


def asarray(
    obj: Any, /, *, dtype: DType | None = None, device: Where = None, copy: bool | None = None
) -> Tensor:
    """A tensor with the values of `obj`: a number, nested sequences, a NumPy array, a tensor, or DLPack's.

    By default, Python numbers become bool, int64, float32 or complex64, and arrays keep their dtype.

    >>> ps.asarray([[1, 2], [3, 4]], dtype=ps.float32).tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    """
    if isinstance(obj, Tensor):
        return _from_tensor(obj, dtype, device, copy)
    if copy is False:
        raise ValueError("only a tensor can be used without a copy")
    wanted = None if dtype is None else dtypes.checked(dtype)
    if hasattr(obj, "__dlpack__") and not isinstance(obj, (np.ndarray, np.generic)):
        array = imported(obj)
    elif isinstance(obj, (np.ndarray, np.generic)):
        array = np.asarray(obj)
    else:
        array = np.asarray(_plain(obj), None if wanted is None else wanted.numpy)
        if wanted is None:
            wanted = {"f": dtypes.float32, "c": dtypes.complex64, "i": dtypes.int64}.get(array.dtype.kind)
    if array is obj:
        note_constant(array)
    return from_numpy(array if wanted is None else array.astype(wanted), resolve(device))


def _plain(obj: Any) -> Any:
    """Nested sequences with the values of tensors inside them."""
    if isinstance(obj, (list, tuple)):
        return [_plain(item) for item in obj]
    return obj.numpy() if isinstance(obj, Tensor) else obj


def _from_tensor(x: Tensor, dtype: DType | None, device: Where, copy: bool | None) -> Tensor:
    result = x if device is None else x.to_device(device)
    if dtype is not None and dtypes.checked(dtype) != x.dtype:
        if copy is False:
            raise ValueError(f"{x.dtype} cannot become {dtype} without a copy")
        return record(elementwise.cast(result._node, dtypes.checked(dtype)), result)
    return record(result._node, result) if copy else result


def from_dlpack(x: Any, /, *, device: Where = None, copy: bool | None = None) -> Tensor:
    """A tensor with a copy of the values of any array that supports DLPack.

    >>> ps.from_dlpack(np.arange(3)).tolist()
    [0, 1, 2]
    """
    if isinstance(x, Tensor):
        return asarray(x, device=device, copy=copy)
    if copy is False:
        raise ValueError("values of another library's arrays can only be taken over as a copy")
    return from_numpy(np.array(imported(x)), resolve(device))


def full(
    shape: int | Sequence[int], fill_value: Scalar, *, dtype: DType | None = None, device: Where = None
) -> Tensor:
    """A tensor filled with a number; by default in the dtype of the number.

    >>> ps.full((2, 2), 7).tolist()
    [[7, 7], [7, 7]]
    """
    fill_value = as_number(fill_value)
    resolved = dtypes.of_scalar(fill_value, None) if dtype is None else dtypes.checked(dtype)
    number = fitted(fill_value, resolved, "full")
    return Tensor(elementwise.full(shape_of(shape, "full"), resolved, number), resolve(device))


def zeros(shape: int | Sequence[int], *, dtype: DType | None = None, device: Where = None) -> Tensor:
    """A tensor of zeros; float32 by default.

    >>> ps.zeros((2, 2)).tolist()
    [[0.0, 0.0], [0.0, 0.0]]
    """
    return full(shape, 0, dtype=dtype or dtypes.float32, device=device)


def ones(shape: int | Sequence[int], *, dtype: DType | None = None, device: Where = None) -> Tensor:
    """A tensor of ones; float32 by default.

    >>> ps.ones((2, 2)).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    return full(shape, 1, dtype=dtype or dtypes.float32, device=device)


def empty(shape: int | Sequence[int], *, dtype: DType | None = None, device: Where = None) -> Tensor:
    """A tensor of unspecified values; float32 by default.

    >>> ps.empty((2, 3)).shape
    (2, 3)
    """
    return zeros(shape, dtype=dtype, device=device)


@of_tensor
def full_like(
    x: Tensor, /, fill_value: Scalar, *, dtype: DType | None = None, device: Where = None
) -> Tensor:
    """A number in the shape of `x`, and in its dtype and device by default.

    >>> ps.full_like(ps.zeros(2), 7).tolist()
    [7.0, 7.0]
    """
    return full(x.shape, fill_value, dtype=dtype or x.dtype, device=device or x.device)


@of_tensor
def zeros_like(x: Tensor, /, *, dtype: DType | None = None, device: Where = None) -> Tensor:
    """Zeros in the shape of `x`, and in its dtype and device by default.

    >>> ps.zeros_like(ps.ones(2)).tolist()
    [0.0, 0.0]
    """
    return full_like(x, 0, dtype=dtype, device=device)


@of_tensor
def ones_like(x: Tensor, /, *, dtype: DType | None = None, device: Where = None) -> Tensor:
    """Ones in the shape of `x`, and in its dtype and device by default.

    >>> ps.ones_like(ps.zeros(2)).tolist()
    [1.0, 1.0]
    """
    return full_like(x, 1, dtype=dtype, device=device)


@of_tensor
def empty_like(x: Tensor, /, *, dtype: DType | None = None, device: Where = None) -> Tensor:
    """Unspecified values in the shape of `x`, and in its dtype and device by default.

    >>> ps.empty_like(ps.zeros((2, 3))).shape
    (2, 3)
    """
    return zeros_like(x, dtype=dtype, device=device)


def arange(
    start: float,
    /,
    stop: float | None = None,
    step: float = 1,
    *,
    dtype: DType | None = None,
    device: Where = None,
) -> Tensor:
    """The numbers from `start` up to, but not including, `stop`, at distance `step`.

    `arange(n)` counts from 0 to n - 1. By default int64 if all arguments are integers, float32 otherwise.
    """
    start, stop, step = (as_number(number) for number in (start, stop, step))
    for number in (start, step, 0 if stop is None else stop):
        if not isinstance(number, (int, float)) or not math.isfinite(number):
            raise TypeError(f"arange takes finite real numbers, and {number!r} was given")
    first, end = (0, start) if stop is None else (start, stop)
    if step == 0:
        raise ValueError("the step of arange cannot be 0")
    integral = builtins.all(isinstance(number, int) for number in (first, end, step))
    resolved = (dtypes.int64 if integral else dtypes.float32) if dtype is None else dtypes.checked(dtype)
    count = builtins.max(math.ceil((end - first) / step), 0)
    for number in (first, first + (count - 1) * step) if count else ():
        fitted(number, resolved, "arange")
    return Tensor(sequence(first, step, count, resolved), resolve(device))


def linspace(
    start: Scalar,
    stop: Scalar,
    /,
    num: int,
    *,
    dtype: DType | None = None,
    device: Where = None,
    endpoint: bool = True,
) -> Tensor:
    """`num` numbers at equal distances from `start` to `stop`, which is the last if `endpoint`.

    >>> ps.linspace(0, 1, 3).tolist()
    [0.0, 0.5, 1.0]
    """
    num = integer(num, "linspace", "num")
    start, stop = as_number(start), as_number(stop)
    if num < 0:
        raise ValueError(f"linspace: num cannot be negative, and {num} was given")
    complex_ends = isinstance(start, complex) or isinstance(stop, complex)
    resolved = dtypes.checked(dtype or (dtypes.complex64 if complex_ends else dtypes.float32))
    for number in (start, stop) if num else ():
        fitted(number, resolved, "linspace")
    return from_numpy(np.linspace(start, stop, num, endpoint=endpoint).astype(resolved), resolve(device))


def eye(
    n_rows: int,
    n_cols: int | None = None,
    /,
    *,
    k: int = 0,
    dtype: DType | None = None,
    device: Where = None,
) -> Tensor:
    """1 on the k-th diagonal, 0 elsewhere.

    >>> ps.eye(2).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    rows, columns = shape_of((n_rows, n_rows if n_cols is None else n_cols), "eye")
    k = integer(k, "eye", "k")
    return from_numpy(np.eye(rows, columns, k, dtypes.checked(dtype or dtypes.float32)), resolve(device))


def _kept(x: Tensor, compare: Any, k: int, name: str) -> Tensor:
    if x.ndim < 2:
        raise ValueError(f"{name} needs two axes, and the shape is {x.shape}")
    rows, columns = (sequence(0, 1, length, dtypes.int64) for length in (x.shape[-2], x.shape[-1]))
    shape = x.shape[-2:]
    row = reducing.expand(shaping.reshape(rows, (shape[0], 1)), shape)
    column = reducing.expand(shaping.reshape(columns, (1, shape[1])), shape)
    inside = compare(column, elementwise.add(row, elementwise.like(row, k)))
    mask = broadcast(Tensor(inside, x.device), x.shape)
    return record(elementwise.where(mask._node, x._node, elementwise.like(x._node, 0)), x)


@of_tensor
def tril(x: Tensor, /, k: int = 0) -> Tensor:
    """The items on and below the k-th diagonal, 0 elsewhere.

    >>> ps.tril(ps.ones((2, 2))).tolist()
    [[1.0, 0.0], [1.0, 1.0]]
    """
    return _lower(x) if k == 0 else _kept(x, elementwise.less_equal, k, "tril")


@of_tensor
def triu(x: Tensor, /, k: int = 0) -> Tensor:
    """The items on and above the k-th diagonal, 0 elsewhere.

    >>> ps.triu(ps.ones((2, 2))).tolist()
    [[1.0, 1.0], [0.0, 1.0]]
    """
    return _upper(x) if k == 0 else _kept(x, elementwise.greater_equal, k, "triu")


@composite  # for the main diagonal alone: others would each be a program
def _lower(x: Tensor) -> Tensor:
    return _kept(x, elementwise.less_equal, 0, "tril")


@composite
def _upper(x: Tensor) -> Tensor:
    return _kept(x, elementwise.greater_equal, 0, "triu")


def meshgrid(*arrays: Any, indexing: str = "xy") -> list[Tensor]:
    """Grids of coordinates, one for each array; the arrays may be given as a list.

    >>> [grid.shape for grid in ps.meshgrid(ps.arange(3), ps.arange(2))]
    [(2, 3), (2, 3)]
    """
    first = arrays[0] if len(arrays) == 1 else None
    if isinstance(first, (list, tuple)) and first and all(isinstance(part, Tensor) for part in first):
        arrays = tuple(first)
    if indexing not in ("xy", "ij"):
        raise ValueError(f"indexing is 'xy' or 'ij', and {indexing!r} was given")
    tensors = as_tensors("meshgrid", *arrays) if arrays else []
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ValueError("meshgrid takes arrays of one dtype")
    swap = indexing == "xy" and len(tensors) > 1
    order = [1, 0, *range(2, len(tensors))] if swap else list(range(len(tensors)))
    shape = tuple(tensors[axis].size for axis in order)
    grids = []
    for position, tensor in enumerate(tensors):
        lengths = tuple(tensor.size if axis == position else 1 for axis in order)
        grids.append(broadcast(record(shaping.reshape(tensor._node, lengths), tensor), shape))
    return grids
