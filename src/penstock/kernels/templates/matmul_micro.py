"""What the kernels of matrix products on a CPU share: the micro-kernel, and the epilogue of a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.ir.expressions import Expr, Operand, Var, call
from penstock.kernels.templates.matmul import Epilogue
from penstock.kernels.templates.matmul_tiling import LANES

Items = Callable[[Expr], Sequence[tuple[Memory, Expr]]]  # of a step along K: memories, and indices in them


def micro_kernel(k: KernelBuilder, depth: Expr, sums: Sequence[Var], lefts: Items, rights: Items) -> None:
    """Add the products of single items of the left side by vectors of the right side to sums, row by row."""
    lanes = sums[0].type.width
    with k.loop("step", 0, depth) as step:
        loads = [k.load_vector(memory, at, lanes) for memory, at in rights(step)]
        vectors = [k.let(f"right{i}", load) for i, load in enumerate(loads)]
        for row, (memory, at) in enumerate(lefts(step)):
            factor = k.let(f"left{row}", k.broadcast(k.load(memory, at), lanes))
            for i, vector in enumerate(vectors):
                k.multiply_add(sums[row * len(vectors) + i], factor, vector)


def finish_row(
    k: KernelBuilder, epilogue: Epilogue, width: int, row: Expr, line: Memory, columns: tuple[Expr, Expr, int]
) -> None:
    """The epilogue of a row of sums, from a column to another; the third is how many the product has.

    `line` is indexed by column. The epilogue takes `width` neighbours at a time.
    """
    begin, end, count = columns
    rest = begin
    if count >= LANES and width > 1:
        rest = k.let("rest", begin + (end - begin) // LANES * LANES) if count % LANES else end
        with k.loop("item_column", begin, rest, LANES) as column:
            product = k.let("product", k.load_vector(line, column, LANES))
            k.splice(epilogue(row, column, product))
    if count % LANES or width == 1:
        with k.loop("item_column", rest, end) as column:
            product = k.let("product", k.load(line, column))
            k.splice(epilogue(row, column, product))


def minimum(left: Expr, right: Operand) -> Expr:
    """The smaller of two integers."""
    return call("minimum", left, right)


def share(k: KernelBuilder, name: str, number: Expr, total: int, parts: int) -> tuple[Var, Var]:
    """Where a part of `total` begins and ends, by the part's index."""
    ends = [(part.cast("int64") * total // parts).cast("int32") for part in (number, number + 1)]
    return k.let(f"{name}_begin", ends[0]), k.let(f"{name}_end", ends[1])
