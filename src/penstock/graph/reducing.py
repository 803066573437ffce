"""Primitives along axes: reductions, expansion, scans and sorting. Reduced axes are dropped."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.graph.dtypes import HALF_PRECISION, int64
from penstock.graph.elementwise import BOOL, cast, divide, equal, full, multiply, where
from penstock.graph.node import Array, DType, Kind, Node, Primitive, Rounding, Shape, Vjp, same
from penstock.graph.shaping import concat, permute, reshape, slice_axis

INDEX = int64
Axes = tuple[int, ...]
_MOST_KEPT = 64  # of the first items of sorted rows, each of which may have to move for every item
BLOCK = 128  # values that are added up sequentially; longer sums are added up in levels of such blocks


def _reduced(x: Node, *, axes: Axes, order: tuple[int, ...] = ()) -> tuple[Shape, DType]:
    """`order`: how a GPU divides the items among threads, where that is given (see `Lowered`)."""
    return tuple([length for axis, length in enumerate(x.shape) if axis not in axes]), x.dtype


def expand(x: Node, shape: Shape) -> Node:
    """Axes of length 1 repeated to the lengths of `shape`."""
    return x if x.shape == shape else Node(EXPAND, (x,), {"shape": shape})


def restore(reduced: Node, x: Node, axes: Axes) -> Node:
    """The result of a reduction of `x` over `axes`, broadcast to the shape of `x`."""
    return expand(keep_axes(reduced, x, axes), x.shape)


def keep_axes(reduced: Node, x: Node, axes: Axes) -> Node:
    """The result of a reduction of `x` over `axes`, with these axes kept as length 1."""
    return reshape(reduced, tuple(1 if axis in axes else length for axis, length in enumerate(x.shape)))


def _expand_gradient(g: Node, n: Node) -> tuple[Node]:
    x = n.inputs[0]
    axes = tuple(axis for axis, (a, b) in enumerate(zip(x.shape, n.shape, strict=True)) if a != b)
    return (reshape(sum_(g, axes), x.shape),)


EXPAND = Primitive(
    "expand",
    Kind.VIEW,
    lambda x, shape: (shape, x.dtype),
    lambda x, shape: np.broadcast_to(x, shape),
    _expand_gradient,
)


def _reduction(
    name: str,
    combine: str,
    numpy: Callable[..., Any],
    vjp: Vjp | None = None,
    rounding: Rounding = Rounding.VARIES,
) -> Callable[[Node, Axes], Node]:
    def reference(x: Array, axes: Axes, order: tuple[int, ...] = ()) -> Array:
        return np.asarray(numpy(x, axis=axes, dtype=x.dtype) if name == "prod" else numpy(x, axis=axes))

    primitive = Primitive(name, Kind.REDUCTION, _reduced, reference, vjp, combine=combine, rounding=rounding)
    return lambda x, axes: Node(primitive, (x,), {"axes": axes}) if axes else x


def pairwise_sum(x: Array, axis: Axes) -> Array:
    """The sum over axes. NumPy's own sum is pairwise only along an axis that is contiguous."""
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


# A sum of integers in a wider dtype by NumPy, which makes no wide copy of its input.
WIDE_SUM = Primitive(
    "wide_sum",
    Kind.HOST,
    lambda x, axes, dtype: (_reduced(x, axes=axes)[0], dtype),
    lambda x, axes, dtype: np.asarray(np.sum(x, axis=axes, dtype=np.dtype(dtype))),
)


def _extreme_gradient(g: Node, n: Node) -> tuple[Node]:
    """The gradient goes to the items that are extreme, in equal shares."""
    x, axes = n.inputs[0], n.attributes["axes"]
    zero, one = full(x.shape, x.dtype, 0), full(x.shape, x.dtype, 1)
    chosen = where(equal(x, restore(n, x, axes)), one, zero)
    return (divide(multiply(restore(g, x, axes), chosen), restore(sum_(chosen, axes), x, axes)),)


def _prod_gradient(g: Node, n: Node) -> tuple[Node]:
    """The gradient of an item is the product of all others, computed without division because of zeros."""
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
    """`x` in reverse order along an axis."""
    return slice_axis(x, axis, x.shape[axis] - 1, x.shape[axis], -1) if x.shape[axis] else x


sum_ = _reduction("sum", "add", pairwise_sum, lambda g, n: (restore(g, n.inputs[0], n.attributes["axes"]),))
prod = _reduction("prod", "multiply", np.prod, _prod_gradient)
max_ = _reduction("max", "maximum", np.max, _extreme_gradient, Rounding.EXACT)
min_ = _reduction("min", "minimum", np.min, _extreme_gradient, Rounding.EXACT)
any_ = _reduction("any", "logical_or", np.any)
all_ = _reduction("all", "logical_and", np.all)


def _arg_reduction(name: str, numpy: Callable[..., Any]) -> Callable[[Node, int], Node]:
    def reference(x: Array, axis: int) -> Array:
        return np.asarray(numpy(x, axis))

    def shape_rule(x: Node, axis: int) -> tuple[Shape, DType]:
        return _reduced(x, axes=(axis,))[0], INDEX

    primitive = Primitive(name, Kind.ARG_REDUCTION, shape_rule, reference, weight=1)
    return lambda x, axis: Node(primitive, (x,), {"axis": axis})


# The index of the largest or smallest item along an axis; the first if several are equal.
argmax = _arg_reduction("argmax", np.argmax)
argmin = _arg_reduction("argmin", np.argmin)


def _cumsum(x: Array, axis: int) -> Array:
    wide = np.float64 if x.dtype == np.float32 else x.dtype  # NumPy adds up sequentially
    return np.cumsum(x, axis, dtype=wide).astype(x.dtype, copy=False)


def _recurrence_reference(x: Array, factor: Array, axis: int, reverse: bool) -> Array:
    result = np.moveaxis(x.copy(), axis, 0)
    factors = np.moveaxis(factor, axis, 0)
    order = range(len(result))
    for before, index in pairwise(reversed(order) if reverse else order):
        result[index] += factors[index] * result[before]
    return np.moveaxis(result, 0, axis)


def _recurrence_shape(x: Node, factor: Node, **_: Any) -> tuple[Shape, DType]:
    assert x.dtype.kind == "f"
    return same(x, factor)


def _cumulative_sum_gradient(g: Node, n: Node) -> tuple[Node]:
    return (cumulative_sum(g, n.attributes["axis"], not n.attributes["reverse"]),)


def _cumulative_prod_gradient(g: Node, n: Node) -> tuple[Node]:
    """The product of the items before each item, times a polynomial in the items after it.

    Horner's rule evaluates the polynomial from the end. There is no division, because of zeros.
    """
    x, axis, reverse = n.inputs[0], n.attributes["axis"], n.attributes["reverse"]
    following = linear_recurrence(g, _shifted(x, axis, not reverse, 1), axis, not reverse)
    return (multiply(_products_before(x, axis, reverse), following),)


def _recurrence_gradient(g: Node, n: Node) -> tuple[Node, Node]:
    factor, axis, reverse = n.inputs[1], n.attributes["axis"], n.attributes["reverse"]
    to_x = linear_recurrence(g, _shifted(factor, axis, not reverse, 1), axis, not reverse)
    return to_x, multiply(to_x, _shifted(n, axis, reverse, 0))


def _products_before(x: Node, axis: int, reverse: bool = False) -> Node:
    """The product of the items before each item along an axis; if reversed, of those after it."""
    return cumulative_prod(_shifted(x, axis, reverse, 1), axis, reverse)


def _shifted(x: Node, axis: int, reverse: bool, fill: int) -> Node:
    """`x` shifted by a step along an axis, backward if reversed; the vacated item becomes `fill`."""
    length = x.shape[axis]
    if not length:
        return x
    shape = tuple(1 if at == axis else count for at, count in enumerate(x.shape))
    parts = [full(shape, x.dtype, fill), slice_axis(x, axis, int(reverse), length - 1)]
    return concat(parts[::-1] if reverse else parts, axis)


def _cumulative(
    name: str, combine: str, numpy: Callable[[Array, int], Array], vjp: Vjp | None = None
) -> Callable[..., Node]:
    def reference(x: Array, axis: int, reverse: bool) -> Array:
        return np.flip(numpy(np.flip(x, axis), axis), axis) if reverse else numpy(x, axis)

    primitive = Primitive(name, Kind.SCAN, same, reference, vjp, weight=1, combine=combine)

    def apply(x: Node, axis: int, reverse: bool = False) -> Node:
        return Node(primitive, (x,), {"axis": axis, "reverse": reverse})

    return apply


# Inclusive scans; if reversed, from the end to each item. The tensor layer has the gradient of the maximum.
cumulative_sum = _cumulative("cumulative_sum", "add", _cumsum, _cumulative_sum_gradient)
cumulative_prod = _cumulative(
    "cumulative_prod",
    "multiply",
    lambda x, axis: np.cumprod(x, axis, dtype=x.dtype),
    _cumulative_prod_gradient,
)
cumulative_max = _cumulative("cumulative_max", "maximum", np.maximum.accumulate)
LINEAR_RECURRENCE = Primitive(
    "linear_recurrence", Kind.SCAN, _recurrence_shape, _recurrence_reference, _recurrence_gradient, weight=1
)


def linear_recurrence(x: Node, factor: Node, axis: int, reverse: bool = False) -> Node:
    """y[k] = x[k] + factor[k] * y[k - 1] along an axis, from y[0] = x[0]; if reversed, from the end."""
    return Node(LINEAR_RECURRENCE, (x, factor), {"axis": axis, "reverse": reverse})


def _argsort_reference(x: Array, axis: int, descending: bool) -> Array:
    if not descending:
        return np.argsort(x, axis, kind="stable")
    # A stable ascending sort of the reversed items, reversed: so equal items keep their order.
    last = x.shape[axis] - 1
    return np.flip(last - np.argsort(np.flip(x, axis), axis, kind="stable"), axis)


def _sort_reference(x: Array, axis: int, descending: bool) -> Array:
    return np.take_along_axis(x, _argsort_reference(x, axis, descending), axis)


ARGSORT = Primitive(
    "argsort", Kind.SORT, lambda x, axis, descending: (x.shape, INDEX), _argsort_reference, weight=16
)
SORT = Primitive(
    "sort", Kind.SORT, lambda x, axis, descending: (x.shape, x.dtype), _sort_reference, weight=16
)


def _top_shape(x: Node, axis: int, descending: bool, count: int) -> tuple[Shape, DType]:
    return (*x.shape[:axis], count, *x.shape[axis + 1 :]), INDEX


def _top_reference(x: Array, axis: int, descending: bool, count: int) -> Array:
    return np.take(_argsort_reference(x, axis, descending), np.arange(count), axis)


def _sorted_top(node: Node, target: Capabilities) -> Node | None:
    """All are sorted, unless a CPU keeps few."""
    x, axis, descending, count = node.inputs[0], *node.attributes.values()
    if target.vector_width > 1 and 0 < count <= _MOST_KEPT and x.dtype not in HALF_PRECISION:
        return None
    return slice_axis(argsort(x, axis, descending), axis, 0, count)


TOP = Primitive("top", Kind.SORT, _top_shape, _top_reference, decompose=_sorted_top, weight=16)


def top(x: Node, axis: int, descending: bool, count: int) -> Node:
    """The first of the indices that sort `x`."""
    return Node(TOP, (x,), {"axis": axis, "descending": descending, "count": count})


def argsort(x: Node, axis: int, descending: bool) -> Node:
    """The indices that sort `x`; equal items keep their order."""
    return Node(ARGSORT, (x,), {"axis": axis, "descending": descending})


def sort(x: Node, axis: int, descending: bool) -> Node:
    """The sorted items of `x`, without a gradient; equal items keep their order."""
    return Node(SORT, (x,), {"axis": axis, "descending": descending})


def count_true(condition: Node, axes: Axes) -> Node:
    """How many items are true."""
    assert condition.dtype == BOOL
    return sum_(cast(condition, INDEX), axes)
