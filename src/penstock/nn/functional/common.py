"""Helpers that the functions share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

from penstock.tensor.autograd import lasting_vjp
from penstock.tensor.core import Tensor
from penstock.tensor.dtypes import float32
from penstock.tensor.manipulation import astype

T = TypeVar("T")
Function = Callable[[Tensor], Tensor]


def with_slope(function: Function, slope: Function, x: Tensor) -> Tensor:
    """An elementwise function with its derivative, which does not depend on the gradient of the result.

    So it can be computed in the forward pass together with the function, and only it is kept.
    """
    check_floating("an activation", x)
    y = astype(function(wide(x)), x.dtype)
    return lasting_vjp(y, [x], _slope_rule(slope))


@cache
def _slope_rule(slope: Function) -> Callable[..., list[Tensor]]:
    return lambda g, _, x: [g * astype(slope(wide(x)), x.dtype)]


def check_floating(name: str, x: Tensor) -> None:
    """Raise for dtypes other than floating point: a result in an integer dtype would be truncated."""
    if x.dtype.kind != "f":
        raise TypeError(f"{name} takes floating point, and {x.dtype} was given; x.float() converts it")


def wide(x: Tensor) -> Tensor:
    """float16 and bfloat16 as float32, so that several steps are rounded only at the end."""
    return astype(x, float32) if x.dtype.itemsize == 2 else x


def takes_dim(function: Callable[..., T]) -> Callable[..., T]:
    """A function with the keyword `axis` that takes PyTorch's `dim` as well."""

    @wraps(function)
    def renamed(*args: Any, **kwargs: Any) -> T:
        if "dim" in kwargs:
            if "axis" in kwargs:
                raise TypeError(f"{function.__name__} takes axis or dim, and both were given")
            kwargs["axis"] = kwargs.pop("dim")
        return function(*args, **kwargs)

    return renamed
