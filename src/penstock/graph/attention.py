"""Attention as a primitive, and its decomposition for devices without a kernel for it.

Queries, keys and values have the shape (batch, length, heads, head size), so that the results of all heads
are adjacent. Several outputs of a kernel are nodes that differ in the attribute `part` only. If there are
fewer queries than keys, the last query is at the position of the last key.

A kernel does not store the scores. The decomposition does, for some of the queries at a time if the context
is long, and each of these parts is recomputed for the gradient.
"""

from __future__ import annotations

import math

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.graph.checkpoint import checkpoint
from penstock.graph.contraction import matmul
from penstock.graph.creating import sequence
from penstock.graph.custom_vjp import custom_vjp
from penstock.graph.dtypes import HALF_PRECISION, float32, int32
from penstock.graph.elementwise import (
    add,
    cast,
    divide,
    exp,
    full,
    greater_equal,
    like,
    multiply,
    stop,
    subtract,
    where,
    widened,
)
from penstock.graph.gradient import gradients_of
from penstock.graph.node import Array, DType, Kind, Node, Primitive, Shape
from penstock.graph.reducing import expand, keep_axes, max_, restore, sum_
from penstock.graph.shaping import concat, pad, permute, reshape, slice_axis

GRADIENT_PARTS = ("query", "key", "value")
MOST_COLUMNS = 128  # of a head, for kernels on tensor cores
_ROW_ITEMS = 1 << 24  # scores that are stored at a time; more are divided into parts, which are recomputed


def _shape(
    query: Node, key: Node, value: Node, *, causal: bool, scale: float, part: str
) -> tuple[Shape, DType]:
    assert query.ndim == 4
    assert key.shape == value.shape
    assert (query.shape[0], *query.shape[2:]) == (key.shape[0], *key.shape[2:])
    if part == "result":
        return query.shape, query.dtype
    batch, length, heads, _ = query.shape
    return (batch, heads, length), float32 if query.dtype in HALF_PRECISION else query.dtype


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
    parts = {
        "query": lambda: _turned(to_scores @ _turned(key)),
        "key": lambda: _turned(to_scores.swapaxes(-1, -2) @ _turned(query)),
        "value": lambda: _turned(weights.swapaxes(-1, -2) @ _turned(slope)),
    }
    if part == "packed":
        return np.stack([parts[name]() for name in GRADIENT_PARTS], axis=2)
    return parts[part]()


def _scores(query: Array, key: Array, causal: bool, scale: float) -> Array:
    """For each head, a row for each query."""
    scores = _turned(query) @ _turned(key).swapaxes(-1, -2) * np.asarray(scale, query.dtype)
    queries, keys = scores.shape[-2:]
    seen = np.arange(keys) <= np.arange(queries)[:, np.newaxis] + (keys - queries)
    return np.where(seen, scores, -np.inf).astype(scores.dtype) if causal else scores


def _turned(x: Array) -> Array:
    """With the axes of positions and heads swapped."""
    return x.swapaxes(1, 2)


def _gradients(attention: Node, result: Node, g: Node, parts: tuple[str, ...]) -> list[Node]:
    assert attention.attributes["part"] == "result"
    lse = Node(ATTENTION, attention.inputs, {**attention.attributes, "part": "lse"})
    inputs = (*attention.inputs, result, lse, g)
    return [Node(ATTENTION_GRADIENT, inputs, {**attention.attributes, "part": part}) for part in parts]


# The decomposition


def has_kernel(node: Node, capabilities: Capabilities) -> bool:
    """Whether a device has kernels for a node of attention."""
    query, key = node.inputs[:2]
    queries, keys, width = query.shape[1], key.shape[1], query.shape[-1]
    return (
        capabilities.tensor_cores
        and query.dtype in HALF_PRECISION
        and width % 16 == 0
        and 16 <= width <= MOST_COLUMNS
        and query.size > 0
        # The result of a query that sees no key is undefined.
        and keys >= (queries if node.attributes["causal"] else 1)
        and node.attributes["scale"] > 0
    )


def _decomposed(node: Node, capabilities: Capabilities) -> Node | None:
    if has_kernel(node, capabilities) or node.attributes["part"] == "lse":  # which only a gradient reads
        return None
    return _of_parts(node)


def _of_parts(node: Node, for_gradient: bool = False) -> Node:
    query, key, value = (permute(operand, (0, 2, 1, 3)) for operand in node.inputs)
    result = attend(query, key, value, node.attributes["causal"], node.attributes["scale"], for_gradient)
    return permute(result, (0, 2, 1, 3))


def _gradient_of_parts(node: Node) -> Node:
    """The gradient of the decomposition."""
    attributes = {**node.attributes, "part": "result"}
    operands = node.inputs[:3]
    by_operand = gradients_of(
        lambda *own: _of_parts(Node(ATTENTION, own, attributes), for_gradient=True), operands, node.inputs[-1]
    )
    parts = [like(x, 0) if part is None else part for x, part in zip(operands, by_operand, strict=True)]
    if node.attributes["part"] != "packed":
        return parts[GRADIENT_PARTS.index(node.attributes["part"])]
    query, key, value = (_placed(part, side, node.shape) for side, part in enumerate(parts))
    return add(add(value, key), query)


def _placed(part: Node, side: int, shape: Shape) -> Node:
    """The gradient of queries, keys or values as a part of the packed gradient."""
    batch, length, _, heads, width = shape
    row = reshape(part, (batch, length, 1, heads, width))
    return pad(row, ((0, batch, 1), (0, length, 1), (side, 1, 1), (0, heads, 1), (0, width, 1)), shape)


def _rows(query: Node, key: Node, for_gradient: bool) -> int:
    """How many queries a part has: as many as scores may be stored for, but not less than pays.

    The scores of as many queries as a head is wide take no more than the keys. A gradient stores three such
    matrices at a time, and gradients of keys and values for each part, until they are added up: in these
    many rows both take about the same, which is the least in sum.
    """
    keys, width = key.shape[-2:]
    least = max(16, width, math.isqrt(keys * width // 3) if for_gradient else 0)
    return max(least, _ROW_ITEMS // max(1, math.prod(query.shape[:-2]) * keys))


def attend(
    query: Node, key: Node, value: Node, causal: bool, scale: float, for_gradient: bool = False
) -> Node:
    """softmax(query @ key.T * scale) @ value over the last two axes; the axes before them are equal.

    `for_gradient`: only gradients are taken of it.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    rows = _rows(query, key, for_gradient)
    if rows >= queries:
        return _attended(query, key, value, keys - queries, causal, scale)
    parts = []
    for start in range(0, queries, rows):
        end = min(start + rows, queries)
        seen = keys - queries + end if causal else keys
        rows_axis = query.ndim - 2
        q = slice_axis(query, rows_axis, start, end - start)
        k, v = (slice_axis(operand, rows_axis, 0, seen) for operand in (key, value))
        part = _attended(q, k, v, keys - queries + start, causal, scale)
        parts.append(checkpoint(part, [query, key, value]))
    return concat(parts, query.ndim - 2)


def _attended(query: Node, key: Node, value: Node, offset: int, causal: bool, scale: float) -> Node:
    """Attention of queries, the first of which is at the position of key `offset`."""
    transposed = (*range(key.ndim - 2), key.ndim - 1, key.ndim - 2)
    scores = matmul(query, permute(key, transposed))
    scores = multiply(scores, like(scores, scale))
    queries, keys = scores.shape[-2:]
    if causal and queries > 1:
        last_seen = reshape(sequence(offset, 1, queries, int32), (queries, 1))
        index = reshape(sequence(0, 1, keys, int32), (1, keys))
        pairs = (queries, keys)
        seen = greater_equal(expand(last_seen, pairs), expand(index, pairs))
        seen = expand(reshape(seen, (1,) * (scores.ndim - 2) + pairs), scores.shape)
        scores = where(seen, scores, full(scores.shape, scores.dtype, -math.inf))
    weights = softmax(scores, scores.ndim - 1)
    return matmul(cast(weights, value.dtype), value)


def softmax(x: Node, axis: int) -> Node:
    """exp(x), normalized to sum to 1 along an axis; float16 and bfloat16 are rounded once, at the end."""
    if not x.shape[axis]:
        return x
    wide = widened(x)
    fixed, axes = stop(wide), (axis,)
    powers = exp(subtract(fixed, restore(max_(fixed, axes), fixed, axes)))
    total = keep_axes(sum_(powers, axes), x, axes)
    result = multiply(powers, expand(divide(like(total, 1), total), x.shape))
    return cast(Node(_SOFTMAX, (result, wide), {"axis": axis}), x.dtype)


def _softmax_gradient(g: Node, n: Node) -> list[Node]:
    axis, scaled = n.attributes["axis"], multiply(g, n)
    return [subtract(scaled, multiply(n, restore(sum_(scaled, (axis,)), n, (axis,))))]


_SOFTMAX = custom_vjp("softmax", _softmax_gradient)
ATTENTION = Primitive(
    "attention",
    Kind.ATTENTION,
    _shape,
    _reference,
    lambda g, n: _gradients(n, n, g, GRADIENT_PARTS),
    decompose=_decomposed,
)
ATTENTION_GRADIENT = Primitive(
    "attention_gradient",
    Kind.ATTENTION,
    _gradient_shape,
    _gradient_reference,
    lambda g, n: gradients_of(lambda *own: _gradient_of_parts(n.on(own)), n.inputs, g),
    decompose=lambda n, capabilities: None if has_kernel(n, capabilities) else _gradient_of_parts(n),
)
PACKED = custom_vjp("packed_attention", lambda g, n: _gradients(n.inputs[0], n, g, ("packed",)))


def attention(query: Node, key: Node, value: Node, causal: bool, scale: float) -> Node:
    """softmax(query @ key.T * scale) @ value of every head; if `causal`, queries see no later keys."""
    return Node(ATTENTION, (query, key, value), {"causal": causal, "scale": scale, "part": "result"})


def packed_attention(packed: Node, causal: bool, scale: float) -> Node:
    """Attention of queries, keys and values packed as (batch, length, 3, heads, head size), with a packed
    gradient."""
    batch, length, _, heads, width = packed.shape
    query, key, value = (
        reshape(slice_axis(packed, 2, side, 1), (batch, length, heads, width)) for side in range(3)
    )
    return Node(PACKED, (attention(query, key, value, causal, scale), packed), {})
