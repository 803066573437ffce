"""Orders, look-ups and sets. Results whose shape depends on values go through the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.graph import reducing
from penstock.tensor.arguments import of_tensor
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor, axes_of, from_numpy, record
from penstock.tensor.manipulation import take_along_axis
from penstock.tensor.operands import Array, as_tensors


@of_tensor
def argsort(x: Tensor, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """The order that sorts the items along an axis; equal ones keep theirs."""
    _check_order("argsort", x)
    (place,) = axes_of(x, axis, "argsort")
    return record(reducing.argsort(x._node, place, descending), x)


@of_tensor
@composite
def sort(x: Tensor, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """The items in order along an axis."""
    _check_order("sort", x)
    axes_of(x, axis, "sort")
    return take_along_axis(x, argsort(x, axis=axis, descending=descending), axis=axis)


def _check_order(name: str, x: Tensor) -> None:
    if x.dtype.kind not in "biuf":
        raise TypeError(f"{name} does not take {x.dtype}")


def searchsorted(x1: Array, x2: Array, /, *, side: str = "left", sorter: Array | None = None) -> Tensor:
    """Where the items of `x2` would stand in the sorted `x1`."""
    if side not in ("left", "right"):
        raise ValueError(f"side is 'left' or 'right', and {side!r} was given")
    x1, x2 = as_tensors("searchsorted", x1, x2)
    order = None if sorter is None else np.asarray(sorter)
    found = np.searchsorted(x1.numpy(), x2.numpy(), side, order)  # type: ignore[call-overload]
    return from_numpy(np.asarray(found, np.int64), x1.device)


@of_tensor
def nonzero(x: Tensor, /) -> tuple[Tensor, ...]:
    """The places of the items that are not 0, an array of numbers for each axis."""
    if not x.ndim:
        raise ValueError("nonzero needs an axis")
    return tuple(from_numpy(found.astype(np.int64), x.device) for found in np.nonzero(x.numpy()))


class UniqueAll(NamedTuple):
    """What `unique_all` finds."""

    values: Tensor
    indices: Tensor
    inverse_indices: Tensor
    counts: Tensor


class UniqueCounts(NamedTuple):
    """What `unique_counts` finds."""

    values: Tensor
    counts: Tensor


class UniqueInverse(NamedTuple):
    """What `unique_inverse` finds."""

    values: Tensor
    inverse_indices: Tensor


@of_tensor
def unique_all(x: Tensor, /) -> UniqueAll:
    """The distinct values, their first places, which one each item is, and how often each is there."""
    found: Any = np.unique_all(x.numpy())
    parts = [from_numpy(np.asarray(part), x.device) for part in found]
    return UniqueAll(*parts)


@of_tensor
def unique_counts(x: Tensor, /) -> UniqueCounts:
    """The distinct values, and how often each is there."""
    found = unique_all(x)
    return UniqueCounts(found.values, found.counts)


@of_tensor
def unique_inverse(x: Tensor, /) -> UniqueInverse:
    """The distinct values, and which one each item is."""
    found = unique_all(x)
    return UniqueInverse(found.values, found.inverse_indices)


@of_tensor
def unique_values(x: Tensor, /) -> Tensor:
    """The distinct values."""
    return unique_all(x).values
