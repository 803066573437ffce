"""A kernel, what it takes and how many threads it wants: what all that make kernels share.

Of the parameters, buffers come first, then the place of each in its memory, then scalars. Places count in
units of `ALIGNMENT` bytes, so that values of one arena are named by its one buffer and small numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from penstock.kernels.dialects.dialect import DialectBody
    from penstock.kernels.ir import KernelIR

ALIGNMENT = 256  # bytes; every value in an arena begins at a multiple
WORD = 4  # bytes
MOST_PARAMETER_BYTES = 1000  # OpenCL promises 1024 for all parameters of a kernel

C_TYPES = {
    "bool": "uchar",
    "int8": "char",
    "uint8": "uchar",
    "int16": "short",
    "uint16": "ushort",
    "int32": "int",
    "uint32": "uint",
    "int64": "long",
    "uint64": "ulong",
    "bfloat16": "ushort",
    "float16": "half",
    "float32": "float",
    "float64": "double",
}
_STORED = {"bool": "uint8", "bfloat16": "uint16"}  # where C has no type of its own


def digest(text: str) -> str:
    """A short name for a text: the same one in every process, so that compilers' caches find it."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def item_size(dtype: str) -> int:
    """The bytes of an item."""
    return int(np.dtype(_STORED.get(dtype, dtype)).itemsize)


@dataclass(frozen=True)
class KernelSource:
    """One kernel: what it does, its parameters, and the threads that it wants."""

    name: str
    body: DialectBody | str  # in the IR, which is printed when the kernel is compiled, or opaque text
    buffers: tuple[str, ...]  # dtypes; outputs first
    scalars: tuple[str, ...]  # dtypes
    grid: tuple[int, ...]
    group: tuple[int, ...]
    arrays: tuple[tuple[str, str, int], ...] = ()  # of the group's memory: dtype, name, items
    resident: int = 1  # groups that a unit of a GPU should have room for at a time
    complete: bool = False  # the text is whole: it needs no prelude, and is compiled by itself
    sizes: int = 0  # of its scalars, the first, which are sizes of this launch
    alone: bool = False  # many programs share it, so it is compiled by itself, and never merged with others
    placed: bool = True  # it takes the places of its buffers; else each begins where its value does

    @cached_property
    def text(self) -> str:
        """The text of the kernel, without prelude."""
        return self.body if isinstance(self.body, str) else self.body.text(self.name)

    @property
    def signature(self) -> tuple[str, ...]:
        """The parameters, as `Device.compile` wants them."""
        stored = [_STORED.get(dtype, dtype) for dtype in self.buffers]
        places = ["int32"] * len(stored) if self.placed else []
        return (*(f"{dtype}*" for dtype in stored), *places, *self.scalars)


def kernel_of(source: KernelSource) -> KernelIR:
    """What a kernel does that is no opaque text."""
    assert not isinstance(source.body, str), source.name
    return source.body.kernel


def head(
    name: str,
    outputs: Sequence[tuple[str, str]],
    inputs: Sequence[tuple[str, str]],
    scalars: Sequence[tuple[str, str]] = (),
    linkage: str = "KERNEL",
    leading: Sequence[str] = (),
    arrays: Sequence[str] = (),
) -> str:
    """The first lines of a kernel, with its parameters, (dtype, name) each, and the places of its buffers.

    A function of another `linkage` has `leading` parameters before. `arrays` declare local memory, which has
    to come first.
    """
    parameters = list(leading)
    parameters += [f"GLOBAL {C_TYPES[dtype]} *{given}" for dtype, given in outputs]
    parameters += [f"GLOBAL const {C_TYPES[dtype]} *{given}" for dtype, given in inputs]
    parameters += [f"int {given}_place" for _, given in (*outputs, *inputs)]
    parameters += [f"{C_TYPES[dtype]} {given}" for dtype, given in scalars]
    lines = [f"{linkage} {name}({', '.join(parameters)}) {{", *(f"    {array}" for array in arrays)]
    for dtype, given in (*outputs, *inputs):
        lines.append(f"    {given} += (size_t){given}_place * {ALIGNMENT // item_size(dtype)};")
    return "\n".join(lines) + "\n"
