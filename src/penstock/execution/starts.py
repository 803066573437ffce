"""Slices whose starts differ from one run of an expression to the next, as in a loop over rows.

The first expression gets a program of its own, which reads slices as views. For others that differ only in
where slices start, the starts that differ become arguments (`slice_at`), and one program serves all of them.
Where it might add up in another order than one that reads views, as on a GPU, slices are computed before it.
And what slices are taken of again and again, without ever being read as a whole, is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from penstock.drivers.driver import Capabilities
from penstock.errors import OutOfDeviceMemory
from penstock.execution.sharing import first_item
from penstock.execution.structure import Structure
from penstock.fusion.products import by_library
from penstock.graph.contraction import MATMUL
from penstock.graph.dtypes import HALF_PRECISION
from penstock.graph.moving_slices import Family, differing_axes, lengths, may_move, moved, starts_of
from penstock.graph.node import Kind, Node, topological
from penstock.graph.shaping import SLICE, Axes
from penstock.lru import LRU

_MAX_FAMILIES = 1024
_MOVES = {Kind.ELEMENTWISE, Kind.VIEW, Kind.CREATION, Kind.MOVE, Kind.GATHER, Kind.IDENTITY}
_READS_VIEWS = {Kind.CONTRACTION, Kind.CONVOLUTION, Kind.ATTENTION}


class Starts:
    """The families of a device's expressions."""

    def __init__(self, capabilities: Capabilities) -> None:
        self._capabilities, self._gpu = capabilities, capabilities.vector_width == 1
        self._families = LRU[Hashable, Family](_MAX_FAMILIES)
        self._of_singles = LRU[Hashable, Family](_MAX_FAMILIES)  # by the keys of small expressions
        self._sliced = WeakSet[Node]()  # pending nodes

    def again(self, key: Hashable, node: Node) -> Node | None:
        """The same as `moved` for a small expression with a key by `single`, if others like it were moved."""
        if not self._of_singles or type(key) is not tuple:  # a call has no slices of its own
            return None
        family = self._of_singles.use(_key_without_starts(key))
        if family is None:
            return None
        slices = [part for part in topological([node]) if part.primitive is SLICE and part.value is None]
        starts = starts_of(slices)
        if starts == family.first or not family.covers(starts):
            return None
        return _with_arguments([node], differing_axes(slices, family.differing))[0]

    def moved(
        self, structure: Structure, key: Hashable | None, compute: Callable[[Node], None], has_room: bool
    ) -> Sequence[Node] | None:
        """What computes the same by a program for all starts; None where it gets one of its own.

        `key`: that of `single`, if it is a small expression. `compute`: gives a node its value. `has_room`:
        whether more may be computed than is wanted.
        """
        slices = structure.slices
        if not slices or not all(map(may_move, slices)):
            return None
        kind = structure.key_with(_without_starts)
        family, starts = self._families.use(kind), starts_of(slices)
        if family is None:
            family = self._families[kind] = Family(starts)
        if starts == family.first:
            return None
        family.note(starts)
        axes_of = differing_axes(slices, family.differing)
        differing = [node for node, axes in axes_of.items() if axes]
        if has_room and self._computed_sources(structure, differing, compute):
            now = Structure(structure.recorded, self._capabilities)
            return self.moved(now, None, compute, has_room) or now.recorded
        if not self._keeps_bits(structure, differing):
            return self._of_values(structure, differing, compute)
        if isinstance(key, tuple):
            self._of_singles[_key_without_starts(key)] = family
        return _with_arguments(structure.computed, axes_of)

    def _computed_sources(
        self, structure: Structure, differing: Sequence[Node], compute: Callable[[Node], None]
    ) -> bool:
        """Compute what slices were taken of before, as in a loop over batches; whether there was any."""
        bases = {*map(_base, differing)}.difference(structure.recorded)
        pending = [node for node in bases if node.value is None and not node.primitive.is_free]
        known = [node for node in pending if node in self._sliced and node.dtype not in HALF_PRECISION]
        self._sliced.update(pending)
        with suppress(OutOfDeviceMemory):  # a program that computes only parts of them may need less
            for node in known:
                compute(node)
        return any(node.value is not None for node in known)

    def _keeps_bits(self, structure: Structure, differing: Sequence[Node]) -> bool:
        """Whether nothing is added up in another order if some slices are no views.

        On a GPU, the order depends on what a kernel reads. On a CPU, that of products depends on strides.
        """
        kinds = {node.primitive.kind for node in structure.operations}
        if self._gpu:
            return kinds <= _MOVES
        if not kinds & _READS_VIEWS:
            return True
        read = _read_by_products(structure)
        return all(
            node.inputs[0].value is not None and (node not in read or _keeps_strides(node))
            for node in differing
        )

    def _of_values(
        self, structure: Structure, differing: Sequence[Node], compute: Callable[[Node], None]
    ) -> Sequence[Node] | None:
        """What is wanted, on a GPU, once slices that start elsewhere are computed; None if there are none."""
        first = [node for node in differing if node.inputs[0].value is not None]
        if not self._gpu or not first or {*first} & {*structure.recorded}:
            return None
        if self._reads_as_aligned(structure) and not all(map(self._is_aligned, first)):
            return None
        with suppress(OutOfDeviceMemory):  # a program that reads views may need less
            for node in first:
                compute(node)
        return structure.recorded

    def _reads_as_aligned(self, structure: Structure) -> bool:
        """Whether a library multiplies, whose order of sums depends on how its operands are aligned."""
        products = [node for node in structure.operations if node.primitive.kind in _READS_VIEWS]
        return self._capabilities.matmul_library and any(
            node.primitive is not MATMUL
            or node.dtype in HALF_PRECISION
            or by_library(node, self._capabilities)
            for node in products
        )

    def _is_aligned(self, node: Node) -> bool:
        """Whether a slice of a value is a part of its memory that is aligned like a value of its own."""
        first = first_item(node.inputs[0].shape, node.attributes["slices"])
        return first is not None and not first * node.dtype.itemsize % self._capabilities.offset_alignment


def _base(node: Node) -> Node:
    """What a node is a view of."""
    while node.value is None and node.primitive.kind in (Kind.VIEW, Kind.IDENTITY) and node.inputs:
        node = node.inputs[0]
    return node


def _read_by_products(structure: Structure) -> set[Node]:
    """What products read in place: operands, and what these are views of."""
    products = [node for node in structure.operations if node.primitive.kind in _READS_VIEWS]
    stack, read = [parent for node in products for parent in node.inputs], set[Node]()
    while stack:
        node = stack.pop()
        if node not in read and node.value is None:
            read.add(node)
            if node.primitive.kind in (Kind.VIEW, Kind.IDENTITY):
                stack += node.inputs
    return read


def _keeps_strides(node: Node) -> bool:
    """Whether a slice of a value has the strides of its copy: some outermost items, and all of the others."""
    source = node.inputs[0]
    long = [axis for axis, length in enumerate(source.shape) if length > 1]
    inner = [node.attributes["slices"][axis] for axis in long[1:]]
    whole = [(0, source.shape[axis], 1) for axis in long[1:]]
    return inner == whole and node.attributes["slices"][long[0]][2] == 1


def _without_starts(part: tuple[Any, ...]) -> tuple[Any, ...]:
    """A part of the key of a structure without the starts of slices."""
    return (SLICE, part[1], lengths(part[2])) if part[0] is SLICE else part


def _key_without_starts(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """A key by `single` without the starts of slices."""
    first = key[0]
    if type(first) is tuple and first[0] is SLICE:  # a single operation
        return (SLICE, lengths(first[1]), *key[1:])
    parts = list(key)
    for at, part in enumerate(parts):
        if part is SLICE:  # followed by the number of its inputs
            parts[at + 2] = lengths(parts[at + 2])
    return tuple(parts)


def _with_arguments(wanted: Sequence[Node], axes_of: Mapping[Node, Axes]) -> list[Node]:
    """The wanted nodes, where the starts of slices along some axes are arguments."""
    new: dict[Node, Node] = {}
    for node in topological(wanted):
        inputs = tuple([new[parent] for parent in node.inputs]) if node.value is None else ()
        if axes := axes_of.get(node):
            new[node] = moved(node, inputs[0], axes)
        else:
            new[node] = node.on(inputs) if node.value is None else node
    return [new[node] for node in wanted]
