"""Statements of the kernel IR, and the kernel that they make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from penstock.kernels.ir.expressions import ONE, Expr, Type, Var


class Statement:
    """What a thread does."""


@dataclass(frozen=True)
class _Binding(Statement):
    """A name and its value."""

    name: str
    value: Expr

    @property
    def type(self) -> Type:
        """That of the value."""
        return self.value.type


class Let(_Binding):
    """A name for a value."""


class Declare(_Binding):
    """A variable, which may be assigned another value."""


class Assign(_Binding):
    """Another value for a variable."""


@dataclass(frozen=True)
class Store(Statement):
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
    width: int = 1  # items that it is aligned to; in WGSL a vector, which is always read and written whole


@dataclass(frozen=True)
class RegisterArray(Statement):
    """An array of one thread, which is in registers where every index is a constant in the end."""

    name: str
    dtype: str
    length: int


@dataclass(frozen=True)
class Forget(Statement):
    """The compiler is to know no longer what is in registers, or it keeps all that was computed from them."""

    name: str
    length: int


@dataclass(frozen=True)
class Accumulate(Statement):
    """A variable takes in one more value of a reduction."""

    target: Var
    operation: str
    value: Expr
    type: Type
    first: Expr | None = None  # the first item of the target that takes one, where it has more than the value


@dataclass(frozen=True)
class MultiplyAdd(Statement):
    """A variable of floats grows by a product, which may be rounded before or not: as is fastest."""

    target: Var
    left: Expr
    right: Expr


@dataclass(frozen=True)
class BlockReduce(Statement):
    """`name` is the reduction of a variable's items, and of the neighbouring threads that share a row."""

    name: str
    operation: str
    variable: Var
    array: str | None  # memory with an item for each thread of the group; None where a row has one thread
    threads: Expr = ONE


@dataclass(frozen=True)
class StridedReduce(Statement):
    """A variable takes in those of the threads `stride`, 2 * `stride` ... after this one, item by item.

    Only the first `stride` threads of the group have the result.
    """

    target: Var
    operation: str
    array: str  # memory with an item for each item of each thread
    stride: Expr
    threads: Expr  # of the group


@dataclass(frozen=True)
class Pointer(Statement):
    """A name for a buffer or a local array from an offset on, for dialects that have pointers.

    What is read and written through it overlaps nothing else.
    """

    name: str
    buffer: str
    stored: str
    offset: Expr


@dataclass(frozen=True)
class UniformLoad(Statement):
    """`name` is an item of a local array, read after a barrier: all threads have the same value."""

    name: str
    array: str
    index: Expr


@dataclass(frozen=True)
class AtomicAdd(Statement):
    """An item of a local array of int32 grows; `name` is what it was before, if anybody asks."""

    array: str
    index: Expr
    value: Expr
    name: str = ""


@dataclass(frozen=True)
class CallFunction(Statement):
    """A call of one of the kernel's functions, as the workgroup with a number."""

    function: str
    group: Expr
    arrays: tuple[tuple[str, int], ...]  # local arrays it takes: dtype, and where in `LOCAL_MEMORY`
    buffers: tuple[tuple[str, str], ...]  # dtype, and which of the kernel's buffers
    arguments: tuple[Expr, ...]  # the places of its buffers, and its scalars


@dataclass(frozen=True)
class For(Statement):
    """A variable from `start` to before `stop`, in steps."""

    name: str
    start: Expr
    stop: Expr
    step: Expr
    body: list[Statement]
    unrolled: int = 0  # times that the body is laid out; 0 leaves it to the compiler
    trips: int = 1  # of a loop that reduces: how often its body is run, at most


@dataclass(frozen=True)
class While(Statement):
    """Statements as long as a condition holds."""

    condition: Expr
    body: list[Statement]


@dataclass(frozen=True)
class If(Statement):
    """Statements under a condition, and others where it does not hold."""

    condition: Expr
    body: list[Statement]
    otherwise: list[Statement] = field(default_factory=list)


@dataclass(frozen=True)
class Barrier(Statement):
    """No thread of the group goes on before all have come here."""

    device_memory: bool = False  # whether that orders what they read and write there, too


def walk(body: Sequence[Statement]) -> Iterator[Statement]:
    """Statements, and those inside others."""
    for statement in body:
        yield statement
        for part in ("body", "otherwise"):
            yield from walk(getattr(statement, part, ()))


Parameters = list[tuple[str, str]]
LOCAL_MEMORY = "local_memory"  # of a kernel whose functions take local arrays: items of 8 bytes


@dataclass(frozen=True)
class Function:
    """A kernel as a function of the number of its workgroup."""

    name: str
    kernel: KernelIR
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
    quick: bool = False  # functions need be little more exact than float16
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
