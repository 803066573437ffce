"""Slices that differ in where they start only, from one graph to the next, and starts that are arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.graph.dtypes import int32
from penstock.graph.elementwise import full
from penstock.graph.node import Node
from penstock.graph.shaping import Axes, Slices, slice_at

_MOST_ITEMS = 1 << 31


@dataclass
class Family:
    """Graphs that differ in where slices start."""

    first: tuple[int, ...]  # the starts of the first, which are no arguments there
    differing: frozenset[int] = frozenset()  # which starts are arguments

    def covers(self, starts: tuple[int, ...]) -> bool:
        """Whether the starts that are no arguments are as usual."""
        pairs = enumerate(zip(starts, self.first, strict=True))
        return all(start == usual or at in self.differing for at, (start, usual) in pairs)

    def note(self, starts: tuple[int, ...]) -> None:
        """Have those starts be arguments, from now on, that differ from the first ones."""
        pairs = enumerate(zip(starts, self.first, strict=True))
        self.differing |= {at for at, (start, usual) in pairs if start != usual}


def may_move(node: Node) -> bool:
    """Whether the starts of a slice are never too large for arguments."""
    return node.inputs[0].size <= _MOST_ITEMS


def starts_of(slices: Sequence[Node]) -> tuple[int, ...]:
    """The starts of some slices, along one axis after the other."""
    return tuple([start for node in slices for start, _, _ in node.attributes["slices"]])


def lengths(slices: Slices) -> tuple[tuple[int, int], ...]:
    """What slices are, apart from their starts."""
    return tuple([(count, step) for _, count, step in slices])


def free_axes(node: Node) -> Axes:
    """The axes along which a slice could start elsewhere."""
    slices = zip(node.attributes["slices"], node.inputs[0].shape, strict=True)
    spans = [((count - 1) * abs(step) + 1, length) for (_, count, step), length in slices]
    return tuple([axis for axis, (span, length) in enumerate(spans) if span < length])


def differing_axes(slices: Sequence[Node], numbers: frozenset[int]) -> dict[Node, Axes]:
    """The axes of each slice along which its start, numbered as by `starts_of`, is among some numbers."""
    result: dict[Node, Axes] = {}
    first = 0
    for node in slices:
        result[node] = tuple([axis for axis in range(node.ndim) if first + axis in numbers])
        first += node.ndim
    return result


def moved(node: Node, source: Node, axes: Axes) -> Node:
    """A slice of `source` like one that was recorded, whose starts along some axes are arguments."""
    slices = enumerate(node.attributes["slices"])
    known = tuple([(0 if axis in axes else start, count, step) for axis, (start, count, step) in slices])
    return slice_at(source, [least_index(node, axis) for axis in axes], known, axes)


def least_index(node: Node, axis: int) -> Node:
    """The least index along an axis that a slice takes."""
    start, count, step = node.attributes["slices"][axis]
    return full((), int32, start + min((count - 1) * step, 0))
