"""Making tensors: from values, from nothing, from sequences."""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.graph import elementwise, reducing, shaping
from penstock.graph.creating import sequence
from penstock.graph.node import DType
from penstock.runtime import Device
from penstock.tensor import dtypes
from penstock.tensor.arguments import integer, of_tensor, shape_of
from penstock.tensor.core import Scalar, Tensor, broadcast, from_numpy, record, resolve
from penstock.tensor.dlpack import imported
from penstock.tensor.operands import Array, as_number, as_tensors, fitted, note_constant

Where = Device | str | None


def asarray(
    obj: Any, /, *, dtype: DType | None = None, device: Where = None, copy: bool | None = None
) -> Tensor:
    """A tensor with the values of `obj`: a number, nested sequences, a NumPy array, a tensor, or DLPack's."""
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
    """Nested sequences in which tensors of one value stand for their values."""
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
    """A tensor with the values of any array that speaks DLPack."""
    if isinstance(x, Tensor):
        return asarray(x, device=device, copy=copy)
    if copy is False:
        raise ValueError("values of another library's arrays can only be taken over as a copy")
    return from_numpy(np.array(imported(x)), resolve(device))


def full(
    shape: int | Sequence[int], fill_value: Scalar, *, dtype: DType | None = None, device: Where = None
) -> Tensor:
    """One number everywhere."""
    fill_value = as_number(fill_value)
    found = dtypes.of_scalar(fill_value, None) if dtype is None else dtypes.checked(dtype)
    number = fitted(fill_value, found, "full")
    return Tensor(elementwise.full(shape_of(shape, "full"), found, number), resolve(device))


def zeros(shape: int | Sequence[int], *, dtype: DType | None = None, device: Where = None) -> Tensor:
    """0 everywhere."""
    return full(shape, 0, dtype=dtype or dtypes.float32, device=device)


def ones(shape: int | Sequence[int], *, dtype: DType | None = None, device: Where = None) -> Tensor:
    """1 everywhere."""
    return full(shape, 1, dtype=dtype or dtypes.float32, device=device)


def empty(shape: int | Sequence[int], *, dtype: DType | None = None, device: Where = None) -> Tensor:
    """Any values; they are 0."""
    return zeros(shape, dtype=dtype, device=device)


@of_tensor
def full_like(
    x: Tensor, /, fill_value: Scalar, *, dtype: DType | None = None, device: Where = None
) -> Tensor:
    """One number in the shape of `x`."""
    return full(x.shape, fill_value, dtype=dtype or x.dtype, device=device or x.device)


@of_tensor
def zeros_like(x: Tensor, /, *, dtype: DType | None = None, device: Where = None) -> Tensor:
    """0 in the shape of `x`."""
    return full_like(x, 0, dtype=dtype, device=device)


@of_tensor
def ones_like(x: Tensor, /, *, dtype: DType | None = None, device: Where = None) -> Tensor:
    """1 in the shape of `x`."""
    return full_like(x, 1, dtype=dtype, device=device)


@of_tensor
def empty_like(x: Tensor, /, *, dtype: DType | None = None, device: Where = None) -> Tensor:
    """Any values in the shape of `x`; they are 0."""
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
    """The numbers from `start` (0 if only the end is given) to before `stop`, at distance `step`."""
    start, stop, step = (as_number(number) for number in (start, stop, step))
    for number in (start, step, 0 if stop is None else stop):
        if not isinstance(number, (int, float)) or not math.isfinite(number):
            raise TypeError(f"arange takes finite real numbers, and {number!r} was given")
    first, end = (0, start) if stop is None else (start, stop)
    if step == 0:
        raise ValueError("the step of arange cannot be 0")
    whole = builtins.all(isinstance(number, int) for number in (first, end, step))
    found = (dtypes.int64 if whole else dtypes.float32) if dtype is None else dtypes.checked(dtype)
    count = builtins.max(math.ceil((end - first) / step), 0)
    for number in (first, first + (count - 1) * step) if count else ():
        fitted(number, found, "arange")
    return Tensor(sequence(first, step, count, found), resolve(device))


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
    """`num` numbers at equal distances from `start` to `stop`."""
    num = integer(num, "linspace", "num")
    start, stop = as_number(start), as_number(stop)
    if num < 0:
        raise ValueError(f"linspace makes no {num} numbers")
    complex_ends = isinstance(start, complex) or isinstance(stop, complex)
    found = dtypes.checked(dtype or (dtypes.complex64 if complex_ends else dtypes.float32))
    for number in (start, stop) if num else ():
        fitted(number, found, "linspace")
    return from_numpy(np.linspace(start, stop, num, endpoint=endpoint).astype(found), resolve(device))


def eye(
    n_rows: int,
    n_cols: int | None = None,
    /,
    *,
    k: int = 0,
    dtype: DType | None = None,
    device: Where = None,
) -> Tensor:
    """1 on the k-th diagonal, 0 elsewhere."""
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
def tril(x: Tensor, /, *, k: int = 0) -> Tensor:
    """The items on and under the k-th diagonal, 0 elsewhere."""
    return _kept(x, elementwise.less_equal, k, "tril")


@of_tensor
def triu(x: Tensor, /, *, k: int = 0) -> Tensor:
    """The items on and over the k-th diagonal, 0 elsewhere."""
    return _kept(x, elementwise.greater_equal, k, "triu")


def meshgrid(*arrays: Array, indexing: str = "xy") -> list[Tensor]:
    """Grids of coordinates, one for each array of them."""
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
