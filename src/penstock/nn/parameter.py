"""Trainable tensors of modules."""

from __future__ import annotations

from typing import Any

from penstock.graph import elementwise
from penstock.tensor.copying import copied, reduced, restored
from penstock.tensor.core import Tensor, note_used


class Parameter(Tensor):
    """A tensor that belongs to a module's parameters, also while it is frozen by `requires_grad_(False)`.

    Any other tensor of a module is a parameter while it requires a gradient, and a buffer otherwise.

    >>> ps.nn.Parameter(ps.zeros((2, 3))).requires_grad
    True
    """

    __slots__ = ()

    def __init__(self, data: Tensor, requires_grad: bool = True) -> None:
        if not isinstance(data, Tensor):
            raise TypeError(f"a parameter is made of a tensor, and {type(data).__name__} was given")
        note_used(data)
        super().__init__(elementwise.stop(data._node), data.device)
        if requires_grad:
            self.requires_grad_()

    def __copy__(self) -> Parameter:
        return _as_parameter(copied(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        memo[id(self)] = result = _as_parameter(copied(self, memo))
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, reduced(self)[1]


def _as_parameter(x: Tensor) -> Parameter:
    parameter = Parameter(x, x.requires_grad)
    parameter.grad = x.grad
    return parameter


def _restored(*args: Any) -> Parameter:
    return _as_parameter(restored(*args))
