"""What an emitter works with: values, indices as expressions, and why vectors may be impossible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.fusion.index import Index, variable
from penstock.graph.dtypes import HALF_PRECISION
from penstock.graph.node import Node
from penstock.kernels import ir


def affine(index: Index) -> ir.Expr:
    """An index as an expression."""
    if not index.terms:
        return ir.Const(index.constant)
    if len(index.terms) == 1 and index.terms[0][1] == 1 and not index.constant:
        return ir.Var(index.terms[0][0])
    terms = tuple((ir.Var(name), None if factor == 1 else ir.Const(factor)) for name, factor in index.terms)
    return ir.Affine(terms, ir.Const(index.constant) if index.constant else None)


class LanesImpossible(Exception):
    """A vector cannot read neighbouring items where they lie."""


@dataclass(frozen=True)
class Value:
    """A value in a kernel, and the body that it is computed in."""

    var: ir.Expr
    depth: int

    @property
    def type(self) -> ir.Type:
        """The type of the value."""
        return self.var.type


def computed_dtype(node: Node) -> str:
    """The dtype in which a kernel computes a node's values: float16 and bfloat16 are widened."""
    return "float32" if node.dtype in HALF_PRECISION else str(node.dtype)


@dataclass(frozen=True)
class Merge:
    """Two neighbouring variables that are merged, because every index uses them as a single variable."""

    name: str
    outer: str
    inner: str
    length: int  # of the inner variable

    def applied(self, index: Index) -> Index:
        """The index with the merged variable."""
        both = variable(self.outer) * self.length + variable(self.inner)
        factor = index.factor(self.inner)
        return index + both * -factor + variable(self.name) * factor


def merged(index: Index, merges: Sequence[Merge]) -> Index:
    """An index after merging."""
    for merge in merges:
        index = merge.applied(index)
    return index


class BorderCrossed(LanesImpossible):
    """Vectors along a variable would be possible if they ended at its `borders`."""

    def __init__(self, name: str, borders: tuple[int, ...]) -> None:
        super().__init__(name, borders)
        self.name = name
        self.borders = borders
