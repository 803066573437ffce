"""Views: the values below them, and the order in which they read items."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable
from dataclasses import dataclass
from typing import Any

from penstock.fusion.costs import CROSSED_AXIS, CROSSED_ITEMS
from penstock.fusion.index import ZERO, Coords, Index, SplitNeeded, Variables, flat, source_coords, variable
from penstock.graph.node import Kind, Node, Shape
from penstock.graph.panels import PANELS
from penstock.graph.reducing import EXPAND
from penstock.graph.shaping import PERMUTE, SLICE
from penstock.lru import LRU


def below_views(node: Node) -> Node:
    """The value that a node is a view of, by whatever views."""
    while node.primitive.kind is Kind.VIEW:
        node = node.inputs[0]
    return node


def base(node: Node) -> Node:
    """The node below reshapes, whose bytes are those of `node` too."""
    while node.primitive.same_bytes and node.value is None:
        node = node.inputs[0]
    return node


def trailing(shape: Shape, axes: tuple[int, ...]) -> bool:
    """Whether the axes are trailing, ignoring axes of length 1."""
    long = [axis for axis, length in enumerate(shape) if length > 1]
    reduced = [axis for axis in long if axis in axes]
    return not reduced or long[-len(reduced) :] == reduced


def matrix_variables(ndim: int) -> list[str]:
    """The loop variables along the axes of matrices: b0, b1, ... for the batch, i and j."""
    return [*(f"b{axis}" for axis in range(ndim - 2)), "i", "j"]


@dataclass(frozen=True)
class Digits:
    """The offset of an item along an axis that consists of several axes of the memory below it.

    The index along the axis is split into digits, `index // divisor % length`, and the offset is the sum of
    digits times strides. The parts are (divisor, length, stride), the outermost first.
    """

    parts: tuple[tuple[int, int, int], ...]

    @property
    def stride(self) -> int:
        """The stride between items that differ in the last digit."""
        return self.parts[-1][2]

    @property
    def in_order(self) -> bool:
        """Whether offsets increase along the axis."""
        reach = 0
        for _, length, stride in reversed(self.parts):
            if stride <= reach:
                return False
            reach += (length - 1) * stride
        return True


_Pieces = dict[
    str, list[tuple[str, int]]
]  # names and lengths of the variables that a variable was split into

_KNOWN = LRU[Hashable, "tuple[Index, bool] | SplitNeeded"](1 << 12)


def operand_index(operand: Node, stored: Container[Node]) -> tuple[Node, Index] | None:
    """The value below the views of a matrix operand, and the index of item (b0, b1, ..., i, j) in it.

    Views in `stored` are in memory, so they are not looked through. None if the index is not affine in the
    variables: then the operand has to be copied.
    """
    try:
        return _looked_at(operand, stored, _whole(operand))
    except SplitNeeded:
        return None


def digits_index(
    operand: Node, stored: Container[Node]
) -> tuple[Node, tuple[int, dict[str, int | Digits]]] | None:
    """Like `operand_index`, as the offset of the first item and the stride or the digits of each variable.

    Where there are digits, and the operand has no more different items than the value below, copying is
    faster: None, or what a repeated matrix is repeated from, which is copied once. Panels are such a copy.
    """
    if operand.primitive is PANELS:
        panels = operand.inputs[0]
        count, depth, width = panels.shape
        return base(panels), (0, {"i": width, "j": Digits(((width, count, depth * width), (1, width, 1)))})
    pieces = _whole(operand)
    while True:
        try:
            in_place = _looked_at(operand, stored, pieces)
            break
        except SplitNeeded as needed:
            for parts in pieces.values():
                for at, (piece, length) in enumerate(parts):
                    if piece == needed.name:
                        inner = (f"{piece}i", needed.inner)
                        parts[at : at + 1] = [(f"{piece}o", length // needed.inner), inner]
    if in_place is None:
        return None
    node, index = in_place
    steps = {name: _steps(parts, index) for name, parts in pieces.items()}
    lengths = zip(steps.values(), operand.shape, strict=True)
    different = math.prod(length for step, length in lengths if step != 0)
    if different > node.size or not any(isinstance(step, Digits) for step in steps.values()):
        return node, (index.constant, steps)
    if operand.primitive is not EXPAND or different == operand.size:
        return None
    repeated = base(operand.inputs[0])
    in_place = operand_index(operand, (repeated,))
    return None if in_place is None else (repeated, (in_place[1].constant, _strides(operand, in_place[1])))


def is_scattered(operand: Node) -> bool:
    """Whether views of an operand have items that are not evenly apart along an axis."""
    in_place = digits_index(operand, ())
    return in_place is None or any(isinstance(step, Digits) for step in in_place[1][1].values())


def _strides(operand: Node, index: Index) -> dict[str, int | Digits]:
    return {name: index.factor(name) for name in matrix_variables(operand.ndim)}


def _whole(operand: Node) -> _Pieces:
    names = matrix_variables(operand.ndim)
    return {name: [(name, length)] for name, length in zip(names, operand.shape, strict=True)}


def _steps(parts: list[tuple[str, int]], index: Index) -> int | Digits:
    digits: list[tuple[int, int, int]] = []
    divisor = 1
    for name, length in reversed(parts):
        stride = index.factor(name)
        if digits and stride == digits[-1][1] * digits[-1][2]:  # contiguous with the digit before
            digits[-1] = (digits[-1][0], digits[-1][1] * length, digits[-1][2])
        else:
            digits.append((divisor, length, stride))
        divisor *= length
    return digits[0][2] if len(digits) == 1 else Digits(tuple(reversed(digits)))


def _looked_at(operand: Node, stored: Container[Node], pieces: _Pieces) -> tuple[Node, Index] | None:
    node, views = operand, list[Node]()
    while node.primitive.kind is Kind.VIEW and node.value is None and node not in stored:
        source = base(node)
        if source is not node and (not source.primitive.is_free or source in stored):
            index, _ = _index_below(views, node.shape, pieces)
            return source, index
        views.append(node)
        node = node.inputs[0]
    index, affine = _index_below(views, node.shape, pieces)
    if not affine or (node.primitive.is_free and node.value is None and node not in stored):
        return None
    return node, index


def _index_below(views: list[Node], shape: Shape, pieces: _Pieces) -> tuple[Index, bool]:
    """The index in a value of this shape, below views, and whether it is affine.

    It is known from the parts and layers before: they have the same views of other values.
    """
    looks = [
        (view.primitive.name, view.shape, view.inputs[0].shape, *view.attributes.values()) for view in views
    ]
    key = shape, tuple(looks), tuple((name, *parts) for name, parts in pieces.items())
    known = _KNOWN.use(key)
    if known is None:
        known = _KNOWN[key] = _computed(views, shape, pieces)
    if isinstance(known, SplitNeeded):
        raise SplitNeeded(known.name, known.inner)
    return known


def _computed(views: list[Node], shape: Shape, pieces: _Pieces) -> tuple[Index, bool] | SplitNeeded:
    variables = Variables({name: length for parts in pieces.values() for name, length in parts})
    coords: Coords = tuple(
        flat(
            tuple(ZERO if length == 1 else variable(name) for name, length in parts),
            tuple(length for _, length in parts),
        )
        for parts in pieces.values()
    )
    try:
        for view in views:
            coords = source_coords(view, coords, variables)
    except SplitNeeded as needed:
        return SplitNeeded(needed.name, needed.inner)
    return flat(coords, shape), not variables.computed


def rows_index(operand: Node, stored: Container[Node]) -> tuple[Node, Index] | None:
    """Like `operand_index`, for rows that are read 16 bytes at a time; None if they are not aligned so."""
    in_place = operand_index(operand, stored)
    if in_place is None:
        return None
    node, index = in_place
    step = 16 // operand.dtype.itemsize
    steps = [index.constant, *(factor for name, factor in index.terms if name != "j")]
    return None if index.factor("j") != 1 or any(stride % step for stride in steps) else (node, index)


def whole_index(shape: Shape) -> Index:
    """The index of item (b0, b1, ..., i, j) in contiguous memory."""
    return flat(tuple(map(variable, matrix_variables(len(shape)))), shape)


def operand_source(
    operand: Node, stored: Container[Node], read: Callable[[Node, Container[Node]], tuple[Node, Any] | None]
) -> Node:
    """The value that a kernel reads an operand from: that below its views if `read` can, else a copy."""
    in_place = read(operand, stored)
    return base(operand) if in_place is None else in_place[0]


def operand_reader(node: Node) -> Callable[[Node, Container[Node]], tuple[Node, Any] | None]:
    """The function that finds out how the operands of a product or of attention are read."""
    if node.primitive.few_rows:
        return lambda operand, stored: None
    return rows_index if node.primitive.kind is Kind.ATTENTION else digits_index


def repeats(shape: Shape, wide: Shape) -> int:
    """How often an expansion repeats each item successively; 0 if the repetitions are not successive."""
    same = 0
    while same < len(shape) and shape[same] == wide[same]:
        same += 1
    return math.prod(wide[same:]) if math.prod(shape[same:]) == 1 else 0


def keeps_order(view: Node) -> bool:
    """Whether a view keeps the row-major order of all items."""
    if view.primitive is SLICE:
        return view.shape == view.inputs[0].shape and all(part[2] == 1 for part in view.attributes["slices"])
    if view.primitive is not PERMUTE:
        return False
    long = [axis for axis in view.attributes["axes"] if view.inputs[0].shape[axis] > 1]
    return long == sorted(long)


def crosses_rows(view: Node) -> bool:
    """Whether a large view is a transpose: items that are contiguous in it are far apart in memory."""
    if view.primitive is not PERMUTE or view.size < CROSSED_ITEMS:
        return False
    lengths = view.inputs[0].shape
    long: list[int] = [axis for axis in view.attributes["axes"] if lengths[axis] > 1]
    last = max(long)
    return long[-1] != last and min(lengths[long[-1]], lengths[last]) >= CROSSED_AXIS
