"""Builds the kernels of templates: the same body for OpenCL, CUDA and WGSL.

    k = KernelBuilder("reverse", capabilities, outputs=["float32"], inputs=["float32"])
    x, y = k.inputs[0], k.outputs[0]
    i = k.let("i", k.group() * 64 + k.thread)
    with k.when(i < length):
        k.store(y, i, k.load(x, length - 1 - i))
    source = k.source(grid, group)

Values are expressions of `ir/`. float16 and bfloat16 are loaded as float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from penstock.drivers.driver import Capabilities
from penstock.kernels import ir
from penstock.kernels.dialects import dialect_of
from penstock.kernels.source import KernelSource

T = TypeVar("T")


@dataclass(frozen=True)
class Memory:
    """A buffer, a local array, or a private array."""

    name: str
    dtype: str

    @property
    def type(self) -> ir.Type:
        """The type that its items are computed in."""
        return ir.Type("float32" if self.dtype in ir.HALF_PRECISION else self.dtype)


class KernelBuilder:
    """A kernel that is being built. The outputs are out0, out1, ..., the inputs in0, in1, ..."""

    def __init__(
        self,
        name: str,
        capabilities: Capabilities,
        outputs: Sequence[str],
        inputs: Sequence[str],
        scalars: Sequence[str] = (),
    ) -> None:
        """`outputs`, `inputs` and `scalars` are dtypes."""
        self.name, self._dialect = name, dialect_of(capabilities)
        vectors = capabilities.vector_width > 1
        self._kernel = ir.KernelIR([*outputs], [*inputs], [*scalars], vectors=vectors)
        self._bodies: list[list[ir.Statement]] = [self._kernel.body]
        self._count = 0
        self.outputs = [Memory(f"out{k}", dtype) for k, dtype in enumerate(outputs)]
        self.inputs = [Memory(f"in{k}", dtype) for k, dtype in enumerate(inputs)]
        self.scalars = [ir.Var(f"c{k}", ir.Type(dtype)) for k, dtype in enumerate(scalars)]
        self.thread: ir.Expr = ir.THREAD

    def group(self, axis: int = 0) -> ir.Expr:
        """The index of the workgroup."""
        return ir.WorkgroupId(axis)

    # Names and variables

    def let(self, name: str, value: ir.Operand) -> ir.Var:
        """A name for a value."""
        return self._define(ir.Let(name, ir.integer(value)))

    def variable(self, name: str, value: ir.Operand, dtype: str = "") -> ir.Var:
        """A variable with an initial value; `dtype` is that of a Python number."""
        first = value if isinstance(value, ir.Expr) else ir.Const(value, ir.Type(dtype or "int32"))
        return self._define(ir.Declare(name, first))

    def assign(self, variable: ir.Var, value: ir.Operand) -> None:
        """Assign a value to a variable."""
        self._add(ir.Assign(variable.name, ir.constant(value, variable)))

    def fresh(self, name: str) -> str:
        """A unique name, for what is built several times in a scope."""
        self._count += 1
        return f"{name}_{self._count}"

    # Memory

    def load(self, memory: Memory, index: ir.Operand, mask: ir.Expr | None = None) -> ir.Expr:
        """An item; 0 where the mask is false. A load from memory that changes should get a name."""
        return ir.Load(memory.type, memory.name, memory.dtype, ir.integer(index), mask=mask)

    def load_index(self, memory: Memory, index: ir.Operand, length: int) -> ir.Expr:
        """An item of any integer dtype as an index below `length`; -1 if it is out of range."""
        return ir.LoadIndex(memory.name, memory.dtype, ir.integer(index), ir.Const(length))

    def same_memory(self, left: Memory, right: Memory) -> ir.Expr:
        """Whether two buffers of one dtype are the same bytes."""
        return ir.SameMemory(left.name, right.name)

    def load_vector(
        self, memory: Memory, index: ir.Operand, width: int, aligned: int = 1, mask: ir.Expr | None = None
    ) -> ir.Expr:
        """Neighbouring items; the index is a multiple of `aligned`. On a GPU it has to get a name."""
        type_ = ir.Type(memory.type.dtype, width)
        return ir.Load(type_, memory.name, memory.dtype, ir.integer(index), 1, aligned, mask)

    def uniform(self, name: str, memory: Memory, index: ir.Operand = 0) -> ir.Var:
        """An item of local memory, read after a barrier, so it is uniform over the workgroup."""
        self._add(ir.UniformLoad(name, memory.name, ir.integer(index)))
        return ir.Var(name)

    def pointer(self, name: str, memory: Memory, offset: ir.Operand) -> Memory:
        """A restrict pointer into a buffer or local memory, on a CPU."""
        self._add(ir.Pointer(name, memory.name, memory.dtype, ir.integer(offset)))
        return Memory(name, memory.dtype)

    def store(self, memory: Memory, index: ir.Operand, value: ir.Operand, aligned: int = 1) -> None:
        """Write an item or a vector; an int32 may be stored as int64."""
        item = value if isinstance(value, ir.Expr) else ir.Const(value, memory.type)
        self._add(ir.Store(item, memory.name, memory.dtype, ir.integer(index), aligned))

    def shared(self, name: str, dtype: str, length: int, atomic: bool = False, width: int = 1) -> Memory:
        """Local memory; `atomic` where `atomic_add` changes it.

        `width`: its alignment in items. In WGSL these are a vector, which is read and written whole. The same
        array may be asked for again.
        """
        array = ir.LocalArray(name, dtype, length, atomic, width)
        if array not in self._kernel.arrays:
            self._kernel.arrays.append(array)
        return Memory(name, dtype)

    def registers(self, name: str, dtype: str, length: int) -> Memory:
        """A private array."""
        self._add(ir.RegisterArray(name, dtype, length))
        return Memory(name, dtype)

    def atomic_add(self, memory: Memory, index: ir.Operand, value: ir.Operand, name: str = "") -> ir.Var:
        """Add to an item of local memory; returns the value before, if it is given a name."""
        self._add(ir.AtomicAdd(memory.name, ir.integer(index), ir.integer(value), name))
        return ir.Var(name, memory.type)

    def comes_last(self, name: str, counters: Memory, index: ir.Operand, count: int) -> ir.Var:
        """Whether the workgroup is the last of `count`, 1 or 0; see `ComesLast`."""
        array = self.shared(self.fresh("arrived"), "int32", 1)
        self._add(ir.ComesLast(name, counters.name, ir.integer(index), ir.Const(count), array.name))
        return ir.Var(name)

    def block_reduce(self, name: str, operation: str, variable: ir.Var, group: int, threads: int) -> ir.Var:
        """Reduce a variable over its lanes and `threads` neighbours in a workgroup of `group` threads.

        All of them have the result. `operation` is the name of a reduction: sum, max, ...
        """
        dtype, array = variable.type.dtype, None
        if threads > 1:
            array = self.fresh("threads")
            self._kernel.arrays.append(ir.LocalArray(array, "int32" if dtype == "bool" else dtype, group))
        self._add(ir.BlockReduce(name, operation, variable, array, ir.Const(threads)))
        return ir.Var(name, ir.Type(dtype))

    def barrier(self, device_memory: bool = False) -> None:
        """No thread of the workgroup continues before all have arrived."""
        self._add(ir.Barrier(device_memory))

    def wait_for_earlier(self, ahead: Sequence[Memory]) -> None:
        """Wait for the launches before, after reads of no buffers but these; see `WaitForEarlier`."""
        self._add(ir.WaitForEarlier(tuple(memory.name for memory in ahead)))

    def prefetch(self, memory: Memory, index: ir.Operand) -> None:
        """Begin to read an item into a CPU's cache; the index may be out of range."""
        self._add(ir.Prefetch(memory.name, ir.integer(index)))

    def copy_ahead(
        self, array: Memory, index: ir.Operand, buffer: Memory, start: ir.Operand, mask: ir.Expr | None = None
    ) -> None:
        """Begin to copy 16 bytes of a buffer to local memory; zeros where the mask is false."""
        places = ir.integer(index), buffer.name, ir.integer(start)
        self._add(ir.CopyAhead(array.name, *places, mask))

    def end_copies(self) -> None:
        """Copies that were begun since the last end are a group of their own."""
        self._add(ir.EndCopies())

    def wait_for_copies(self, left: int) -> None:
        """Wait for all groups of copies that this thread began, but for the last `left`."""
        self._add(ir.WaitForCopies(left))

    def load_tiles(self, array: Memory, index: ir.Operand) -> list[ir.Var]:
        """A thread's words of four tiles of local memory; see `LoadTiles`."""
        names = tuple(self.fresh("tile") for _ in range(4))
        self._add(ir.LoadTiles(names, array.name, ir.integer(index)))
        return [ir.Var(name, ir.Type("uint32")) for name in names]

    def load_part(self, array: Memory, index: ir.Operand) -> list[ir.Var]:
        """The four words of 16 bytes of local memory that were copied there."""
        names = tuple(self.fresh("part") for _ in range(4))
        self._add(ir.LoadPart(names, array.name, ir.integer(index)))
        return [ir.Var(name, ir.Type("uint32")) for name in names]

    def cluster_barrier(self) -> None:
        """No thread of the cluster's workgroups continues before all have arrived; see `ClusterBarrier`."""
        self._add(ir.ClusterBarrier())

    def cluster_sum(self, name: str, memory: Memory, index: ir.Operand, count: int) -> ir.Var:
        """The sum of an item of local memory over the `count` workgroups of a cluster."""
        self._add(ir.ClusterSum(name, memory.name, ir.integer(index), count))
        return ir.Var(name, memory.type)

    def cluster_load(self, name: str, memory: Memory, index: ir.Operand, rank: ir.Operand) -> ir.Var:
        """An item of the local memory of a workgroup of the cluster."""
        self._add(ir.ClusterLoad(name, memory.name, ir.integer(index), ir.integer(rank)))
        return ir.Var(name, memory.type)

    # Values

    def call(self, operation: str, *inputs: ir.Operand, dtype: str = "") -> ir.Expr:
        """A primitive operation by its name."""
        return ir.call(operation, *inputs, dtype=dtype)

    def combine(self, reduction: str, left: ir.Expr, right: ir.Expr) -> ir.Expr:
        """Two values combined by a reduction whose order is free."""
        return ir.Combine(left.type, reduction, left, right)

    def identity(self, reduction: str, dtype: str, width: int = 1) -> ir.Expr:
        """The identity element of a reduction."""
        return ir.Identity(ir.Type(dtype, width), reduction)

    def broadcast(self, value: ir.Expr, width: int) -> ir.Expr:
        """A vector with a value in every lane."""
        return ir.Broadcast(ir.Type(value.type.dtype, width), value)

    def vector(self, items: Sequence[ir.Expr]) -> ir.Expr:
        """A vector of scalars, which should get a name; a single scalar as it is."""
        return ir.Vector(tuple(items)) if len(items) > 1 else items[0]

    def lane(self, variable: ir.Var, number: int) -> ir.Expr:
        """A lane of a variable, which may be a scalar."""
        return ir.Lane(variable, number) if variable.type.width > 1 else variable

    def select(self, condition: ir.Expr, yes: ir.Operand, no: ir.Operand) -> ir.Expr:
        """One of two values."""
        like = yes if isinstance(yes, ir.Expr) else no if isinstance(no, ir.Expr) else ir.Const(0)
        return ir.Select(like.type, condition, ir.constant(yes, like), ir.constant(no, like))

    # Statements

    def accumulate(self, variable: ir.Var, reduction: str, value: ir.Expr) -> None:
        """Combine a variable with one more value of a reduction whose order is free."""
        self._add(ir.Accumulate(variable, reduction, value, variable.type))

    def multiply_add(self, variable: ir.Var, left: ir.Expr, right: ir.Expr) -> None:
        """Add a floating-point product to a variable; it may be rounded once or twice."""
        self._add(ir.MultiplyAdd(variable, left, right))

    def multiply_tiles(
        self, totals: Sequence[ir.Var], left: Sequence[ir.Expr], right: Sequence[ir.Expr], dtype: str
    ) -> None:
        """Add a product of tiles of a warp by tensor cores; see `MultiplyTiles`."""
        self._add(ir.MultiplyTiles(tuple(totals), tuple(left), tuple(right), dtype))

    def splice(self, statements: Sequence[ir.Statement]) -> None:
        """Add statements that were built elsewhere."""
        self._bodies[-1].extend(statements)

    # Control

    def loop(
        self, name: str, start: ir.Operand, stop: ir.Operand, step: ir.Operand = 1, unrolled: int = 0
    ) -> AbstractContextManager[ir.Var]:
        """A loop from `start` to below `stop`; `unrolled` is its unroll factor."""
        return self._nested(lambda body: ir.loop(name, start, stop, body, step, unrolled), ir.Var(name))

    @contextmanager
    def optimization_barrier(self, name: str) -> Iterator[ir.Var]:
        """Statements that a compiler does not mix with those before; see `ir.optimization_barrier`.

        What is computed from the variable, which is 0, is not taken out of them.
        """
        self._bodies.append([])
        try:
            yield ir.Var(f"{name}_at")
        finally:
            body = self._bodies.pop()
        self.splice(ir.optimization_barrier(name, body))

    def repeat(self, condition: ir.Expr) -> AbstractContextManager[None]:
        """A loop while a condition holds."""
        return self._nested(lambda body: ir.While(condition, body), None)

    def when(self, condition: ir.Expr) -> AbstractContextManager[None]:
        """Statements under a condition."""
        return self._nested(lambda body: ir.If(condition, body), None)

    def otherwise(self) -> AbstractContextManager[None]:
        """Statements where the condition of the preceding `when` is false."""
        before = self._bodies[-1].pop()
        assert isinstance(before, ir.If), "`otherwise` follows `when`"
        return self._nested(lambda body: ir.If(before.condition, before.body, body), None)

    def source(
        self,
        grid: tuple[int, ...],
        group: tuple[int, ...],
        resident: int = 1,
        quick: bool = False,
        cluster: int = 1,
        block: int = 0,
    ) -> KernelSource:
        """The kernel in the device's language."""
        kernel = self._kernel
        kernel.cluster, kernel.block = cluster, block
        kernel.grid, kernel.group, kernel.resident, kernel.quick = grid, group, resident, quick
        return self._dialect.render(kernel, self.name)

    def _add(self, statement: ir.Statement) -> None:
        self._bodies[-1].append(statement)

    def _define(self, statement: ir.Let | ir.Declare) -> ir.Var:
        self._add(statement)
        return ir.Var(statement.name, statement.type)

    @contextmanager
    def _nested(self, statement: Callable[[list[ir.Statement]], ir.Statement], value: T) -> Iterator[T]:
        """Statements added inside become the body of a statement."""
        self._bodies.append([])
        try:
            yield value
        finally:
            body = self._bodies.pop()
        self._add(statement(body))
