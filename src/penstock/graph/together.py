"""The pass that multiplies the parts of a value by a matrix together, for CPUs.

A loop over a sequence that multiplies each of its steps by the same weights becomes a single product of all
steps, which is one launch, and reads the weights once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from penstock.graph.contraction import MATMUL, matmul
from penstock.graph.node import Node, topological
from penstock.graph.shaping import RESHAPE, SLICE, reshape, slice_axis

_FEWEST = 4  # products that are worth it, and rows and columns with which sums are added in one order
_LONGEST = 512  # steps along K that are added up one after another, however many rows there are


def multiply_together(outputs: Sequence[Node]) -> list[Node]:
    """The same values, with a single product for the neighbouring parts of a value by a matrix."""
    order = topological(outputs)
    products = defaultdict[tuple[Node, Node], dict[int, Node]](dict)  # by value and matrix, each by its step
    for node in order:
        if (step := _step(node)) is not None:
            products[_source(node), node.inputs[1]][step] = node
    joined = {
        node: (parts, step)
        for parts in products.values()
        if len(parts) >= _FEWEST and max(parts) - min(parts) + 1 == len(parts)
        for step, node in parts.items()
    }
    if not joined:
        return list(outputs)
    new: dict[Node, Node] = {}
    wholes: dict[tuple[Node, Node], Node] = {}
    for node in order:
        if node.value is not None:
            new[node] = node
        elif node in joined:
            parts, step = joined[node]
            key, rows = (_source(node), node.inputs[1]), node.shape[0]
            if key not in wholes:
                steps = slice_axis(new[key[0]], 0, min(parts), len(parts))
                wholes[key] = matmul(reshape(steps, (len(parts) * rows, steps.shape[-1])), new[key[1]])
            new[node] = slice_axis(wholes[key], 0, (step - min(parts)) * rows, rows)
        else:
            new[node] = node.on(tuple(new[parent] for parent in node.inputs))
    return [new[node] for node in outputs]


def _source(product: Node) -> Node:
    """The value that a product's left side is a part of."""
    return product.inputs[0].inputs[0].inputs[0]


def _step(node: Node) -> int | None:
    """Which part along the first axis of a value a product multiplies; None for any other node."""
    if node.primitive is not MATMUL or node.value is not None or node.ndim != 2:
        return None
    left = node.inputs[0]
    if left.primitive is not RESHAPE or left.value is not None or left.shape[1] > _LONGEST:
        return None
    part = left.inputs[0]
    if part.primitive is not SLICE or part.value is not None or part.shape != (1, *left.shape):
        return None
    (start, _, _), *rest = part.attributes["slices"]
    whole = [(0, length, 1) for length in part.inputs[0].shape[1:]]
    return int(start) if rest == whole and min(node.shape) >= _FEWEST else None
