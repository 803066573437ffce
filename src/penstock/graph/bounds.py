"""Checks that indices are in range.

`bounded` is an identity that says which axis an index is for. NumPy's reference checks the index at once.
Kernels do not check: a graph with bounded indices gets additional small outputs, the index that is furthest
out of range for each, which the host checks when it next reads any result.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.errors import BadIndex
from penstock.graph.creating import POSITIONS, SEQUENCE
from penstock.graph.dtypes import uint32, uint64
from penstock.graph.elementwise import CAST, FULL, PRIMITIVES, cast
from penstock.graph.node import Array, DType, Kind, Node, Primitive, Shape, same
from penstock.graph.reducing import ARGSORT, TOP, max_
from penstock.graph.shaping import concat, pad, reshape

_CLAMPING: dict[str, Callable[[Iterable[int]], int]] = {"minimum": min, "maximum": max}
_WHERE = PRIMITIVES["where"]
_MOST_TOGETHER = 16  # index tensors that are checked by one kernel


@dataclass(eq=False)
class Bound:
    """The axis that an index is for. A valid index is at least 0 and less than the length of the axis."""

    operation: str
    shape: Shape
    axis: int
    where: str  # the user's line that recorded the operation
    from_end: bool = False  # negative indices count from the end: the length was added to them
    checked: bool = False  # whether the index was checked, or will be when the host next reads
    index: weakref.ref[Node] | None = None  # the node whose span is known once the check has passed

    @property
    def length(self) -> int:
        """The length of the axis."""
        return self.shape[self.axis]

    def note(self) -> None:
        """Note with the index node that all items are in range."""
        node = None if self.index is None else self.index()
        if node is not None:
            least, most = -self.length if self.from_end else 0, self.length - 1
            before = node.span or (least, most)
            node.span = max(before[0], least), min(before[1], most)

    def error(self, index: int) -> BadIndex:
        """What to raise for an index that is out of range."""
        least = -self.length if self.from_end else 0
        wanted = f"{least} to {self.length - 1} can be used" if self.length else "no index can be used"
        return BadIndex(
            f"{self.operation}: index {index} is out of range for axis {self.axis} of shape {self.shape}, "
            f"which has length {self.length}: {wanted}; recorded at {self.where}",
            index=index,
            length=self.length,
            where=self.where,
        )


def bounded(index: Node, bound: Bound) -> Node:
    """The index itself; BadIndex is raised if an item is out of range."""
    return Node(BOUNDED, (index,), {"bound": bound})


def _reference(index: Array, bound: Bound) -> Array:
    if index.size:
        for item in (int(index.min()), int(index.max())):
            if not 0 <= item < bound.length:
                raise bound.error(item - bound.length if bound.from_end and item < 0 else item)
    return index


BOUNDED = Primitive(
    "bounded",
    Kind.IDENTITY,
    lambda index, bound: same(index),
    _reference,
    stop_gradient=True,
    is_identity=True,
)


def known_range(index: Node, spans: bool = True) -> tuple[int, int] | None:
    """Bounds of the items of an index, if any are known; they need not be tight.

    They follow from the graph, and with `spans` also from values that were checked before.
    """
    while index.value is None and index.primitive is not BOUNDED:
        # Every item of a view is an item of its input.
        if index.primitive.kind is not Kind.VIEW and not index.primitive.is_identity:
            break
        index = index.inputs[0]
    if spans and index.span is not None:
        return index.span
    primitive, given = index.primitive, index.attributes
    if primitive is BOUNDED:
        return 0, max(given["bound"].length - 1, 0)
    if primitive is CAST and index.value is None and index.dtype.itemsize == 8:
        return known_range(index.inputs[0], spans) if index.inputs[0].dtype.kind in "iu" else None
    if primitive is FULL:
        return _fitting(index, given["number"], given["number"])
    if primitive is POSITIONS:
        return _fitting(index, 0, max(given["count"] - 1, 0))
    if primitive is SEQUENCE:
        ends = given["start"], given["start"] + given["step"] * max(given["count"] - 1, 0)
        return _fitting(index, min(ends), max(ends))
    if primitive.kind is Kind.CALL and "subgraph" in given and len(given["subgraph"].outputs) == 1:
        return known_range(given["subgraph"].outputs[0], spans=False)
    if primitive is ARGSORT:
        return 0, max(index.shape[given["axis"]] - 1, 0)
    if primitive is TOP and index.inputs:
        return 0, max(index.inputs[0].shape[given["axis"]] - 1, 0)
    if primitive.name in _CLAMPING and index.dtype.kind in "iu" and index.inputs:
        limits = np.iinfo(np.dtype(index.dtype))
        sides = [known_range(side, spans) or (int(limits.min), int(limits.max)) for side in index.inputs]
        least, most = (_CLAMPING[primitive.name](ends) for ends in zip(*sides, strict=True))
        return least, most
    if primitive is _WHERE and index.inputs:
        first, second = (known_range(side, spans) for side in index.inputs[1:])
        if first is None or second is None:
            return None
        return min(first[0], second[0]), max(first[1], second[1])
    if primitive.kind is Kind.ARG_REDUCTION and index.inputs:
        return 0, index.inputs[0].shape[given["axis"]] - 1
    return None


def _fitting(index: Node, least: int, most: int) -> tuple[int, int] | None:
    """The range, if the dtype can hold it."""
    limits = np.iinfo(np.dtype(index.dtype))
    return (int(least), int(most)) if limits.min <= least and most <= limits.max else None


def unchecked(nodes: Iterable[Node]) -> list[Node]:
    """The bounded indices among these nodes that were not checked yet."""
    return [
        node
        for node in nodes
        if node.primitive is BOUNDED and node.value is None and not node.attributes["bound"].checked
    ]


class Verdict:
    """Checks the worst items of several bounded indices. It holds no node, since it outlives the graph."""

    def __init__(self, indices: Sequence[Node], dtype: DType) -> None:
        self.dtype = dtype
        self._bounds: list[tuple[Bound, bool]] = [
            (node.attributes["bound"], node.dtype.kind == "i") for node in indices
        ]

    def judge(self, values: Array) -> BadIndex | None:
        """The error for these values; None if all are in range."""
        for worst, (bound, signed) in zip(values.tolist(), self._bounds, strict=True):
            if worst >= bound.length:
                negative = signed and worst > np.iinfo(np.dtype(self.dtype)).max // 2
                before = bound.length if bound.from_end else 0
                return bound.error(worst - (1 << 8 * self.dtype.itemsize) - before if negative else worst)
            bound.note()
        return None


class Worst:
    """The worst items of several bounded indices: the largest as unsigned integers (negatives wrap)."""

    def __init__(self, indices: Sequence[Node], dtype: DType) -> None:
        self._indices = [node.inputs[0] for node in indices]
        self.verdict = Verdict(indices, dtype)

    @cached_property
    def node(self) -> Node:
        """The node that computes them."""
        longest, dtype = max(index.size for index in self._indices), self.verdict.dtype
        return max_(concat([_row(cast(index, dtype), longest) for index in self._indices], 0), (1,))


def worst(indices: Sequence[Node]) -> list[Worst]:
    """The worst items of bounded indices, several indices of the same width together."""
    result = []
    for dtype in (uint32, uint64):
        fitting = [node for node in indices if (node.dtype.itemsize > 4) == (dtype is uint64)]
        for start in range(0, len(fitting), _MOST_TOGETHER):
            result.append(Worst(fitting[start : start + _MOST_TOGETHER], dtype))
    return result


def _row(index: Node, length: int) -> Node:
    row = reshape(index, (1, index.size))
    return row if index.size == length else pad(row, ((0, 1, 1), (0, index.size, 1)), (1, length))
