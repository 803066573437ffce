"""Products of the same rows with several matrices, `x @ w.T`, as one whose columns are those of all.

Each of them alone may leave a part of a GPU without work, as those that make queries, keys and values do. A
library computes them at once where the matrices lie one after another in an allocation. On an H200, those of
1,024 rows and Llama-1B take 22 us instead of 36, and a gate and what it gates, with what follows, 108 instead
of 111.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.graph.contraction import MATMUL
from penstock.graph.dtypes import HALF_PRECISION
from penstock.graph.node import Array, DType, Kind, Node, Primitive, Shape, topological
from penstock.graph.shaping import PERMUTE, slice_axis

_FEWEST_ROWS = 128  # with fewer, reading the matrices takes as long as multiplying
_TILE = 128  # columns: then each product's columns begin where a library may write


def join_products(outputs: Sequence[Node], inputs: Sequence[Node], capabilities: Capabilities) -> list[Node]:
    """For each output a node with the same value; products of the same rows are parts of one."""
    outputs = list(outputs)
    if not capabilities.matmul_library:
        return outputs
    places = {node: number for number, node in enumerate(inputs)}
    order = topological(outputs)
    alone = {*outputs, *_multiplied(order)}
    readers = Counter(parent for node in order if node.value is None for parent in node.inputs)
    alike: dict[Node, list[Node]] = {}
    for node in order:
        # In training, where gradients read the matrices too, products stay as they are.
        if node not in alone and _may_join(node) and _weight(node) in places and readers[_weight(node)] == 1:
            alike.setdefault(node.inputs[0], []).append(node)
    # The order in which `models/adjoining.py` lays out matrices.
    joined = [
        sorted(nodes, key=lambda node: (node.shape[1], places[_weight(node)])) for nodes in alike.values()
    ]
    others = {node: nodes for nodes in joined if len(nodes) > 1 for node in nodes}
    return _rewritten(outputs, order, others) if others else outputs


def _rewritten(outputs: Sequence[Node], order: Sequence[Node], others: dict[Node, list[Node]]) -> list[Node]:
    """The outputs with one product for each that is joined with others, given all of these."""
    new: dict[Node, Node] = {}
    made: dict[Node, Node] = {}  # by the rows
    for node in order:
        if node.value is not None:
            new[node] = node
        elif node in others:
            nodes, x = others[node], new[node.inputs[0]]
            if x not in made:
                made[x] = Node(JOINED, (x, *map(_weight, nodes)), {})
            start = sum(other.shape[1] for other in nodes[: nodes.index(node)])
            new[node] = slice_axis(made[x], 1, start, node.shape[1])
        else:
            new[node] = node.on(tuple([new[parent] for parent in node.inputs]))
    return [new[node] for node in outputs]


def _multiplied(order: Sequence[Node]) -> Iterator[Node]:
    """The nodes that are multiplied as they are, or a view of which is: a part of another would be copied."""
    for node in order:
        if node.value is None and node.primitive.multiplies_matrices:
            for operand in node.inputs:
                while operand.value is None and operand.primitive.kind is Kind.VIEW:
                    operand = operand.inputs[0]
                yield operand


def _may_join(node: Node) -> bool:
    if node.primitive is not MATMUL or node.value is not None or node.ndim != 2:
        return False
    right = node.inputs[1]
    if node.dtype not in HALF_PRECISION or right.primitive is not PERMUTE or right.value is not None:
        return False
    rows, columns = node.shape
    return rows >= _FEWEST_ROWS and columns % _TILE == 0 and node.inputs[0].shape[1] % _TILE == 0


def _weight(product: Node) -> Node:
    return product.inputs[1].inputs[0]


def _shape(x: Node, *weights: Node) -> tuple[Shape, DType]:
    assert all(weight.shape[1] == x.shape[1] for weight in weights)
    return (x.shape[0], sum(weight.shape[0] for weight in weights)), x.dtype


def _reference(x: Array, *weights: Array) -> Array:
    return np.concatenate([x @ weight.T for weight in weights], 1)


JOINED = Primitive(
    "joined_matmul",
    Kind.PRODUCTS,
    _shape,
    _reference,
    operations=lambda n: 2 * n.size * n.inputs[0].shape[-1],
)
