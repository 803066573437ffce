"""Products of few rows with a matrix of features, `x @ w.T`, on tensor cores.

Such a product takes as long as reading the matrix. A library of matrix products, made for many rows, takes
longer, and does not compute what comes after the product.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.graph.contraction import MATMUL
from penstock.graph.dtypes import HALF_PRECISION
from penstock.graph.node import Array, DType, Kind, Node, Primitive, Shape, rewrite
from penstock.graph.shaping import PERMUTE

_MOST_ROWS = 32
_MOST_FEATURES = 1 << 15  # with more, the library is as fast
_NEIGHBOURS = 8  # inputs that a thread reads at once


def few_rows(outputs: Sequence[Node], capabilities: Capabilities) -> list[Node]:
    """For each output a node with the same value; products of few rows with a matrix in memory are LINEAR."""
    if not capabilities.tensor_cores:
        return list(outputs)
    return rewrite(outputs, lambda node: _as_linear(node) if node.primitive is MATMUL else node)


def _as_linear(node: Node) -> Node:
    x, right = node.inputs
    few = node.ndim == 2 and 1 < x.shape[0] <= _MOST_ROWS and x.shape[1] % _NEIGHBOURS == 0 < node.size
    if (
        not few
        or node.dtype not in HALF_PRECISION
        or right.primitive is not PERMUTE
        or right.value is not None
    ):
        return node
    weight = right.inputs[0]
    linear = weight.shape[0] <= _MOST_FEATURES and _in_memory(weight)
    return Node(LINEAR, (x, weight), {}) if linear else node


def _in_memory(matrix: Node) -> bool:
    """Whether a matrix lies in memory as it is, so that no copy has to be made."""
    while matrix.primitive.same_bytes and matrix.value is None:
        matrix = matrix.inputs[0]
    return matrix.value is not None or matrix.primitive.kind is not Kind.VIEW


def _shape(x: Node, weight: Node) -> tuple[Shape, DType]:
    assert x.ndim == weight.ndim == 2
    assert x.shape[1] == weight.shape[1]
    return (x.shape[0], weight.shape[0]), x.dtype


def _reference(x: Array, weight: Array) -> Array:
    return np.asarray(x @ weight.T)


LINEAR = Primitive(
    "linear",
    Kind.CONTRACTION,
    _shape,
    _reference,
    operations=lambda n: 2 * n.size * n.inputs[0].shape[-1],
    few_rows=True,
)
