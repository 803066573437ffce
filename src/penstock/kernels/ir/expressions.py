"""Expressions of the kernel IR: typed, immutable, and built with Python's operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

HALF_PRECISION = ("bfloat16", "float16")  # dtypes of memory only, whose values are computed in float32
_INTEGERS = ("int32", "uint32")  # that operators compute without a thought of wrapping around
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
_TRUTHS = {_OPERATIONS[symbol] for symbol in _COMPARISONS}
_TRUTHS |= {"greater_or_nan", "less_or_nan", "isnan", "isinf", "isfinite", "signbit"}


@dataclass(frozen=True)
class Type:
    """What a value is, when it is computed with."""

    dtype: str
    width: int = 1


INT, BOOL = Type("int32"), Type("bool")


def _operator(symbol: str) -> Callable[[Expr, Operand], Expr]:
    return lambda left, right: _binary(symbol, left, right)


def _reflected(symbol: str) -> Callable[[Expr, Operand], Expr]:
    return lambda right, left: _binary(symbol, constant(left, right), right)


class Expr:
    """An expression. Its operators build larger ones; Python's numbers become constants of its dtype."""

    type: Type

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
        """The value as one of another dtype."""
        return self if dtype == self.type.dtype else Cast(Type(dtype, self.type.width), self)


Operand = Expr | int | float


@dataclass(frozen=True)
class Const(Expr):
    """A number, in the text of the kernel."""

    value: int | float
    type: Type = INT


@dataclass(frozen=True)
class Var(Expr):
    """The value of a name: of a `Let`, a `Declare`, a loop's variable or a parameter."""

    name: str
    type: Type = INT


@dataclass(frozen=True)
class ThreadId(Expr):
    """The number of the thread in its workgroup."""

    type: Type = INT


@dataclass(frozen=True)
class WorkgroupId(Expr):
    """The number of the workgroup in the launch, along an axis."""

    axis: int = 0
    type: Type = INT


@dataclass(frozen=True)
class Affine(Expr):
    """A sum of integers times constants, and of a constant: an index."""

    terms: tuple[tuple[Expr, Expr | None], ...]  # each with its factor; None: 1
    constant: Expr | None  # None: 0
    type: Type = INT


@dataclass(frozen=True)
class Unary(Expr):
    """`~` of an integer, `!` of a truth value, or `-` of a number."""

    operator: str
    operand: Expr

    @property
    def type(self) -> Type:  # type: ignore[override]
        """That of the operand."""
        return self.operand.type


@dataclass(frozen=True)
class Binary(Expr):
    """An operator of integers or truth values, which reads the same in every language."""

    operator: str
    left: Expr
    right: Expr

    @property
    def type(self) -> Type:  # type: ignore[override]
        """That of the left operand, or a truth value."""
        return BOOL if self.operator in (*_COMPARISONS, "&&", "||") else self.left.type


@dataclass(frozen=True)
class Cast(Expr):
    """A value as one of another dtype."""

    type: Type
    value: Expr


@dataclass(frozen=True)
class Select(Expr):
    """One of two values, by a truth value that all items share."""

    type: Type
    condition: Expr
    yes: Expr
    no: Expr


@dataclass(frozen=True)
class Call(Expr):
    """A primitive operation, by its name. The inputs have the type `of`, except truth values."""

    type: Type
    operation: str
    inputs: tuple[Expr, ...]
    of: Type


@dataclass(frozen=True)
class Combine(Expr):
    """One value from two, for a reduction, whose order is free."""

    type: Type
    reduction: str
    left: Expr
    right: Expr


@dataclass(frozen=True)
class Identity(Expr):
    """The neutral element of a reduction."""

    type: Type
    reduction: str


@dataclass(frozen=True)
class Clamp(Expr):
    """A value as an integer from 0 to before `length`: the nearest, if it is none of them."""

    value: Expr
    length: Expr
    last: Expr  # length - 1
    type: Type = INT


@dataclass(frozen=True)
class Broadcast(Expr):
    """A vector with one number in every item, plus `step` for each item."""

    type: Type
    value: Expr
    step: int = 0


@dataclass(frozen=True)
class Vector(Expr):
    """Single values as the items of one with a width."""

    items: tuple[Expr, ...]

    @property
    def type(self) -> Type:  # type: ignore[override]
        """That of the items, as many of them."""
        return Type(self.items[0].type.dtype, len(self.items))


@dataclass(frozen=True)
class Lane(Expr):
    """One item of a variable with a width."""

    variable: Var
    number: int

    @property
    def type(self) -> Type:  # type: ignore[override]
        """That of the item."""
        return Type(self.variable.type.dtype)


@dataclass(frozen=True)
class Shuffle(Expr):
    """Items of two vectors of a CPU, by their numbers: those of the second come after those of the first."""

    type: Type
    left: Expr
    right: Expr
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Random(Expr):
    """The word of random bits with this number, by a state of four words."""

    type: Type
    state: tuple[Expr, ...]
    index: Expr
    step: int = 0  # of the number from item to item


@dataclass(frozen=True)
class Load(Expr):
    """What is read from a buffer, or an array, that stores `stored`; the items lie `step` apart."""

    type: Type
    buffer: str
    stored: str
    index: Expr
    step: int = 0
    aligned: int = 1  # items; the index is a multiple of it
    mask: Expr | None = None  # where it does not hold, nothing is read, and the value is 0


@dataclass(frozen=True)
class LoadIndex(Expr):
    """An item of integers of any size as one from 0 to before `length`; -1 if it is none of them."""

    buffer: str
    stored: str
    index: Expr
    length: Expr
    type: Type = INT


THREAD = ThreadId()
WORKGROUP = WorkgroupId()
TRUE = Const(True, BOOL)
ONE = Const(1)


def constant(value: Operand, like: Expr) -> Expr:
    """A number as an expression of the same dtype; an expression stays itself."""
    return value if isinstance(value, Expr) else Const(value, Type(like.type.dtype))


def integer(value: Operand) -> Expr:
    """An integer of 32 bits, or an expression, as an expression."""
    return value if isinstance(value, Expr) else Const(value)


def is_buffer(name: str) -> bool:
    """Whether a name is that of a parameter in device memory; else it is that of an array."""
    return name.rstrip("0123456789") in ("in", "out")


def all_of(conditions: Sequence[Expr]) -> Expr:
    """Whether all conditions hold."""
    result, *rest = conditions or (TRUE,)
    for condition in rest:
        result = result & condition
    return result


def call(operation: str, *inputs: Operand, dtype: str = "") -> Expr:
    """A primitive operation on values of one dtype, which is that of the result, unless it is told.

    Comparisons give truth values. The condition of `where` comes first.
    """
    like = next(value for value in reversed(inputs) if isinstance(value, Expr))
    values = tuple(constant(value, like) for value in inputs)
    of = values[-1].type
    result = dtype or ("bool" if operation in _TRUTHS else of.dtype)
    return Call(Type(result, of.width), operation, values, of)


def _binary(operator: str, left: Expr, right: Operand) -> Expr:
    value, dtype = constant(right, left), left.type.dtype
    if dtype == "bool" and operator in ("&", "|"):
        return Binary(operator * 2, left, value)
    if dtype in _INTEGERS or operator in ("/", "%"):
        return Binary(operator, left, value)
    return call(_OPERATIONS[operator], left, value)
