"""The pass that keeps the channels of images last in memory, where a library multiplies matrices.

There, a convolution is a product whose rows are windows and whose columns are channels, or a primitive with
the channels last. Its result is a view of that, with the channels as the second axis (see `convolution`).
Each operation on such views becomes the same operation on what is below them, with the view after it. So the
next convolution finds its channels last, and the sums of a batch norm are sums of columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.graph.checkpoint import BARRIER
from penstock.graph.elementwise import FULL, full
from penstock.graph.node import Kind, Node, Shape, topological
from penstock.graph.reducing import EXPAND, expand
from penstock.graph.shaping import CONCAT, PAD, PERMUTE, RESHAPE, SLICE, concat, pad, permute, reshape, slice_
from penstock.graph.windows import WINDOWS

Axes = tuple[int, ...]


def channels_last(outputs: Sequence[Node]) -> list[Node]:
    """For each output a node with the same value, up to the order of sums."""
    return _Sinking().rewritten(outputs)


class _Sinking:
    """Moves permutations that put the last axis second towards the outputs."""

    def __init__(self) -> None:
        self._new: dict[Node, Node] = {}
        self._below: dict[Node, tuple[Node, Axes]] = {}  # of what is a permutation: its input, and the axes
        self._permuted: dict[tuple[Node, Axes], Node] = {}
        self._ordered: dict[tuple[Node, Axes], Node] = {}
        self._spread: dict[Node, bool] = {}

    def rewritten(self, outputs: Sequence[Node]) -> list[Node]:
        for node in topological(outputs):
            if node.value is not None:
                self._new[node] = node
                continue
            sunk = self._sunk(node)
            if sunk is None and node.attributes.get("ordered") and not self._is_permuted(node.inputs[0]):
                self._new[node] = self._whole(node.inputs[0])  # it is in order as it is
            elif sunk is None:
                self._new[node] = node.on(tuple(self._whole(parent) for parent in node.inputs))
            elif sunk[1] == tuple(range(node.ndim)):
                self._new[node] = sunk[0]
            else:
                self._below[node] = sunk
        return [self._whole(node) for node in outputs]

    def _is_permuted(self, node: Node) -> bool:
        """Whether the items of a node lie in another order than those of what it is computed from."""
        new = self._whole(node)
        while new.primitive.kind is Kind.VIEW and new.primitive is not PERMUTE and new.value is None:
            new = new.inputs[0]
        return new.primitive is PERMUTE and new.value is None

    def _whole(self, node: Node) -> Node:
        """The node in the new graph, in its own order."""
        if node not in self._below:
            return self._new[node]
        return self._permutation(*self._below[node])

    def _permutation(self, node: Node, axes: Axes) -> Node:
        if (node, axes) not in self._permuted:
            self._permuted[node, axes] = permute(node, axes)
        return self._permuted[node, axes]

    def _sunk(self, node: Node) -> tuple[Node, Axes] | None:
        """What a node is a permutation of, and the axes; None if it is better computed as it is."""
        below = [self._below[parent] for parent in node.inputs if parent in self._below]
        if node.primitive is PERMUTE:
            return self._sunk_permutation(node, below)
        if not below:
            return None
        if node.primitive.kind is Kind.ELEMENTWISE:
            return self._sunk_elementwise(node, below[0][1])
        if node.primitive is CONCAT:
            axes = below[0][1]
            parts = [self._in_order(parent, axes) for parent in node.inputs]
            return concat(parts, axes[node.attributes["axis"]]), axes
        source, axes = below[0]
        if node.primitive.kind is Kind.REDUCTION:
            return _sunk_reduction(node, source, axes)
        if node.primitive.kind in (Kind.VIEW, Kind.MOVE):
            return _sunk_view(node, source, axes)
        return None

    def _sunk_permutation(self, node: Node, below: list[tuple[Node, Axes]]) -> tuple[Node, Axes] | None:
        order = node.attributes["axes"]
        if below:
            source, axes = below[0]
            return source, tuple(axes[axis] for axis in order)
        (source,) = node.inputs
        if source.value is not None or order != (0, node.ndim - 1, *range(1, node.ndim - 1)):
            return None
        image = node.ndim >= 4 or source.primitive is RESHAPE or source.primitive.kind is Kind.CONVOLUTION
        return (self._new[source], order) if image else None

    def _sunk_elementwise(self, node: Node, axes: Axes) -> tuple[Node, Axes] | None:
        """Where all inputs are in that order already, or are read in any order at no cost."""
        if not all(self._any_order(parent, axes) for parent in node.inputs):
            return None
        return node.on(tuple(self._in_order(parent, axes) for parent in node.inputs)), axes

    def _any_order(self, node: Node, axes: Axes) -> bool:
        if node in self._below:
            return self._below[node][1] == axes
        return self._is_spread(node)

    def _is_spread(self, node: Node) -> bool:
        """Whether a node is computed from constants and from repeated items only."""
        if node not in self._spread:
            passes = node.primitive.kind in (Kind.ELEMENTWISE, Kind.VIEW) or node.primitive is PAD
            of_spread = passes and all(map(self._is_spread, node.inputs))
            repeated = node.primitive is EXPAND or node.primitive.kind is Kind.CREATION
            self._spread[node] = node.value is None and node not in self._below and (repeated or of_spread)
        return self._spread[node]

    def _in_order(self, node: Node, axes: Axes) -> Node:
        """What a node would be a permutation of, by these axes."""
        if node in self._below and self._below[node][1] == axes:
            return self._below[node][0]
        key = (node, axes)
        if key not in self._ordered:
            self._ordered[key] = self._newly_in_order(node, axes)
        return self._ordered[key]

    def _newly_in_order(self, node: Node, axes: Axes) -> Node:
        new, inverse = self._whole(node), _inverse(axes)
        if self._is_spread(node):
            if node.primitive is EXPAND:
                return expand(permute(new.inputs[0], inverse), _shape(new.shape, inverse))
            if node.primitive is FULL:
                return full(_shape(new.shape, inverse), new.dtype, new.attributes["number"])
            if node.primitive is PAD:
                return _permuted_pad(node, self._in_order(node.inputs[0], axes), inverse)
            if node.primitive.kind is Kind.ELEMENTWISE:
                return new.on(tuple(self._in_order(parent, axes) for parent in node.inputs))
        return permute(new, inverse)


def _inverse(axes: Axes) -> Axes:
    return tuple(axes.index(axis) for axis in range(len(axes)))


def _shape(shape: Shape, axes: Axes) -> Shape:
    return tuple(shape[axis] for axis in axes)


def _ranks(axes: Sequence[int]) -> Axes:
    """Each axis as its position among all of them in order."""
    order = sorted(axes)
    return tuple(order.index(axis) for axis in axes)


def _sunk_reduction(node: Node, source: Node, axes: Axes) -> tuple[Node, Axes]:
    reduced = node.attributes["axes"]
    result = Node(node.primitive, (source,), {"axes": tuple(sorted(axes[axis] for axis in reduced))})
    return result, _ranks([axes[axis] for axis in range(len(axes)) if axis not in reduced])


def _permuted_pad(node: Node, source: Node, inverse: Axes) -> Node:
    slices = tuple(node.attributes["slices"][axis] for axis in inverse)
    return pad(source, slices, _shape(node.shape, inverse))


def _sunk_view(node: Node, source: Node, axes: Axes) -> tuple[Node, Axes] | None:
    inverse, attributes = _inverse(axes), node.attributes
    if node.primitive is BARRIER:
        return Node(BARRIER, (source,), attributes), axes
    if node.primitive is EXPAND:
        return expand(source, _shape(node.shape, inverse)), axes
    if node.primitive is SLICE:
        return slice_(source, tuple(attributes["slices"][axis] for axis in inverse)), axes
    if node.primitive is PAD:
        return _permuted_pad(node, source, inverse), axes
    if node.primitive is WINDOWS:
        axis = attributes["axis"]
        at = axes[axis]
        moved = [other + (other > at) for other in axes]
        moved.insert(axis + 1, at + 1)
        return Node(WINDOWS, (source,), {**attributes, "axis": at}), tuple(moved)
    return _sunk_reshape(node, source, axes) if node.primitive is RESHAPE else None


def _sunk_reshape(node: Node, source: Node, axes: Axes) -> tuple[Node, Axes] | None:
    """Of a reshape that divides axes, or merges axes that are neighbours below, too."""
    if not node.size:
        return None
    groups = _corresponding(node.inputs[0].shape, node.shape)
    long = [at for at in range(source.ndim) if source.shape[at] > 1]  # axes below, in their order
    begins: list[int] = []
    for old, _ in groups:
        below = [axes[axis] for axis in old]
        if below != long[long.index(below[0]) :][: len(below)]:
            return None
        begins.append(below[0])
    order = sorted(range(len(groups)), key=begins.__getitem__)
    new_axes = [axis for group in order for axis in groups[group][1]]
    for axis in range(node.ndim):
        if axis not in new_axes:  # of length 1: after the axis before it, as windows and their items are
            new_axes.insert(new_axes.index(axis - 1) + 1 if axis else 0, axis)
    return reshape(source, _shape(node.shape, tuple(new_axes))), _inverse(tuple(new_axes))


def _corresponding(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Groups of successive axes of both shapes that have as many items; axes of length 1 are left out."""
    before = [axis for axis, length in enumerate(old) if length > 1]
    after = [axis for axis, length in enumerate(new) if length > 1]
    groups: list[tuple[list[int], list[int]]] = []
    while before and after:
        left, right = [before.pop(0)], [after.pop(0)]
        while (mine := math.prod(old[axis] for axis in left)) != (
            theirs := math.prod(new[axis] for axis in right)
        ):
            rest, group = (before, left) if mine < theirs else (after, right)
            group.append(rest.pop(0))
        groups.append((left, right))
    return groups
