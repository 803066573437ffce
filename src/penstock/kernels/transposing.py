"""Square blocks of items in the vectors of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.kernels import ir

_QUAD = 4  # items of 16 bytes, within which a CPU moves items in one instruction

Named = Callable[[ir.Expr], ir.Var]


def transposed(rows: Sequence[ir.Var], named: Named) -> list[ir.Var]:
    """The columns of a block of 8 x 8 or 16 x 16 items, given its rows; `named` gives a value a name.

    First four rows at a time, in each quad of their lanes. What four rows have of every fourth column is then
    in one vector, and whole quads are moved until a vector has one column.
    """
    quads = [_in_quads(rows[at : at + _QUAD], named) for at in range(0, len(rows), _QUAD)]
    while len(quads) > 1:
        quads = [_joined(left, right, named) for left, right in zip(quads[::2], quads[1::2], strict=True)]
    return quads[0]


def _in_quads(rows: Sequence[ir.Var], named: Named) -> list[ir.Var]:
    """Four vectors with the columns 0, 1, 2 and 3 of each quad, given four rows."""
    low = [(0, 0), (1, 0), (0, 1), (1, 1)]  # (vector, item of a quad)
    high = [(0, 2), (1, 2), (0, 3), (1, 3)]
    pairs = [_shuffled(rows[at], rows[at + 1], items, named) for at in (0, 2) for items in (low, high)]
    first, second = [(0, 0), (0, 1), (1, 0), (1, 1)], [(0, 2), (0, 3), (1, 2), (1, 3)]
    return [_shuffled(pairs[at], pairs[at + 2], items, named) for at in (0, 1) for items in (first, second)]


def _shuffled(left: ir.Var, right: ir.Var, items: Sequence[tuple[int, int]], named: Named) -> ir.Var:
    """The same items of each quad of two vectors."""
    width = left.type.width
    lanes = (vector * width + at + item for at in range(0, width, _QUAD) for vector, item in items)
    return named(ir.Shuffle(left.type, left, right, tuple(lanes)))


def _joined(left: Sequence[ir.Var], right: Sequence[ir.Var], named: Named) -> list[ir.Var]:
    """Vectors of even quads, then of odd quads: those of the left vector, then those of the right."""
    width = left[0].type.width
    result = []
    for odd in (0, _QUAD):
        starts = range(odd, 2 * width, 2 * _QUAD)
        lanes = tuple(start + item for start in starts for item in range(_QUAD))
        result += [named(ir.Shuffle(a.type, a, b, lanes)) for a, b in zip(left, right, strict=True)]
    return result
