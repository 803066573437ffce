"""Operators that compute item by item; NumPy and Penstock call them by the same names."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

import penstock as ps
from penstock.onnx.dtypes import dtype_of
from penstock.onnx.registry import Call, operator

_UNARY = {
    "Abs": "abs",
    "Acos": "acos",
    "Acosh": "acosh",
    "Asin": "asin",
    "Asinh": "asinh",
    "Atan": "atan",
    "Atanh": "atanh",
    "BitwiseNot": "bitwise_invert",
    "Ceil": "ceil",
    "Cos": "cos",
    "Cosh": "cosh",
    "Exp": "exp",
    "Floor": "floor",
    "IsNaN": "isnan",
    "Log": "log",
    "Neg": "negative",
    "Not": "logical_not",
    "Round": "round",
    "Sign": "sign",
    "Sin": "sin",
    "Sinh": "sinh",
    "Sqrt": "sqrt",
    "Tan": "tan",
    "Tanh": "tanh",
}
_BINARY = {
    "Add": "add",
    "And": "logical_and",
    "BitwiseAnd": "bitwise_and",
    "BitwiseOr": "bitwise_or",
    "BitwiseXor": "bitwise_xor",
    "Equal": "equal",
    "Greater": "greater",
    "GreaterOrEqual": "greater_equal",
    "Less": "less",
    "LessOrEqual": "less_equal",
    "Mul": "multiply",
    "Or": "logical_or",
    "Sub": "subtract",
    "Xor": "logical_xor",
}


@operator(*_UNARY, since=1, folds=True)
def unary(call: Call, x: Any) -> Any:
    """A function of one tensor."""
    return getattr(call.xp, _UNARY[call.node.op_type])(x)


@operator(*_BINARY, folds=True)
def binary(call: Call, x: Any, y: Any) -> Any:
    """A function of two tensors, which are broadcast."""
    return getattr(call.xp, _BINARY[call.node.op_type])(x, y)


@operator("Sum", since=1, folds=True)
def add_all(call: Call, *inputs: Any) -> Any:
    """The sum of all inputs."""
    return reduce(call.xp.add, inputs)


@operator("Mean", since=1, folds=True)
def mean_of_all(call: Call, *inputs: Any) -> Any:
    """The mean of all inputs."""
    return reduce(call.xp.add, inputs) / len(inputs)


@operator("Max", since=1, folds=True)
def greatest(call: Call, *inputs: Any) -> Any:
    """The greatest of all inputs."""
    return reduce(call.xp.maximum, inputs)


@operator("Min", since=1, folds=True)
def least(call: Call, *inputs: Any) -> Any:
    """The least of all inputs."""
    return reduce(call.xp.minimum, inputs)


@operator("Div", folds=True)
def div(call: Call, x: Any, y: Any) -> Any:
    """The quotient; of integers it is rounded towards 0."""
    xp = call.xp
    if not integral(x):
        return xp.divide(x, y)
    quotient = xp.floor_divide(x, y)
    below = xp.logical_and(quotient * y != x, (x < 0) != (y < 0))
    return quotient + xp.astype(below, quotient.dtype)


def integral(x: Any) -> bool:
    """Whether a value is of integers."""
    return np.dtype(x.dtype).kind in "iu"


@operator("Mod", since=10, folds=True)
def mod(call: Call, x: Any, y: Any) -> Any:
    """What a division leaves, with the sign of the divisor or, with `fmod`, of the dividend."""
    return (call.xp.fmod if call.get("fmod", 0) else call.xp.remainder)(x, y)


@operator("Pow", folds=True)
def power(call: Call, x: Any, y: Any) -> Any:
    """`x` to the power of `y`, in the dtype of `x`."""
    xp = call.xp
    if integral(x) and not integral(y):
        return xp.astype(xp.pow(xp.astype(x, xp.float64), xp.astype(y, xp.float64)), x.dtype)
    return xp.pow(x, xp.astype(y, x.dtype))


@operator("BitShift", since=11, folds=True)
def bit_shift(call: Call, x: Any, y: Any) -> Any:
    """The bits moved up or down."""
    left = call.get("direction") == "LEFT"
    return (call.xp.bitwise_left_shift if left else call.xp.bitwise_right_shift)(x, y)


@operator("Reciprocal", folds=True)
def reciprocal(call: Call, x: Any) -> Any:
    """1 / x."""
    return 1 / x


@operator("Where", since=9, folds=True)
def where(call: Call, condition: Any, x: Any, y: Any) -> Any:
    """Items of `x` where the condition is true, of `y` elsewhere."""
    return call.xp.where(condition, x, y)


@operator("Cast", "CastLike", folds=True)
def cast(call: Call, x: Any, like: Any = None) -> Any:
    """The values in another dtype; what is cut off is a fraction."""
    if like is not None:
        return call.xp.astype(x, like.dtype)
    dtype = dtype_of(call.get("to"), f"the result of {call.node}")
    return call.xp.astype(x, dtype if call.xp is np else getattr(ps, dtype.name))


@operator("IsInf", since=10)
def is_infinite(call: Call, x: ps.Tensor) -> ps.Tensor:
    """Whether a value is infinite, of the signs that are asked for."""
    up, down = call.get("detect_positive", 1), call.get("detect_negative", 1)
    infinite = ps.isinf(x)
    if not up:
        infinite = ps.logical_and(infinite, x < 0)
    return infinite if down else ps.logical_and(infinite, x > 0)


@operator("Clip", since=11, folds=True)
def clip(call: Call, x: Any, low: Any = None, high: Any = None) -> Any:
    """Not less than `low`, and not greater than `high`, which wins."""
    bounded = x if low is None else call.xp.maximum(x, low)
    return bounded if high is None else call.xp.minimum(bounded, high)


@operator("Clip", since=7)
def clip_by_attributes(call: Call, x: ps.Tensor) -> ps.Tensor:
    """The same, with bounds that are attributes."""
    return ps.clip(x, call.get("min"), call.get("max"))


@operator("Erf", since=9)
def erf(call: Call, x: ps.Tensor) -> ps.Tensor:
    """The error function."""
    return ps.erf(x)


@operator("Identity", folds=True)
def identity(call: Call, x: Any) -> Any:
    """The value itself."""
    return x
