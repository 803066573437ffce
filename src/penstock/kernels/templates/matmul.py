"""What a matrix product is, for the templates of its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.kernels.builder import Memory
from penstock.kernels.ir.expressions import Expr, Operand, Var
from penstock.kernels.ir.statements import Statement

# Given the row, the column and a variable with neighbouring items of that row of matrix `BATCH`: statements
# that compute with these items what the kernel stores, and store it. They stand in a block of their own.
Epilogue = Callable[[Expr, Expr, Var], list[Statement]]

BATCH = Var("batch")  # the number of the matrix


@dataclass(frozen=True)
class Matrix:
    """One side of the product: the left one has M rows and K columns, the right one K and N."""

    memory: Memory  # of float32, float16 or, on a GPU, bfloat16; sums are float32 whichever it is
    base: Expr  # of `BATCH`: where that matrix begins, in items
    row_stride: int  # in items
    column_stride: int

    def index(self, row: Operand, column: Operand) -> Expr:
        """Where an item lies in the memory."""
        return self.base + row * self.row_stride + column * self.column_stride


@dataclass(frozen=True)
class Problem:
    """`batch` products of M x K by K x N."""

    batch: int
    rows: int  # M
    columns: int  # N
    inner: int  # K
    left: Matrix
    right: Matrix
    varied: bool = False  # one kernel should serve many sizes, rather than suit this one best
