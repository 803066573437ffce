"""Reductions over axes, scans and differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.graph import elementwise, reducing, shaping
from penstock.graph.node import DType, Node
from penstock.tensor import dtypes
from penstock.tensor.arguments import integer, of_tensor
from penstock.tensor.arithmetic import divide, equal, multiply, sqrt, subtract, where
from penstock.tensor.broadcasting import axes_of
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor, install, record
from penstock.tensor.examples import with_example
from penstock.tensor.manipulation import astype, concat, reshape
from penstock.tensor.operands import Array, constant_like

Axis = int | Sequence[int] | None


def _shaped(node: Node, x: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    return record(_kept(node, x, axes, keepdims), x)


def _kept(node: Node, x: Tensor, axes: tuple[int, ...], keepdims: bool) -> Node:
    """The result of a reduction, with the reduced axes as length 1 if `keepdims`."""
    if not keepdims:
        return node
    _check_kept(keepdims)
    return shaping.reshape(node, tuple([1 if a in axes else n for a, n in enumerate(x.shape)]))


def _check_kept(keepdims: Any) -> None:
    """Raise if `keepdims` is no bool: NumPy's third argument is a dtype."""
    if not isinstance(keepdims, (bool, np.bool_)):
        raise TypeError(f"keepdims is True or False, and {keepdims!r} was given; is it meant for dtype=?")


_WIDEST = {"b": dtypes.int64, "i": dtypes.int64, "u": dtypes.uint64}


def _sum_dtype(x: Tensor, dtype: DType | None) -> DType:
    """The dtype of a sum: integers are summed in int64 or uint64 by default."""
    if dtype is not None:
        return dtypes.checked(dtype)
    return _WIDEST.get(x.dtype.kind, x.dtype)


def _check(name: str, kinds: str, x: Tensor) -> None:
    if x.dtype.kind not in kinds:
        raise TypeError(f"{name} does not take {x.dtype}")


@of_tensor
def sum(x: Tensor, /, axis: Axis = None, keepdims: bool = False, *, dtype: DType | None = None) -> Tensor:
    """The sum over axes, by default all; of integers and bool in int64, of unsigned integers in uint64.

    >>> ps.sum(ps.asarray([[1, 2], [3, 4]]), axis=0).tolist()
    [4, 6]
    """
    axes = axes_of(x, axis, "sum")
    return _shaped(reducing.sum_(elementwise.cast(x._node, _sum_dtype(x, dtype)), axes), x, axes, keepdims)


@of_tensor
def prod(x: Tensor, /, axis: Axis = None, keepdims: bool = False, *, dtype: DType | None = None) -> Tensor:
    """The product over axes, by default all; dtypes as by `sum`.

    >>> ps.prod(ps.asarray([[1, 2], [3, 4]]), axis=1).tolist()
    [2, 12]
    """
    axes = axes_of(x, axis, "prod")
    return _shaped(reducing.prod(elementwise.cast(x._node, _sum_dtype(x, dtype)), axes), x, axes, keepdims)


def _extreme(name: str, apply: Callable[[Node, tuple[int, ...]], Node], doc: str) -> Callable[..., Tensor]:
    def function(x: Tensor, /, axis: Axis = None, keepdims: bool = False) -> Tensor:
        _check(name, "biuf", x)
        axes = axes_of(x, axis, name)
        if not math.prod(x.shape[a] for a in axes):
            raise ValueError(f"{name} of nothing: shape {x.shape}, axes {axes}")
        return _shaped(apply(x._node, axes), x, axes, keepdims)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = with_example(f"a{name}", doc)
    return of_tensor(function)


max = _extreme("max", reducing.max_, "The maximum over axes, by default all.")
min = _extreme("min", reducing.min_, "The minimum over axes, by default all.")


def _boolean(name: str, apply: Callable[[Node, tuple[int, ...]], Node], doc: str) -> Callable[..., Tensor]:
    def function(x: Tensor, /, axis: Axis = None, keepdims: bool = False) -> Tensor:
        axes = axes_of(x, axis, name)
        return _shaped(apply(elementwise.cast(x._node, dtypes.bool_), axes), x, axes, keepdims)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = with_example(name, doc)
    return of_tensor(function)


all = _boolean("all", reducing.all_, "Whether all items along axes, by default all, are true.")
any = _boolean("any", reducing.any_, "Whether any item along axes, by default all, is true.")


def widened(x: Tensor) -> Tensor:
    """float16 and bfloat16 as float32: several steps are then rounded only once, by `narrowed`."""
    return record(elementwise.cast(x._node, dtypes.float32), x) if x.dtype in dtypes.HALF_PRECISION else x


def narrowed(result: Tensor, dtype: DType) -> Tensor:
    """A result converted to a dtype, after `widened`."""
    return record(elementwise.cast(result._node, dtype), result)


@of_tensor
@composite
def mean(x: Tensor, /, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The mean over axes, by default all; NaN if there are no items.

    >>> ps.mean(ps.asarray([[1.0, 2.0], [3.0, 4.0]]), axis=1).tolist()
    [1.5, 3.5]
    """
    _check("mean", "fc", x)
    axes = axes_of(x, axis, "mean")
    count = math.prod(x.shape[a] for a in axes)
    total = _kept(reducing.sum_(elementwise.widened(x._node), axes), x, axes, keepdims)
    node = elementwise.divide(total, constant_like(total, float(count)))
    return record(elementwise.cast(node, x.dtype), x)


@of_tensor
@composite
def var(x: Tensor, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Tensor:
    """The variance over axes, by default all; the divisor is the number of items less `correction`."""
    _check("var", "f", x)
    axes = axes_of(x, axis, "var")
    count = math.prod(x.shape[a] for a in axes) - correction
    wide = widened(x)
    centred = subtract(wide, mean(wide, axis=axes, keepdims=True))
    total = sum(multiply(centred, centred), axis=axes, keepdims=keepdims)
    return narrowed(divide(total, float(count)) if count > 0 else multiply(total, float("nan")), x.dtype)


@of_tensor
@composite
def std(x: Tensor, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Tensor:
    """The square root of `var`; where that is 0, its gradient is 0."""
    _check("std", "f", x)
    squared = var(widened(x), axis=axes_of(x, axis, "std"), correction=correction, keepdims=keepdims)
    constant = equal(squared, 0.0)
    return narrowed(where(constant, 0.0, sqrt(where(constant, 1.0, squared))), x.dtype)


def _cumulative(name: str, apply: Callable[[Node, int], Node], start: int, doc: str) -> Callable[..., Tensor]:
    def function(
        x: Tensor,
        /,
        axis: int | None = None,
        *,
        dtype: DType | None = None,
        include_initial: bool = False,
    ) -> Tensor:
        if axis is None and x.ndim != 1:
            raise ValueError(f"{name} needs an axis for shape {x.shape}")
        (position,) = axes_of(x, axis or 0, name)
        node = elementwise.cast(x._node, _sum_dtype(x, dtype))
        if include_initial:
            shape = tuple(1 if a == position else n for a, n in enumerate(x.shape))
            node = shaping.concat([elementwise.full(shape, node.dtype, start), node], position)
        return record(apply(node, position), x)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = with_example(name, doc)
    return of_tensor(function)


cumulative_sum = _cumulative(
    "cumulative_sum", reducing.cumulative_sum, 0, "The cumulative sum along an axis."
)
cumulative_prod = _cumulative(
    "cumulative_prod", reducing.cumulative_prod, 1, "The cumulative product along an axis."
)


@of_tensor
def count_nonzero(x: Tensor, /, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The number of items that are not 0 along axes, by default all.

    >>> ps.count_nonzero(ps.asarray([0, 5, 7])).item()
    2
    """
    axes = axes_of(x, axis, "count_nonzero")
    node = elementwise.not_equal(x._node, elementwise.like(x._node, 0))
    return _shaped(reducing.count_true(node, axes), x, axes, keepdims)


def _position(name: str, apply: Callable[[Node, int], Node], doc: str) -> Callable[..., Tensor]:
    def function(x: Tensor, /, axis: int | None = None, keepdims: bool = False) -> Tensor:
        _check(name, "biuf", x)
        flat = reshape(x, -1) if axis is None else x
        (position,) = axes_of(flat, 0 if axis is None else axis, name)
        if not flat.shape[position]:
            raise ValueError(f"{name} of nothing: shape {x.shape}, axis {axis}")
        index = record(apply(flat._node, position), flat)
        if not keepdims:
            return index
        _check_kept(keepdims)
        kept = (
            (1,) * x.ndim if axis is None else tuple(1 if a == position else n for a, n in enumerate(x.shape))
        )
        return reshape(index, kept)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = with_example(name, doc)
    return of_tensor(function)


argmax = _position(
    "argmax",
    reducing.argmax,
    "The index of the maximum along an axis, or in the flattened tensor; the first of equal items.",
)
argmin = _position(
    "argmin",
    reducing.argmin,
    "The index of the minimum along an axis, or in the flattened tensor; the first of equal items.",
)


@of_tensor
def diff(
    x: Tensor, /, n: int = 1, axis: int = -1, prepend: Array | None = None, append: Array | None = None
) -> Tensor:
    """The `n`-th differences of neighbouring items along an axis.

    >>> ps.diff(ps.asarray([1, 4, 9])).tolist()
    [3, 5]
    """
    (position,) = axes_of(x, axis, "diff")
    n = integer(n, "diff", "n")
    if n < 0:
        raise ValueError(f"diff: n is 0 or more, and {n} was given")
    if not n:
        return astype(x, x.dtype)
    parts = [part for part in (prepend, x, append) if part is not None]
    result = concat(parts, axis=position)
    for _ in range(n):
        key: list[Any] = [slice(None)] * x.ndim
        key[position] = slice(1, None)
        later = result[tuple(key)]
        key[position] = slice(0, -1)
        earlier = result[tuple(key)]
        if x.dtype == dtypes.bool_:
            result = record(elementwise.logical_xor(later._node, earlier._node), later, earlier)
        else:
            result = subtract(later, earlier)
    return result


for _name, _method in (("sum", sum), ("mean", mean), ("max", max), ("min", min)):
    install(_name, _method)
