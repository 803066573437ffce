"""The interface of a kernel language: what it lacks, and how it prints kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.kernels import ir
from penstock.kernels.source import KernelSource

MANY_STEPS = 1 << 31  # more than any loop has
UNROLLED = 4  # unroll factor of loops along an axis, where a dialect bounds the steps


@dataclass(frozen=True)
class RawKernel:
    """A kernel with a user's body. Types are those of the language."""

    name: str
    label: str  # what the user calls it
    outputs: tuple[tuple[str, str, int], ...]  # of each array: name, type, bytes of an item
    inputs: tuple[tuple[str, str, int], ...]
    scalars: tuple[tuple[str, str], ...]  # name, type
    constants: tuple[tuple[str, int], ...]  # sizes that the body may use
    threads: int  # of a workgroup
    count: int | None  # of active threads, where they are independent
    header: str
    body: str


@dataclass(frozen=True)
class DialectBody:
    """A kernel in the IR, with the dialect that prints it."""

    dialect: Dialect
    kernel: ir.KernelIR

    def text(self, name: str) -> str:
        """The kernel's text under a name, without prelude."""
        return self.dialect.print(self.kernel, name)


def _ahead(kernel: ir.KernelIR) -> tuple[int, ...]:
    """The buffers that a kernel reads before it waits for earlier launches, by their positions."""
    waits = (statement for statement in ir.walk(kernel.body) if isinstance(statement, ir.WaitForEarlier))
    names = {name for wait in waits for name in wait.ahead}
    outputs, inputs, _ = kernel.parameters
    return tuple(at for at, (_, name) in enumerate((*outputs, *inputs)) if name in names)


class Dialect(ABC):
    """A kernel language. The attributes say what it supports; the defaults are those of C."""

    name: str
    label: str  # for people
    pointers = True  # a part of a buffer can be a function's parameter
    barriers_in_branches = True  # barriers in branches that are uniform over a workgroup
    shuffles = False  # neighbouring threads exchange values without local memory
    device_atomics = False  # workgroups see what others wrote, once an atomic operation told that they did
    threads_may_end = False  # barriers wait for no thread of the workgroup that has ended
    word_access = False  # memory is words of 4 bytes, which a thread should write whole
    one_kernel_modules = False  # each kernel is compiled by itself
    compiles_side_by_side = False  # several compilers may run at a time, each with some of the kernels

    # For users' own kernels.
    raw_types: Mapping[str, str]  # of array items, by dtype
    moves_buffers = True  # a kernel takes the offset of each buffer; else it is bound at its offset

    def most_steps(self, capabilities: Capabilities) -> int:
        """How many iterations the loops of a thread may have."""
        return MANY_STEPS

    def has_short_loops(self, node: Node, capabilities: Capabilities) -> bool:
        """Whether a kernel with the node stays within `most_steps`."""
        return True

    @abstractmethod
    def raw_text(self, kernel: RawKernel) -> str:
        """The whole text of a user's own kernel."""

    @abstractmethod
    def has_operation(self, operation: str, result: str, of: str, inputs: int, vectors: bool) -> bool:
        """Whether the language has a primitive on values of dtype `of`; `vectors`: for a CPU."""

    passed_as: Mapping[str, str]  # dtypes of scalars that are passed as another dtype
    fixed_nodes: tuple[type, ...] = ()  # statements whose constants cannot become arguments

    def render(self, kernel: ir.KernelIR, name: str) -> KernelSource:
        """A kernel that is printed when it is compiled."""
        return KernelSource(
            name,
            DialectBody(self, kernel),
            (*kernel.outputs, *kernel.inputs),
            ("int32",) * kernel.sizes + tuple(self.passed_as.get(dtype, dtype) for dtype in kernel.scalars),
            kernel.grid,
            kernel.group,
            tuple((array.dtype, array.name, array.length) for array in kernel.arrays),
            kernel.resident,
            kernel.cluster,
            kernel.block,
            ahead=_ahead(kernel),
        )

    def contracts(self, source: KernelSource) -> bool:
        """Whether a compiler may contract products and sums; kernels alike in it are compiled together."""
        return True

    @abstractmethod
    def print(self, kernel: ir.KernelIR, name: str) -> str:
        """The text of a kernel, without prelude."""

    @abstractmethod
    def whole_text(self, sources: Sequence[KernelSource], preludes: Mapping[str, str]) -> str:
        """The texts of kernels, after the preludes that they use.

        `preludes`: further preludes, each by a word of the kernels that need it.
        """
