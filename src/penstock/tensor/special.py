"""Elementwise functions of PyTorch and NumPy beyond the array API standard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from penstock.tensor import arithmetic, dtypes
from penstock.tensor.arguments import integer, of_tensor
from penstock.tensor.arithmetic import (
    abs as abs_,
)
from penstock.tensor.arithmetic import (
    add,
    divide,
    equal,
    floor_divide,
    isfinite,
    isinf,
    isnan,
    less,
    log,
    logical_and,
    logical_not,
    logical_or,
    multiply,
    sin,
    sqrt,
    subtract,
    tan,
    trunc,
    where,
)
from penstock.tensor.arithmetic import pow as pow_
from penstock.tensor.arithmetic import round as round_
from penstock.tensor.autograd import lasting_vjp
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor
from penstock.tensor.manipulation import astype
from penstock.tensor.operands import device_of, number_in, operands
from penstock.tensor.reduction import all as all_
from penstock.tensor.reduction import narrowed, widened


def scaled_add(x1: Any, x2: Any, /, *, alpha: float = 1) -> Tensor:
    """The sum `x1 + alpha * x2`.

    >>> ps.add(ps.asarray([1, 2]), ps.asarray([3, 4]), alpha=10).tolist()
    [31, 42]
    """
    if alpha == 1:
        return add(x1, x2)
    x1, x2 = operands(x1, x2, name="add")  # first, as `x2` may have the smaller dtype
    return add(x1, multiply(x2, alpha))


def scaled_subtract(x1: Any, x2: Any, /, *, alpha: float = 1) -> Tensor:
    """The difference `x1 - alpha * x2`.

    >>> ps.sub(ps.asarray([1, 2]), ps.asarray([3, 4])).tolist()
    [-2, -2]
    """
    if alpha == 1:
        return subtract(x1, x2)
    x1, x2 = operands(x1, x2, name="subtract")
    return subtract(x1, multiply(x2, alpha))


def div(x1: Any, x2: Any, /, *, rounding_mode: str | None = None) -> Tensor:
    """The quotient; rounded towards 0 with 'trunc', down with 'floor'.

    >>> ps.div(ps.asarray([7, -7]), 2, rounding_mode="trunc").tolist()
    [3, -3]
    """
    if rounding_mode == "floor":
        return floor_divide(x1, x2)
    if rounding_mode not in (None, "trunc"):
        raise ValueError(f"div: rounding_mode is None, 'trunc' or 'floor', and {rounding_mode!r} was given")
    if rounding_mode is None:
        return divide(x1, x2)
    return _truncated(x1, x2) if _is_integer(x1) and _is_integer(x2) else trunc(divide(x1, x2))


def _is_integer(x: Any) -> bool:
    return x.dtype.kind in "iu" if isinstance(x, Tensor) else isinstance(x, int)


def _truncated(x1: Any, x2: Any) -> Tensor:
    """The quotient of integers rounded towards 0: the floor, plus 1 if it is negative and not exact."""
    down = floor_divide(x1, x2)
    rest = subtract(x1, multiply(down, x2))
    below = less(multiply(_sign(x1), _sign(x2)), 0)
    return where(logical_and(arithmetic.not_equal(rest, 0), below), add(down, 1), down)


def _sign(x: Any) -> Any:
    return arithmetic.sign(x) if isinstance(x, Tensor) else (x > 0) - (x < 0)


def fmod(x1: Any, x2: Any, /) -> Tensor:
    """The remainder of the division rounded towards 0; it has the sign of `x1`.

    >>> ps.fmod(ps.asarray([7, -7]), 3).tolist()
    [1, -1]
    """
    dividend, divisor = operands(x1, x2, name="fmod")
    if dividend.dtype.kind in "iu":  # the least integer has no size
        rest = arithmetic.remainder(dividend, divisor)
        signs_differ = arithmetic.not_equal(less(rest, 0), less(dividend, 0))
        return where(logical_and(arithmetic.not_equal(rest, 0), signs_differ), subtract(rest, divisor), rest)
    is_below = arithmetic.signbit(dividend)
    # Not of `abs(dividend)`, whose gradient is 0 at 0.
    size = arithmetic.remainder(where(is_below, -dividend, dividend), abs_(divisor))
    return where(is_below, -size, size)


def _size(x: Any) -> Any:
    """The size of a number; of integers in float32, as the least of a dtype has none in it."""
    if not isinstance(x, Tensor):
        return abs(x)
    return abs_(astype(x, dtypes.float32) if x.dtype.kind in "iu" else x)


@of_tensor
@composite
def exp2(x: Tensor, /) -> Tensor:
    """2 ** x; integers give float32.

    >>> ps.exp2(ps.asarray([3.0])).tolist()
    [8.0]
    """
    return pow_(2.0, x if x.dtype.kind in "fc" else astype(x, dtypes.float32))


@of_tensor
@composite
def rsqrt(x: Tensor, /) -> Tensor:
    """1 / sqrt(x).

    >>> ps.rsqrt(ps.asarray([4.0])).tolist()
    [0.5]
    """
    return divide(1.0, sqrt(x))


@of_tensor
def frac(x: Tensor, /) -> Tensor:
    """The fractional part, x - trunc(x).

    >>> ps.frac(ps.asarray([2.5, -2.5])).tolist()
    [0.5, -0.5]
    """
    return subtract(x, trunc(x))


@of_tensor
@composite
def logit(x: Tensor, /, eps: float | None = None) -> Tensor:
    """log(x / (1 - x)), the inverse of the sigmoid; with `eps`, x is first limited to [eps, 1 - eps].

    >>> ps.logit(ps.asarray([0.5])).tolist()
    [0.0]
    """
    if eps is not None:
        x = arithmetic.clip(x if x.dtype.kind == "f" else astype(x, dtypes.float32), eps, 1 - eps)
    return log(divide(x, subtract(1.0, x)))


@of_tensor
@composite
def rounded(x: Tensor, /, decimals: int = 0) -> Tensor:
    """The nearest number with so many decimals; ties to even.

    >>> ps.round(ps.asarray([0.5, 1.5, 2.25])).tolist()
    [0.0, 2.0, 2.0]
    """
    decimals = integer(decimals, "round", "decimals")
    if not decimals or x.dtype.kind in "biu":
        if decimals < 0:
            raise TypeError(f"round: decimals={decimals} is for floating point, and the dtype is {x.dtype}")
        return round_(x)
    factor = 10.0 ** abs(decimals)
    if decimals > 0:
        return divide(round_(multiply(x, factor)), factor)
    return multiply(round_(divide(x, factor)), factor)


@of_tensor
def lerp(x: Tensor, /, end: Any, weight: Any) -> Tensor:
    """`x + weight * (end - x)`; with weight 1 exactly `end`.

    >>> ps.lerp(ps.asarray([0.0]), ps.asarray([8.0]), 0.25).tolist()
    [2.0]
    """
    way = subtract(end, x)
    if isinstance(weight, Tensor):
        near = less(abs_(weight), 0.5)
        return where(near, add(x, multiply(weight, way)), subtract(end, multiply(way, subtract(1, weight))))
    return add(x, multiply(way, weight)) if abs(weight) < 0.5 else subtract(end, multiply(way, 1 - weight))


@of_tensor
def addcmul(x: Tensor, x1: Any, x2: Any, /, *, value: float = 1) -> Tensor:
    """`x + value * x1 * x2`.

    >>> ps.addcmul(ps.asarray([1]), ps.asarray([2]), ps.asarray([3])).tolist()
    [7]
    """
    x, x1, x2 = operands(x, x1, x2, name="addcmul")
    return add(x, multiply(multiply(x1, x2), value))


@of_tensor
def addcdiv(x: Tensor, x1: Any, x2: Any, /, *, value: float = 1) -> Tensor:
    """`x + value * x1 / x2`.

    >>> ps.addcdiv(ps.asarray([1.0]), ps.asarray([6.0]), ps.asarray([3.0])).tolist()
    [3.0]
    """
    x, x1, x2 = operands(x, x1, x2, name="addcdiv")
    return add(x, multiply(divide(x1, x2), value))


def isclose(
    x1: Any, x2: Any, /, rtol: float = 1e-5, atol: float = 1e-8, *, equal_nan: bool = False
) -> Tensor:
    """Whether they differ by no more than `atol + rtol * abs(x2)`.

    >>> ps.isclose(ps.asarray([1.0, 2.0]), ps.asarray([1.0, 3.0])).tolist()
    [True, False]
    """
    device_of("isclose", x1, x2)
    if isinstance(x1, Tensor) and isinstance(x2, Tensor) and x1.dtype == x2.dtype:
        relative, absolute = (number_in(limit, x1.dtype, x1.device) for limit in (rtol, atol))
        if relative is not None and absolute is not None and x1.dtype.kind == "f":
            return _close_values(x1, x2, relative, absolute, equal_nan)
    return _close(x1, x2, rtol, atol, equal_nan)


def _close(x1: Any, x2: Any, rtol: Any, atol: Any, equal_nan: bool) -> Tensor:
    distance = _distance(x1, x2)
    reach = add(atol, multiply(rtol, _size(x2))) if isinstance(x2, Tensor) else atol + rtol * abs(x2)
    finite = isfinite(distance)  # infinities are close only to equal infinities
    close = logical_or(equal(x1, x2), logical_and(finite, arithmetic.less_equal(distance, reach)))
    if not equal_nan:
        return close
    both = [isnan(x) if isinstance(x, Tensor) else math.isnan(x) for x in (x1, x2)]
    return logical_or(close, logical_and(*both))


def _distance(x1: Any, x2: Any) -> Tensor:
    difference = subtract(x1, x2)
    if difference.dtype.kind not in "iu":
        return abs_(difference)
    # May be beyond the dtype: its bits are those of an unsigned integer.
    difference = subtract(arithmetic.maximum(x1, x2), arithmetic.minimum(x1, x2))
    return astype(difference, dtypes.checked(f"uint{8 * difference.dtype.itemsize}"))


_close_values, _are_all = composite(_close), composite(all_)


def allclose(x1: Any, x2: Any, /, rtol: float = 1e-5, atol: float = 1e-8, *, equal_nan: bool = False) -> bool:
    """Whether all items are close; reads the result.

    >>> ps.allclose(ps.asarray([1.0]), ps.asarray([1.0]))
    True
    """
    device_of("allclose", x1, x2)
    return bool(_are_all(isclose(x1, x2, rtol, atol, equal_nan=equal_nan)))


def same(x1: Tensor, x2: Tensor, /) -> bool:
    """Whether two tensors have the same shape and items; reads the result."""
    return x1.shape == x2.shape and bool(_are_all(equal(x1, x2)))


@of_tensor
def clamp_min(x: Tensor, /, min: Any) -> Tensor:
    """`x`, but at least `min`.

    >>> ps.clamp_min(ps.asarray([-1, 2]), 0).tolist()
    [0, 2]
    """
    return arithmetic.clip(x, min)


@of_tensor
def clamp_max(x: Tensor, /, max: Any) -> Tensor:
    """`x`, but at most `max`.

    >>> ps.clamp_max(ps.asarray([-1, 2]), 0).tolist()
    [-1, 0]
    """
    return arithmetic.clip(x, None, max)


@of_tensor
@composite
def nan_to_num(
    x: Tensor, /, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    """Replace NaN by `nan`, and infinities by `posinf` and `neginf` or the limits of the dtype.

    >>> ps.nan_to_num(ps.asarray([ps.nan, 2.0])).tolist()
    [0.0, 2.0]
    """
    if x.dtype.kind != "f":
        return astype(x, x.dtype)
    most = float(dtypes.limits(x.dtype).max)
    top, bottom = most if posinf is None else posinf, -most if neginf is None else neginf
    # Of two numbers, `where` would give float32, whatever `x` is.
    is_infinite, is_below = isinf(x), less(x, 0)
    result = where(logical_and(is_infinite, is_below), bottom, x)
    result = where(logical_and(is_infinite, logical_not(is_below)), top, result)
    return where(isnan(x), nan, result)


def truth(x: Any) -> Any:
    """A tensor as bool (not 0 is true); other values unchanged."""
    return astype(x, dtypes.bool_) if isinstance(x, Tensor) else x


# The logarithm of the gamma function. Between 1 and 2 it is t (t - 1) P(t - 1/2) with t = x - 1, where P
# interpolates at Chebyshev's points, with a relative error below 5e-9 in float32 and below 1e-16 in float64.
# Up to 9 the recurrence gamma(x + 1) = x gamma(x) leads back to that; above 9 it is Stirling's series, and
# below 1/2 the reflection formula.

_GAMMA = (
    0.4831289522803855,
    -0.14595989698806494,
    0.06291105386031644,
    -0.03130827316519022,
    0.01680809774717337,
    -0.009432411478912226,
    0.00532599199145505,
    -0.0031377364120114713,
    0.002446744656201957,
    -0.001487484340679373,
)
_GAMMA_WIDE = (
    0.4831289505409809,
    -0.14595989591430608,
    0.06291140107458168,
    -0.0313084875010217,
    0.01679709862898276,
    -0.009425622447061077,
    0.005446457956850198,
    -0.003212074148968353,
    0.0019229132430031888,
    -0.0011644126224041502,
    0.0007115650250304279,
    -0.0004380224528708151,
    0.0002708950296280356,
    -0.00016865016226225166,
    0.00010771545393886628,
    -6.765020809380933e-05,
    3.4988964640274815e-05,
    -2.2062867871136606e-05,
    2.8340547351058232e-05,
    -1.804276273750087e-05,
)
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
_HARMONIC = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
_STEPS = 7  # of the recurrence, from 9 down to 2
_SHIFT = 8  # of the argument, for the accuracy of the series of the digamma function


@of_tensor
@composite
def lgamma(x: Tensor, /) -> Tensor:
    """The logarithm of the absolute value of the gamma function.

    >>> ps.lgamma(ps.asarray([1.0])).tolist()
    [0.0]
    """
    x = _floating("lgamma", x)
    return lasting_vjp(narrowed(_lgamma(widened(x.detach())), x.dtype), [x], _lgamma_gradient)


def _lgamma_gradient(g: Tensor, _: Tensor, x: Tensor) -> list[Tensor]:
    return [multiply(g, digamma(x))]


def _lgamma(x: Tensor) -> Tensor:
    below = less(x, 0.5)
    z = where(below, subtract(1.0, x), x)
    small = less(z, 1.0)
    factor, rest = where(small, divide(1.0, z), 1.0), where(small, add(z, 1.0), z)
    for _ in range(_STEPS):
        above = arithmetic.greater(rest, 2.0)
        rest = where(above, subtract(rest, 1.0), rest)
        factor = where(above, multiply(factor, rest), factor)
    t = subtract(rest, 1.0)
    series = _GAMMA_WIDE if x.dtype == dtypes.float64 else _GAMMA
    near = add(multiply(multiply(t, subtract(t, 1.0)), _polynomial(subtract(t, 0.5), series)), log(factor))
    inverse = divide(1.0, z)
    tail = multiply(inverse, _polynomial(multiply(inverse, inverse), _STIRLING))
    far = add(multiply(subtract(z, 0.5), subtract(log(z), 1.0)), add(tail, 0.5 * math.log(2 * math.pi) - 0.5))
    above = where(less(z, 9.0), near, far)
    sine = abs_(sin(multiply(subtract(x, round_(x)), math.pi)))
    reflected = subtract(log(divide(math.pi, where(below, sine, 1.0))), above)
    return where(isinf(x), math.inf, where(below, reflected, above))


@of_tensor
@composite
def digamma(x: Tensor, /) -> Tensor:
    """The derivative of `lgamma`.

    >>> round(ps.digamma(ps.asarray([1.0])).item(), 4)
    -0.5772
    """
    x = _floating("digamma", x)
    wide = widened(x)
    below = less(wide, 0.5)
    z = where(below, subtract(1.0, wide), wide)
    shifted = add(z, float(_SHIFT))
    inverse = divide(1.0, shifted)
    square = multiply(inverse, inverse)
    tail = add(multiply(inverse, 0.5), multiply(square, _polynomial(square, _HARMONIC)))
    value = subtract(log(shifted), tail)
    for step in range(_SHIFT):
        value = subtract(value, divide(1.0, add(z, float(step))))
    angle = multiply(subtract(wide, round_(wide.detach())), math.pi)
    reflected = subtract(value, divide(math.pi, tan(where(below, angle, 1.0))))
    pole = logical_and(less(wide, 0), equal(wide, round_(wide.detach())))
    return narrowed(where(pole, math.nan, where(below, reflected, value)), x.dtype)


def _floating(name: str, x: Tensor) -> Tensor:
    if x.dtype.kind in "biu":
        return astype(x, dtypes.float32)
    if x.dtype.kind != "f":
        raise TypeError(f"{name} does not take {x.dtype}")
    return x


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    total: Any = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        total = add(multiply(total, x), coefficient)
    return total  # type: ignore[no-any-return]
