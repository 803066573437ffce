"""The description of a matrix product for the templates of its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.fusion.views import Digits
from penstock.kernels.builder import Memory
from penstock.kernels.ir.expressions import Const, Expr, Operand, Var
from penstock.kernels.ir.statements import Statement

# Given the row, the column, and a variable with neighbouring items of that row of matrix `BATCH`: statements,
# in a scope of their own, that compute the outputs from these items and store them.
Epilogue = Callable[[Expr, Expr, Var], list[Statement]]

BATCH = Var("batch")  # the index of the matrix


@dataclass(frozen=True)
class Matrix:
    """An operand of the product: the left has M rows and K columns, the right K rows and N columns."""

    memory: Memory  # integers as unsigned ones, whose sums wrap around
    base: Expr  # the index of the first item of matrix `BATCH`
    row_stride: int | Digits  # in items
    column_stride: int | Digits
    panel_width: int = 0  # columns of a panel, where a right side lies in panels

    @property
    def is_summed(self) -> bool:
        """Whether its items have the dtype of sums: those of half precision do not."""
        return self.memory.type.dtype == self.memory.dtype

    def index(self, row: Operand, column: Operand) -> Expr:
        """The index of an item in memory."""
        return self.base + offset(row, self.row_stride) + offset(column, self.column_stride)


def offset(number: Operand, stride: int | Digits) -> Expr:
    """The offset of an item along an axis."""
    whole = number if isinstance(number, Expr) else Const(number)
    if isinstance(stride, int):
        return whole * stride
    total: Expr | None = None
    for at, (divisor, length, step) in enumerate(stride.parts):
        digit = whole // divisor if divisor > 1 else whole
        part = (digit % length if at else digit) * step
        total = part if total is None else total + part
    assert total is not None
    return total


def neighbour_stride(stride: int | Digits) -> int:
    """The distance of most neighbours."""
    return stride if isinstance(stride, int) else stride.stride


@dataclass(frozen=True)
class Problem:
    """`batch` products of M x K by K x N."""

    batch: int
    rows: int  # M
    columns: int  # N
    inner: int  # K
    left: Matrix
    right: Matrix
    varied: bool = False  # a kernel for many sizes, rather than the best for this size
    shared: bool = False  # one of the few kernels for all sizes
    # Where it is given, how a CPU divides K: into blocks, of which some are added up before they are added to
    # the total.
    order: tuple[int, ...] = ()

    @property
    def dtype(self) -> str:
        """The dtype of the sums."""
        return self.left.memory.type.dtype
