"""Builds the kernels of templates: one body for OpenCL, CUDA and WGSL.

    k = KernelBuilder("reverse", capabilities, outputs=["float32"], inputs=["float32"])
    x, y = k.inputs[0], k.outputs[0]
    i = k.let("i", k.group() * 64 + k.thread)
    with k.when(i < length):
        k.store(y, i, k.load(x, length - 1 - i))
    source = k.source(grid, group)

Values are expressions of `ir/`. float16 and bfloat16 become float32 when they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.drivers.driver import Capabilities
from penstock.kernels.dialects import dialect_of
from penstock.kernels.ir.expressions import (
    THREAD,
    Broadcast,
    Combine,
    Const,
    Expr,
    Identity,
    Lane,
    Load,
    LoadIndex,
    Operand,
    Select,
    Type,
    Var,
    Vector,
    WorkgroupId,
    call,
    constant,
    integer,
)
from penstock.kernels.ir.statements import (
    Accumulate,
    Assign,
    AtomicAdd,
    Barrier,
    BlockReduce,
    Declare,
    For,
    If,
    KernelIR,
    Let,
    LocalArray,
    MultiplyAdd,
    Parameters,
    Pointer,
    RegisterArray,
    Statement,
    Store,
    UniformLoad,
    While,
)
from penstock.kernels.source import KernelSource

_HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Memory:
    """A buffer, memory of the workgroup, or an array of a thread."""

    name: str
    dtype: str

    @property
    def type(self) -> Type:
        """What its items are when they are computed with."""
        return Type("float32" if self.dtype in _HALVES else self.dtype)


class KernelBuilder:
    """One kernel while it grows. The outputs are out0, out1, ..., the inputs in0, in1, ..."""

    def __init__(
        self,
        name: str,
        capabilities: Capabilities,
        outputs: Sequence[str],
        inputs: Sequence[str],
        scalars: Sequence[str] = (),
    ) -> None:
        """`outputs`, `inputs` and `scalars` are dtypes."""
        self.name = name
        self._dialect = dialect_of(capabilities)
        vectors = capabilities.vector_width > 1
        self._kernel = KernelIR([*outputs], [*inputs], [*scalars], vectors=vectors)
        self._bodies: list[list[Statement]] = [self._kernel.body]
        self._count = 0
        self.outputs = [Memory(f"out{k}", dtype) for k, dtype in enumerate(outputs)]
        self.inputs = [Memory(f"in{k}", dtype) for k, dtype in enumerate(inputs)]
        self.scalars = [Var(f"c{k}", Type(dtype)) for k, dtype in enumerate(scalars)]
        self.thread: Expr = THREAD

    @property
    def parameters(self) -> tuple[Parameters, Parameters, Parameters]:
        """The outputs, inputs and scalars, as (dtype, name)."""
        return self._kernel.parameters

    def group(self, axis: int = 0) -> Expr:
        """The number of the workgroup."""
        return WorkgroupId(axis)

    # Names and variables

    def let(self, name: str, value: Operand) -> Var:
        """A name for a value."""
        return self._define(Let(name, integer(value)))

    def variable(self, name: str, value: Operand, dtype: str = "") -> Var:
        """A variable that starts with a value; `dtype` is that of a number."""
        first = value if isinstance(value, Expr) else Const(value, Type(dtype or "int32"))
        return self._define(Declare(name, first))

    def assign(self, variable: Var, value: Operand) -> None:
        """Another value for a variable."""
        self._add(Assign(variable.name, constant(value, variable)))

    def fresh(self, name: str) -> str:
        """A name that nothing else has, where a piece is built several times in one scope."""
        self._count += 1
        return f"{name}_{self._count}"

    # Memory

    def load(self, memory: Memory, index: Operand, mask: Expr | None = None) -> Expr:
        """An item; 0 where the mask does not hold. A read from memory that changes should get a name."""
        return Load(memory.type, memory.name, memory.dtype, integer(index), mask=mask)

    def load_index(self, memory: Memory, index: Operand, length: int) -> Expr:
        """An integer of any size from 0 to before `length`; -1 if it is none of them."""
        return LoadIndex(memory.name, memory.dtype, integer(index), Const(length))

    def load_vector(
        self, memory: Memory, index: Operand, width: int, aligned: int = 1, mask: Expr | None = None
    ) -> Expr:
        """Neighbouring items; the index is a multiple of `aligned`. On a GPU it should get a name at once."""
        type_ = Type(memory.type.dtype, width)
        return Load(type_, memory.name, memory.dtype, integer(index), 1, aligned, mask)

    def uniform(self, name: str, memory: Memory, index: Operand = 0) -> Var:
        """An item of shared memory after a barrier, which all threads know to be the same for all."""
        self._add(UniformLoad(name, memory.name, integer(index)))
        return Var(name)

    def pointer(self, name: str, memory: Memory, offset: Operand) -> Memory:
        """A buffer or shared memory from an offset on, on a CPU.

        Its items overlap nothing that is reached in another way.
        """
        self._add(Pointer(name, memory.name, memory.dtype, integer(offset)))
        return Memory(name, memory.dtype)

    def store(self, memory: Memory, index: Operand, value: Operand, aligned: int = 1) -> None:
        """Write an item, or the items of a vector; an integer of 32 bits may go into memory of int64."""
        item = value if isinstance(value, Expr) else Const(value, memory.type)
        self._add(Store(item, memory.name, memory.dtype, integer(index), aligned))

    def shared(self, name: str, dtype: str, length: int, atomic: bool = False, width: int = 1) -> Memory:
        """Memory of the workgroup; `atomic` where `atomic_add` changes it.

        `width`: it is aligned to so many items. In WGSL they are a vector, which is read and written whole.
        """
        self._kernel.arrays.append(LocalArray(name, dtype, length, atomic, width))
        return Memory(name, dtype)

    def registers(self, name: str, dtype: str, length: int) -> Memory:
        """An array of each thread."""
        self._add(RegisterArray(name, dtype, length))
        return Memory(name, dtype)

    def atomic_add(self, memory: Memory, index: Operand, value: Operand, name: str = "") -> Var:
        """Add to an item of shared memory; the value before has a name, if one is given."""
        self._add(AtomicAdd(memory.name, integer(index), integer(value), name))
        return Var(name, memory.type)

    def block_reduce(self, name: str, operation: str, variable: Var, group: int, threads: int) -> Var:
        """The reduction of a variable's items over `threads` neighbours in a workgroup of `group` threads.

        All of them have the result. `operation` is the name of a reduction: sum, max, ...
        """
        dtype, array = variable.type.dtype, None
        if threads > 1:
            array = self.fresh("threads")
            self._kernel.arrays.append(LocalArray(array, "int32" if dtype == "bool" else dtype, group))
        self._add(BlockReduce(name, operation, variable, array, Const(threads)))
        return Var(name, Type(dtype))

    def barrier(self, device_memory: bool = False) -> None:
        """All threads of the workgroup come here before any goes on."""
        self._add(Barrier(device_memory))

    # Values

    def call(self, operation: str, *inputs: Operand, dtype: str = "") -> Expr:
        """A primitive operation by its name, as fused groups compute it."""
        return call(operation, *inputs, dtype=dtype)

    def combine(self, reduction: str, left: Expr, right: Expr) -> Expr:
        """One value from two, for a reduction by its name, whose order is free."""
        return Combine(left.type, reduction, left, right)

    def identity(self, reduction: str, dtype: str, width: int = 1) -> Expr:
        """What a reduction starts from."""
        return Identity(Type(dtype, width), reduction)

    def broadcast(self, value: Expr, width: int) -> Expr:
        """A vector with a value in every item."""
        return Broadcast(Type(value.type.dtype, width), value)

    def vector(self, items: Sequence[Expr]) -> Expr:
        """Single values as one with a width, which should get a name; one by itself stays what it is."""
        return Vector(tuple(items)) if len(items) > 1 else items[0]

    def lane(self, variable: Var, number: int) -> Expr:
        """An item of a variable, which may be a single value."""
        return Lane(variable, number) if variable.type.width > 1 else variable

    def select(self, condition: Expr, yes: Operand, no: Operand) -> Expr:
        """One of two values."""
        like = yes if isinstance(yes, Expr) else no if isinstance(no, Expr) else Const(0)
        return Select(like.type, condition, constant(yes, like), constant(no, like))

    # Statements

    def accumulate(self, variable: Var, reduction: str, value: Expr) -> None:
        """A variable takes in one more value of a reduction by its name, whose order is free."""
        self._add(Accumulate(variable, reduction, value, variable.type))

    def multiply_add(self, variable: Var, left: Expr, right: Expr) -> None:
        """Add a product to a variable; of floats only. It may be rounded once or twice."""
        self._add(MultiplyAdd(variable, left, right))

    def splice(self, statements: Sequence[Statement]) -> None:
        """Statements that were built elsewhere."""
        self._bodies[-1].extend(statements)

    # Control

    @contextmanager
    def loop(
        self, name: str, start: Operand, stop: Operand, step: Operand = 1, unrolled: int = 0
    ) -> Iterator[Var]:
        """A loop from `start` to before `stop`; `unrolled`: how often its body is laid out."""
        with self._inside() as body:
            yield Var(name)
        self._add(For(name, integer(start), integer(stop), integer(step), body, unrolled))

    @contextmanager
    def repeat(self, condition: Expr) -> Iterator[None]:
        """A loop for as long as a condition holds."""
        with self._inside() as body:
            yield
        self._add(While(condition, body))

    @contextmanager
    def when(self, condition: Expr) -> Iterator[None]:
        """Statements under a condition."""
        with self._inside() as body:
            yield
        self._add(If(condition, body))

    @contextmanager
    def otherwise(self) -> Iterator[None]:
        """Statements where the condition of the `when` before does not hold."""
        before = self._bodies[-1].pop()
        assert isinstance(before, If), "`otherwise` follows `when`"
        with self._inside() as body:
            yield
        self._add(If(before.condition, before.body, body))

    def source(
        self, grid: tuple[int, ...], group: tuple[int, ...], resident: int = 1, quick: bool = False
    ) -> KernelSource:
        """The kernel in the device's language."""
        kernel = self._kernel
        kernel.grid, kernel.group, kernel.resident, kernel.quick = grid, group, resident, quick
        return self._dialect.render(kernel, self.name)

    def _add(self, statement: Statement) -> None:
        self._bodies[-1].append(statement)

    def _define(self, statement: Let | Declare) -> Var:
        self._add(statement)
        return Var(statement.name, statement.type)

    @contextmanager
    def _inside(self) -> Iterator[list[Statement]]:
        self._bodies.append([])
        try:
            yield self._bodies[-1]
        finally:
            self._bodies.pop()
