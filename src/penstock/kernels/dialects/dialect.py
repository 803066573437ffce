"""What the rest of the tree asks of a kernel language: what it lacks, and the text of kernels in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from penstock.kernels.ir import KernelIR
from penstock.kernels.source import KernelSource


class Dialect(ABC):
    """A language of kernels. The attributes say what it has; the defaults are those of C."""

    name: str
    label: str  # for people
    pointers = True  # a part of a memory can be a parameter of a function
    barriers_in_branches = True  # each workgroup of a launch may run another piece of a text with barriers
    word_access = False  # memory is words of 4 bytes, so a thread writes whole ones where it can
    one_kernel_modules = False  # each kernel is a text of its own
    compiles_side_by_side = False  # compilers may run at the same time, each with a part of the kernels

    @abstractmethod
    def has_operation(self, operation: str, result: str, of: str, inputs: int) -> bool:
        """Whether a primitive on values of dtype `of` has a text."""

    @abstractmethod
    def render(self, kernel: KernelIR, name: str) -> KernelSource:
        """The text of a kernel."""

    @abstractmethod
    def whole_text(self, sources: Sequence[KernelSource], preludes: Mapping[str, str]) -> str:
        """The texts of kernels after the functions that they use.

        `preludes`: texts that are wanted besides, each by a word that asks for it.
        """
