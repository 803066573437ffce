"""A kernel with its parameters and launch dimensions.

Of the parameters, buffers come first, then the offset of each in its memory, then scalars. Offsets are in
units of `ALIGNMENT` bytes, so that all values of an arena are addressed by its buffer and a small integer.
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
_STORED = {"bool": "uint8", "bfloat16": "uint16"}  # dtypes without a type in C


def digest(text: str) -> str:
    """A short digest of a text: the same in every process, so that compilers' caches have it."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def item_size(dtype: str) -> int:
    """The bytes of an item."""
    return int(np.dtype(_STORED.get(dtype, dtype)).itemsize)


@dataclass(frozen=True)
class KernelSource:
    """A kernel with its parameters and launch dimensions."""

    name: str
    body: DialectBody | str  # the IR, which is printed when the kernel is compiled, or opaque text
    buffers: tuple[str, ...]  # dtypes; outputs first
    scalars: tuple[str, ...]  # dtypes
    grid: tuple[int, ...]
    group: tuple[int, ...]
    arrays: tuple[tuple[str, str, int], ...] = ()  # local arrays: dtype, name, items
    resident: int = 1  # workgroups that a compute unit should have room for
    cluster: int = 1  # workgroups that run at once, and read each other's local memory
    block: int = 0  # neighbouring results that each workgroup has, if that is all that it writes
    complete: bool = False  # the text needs no prelude, and is compiled by itself
    sizes: int = 0  # the number of leading scalars that are sizes
    alone: bool = False  # many programs share it, so it is compiled by itself and never merged
    placed: bool = True  # it takes the offsets of its buffers; else buffers are bound at their offsets
    ahead: tuple[int, ...] = ()  # buffers that it reads before it waits for the launches that it depends on

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
    """The IR of a kernel that is not opaque text."""
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
    """The first lines of a kernel: its parameters, given as (dtype, name), and the offsets of its buffers.

    A function of another `linkage` may have `leading` parameters. `arrays` are declarations of local memory,
    which have to come first.
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
