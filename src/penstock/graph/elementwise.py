"""Elementwise primitives: a row for each, with its gradient beside its reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.graph.dtypes import HALF_PRECISION, bool_, complex64, float32, float64
from penstock.graph.node import Array, DType, Kind, Node, Primitive, Rounding, Shape, Vjp
from penstock.graph.reference import by_parts

Apply = Callable[..., Node]
BOOL = bool_
PRIMITIVES: dict[str, Primitive] = {}
_EXACT, _PRODUCT, _SUM = Rounding.EXACT, Rounding.PRODUCT, Rounding.SUM
# Traits of primitives that take several instructions, or longer than reading an item from memory.
_QUOTIENT: dict[str, Any] = {"costly": True, "rounding": Rounding.QUOTIENT}
_SLOW: dict[str, Any] = {"costly": True, "weight": 1}


def _real(x: Node) -> tuple[Shape, DType]:
    if x.dtype.kind != "c":
        return x.shape, x.dtype
    return x.shape, float32 if x.dtype == complex64 else float64


def _floating(x: Node) -> tuple[Shape, DType]:
    if x.dtype.kind != "f":
        raise TypeError(f"the input has to be floating point, and {x.dtype} was given")
    return x.shape, x.dtype


def _row(
    name: str,
    reference: Callable[..., Array],
    vjp: Vjp | None = None,
    shape_rule: Any = None,
    rounding: Rounding = Rounding.VARIES,
    **traits: Any,
) -> Callable[..., Node]:
    """Add a primitive to the table, and return the function that applies it."""
    primitive = PRIMITIVES[name] = Primitive(
        name, Kind.ELEMENTWISE, shape_rule, reference, vjp, rounding=rounding, **traits
    )

    def apply(*inputs: Node) -> Node:
        return Node(primitive, inputs, {})

    return apply


def _reciprocal(denominator: Callable[[Node], Node]) -> Vjp:
    """The gradient of a function whose derivative is 1 / `denominator`."""
    return lambda g, n: (divide(g, denominator(n.inputs[0])),)


def cast(x: Node, dtype: DType) -> Node:
    """`x` in another dtype."""
    return x if x.dtype is dtype or x.dtype == dtype else Node(CAST, (x,), {"dtype": dtype})


def widened(x: Node) -> Node:
    """`x` in the dtype that is used for computing: float32 for float16 and bfloat16."""
    return cast(x, float32) if x.dtype in HALF_PRECISION else x


def full(shape: Shape, dtype: DType, number: Any) -> Node:
    """A constant of this shape; an OverflowError if it is an integer that the dtype cannot hold."""
    if type(number) is int:
        check_range(number, dtype)
    return Node(FULL, (), {"shape": shape, "dtype": dtype, "number": number})


def check_range(number: int, dtype: DType) -> None:
    """Raise OverflowError if a dtype cannot hold an integer."""
    if dtype.kind in "iu":
        bits = 8 * dtype.itemsize
        least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if dtype.kind == "i" else (0, (1 << bits) - 1)
        if not least <= number <= most:
            raise OverflowError(f"{number} does not fit into {dtype}, which goes from {least} to {most}")
    elif number.bit_length() > 1023 and dtype.kind in "fc":
        raise OverflowError(f"an integer of {number.bit_length()} bits does not fit into {dtype}")


def like(x: Node, number: Any) -> Node:
    """A constant in the shape and dtype of `x`."""
    return full(x.shape, x.dtype, number)


def _cast_reference(x: Array, dtype: DType) -> Array:
    """NumPy's, but that numbers out of range become the nearest integer, and NaN 0, on every machine."""
    if dtype.kind not in "iu" or x.dtype.kind != "f":
        return x.astype(dtype)
    limits = np.iinfo(np.dtype(dtype))
    low, top = float(limits.min), float(limits.max + 1)  # powers of 2, or 0: exact in every dtype
    result = np.where((x > low) & (x < top), x, 0).astype(dtype)
    result[x <= low] = limits.min
    result[x >= top] = limits.max
    return result


CAST = PRIMITIVES["cast"] = Primitive(
    "cast",
    Kind.ELEMENTWISE,
    lambda x, dtype: (x.shape, dtype),
    _cast_reference,
    lambda g, n: (cast(g, n.inputs[0].dtype) if n.inputs[0].dtype.kind in "fc" else None,),
    operations=lambda n: 0,
    rounding=_EXACT,
)
FULL = PRIMITIVES["full"] = Primitive(
    "full",
    Kind.CREATION,
    lambda shape, dtype, number: (shape, dtype),
    lambda shape, dtype, number: np.broadcast_to(np.asarray(number).astype(dtype), shape),
    constants=("number",),
    rounding=_EXACT,
)

# Functions whose results at infinity differ between NumPy and the array API standard


def _expm1(x: Array) -> Array:
    result = np.expm1(x)
    return np.where(np.isfinite(x), result + 0, np.exp(x) - 1) if x.dtype.kind == "c" else result


def _tanh(x: Array) -> Array:
    result = np.tanh(x)
    if x.dtype.kind == "c":
        saturated = np.isinf(x.real) & np.isfinite(x.imag)
        limit = np.copysign(1, x.real) + 1j * np.copysign(0, x.imag)
        result = np.where(saturated, limit, result).astype(x.dtype)
    return result


def _floor_divide(x: Array, y: Array) -> Array:
    result = np.floor_divide(x, y)
    if x.dtype.kind != "f":
        return result
    return np.where(np.isfinite(x) & np.isfinite(y), result, np.floor(x / y))


def _power(x: Array, y: Array) -> Array:
    """NumPy's, which gives NaN instead of inf or 0 for a fractional power of -inf on some processors."""
    result = np.power(x, y)
    if x.dtype.kind != "f":
        return result
    lost = np.isneginf(x) & np.isnan(result) & ~np.isnan(y)
    return np.where(lost, np.where(y > 0, np.inf, 0), result).astype(x.dtype) if lost.any() else result


# One input

_IDENTITY: dict[str, Any] = {"rounding": _EXACT, "is_identity": True}
# Both give their input: `stop` lets no gradient pass, and `positive` makes a node that is distinct from it.
stop: Apply = _row("stop", lambda x: x, lambda g, n: (None,), stop_gradient=True, **_IDENTITY)
positive: Apply = _row("positive", lambda x: x, lambda g, n: (g,), **_IDENTITY)
negative: Apply = _row("negative", np.negative, lambda g, n: (negative(g),), rounding=_EXACT)
abs_: Apply = _row("abs", np.abs, lambda g, n: (multiply(g, sign(n.inputs[0])),), _real, rounding=_EXACT)
sign: Apply = _row("sign", np.sign, lambda g, n: (None,), rounding=_EXACT)
floor: Apply = _row("floor", np.floor, lambda g, n: (None,), rounding=_EXACT)
ceil: Apply = _row("ceil", np.ceil, lambda g, n: (None,), rounding=_EXACT)
trunc: Apply = _row("trunc", np.trunc, lambda g, n: (None,), rounding=_EXACT)
round_: Apply = _row("round", np.round, lambda g, n: (None,), rounding=_EXACT)
exp: Apply = _row("exp", np.exp, lambda g, n: (multiply(g, n),), **_SLOW)
expm1: Apply = _row("expm1", _expm1, lambda g, n: (multiply(g, add(n, like(n, 1))),), **_SLOW)
log: Apply = _row("log", np.log, _reciprocal(lambda x: x), **_SLOW)
log1p: Apply = _row("log1p", np.log1p, _reciprocal(lambda x: add(x, like(x, 1))), **_SLOW)
log2: Apply = _row("log2", np.log2, _reciprocal(lambda x: multiply(x, like(x, np.log(2)))), **_SLOW)
log10: Apply = _row("log10", np.log10, _reciprocal(lambda x: multiply(x, like(x, np.log(10)))), **_SLOW)
sqrt: Apply = _row("sqrt", np.sqrt, lambda g, n: (divide(multiply(g, like(g, 0.5)), n),), **_QUOTIENT)
sin: Apply = _row("sin", np.sin, lambda g, n: (multiply(g, cos(n.inputs[0])),), **_SLOW)
cos: Apply = _row("cos", np.cos, lambda g, n: (negative(multiply(g, sin(n.inputs[0]))),), **_SLOW)
tan: Apply = _row("tan", np.tan, lambda g, n: (multiply(g, add(multiply(n, n), like(g, 1))),), **_SLOW)
asin: Apply = _row("asin", np.arcsin, _reciprocal(lambda x: sqrt(_one_minus_square(x))), **_SLOW)
acos: Apply = _row(
    "acos", np.arccos, lambda g, n: (negative(divide(g, sqrt(_one_minus_square(n.inputs[0])))),), **_SLOW
)
atan: Apply = _row("atan", np.arctan, _reciprocal(lambda x: _square_plus(x, 1)), **_SLOW)
sinh: Apply = _row("sinh", np.sinh, lambda g, n: (multiply(g, cosh(n.inputs[0])),), **_SLOW)
cosh: Apply = _row("cosh", np.cosh, lambda g, n: (multiply(g, sinh(n.inputs[0])),), **_SLOW)
tanh: Apply = _row("tanh", _tanh, lambda g, n: (multiply(g, _one_minus_square(n)),), **_SLOW)
asinh: Apply = _row("asinh", np.arcsinh, _reciprocal(lambda x: sqrt(_square_plus(x, 1))), **_SLOW)
acosh: Apply = _row("acosh", np.arccosh, _reciprocal(lambda x: sqrt(_square_plus(x, -1))), **_SLOW)
atanh: Apply = _row("atanh", np.arctanh, _reciprocal(lambda x: _one_minus_square(x)), **_SLOW)
erf: Apply = _row(
    "erf",
    lambda x: by_parts(_erf, x.astype(np.float64) if x.dtype.kind in "biu" else x),
    lambda g, n: (multiply(g, _erf_slope(n.inputs[0])),),
    _floating,
    decompose=lambda n, target: None if _has_erf(n, target) else _erf(n.inputs[0]),
    **_SLOW,
)
erfc: Apply = _row(
    "erfc",
    lambda x: by_parts(_erfc, x.astype(np.float64) if x.dtype.kind in "biu" else x),
    lambda g, n: (negative(multiply(g, _erf_slope(n.inputs[0]))),),
    _floating,
    decompose=lambda n, _: _erfc(n.inputs[0]),
    **_SLOW,
)
logical_not: Apply = _row("logical_not", np.logical_not)
bitwise_invert: Apply = _row("bitwise_invert", np.invert)
isnan: Apply = _row("isnan", np.isnan, result=BOOL)
isinf: Apply = _row("isinf", np.isinf, result=BOOL)
isfinite: Apply = _row("isfinite", np.isfinite, result=BOOL)
signbit: Apply = _row("signbit", np.signbit, result=BOOL)
conj: Apply = _row("conj", np.conj, rounding=_EXACT)
real: Apply = _row("real", np.real, shape_rule=_real, rounding=_EXACT)
imag: Apply = _row("imag", np.imag, shape_rule=_real, rounding=_EXACT)

# The error function, to 2 or 3 units in the last place, and what it lacks to 1. In float32 it is x + x
# P(x^2) near 0, and 1 - exp(t Q(t) - t) up to t = 4, with the coefficients of N. Juffa; in float64 a Taylor
# series near 0. Elsewhere, with t = 1 / (1 + z / 2), erfc(z) = t exp(-z^2) P(t) in float64, where P
# interpolates at the Chebyshev nodes of (0, 2/3), with a relative error below 1e-15, and t exp(-z^2 + P(t))
# in float32, with a fit whose relative error is below 1.2e-7.

_ERF_SERIES = tuple(2 / math.sqrt(math.pi) * (-1) ** n / (math.factorial(n) * (2 * n + 1)) for n in range(21))
# fmt: off
_ERF_NEAR = (
    1.28379166e-1, -3.76125336e-1, 1.12819925e-1, -2.67681349e-2, 4.99119423e-3, -5.96761703e-4,
)
_ERF_FAR = (
    -1.28717512e-1, -6.34846687e-1, -1.06777877e-1, 2.42546219e-2, -3.88396438e-3, 3.83197126e-4,
    -1.72853470e-5,
)
_ERF_TAIL = (
    -1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806,
    0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277,
)
_ERF_TAIL_WIDE = (
    0.28209479177387836, 0.2820947917736371, 0.2468329428501734, 0.17630924106315446,
    0.08374704974342637, -0.004411764970536322, -0.056681336052144086, -0.05425242812218953,
    0.0031849038261362018, 0.004883872223422043, 0.27105758404851443, -0.808071650209445,
    2.148165565525544, -4.7062610627081956, 7.01256073117029, -6.847703039031827,
    4.299398371930956, -1.6316980397075518, 0.3167308842463006, -0.017971551045387883,
)
# fmt: on


def _has_erf(node: Node, target: Capabilities) -> bool:
    """Whether a device has a function: a CPU, of vectors."""
    return node.dtype == float32 and target.vector_width > 1


def _erf(x: Node) -> Node:
    if x.dtype in HALF_PRECISION:
        return cast(_erf(cast(x, float32)), x.dtype)
    z, one = abs_(x), like(x, 1)
    if x.dtype == float64:
        near, far, limit = _erf_series(x), subtract(one, _erf_tail(z)), 1.0
    else:
        near = add(x, multiply(x, _polynomial(multiply(x, x), _ERF_NEAR)))
        t = minimum(z, like(x, 4))
        far = subtract(one, exp(subtract(multiply(t, _polynomial(t, _ERF_FAR)), t)))
        limit = 0.927734375
    far = where(less(x, like(x, 0)), negative(far), far)
    return where(greater(z, like(x, limit)), far, near)


def _erfc(x: Node) -> Node:
    if x.dtype in HALF_PRECISION:
        return cast(_erfc(cast(x, float32)), x.dtype)
    z = abs_(x)
    tail = _erf_tail(z)
    far = where(less(x, like(x, 0)), subtract(like(x, 2), tail), tail)
    if x.dtype != float64:
        return far
    return where(less(z, like(x, 1)), subtract(like(x, 1), _erf_series(x)), far)


def _erf_series(x: Node) -> Node:
    return multiply(x, _polynomial(multiply(x, x), _ERF_SERIES))


def _erf_tail(z: Node) -> Node:
    """erfc of what is not negative, and in float64 at least 1."""
    t = divide(like(z, 1), add(multiply(z, like(z, 0.5)), like(z, 1)))
    square = multiply(negative(z), z)
    if z.dtype == float64:
        return multiply(multiply(t, exp(square)), _polynomial(t, _ERF_TAIL_WIDE))
    return multiply(t, exp(add(square, _polynomial(t, _ERF_TAIL))))


def _erf_slope(x: Node) -> Node:
    if x.dtype in HALF_PRECISION:
        return cast(_erf_slope(cast(x, float32)), x.dtype)
    return multiply(exp(multiply(negative(x), x)), like(x, 2 / math.sqrt(math.pi)))


def _polynomial(x: Node, coefficients: Sequence[float]) -> Node:
    total = like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = add(multiply(total, x), like(x, coefficient))
    return total


# Two inputs

add: Apply = _row("add", np.add, lambda g, n: (g, g), rounding=_SUM)
subtract: Apply = _row("subtract", np.subtract, lambda g, n: (g, negative(g)), rounding=_SUM)
multiply: Apply = _row(
    "multiply",
    np.multiply,
    lambda g, n: (multiply(g, n.inputs[1]), multiply(g, n.inputs[0])),
    rounding=_PRODUCT,
)
divide: Apply = _row("divide", np.divide, lambda g, n: _divide_gradient(g, *n.inputs), **_QUOTIENT)
floor_divide: Apply = _row("floor_divide", _floor_divide, lambda g, n: (None, None), **_SLOW)
remainder: Apply = _row(
    "remainder", np.remainder, lambda g, n: (g, negative(multiply(g, floor(divide(*n.inputs))))), **_SLOW
)
pow_: Apply = _row("pow", _power, lambda g, n: _pow_gradient(g, n, *n.inputs), **_SLOW)
atan2: Apply = _row("atan2", np.arctan2, lambda g, n: _atan2_gradient(g, *n.inputs), **_SLOW)
hypot: Apply = _row(
    "hypot", np.hypot, lambda g, n: [multiply(g, _direction(x, n)) for x in n.inputs], **_SLOW
)
copysign: Apply = _row(
    "copysign", np.copysign, lambda g, n: (_copysign_gradient(g, *n.inputs), None), rounding=_EXACT
)
nextafter: Apply = _row("nextafter", np.nextafter, rounding=_EXACT, as_stored=True, no_kernel=HALF_PRECISION)
logaddexp: Apply = _row(
    "logaddexp",
    np.logaddexp,
    lambda g, n: [multiply(g, exp(subtract(x, n))) for x in n.inputs],
    decompose=lambda n, _: _logaddexp(*n.inputs),
    **_SLOW,
)
maximum: Apply = _row("maximum", np.maximum, lambda g, n: _extreme_gradient(g, n), rounding=_EXACT)
minimum: Apply = _row("minimum", np.minimum, lambda g, n: _extreme_gradient(g, n), rounding=_EXACT)
equal: Apply = _row("equal", np.equal, result=BOOL)
not_equal: Apply = _row("not_equal", np.not_equal, result=BOOL)
less: Apply = _row("less", np.less, result=BOOL)
less_equal: Apply = _row("less_equal", np.less_equal, result=BOOL)
greater: Apply = _row("greater", np.greater, result=BOOL)
greater_equal: Apply = _row("greater_equal", np.greater_equal, result=BOOL)
logical_and: Apply = _row("logical_and", np.logical_and)
logical_or: Apply = _row("logical_or", np.logical_or)
logical_xor: Apply = _row("logical_xor", np.logical_xor)
bitwise_and: Apply = _row("bitwise_and", np.bitwise_and)
bitwise_or: Apply = _row("bitwise_or", np.bitwise_or)
bitwise_xor: Apply = _row("bitwise_xor", np.bitwise_xor)
bitwise_left_shift: Apply = _row("bitwise_left_shift", np.left_shift)
bitwise_right_shift: Apply = _row("bitwise_right_shift", np.right_shift)


def _logaddexp(x: Node, y: Node) -> Node:
    if x.dtype in HALF_PRECISION:
        return cast(_logaddexp(cast(x, float32), cast(y, float32)), x.dtype)
    rest = log1p(exp(negative(abs_(subtract(x, y)))))
    # Infinities of the same sign have no difference.
    return where(equal(x, y), add(x, like(x, math.log(2))), add(maximum(x, y), rest))


# Three inputs


def _where_shape(condition: Node, x: Node, y: Node) -> tuple[Shape, DType]:
    assert condition.shape == x.shape == y.shape
    assert x.dtype is y.dtype or x.dtype == y.dtype
    return x.shape, x.dtype


where: Apply = _row(
    "where",
    np.where,
    lambda g, n: (None, where(n.inputs[0], g, like(g, 0)), where(n.inputs[0], like(g, 0), g)),
    _where_shape,
    rounding=_EXACT,
    as_stored=True,
)


def _one_minus_square(x: Node) -> Node:
    return subtract(like(x, 1), multiply(x, x))


def _square_plus(x: Node, number: int) -> Node:
    return add(multiply(x, x), like(x, number))


def _divide_gradient(g: Node, x: Node, y: Node) -> tuple[Node, Node]:
    to_x = divide(g, y)
    return to_x, negative(multiply(to_x, divide(x, y)))


def _pow_gradient(g: Node, n: Node, x: Node, y: Node) -> tuple[Node, Node]:
    # The gradient of x is 0 at y = 0 for every x; that of y is 0 at x = 0, where the logarithm is not finite.
    # There x counts as 1, as the gradients of these would be NaN, too, if they were not finite.
    zero, flat, none = like(g, 0), equal(y, like(y, 0)), equal(x, like(x, 0))
    slope = multiply(y, pow_(where(flat, like(x, 1), x), subtract(y, like(y, 1))))
    to_x = where(flat, zero, multiply(g, slope))
    to_y = where(none, zero, multiply(g, multiply(n, log(where(none, like(x, 1), x)))))
    return to_x, to_y


def _atan2_gradient(g: Node, y: Node, x: Node) -> tuple[Node, Node]:
    length = hypot(x, y)
    scale = divide(g, where(equal(length, like(g, 0)), like(g, 1), length))
    return multiply(scale, _direction(x, length)), negative(multiply(scale, _direction(y, length)))


def _direction(x: Node, length: Node) -> Node:
    """A coordinate divided by the length of its vector; 0 for the zero vector."""
    return divide(x, where(equal(length, like(x, 0)), like(x, 1), length))


def _copysign_gradient(g: Node, x: Node, y: Node) -> Node:
    return multiply(g, multiply(sign(x), copysign(like(y, 1), y)))


def _extreme_gradient(g: Node, n: Node) -> list[Node]:
    """The gradient goes to the input that was taken; half to each if both are equal."""
    x, y = n.inputs
    share = where(equal(x, y), like(g, 0.5), like(g, 1))
    return [multiply(g, where(equal(side, n), share, like(g, 0))) for side in (x, y)]
