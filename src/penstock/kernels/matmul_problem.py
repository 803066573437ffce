"""What a matrix product is, for the writers of its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Given the row, the column, the name of a variable and how many items of that row it holds: the statements
# that take these items of matrix `batch`. The variable is a float, or a vector of that many floats.
Finish = Callable[[str, str, str, int], list[str]]
Body = tuple[str, tuple[int, ...], tuple[int, ...]]  # statements between a kernel's braces, grid and group


@dataclass(frozen=True)
class Operand:
    """One side of the product: the left one has M rows and K columns, the right one K and N."""

    name: str  # the pointer in C
    dtype: str  # "float32", "float16" or, on a GPU, "bfloat16"; sums are float32 whichever it is
    base: str  # a C expression of `batch`: where that matrix begins, in items
    row_stride: int  # in items
    column_stride: int


@dataclass(frozen=True)
class Problem:
    """`batch` products of M x K by K x N."""

    batch: int
    rows: int  # M
    columns: int  # N
    inner: int  # K
    left: Operand
    right: Operand
    varied: bool = False  # one kernel should serve many sizes, rather than suit this one best


def item(operand: Operand, pointer: str, place: str) -> str:
    """One item of an operand, in float32."""
    if operand.dtype == "bfloat16":
        return f"FROM_BFLOAT16({pointer}[{place}])"
    return f"vload_half({place}, {pointer})" if operand.dtype == "float16" else f"{pointer}[{place}]"
