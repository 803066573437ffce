"""What the rest of the tree asks of a kernel language: what it lacks, and the text of kernels in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.kernels import ir
from penstock.kernels.source import KernelSource

MANY_STEPS = 1 << 31  # more than any loop has
UNROLLED = 4  # iterations that loops along an axis take in one step, where a dialect bounds the steps


@dataclass(frozen=True)
class RawKernel:
    """A kernel whose body a user wrote. Types are words of the language."""

    name: str
    label: str  # what the user calls it
    outputs: tuple[tuple[str, str, int], ...]  # of each array: name, type, bytes of an item
    inputs: tuple[tuple[str, str, int], ...]
    scalars: tuple[tuple[str, str], ...]  # name, type
    constants: tuple[tuple[str, int], ...]  # sizes that the body may name
    threads: int  # of a workgroup
    count: int | None  # threads that have something to do, where each works by itself
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


class Dialect(ABC):
    """A language of kernels. The attributes say what it has; the defaults are those of C."""

    name: str
    label: str  # for people
    pointers = True  # a part of a memory can be a parameter of a function
    barriers_in_branches = True  # branches with barriers, of which each workgroup takes one
    word_access = False  # memory is words of 4 bytes, which a thread should write whole
    inline_assembly = False  # kernels may have PTX, whatever the device's own code is
    one_kernel_modules = False  # each kernel is a text of its own
    compiles_side_by_side = False  # several compilers may run at a time, each with some of the kernels

    # Of users' own kernels: the types of array items, by dtype.
    raw_types: Mapping[str, str]
    moves_buffers = True  # a kernel takes the offset of each buffer; else each is bound at its offset

    def most_steps(self, capabilities: Capabilities) -> int:
        """How many steps the loops of one thread may take."""
        return MANY_STEPS

    def has_short_loops(self, node: Node, capabilities: Capabilities) -> bool:
        """Whether a thread of a kernel that holds the node takes no more steps than it may."""
        return True

    @abstractmethod
    def raw_text(self, kernel: RawKernel) -> str:
        """The whole text of a user's own kernel."""

    @abstractmethod
    def has_operation(self, operation: str, result: str, of: str, inputs: int) -> bool:
        """Whether a primitive on values of dtype `of` has a text."""

    passed_as: Mapping[str, str]  # for dtypes of scalars that are passed in another dtype, the other
    fixed_nodes: tuple[type, ...] = ()  # kinds of statements whose constants cannot become arguments

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
        )

    @abstractmethod
    def print(self, kernel: ir.KernelIR, name: str) -> str:
        """The text of a kernel, without prelude."""

    @abstractmethod
    def whole_text(self, sources: Sequence[KernelSource], preludes: Mapping[str, str]) -> str:
        """The texts of kernels, after the functions that they use.

        `preludes`: further texts, each by a word that a kernel has if it needs the text.
        """
