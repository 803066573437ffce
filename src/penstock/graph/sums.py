"""The pass that joins the terms of long sums, as gradients of what is used several times are, for CPUs.

What is used part by part has a sum of padded parts as its gradient: a concatenation. A weight that is used at
each step of a sequence has a sum of products with few steps along K: a single product with many. A bias that
is added at each step has a sum of sums of rows: a single sum of rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

from penstock.graph.contraction import MATMUL, matmul
from penstock.graph.elementwise import PRIMITIVES, add
from penstock.graph.node import Node, topological
from penstock.graph.reducing import sum_
from penstock.graph.shaping import PAD, PERMUTE, RESHAPE, concat, permute, reshape

_ADD = PRIMITIVES["add"]
_FEWEST = 4  # products that are joined; fewer are not worth the copies of their operands


def join_sums(outputs: Sequence[Node]) -> list[Node]:
    """The same values up to the order of sums, and up to the sign of zeros that zeros are added to."""
    return _Joining(outputs).outputs


class _Terms(NamedTuple):
    """What the terms of a sum have in common."""

    number: int
    padded: int | None  # the items of padded parts; None if there are other terms
    row_sums: bool  # whether each is the sum of the rows of a matrix

    def with_(self, other: _Terms) -> _Terms:
        """Those of a sum of both."""
        padded = None if self.padded is None or other.padded is None else self.padded + other.padded
        return _Terms(self.number + other.number, padded, self.row_sums and other.row_sums)


class _Joining:
    """Rewrites a graph."""

    def __init__(self, outputs: Sequence[Node]) -> None:
        order = topological(outputs)
        self._uses = Counter(parent for node in order if node.value is None for parent in node.inputs)
        self._uses.update(outputs)
        sums = (node for node in order if node.primitive is _ADD and node.value is None)
        self._inner = {part for node in sums for part in node.inputs if _is_inner(part, self._uses)}
        self._terms: dict[Node, _Terms] = {}  # of each sum
        self._new: dict[Node, Node] = {}
        self._columns: dict[tuple[Node, ...], Node] = {}  # matrices on top of one another, by what they are
        self._heights: set[int] = set()  # how many matrices such columns have
        self._row_sums: dict[Node, Node] = {}  # the sums of the rows of such columns
        for node in order:
            self._new[node] = node if node.value is not None else self._rewritten(node)
        self.outputs = [self._new[node] for node in outputs]

    def _rewritten(self, node: Node) -> Node:
        joined = self._joined(_terms(node, self._uses)) if self._may_be_joined(node) else None
        joined = joined or node.on(tuple(self._new[parent] for parent in node.inputs))
        return self._of_column(joined) if _sums_rows(joined) else joined

    def _may_be_joined(self, node: Node) -> bool:
        """Whether to look at all terms of a sum, which takes long for each of the sums inside of another.

        What has products to join is joined as a whole.
        """
        if node.primitive is not _ADD:
            return False
        terms = self._terms[node] = reduce(_Terms.with_, map(self._terms_of, node.inputs))
        covers = terms.padded == node.size
        return node not in self._inner or covers or (terms.row_sums and terms.number in self._heights)

    def _terms_of(self, node: Node) -> _Terms:
        """Of a sum inside of another, or of a term."""
        if node in self._inner:
            return self._terms[node]
        is_pad = node.primitive is PAD and node.value is None
        row_sum = _sums_rows(node) and node.inputs[0].ndim == 2
        return _Terms(1, node.inputs[0].size if is_pad else None, row_sum)

    def _joined(self, terms: Sequence[Node]) -> Node | None:
        """A sum with its terms joined; None where there is nothing to join."""
        if (axis := _axis_of_pads(terms)) is not None:
            parts = sorted(terms, key=lambda term: term.attributes["slices"][axis])
            return self._concatenated([self._new[part.inputs[0]] for part in parts], axis)
        if all(_sums_rows(term) and term.inputs[0].ndim == 2 for term in terms):
            return self._sum_of_column([self._new[term.inputs[0]] for term in terms])
        products = [term for term in terms if _is_short_product(term) and self._uses[term] == 1]
        if len(products) < _FEWEST:
            return None
        rest = [self._new[term] for term in terms if term not in products]
        lefts, rights = ([self._new[product.inputs[side]] for product in products] for side in (0, 1))
        return reduce(add, rest, self._product(lefts, rights))

    def _concatenated(self, parts: list[Node], axis: int) -> Node:
        matrices = [part.inputs[0] for part in parts if part.primitive is RESHAPE and part.value is None]
        stacked = len(matrices) == len(parts) and matrices[0].ndim == 2
        if axis or not stacked or any(part.shape != (1, *matrices[0].shape) for part in parts):
            return concat(parts, axis)
        return reshape(self._column(matrices), (len(parts), *matrices[0].shape))

    def _column(self, matrices: list[Node]) -> Node:
        self._heights.add(len(matrices))
        return self._columns.setdefault(tuple(matrices), concat(matrices, 0))

    def _sum_of_column(self, matrices: list[Node]) -> Node | None:
        """The sum of the rows of several matrices that are on top of one another; None if they are not."""
        for order in (matrices, matrices[::-1]):
            if (column := self._columns.get(tuple(order))) is not None:
                return self._row_sums.setdefault(column, sum_(column, (0,)))
        return None

    def _of_column(self, total: Node) -> Node:
        """The same sum of rows as `_sum_of_column` gives for such matrices, so that it is computed once."""
        column = total.inputs[0]
        if column.primitive is RESHAPE and column.value is None:
            column = column.inputs[0]
        if column.ndim != 2 or column not in self._columns.values():
            return total
        return self._row_sums.setdefault(column, sum_(column, (0,)))

    def _product(self, lefts: list[Node], rights: list[Node]) -> Node:
        """The sum of products: of matrices beside one another by matrices on top of one another.

        Transposes, as gradients have, are the transpose of a column that is often there already: the
        gradient of what was added at each step, from the first to the last.
        """
        if any(left.primitive is not PERMUTE or left.value is not None for left in lefts):
            return matmul(concat(lefts, 1), concat(rights, 0))
        matrices = [left.inputs[0] for left in lefts]
        if tuple(reversed(matrices)) in self._columns:
            matrices, rights = matrices[::-1], rights[::-1]
        return matmul(permute(self._column(matrices), (1, 0)), concat(rights, 0))


def _is_inner(term: Node, uses: Counter[Node]) -> bool:
    """Whether a term of a sum is a sum that nothing else needs."""
    return term.primitive is _ADD and term.value is None and uses[term] == 1


def _terms(node: Node, uses: Counter[Node]) -> list[Node]:
    """What a sum adds up, through sums that nothing else needs."""
    terms: list[Node] = []
    stack = [node]
    while stack:
        term = stack.pop()
        if term is node or _is_inner(term, uses):
            stack += reversed(term.inputs)
        else:
            terms.append(term)
    return terms


def _axis_of_pads(terms: Sequence[Node]) -> int | None:
    """The axis along which padded values follow one another, without a gap."""
    if any(term.primitive is not PAD or term.value is not None for term in terms):
        return None
    whole = [(0, length, 1) for length in terms[0].shape]
    axes = [axis for axis, part in enumerate(terms[0].attributes["slices"]) if part != whole[axis]]
    if len(axes) != 1:
        return None
    axis, end = axes[0], 0
    for slices in sorted((term.attributes["slices"] for term in terms), key=lambda slices: slices[axis]):
        start, count, step = slices[axis]
        if (start, step) != (end, 1) or [*slices[:axis], whole[axis], *slices[axis + 1 :]] != whole:
            return None
        end += count
    return axis if end == terms[0].shape[axis] else None


def _sums_rows(term: Node) -> bool:
    """Whether a node is a sum over all axes but the last."""
    if term.primitive.name != "sum" or term.value is not None or term.dtype.kind != "f":
        return False
    axes: tuple[int, ...] = term.attributes["axes"]
    return axes == tuple(range(term.inputs[0].ndim - 1))


def _is_short_product(term: Node) -> bool:
    """Whether adding a product up takes more than copying its operands."""
    if term.primitive is not MATMUL or term.value is not None or term.ndim != 2 or term.dtype.kind != "f":
        return False
    rows, columns = term.shape
    return term.inputs[0].shape[1] * (rows + columns) <= rows * columns
