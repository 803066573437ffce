"""Expressions of the kernel IR: typed, immutable, and built with Python's operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import dataclass_transform

HALF_PRECISION = ("bfloat16", "float16")  # dtypes of memory only, whose values are computed in float32
_INTEGERS = ("int32", "uint32")  # dtypes for which operators need no care about wrapping around
_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
_OPERATIONS = {
    "+": "add",
    "-": "subtract",
    "*": "multiply",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
    "==": "equal",
    "!=": "not_equal",
    "&": "bitwise_and",
    "|": "bitwise_or",
    "^": "bitwise_xor",
    "<<": "bitwise_left_shift",
    ">>": "bitwise_right_shift",
}
_BOOLEAN_OPERATIONS = {_OPERATIONS[symbol] for symbol in _COMPARISONS}
_BOOLEAN_OPERATIONS |= {"greater_or_nan", "less_or_nan", "isnan", "isinf", "isfinite", "signbit"}


@dataclass(frozen=True)
class Type:
    """The dtype that a value is computed in, and its vector width."""

    dtype: str
    width: int = 1


INT, BOOL = Type("int32"), Type("bool")


def _operator(symbol: str) -> Callable[[Expr, Operand], Expr]:
    return lambda left, right: _binary(symbol, left, right)


def _reflected(symbol: str) -> Callable[[Expr, Operand], Expr]:
    return lambda right, left: _binary(symbol, constant(left, right), right)


@dataclass_transform(frozen_default=True)
class Expr:
    """An expression; every subclass is a frozen dataclass.

    Operators build larger expressions. A Python number beside an expression becomes a constant of its dtype.
    """

    type: Type

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)

    __add__, __radd__ = _operator("+"), _reflected("+")
    __sub__, __rsub__ = _operator("-"), _reflected("-")
    __mul__, __rmul__ = _operator("*"), _reflected("*")
    __floordiv__, __mod__ = _operator("/"), _operator("%")
    __and__, __or__, __xor__ = _operator("&"), _operator("|"), _operator("^")
    __lshift__, __rshift__ = _operator("<<"), _operator(">>")
    __lt__, __le__, __gt__, __ge__ = (_operator(symbol) for symbol in ("<", "<=", ">", ">="))
    eq, ne = _operator("=="), _operator("!=")

    def __truediv__(self, other: Operand) -> Expr:
        return call("divide", self, constant(other, self))

    def __invert__(self) -> Expr:
        return Unary("!" if self.type.dtype == "bool" else "~", self)

    def cast(self, dtype: str) -> Expr:
        """The value converted to another dtype."""
        return self if dtype == self.type.dtype else Cast(Type(dtype, self.type.width), self)


Operand = Expr | int | float


class Const(Expr):
    """A literal in the text of the kernel."""

    value: int | float
    type: Type = INT


class Var(Expr):
    """A named value: of a `Let`, a `Declare`, a loop or a parameter."""

    name: str
    type: Type = INT


class ThreadId(Expr):
    """The index of the thread in its workgroup."""

    type: Type = INT


class WorkgroupId(Expr):
    """The index of the workgroup in the launch, along an axis."""

    axis: int = 0
    type: Type = INT


class Affine(Expr):
    """An index: a sum of integers, each times a constant, plus a constant."""

    terms: tuple[tuple[Expr, Expr | None], ...]  # (integer, factor); None: 1
    constant: Expr | None  # None: 0
    type: Type = INT


class Unary(Expr):
    """`~` of an integer, `!` of a boolean, or `-`."""

    operator: str
    operand: Expr

    @property
    def type(self) -> Type:  # type: ignore[override]
        """The type of the operand."""
        return self.operand.type


class Binary(Expr):
    """An operator on integers or booleans that is spelled the same in every language."""

    operator: str
    left: Expr
    right: Expr

    @property
    def type(self) -> Type:  # type: ignore[override]
        """The type of the left operand; a boolean for comparisons."""
        return BOOL if self.operator in (*_COMPARISONS, "&&", "||") else self.left.type


class Cast(Expr):
    """A value converted to another dtype."""

    type: Type
    value: Expr


class Select(Expr):
    """One of two values, by a scalar condition."""

    type: Type
    condition: Expr
    yes: Expr
    no: Expr


class Call(Expr):
    """A primitive operation by its name. The inputs have the type `of`, except conditions."""

    type: Type
    operation: str
    inputs: tuple[Expr, ...]
    of: Type


class Combine(Expr):
    """Two values combined by a reduction whose order is free."""

    type: Type
    reduction: str
    left: Expr
    right: Expr


class Identity(Expr):
    """The identity element of a reduction."""

    type: Type
    reduction: str


class Clamp(Expr):
    """A value clamped to an integer index: at least 0, less than `length`."""

    value: Expr
    length: Expr
    last: Expr  # length - 1
    type: Type = INT


# How far each lane of a vector lies from the one before it, or from the first, where that differs.
Steps = int | tuple[int, ...]


def lane_offsets(steps: Steps, width: int) -> tuple[int, ...]:
    """How far each lane lies from the first."""
    return tuple(lane * steps for lane in range(width)) if isinstance(steps, int) else steps


class Broadcast(Expr):
    """A vector of a scalar in every lane, plus the offset of the lane."""

    type: Type
    value: Expr
    step: Steps = 0


class Vector(Expr):
    """A vector of scalars."""

    items: tuple[Expr, ...]

    @property
    def type(self) -> Type:  # type: ignore[override]
        """The dtype of the items, and their count as width."""
        return Type(self.items[0].type.dtype, len(self.items))


class Lane(Expr):
    """One lane of a vector variable."""

    variable: Var
    number: int

    @property
    def type(self) -> Type:  # type: ignore[override]
        """The type of the lane."""
        return Type(self.variable.type.dtype)


class Shuffle(Expr):
    """Lanes of two vectors of a CPU; the lanes of the second are numbered after those of the first."""

    type: Type
    left: Expr
    right: Expr
    lanes: tuple[int, ...]


class Random(Expr):
    """The word of random bits at an index, given a state of four words."""

    type: Type
    state: tuple[Expr, ...]
    index: Expr
    step: int = 0  # of the index, from lane to lane


class Load(Expr):
    """A read from a buffer or an array of dtype `stored`; the lanes lie `step` items apart."""

    type: Type
    buffer: str
    stored: str
    index: Expr
    step: Steps = 0
    aligned: int = 1  # the index is a multiple of it
    mask: Expr | None = None  # where it is false, nothing is read and the value is 0
    once: bool = False  # no other thread reads this memory, and none writes it


class LoadIndex(Expr):
    """An item of any integer dtype as an index below `length`; -1 if it is out of range."""

    buffer: str
    stored: str
    index: Expr
    length: Expr
    type: Type = INT


class SameMemory(Expr):
    """Whether two buffers are the same bytes: an output that is written over an input."""

    left: str
    right: str
    type: Type = BOOL


THREAD = ThreadId()
WORKGROUP = WorkgroupId()
TRUE = Const(True, BOOL)
FALSE = Const(False, BOOL)
ONE = Const(1)


def constant(value: Operand, like: Expr) -> Expr:
    """A Python number as a constant of the same dtype; an expression as it is."""
    return value if isinstance(value, Expr) else Const(value, Type(like.type.dtype))


def integer(value: Operand) -> Expr:
    """A Python integer as an int32 constant; an expression as it is."""
    return value if isinstance(value, Expr) else Const(value)


def is_buffer(name: str) -> bool:
    """Whether a name is that of a parameter in device memory, rather than of an array."""
    return name.rstrip("0123456789") in ("in", "out")


def all_of(conditions: Sequence[Expr]) -> Expr:
    """Whether all conditions hold."""
    result, *rest = conditions or (TRUE,)
    for condition in rest:
        result = result & condition
    return result


def call(operation: str, *inputs: Operand, dtype: str = "") -> Expr:
    """A primitive operation on values of one dtype; the condition of `where` comes first.

    The result has that dtype unless `dtype` is given; comparisons give booleans.
    """
    like = next(value for value in reversed(inputs) if isinstance(value, Expr))
    values = tuple(constant(value, like) for value in inputs)
    of = values[-1].type
    result = dtype or ("bool" if operation in _BOOLEAN_OPERATIONS else of.dtype)
    return Call(Type(result, of.width), operation, values, of)


def _binary(operator: str, left: Expr, right: Operand) -> Expr:
    value, dtype = constant(right, left), left.type.dtype
    if dtype == "bool" and operator in ("&", "|"):
        return Binary(operator * 2, left, value)
    if dtype in _INTEGERS or operator in ("/", "%"):
        return Binary(operator, left, value)
    return call(_OPERATIONS[operator], left, value)
