"""What the kernels of single nodes share: the record of their launches, and the words that they are made of.

Texts for a CPU give a thread many items, in plain loops; those for a GPU give it one, or work in groups.
`capabilities.vector_width` decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Shape
from penstock.kernels.source import C_TYPES, KernelSource

CPU_SHARES = 4  # groups to a core, so that one that is busy elsewhere does not hold up the rest
GPU_THREADS = 64  # in a group whose threads have nothing to do with each other
SHORT_ROW = 64  # items; up to here a GPU gives a row to one thread and not to a group
MOST_THREADS = 1024  # in a group whose threads work together


@dataclass(frozen=True)
class Launch:
    """One launch: its kernel, and which buffers it takes, as places in [output, *inputs, *scratch]."""

    source: KernelSource
    buffers: tuple[int, ...]
    scalars: tuple[int, ...] = ()


@dataclass(frozen=True)
class Lone:
    """The launches that compute one node, in order, and the bytes of the scratch buffers that they share."""

    launches: tuple[Launch, ...]
    scratch: tuple[int, ...] = ()


@dataclass(frozen=True)
class Spread:
    """Tasks over threads: the loop over a thread's own, by number `t`, up to its open brace; the threads."""

    loop: str
    grid: tuple[int, ...]
    group: tuple[int, ...]


def spread(count: int, capabilities: Capabilities) -> Spread:
    """Neighbours to one thread on a CPU, one task to a thread on a GPU."""
    cpu = is_cpu(capabilities)
    each = -(-count // (CPU_SHARES * capabilities.compute_units)) if cpu else 1
    threads = 1 if cpu else GPU_THREADS
    first = f"(GROUP(0) * THREADS + THREAD) * {each}"
    loop = f"for (int t = {first}, end = {least(f't + {each}', count)}; t < end; t++) {{"
    return Spread(loop, (-(-count // (each * threads)),), (threads,))


def is_cpu(capabilities: Capabilities) -> bool:
    """Whether one thread has a vector unit of its own."""
    return capabilities.vector_width > 1


def group_size(items: int, capabilities: Capabilities) -> int:
    """How many threads share work on `items` items: a power of two."""
    return 1 << min(max(items, 1), MOST_THREADS, capabilities.max_group_size).bit_length() - 1


def along(shape: Shape, axis: int) -> tuple[int, int, int]:
    """The items before an axis, along it, and after it."""
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis:][1:])


def least(a: int | str, b: int | str) -> str:
    """The smaller of two C expressions. PoCL calls `min` as a function, and then knows nothing of it."""
    return f"({a} < {b} ? {a} : {b})"


def combined(dtype: str, sign: str, a: str, b: str) -> str:
    """The sum (`+`) or the product (`*`) of two C expressions, as NumPy has it."""
    if dtype == "bool":
        return f"({a} {'|' if sign == '+' else '&'} {b})"
    if dtype.startswith("float"):
        return f"({a} {sign} {b})"
    # Whole numbers wrap, which C promises of unsigned ones only.
    wide = "ulong" if dtype.endswith("64") else "uint"
    return f"({C_TYPES[dtype]})(({wide}){a} {sign} ({wide}){b})"
