"""Blocks of 8 x 8 items in the vectors of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.kernels import ir

# A block is transposed in three rounds: pairs of rows to shuffle, and the lanes of the two results.
_PAIRS = (
    ((0, 1), (2, 3), (4, 5), (6, 7)),
    ((0, 2), (1, 3), (4, 6), (5, 7)),
    ((0, 4), (1, 5), (2, 6), (3, 7)),
)
_ITEMS = (
    ((0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15)),
    ((0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)),
    ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)),
)


def transposed(rows: Sequence[ir.Var], named: Callable[[ir.Expr], ir.Var]) -> list[ir.Var]:
    """The columns of a block, given its rows; `named` gives a value a name."""
    block, kind = [*rows], rows[0].type
    for turn, (pairs, items) in enumerate(zip(_PAIRS, _ITEMS, strict=True)):
        made = [named(ir.Shuffle(kind, block[i], block[j], part)) for i, j in pairs for part in items]
        block = made if turn < 2 else made[::2] + made[1::2]
    return block
