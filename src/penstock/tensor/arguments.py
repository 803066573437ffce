"""Checks of the arguments of tensor functions; errors name the function and what would work."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from penstock.graph.node import Shape
from penstock.tensor.core import Tensor

Rest = ParamSpec("Rest")
Result = TypeVar("Result")


def of_tensor(
    function: Callable[Concatenate[Tensor, Rest], Result],
) -> Callable[Concatenate[Tensor, Rest], Result]:
    """Decorator: raise a TypeError unless the first argument is a tensor."""

    @functools.wraps(function)
    def checked(x: Tensor, /, *args: Rest.args, **kwargs: Rest.kwargs) -> Result:
        if not isinstance(x, Tensor):
            name, given = function.__name__, type(x).__name__
            raise TypeError(f"{name} takes a tensor, and {given} was given; ps.asarray makes one of it")
        return function(x, *args, **kwargs)

    return checked


def shape_of(shape: int | Sequence[int], name: str) -> Shape:
    """A shape as a tuple; a single integer is the length of a single axis."""
    lengths = integers(shape, name, "a shape")
    if any(length < 0 for length in lengths):
        raise ValueError(f"{name}: a shape has no negative lengths, and {lengths} was given")
    return lengths


def integers(given: Any, name: str, what: str) -> tuple[int, ...]:
    """An integer, or a sequence of integers, as a tuple; `what` describes the argument in an error."""
    if not isinstance(given, (tuple, list)):
        try:
            return (operator.index(given),)
        except TypeError:
            pass
    try:
        return tuple(map(operator.index, given))
    except TypeError:
        raise TypeError(f"{name}: {what} is an integer or a tuple of integers, not {given!r}") from None


def integer(given: Any, name: str, what: str) -> int:
    """An integer; `what` describes the argument in an error."""
    try:
        return operator.index(given)
    except TypeError:
        raise TypeError(f"{name}: {what} is an integer, not {given!r}") from None
