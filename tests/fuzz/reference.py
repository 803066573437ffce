"""NumPy references of the namespace's functions, with the error that a device may have.

One text can be evaluated with tensors and with values. A `Value` knows its array and how far each item may
be off; None: not at all, zeros with their signs. A function that rounds takes exact values, so that no error
grows: the fuzzer reads them first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import penstock as ps

Array = np.ndarray[Any, Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NARROW = (BFLOAT16, np.dtype(np.float16))
DIGITS = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}  # bits of the fraction
LEAST = {"float16": -14, "bfloat16": -126, "float32": -126, "float64": -1022}  # exponents of normal numbers
# Units in the last place that a device may be off, by the bounds of OpenCL; sums and products are exact.
UNITS = {"divide": 2.5, "reciprocal": 2.5, "sqrt": 3, "pow": 16, "tan": 5, "tanh": 5, "atan2": 6, "atanh": 5}
OTHER_UNITS = 4.0
_SAME = "exp expm1 log log1p log2 log10 sqrt sin cos tan sinh cosh tanh reciprocal hypot divide"
FUNCTIONS = {name: name for name in _SAME.split()}
FUNCTIONS |= {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh", "acosh": "arccosh"}
FUNCTIONS |= {"atanh": "arctanh", "atan2": "arctan2", "pow": "power"}
_SAME = """abs negative positive sign floor ceil trunc square signbit isnan isinf isfinite logical_not
    conj real imag add subtract multiply copysign nextafter maximum minimum equal not_equal less less_equal
    greater greater_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor floor_divide
    remainder"""
EXACT = {name: name for name in _SAME.split()}
EXACT |= {"round": "rint", "bitwise_invert": "invert", "bitwise_left_shift": "left_shift"}
EXACT |= {"bitwise_right_shift": "right_shift"}
COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
# Zeros of either sign are right: NumPy itself does not say which.
NO_SIGN = ("maximum", "minimum", "floor_divide", "remainder", "clip")


class Inexact(Exception):
    """A value that may be off was given to a function that would make the error larger."""


class Value:
    """A NumPy array, with what each item may be off; `free`: items that may be anything."""

    def __init__(
        self,
        array: Any,
        slack: Any = None,
        *,
        signs: bool = True,
        free: Array | None = None,
        stored: bool = True,
    ) -> None:
        self.array = np.asarray(array)
        self.slack = slack
        self.signs = signs or self.array.dtype.kind in "biu"
        self.free = free
        self.stored = stored  # a kernel may know more digits of what is not: it rounds what it stores

    @property
    def exact(self) -> bool:
        return self.slack is None and self.free is None and self.signs and self.stored

    def __getitem__(self, key: Any) -> Value:
        key = tuple(map(_index, key)) if isinstance(key, tuple) else _index(key)
        return self.moved(lambda array: array[key])

    def moved(self, move: Callable[[Array], Array]) -> Value:
        """Items of it at other places."""
        slack = None if self.slack is None else move(self.slack)
        free = None if self.free is None else move(self.free)
        return Value(move(self.array), slack, signs=self.signs, free=free, stored=self.stored)

    def __repr__(self) -> str:
        return f"{self.array.dtype}{list(self.array.shape)}"


def _index(key: Any) -> Any:
    return known(key) if isinstance(key, Value) else key


def known(value: Value) -> Array:
    """The array of an exact value."""
    if not value.exact:
        raise Inexact
    return value.array


def compared(value: Value, result: Array) -> str | None:
    """What is wrong with a device's result, in words; None: nothing."""
    expected = value.array
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"{result.dtype}{list(result.shape)} instead of {expected.dtype}{list(expected.shape)}"
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    if expected.dtype.kind in "biu":
        right = result == expected
    else:
        a, b = result.astype(wide), expected.astype(wide)
        with np.errstate(all="ignore"):
            right = (a == b) | (np.isnan(a) & np.isnan(b))
            if value.slack is not None:
                near = np.abs(a - b) <= value.slack
                right |= near & np.isfinite(a) & np.isfinite(b)
                # Next to the largest number, rounding decides what is infinite.
                top = float(ml_dtypes.finfo(expected.dtype).max)
                right |= (a == np.copysign(np.inf, b.real)) & (np.abs(b) + value.slack >= top)
            elif value.signs and expected.dtype.kind == "f":
                right &= (np.signbit(a) == np.signbit(b)) | np.isnan(a)
    if value.free is not None:
        right |= value.free
    if right.all():
        return None
    at = tuple(int(place) for place in np.argwhere(~right)[0])
    slack = "" if value.slack is None else f" within {np.broadcast_to(value.slack, right.shape)[at]:.3g}"
    count = f"{(~right).sum()} of {right.size} in all"
    return f"{result[at]!r} instead of {expected[at]!r}{slack} at {at}, and {count}"


def spacing(array: Array, dtype: np.dtype[Any]) -> Array:
    """The distance of neighbours among the numbers of a dtype, around these."""
    with np.errstate(all="ignore"):
        size = np.nan_to_num(np.abs(array.astype(np.float64)), nan=1.0, posinf=1.0)
    exponent = np.maximum(np.frexp(size)[1] - 1, LEAST[dtype.name])
    return np.asarray(np.ldexp(1.0, exponent - DIGITS[dtype.name]))


def wide(array: Array) -> Array:
    """Floating-point numbers with twice the digits; float64 as what the machine has above it."""
    if array.dtype.kind == "c":
        return array.astype(np.complex128)
    return array.astype(np.longdouble if array.dtype == np.float64 else np.float64)


def off(exact: Array, dtype: np.dtype[Any], units: float) -> Value:
    """A function's result, which a device computes to some units in the last place."""
    if exact.dtype.kind == "c":
        eps = 16 * np.finfo(dtype).eps
        slack = eps * np.nan_to_num(np.abs(exact), nan=0, posinf=0)
        return Value(exact.astype(dtype), slack)
    slack = spacing(exact, dtype) * (units + 0.5)
    with np.errstate(all="ignore"):  # a function may give 0 for what is below all normal numbers
        size = np.abs(exact)
        slack = np.where(size < 2.0 ** LEAST[dtype.name], slack + size, slack)
    return Value(exact.astype(dtype), slack.astype(np.float64))


def result_dtype(*values: Any) -> np.dtype[Any]:
    """The dtype to which tensors, and numbers beside them, are brought."""
    return np.dtype(ps.result_type(*(v.array.dtype if isinstance(v, Value) else v for v in values)))


def floating(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype.kind in "biu" else array


class Reference:
    """Stands for the namespace: its functions take values."""

    def __getattr__(self, name: str) -> Any:
        if name in EXACT:
            return lambda *given: exactly(name, *given)
        if name in FUNCTIONS:
            return lambda *given: function(name, *given)
        dtype = np.dtype(BFLOAT16 if name == "bfloat16" else name)
        return dtype

    class nn:  # noqa: N801 - as in the namespace
        class functional:  # noqa: N801
            @staticmethod
            def relu(x: Value) -> Value:
                a = known(x)
                return Value(np.where(a <= 0, np.zeros_like(a), a), signs=False)

            @staticmethod
            def sigmoid(x: Value) -> Value:
                a = wide(known(x))
                with np.errstate(all="ignore"):
                    return off(1 / (1 + np.exp(-a)), x.array.dtype, 8)

            @staticmethod
            def silu(x: Value) -> Value:
                a = wide(known(x))
                with np.errstate(all="ignore"):
                    exact = a / (1 + np.exp(-a))
                    result = off(exact, x.array.dtype, 12)
                    # An exponential below all normal numbers may be 0.
                    lost = (a < 0) & (np.exp(a) < 2.0 ** LEAST[x.array.dtype.name])
                    result.slack = np.where(lost, result.slack + np.abs(exact), result.slack)
                    return result

    def erf(self, x: Value) -> Value:
        a = wide(known(x)).astype(np.float64)
        return off(np.vectorize(math.erf, otypes=[np.float64])(a), x.array.dtype, 8)

    def erfc(self, x: Value) -> Value:
        """The exponential loses as many digits as its argument, minus a square, has before the point."""
        a = wide(known(x)).astype(np.float64)
        return off(np.vectorize(math.erfc, otypes=[np.float64])(a), x.array.dtype, 512)

    def astype(self, x: Value, dtype: np.dtype[Any]) -> Value:
        if x.array.dtype == dtype:
            return x
        with np.errstate(all="ignore"):
            result = known(x).astype(dtype)
            if x.array.dtype.kind in "fV" and dtype.kind in "iu":  # what is out of range becomes anything
                a = x.array.astype(np.float64)
                low, high = float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)
                return Value(result, free=~((a > low - 1) & (a < high)))
            if x.array.dtype.kind == "f" and dtype == BFLOAT16:
                result = x.array.astype(np.float32).astype(dtype)
                return Value(result, spacing(result, dtype) if x.array.dtype == np.float64 else None)
            return Value(result)

    def where(self, condition: Value, x: Any, y: Any) -> Value:
        dtype = result_dtype(x, y)
        a, b = (known(v).astype(dtype) if isinstance(v, Value) else dtype.type(v) for v in (x, y))
        return Value(np.where(known(condition), a, b))

    def clip(self, x: Value, low: Any, high: Any) -> Value:
        dtype = x.array.dtype
        return Value(np.minimum(np.maximum(known(x), dtype.type(low)), dtype.type(high)), signs=False)

    def logaddexp(self, x: Value, y: Value) -> Value:
        dtype = result_dtype(x, y)
        a, b = (wide(known(v).astype(dtype)) for v in (x, y))
        with np.errstate(all="ignore"):
            exact = np.logaddexp(a, b)
            size = np.nan_to_num(np.abs(np.maximum(a, b)), nan=0, posinf=0, neginf=0) + 1
        return Value(exact.astype(dtype), 6 * spacing(size, dtype))

    # Reductions

    def sum(self, x: Value, *, axis: Any = None, keepdims: bool = False) -> Value:
        return self._summed(x, axis, keepdims, 1)

    def mean(self, x: Value, *, axis: Any = None, keepdims: bool = False) -> Value:
        axes = range(x.array.ndim) if axis is None else (axis,)
        return self._summed(x, axis, keepdims, math.prod(x.array.shape[a] for a in axes))

    def _summed(self, x: Value, axis: Any, keepdims: bool, count: int) -> Value:
        a = known(x)
        if a.dtype.kind in "biu":
            kind = np.uint64 if a.dtype.kind == "u" else np.int64
            return Value(a.sum(axis=axis, keepdims=keepdims, dtype=kind))
        with np.errstate(all="ignore"):
            exact = wide(a).sum(axis=axis, keepdims=keepdims) / count
            size = np.abs(finite(wide(a))).sum(axis=axis, keepdims=keepdims)
            terms = a.size // max(np.asarray(exact).size, 1) + 1
            slack = np.nan_to_num(terms * spacing(size, a.dtype) / count, nan=0, posinf=0)
            slack = slack + spacing(exact, a.dtype)
            top = float(ml_dtypes.finfo(a.dtype).max)
            free = np.asarray(size > top / 2)  # the order decides what overflows
        return Value(exact.astype(a.dtype), slack.astype(np.float64), free=free)

    def prod(self, x: Value, *, axis: Any = None) -> Value:
        a = known(x)
        return Value(a.prod(axis=axis, dtype=np.uint64 if a.dtype.kind == "u" else np.int64))

    def max(self, x: Value, *, axis: Any = None) -> Value:
        return Value(np.max(comparable(x), axis=axis).astype(x.array.dtype), signs=False)

    def min(self, x: Value, *, axis: Any = None) -> Value:
        return Value(np.min(comparable(x), axis=axis).astype(x.array.dtype), signs=False)

    def all(self, x: Value, *, axis: Any = None) -> Value:
        return Value(np.all(known(x).astype(bool), axis=axis))

    def any(self, x: Value, *, axis: Any = None) -> Value:
        return Value(np.any(known(x).astype(bool), axis=axis))

    def argmax(self, x: Value, *, axis: Any = None) -> Value:
        return Value(np.argmax(comparable(x), axis=axis).astype(np.int64))

    def argmin(self, x: Value, *, axis: Any = None) -> Value:
        return Value(np.argmin(comparable(x), axis=axis).astype(np.int64))

    def count_nonzero(self, x: Value, *, axis: Any = None) -> Value:
        return Value(np.asarray(np.count_nonzero(known(x).astype(bool), axis=axis), np.int64))

    def cumulative_sum(self, x: Value, *, axis: int) -> Value:
        a = known(x)
        return Value(np.cumsum(a, axis=axis, dtype=np.uint64 if a.dtype.kind == "u" else np.int64))

    def sort(self, x: Value, *, axis: int) -> Value:
        return Value(np.sort(comparable(x), axis=axis).astype(x.array.dtype), signs=False)

    def argsort(self, x: Value, *, axis: int) -> Value:
        return Value(np.argsort(comparable(x), axis=axis, stable=True).astype(np.int64))

    def matmul(self, x: Value, y: Value) -> Value:
        dtype = result_dtype(x, y)
        a, b = (known(v).astype(dtype) for v in (x, y))
        with np.errstate(all="ignore"):
            if dtype.kind in "iu":
                return Value(np.matmul(a, b))
            exact = np.matmul(wide(a), wide(b))
            size = np.matmul(np.abs(finite(wide(a))), np.abs(finite(wide(b))))
            top = float(ml_dtypes.finfo(dtype).max)
            slack = np.nan_to_num((a.shape[-1] + 1) * spacing(size, dtype), nan=0, posinf=0)
            return Value(exact.astype(dtype), slack, free=size > top / 2)

    # Places

    def reshape(self, x: Value, shape: tuple[int, ...]) -> Value:
        return x.moved(lambda array: array.reshape(shape))

    def permute_dims(self, x: Value, axes: tuple[int, ...]) -> Value:
        return x.moved(lambda array: array.transpose(axes))

    def flip(self, x: Value) -> Value:
        return x.moved(np.flip)

    def roll(self, x: Value, shift: int) -> Value:
        return x.moved(lambda array: np.roll(array, shift))

    def broadcast_to(self, x: Value, shape: tuple[int, ...]) -> Value:
        return x.moved(lambda array: np.broadcast_to(array, shape))

    def concat(self, values: list[Value], *, axis: int) -> Value:
        dtype = result_dtype(*values)
        return Value(np.concatenate([known(v).astype(dtype) for v in values], axis=axis))

    def take(self, x: Value, indices: Value, *, axis: int) -> Value:
        return x.moved(lambda array: np.take(array, known(indices), axis=axis))


def comparable(x: Value) -> Array:
    """An array that NumPy sorts with NaNs at the end, which it does not do with bfloat16."""
    return known(x).astype(np.float32) if x.array.dtype == BFLOAT16 else known(x)


def finite(array: Array) -> Array:
    return np.where(np.isfinite(array), array, 0)


def floor_divided(x: Array, y: Array) -> Array:
    """The quotient rounded down; of infinities, and by them, as the array API standard says."""
    result = np.floor_divide(x, y)
    if x.dtype.kind != "f":
        return result
    return np.where(np.isfinite(x) & np.isfinite(y), result, np.floor(x / y))


def exactly(name: str, *given: Any) -> Value:
    """A function that rounds once, as IEEE 754 says, or not at all."""
    arrays = _arrays(name, given)
    function = floor_divided if name == "floor_divide" else getattr(np, EXACT[name])
    with np.errstate(all="ignore"):
        if name in COMPARISONS and any(isinstance(a, int) for a in arrays):
            exact = arrays[0].astype(object) if isinstance(arrays[0], np.ndarray) else arrays[0]
            return Value(np.asarray(function(exact, arrays[1])).astype(bool))
        if name in ("floor", "ceil", "trunc", "round") and arrays[0].dtype.kind in "iu":
            return Value(arrays[0])
        dtype = arrays[0].dtype
        if dtype in NARROW and name != "nextafter":
            result = np.asarray(function(*(array.astype(np.float32) for array in arrays)))
            result = result.astype(dtype) if result.dtype == np.float32 else result
        else:
            result = np.asarray(function(*arrays))
        if dtype.kind == "c" and name in ("multiply", "square", "abs", "sign"):
            return off(np.asarray(function(*map(wide, arrays))), result.dtype, 4)
    # A product and the sum that takes it may be one operation.
    stored = result.dtype not in NARROW and not (result.dtype.kind == "f" and name in ("multiply", "square"))
    return Value(result, signs=name not in NO_SIGN, stored=stored)


def function(name: str, *given: Any) -> Value:
    """A function that a device computes to a few units in the last place."""
    arrays = [floating(a) for a in _arrays(name, given)]
    with np.errstate(all="ignore"):
        if name == "pow" and given[0].array.dtype.kind in "iu":
            return Value(np.power(*_arrays(name, given)))
        exact = np.asarray(getattr(np, FUNCTIONS[name])(*map(wide, arrays)))
        if name == "pow":  # which NumPy gives as NaN with some instruction sets
            base, exponent = np.broadcast_arrays(*arrays)
            lost = np.isneginf(base) & np.isnan(exact) & ~np.isnan(exponent)
            exact = np.where(lost, np.where(exponent > 0, np.inf, 0), exact).astype(exact.dtype)
        return off(exact, arrays[0].dtype, UNITS.get(name, OTHER_UNITS))


def _arrays(name: str, given: tuple[Any, ...]) -> list[Any]:
    """The operands in a common dtype; integers that are compared with a Python integer stay unchanged."""
    values = [v for v in given if isinstance(v, Value)]
    dtype = result_dtype(*values) if len(values) > 1 else values[0].array.dtype
    if name in COMPARISONS and dtype.kind in "iu" and len(values) < len(given):
        return [known(v) if isinstance(v, Value) else v for v in given]
    with np.errstate(all="ignore"):
        return [
            known(v).astype(dtype) if isinstance(v, Value) else np.asarray(v).astype(dtype) for v in given
        ]
