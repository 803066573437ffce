"""Slices whose starts differ from one run of an expression to the next, as in a loop over rows.

The first expression gets a program of its own, which reads slices as views. For others that differ only in
where slices start, the starts that differ become arguments (`slice_at`), and one program serves all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.drivers.driver import Capabilities
from penstock.execution.sharing import Slices
from penstock.execution.structure import Structure
from penstock.graph.dtypes import int32
from penstock.graph.elementwise import full
from penstock.graph.node import Kind, Node, topological
from penstock.graph.shaping import SLICE, slice_at
from penstock.lru import LRU

_MAX_FAMILIES = 1024
_MOST_ITEMS = 1 << 31
_MOVES = {Kind.ELEMENTWISE, Kind.VIEW, Kind.CREATION, Kind.MOVE, Kind.GATHER, Kind.IDENTITY}
_READS_VIEWS = {Kind.CONTRACTION, Kind.CONVOLUTION, Kind.ATTENTION}


@dataclass
class _Family:
    """Expressions that differ in where slices start."""

    keeps_bits: bool  # whether they give the same bits if starts are arguments
    first: tuple[int, ...]  # the starts of that with a program of its own
    differing: frozenset[int] = frozenset()  # which starts are arguments

    def covers(self, starts: tuple[int, ...]) -> bool:
        """Whether the starts that are no arguments are as usual."""
        pairs = enumerate(zip(starts, self.first, strict=True))
        return all(start == usual or at in self.differing for at, (start, usual) in pairs)


class Starts:
    """The families of a device's expressions."""

    def __init__(self, capabilities: Capabilities) -> None:
        self._gpu = capabilities.vector_width == 1
        self._families = LRU[Hashable, _Family](_MAX_FAMILIES)
        self._of_singles = LRU[Hashable, _Family](_MAX_FAMILIES)  # by the keys of small expressions

    def again(self, key: Hashable, node: Node) -> Node | None:
        """The same as `moved` for a small expression with a key by `single`, if others like it were moved."""
        if not self._of_singles or type(key) is not tuple:  # a call has no slices of its own
            return None
        family = self._of_singles.use(_key_without_starts(key))
        if family is None:
            return None
        slices = [part for part in topological([node]) if part.primitive is SLICE and part.value is None]
        starts = _starts_of(slices)
        if starts == family.first or not family.covers(starts):
            return None
        return _with_arguments([node], slices, family.differing)[0]

    def moved(self, structure: Structure, key: Hashable | None) -> list[Node] | None:
        """What computes the same with starts as arguments; None where it gets a program of its own.

        `key`: that of `single`, if it is a small expression.
        """
        slices = structure.slices
        if not slices:
            return None
        kind = structure.key_with(_without_starts)
        family, starts = self._families.use(kind), _starts_of(slices)
        if family is None:
            family = self._families[kind] = _Family(self._keeps_bits(structure, slices), starts)
        if not family.keeps_bits or starts == family.first:
            return None
        pairs = enumerate(zip(starts, family.first, strict=True))
        family.differing |= {at for at, (start, usual) in pairs if start != usual}
        if isinstance(key, tuple):
            self._of_singles[_key_without_starts(key)] = family
        return _with_arguments(structure.computed, slices, family.differing)

    def _keeps_bits(self, structure: Structure, slices: Sequence[Node]) -> bool:
        """Whether nothing is added up in another order if slices are no views.

        On a GPU, the order depends on what a kernel reads. On a CPU, that of products depends on strides.
        """
        if any(node.inputs[0].size > _MOST_ITEMS for node in slices):
            return False  # a start may be too large for an argument
        kinds = {node.primitive.kind for node in structure.operations}
        if self._gpu:
            return kinds <= _MOVES
        return not kinds & _READS_VIEWS or all(map(_keeps_strides, slices))


def _keeps_strides(node: Node) -> bool:
    """Whether a slice of a value has the strides of its copy: some outermost items, and all of the others."""
    source = node.inputs[0]
    long = [axis for axis, length in enumerate(source.shape) if length > 1]
    inner = [node.attributes["slices"][axis] for axis in long[1:]]
    whole = [(0, source.shape[axis], 1) for axis in long[1:]]
    return source.value is not None and inner == whole and node.attributes["slices"][long[0]][2] == 1


def _starts_of(slices: Sequence[Node]) -> tuple[int, ...]:
    return tuple([start for node in slices for start, _, _ in node.attributes["slices"]])


def _lengths(slices: Slices) -> tuple[tuple[int, int], ...]:
    return tuple([(count, step) for _, count, step in slices])


def _without_starts(part: tuple[Any, ...]) -> tuple[Any, ...]:
    """A part of the key of a structure without the starts of slices."""
    return (SLICE, part[1], _lengths(part[2])) if part[0] is SLICE else part


def _key_without_starts(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """A key by `single` without the starts of slices."""
    first = key[0]
    if type(first) is tuple and first[0] is SLICE:  # a single operation
        return (SLICE, _lengths(first[1]), *key[1:])
    parts = list(key)
    for at, part in enumerate(parts):
        if part is SLICE:  # followed by the number of its inputs
            parts[at + 2] = _lengths(parts[at + 2])
    return tuple(parts)


def _with_arguments(wanted: Sequence[Node], slices: Sequence[Node], differing: frozenset[int]) -> list[Node]:
    """The wanted nodes, where some starts of slices, numbered in order, are arguments."""
    numbers: dict[Node, int] = {}
    first = 0
    for node in slices:
        numbers[node] = first
        first += node.ndim
    new: dict[Node, Node] = {}
    for node in topological(wanted):
        inputs = tuple([new[parent] for parent in node.inputs]) if node.value is None else ()
        axes = (
            [axis for axis in range(node.ndim) if numbers[node] + axis in differing]
            if node in numbers
            else []
        )
        if axes:
            new[node] = _moved(node, inputs[0], tuple(axes))
        else:
            new[node] = node.on(inputs) if node.value is None else node
    return [new[node] for node in wanted]


def _moved(node: Node, source: Node, axes: tuple[int, ...]) -> Node:
    known: list[Any] = list(node.attributes["slices"])
    starts = []
    for axis in axes:
        start, count, step = known[axis]
        starts.append(full((), int32, start + min((count - 1) * step, 0)))
        known[axis] = 0, count, step
    return slice_at(source, starts, tuple(known), axes)
