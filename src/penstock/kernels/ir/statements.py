"""Statements of the kernel IR, and the kernel that they make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import dataclass_transform

from penstock.kernels.ir.expressions import ONE, Expr, Operand, Type, Var, integer


@dataclass_transform(frozen_default=True)
class Statement:
    """What a thread does; every subclass is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class _Binding(Statement):
    """A name and its value."""

    name: str
    value: Expr

    @property
    def type(self) -> Type:
        """The type of the value."""
        return self.value.type


class Let(_Binding):
    """A name for a value."""


class Declare(_Binding):
    """A variable, which may be assigned another value."""


class Assign(_Binding):
    """A new value for a variable."""


class Store(Statement):
    """Write a value to a buffer or an array of dtype `stored`; the lanes are neighbours."""

    value: Expr
    buffer: str
    stored: str
    index: Expr
    aligned: int = 1  # the index is a multiple of it
    width: int = 0  # lanes that a scalar is written to; 0: those of the value
    streamed: bool = False  # an aligned vector of a CPU that goes to memory past the caches

    @property
    def type(self) -> Type:
        """The type that is written."""
        return Type(self.value.type.dtype, self.width or self.value.type.width)


@dataclass(frozen=True)
class LocalArray:
    """Memory that the threads of a workgroup share."""

    name: str
    dtype: str
    length: int
    atomic: bool = False  # changed by `AtomicAdd`
    width: int = 1  # alignment in items; in WGSL these are a vector, always read and written whole


class RegisterArray(Statement):
    """A private array of a thread; it is in registers if every index is constant after unrolling."""

    name: str
    dtype: str
    length: int


class Forget(Statement):
    """Hide what registers hold from the compiler, which would else keep all values computed from them."""

    name: str
    length: int


class UnknownOne(Statement):
    """An integer variable that is 1, which the compiler does not know if the grid has a single axis."""

    name: str


class Accumulate(Statement):
    """Combine a variable with one more value of a reduction."""

    target: Var
    operation: str
    value: Expr
    type: Type
    first: Expr | None = None  # the first item of the target to change, where it is wider than the value


class MultiplyAdd(Statement):
    """Add a floating-point product to a variable, fused or rounded twice, whichever is faster."""

    target: Var
    left: Expr
    right: Expr


class MultiplyTiles(Statement):
    """Add the product of two tiles, of 16 x 16 and 16 x 8 items, to a third, by the tensor cores of a GPU.

    The threads of a warp hold the items: 4 float32 variables of the sum, 4 words of the left and 2 of the
    right, each with two items of `dtype`, as CUDA's instruction m16n8k16 divides them.
    """

    totals: tuple[Var, ...]
    left: tuple[Expr, ...]
    right: tuple[Expr, ...]
    dtype: str


class CopyAhead(Statement):
    """Begins to copy 16 bytes of a buffer to an array in local memory; zeros where the mask is false."""

    array: str
    index: Expr
    buffer: str
    start: Expr
    mask: Expr | None = None


class EndCopies(Statement):
    """The copies that a thread began since the last end are a group of their own."""


class WaitForCopies(Statement):
    """Waits for all groups of copies that the thread began, but for the last `left`."""

    left: int


class LoadTiles(Statement):
    """`names` are words of four tiles of 8 x 8 items of 16 bits, in local memory.

    `index` is that of a line of a tile: of the first tile for the first 8 threads of a warp, and so on. Every
    thread has two neighbouring items of each tile, as `MultiplyTiles` wants them.
    """

    names: tuple[str, ...]
    array: str
    index: Expr


class LoadPart(Statement):
    """`names` are the words of 16 bytes of local memory that were copied there, from `index` on."""

    names: tuple[str, ...]
    array: str
    index: Expr


class BlockReduce(Statement):
    """`name` is the reduction of a variable over its lanes and over the neighbouring threads of a row."""

    name: str
    operation: str
    variable: Var
    array: str | None  # local memory, an item per thread of the workgroup; None where a row has one thread
    threads: Expr = ONE


class StridedReduce(Statement):
    """Combine a variable with those of the threads `stride`, 2 * `stride`, ... after this thread, by lane.

    Only the first `stride` threads of the workgroup have the result.
    """

    target: Var
    operation: str
    array: str  # local memory, an item per lane and thread
    stride: Expr
    threads: Expr  # of the workgroup


class Pointer(Statement):
    """A restrict pointer into a buffer or a local array, for dialects that have pointers.

    With a condition, it is the pointer `otherwise` where that is false.
    """

    name: str
    buffer: str
    stored: str
    offset: Expr
    condition: Expr | None = None
    otherwise: str = ""


class Prefetch(Statement):
    """Begins to read an item of a buffer into a CPU's cache; the index may be out of range."""

    buffer: str
    index: Expr


class UniformLoad(Statement):
    """`name` is an item of a local array, read after a barrier, so it is uniform over the workgroup."""

    name: str
    array: str
    index: Expr


class ComesLast(Statement):
    """`name` is 1 in the workgroup that is the last of `count` to get here, and 0 in the others.

    They are counted by an item of `counters`, which is 0 before the first and after the last. What the others
    wrote before is visible to the last. Only in dialects with `device_atomics`; `array` is a local integer.
    """

    name: str
    counters: str
    index: Expr
    count: Expr
    array: str


class AtomicAdd(Statement):
    """Add to an item of a local int32 array; `name`, if given, is the value before."""

    array: str
    index: Expr
    value: Expr
    name: str = ""


class SharedTasks(Statement):
    """Tasks, `name` from 0 to below `count`, each of which one of a launch's workgroups does.

    A workgroup begins when the tasks of all such statements before this one are done, which are `before`; it
    takes the next until there is none. `number` counts these statements, in loops too. A workgroup that waits
    for others for long ends, and leaves the rest to them: they have begun a task each, so one of them
    is never waiting. Only where `Capabilities.kernel_counters`.
    """

    name: str
    count: int
    number: Expr
    before: Expr
    body: list[Statement]


class EndTasks(Statement):
    """The end of a workgroup after shared tasks. The last sets the kernel's counters back."""


class Pointers(Statement):
    """An array `POINTERS` of pointers to the outputs, of which there are so many."""

    count: int


class CallFunction(Statement):
    """A call of one of the kernel's functions, as workgroup `group`."""

    function: str
    group: Expr
    arrays: tuple[tuple[str, int], ...]  # local arrays: dtype, offset in `LOCAL_MEMORY`
    buffers: tuple[tuple[str, str | Expr], ...]  # dtype, name of the kernel's buffer or index in `POINTERS`
    arguments: tuple[Expr, ...]  # the offsets of its buffers, and its scalars


class For(Statement):
    """A loop of a variable from `start` to below `stop`."""

    name: str
    start: Expr
    stop: Expr
    step: Expr
    body: list[Statement]
    unrolled: int = 0  # unroll factor; 0 leaves it to the compiler
    trips: int = 1  # the largest trip count, of a loop that reduces


def loop(
    name: str,
    start: Operand,
    stop: Operand,
    body: list[Statement],
    step: Operand = 1,
    unrolled: int = 0,
    trips: int = 1,
) -> For:
    """A loop whose bounds may be Python integers."""
    return For(name, integer(start), integer(stop), integer(step), body, unrolled, trips)


def optimization_barrier(name: str, body: list[Statement]) -> list[Statement]:
    """Statements that a compiler does not mix with those before: they are the body of a loop.

    So all loads before them are on their way when they begin. A compiler that saves registers would have some
    wait for others. `name` is that of the loop's count.
    """
    return [UnknownOne(name), loop(f"{name}_at", 0, Var(name), body, unrolled=1)]


class While(Statement):
    """A loop while a condition holds."""

    condition: Expr
    body: list[Statement]


class If(Statement):
    """A branch."""

    condition: Expr
    body: list[Statement]
    otherwise: list[Statement] = field(default_factory=list)


class Barrier(Statement):
    """No thread of the workgroup continues before all have arrived."""

    device_memory: bool = False  # whether it orders accesses to device memory, too


class ClusterBarrier(Statement):
    """No thread of the workgroups of a cluster continues before all have arrived; it orders local memory."""


class ClusterSum(Statement):
    """`name` is the sum of an item of local memory over the `count` workgroups of a cluster, in order."""

    name: str
    array: str
    index: Expr
    count: int


class ClusterLoad(Statement):
    """`name` is an item of the local memory of a workgroup of the cluster, the one of a `rank`."""

    name: str
    array: str
    index: Expr
    rank: Expr


class WaitForEarlier(Statement):
    """Waits for the launches that a kernel depends on, if it begins before they have ended.

    Before it a kernel reads `ahead` only, buffers by name. One without it waits before anything else.
    """

    ahead: tuple[str, ...]


class Fence(Statement):
    """Memory accesses after it stay after those before it, whatever their dtypes.

    A compiler may assume that pointers of two dtypes never alias, and reorder accesses through them.
    """


def walk(body: Sequence[Statement]) -> Iterator[Statement]:
    """All statements of a body, nested ones included."""
    for statement in body:
        yield statement
        for part in ("body", "otherwise"):
            yield from walk(getattr(statement, part, ()))


Parameters = list[tuple[str, str]]
LOCAL_MEMORY = "local_memory"  # the array, of 8-byte items, that a kernel's functions share
POINTERS = "pointers"
FIRST_TASK = 32  # the first of a kernel's counters that counts tasks which were taken
COUNTERS = "counters"  # the integers of the device's memory that a kernel has to itself


@dataclass(frozen=True)
class Function:
    """A kernel as a function of its workgroup's index."""

    name: str
    kernel: KernelIR
    linkage: str  # DEVICE: inlined; CALLED: not inlined; PIECE: as the compiler likes
    private: bool = False  # run by one thread: its local arrays are private, and not parameters


@dataclass(frozen=True)
class Table:
    """Integers in constant memory; its name in the text is prefixed with the kernel's."""

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
    vectors: bool = True  # wide values are a CPU's vectors; else the lanes are computed one by one
    resident: int = 1  # workgroups that a compute unit should have room for
    cluster: int = 1  # neighbouring workgroups that run at once, and read each other's local memory
    quick: bool = False  # functions need little more precision than float16
    functions: list[Function] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    sizes: int = 0  # parameters size0, size1, ... before the scalars
    counters: int = 0  # integers, 0 before the first launch, that all launches of the kernel share
    block: int = 0  # neighbouring results that each workgroup has, if that is all that it writes

    @property
    def parameters(self) -> tuple[Parameters, Parameters, Parameters]:
        """The outputs, the inputs, and the sizes with the scalars, as (dtype, name)."""
        return (
            [(dtype, f"out{k}") for k, dtype in enumerate(self.outputs)],
            [(dtype, f"in{k}") for k, dtype in enumerate(self.inputs)],
            [
                *(("int32", f"size{k}") for k in range(self.sizes)),
                *((dtype, f"c{k}") for k, dtype in enumerate(self.scalars)),
            ],
        )
