"""Sorting, searching and sets. NumPy computes results whose shape depends on values."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.graph import reducing
from penstock.tensor.arguments import of_tensor
from penstock.tensor.broadcasting import axes_of
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor, from_numpy, record
from penstock.tensor.manipulation import take_along_axis
from penstock.tensor.operands import Array, as_tensors
from penstock.tensor.recording import recording


@of_tensor
def argsort(x: Tensor, /, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """The indices that sort the items along an axis; equal items keep their order.

    >>> ps.argsort(ps.asarray([3, 1, 2])).tolist()
    [1, 2, 0]
    """
    _check_order("argsort", x)
    (position,) = axes_of(x, axis, "argsort")
    return record(reducing.argsort(x._node, position, descending), x)


def top(x: Tensor, axis: int, descending: bool, count: int) -> Tensor:
    """The first of the indices that sort the items along an axis."""
    _check_order("topk", x)
    return record(reducing.top(x._node, axis, descending, count), x)


@of_tensor
@composite
def sort(x: Tensor, /, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """The sorted items along an axis."""
    _check_order("sort", x)
    (position,) = axes_of(x, axis, "sort")
    if not (x.requires_grad and recording()):
        return record(reducing.sort(x._node, position, descending), x)
    return take_along_axis(x, argsort(x, axis=axis, descending=descending), axis=axis)


def _check_order(name: str, x: Tensor) -> None:
    if x.dtype.kind not in "biuf":
        raise TypeError(f"{name} does not take {x.dtype}")


def searchsorted(
    x1: Array,
    x2: Array,
    /,
    *,
    side: str | None = None,
    sorter: Array | None = None,
    right: bool = False,
    out_int32: bool = False,
) -> Tensor:
    """The indices at which the items of `x2` would be inserted into the sorted vector `x1`.

    `right=True` is PyTorch's name of side='right'.

    >>> ps.searchsorted(ps.asarray([1, 3, 5]), ps.asarray([2, 5])).tolist()
    [1, 2]
    """
    if right and side == "left":
        raise ValueError("searchsorted: right=True and side='left' were given")
    side = side or ("right" if right else "left")
    if side not in ("left", "right"):
        raise ValueError(f"side is 'left' or 'right', and {side!r} was given")
    x1, x2 = as_tensors("searchsorted", x1, x2)
    if x1.ndim != 1:
        raise ValueError(f"searchsorted takes a sorted vector, and the shape is {x1.shape}")
    order = None if sorter is None else as_tensors("searchsorted", x1, sorter)[1].numpy()
    indices = np.searchsorted(x1.numpy(), x2.numpy(), side, order)  # type: ignore[call-overload]
    return from_numpy(np.asarray(indices, np.int32 if out_int32 else np.int64), x1.device)


@of_tensor
def nonzero(x: Tensor, /) -> tuple[Tensor, ...]:
    """The indices of the items that are not 0, as a tensor for each axis."""
    if not x.ndim:
        raise ValueError("nonzero needs an axis")
    return tuple(from_numpy(indices.astype(np.int64), x.device) for indices in np.nonzero(x.numpy()))


class UniqueAll(NamedTuple):
    """The result of `unique_all`."""

    values: Tensor
    indices: Tensor
    inverse_indices: Tensor
    counts: Tensor


class UniqueCounts(NamedTuple):
    """The result of `unique_counts`."""

    values: Tensor
    counts: Tensor


class UniqueInverse(NamedTuple):
    """The result of `unique_inverse`."""

    values: Tensor
    inverse_indices: Tensor


@of_tensor
def unique_all(x: Tensor, /) -> UniqueAll:
    """The distinct values, their first indices, the position of each item among them, and their counts.

    >>> [part.tolist() for part in ps.unique_all(ps.asarray([3, 1, 3]))]
    [[1, 3], [1, 0], [1, 0, 1], [1, 2]]
    """
    result: Any = np.unique_all(x.numpy())
    parts = [from_numpy(np.asarray(part), x.device) for part in result]
    return UniqueAll(*parts)


@of_tensor
def unique_counts(x: Tensor, /) -> UniqueCounts:
    """The distinct values, and their counts.

    >>> [part.tolist() for part in ps.unique_counts(ps.asarray([3, 1, 3]))]
    [[1, 3], [1, 2]]
    """
    result = unique_all(x)
    return UniqueCounts(result.values, result.counts)


@of_tensor
def unique_inverse(x: Tensor, /) -> UniqueInverse:
    """The distinct values, and the position of each item among them.

    >>> [part.tolist() for part in ps.unique_inverse(ps.asarray([3, 1, 3]))]
    [[1, 3], [1, 0, 1]]
    """
    result = unique_all(x)
    return UniqueInverse(result.values, result.inverse_indices)


@of_tensor
def unique_values(x: Tensor, /) -> Tensor:
    """The distinct values.

    >>> ps.unique_values(ps.asarray([3, 1, 3])).tolist()
    [1, 3]
    """
    return unique_all(x).values
