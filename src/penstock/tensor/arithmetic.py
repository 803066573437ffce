"""The elementwise functions of the array API standard."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from penstock.graph import elementwise
from penstock.graph.example import NUMBER
from penstock.graph.node import DType, Node
from penstock.tensor import core, dtypes
from penstock.tensor.arguments import of_tensor
from penstock.tensor.broadcasting import broadcast, common_shape
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor, record, scalar
from penstock.tensor.examples import with_example
from penstock.tensor.operands import (
    FITS,
    alike,
    as_number,
    device_of,
    number_in,
    operand,
    operands,
    plain,
    values_only,
)
from penstock.tensor.recording import recording
from penstock.tensor.repeated import again, again_with_number, is_computed, like_before, note_number

__all__ = [
    "abs",
    "acos",
    "acosh",
    "add",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bitwise_and",
    "bitwise_invert",
    "bitwise_left_shift",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "ceil",
    "clip",
    "conj",
    "copysign",
    "cos",
    "cosh",
    "divide",
    "equal",
    "erf",
    "erfc",
    "exp",
    "expm1",
    "floor",
    "floor_divide",
    "greater",
    "greater_equal",
    "hypot",
    "imag",
    "isfinite",
    "isinf",
    "isnan",
    "less",
    "less_equal",
    "log",
    "log1p",
    "log2",
    "log10",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "multiply",
    "negative",
    "nextafter",
    "not_equal",
    "positive",
    "pow",
    "real",
    "reciprocal",
    "remainder",
    "round",
    "sign",
    "signbit",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "subtract",
    "tan",
    "tanh",
    "trunc",
    "where",
]

# The kinds of dtypes that a function takes, as NumPy's letters.
_BOOL, _INTEGER, _REAL, _NUMBER, _ANY = "b", "iu", "iuf", "iufc", "biufc"
_FLOATING = "fc"
Record = Callable[[Any, Any], Tensor]
records: dict[str, tuple[Record, Record]] = {}  # by name, the parts of functions of two operands


def _check(name: str, kinds: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype.kind not in kinds:
            raise TypeError(f"{name} does not take {tensor.dtype}")


def _to_floating(x: Tensor) -> Tensor:
    return record(elementwise.cast(x._node, dtypes.float32), x)


def _unary(name: str, apply: Callable[[Node], Node], kinds: str, doc: str) -> Callable[[Tensor], Tensor]:
    def general(x: Tensor) -> Tensor:
        if kinds == _FLOATING and x.dtype.kind in "biu":
            x = _to_floating(x)
        _check(name, kinds, x)
        return record(apply(x._node), x)

    composed = composite(general)

    def function(x: Tensor, /) -> Tensor:
        if not isinstance(x, Tensor):
            given = type(x).__name__
            raise TypeError(f"{name} takes a tensor, and {given} was given; ps.asarray makes one of it")
        node = x._actual_node
        if node.value is not None or node.like is not None:
            repeated = again(general, x)
            if repeated is not None:
                return repeated
            if not core._captures and not x._actual_requires_grad:
                return composed(x)
        node = x._node
        return record(apply(node), x) if node.dtype.kind in kinds else general(x)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = with_example(name, doc)
    return function


def _binary(
    name: str, apply: Callable[[Node, Node], Node], kinds: str, doc: str
) -> Callable[[Any, Any], Tensor]:
    return _of_two(name, *_recording(name, apply, kinds), doc)


def _of_two(name: str, general: Record, new: Record, doc: str) -> Record:
    """A function of two operands: what `general` recorded before, for other values, or what `new` records."""

    def function(x1: Any, x2: Any, /) -> Tensor:
        both = isinstance(x1, Tensor) and isinstance(x2, Tensor)
        repeated = again(general, x1, x2) if both else again_with_number(general, x1, x2)
        return new(x1, x2) if repeated is None else repeated

    function.__name__ = function.__qualname__ = name
    function.__doc__ = with_example(name, doc)
    records[name] = general, new
    return function


def _recording(name: str, apply: Callable[[Node, Node], Node], kinds: str) -> tuple[Record, Record]:
    """What records a primitive of any operands, and the same with short ways."""

    def general(x1: Any, x2: Any) -> Tensor:
        return of_alike(*operands(x1, x2, name=name))

    composed = composite(general)

    def new(x1: Any, x2: Any) -> Tensor:
        quick = plain(x1, x2)
        if quick is not None:
            first, second, device, gradient = quick
            if first.dtype.kind in kinds:
                if not gradient and _may_repeat(first) and _may_repeat(second):
                    if first.like is not NUMBER and second.like is not NUMBER:
                        return composed(x1, x2)
                    note_number(general, apply(first, second), device, x1, x2)
                node = apply(first, second)
                if not gradient or (node.dtype.kind == "f" and recording()):
                    return Tensor(node, device, gradient)
        elif values_only(x1, x2):
            return composed(x1, x2)  # with a broadcast or a conversion
        pair = alike(x1, x2)
        if pair is None:
            both = isinstance(x1, Tensor) and isinstance(x2, Tensor)
            return composed(x1, x2) if both else general(x1, x2)
        return of_alike(*pair)

    def of_alike(a: Tensor, b: Tensor) -> Tensor:
        if kinds == _FLOATING and a.dtype.kind in "biu":
            a, b = _to_floating(a), _to_floating(b)
        _check(name, kinds, a)  # b has the same dtype
        return record(apply(a._node, b._node), a, b)

    return general, new


def or_product(power: Record) -> Record:
    """A power, but of some exponents by products, quotients and roots: in a fraction of the time."""

    @wraps(power)
    def function(x1: Any, x2: Any, /) -> Tensor:
        quick = _POWERS.get(x2) if type(x2) in FITS and isinstance(x1, Tensor) else None
        if quick is None or x1.dtype.kind not in FITS[type(x2)]:  # a power has another dtype
            return power(x1, x2)
        of_any = x2 in (2, 3) or (x2 == 4 and x1.dtype.kind in "iu")
        return quick(x1) if of_any or x1.dtype in (dtypes.float32, dtypes.float64) else power(x1, x2)

    return function


@composite
def _root(x: Tensor) -> Tensor:
    """The power 0.5: unlike a root, infinite for -inf, and 0 for -0."""
    return where(equal(x, -math.inf), math.inf, sqrt(add(x, 0.0)))


def _may_repeat(node: Node) -> bool:
    """Whether an operation on a node may be like one that was recorded before, or one that will be."""
    return (node.value is not None or node.like is not None) and not node.tracked


def _comparison(
    name: str,
    apply: Callable[[Node, Node], Node],
    kinds: str,
    compare_integers: Callable[[int, int], bool],
    doc: str,
) -> Callable[[Any, Any], Tensor]:
    general, compare = _recording(name, apply, kinds)

    def new(x1: Any, x2: Any) -> Tensor:
        try:
            return compare(x1, x2)
        except OverflowError:  # an integer out of the dtype's range: it is above or below all items
            tensor, number = (x1, x2) if isinstance(x1, Tensor) else (x2, x1)
            if tensor.dtype.kind not in "biu":
                raise
            sign = 1 if number > 0 else -1
            answer = compare_integers(0, sign) if tensor is x1 else compare_integers(sign, 0)
            return record(elementwise.full(tensor.shape, dtypes.bool_, answer), tensor)

    return _of_two(name, general, new, doc)


def _unchanged(x: Node) -> Node:
    return x


def _for_floating(apply: Callable[[Node], Node]) -> Callable[[Node], Node]:
    """Rounding leaves integers as they are."""
    return lambda x: x if x.dtype.kind in "iu" else apply(x)


def _for_complex(apply: Callable[[Node], Node]) -> Callable[[Node], Node]:
    """Real numbers are their own conjugates, and their own real parts."""
    return lambda x: apply(x) if x.dtype.kind == "c" else x


def _never(apply: Callable[[Node], Node], answer: bool) -> Callable[[Node], Node]:
    """Integers are never infinite or NaN."""
    return lambda x: elementwise.full(x.shape, dtypes.bool_, answer) if x.dtype.kind in "biu" else apply(x)


def _real_only(name: str, apply: Callable[[Node], Node]) -> Callable[[Node], Node]:
    def function(x: Node) -> Node:
        if x.dtype.kind == "c":
            raise TypeError(f"{name} does not take {x.dtype}")
        return apply(x)

    return function


abs = _unary("abs", elementwise.abs_, _NUMBER, "The absolute value.")
acos = _unary("acos", elementwise.acos, _FLOATING, "The inverse of the cosine.")
acosh = _unary("acosh", elementwise.acosh, _FLOATING, "The inverse of the hyperbolic cosine.")
asin = _unary("asin", elementwise.asin, _FLOATING, "The inverse of the sine.")
asinh = _unary("asinh", elementwise.asinh, _FLOATING, "The inverse of the hyperbolic sine.")
atan = _unary("atan", elementwise.atan, _FLOATING, "The inverse of the tangent.")
atanh = _unary("atanh", elementwise.atanh, _FLOATING, "The inverse of the hyperbolic tangent.")
bitwise_invert = _unary(
    "bitwise_invert", elementwise.bitwise_invert, _BOOL + _INTEGER, "The inverse of every bit."
)
ceil = _unary("ceil", _for_floating(elementwise.ceil), _REAL, "Rounded up.")
conj = _unary("conj", _for_complex(elementwise.conj), _NUMBER, "The complex conjugate.")
cos = _unary("cos", elementwise.cos, _FLOATING, "The cosine.")
cosh = _unary("cosh", elementwise.cosh, _FLOATING, "The hyperbolic cosine.")
erf = _unary("erf", _real_only("erf", elementwise.erf), _FLOATING, "The error function.")
erfc = _unary(
    "erfc", _real_only("erfc", elementwise.erfc), _FLOATING, "1 - erf(x), accurate where that is near 0."
)
exp = _unary("exp", elementwise.exp, _FLOATING, "The exponential.")
expm1 = _unary("expm1", elementwise.expm1, _FLOATING, "exp(x) - 1, accurate near 0.")
floor = _unary("floor", _for_floating(elementwise.floor), _REAL, "Rounded down.")
imag = _unary("imag", elementwise.imag, "c", "The imaginary part.")
isfinite = _unary("isfinite", _never(elementwise.isfinite, True), _ANY, "Whether it is finite.")
isinf = _unary("isinf", _never(elementwise.isinf, False), _ANY, "Whether it is infinite.")
isnan = _unary("isnan", _never(elementwise.isnan, False), _ANY, "Whether it is NaN.")
log = _unary("log", elementwise.log, _FLOATING, "The natural logarithm.")
log10 = _unary("log10", elementwise.log10, _FLOATING, "The logarithm to base 10.")
log1p = _unary("log1p", elementwise.log1p, _FLOATING, "log(1 + x), accurate near 0.")
log2 = _unary("log2", elementwise.log2, _FLOATING, "The logarithm to base 2.")
logical_not = _unary("logical_not", elementwise.logical_not, _BOOL, "Logical not, of dtype bool.")
negative = _unary("negative", elementwise.negative, _NUMBER, "The negative.")
positive = _unary("positive", _unchanged, _NUMBER, "The unchanged value.")
real = _unary("real", _for_complex(elementwise.real), _NUMBER, "The real part.")
reciprocal = _unary(
    "reciprocal", lambda x: elementwise.divide(elementwise.like(x, 1), x), _FLOATING, "1 / x."
)
round = _unary("round", _for_floating(elementwise.round_), _NUMBER, "The nearest integer; ties to even.")
sign = _unary("sign", elementwise.sign, _NUMBER, "-1, 0 or 1; for complex numbers x / abs(x), or 0.")
signbit = _unary("signbit", elementwise.signbit, "f", "Whether the sign bit is set.")
sin = _unary("sin", elementwise.sin, _FLOATING, "The sine.")
sinh = _unary("sinh", elementwise.sinh, _FLOATING, "The hyperbolic sine.")
sqrt = _unary("sqrt", elementwise.sqrt, _FLOATING, "The square root.")
square = _unary("square", lambda x: elementwise.multiply(x, x), _NUMBER, "The square.")
tan = _unary("tan", elementwise.tan, _FLOATING, "The tangent.")
tanh = _unary("tanh", elementwise.tanh, _FLOATING, "The hyperbolic tangent.")
trunc = _unary("trunc", _for_floating(elementwise.trunc), _REAL, "Rounded towards 0.")

add = _binary("add", elementwise.add, _ANY, "The sum.")
atan2 = _binary("atan2", elementwise.atan2, _FLOATING, "The angle of the point (x2, x1).")
bitwise_and = _binary("bitwise_and", elementwise.bitwise_and, _BOOL + _INTEGER, "Bitwise and.")
bitwise_left_shift = _binary("bitwise_left_shift", elementwise.bitwise_left_shift, _INTEGER, "x1 << x2.")
bitwise_or = _binary("bitwise_or", elementwise.bitwise_or, _BOOL + _INTEGER, "Bitwise or.")
bitwise_right_shift = _binary("bitwise_right_shift", elementwise.bitwise_right_shift, _INTEGER, "x1 >> x2.")
bitwise_xor = _binary("bitwise_xor", elementwise.bitwise_xor, _BOOL + _INTEGER, "Bitwise exclusive or.")
copysign = _binary("copysign", elementwise.copysign, "f", "The magnitude of x1 with the sign of x2.")
divide = _binary("divide", elementwise.divide, _FLOATING, "The quotient, in floating point.")
equal = _comparison("equal", elementwise.equal, _ANY, operator.eq, "Whether both are equal.")
floor_divide = _binary("floor_divide", elementwise.floor_divide, _REAL, "The quotient, rounded down.")
greater = _comparison("greater", elementwise.greater, _BOOL + _REAL, operator.gt, "Whether x1 is greater.")
greater_equal = _comparison(
    "greater_equal", elementwise.greater_equal, _BOOL + _REAL, operator.ge, "Whether x1 is not less."
)
hypot = _binary("hypot", elementwise.hypot, "f", "The length of the vector (x1, x2).")
less = _comparison("less", elementwise.less, _BOOL + _REAL, operator.lt, "Whether x1 is less.")
less_equal = _comparison(
    "less_equal", elementwise.less_equal, _BOOL + _REAL, operator.le, "Whether x1 is not greater."
)
logaddexp = _binary("logaddexp", elementwise.logaddexp, "f", "The logarithm of the sum of exponentials.")
logical_and = _binary("logical_and", elementwise.logical_and, _BOOL, "Logical and, of dtype bool.")
logical_or = _binary("logical_or", elementwise.logical_or, _BOOL, "Logical or, of dtype bool.")
logical_xor = _binary("logical_xor", elementwise.logical_xor, _BOOL, "Logical exclusive or, of dtype bool.")
maximum = _binary("maximum", elementwise.maximum, _BOOL + _REAL, "The greater item of the two.")
minimum = _binary("minimum", elementwise.minimum, _BOOL + _REAL, "The lesser item of the two.")
multiply = _binary("multiply", elementwise.multiply, _ANY, "The product.")
nextafter = _binary("nextafter", elementwise.nextafter, "f", "The next number from x1 towards x2.")
not_equal = _comparison("not_equal", elementwise.not_equal, _ANY, operator.ne, "Whether they differ.")
# By exponent; that of -2 is not the reciprocal of the square, which may be subnormal.
_POWERS: dict[float, Callable[[Tensor], Tensor]] = {
    2: square,
    3: lambda x: multiply(square(x), x),
    4: lambda x: square(square(x)),
    0.5: _root,
    -0.5: lambda x: reciprocal(_root(x)),
    -1: reciprocal,
    -2: lambda x: square(reciprocal(x)),
}
power = _binary("pow", elementwise.pow_, _NUMBER, "x1 to the power of x2.")
pow = or_product(power)
remainder = _binary("remainder", elementwise.remainder, _REAL, "x1 - x2 * floor_divide(x1, x2).")
subtract = _binary("subtract", elementwise.subtract, _NUMBER, "The difference.")


def where(condition: Any, x1: Any, x2: Any, /) -> Tensor:
    """Items of `x1` where the condition is true, of `x2` elsewhere."""
    quick = plain(x1, x2)
    if quick is not None and isinstance(condition, Tensor):
        first, second, at, gradient = quick
        chosen = condition._actual_node
        fits = chosen.dtype is dtypes.bool_ and chosen.shape == first.shape
        if fits and condition.device is at and not gradient:
            nodes = chosen, first, second
            if chosen.tracked or first.tracked or second.tracked:
                return Tensor(elementwise.where(*nodes), at)
            numbers = first.like is NUMBER, second.like is NUMBER
            kind = _where, first.shape, first.dtype.name, numbers
            return like_before(kind, nodes, at, elementwise.where)
    device = device_of("where", condition, x1, x2)
    mask, x1, x2 = (operand(value, device, "where") for value in (condition, x1, x2))
    if isinstance(mask, bool):
        mask = scalar(mask, dtypes.bool_, device)
    if not isinstance(mask, Tensor) or mask.dtype.kind != _BOOL:
        given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"where takes a condition of dtype bool, and {given} was given")
    if not isinstance(x1, Tensor) and not isinstance(x2, Tensor):
        x1 = scalar(x1, dtypes.promote(dtypes.of_scalar(x1, None), dtypes.of_scalar(x2, None)), device)
    a, b = operands(x1, x2, name="where")
    return (_where_values if is_computed(mask) else _where)(mask, a, b)


def _where(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    shape = common_shape(mask.shape, a.shape)
    mask, a, b = (broadcast(tensor, shape) for tensor in (mask, a, b))
    return record(elementwise.where(mask._node, a._node, b._node), mask, a, b)


_where_values = composite(_where)


@of_tensor
def clip(x: Tensor, /, min: Any = None, max: Any = None) -> Tensor:
    """The items limited to the range from `min` to `max`, in the dtype of `x`; NaN stays NaN.

    An item that is equal to a limit passes its gradient.

    >>> ps.clip(ps.asarray([-5, 1, 9]), 0, 4).tolist()
    [0, 1, 4]
    """
    _check("clip", _REAL, x)
    return _clipped(x, _as_operand(min, x), _as_operand(max, x))


def _as_operand(limit: Any, x: Tensor) -> Any:
    """A number as a tensor, if it is in the floating-point dtype of `x`, so that one program serves all."""
    number = number_in(limit, x.dtype, x.device) if x.dtype.kind == "f" else None
    return limit if number is None else number


@composite
def _clipped(x: Tensor, min: Any, max: Any) -> Tensor:
    result = x
    for limit, is_inside in ((min, greater_equal), (max, less_equal)):
        if limit is not None and not _is_beyond(limit, x.dtype, above=is_inside is less_equal):
            # A NaN limit replaces every item; a NaN item is kept.
            outside = logical_and(logical_not(is_inside(result, limit)), equal(result, result))
            result = where(outside, limit, result)
    if result.dtype != x.dtype and result.dtype.kind in "iu":  # a limit may be beyond the range of `x`
        ends = np.iinfo(x.dtype.numpy)
        result = _clipped(result, int(ends.min), int(ends.max))
    return record(elementwise.cast(result._node, x.dtype), result)


def _is_beyond(limit: Any, dtype: DType, above: bool) -> bool:
    """Whether a limit is an integer out of the dtype's range, so that it limits no item."""
    number = as_number(limit)
    if type(number) is not int or (number > 0) != above:
        return False
    try:
        elementwise.check_range(number, dtype)
    except OverflowError:
        return True
    return False
