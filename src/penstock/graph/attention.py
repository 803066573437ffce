"""Attention as a primitive, for devices that have a kernel for it: its scores are never a value.

Queries, keys and values have the shape (batch, length, heads, width of a head), so that what comes next sees
the result of all heads as one row. What a kernel computes together are nodes with the same inputs that differ
in the attribute `part` only. With fewer queries than keys, the last query goes with the last key.
"""

from __future__ import annotations

import numpy as np

from penstock.graph.custom_vjp import custom_vjp
from penstock.graph.dtypes import HALVES, float32
from penstock.graph.node import Array, DType, Kind, Node, Primitive, Shape
from penstock.graph.shaping import reshape, slice_

GRADIENT_PARTS = ("query", "key", "value")


def _shape(
    query: Node, key: Node, value: Node, *, causal: bool, scale: float, part: str
) -> tuple[Shape, DType]:
    assert query.ndim == 4
    assert key.shape == value.shape
    assert (query.shape[0], *query.shape[2:]) == (key.shape[0], *key.shape[2:])
    if part == "result":
        return query.shape, query.dtype
    batch, length, heads, _ = query.shape
    return (batch, heads, length), float32 if query.dtype in HALVES else query.dtype


def _gradient_shape(*inputs: Node, causal: bool, scale: float, part: str) -> tuple[Shape, DType]:
    query, key = inputs[:2]
    if part != "packed":
        return (query if part == "query" else key).shape, query.dtype
    assert query.shape == key.shape
    batch, length, heads, width = query.shape
    return (batch, length, 3, heads, width), query.dtype


def _reference(query: Array, key: Array, value: Array, causal: bool, scale: float, part: str) -> Array:
    scores = _scores(query, key, causal, scale)
    most = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - most)
    total = weights.sum(axis=-1, keepdims=True)
    if part == "lse":
        return np.asarray((most + np.log(total))[..., 0])
    return _turned(weights / total @ _turned(value))


def _gradient_reference(
    query: Array,
    key: Array,
    value: Array,
    result: Array,
    lse: Array,
    slope: Array,
    causal: bool,
    scale: float,
    part: str,
) -> Array:
    weights = np.exp(_scores(query, key, causal, scale) - lse[..., np.newaxis])
    to_weights = _turned(slope) @ _turned(value).swapaxes(-1, -2)
    mean = _turned((slope * result).sum(axis=-1, keepdims=True))
    to_scores = weights * (to_weights - mean) * scale
    found = {
        "query": lambda: _turned(to_scores @ _turned(key)),
        "key": lambda: _turned(to_scores.swapaxes(-1, -2) @ _turned(query)),
        "value": lambda: _turned(weights.swapaxes(-1, -2) @ _turned(slope)),
    }
    if part == "packed":
        return np.stack([found[one]() for one in GRADIENT_PARTS], axis=2)
    return found[part]()


def _scores(query: Array, key: Array, causal: bool, scale: float) -> Array:
    """For each head, a row for each query."""
    scores = _turned(query) @ _turned(key).swapaxes(-1, -2) * np.asarray(scale, query.dtype)
    queries, keys = scores.shape[-2:]
    seen = np.arange(keys) <= np.arange(queries)[:, np.newaxis] + (keys - queries)
    return np.where(seen, scores, -np.inf).astype(scores.dtype) if causal else scores


def _turned(x: Array) -> Array:
    """Lengths and heads in the other order."""
    return x.swapaxes(1, 2)


def _gradients(attention: Node, result: Node, g: Node, parts: tuple[str, ...]) -> list[Node]:
    assert attention.attributes["part"] == "result"
    lse = Node(ATTENTION, attention.inputs, {**attention.attributes, "part": "lse"})
    inputs = (*attention.inputs, result, lse, g)
    return [Node(ATTENTION_GRADIENT, inputs, {**attention.attributes, "part": part}) for part in parts]


ATTENTION = Primitive(
    "attention", Kind.ATTENTION, _shape, _reference, lambda g, n: _gradients(n, n, g, GRADIENT_PARTS)
)
ATTENTION_GRADIENT = Primitive("attention_gradient", Kind.ATTENTION, _gradient_shape, _gradient_reference)
PACKED = custom_vjp("packed_attention", lambda g, n: _gradients(n.inputs[0], n, g, ("packed",)))


def attention(query: Node, key: Node, value: Node, causal: bool, scale: float) -> Node:
    """softmax(query @ key.T * scale) @ value of every head; a causal one looks at no later key."""
    return Node(ATTENTION, (query, key, value), {"causal": causal, "scale": scale, "part": "result"})


def packed_attention(packed: Node, causal: bool, scale: float) -> Node:
    """The same of one (batch, length, 3, heads, width of a head), whose gradient is one value too."""
    batch, length, _, heads, width = packed.shape
    query, key, value = (
        reshape(
            slice_(packed, ((0, batch, 1), (0, length, 1), (side, 1, 1), (0, heads, 1), (0, width, 1))),
            (batch, length, heads, width),
        )
        for side in range(3)
    )
    return Node(PACKED, (attention(query, key, value, causal, scale), packed), {})
