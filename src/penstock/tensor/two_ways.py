"""Functions that mean different things in the array API standard and in PyTorch.

The keywords `axis` and `keepdims` select the standard's meaning; `dim`, `keepdim` and an axis without a
keyword select PyTorch's. Without any of them, a function follows the standard, and a method PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.tensor import arithmetic, manipulation, reduction, searching
from penstock.tensor.arguments import of_tensor
from penstock.tensor.core import Tensor
from penstock.tensor.examples import with_example
from penstock.tensor.operands import device_of
from penstock.tensor.ordering import extreme, nonzero_places, sorted_pair
from penstock.tensor.shapes import squeezed

Axis = int | Sequence[int] | None


def _refuse_both(name: str, *given: Any) -> None:
    if any(value is not None and value is not False for value in given):
        raise TypeError(
            f"{name}: axis and keepdims are the standard's, dim and keepdim PyTorch's; do not mix them"
        )


def _extreme(
    name: str, standard: Callable[..., Tensor], of_two: Callable[[Any, Any], Tensor]
) -> Callable[..., Any]:
    def function(
        x: Tensor,
        /,
        dim: Any = None,
        keepdim: bool = False,
        *,
        axis: Axis = None,
        keepdims: bool = False,
    ) -> Any:
        if isinstance(dim, (Tensor, np.ndarray)):
            return of_two(x, dim)
        if dim is None:
            if keepdim:
                raise TypeError(f"{name}: keepdim goes with dim, and keepdims with axis")
            return standard(x, axis=axis, keepdims=keepdims)
        _refuse_both(name, axis, keepdims)
        if isinstance(dim, (tuple, list)):
            raise TypeError(f"{name}: dim is one axis, and {dim} was given; a{name} takes several")
        return extreme(x, dim, keepdim, least=name == "min")

    function.__name__ = function.__qualname__ = name
    summary = (standard.__doc__ or "").partition("\n")[0]
    doc = f"{summary} With `dim`, also the index; of two tensors, item by item."
    function.__doc__ = with_example(name, doc)
    return of_tensor(function)


max = _extreme("max", reduction.max, arithmetic.maximum)
min = _extreme("min", reduction.min, arithmetic.minimum)


@of_tensor
def sort(
    x: Tensor, /, dim: int | None = None, descending: bool = False, stable: bool = True, *, axis: Any = None
) -> Any:
    """The sorted items along an axis, the last by default; with `dim`, also their indices.

    >>> ps.sort(ps.asarray([3, 1, 2])).tolist()
    [1, 2, 3]
    """
    if dim is None:
        return searching.sort(x, axis=-1 if axis is None else axis, descending=descending)
    _refuse_both("sort", axis)
    return sorted_pair(x, dim, descending)


@of_tensor
def sort_method(
    x: Tensor, /, dim: int | None = None, descending: bool = False, stable: bool = True, *, axis: Any = None
) -> Any:
    """The sorted items along an axis, and their indices; with `axis`, the items only."""
    return sort(x, -1 if dim is None and axis is None else dim, descending, axis=axis)


def _deviation(name: str, standard: Callable[..., Tensor], by_default: float) -> Callable[..., Tensor]:
    def function(
        x: Tensor,
        /,
        dim: Any = None,
        unbiased: bool | None = None,
        keepdim: bool | None = None,
        *,
        correction: float | None = None,
        axis: Axis = None,
        keepdims: bool = False,
    ) -> Tensor:
        if isinstance(dim, bool):  # as in var(x, False)
            dim, unbiased = None, dim
        torch = dim is not None or unbiased is not None or keepdim is not None
        if torch:
            _refuse_both(name, axis, keepdims)
            axis = dim if isinstance(dim, int) or dim else None
            if not x.ndim and axis in (0, -1):  # as in PyTorch
                axis = None
            keepdims = bool(keepdim)
        if unbiased is not None:
            if correction is not None:
                raise TypeError(f"{name}: unbiased=True is correction=1; give one of them")
            correction = int(unbiased)
        if correction is None:
            meant = 0.0 if axis is not None or keepdims else by_default
            correction = 1.0 if torch else meant
        axes = tuple(axis) if isinstance(axis, list) else axis
        return standard(x, axis=axes, correction=correction, keepdims=keepdims)

    function.__name__ = function.__qualname__ = name
    doc = f"{standard.__doc__} `correction` is 0 by default, and 1 in PyTorch's spelling."
    function.__doc__ = with_example(name, doc)
    return of_tensor(function)


var, var_method = (_deviation("var", reduction.var, default) for default in (0.0, 1.0))
std, std_method = (_deviation("std", reduction.std, default) for default in (0.0, 1.0))


@of_tensor
def squeeze(x: Tensor, /, axis: Axis = None, *, dim: Axis = None) -> Tensor:
    """Remove axes of length 1, by default all; of another length, `dim` keeps an axis and `axis` raises.

    >>> ps.squeeze(ps.zeros((1, 3, 1))).shape
    (3,)
    """
    if dim is not None:
        _refuse_both("squeeze", axis)
        return squeezed(x, dim)
    return squeezed(x) if axis is None else manipulation.squeeze(x, axis)


@of_tensor
def squeeze_method(x: Tensor, /, dim: Axis = None, *, axis: Axis = None) -> Tensor:
    """Remove axes of length 1, by default all; of another length, `dim` keeps an axis and `axis` raises."""
    return squeeze(x, axis, dim=dim)


@of_tensor
def nonzero(x: Tensor, /, *, as_tuple: bool | None = None) -> Any:
    """The indices of the items that are not 0, a tensor for each axis; with `as_tuple=False`, as rows.

    >>> ps.nonzero(ps.asarray([0, 5, 7]), as_tuple=False).tolist()
    [[1], [2]]
    """
    return searching.nonzero(x) if as_tuple is None else nonzero_places(x, as_tuple=as_tuple)


def where(condition: Any, x1: Any = None, x2: Any = None, /) -> Any:
    """Items of `x1` where the condition is true, of `x2` elsewhere; of a condition alone, `nonzero`.

    >>> ps.where(ps.asarray([True, False]), ps.asarray([1, 2]), ps.asarray([3, 4])).tolist()
    [1, 4]
    """
    if x1 is None and x2 is None:
        device_of("where", condition)
        return searching.nonzero(condition)
    return arithmetic.where(condition, x1, x2)


@of_tensor
def where_method(x: Tensor, /, condition: Any, other: Any) -> Tensor:
    """Items of `x` where a condition is true, of `other` elsewhere."""
    return arithmetic.where(condition, x, other)
