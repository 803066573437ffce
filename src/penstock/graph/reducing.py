"""Primitives along axes: reductions and their opposite, scans, and orders. Reduced axes are dropped."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.graph.dtypes import int64
from penstock.graph.elementwise import BOOL, cast, divide, equal, full, multiply, where
from penstock.graph.node import Array, DType, Kind, Node, Primitive, Rounding, Shape, Vjp, same
from penstock.graph.shaping import concat, permute, reshape, slice_axis

INDEX = int64
Axes = tuple[int, ...]
BLOCK = 128  # values that are added up one after the other, everywhere, before a sum gets another level


def _reduced(x: Node, *, axes: Axes) -> tuple[Shape, DType]:
    return tuple([length for axis, length in enumerate(x.shape) if axis not in axes]), x.dtype


def _reduced_to_index(x: Node, *, axis: int) -> tuple[Shape, DType]:
    return _reduced(x, axes=(axis,))[0], INDEX


def _ordered_index(x: Node, *, axis: int, descending: bool) -> tuple[Shape, DType]:
    return x.shape, INDEX


def _expand_shape(x: Node, *, shape: Shape) -> tuple[Shape, DType]:
    return shape, x.dtype


def expand(x: Node, shape: Shape) -> Node:
    """Axes of length 1 repeated to the lengths of `shape`."""
    return x if x.shape == shape else Node(EXPAND, (x,), {"shape": shape})


def restore(reduced: Node, x: Node, axes: Axes) -> Node:
    """What a reduction of `x` over `axes` gave, repeated over the shape of `x`."""
    return expand(keep_axes(reduced, x, axes), x.shape)


def keep_axes(reduced: Node, x: Node, axes: Axes) -> Node:
    """What a reduction of `x` over `axes` gave, with these axes, of length 1."""
    return reshape(reduced, tuple(1 if axis in axes else length for axis, length in enumerate(x.shape)))


def _expand_gradient(g: Node, n: Node) -> tuple[Node]:
    x = n.inputs[0]
    axes = tuple(axis for axis, (a, b) in enumerate(zip(x.shape, n.shape, strict=True)) if a != b)
    return (reshape(sum_(g, axes), x.shape),)


EXPAND = Primitive(
    "expand", Kind.VIEW, _expand_shape, lambda x, shape: np.broadcast_to(x, shape), _expand_gradient
)


def _reduction(
    name: str,
    combine: str,
    numpy: Callable[..., Any],
    vjp: Vjp | None = None,
    rounding: Rounding = Rounding.VARIES,
) -> Callable[[Node, Axes], Node]:
    def reference(x: Array, axes: Axes) -> Array:
        return np.asarray(numpy(x, axis=axes, dtype=x.dtype) if name == "prod" else numpy(x, axis=axes))

    primitive = Primitive(name, Kind.REDUCTION, _reduced, reference, vjp, combine=combine, rounding=rounding)
    return lambda x, axes: Node(primitive, (x,), {"axes": axes}) if axes else x


def pairwise_sum(x: Array, axis: Axes) -> Array:
    """The sum over some axes. NumPy's own has a small error only along an axis whose items are neighbours."""
    if x.dtype.kind not in "fc":
        return np.asarray(np.sum(x, axis=axis, dtype=x.dtype))
    if x.flags.c_contiguous and min(axis) == x.ndim - len(axis):
        rows = x.reshape(*x.shape[: min(axis)], math.prod(x.shape[min(axis) :]))
        return np.asarray(np.sum(rows, axis=-1, dtype=x.dtype))
    for along in sorted(axis, reverse=True):
        while x.shape[along] > BLOCK:
            x = np.add.reduceat(x, np.arange(0, x.shape[along], BLOCK), axis=along)
        x = np.sum(x, axis=along, dtype=x.dtype)
    return x


def _wide_sum_shape(x: Node, *, axes: Axes, dtype: DType) -> tuple[Shape, DType]:
    return _reduced(x, axes=axes)[0], dtype


# A sum of integers in a wider dtype by NumPy, which stores no wide copy of them.
WIDE_SUM = Primitive(
    "wide_sum",
    Kind.HOST,
    _wide_sum_shape,
    lambda x, axes, dtype: np.asarray(np.sum(x, axis=axes, dtype=np.dtype(dtype))),
)


def _extreme_gradient(g: Node, n: Node) -> tuple[Node]:
    """To the items that are extreme, in equal shares."""
    x, axes = n.inputs[0], n.attributes["axes"]
    zero, one = full(x.shape, x.dtype, 0), full(x.shape, x.dtype, 1)
    chosen = where(equal(x, restore(n, x, axes)), one, zero)
    return (divide(multiply(restore(g, x, axes), chosen), restore(sum_(chosen, axes), x, axes)),)


def _prod_gradient(g: Node, n: Node) -> tuple[Node]:
    """To each item the product of all the others, without a division that a zero would spoil."""
    x, axes = n.inputs[0], n.attributes["axes"]
    others = tuple(axis for axis in range(x.ndim) if axis not in axes)
    order = (*others, *axes)
    kept = tuple(x.shape[axis] for axis in others)
    rows = reshape(permute(x, order), (*kept, int(np.prod([x.shape[axis] for axis in axes]))))
    last = rows.ndim - 1
    product = multiply(_products_before(rows, last), _products_before(rows, last, reverse=True))
    back = permute(
        reshape(product, tuple(x.shape[axis] for axis in order)), tuple(int(i) for i in np.argsort(order))
    )
    return (multiply(restore(g, x, axes), back),)


def reverse(x: Node, axis: int) -> Node:
    """`x` from the end to the start along an axis."""
    return slice_axis(x, axis, x.shape[axis] - 1, x.shape[axis], -1) if x.shape[axis] else x


sum_ = _reduction("sum", "add", pairwise_sum, lambda g, n: (restore(g, n.inputs[0], n.attributes["axes"]),))
prod = _reduction("prod", "multiply", np.prod, _prod_gradient)
max_ = _reduction("max", "maximum", np.max, _extreme_gradient, Rounding.EXACT)
min_ = _reduction("min", "minimum", np.min, _extreme_gradient, Rounding.EXACT)
any_ = _reduction("any", "logical_or", np.any)
all_ = _reduction("all", "logical_and", np.all)


def _arg_reduction(name: str, numpy: Callable[..., Any]) -> Primitive:
    def reference(x: Array, axis: int) -> Array:
        return np.asarray(numpy(x, axis))

    return Primitive(name, Kind.ARG_REDUCTION, _reduced_to_index, reference, weight=1)


ARGMAX = _arg_reduction("argmax", np.argmax)
ARGMIN = _arg_reduction("argmin", np.argmin)


def argmax(x: Node, axis: int) -> Node:
    """Where the largest item stands; the first of equal ones."""
    return Node(ARGMAX, (x,), {"axis": axis})


def argmin(x: Node, axis: int) -> Node:
    """Where the smallest item stands; the first of equal ones."""
    return Node(ARGMIN, (x,), {"axis": axis})


def _cumulative_sum_reference(x: Array, axis: int, reverse: bool) -> Array:
    wide = np.float64 if x.dtype == np.float32 else x.dtype  # NumPy adds one item after the other
    return _from_end(x, axis, reverse, lambda x: np.cumsum(x, axis, dtype=wide).astype(x.dtype, copy=False))


def _cumulative_prod_reference(x: Array, axis: int, reverse: bool) -> Array:
    return _from_end(x, axis, reverse, lambda x: np.cumprod(x, axis, dtype=x.dtype))


def _recurrence_reference(x: Array, factor: Array, axis: int, reverse: bool) -> Array:
    result = np.moveaxis(x.copy(), axis, 0)
    factors = np.moveaxis(factor, axis, 0)
    order = range(len(result))
    for before, index in pairwise(reversed(order) if reverse else order):
        result[index] += factors[index] * result[before]
    return np.moveaxis(result, 0, axis)


def _from_end(x: Array, axis: int, reverse: bool, scan: Callable[[Array], Array]) -> Array:
    return np.asarray(np.flip(scan(np.flip(x, axis)), axis) if reverse else scan(x))


def _recurrence_shape(x: Node, factor: Node, **_: Any) -> tuple[Shape, DType]:
    assert x.dtype.kind == "f"
    return same(x, factor)


def _cumulative_sum_gradient(g: Node, n: Node) -> tuple[Node]:
    return (cumulative_sum(g, n.attributes["axis"], not n.attributes["reverse"]),)


def _cumulative_prod_gradient(g: Node, n: Node) -> tuple[Node]:
    """The product of what comes before an item, times what follows it: no division that a zero would spoil.

    What follows is a polynomial in the items, evaluated from the end by Horner's rule.
    """
    x, axis, reverse = n.inputs[0], n.attributes["axis"], n.attributes["reverse"]
    following = linear_recurrence(g, _shifted(x, axis, not reverse, 1), axis, not reverse)
    return (multiply(_products_before(x, axis, reverse), following),)


def _recurrence_gradient(g: Node, n: Node) -> tuple[Node, Node]:
    factor, axis, reverse = n.inputs[1], n.attributes["axis"], n.attributes["reverse"]
    to_x = linear_recurrence(g, _shifted(factor, axis, not reverse, 1), axis, not reverse)
    return to_x, multiply(to_x, _shifted(n, axis, reverse, 0))


def _products_before(x: Node, axis: int, reverse: bool = False) -> Node:
    """The product of the items before each one along an axis; of those after it, where reversed."""
    return cumulative_prod(_shifted(x, axis, reverse, 1), axis, reverse)


def _shifted(x: Node, axis: int, reverse: bool, fill: int) -> Node:
    """Each item one step later along an axis, or one earlier; `fill` where none comes from."""
    length = x.shape[axis]
    if not length:
        return x
    shape = tuple(1 if at == axis else count for at, count in enumerate(x.shape))
    parts = [full(shape, x.dtype, fill), slice_axis(x, axis, int(reverse), length - 1)]
    return concat(parts[::-1] if reverse else parts, axis)


def _scan(name: str, shape_rule: Any, reference: Any, vjp: Vjp, combine: str = "") -> Primitive:
    return Primitive(name, Kind.SCAN, shape_rule, reference, vjp, weight=1, combine=combine)


CUMULATIVE_SUM = _scan(
    "cumulative_sum", same, _cumulative_sum_reference, _cumulative_sum_gradient, combine="add"
)
CUMULATIVE_PROD = _scan(
    "cumulative_prod", same, _cumulative_prod_reference, _cumulative_prod_gradient, combine="multiply"
)
LINEAR_RECURRENCE = _scan("linear_recurrence", _recurrence_shape, _recurrence_reference, _recurrence_gradient)


def cumulative_sum(x: Node, axis: int, reverse: bool = False) -> Node:
    """The sums of the items up to each one; from each one to the end, where reversed."""
    return Node(CUMULATIVE_SUM, (x,), {"axis": axis, "reverse": reverse})


def cumulative_prod(x: Node, axis: int, reverse: bool = False) -> Node:
    """The products of the items up to each one; from each one to the end, where reversed."""
    return Node(CUMULATIVE_PROD, (x,), {"axis": axis, "reverse": reverse})


def linear_recurrence(x: Node, factor: Node, axis: int, reverse: bool = False) -> Node:
    """y[k] = x[k] + factor[k] * y[k - 1] along an axis, from y[0] = x[0]; from the end, where reversed."""
    return Node(LINEAR_RECURRENCE, (x, factor), {"axis": axis, "reverse": reverse})


def _argsort_reference(x: Array, axis: int, descending: bool) -> Array:
    if not descending:
        return np.argsort(x, axis, kind="stable")
    # Stable from the other side: reversed, sorted, and reversed again, equal items keep their order.
    last = x.shape[axis] - 1
    return np.flip(last - np.argsort(np.flip(x, axis), axis, kind="stable"), axis)


ARGSORT = Primitive("argsort", Kind.SORT, _ordered_index, _argsort_reference, weight=16)


def argsort(x: Node, axis: int, descending: bool) -> Node:
    """The order that sorts `x`; equal items keep theirs."""
    return Node(ARGSORT, (x,), {"axis": axis, "descending": descending})


def count_true(condition: Node, axes: Axes) -> Node:
    """How many items are true."""
    assert condition.dtype == BOOL
    return sum_(cast(condition, INDEX), axes)
