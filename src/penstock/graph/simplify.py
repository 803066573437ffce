"""Simplification: common subexpression elimination, and removal of operations that have no effect.

Every rule keeps results equal to the last bit, with an exception: the transpose of a matrix product becomes a
product of transposes, for which a CPU may divide the sums along K in another way.

Nodes that no output depends on are not visited, and so are dropped. No rule depends on the value of a
constant, because constants are arguments of a program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.graph.checkpoint import BARRIER
from penstock.graph.contraction import MATMUL
from penstock.graph.elementwise import CAST, FULL, full
from penstock.graph.node import Kind, Node, Shape, rewrite, topological
from penstock.graph.shaping import PAD, PERMUTE, RESHAPE


def simplify(outputs: Sequence[Node], leaves: Mapping[Node, Node] | None = None) -> list[Node]:
    """For each output a node with the same value. Computed nodes stay, or are replaced as `leaves` says."""
    new: dict[Node, Node] = dict(leaves or {})
    known: dict[Any, Node] = {}
    order = topological(outputs)
    uses = Counter(parent for node in order for parent in node.inputs)
    for node in order:
        if node.value is not None:
            new.setdefault(node, node)
            continue
        inputs = tuple(new[parent] for parent in node.inputs)
        key = (node.primitive, inputs, _hashable(node))
        if key not in known:
            transposes = _transposes_product(node, uses)
            known[key] = _transposed(node, inputs) if transposes else _simplified(node, inputs)
        new[node] = known[key]
    result = [new[node] for node in outputs]
    return rewrite(result, _without_wait) if any(key[0] is BARRIER for key in known) else result


def _without_wait(node: Node) -> Node:
    """A barrier without the value that it waits for, which only has to keep nodes distinct until now."""
    if node.primitive is not BARRIER:
        return node
    source = node.inputs[0]
    return source if source.value is not None else Node(BARRIER, (source,), {})


def _transposes_product(node: Node, uses: Counter[Node]) -> bool:
    """Whether a node is the transpose of a matrix product that has no other user."""
    if node.primitive is not PERMUTE or node.inputs[0].primitive is not MATMUL:
        return False
    source, last = node.inputs[0], node.ndim - 1
    swapped = node.attributes["axes"] == (*range(last - 1), last, last - 1)
    return swapped and source.value is None and uses[source] == 1


def _transposed(node: Node, inputs: tuple[Node, ...]) -> Node:
    """The transpose of a product as the product of the transposes in reverse order."""
    axes = node.attributes["axes"]
    transposes = [Node(PERMUTE, (operand,), {"axes": axes}) for operand in inputs[0].inputs]
    left, right = (_simplified(operand, operand.inputs) for operand in reversed(transposes))
    return Node(MATMUL, (left, right), {})


def _simplified(node: Node, inputs: tuple[Node, ...]) -> Node:
    """A node on simplified inputs, itself simplified."""
    primitive = node.primitive
    if primitive.is_identity or (primitive is CAST and inputs[0].dtype == node.dtype):
        return inputs[0]
    if primitive.kind is Kind.VIEW and inputs[0].primitive is FULL and inputs[0].value is None:
        return full(node.shape, node.dtype, inputs[0].attributes["number"])
    if primitive.kind is Kind.REDUCTION and node.size == inputs[0].size:
        return inputs[0] if inputs[0].shape == node.shape else Node(RESHAPE, inputs, {"shape": node.shape})
    if primitive is PERMUTE and not _moves_items(inputs[0].shape, node.attributes["axes"]):
        return _simplified(Node(RESHAPE, inputs, {"shape": node.shape}), inputs)
    if primitive in (RESHAPE, PERMUTE) and inputs[0].primitive is primitive and inputs[0].value is None:
        return _merged(node, inputs[0])
    if primitive is PAD and inputs[0].primitive is PAD and inputs[0].value is None:
        return _padded_once(node, inputs[0])
    if primitive is RESHAPE and inputs[0].primitive is PAD and inputs[0].value is None:
        return _reshaped_first(node, inputs[0]) or Node(primitive, inputs, node.attributes)
    # Always a new node: the recorded node may be given a value later, which must not show in this graph.
    return Node(primitive, inputs, node.attributes)


def _moves_items(shape: Shape, axes: tuple[int, ...]) -> bool:
    """Whether a permutation changes the order of items: it moves more than axes of length 1."""
    long = [axis for axis in axes if shape[axis] > 1]
    return long != sorted(long)


def _merged(node: Node, before: Node) -> Node:
    """Two successive reshapes or permutations as a single node, or none if they cancel."""
    source = before.inputs[0]
    if node.primitive is RESHAPE:
        return source if source.shape == node.shape else Node(RESHAPE, (source,), node.attributes)
    axes = tuple(before.attributes["axes"][axis] for axis in node.attributes["axes"])
    return source if axes == tuple(range(len(axes))) else Node(PERMUTE, (source,), {"axes": axes})


def _padded_once(node: Node, before: Node) -> Node:
    """Two successive paddings as a single node."""
    pairs = zip(before.attributes["slices"], node.attributes["slices"], strict=True)
    slices = tuple(
        (outer + start * apart, count, step * apart) for (start, count, step), (outer, _, apart) in pairs
    )
    return Node(PAD, before.inputs, {**node.attributes, "slices": slices})


def _reshaped_first(node: Node, before: Node) -> Node | None:
    """A padding whose axes of length 1 are dropped or added: that first, so that it may merge with others."""
    source, slices = before.inputs[0], before.attributes["slices"]
    long = [axis for axis, length in enumerate(before.shape) if length > 1]
    lengths = [length for length in node.shape if length > 1]
    same = lengths == [before.shape[axis] for axis in long] and node.size > 0
    if not same or any(slices[axis] != (0, 1, 1) for axis in range(before.ndim) if axis not in long):
        return None
    axes = iter(long)
    kept = [next(axes) if length > 1 else None for length in node.shape]
    shape = tuple(1 if axis is None else source.shape[axis] for axis in kept)
    inner = Node(RESHAPE, (source,), {"shape": shape})
    outer = {**before.attributes, "shape": node.shape}
    outer["slices"] = tuple((0, 1, 1) if axis is None else slices[axis] for axis in kept)
    moved = _simplified(inner, inner.inputs)
    return _simplified(Node(PAD, (moved,), outer), (moved,))


def _hashable(node: Node) -> Any:
    """Attributes as part of a key; constants by type and bits, so that 0 and -0 or 1 and True differ."""
    constants = node.primitive.constants
    return tuple(
        (name, type(value), np.asarray(value).tobytes() if name in constants else value)
        for name, value in node.attributes.items()
    )
