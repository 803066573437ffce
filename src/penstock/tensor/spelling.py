"""Functions that take PyTorch's keywords beside those of the array API standard."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from penstock.graph import shaping
from penstock.tensor.core import Tensor, record

# PyTorch's keywords by the standard's. A function takes PyTorch's if it has the standard's.
KEYWORDS = {"axis": "dim", "axes": "dims", "keepdims": "keepdim", "shape": "size"}
OF_FUNCTIONS = {
    "arange": {"stop": "end"},
    "diag": {"k": "diagonal"},
    **{name: {"axes": "dim"} for name in ("fftn", "ifftn", "rfftn", "irfftn", "fftshift", "ifftshift")},
    "flip": {"axis": "dims"},
    "linspace": {"num": "steps"},
    "roll": {"axis": "dims", "shift": "shifts"},
    "tril": {"k": "diagonal"},
    "triu": {"k": "diagonal"},
}
Function = Callable[..., Any]


def keywords_of(function: Function) -> dict[str, str]:
    """The keywords of PyTorch that a function takes, with the function's own names."""
    known = KEYWORDS | OF_FUNCTIONS.get(function.__name__, {})
    parameters = inspect.signature(function).parameters
    return {
        known[own]: own
        for own, parameter in parameters.items()
        if known.get(own, own) not in parameters
        and parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL)
    }


def spelled(function: Function) -> Function:
    """The function with keywords of both spellings; giving both for an argument is an error."""
    known = keywords_of(function)
    if not known:
        return function
    spellings = frozenset(known)
    names = list(inspect.signature(function).parameters)
    reduces, at = "keepdims" in names, names.index("axis") if "axis" in names else len(names)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) <= at and spellings.isdisjoint(kwargs):
            return function(*args, **kwargs)
        for given in spellings.intersection(kwargs):
            own, value = known[given], kwargs.pop(given)
            if own in kwargs:
                raise TypeError(f"{function.__name__}: {own} and {given} are the same; give one of them")
            if reduces and own == "axis" and isinstance(value, (list, tuple)) and not value:
                value = None  # an empty tuple means all axes in PyTorch
            kwargs[own] = value
        try:
            return function(*args, **kwargs)
        except IndexError:
            if at >= len(names) or not isinstance(args[0], Tensor) or args[0].ndim:
                raise
            return _as_vector(function, args[0], args[1:], kwargs)

    return call


def _as_vector(function: Function, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As in PyTorch, treat a tensor without axes as a vector of length 1."""
    vector = record(shaping.reshape(x._node, (1,)), x)
    result = function(vector, *args, **kwargs)
    if not isinstance(result, Tensor) or result.size != 1:
        return result
    return record(shaping.reshape(result._node, ()), result)


def loose(function: Function) -> Function:
    """A method whose sizes or axes may be given as separate arguments, or as a tuple."""
    keyword = list(inspect.signature(function).parameters)[1]

    @functools.wraps(function)
    def call(x: Any, *sizes: Any, **kwargs: Any) -> Any:
        if not sizes and kwargs.keys() & {keyword, "size", "dims"}:
            return function(x, **kwargs)
        return function(x, _together(sizes), **kwargs)

    return call


def loose_sizes(function: Function) -> Function:
    """A function that creates a tensor, whose sizes may be given as separate arguments, or as a tuple."""

    @functools.wraps(function)
    def call(*sizes: Any, **kwargs: Any) -> Any:
        for other in ("size", "shape"):
            if other in kwargs:
                if sizes:
                    raise TypeError(f"{function.__name__}: {other} is given twice")
                sizes = (kwargs.pop(other),)
        return function(_together(sizes), **kwargs)

    return call


def _together(sizes: tuple[Any, ...]) -> Any:
    return sizes[0] if len(sizes) == 1 else sizes


def differentiable(function: Function) -> Function:
    """A function that creates a tensor, with the keyword `requires_grad`."""

    @functools.wraps(function)
    def call(*args: Any, requires_grad: bool = False, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        return made.requires_grad_() if requires_grad else made

    return call


def in_place(function: Function) -> Function:
    """A method that applies a function in place."""

    @functools.wraps(function)
    def change(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._rebind(function(self, *args, **kwargs))
        return self

    return change
