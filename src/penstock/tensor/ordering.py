"""PyTorch's order statistics and scans: largest items, medians, quantiles, running extremes, counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from penstock.graph import reducing
from penstock.tensor import dtypes
from penstock.tensor.arguments import integer, of_tensor
from penstock.tensor.arithmetic import (
    add,
    bitwise_invert,
    divide,
    equal,
    exp,
    greater_equal,
    isinf,
    isnan,
    log,
    logical_or,
    minimum,
    multiply,
    negative,
    subtract,
    where,
)
from penstock.tensor.broadcasting import axes_of
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor, from_numpy, record
from penstock.tensor.creation import arange, asarray, linspace
from penstock.tensor.indexing import get
from penstock.tensor.manipulation import (
    astype,
    concat,
    expand_dims,
    moveaxis,
    reshape,
    squeeze,
    stack,
    take_along_axis,
)
from penstock.tensor.recording import recording
from penstock.tensor.reduction import any as any_
from penstock.tensor.reduction import argmax, argmin, narrowed, widened
from penstock.tensor.reduction import max as max_
from penstock.tensor.reduction import min as min_
from penstock.tensor.reduction import sum as sum_
from penstock.tensor.searching import argsort, nonzero, sort, top, unique_all

Axis = int | Sequence[int] | None
_PAIR = "this is a pair of values and indices, as in PyTorch; take .values, or ask by axis="


class Ordered(NamedTuple):
    """Values and their indices along an axis, as PyTorch returns them."""

    values: Tensor
    indices: Tensor

    def __mul__(self, _: Any) -> NoReturn:
        raise TypeError(_PAIR)

    def __rmul__(self, _: Any) -> NoReturn:
        raise TypeError(_PAIR)


class Histogram(NamedTuple):
    """The sums of the bins, and the edges between them."""

    hist: Tensor
    bin_edges: Tensor


def _kept(x: Tensor, axis: int, keepdim: bool) -> Tensor:
    return x if keepdim else squeeze(x, axis)


def _at(x: Tensor, axis: int, key: Any) -> Tensor:
    return get(x, (*[slice(None)] * axis, key))


def _single(function: Any, x: Tensor) -> Ordered:
    """Apply a function along an axis to a tensor without axes."""
    values, indices = function(reshape(x, 1))
    return Ordered(reshape(values, ()), reshape(indices, ()))


@of_tensor
def extreme(x: Tensor, /, axis: int, keepdim: bool = False, *, least: bool = False) -> Ordered:
    """The greatest or the least items along an axis, and their indices."""
    if not x.ndim:
        return _single(lambda x: extreme(x, axis, True, least=least), x)
    (axis,) = axes_of(x, axis, "min" if least else "max")
    indices = (argmin if least else argmax)(x, axis=axis, keepdims=keepdim)
    return Ordered(_extreme(x, axis, keepdim, least), indices)


@composite
def _extreme(x: Tensor, axis: int, keepdim: bool, least: bool) -> Tensor:
    indices = (argmin if least else argmax)(x, axis=axis, keepdims=True)
    return _kept(take_along_axis(x, indices, axis=axis), axis, keepdim)


@of_tensor
def sorted_pair(x: Tensor, /, axis: int = -1, descending: bool = False, stable: bool = True) -> Ordered:
    """The sorted items along an axis, and their indices; equal items keep their order."""
    if not x.ndim:
        return _single(lambda x: sorted_pair(x, axis), x)
    indices = argsort(x, axis=axis, descending=descending)
    return Ordered(take_along_axis(x, indices, axis=axis), indices)


@of_tensor
def topk(x: Tensor, /, k: int, axis: int = -1, largest: bool = True, sorted: bool = True) -> Ordered:
    """The `k` largest or smallest items along an axis, sorted, and their indices.

    >>> ps.topk(ps.asarray([3, 9, 4]), 2).values.tolist()
    [9, 4]
    """
    k = integer(k, "topk", "k")
    if not x.ndim:
        return _alone(x) if k == 1 else _refuse_count("topk", k, x, axis)
    (axis,) = axes_of(x, axis, "topk")
    if not 0 <= k <= x.shape[axis]:
        _refuse_count("topk", k, x, axis)
    return Ordered(_top_values(x, k, axis, largest), _top_indices(x, k, axis, largest))


@composite
def _top_values(x: Tensor, k: int, axis: int, largest: bool) -> Tensor:
    return take_along_axis(x, _top_indices(x, k, axis, largest), axis=axis)


@composite
def _top_indices(x: Tensor, k: int, axis: int, largest: bool) -> Tensor:
    return top(x, axis, largest, k)


def _alone(x: Tensor) -> Ordered:
    """The item of a tensor without axes, as a tensor of its own, and its index."""
    return Ordered(astype(x, x.dtype), asarray(0, dtype=dtypes.int64, device=x.device))


def _refuse_count(name: str, k: int, x: Tensor, axis: int) -> NoReturn:
    raise ValueError(f"{name}: k={k} is beyond axis {axis} of shape {x.shape}")


@of_tensor
def kthvalue(x: Tensor, /, k: int, axis: int = -1, keepdims: bool = False) -> Ordered:
    """The `k`-th smallest items along an axis, counted from 1, and their indices.

    >>> ps.kthvalue(ps.asarray([3, 9, 4]), 2).values.item()
    4
    """
    k = integer(k, "kthvalue", "k")
    if not x.ndim:
        return _single(lambda x: kthvalue(x, k, axis, True), x)
    (axis,) = axes_of(x, axis, "kthvalue")
    if not 1 <= k <= x.shape[axis]:
        _refuse_count("kthvalue", k, x, axis)
    indices = _at(argsort(x, axis=axis), axis, slice(k - 1, k))
    values = take_along_axis(x, indices, axis=axis)
    return Ordered(_kept(values, axis, keepdims), _kept(indices, axis, keepdims))


@of_tensor
def median(x: Tensor, /, dim: int | None = None, keepdim: bool = False) -> Any:
    """The median, of two middle items the lower; along an axis also its index. NaN if any item is NaN.

    >>> ps.median(ps.asarray([3, 9, 4])).item()
    4
    """
    if dim is None:
        if not x.size:
            raise ValueError(f"median of nothing: shape {x.shape}")
        return median(reshape(x, -1), 0).values
    if not x.ndim:
        return _alone(x)
    (axis,) = axes_of(x, dim, "median")
    if not x.shape[axis]:
        raise ValueError(f"median of nothing: shape {x.shape}, axis {dim}")
    order = argsort(x, axis=axis)
    middle = _at(order, axis, slice((x.shape[axis] - 1) // 2, (x.shape[axis] - 1) // 2 + 1))
    if x.dtype.kind == "f":
        is_nan = isnan(x)
        first_nan = argmax(astype(is_nan, dtypes.int8), axis=axis, keepdims=True)
        middle = where(any_(is_nan, axis=axis, keepdims=True), first_nan, middle)
    values = take_along_axis(x, middle, axis=axis)
    return Ordered(_kept(values, axis, keepdim), _kept(middle, axis, keepdim))


@of_tensor
def quantile(
    x: Tensor, /, q: Any, axis: int | None = None, keepdims: bool = False, *, interpolation: str = "linear"
) -> Tensor:
    """The `q`-quantiles, interpolated between items; an axis for several `q` comes first.

    >>> ps.quantile(ps.asarray([0.0, 1.0, 2.0]), 0.25).item()
    0.5
    """
    if x.dtype.kind != "f":
        raise TypeError(f"quantile does not take {x.dtype}")
    if isinstance(q, Tensor) and q.requires_grad and recording():
        raise TypeError("quantile has no gradient with respect to q; give q.detach()")
    if not x.ndim and axis is not None:  # PyTorch accepts axis 0 or -1 of a tensor without axes
        axes_of(reshape(x, 1), axis, "quantile")
        axis = None
    parts = np.asarray(q.numpy() if isinstance(q, Tensor) else q, np.float64)
    if parts.ndim > 1 or not np.all((parts >= 0) & (parts <= 1)):
        raise ValueError(f"quantile: q is a number, or several, from 0 to 1, and {q} was given")
    if interpolation not in ("linear", "lower", "higher", "nearest", "midpoint"):
        raise ValueError(
            f"quantile: {interpolation!r} is no interpolation; linear, lower, higher, nearest, midpoint"
        )
    rows = reshape(x, -1) if axis is None else moveaxis(x, axes_of(x, axis, "quantile")[0], -1)
    if not rows.shape[-1]:
        raise ValueError(f"quantile of nothing: shape {x.shape}, axis {axis}")
    ordered = sort(widened(rows))
    is_nan = any_(isnan(rows), axis=-1)
    values = [_between(ordered, float(part) * (rows.shape[-1] - 1), interpolation) for part in parts.ravel()]
    result = stack([where(is_nan, float("nan"), value) for value in values], axis=0)
    if keepdims:
        kept = [1] * x.ndim if axis is None else list(x.shape)
        if axis is not None:
            kept[axes_of(x, axis, "quantile")[0]] = 1
        result = reshape(result, (len(values), *kept))
    return narrowed(result if parts.ndim else result[0], x.dtype)


def _between(ordered: Tensor, position: float, interpolation: str) -> Tensor:
    low, high = int(np.floor(position)), int(np.ceil(position))
    part = {"linear": position - low, "lower": 0.0, "higher": 1.0, "midpoint": 0.5}.get(interpolation)
    if part is None:
        part = float(int(np.round(position)) - low)
    if low == high or not part:
        return ordered[..., low]
    below, above = ordered[..., low], ordered[..., high]
    return above if part == 1 else add(below, multiply(subtract(above, below), part))


# Scans


def _running(x: Tensor, axis: int) -> Tensor:
    return record(reducing.cumulative_max(x._node, axis), x)


@of_tensor
def cummax(x: Tensor, /, axis: int) -> Ordered:
    """The running maximum along an axis, and its indices; of equal items, the last.

    >>> ps.cummax(ps.asarray([1, 3, 2]), 0).values.tolist()
    [1, 3, 3]
    """
    return _cumulative(x, axis, "cummax")


@of_tensor
def cummin(x: Tensor, /, axis: int) -> Ordered:
    """The running minimum along an axis, and its indices; of equal items, the last.

    >>> ps.cummin(ps.asarray([3, 1, 2]), 0).values.tolist()
    [3, 1, 1]
    """
    return _cumulative(x, axis, "cummin")


def _cumulative(x: Tensor, axis: int, name: str) -> Ordered:
    if x.dtype.kind not in "iuf":
        raise TypeError(f"{name} does not take {x.dtype}")
    if not x.ndim:
        return _alone(x)
    (axis,) = axes_of(x, axis, name)
    plain = x.detach() if x.requires_grad else x
    keys = plain
    if name == "cummin":  # the least integer has no negative
        keys = negative(plain) if x.dtype.kind == "f" else bitwise_invert(plain)
    shape = tuple(n if a == axis else 1 for a, n in enumerate(x.shape))
    positions = reshape(arange(x.shape[axis], device=x.device), shape)
    best = equal(keys, _running(keys, axis))
    if x.dtype.kind == "f":
        best = logical_or(best, isnan(keys))
    indices = _running(where(best, positions, 0), axis)
    return Ordered(take_along_axis(x, indices, axis=axis), indices)


@of_tensor
def logcumsumexp(x: Tensor, /, axis: int) -> Tensor:
    """The logarithm of the cumulative sum of the exponentials along an axis, without overflow.

    >>> ps.logcumsumexp(ps.asarray([0.0, -ps.inf]), 0).tolist()
    [0.0, 0.0]
    """
    if x.dtype.kind != "f":
        raise TypeError(f"logcumsumexp does not take {x.dtype}")
    if not x.ndim:
        return astype(x, x.dtype)
    (axis,) = axes_of(x, axis, "logcumsumexp")
    if not x.size:
        return astype(x, x.dtype)
    wide = widened(x)
    greatest = _running(wide.detach(), axis)
    greatest = where(isinf(greatest), 0.0, greatest)
    # Sums relative to the running maximum: where it grows, the sum so far is scaled down.
    before = concat([_at(greatest, axis, slice(0, 1)), _at(greatest, axis, slice(0, -1))], axis=axis)
    factors = exp(minimum(subtract(before, greatest), 0.0)).detach()
    terms = exp(subtract(wide, greatest))
    sums = record(reducing.linear_recurrence(terms._node, factors._node, axis), terms, factors)
    return narrowed(add(log(sums), greatest), x.dtype)


@of_tensor
@composite
def logsumexp(x: Tensor, /, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The logarithm of the sum of the exponentials over axes, without overflow.

    >>> ps.logsumexp(ps.asarray([0.0, -ps.inf])).item()
    0.0
    """
    if x.dtype.kind in "biu":
        x = astype(x, dtypes.float32)
    if x.dtype.kind != "f":
        raise TypeError(f"logsumexp does not take {x.dtype}")
    axes = axes_of(x, axis, "logsumexp")
    wide = widened(x)
    if any(not x.shape[a] for a in axes) or not axes:
        total = log(sum_(exp(wide), axis=axes, keepdims=keepdims))
        return narrowed(total if axes else wide, x.dtype)
    greatest = max_(wide, axis=axes, keepdims=True).detach()
    greatest = where(isinf(greatest), 0.0, greatest)
    total = log(sum_(exp(subtract(wide, greatest)), axis=axes, keepdims=True))
    result = add(total, greatest)
    return narrowed(result if keepdims else squeeze(result, axes), x.dtype)


# Counts


@of_tensor
def histogram(
    x: Tensor,
    /,
    bins: int | Tensor,
    *,
    range: tuple[float, float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> Histogram:
    """The number of items in each bin, or the sum of their weights; the last bin includes both edges.

    >>> ps.histogram(ps.asarray([0.0, 0.5, 2.0]), bins=2)[0].tolist()
    [2.0, 1.0]
    """
    if x.dtype.kind != "f":
        raise TypeError(f"histogram does not take {x.dtype}")
    items = reshape(x, -1)
    edges = bins if isinstance(bins, Tensor) else _edges(items, integer(bins, "histogram", "bins"), range)
    if edges.ndim != 1 or edges.size < 2:
        raise ValueError(f"histogram: edges of bins are two or more in a row, not {edges.shape}")
    weights = None if weight is None else reshape(weight, -1)
    reached = greater_equal(items, expand_dims(edges, 1))  # edge by item
    amounts = astype(reached, x.dtype) if weights is None else where(reached, weights, 0)
    beyond = items > edges[-1]
    after = astype(beyond, x.dtype) if weights is None else where(beyond, weights, 0)
    sums = concat([sum_(amounts, axis=1)[:-1], reshape(sum_(after), 1)], axis=0)
    counts = subtract(sums[:-1], sums[1:])
    if density:
        counts = divide(counts, multiply(sum_(counts), subtract(edges[1:], edges[:-1])))
    return Histogram(counts, edges)


def _edges(items: Tensor, bins: int, range: tuple[float, float] | None) -> Tensor:
    if bins < 1:
        raise ValueError(f"histogram needs a bin, and bins={bins} was given")
    if range is not None:
        low, high = (float(end) for end in range)
        if not low <= high:
            raise ValueError(f"histogram: a range goes from low to high, and {range} was given")
        low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
        return linspace(low, high, bins + 1, dtype=items.dtype, device=items.device)
    if not items.size:
        return linspace(0.0, 1.0, bins + 1, dtype=items.dtype, device=items.device)
    low_item, high_item = min_(items), max_(items)
    alone = equal(low_item, high_item)
    start = where(alone, low_item - 0.5, low_item)
    end = where(alone, high_item + 0.5, high_item)
    steps = linspace(0.0, 1.0, bins + 1, dtype=items.dtype, device=items.device)
    inner = add(start, multiply(subtract(end, start), steps))
    return concat([inner[:-1], reshape(end, 1)], axis=0)


@of_tensor
def unique(
    x: Tensor,
    /,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """The sorted distinct values; on request the position of each item among them, and their counts.

    >>> ps.unique(ps.asarray([3, 1, 3])).tolist()
    [1, 3]
    """
    if dim is not None:
        raise TypeError(
            f"unique is for single values, and dim={dim} was given; unique rows are not supported"
        )
    result = unique_all(x)
    more = [result.inverse_indices] * return_inverse + [result.counts] * return_counts
    return (result.values, *more) if more else result.values


@of_tensor
def nonzero_places(x: Tensor, /, *, as_tuple: bool = False) -> Any:
    """The indices of the items that are not 0, as rows; with `as_tuple`, as a tensor for each axis."""
    if as_tuple:
        return nonzero(x)
    if not x.ndim:
        return from_numpy(np.zeros((int(bool(x)), 0), np.int64), x.device)
    return stack(nonzero(x), axis=1)
