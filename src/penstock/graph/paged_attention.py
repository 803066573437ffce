"""Attention of a single query per sequence to keys and values that lie in pages.

A cache has the shape (2, pages, key heads, page size, head size), with the keys first. A table lists the pages
of each sequence, (sequences, pages of a sequence), and `lengths` how many positions it has. The query of a
sequence is at its last position. A sequence without positions has a result of zeros.
"""

from __future__ import annotations

import math

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.graph.attention import softmax
from penstock.graph.contraction import gather, matmul
from penstock.graph.creating import sequence
from penstock.graph.dtypes import int32
from penstock.graph.elementwise import (
    add,
    cast,
    divide,
    full,
    greater,
    greater_equal,
    like,
    logical_and,
    multiply,
    subtract,
    tanh,
    where,
    widened,
)
from penstock.graph.node import Array, DType, Kind, Node, Primitive, Shape
from penstock.graph.reducing import expand
from penstock.graph.shaping import permute, reshape

_WIDEST = 256  # items of a head that a kernel takes


def _shape(
    query: Node, cache: Node, table: Node, lengths: Node, *, scale: float, window: int, softcap: float
) -> tuple[Shape, DType]:
    sequences, heads, width = query.shape
    assert cache.ndim == 5
    assert cache.shape[0] == 2
    assert cache.shape[4] == width
    assert heads % cache.shape[2] == 0
    assert table.shape[0] == sequences
    assert lengths.shape == (sequences,)
    return query.shape, query.dtype


def _reference(
    query: Array, cache: Array, table: Array, lengths: Array, scale: float, window: int, softcap: float
) -> Array:
    heads, key_heads, page = query.shape[1], cache.shape[2], cache.shape[3]
    result = np.zeros_like(query)
    for row, length in enumerate(np.minimum(lengths, table.shape[1] * page).tolist()):
        first = max(length - window, 0) if window else 0
        if first >= length:
            continue
        position = np.arange(first, length)
        pages = table[row, position // page].clip(0, cache.shape[1] - 1)
        keys, values = (np.repeat(side[pages, :, position % page], heads // key_heads, 1) for side in cache)
        scores = np.einsum("hd,phd->hp", query[row], keys) * np.asarray(scale, query.dtype)
        if softcap:
            scores = np.tanh(scores / softcap) * softcap
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        result[row] = np.einsum("hp,phd->hd", weights / weights.sum(axis=-1, keepdims=True), values)
    return result


def has_kernel(node: Node, capabilities: Capabilities) -> bool:
    """Whether a device has a kernel for a node: GPUs have."""
    query, cache = node.inputs[:2]
    return (
        capabilities.compiles
        and capabilities.vector_width == 1
        and query.dtype == cache.dtype
        and query.shape[-1] <= _WIDEST
        and node.size > 0
    )


def _decomposed(node: Node, capabilities: Capabilities) -> Node | None:
    """The keys and values of every sequence side by side, and attention to those that it has."""
    if has_kernel(node, capabilities) or not node.size:
        return None
    query, cache, table, lengths = node.inputs
    (sequences, heads, width), (_, pages, key_heads, page, _) = query.shape, cache.shape
    positions = table.shape[1] * page
    inside = _inside(lengths, positions, node.attributes["window"])

    def side(number: int) -> Node:
        """Keys or values as (sequences, key heads, positions, head size), in float32 at least."""
        rows = reshape(cache, (2 * pages, key_heads, page, width))
        own = gather(rows, add(table, like(table, number * pages)))
        return widened(reshape(permute(own, (0, 2, 1, 3, 4)), (sequences, key_heads, positions, width)))

    grouped = widened(reshape(query, (sequences, key_heads, heads // key_heads, width)))
    scores = matmul(grouped, permute(side(0), (0, 1, 3, 2)))
    scores = multiply(scores, like(scores, node.attributes["scale"]))
    softcap = node.attributes["softcap"]
    if softcap:
        scores = multiply(tanh(divide(scores, like(scores, softcap))), like(scores, softcap))
    seen = expand(reshape(inside, (sequences, 1, 1, positions)), scores.shape)
    # Finite, so that a sequence without positions has no NaN; its values are zeros.
    weights = softmax(where(seen, scores, full(scores.shape, scores.dtype, -1e30)), 3)
    values = side(1)
    # What lies after a sequence's end may be anything, such as another's NaN.
    kept = expand(reshape(inside, (sequences, 1, positions, 1)), values.shape)
    result = matmul(weights, where(kept, values, like(values, 0)))
    return cast(reshape(result, query.shape), query.dtype)


def _inside(lengths: Node, positions: int, window: int) -> Node:
    """Which positions each sequence's query attends to."""
    shape = (lengths.shape[0], positions)
    place = expand(reshape(sequence(0, 1, positions, int32), (1, positions)), shape)
    end = expand(reshape(cast(lengths, int32), (lengths.shape[0], 1)), shape)
    inside = greater(end, place)
    if not window:
        return inside
    return logical_and(inside, greater_equal(place, subtract(end, like(end, window))))


PAGED_ATTENTION = Primitive(
    "paged_attention",
    Kind.PAGED_ATTENTION,
    _shape,
    _reference,
    operations=lambda n: 4 * n.size * n.inputs[2].shape[1] * n.inputs[1].shape[3],
    decompose=_decomposed,
)


def paged_attention(
    query: Node, cache: Node, table: Node, lengths: Node, scale: float, window: int, softcap: float
) -> Node:
    """The attended values, (sequences, heads, head size); a window or softcap of 0 is none."""
    assert math.isfinite(scale)
    attributes = {"scale": scale, "window": window, "softcap": softcap}
    return Node(PAGED_ATTENTION, (query, cache, table, lengths), attributes)
