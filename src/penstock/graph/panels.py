"""Matrices in panels: neighbouring columns lie together in memory, in the order in which they are read."""

from __future__ import annotations

from math import ceil

from penstock.graph.checkpoint import BARRIER
from penstock.graph.node import Array, Kind, Node, Primitive
from penstock.graph.shaping import pad, permute, reshape


def in_panels(matrix: Node, width: int) -> Node:
    """A matrix as a view of its copy in panels of `width` columns; zeros fill the last panel up."""
    inner, columns = matrix.shape
    count = ceil(columns / width)
    if columns % width:
        matrix = pad(matrix, ((0, inner, 1), (0, columns, 1)), (inner, count * width))
    panels = permute(reshape(matrix, (inner, count, width)), (1, 0, 2))
    return Node(PANELS, (Node(BARRIER, (panels,), {}),), {"columns": columns})


def _reference(panels: Array, columns: int) -> Array:
    count, inner, width = panels.shape
    return panels.transpose(1, 0, 2).reshape(inner, count * width)[:, :columns]


# The matrix of K x `columns` that panels of (count, K, width) hold.
PANELS = Primitive("panels", Kind.VIEW, lambda x, columns: ((x.shape[1], columns), x.dtype), _reference)
