"""The kernel IR: what a kernel computes, as typed expressions and statements. A dialect prints it.

Expressions are immutable, have a type and are built with Python's operators. Indices and predicates are
expressions of single integers and truth values; a value of a fused group may have a vector width: that of a
CPU's vectors, or the number of neighbouring items that a thread of a GPU computes.

Python's `==` compares two expressions as data, so a comparison in a kernel is `a.eq(b)` or `a.ne(b)`. `//` is
the language's division: of numbers that are not negative, unless both signs were thought of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Type:
    """What a value is. Values of half precision are computed in float32, so dtype is never a half."""

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

    def bits(self, dtype: str) -> Expr:
        """The value's bits as a value of a dtype of the same size."""
        return self if dtype == self.type.dtype else Bitcast(Type(dtype), self)


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
class Bitcast(Expr):
    """The bits of a value as a value of another dtype of the same size."""

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


@dataclass(frozen=True)
class Let:
    """A name for a value."""

    name: str
    value: Expr

    @property
    def type(self) -> Type:
        """That of the value."""
        return self.value.type


@dataclass(frozen=True)
class Declare:
    """A variable, which may be assigned another value."""

    name: str
    value: Expr

    @property
    def type(self) -> Type:
        """That of the value."""
        return self.value.type


@dataclass(frozen=True)
class Assign:
    """Another value for a variable."""

    name: str
    value: Expr


@dataclass(frozen=True)
class Store:
    """A value goes into a buffer, or an array, that stores `stored`; items lie side by side."""

    value: Expr
    buffer: str
    stored: str
    index: Expr
    aligned: int = 1  # items; the index is a multiple of it
    width: int = 0  # items, where a single value goes into several; else those of the value

    @property
    def type(self) -> Type:
        """Of what is written."""
        return Type(self.value.type.dtype, self.width or self.value.type.width)


@dataclass(frozen=True)
class LocalArray:
    """Memory that the threads of a workgroup share."""

    name: str
    dtype: str
    length: int
    atomic: bool = False  # it is changed by `AtomicAdd`
    width: int = 1  # items that are always read and written together: in WGSL a vector, which is aligned


@dataclass(frozen=True)
class RegisterArray:
    """An array of one thread, which is in registers where every index is a constant in the end."""

    name: str
    dtype: str
    length: int


@dataclass(frozen=True)
class Forget:
    """The compiler is to know no longer what is in registers, or it keeps all that was computed from them."""

    name: str
    length: int


@dataclass(frozen=True)
class Accumulate:
    """A variable takes in one more value of a reduction."""

    target: Var
    operation: str
    value: Expr
    type: Type
    first: Expr | None = None  # the first item of the target that takes one, where it has more than the value


@dataclass(frozen=True)
class MultiplyAdd:
    """A variable of floats grows by a product, which may be rounded before or not: as is fastest."""

    target: Var
    left: Expr
    right: Expr


@dataclass(frozen=True)
class BlockReduce:
    """`name` is the reduction of a variable's items, and of the neighbouring threads that share a row."""

    name: str
    operation: str
    variable: Var
    array: str | None  # memory with an item for each thread of the group; None where a row has one thread
    threads: Expr = Const(1)


@dataclass(frozen=True)
class StridedReduce:
    """A variable takes in those of the threads `stride`, 2 * `stride` ... after this one, item by item.

    Only the first `stride` threads of the group have the result.
    """

    target: Var
    operation: str
    array: str  # memory with an item for each item of each thread
    stride: Expr
    threads: Expr  # of the group


@dataclass(frozen=True)
class Pointer:
    """A name for a buffer from an offset on, for dialects that have pointers.

    What is read and written through it overlaps nothing else.
    """

    name: str
    buffer: str
    stored: str
    offset: Expr


@dataclass(frozen=True)
class UniformLoad:
    """`name` is an item of a local array, read after a barrier: all threads have the same value."""

    name: str
    array: str
    index: Expr


@dataclass(frozen=True)
class AtomicAdd:
    """An item of a local array of int32 grows; `name` is what it was before, if anybody asks."""

    array: str
    index: Expr
    value: Expr
    name: str = ""


@dataclass(frozen=True)
class CallFunction:
    """A call of one of the kernel's functions, as the workgroup with a number."""

    function: str
    group: Expr
    arrays: tuple[tuple[str, int], ...]  # local arrays it takes: dtype, and where in `LOCAL_MEMORY`
    buffers: tuple[tuple[str, str], ...]  # dtype, and which of the kernel's buffers
    arguments: tuple[Expr, ...]  # the places of its buffers, and its scalars


@dataclass(frozen=True)
class For:
    """A variable from `start` to before `stop`, in steps."""

    name: str
    start: Expr
    stop: Expr
    step: Expr
    body: list[Statement]
    unrolled: int = 0  # times that the body is laid out; 0 leaves it to the compiler
    trips: int = 1  # of a loop that reduces: how often its body is run, at most


@dataclass(frozen=True)
class While:
    """Statements as long as a condition holds."""

    condition: Expr
    body: list[Statement]


@dataclass(frozen=True)
class If:
    """Statements under a condition, and others where it does not hold."""

    condition: Expr
    body: list[Statement]
    otherwise: list[Statement] = field(default_factory=list)


@dataclass(frozen=True)
class Barrier:
    """No thread of the group goes on before all have come here."""

    device_memory: bool = False  # whether that orders what they read and write there, too


Statement = (
    Let
    | Declare
    | Assign
    | Store
    | RegisterArray
    | Forget
    | Accumulate
    | MultiplyAdd
    | BlockReduce
    | StridedReduce
    | Pointer
    | UniformLoad
    | AtomicAdd
    | CallFunction
    | For
    | While
    | If
    | Barrier
)


Parameters = list[tuple[str, str]]
LOCAL_MEMORY = "local_memory"  # of a kernel whose functions take local arrays: items of 8 bytes


@dataclass(frozen=True)
class Function:
    """A kernel as a function of the number of its workgroup."""

    name: str
    kernel: KernelIR | str  # or opaque text
    linkage: str  # DEVICE: laid out wherever it is called; CALLED: not so; static: as the compiler likes
    private: bool = False  # one thread runs it, so its local arrays are arrays of the thread; else parameters


@dataclass(frozen=True)
class Table:
    """Integers in constant memory; in the text, the kernel's name comes before that of the table."""

    name: str
    values: tuple[int, ...]


@dataclass
class KernelIR:
    """A kernel before it is printed."""

    outputs: list[str] = field(default_factory=list)  # stored dtypes, of buffers out0, out1, ...
    inputs: list[str] = field(default_factory=list)  # stored dtypes, of buffers in0, in1, ...
    scalars: list[str] = field(default_factory=list)  # dtypes, of c0, c1, ...
    arrays: list[LocalArray] = field(default_factory=list)
    body: list[Statement] = field(default_factory=list)
    grid: tuple[int, ...] = (1,)
    group: tuple[int, ...] = (1,)
    vectors: bool = True  # whether widths are those of vectors; else each item is computed by itself
    resident: int = 1  # groups that a unit of a GPU should have room for at a time
    quick: bool = False  # whether functions may be as exact as halves only, with some digits to spare
    functions: list[Function] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    sizes: int = 0  # of this launch, which are parameters before the scalars: size0, size1, ...

    @property
    def parameters(self) -> tuple[Parameters, Parameters, Parameters]:
        """The outputs, inputs, and scalars after sizes, as (dtype, name)."""
        return (
            [(dtype, f"out{k}") for k, dtype in enumerate(self.outputs)],
            [(dtype, f"in{k}") for k, dtype in enumerate(self.inputs)],
            [
                *(("int32", f"size{k}") for k in range(self.sizes)),
                *((dtype, f"c{k}") for k, dtype in enumerate(self.scalars)),
            ],
        )


THREAD = ThreadId()
WORKGROUP = WorkgroupId()
TRUE = Const(True, BOOL)


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
    truth = operation in _TRUTHS
    return Call(Type(dtype or ("bool" if truth else of.dtype), of.width), operation, values, of)


_TRUTHS = frozenset(
    [
        "less",
        "less_equal",
        "greater",
        "greater_equal",
        "equal",
        "not_equal",
        "greater_or_nan",
        "less_or_nan",
        "isnan",
        "isinf",
        "isfinite",
        "signbit",
    ]
)


def _binary(operator: str, left: Expr, right: Operand) -> Expr:
    value, dtype = constant(right, left), left.type.dtype
    if dtype == "bool" and operator in ("&", "|"):
        return Binary(operator * 2, left, value)
    if dtype in _INTEGERS or operator in ("/", "%"):
        return Binary(operator, left, value)
    return call(_OPERATIONS[operator], left, value)
