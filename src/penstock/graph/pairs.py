"""Two products of the same rows with matrices of one shape, `x @ w.T`, as those that make keys and values.

Where each alone leaves a part of a GPU without work, a library computes both as a batch, wherever the
matrices lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.graph.contraction import MATMUL
from penstock.graph.dtypes import HALF_PRECISION
from penstock.graph.linear import in_memory
from penstock.graph.node import Array, DType, Kind, Node, Primitive, Shape, topological
from penstock.graph.shaping import PERMUTE, reshape, slice_axis

_FEWEST_ROWS = 128  # with fewer, reading the matrices takes as long as multiplying
_TILE = 128  # rows and columns of a workgroup of the library
_NEIGHBOURS = 8  # items that it reads at once


def in_pairs(outputs: Sequence[Node], capabilities: Capabilities) -> list[Node]:
    """For each output a node with the same value; small products of the same rows are pairs."""
    outputs = list(outputs)
    if not capabilities.matmul_library:
        return outputs
    order = topological(outputs)
    alike: dict[tuple[Node, Shape], list[Node]] = {}
    for node in order:
        if _is_small(node, capabilities) and node not in outputs:
            alike.setdefault((node.inputs[0], node.shape), []).append(node)
    pairs = chain.from_iterable(zip(nodes[::2], nodes[1::2], strict=False) for nodes in alike.values())
    partners = {node: (pair, side) for pair in pairs for side, node in enumerate(pair)}
    if not partners:
        return outputs
    new: dict[Node, Node] = {}
    made: dict[tuple[Node, ...], Node] = {}
    for node in order:
        if node.value is not None:
            new[node] = node
        elif node in partners:
            pair, side = partners[node]
            if pair not in made:
                made[pair] = Node(PAIR, (new[node.inputs[0]], *map(_weight, pair)), {})
            new[node] = reshape(slice_axis(made[pair], 0, side, 1), node.shape)
        else:
            new[node] = node.on(tuple([new[parent] for parent in node.inputs]))
    return [new[node] for node in outputs]


def _is_small(node: Node, capabilities: Capabilities) -> bool:
    """Whether a product with a matrix of features does not give work to all of a GPU."""
    if node.primitive is not MATMUL or node.value is not None or node.ndim != 2:
        return False
    x, right = node.inputs
    if node.dtype not in HALF_PRECISION or right.primitive is not PERMUTE or right.value is not None:
        return False
    rows, columns = node.shape
    whole = not x.shape[1] % _NEIGHBOURS and not columns % _NEIGHBOURS and in_memory(x)
    tiles = -(-rows // _TILE) * -(-columns // _TILE)
    return (
        rows >= _FEWEST_ROWS
        and whole
        and _weight(node).value is not None
        and tiles < capabilities.compute_units
    )


def _weight(product: Node) -> Node:
    return product.inputs[1].inputs[0]


def _shape(x: Node, first: Node, second: Node) -> tuple[Shape, DType]:
    assert first.shape == second.shape
    assert x.shape[1] == first.shape[1]
    return (2, x.shape[0], first.shape[0]), x.dtype


def _reference(x: Array, first: Array, second: Array) -> Array:
    return np.stack([x @ first.T, x @ second.T])


PAIR = Primitive(
    "matmul_pair",
    Kind.PRODUCTS,
    _shape,
    _reference,
    operations=lambda n: 2 * n.size * n.inputs[0].shape[-1],
)
