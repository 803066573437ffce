"""Views: what they look at, and in which order its items are seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from typing import Any

from penstock.fusion.costs import CROSSED_AXIS, CROSSED_ITEMS
from penstock.fusion.index import ZERO, Index, SplitNeeded, Variables, flat, source_place, variable
from penstock.graph.node import Kind, Node, Shape
from penstock.graph.shaping import PERMUTE, SLICE


def base(node: Node) -> Node:
    """The node whose bytes are those of `node` too: reshaping moves nothing."""
    while node.primitive.same_bytes and node.value is None:
        node = node.inputs[0]
    return node


def trailing(shape: Shape, axes: tuple[int, ...]) -> bool:
    """Whether the axes are the last ones, leaving out those of length 1."""
    long = [axis for axis, length in enumerate(shape) if length > 1]
    reduced = [axis for axis in long if axis in axes]
    return not reduced or long[-len(reduced) :] == reduced


def matrix_variables(ndim: int) -> list[str]:
    """Names of the variables along the axes of matrices: b0, b1, ... of the batch, i and j."""
    return [*(f"b{axis}" for axis in range(ndim - 2)), "i", "j"]


def operand_index(operand: Node, stored: Container[Node]) -> tuple[Node, Index] | None:
    """What a matrix operand looks at, and where its item (b0, b1, ..., i, j) lies there, in items.

    Views in `stored` are looked at as they are, since they are written out.
    None if the place is not a sum of these, times constants: then the operand has to be written out.
    """
    names = matrix_variables(operand.ndim)
    variables = Variables(dict(zip(names, operand.shape, strict=True)))
    place = tuple(ZERO if n == 1 else variable(v) for v, n in zip(names, operand.shape, strict=True))
    node = operand
    try:
        while node.primitive.kind is Kind.VIEW and node.value is None and node not in stored:
            source = base(node)
            if source is not node and (not source.primitive.is_free or source in stored):
                return source, flat(place, node.shape)
            place = source_place(node, place, variables)
            node = node.inputs[0]
    except SplitNeeded:
        return None
    if variables.computed or (node.primitive.is_free and node.value is None and node not in stored):
        return None
    return node, flat(place, node.shape)


def rows_index(operand: Node, stored: Container[Node]) -> tuple[Node, Index] | None:
    """The same of an operand whose rows are read 16 bytes at a time; None if they do not lie so."""
    in_place = operand_index(operand, stored)
    if in_place is None:
        return None
    node, index = in_place
    step = 16 // operand.dtype.itemsize
    steps = [index.constant, *(factor for name, factor in index.terms if name != "j")]
    return None if index.factor("j") != 1 or any(stride % step for stride in steps) else (node, index)


def operand_source(
    operand: Node, stored: Container[Node], read: Callable[[Node, Container[Node]], tuple[Node, Any] | None]
) -> Node:
    """The value that a kernel reads an operand from: through views as far as `read` can, else written out."""
    in_place = read(operand, stored)
    return base(operand) if in_place is None else in_place[0]


def operand_reader(node: Node) -> Callable[[Node, Container[Node]], tuple[Node, Index] | None]:
    """How the operands of a product or of attention are read."""
    return rows_index if node.primitive.kind is Kind.ATTENTION else operand_index


def repeats(shape: Shape, wide: Shape) -> int:
    """How often each item is repeated in a row by an expansion; 0 if they are not repeated in a row."""
    same = 0
    while same < len(shape) and shape[same] == wide[same]:
        same += 1
    return math.prod(wide[same:]) if math.prod(shape[same:]) == 1 else 0


def keeps_order(view: Node) -> bool:
    """Whether an order of axes, or a slice, leaves every item at its number."""
    if view.primitive is SLICE:
        return view.shape == view.inputs[0].shape and all(part[2] == 1 for part in view.attributes["slices"])
    long = [axis for axis in view.attributes["axes"] if view.inputs[0].shape[axis] > 1]
    return view.primitive is PERMUTE and long == sorted(long)


def crosses_rows(view: Node) -> bool:
    """Whether neighbours in a large view lie far apart in what it looks at, and those there in the view."""
    if view.primitive is not PERMUTE or view.size < CROSSED_ITEMS:
        return False
    lengths = view.inputs[0].shape
    long: list[int] = [axis for axis in view.attributes["axes"] if lengths[axis] > 1]
    last = max(long)
    return long[-1] != last and min(lengths[long[-1]], lengths[last]) >= CROSSED_AXIS
