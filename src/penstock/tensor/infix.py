"""The operators of tensors: `x + y`, `x += y`, `-x`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.tensor import arithmetic, core
from penstock.tensor.arithmetic import or_product, power, records
from penstock.tensor.core import Tensor, install
from penstock.tensor.operands import OPERANDS, as_number, constant
from penstock.tensor.repeated import again, again_with_number

_OPERATORS = {
    "add": arithmetic.add,
    "sub": arithmetic.subtract,
    "mul": arithmetic.multiply,
    "truediv": arithmetic.divide,
    "floordiv": arithmetic.floor_divide,
    "mod": arithmetic.remainder,
    "pow": arithmetic.pow,
    "and": arithmetic.bitwise_and,
    "or": arithmetic.bitwise_or,
    "xor": arithmetic.bitwise_xor,
    "lshift": arithmetic.bitwise_left_shift,
    "rshift": arithmetic.bitwise_right_shift,
    "eq": arithmetic.equal,
    "ne": arithmetic.not_equal,
    "lt": arithmetic.less,
    "le": arithmetic.less_equal,
    "gt": arithmetic.greater,
    "ge": arithmetic.greater_equal,
}


def _operator(function: Callable[[Any, Any], Tensor], swapped: bool = False) -> Callable[[Tensor, Any], Any]:
    general, new = records[function.__name__]

    def operate(self: Tensor, other: Any) -> Any:
        node, repeated = self._actual_node, None
        if type(other) is not Tensor:
            if not isinstance(other, OPERANDS):
                return NotImplemented
            if isinstance(other, np.generic):
                other = as_number(other)
            elif type(other) is np.ndarray and not core._captures:  # else it is noted first what is read
                other = constant(other, self.device)
        x1, x2 = (other, self) if swapped else (self, other)
        if node.value is not None or node.like is not None:
            again_of = again if isinstance(other, Tensor) else again_with_number
            repeated = again_of(general, x1, x2)
        return new(x1, x2) if repeated is None else repeated

    return operate


def _in_place(function: Callable[[Any, Any], Tensor]) -> Callable[[Tensor, Any], Any]:
    def operate(self: Tensor, other: Any) -> Any:
        if not isinstance(other, OPERANDS):
            return NotImplemented
        self._rebind(function(self, other))
        return self

    return operate


for _name, _function in _OPERATORS.items():
    install(f"__{_name}__", _operator(_function))
    if _name not in ("eq", "ne", "lt", "le", "gt", "ge"):
        install(f"__r{_name}__", _operator(_function, swapped=True))
        install(f"__i{_name}__", _in_place(_function))
install("__pow__", or_product(_operator(power)))
for _name, _unary_function in {
    "neg": arithmetic.negative,
    "pos": arithmetic.positive,
    "abs": arithmetic.abs,
    "invert": arithmetic.bitwise_invert,
}.items():
    install(f"__{_name}__", _unary_function)
install("__hash__", object.__hash__)
