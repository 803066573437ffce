"""Along axes: sums and their kin, scans, differences, and the functions made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from penstock.graph import elementwise, reducing, shaping
from penstock.graph.node import DType, Node
from penstock.tensor import dtypes
from penstock.tensor.arguments import integer, of_tensor
from penstock.tensor.arithmetic import divide, equal, multiply, sqrt, subtract, where
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor, axes_of, install, record
from penstock.tensor.manipulation import concat, reshape
from penstock.tensor.operands import Array, beside

Axis = int | Sequence[int] | None


def _shaped(node: Node, x: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    return record(_kept(node, x, axes, keepdims), x)


def _kept(node: Node, x: Tensor, axes: tuple[int, ...], keepdims: bool) -> Node:
    """A result with axes of length 1 where some are dropped, if these are kept."""
    if not keepdims:
        return node
    return shaping.reshape(node, tuple([1 if a in axes else n for a, n in enumerate(x.shape)]))


_WIDEST = {"b": dtypes.int64, "i": dtypes.int64, "u": dtypes.uint64}


def _sum_dtype(x: Tensor, dtype: DType | None) -> DType:
    """Whole numbers are summed in the widest type of their kind."""
    if dtype is not None:
        return dtypes.checked(dtype)
    return _WIDEST.get(x.dtype.kind, x.dtype)


def _check(name: str, kinds: str, x: Tensor) -> None:
    if x.dtype.kind not in kinds:
        raise TypeError(f"{name} does not take {x.dtype}")


@of_tensor
def sum(x: Tensor, /, *, axis: Axis = None, dtype: DType | None = None, keepdims: bool = False) -> Tensor:
    """The sum of the items."""
    axes = axes_of(x, axis, "sum")
    return _shaped(reducing.sum_(elementwise.cast(x._node, _sum_dtype(x, dtype)), axes), x, axes, keepdims)


@of_tensor
def prod(x: Tensor, /, *, axis: Axis = None, dtype: DType | None = None, keepdims: bool = False) -> Tensor:
    """The product of the items."""
    axes = axes_of(x, axis, "prod")
    return _shaped(reducing.prod(elementwise.cast(x._node, _sum_dtype(x, dtype)), axes), x, axes, keepdims)


def _extreme(name: str, apply: Callable[[Node, tuple[int, ...]], Node], doc: str) -> Callable[..., Tensor]:
    def function(x: Tensor, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
        _check(name, "biuf", x)
        axes = axes_of(x, axis, name)
        if not math.prod(x.shape[a] for a in axes):
            raise ValueError(f"{name} of nothing: shape {x.shape}, axes {axes}")
        return _shaped(apply(x._node, axes), x, axes, keepdims)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return of_tensor(function)


max = _extreme("max", reducing.max_, "The greatest item.")
min = _extreme("min", reducing.min_, "The least item.")


def _truth(name: str, apply: Callable[[Node, tuple[int, ...]], Node], doc: str) -> Callable[..., Tensor]:
    def function(x: Tensor, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
        axes = axes_of(x, axis, name)
        return _shaped(apply(elementwise.cast(x._node, dtypes.bool_), axes), x, axes, keepdims)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return of_tensor(function)


all = _truth("all", reducing.all_, "Whether all items are true.")
any = _truth("any", reducing.any_, "Whether an item is true.")


def widened(x: Tensor) -> Tensor:
    """float16 and bfloat16 in float32: what is done in several steps is rounded once, by `narrowed`."""
    return record(elementwise.cast(x._node, dtypes.float32), x) if x.dtype in dtypes.HALF_PRECISION else x


def narrowed(result: Tensor, dtype: DType) -> Tensor:
    """The end of what began with `widened`."""
    return record(elementwise.cast(result._node, dtype), result)


@of_tensor
@composite
def mean(x: Tensor, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The mean of the items; of none, undefined."""
    _check("mean", "fc", x)
    axes = axes_of(x, axis, "mean")
    count = math.prod(x.shape[a] for a in axes)
    total = _kept(reducing.sum_(elementwise.widened(x._node), axes), x, axes, keepdims)
    node = elementwise.divide(total, beside(total, float(count)))
    return record(elementwise.cast(node, x.dtype), x)


@of_tensor
@composite
def var(x: Tensor, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Tensor:
    """The variance of the items; `correction` is taken from their number."""
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
    """The standard deviation of the items; where that is 0, so is its gradient."""
    _check("std", "f", x)
    squared = var(widened(x), axis=axes_of(x, axis, "std"), correction=correction, keepdims=keepdims)
    constant = equal(squared, 0.0)
    return narrowed(where(constant, 0.0, sqrt(where(constant, 1.0, squared))), x.dtype)


def _cumulative(name: str, apply: Callable[[Node, int], Node], start: int, doc: str) -> Callable[..., Tensor]:
    def function(
        x: Tensor,
        /,
        *,
        axis: int | None = None,
        dtype: DType | None = None,
        include_initial: bool = False,
    ) -> Tensor:
        if axis is None and x.ndim != 1:
            raise ValueError(f"{name} needs an axis for shape {x.shape}")
        (place,) = axes_of(x, axis or 0, name)
        node = elementwise.cast(x._node, _sum_dtype(x, dtype))
        if include_initial:
            shape = tuple(1 if a == place else n for a, n in enumerate(x.shape))
            node = shaping.concat([elementwise.full(shape, node.dtype, start), node], place)
        return record(apply(node, place), x)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return of_tensor(function)


cumulative_sum = _cumulative("cumulative_sum", reducing.cumulative_sum, 0, "The sums up to each item.")
cumulative_prod = _cumulative("cumulative_prod", reducing.cumulative_prod, 1, "The products up to each item.")


@of_tensor
def count_nonzero(x: Tensor, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """How many items are not 0."""
    axes = axes_of(x, axis, "count_nonzero")
    node = elementwise.not_equal(x._node, elementwise.like(x._node, 0))
    return _shaped(reducing.count_true(node, axes), x, axes, keepdims)


def _position(name: str, apply: Callable[[Node, int], Node], doc: str) -> Callable[..., Tensor]:
    def function(x: Tensor, /, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
        _check(name, "biuf", x)
        flat = reshape(x, -1) if axis is None else x
        (place,) = axes_of(flat, 0 if axis is None else axis, name)
        if not flat.shape[place]:
            raise ValueError(f"{name} of nothing: shape {x.shape}, axis {axis}")
        found = record(apply(flat._node, place), flat)
        if not keepdims:
            return found
        kept = (1,) * x.ndim if axis is None else tuple(1 if a == place else n for a, n in enumerate(x.shape))
        return reshape(found, kept)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return of_tensor(function)


argmax = _position("argmax", reducing.argmax, "Where the greatest item is; the first of equal ones.")
argmin = _position("argmin", reducing.argmin, "Where the least item is; the first of equal ones.")


@of_tensor
def diff(
    x: Tensor, /, *, axis: int = -1, n: int = 1, prepend: Array | None = None, append: Array | None = None
) -> Tensor:
    """The differences of neighbours, `n` times over."""
    (place,) = axes_of(x, axis, "diff")
    n = integer(n, "diff", "n")
    if n < 0:
        raise ValueError(f"diff: n is 0 or more, and {n} was given")
    parts = [part for part in (prepend, x, append) if part is not None]
    result = concat(parts, axis=place)
    for _ in range(n):
        key: list[Any] = [slice(None)] * x.ndim
        key[place] = slice(1, None)
        later = result[tuple(key)]
        key[place] = slice(0, -1)
        earlier = result[tuple(key)]
        if x.dtype == dtypes.bool_:
            result = record(elementwise.logical_xor(later._node, earlier._node), later, earlier)
        else:
            result = subtract(later, earlier)
    return result


for _name, _method in (("sum", sum), ("mean", mean), ("max", max), ("min", min)):
    install(_name, _method)
