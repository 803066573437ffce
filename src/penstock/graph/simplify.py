"""Simplification: the same values with fewer nodes. Every rule keeps results equal to the last bit.

But one does not: the transpose of a matrix product is a product of transposes, which a CPU may add up in
other parts along K.

Equal nodes become one, and what changes nothing is left out. Nodes that no output needs are never reached,
and so are gone. No rule looks at the value of a constant: it is an argument of a program, not a part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.graph.checkpoint import BARRIER
from penstock.graph.contraction import MATMUL
from penstock.graph.elementwise import CAST, FULL, full
from penstock.graph.node import Kind, Node, topological
from penstock.graph.shaping import PERMUTE, RESHAPE


def simplify(outputs: Sequence[Node], leaves: Mapping[Node, Node] | None = None) -> list[Node]:
    """For each output a node with the same value. Computed nodes stay, or give way to those in `leaves`."""
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
            known[key] = _transposed(node, inputs) if _turns(node, uses) else _reduced(node, inputs)
        new[node] = known[key]
    result = [new[node] for node in outputs]
    return _with_barriers(result) if any(key[0] is BARRIER for key in known) else result


def _with_barriers(outputs: Sequence[Node]) -> list[Node]:
    """The same with barriers that wait for nothing, now that equal nodes are one; values need none."""
    new: dict[Node, Node] = {}
    for node in topological(outputs):
        if node.value is not None:
            new[node] = node
            continue
        inputs = tuple(new[parent] for parent in node.inputs)
        if node.primitive is BARRIER:
            new[node] = inputs[0] if inputs[0].value is not None else Node(BARRIER, inputs[:1], {})
        else:
            new[node] = node.on(inputs)
    return [new[node] for node in outputs]


def _turns(node: Node, uses: Counter[Node]) -> bool:
    """Whether a node is the transpose of a matrix product that nothing else needs."""
    if node.primitive is not PERMUTE or node.inputs[0].primitive is not MATMUL:
        return False
    source, last = node.inputs[0], node.ndim - 1
    swapped = node.attributes["axes"] == (*range(last - 1), last, last - 1)
    return swapped and source.value is None and uses[source] == 1


def _transposed(node: Node, inputs: tuple[Node, ...]) -> Node:
    """The transpose of a product: that of the transposes, in the other order."""
    axes = node.attributes["axes"]
    turned = [Node(PERMUTE, (operand,), {"axes": axes}) for operand in inputs[0].inputs]
    left, right = (_reduced(operand, operand.inputs) for operand in reversed(turned))
    return Node(MATMUL, (left, right), {})


def _reduced(node: Node, inputs: tuple[Node, ...]) -> Node:
    """One node on simplified inputs, itself simplified."""
    primitive = node.primitive
    if primitive.is_identity or (primitive is CAST and inputs[0].dtype == node.dtype):
        return inputs[0]
    if primitive.kind is Kind.VIEW and inputs[0].primitive is FULL and inputs[0].value is None:
        return full(node.shape, node.dtype, inputs[0].attributes["number"])
    if primitive.kind is Kind.REDUCTION and node.size == inputs[0].size:
        return inputs[0] if inputs[0].shape == node.shape else Node(RESHAPE, inputs, {"shape": node.shape})
    if primitive in (RESHAPE, PERMUTE) and inputs[0].primitive is primitive and inputs[0].value is None:
        return _joined(node, inputs[0])
    # A node of its own: a value that the other one is given later is none of this one's.
    return Node(primitive, inputs, node.attributes)


def _joined(node: Node, before: Node) -> Node:
    """Two reshapes, or two orders of axes, as one; none at all where they cancel."""
    source = before.inputs[0]
    if node.primitive is RESHAPE:
        return source if source.shape == node.shape else Node(RESHAPE, (source,), node.attributes)
    axes = tuple(before.attributes["axes"][axis] for axis in node.attributes["axes"])
    return source if axes == tuple(range(len(axes))) else Node(PERMUTE, (source,), {"axes": axes})


def _hashable(node: Node) -> Any:
    """Attributes as part of a key; constants by type and bits, so that 0 and -0 or 1 and True differ."""
    constants = node.primitive.constants
    return tuple(
        (name, type(value), np.asarray(value).tobytes() if name in constants else value)
        for name, value in node.attributes.items()
    )
