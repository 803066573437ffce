"""Attention to keys and values in pages, through a table of the pages of each sequence.

Queries are (rows, length, heads, head size), and the pages of a layer (2, pages, key heads, page size, head
size), with keys first. Row r has the pages `table[r]`, in the order of their positions; its query i attends
to the positions up to `positions[r, i]`. Neighbouring heads of queries share a head of keys and values.

A kernel reads the positions that are attended to, and nothing else; no scores are stored. Many queries of a
sequence have a primitive of their own on tensor cores, which reads queries through views; for heads that it
does not take, and NumPy, there are products of matrices, in parts.

A step of a single query for each sequence also puts the key and value of its position into a page, before it
attends. No sequence may attend to the position that another puts: pages that are shared are full.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.graph.attention import MOST_COLUMNS, softmax
from penstock.graph.contraction import gather, matmul, put_rows
from penstock.graph.creating import sequence
from penstock.graph.dtypes import HALF_PRECISION, int32
from penstock.graph.elementwise import (
    add,
    cast,
    divide,
    floor_divide,
    full,
    greater,
    less_equal,
    like,
    logical_and,
    multiply,
    remainder,
    tanh,
    where,
    widened,
)
from penstock.graph.node import Array, DType, Kind, Node, Primitive, Shape
from penstock.graph.reducing import expand, max_
from penstock.graph.shaping import concat, permute, reshape, slice_axis

MOST_QUERIES = 16  # of a sequence, whose positions are divided among workgroups; more have other kernels
_SCORES = 1 << 24  # that are stored at a time
_TILE = 32  # positions, the smallest on tensor cores


def _shape(
    query: Node, pages: Node, table: Node, positions: Node, *, scale: float, window: int, softcap: float
) -> tuple[Shape, DType]:
    rows, length, heads, size = query.shape
    assert pages.shape[0] == 2
    assert pages.shape[4] == size
    assert heads % pages.shape[2] == 0
    assert table.shape[0] == rows
    assert positions.shape == (rows, length)
    assert query.dtype == pages.dtype
    assert table.dtype == positions.dtype == int32
    return query.shape, query.dtype


def _reference(
    query: Array, pages: Array, table: Array, positions: Array, scale: float, window: int, softcap: float
) -> Array:
    rows, length, _, size = query.shape
    key_heads = pages.shape[2]
    keys, values = (
        pages[side][table].transpose(0, 2, 1, 3, 4).reshape(rows, key_heads, -1, size) for side in range(2)
    )
    places = np.arange(keys.shape[2])
    # What lies after the last position may be anything, such as a NaN of another sequence.
    written = (places <= positions.max(axis=1, keepdims=True))[:, np.newaxis, :, np.newaxis]
    keys, values = (np.where(written, side, np.zeros((), side.dtype)) for side in (keys, values))
    grouped = query.reshape(rows, length, key_heads, -1, size).transpose(0, 2, 3, 1, 4)
    scores = np.matmul(grouped, keys[:, :, np.newaxis].swapaxes(-1, -2)) * np.asarray(scale, query.dtype)
    if softcap:
        scores = np.tanh(scores / softcap) * np.asarray(softcap, query.dtype)
    last = positions[:, np.newaxis, np.newaxis, :, np.newaxis]
    seen = (places <= last) & (places > last - window) if window else places <= last
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = (weights / weights.sum(axis=-1, keepdims=True)).astype(query.dtype)
    result = np.matmul(weights, values[:, :, np.newaxis])
    return np.asarray(result.transpose(0, 3, 1, 2, 4).reshape(query.shape))


def on_tensor_cores(dtype: DType, size: int, capabilities: Capabilities) -> bool:
    """Whether tensor cores have many queries of a sequence, with heads of a size, attend to pages."""
    return capabilities.tensor_cores and dtype in HALF_PRECISION and size in range(16, MOST_COLUMNS + 1, 16)


def reads_pages(dtype: DType, size: int, capabilities: Capabilities) -> bool:
    """Whether a kernel has many queries of a sequence read pages, up to the last position they attend to."""
    products = capabilities.tensor_cores and dtype in HALF_PRECISION
    return capabilities.compiles and (not products or on_tensor_cores(dtype, size, capabilities))


def _decomposed(node: Node, capabilities: Capabilities) -> Node | None:
    """The primitive of tensor cores, or products of matrices; None where another kernel is better."""
    query, pages, *_ = node.inputs
    given = (query.dtype, query.shape[3], capabilities)
    if query.shape[1] <= MOST_QUERIES:
        return None
    starts = _TILE % pages.shape[3] == 0  # a tile of positions begins where a page does
    if on_tensor_cores(*given) and starts and node.attributes["scale"] > 0:
        return Node(PROMPT_ATTENTION, node.inputs, node.attributes)
    return None if reads_pages(*given) else _by_products(node)


def _by_products(node: Node) -> Node:
    """Products of matrices, of a part of the queries at a time."""
    query, pages, table, positions = node.inputs
    rows, length, heads, _ = query.shape
    reach = table.shape[1] * pages.shape[3]
    most = max(MOST_QUERIES, _SCORES // (rows * heads * reach))
    keys, values = (_read(pages, table, side) for side in range(2))
    # What lies after the last position may be anything, such as a NaN of another sequence.
    last = expand(reshape(max_(positions, (1,)), (rows, 1, 1, 1)), values.shape)
    places = expand(reshape(sequence(0, 1, reach, int32), (1, 1, reach, 1)), values.shape)
    values = where(less_equal(places, last), values, like(values, 0))
    parts = []
    for start in range(0, length, most):
        count = min(most, length - start)
        own = slice_axis(positions, 1, start, count)
        parts.append(_attended(slice_axis(query, 1, start, count), keys, values, own, node))
    return parts[0] if len(parts) == 1 else concat(parts, 1)


def _read(pages: Node, table: Node, side: int) -> Node:
    """Keys or values of each row, (rows, key heads, positions, head size)."""
    _, count, heads, page, size = pages.shape
    rows, width = table.shape
    # Of both sides together: a slice of all pages would be copied.
    own = reshape(pages, (2 * count, heads, page, size))
    index = add(reshape(table, (rows * width,)), full((rows * width,), table.dtype, side * count))
    taken = reshape(gather(own, index), (rows, width, heads, page, size))
    return reshape(permute(taken, (0, 2, 1, 3, 4)), (rows, heads, width * page, size))


def _attended(query: Node, keys: Node, values: Node, positions: Node, node: Node) -> Node:
    rows, length, heads, size = query.shape
    key_heads, reach = keys.shape[1:3]
    groups = heads // key_heads
    grouped = permute(reshape(query, (rows, length, key_heads, groups, size)), (0, 2, 3, 1, 4))
    grouped = reshape(grouped, (rows, key_heads, groups * length, size))
    scores = matmul(grouped, permute(keys, (0, 1, 3, 2)))
    scores = widened(multiply(scores, like(scores, node.attributes["scale"])))
    softcap, window = node.attributes["softcap"], node.attributes["window"]
    if softcap:
        cap = like(scores, softcap)
        scores = multiply(tanh(divide(scores, cap)), cap)
    shape = (rows, key_heads, groups, length, reach)
    last = expand(reshape(positions, (rows, 1, 1, length, 1)), shape)
    places = expand(reshape(sequence(0, 1, reach, int32), (1, 1, 1, 1, reach)), shape)
    seen = less_equal(places, last)
    if window:
        seen = logical_and(seen, greater(add(places, like(places, window)), last))
    scores = where(seen, reshape(scores, shape), full(shape, scores.dtype, -math.inf))
    weights = reshape(cast(softmax(scores, 4), values.dtype), (rows, key_heads, groups * length, reach))
    result = reshape(matmul(weights, values), (rows, key_heads, groups, length, size))
    return reshape(permute(result, (0, 3, 1, 2, 4)), query.shape)


def _operations(node: Node) -> int:
    table, pages = node.inputs[2], node.inputs[1]
    return 4 * node.size * table.shape[1] * pages.shape[3]


PAGED_ATTENTION = Primitive(
    "paged_attention",
    Kind.PAGED_ATTENTION,
    _shape,
    _reference,
    operations=_operations,
    decompose=_decomposed,
    refuses="attention to cached keys and values has no gradient",
)

PROMPT_ATTENTION = Primitive("prompt_attention", Kind.ATTENTION, _shape, _reference, operations=_operations)


def paged_attention(
    query: Node,
    pages: Node,
    table: Node,
    positions: Node,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Node:
    """Attention of queries to the pages of their sequences; a `window` is how many positions they see."""
    attributes = {"scale": scale, "window": window or 0, "softcap": softcap or 0.0}
    return Node(PAGED_ATTENTION, (query, pages, table, positions), attributes)


# A step


def has_step_kernel(capabilities: Capabilities) -> bool:
    """Whether a device puts a position and attends in a single kernel: GPUs, where a launch takes long."""
    return capabilities.compiles and capabilities.vector_width == 1


def _step_shape(
    query: Node,
    key: Node,
    value: Node,
    pages: Node,
    table: Node,
    positions: Node,
    slots: Node,
    counters: Node | None = None,
    *,
    part: str,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Shape, DType]:
    shape = _shape(query, pages, table, positions, scale=scale, window=window, softcap=softcap)
    assert query.shape[1] == 1
    assert key.shape == value.shape == (query.shape[0], 1, pages.shape[2], pages.shape[4])
    assert key.dtype == value.dtype == pages.dtype
    assert slots.shape == (query.shape[0],)
    assert slots.dtype == int32
    assert counters is None or counters.dtype == int32
    return shape if part == "result" else (pages.shape, pages.dtype)


def _step_reference(
    query: Array,
    key: Array,
    value: Array,
    pages: Array,
    table: Array,
    positions: Array,
    slots: Array,
    *counters: Array,
    part: str,
    **attributes: float,
) -> Array:
    pages, page = pages.copy(), pages.shape[3]
    for row in np.flatnonzero(slots >= 0):
        position = positions[row, 0]
        at_page = table[row, position // page], slice(None), position % page
        pages[0][at_page], pages[1][at_page] = key[row, 0], value[row, 0]
    return pages if part == "pages" else _reference(query, pages, table, positions, **attributes)  # type: ignore[arg-type]


def _step_parts(node: Node, capabilities: Capabilities) -> Node | None:
    """The rows of keys and values are put, and then attended to."""
    if has_step_kernel(capabilities):
        return None
    query, key, value, pages, table, positions, slots = node.inputs[:7]
    _, count, heads, page, size = pages.shape
    rows, width = table.shape
    last = reshape(positions, (rows,))
    first = sequence(0, width, rows, int32)
    own = gather(reshape(table, (rows * width,)), add(first, floor_divide(last, like(last, page))))
    place = add(multiply(own, like(own, heads * page)), remainder(last, like(last, page)))
    shape = (2, rows, heads)
    base = expand(reshape(sequence(0, count * heads * page, 2, int32), (2, 1, 1)), shape)
    head = expand(reshape(sequence(0, page, heads, int32), (1, 1, heads)), shape)
    index = add(add(expand(reshape(place, (1, rows, 1)), shape), base), head)
    puts = expand(reshape(greater(slots, like(slots, -1)), (1, rows, 1)), shape)
    index = reshape(where(puts, index, like(index, -1)), (2 * rows * heads,))
    new = concat([reshape(side, (rows * heads, size)) for side in (key, value)], 0)
    new_pages = reshape(put_rows(reshape(pages, (pages.size // size, size)), new, index), pages.shape)
    if node.attributes["part"] == "pages":
        return new_pages
    attributes = {name: value for name, value in node.attributes.items() if name != "part"}
    return Node(PAGED_ATTENTION, (query, new_pages, table, positions), attributes)


PAGED_STEP = Primitive(
    "paged_step",
    Kind.PAGED_STEP,
    _step_shape,
    _step_reference,
    operations=lambda node: 0 if node.attributes["part"] == "pages" else 4 * node.size * _reach(node),
    decompose=_step_parts,
    refuses="attention to cached keys and values has no gradient",
)


def _reach(node: Node) -> int:
    """The most positions that a query attends to."""
    return node.inputs[4].shape[1] * node.inputs[3].shape[3]


def paged_step(
    inputs: Sequence[Node], scale: float, window: int | None = None, softcap: float | None = None
) -> tuple[Node, Node]:
    """Attention of single queries after their keys and values were put into the pages; and these pages.

    The inputs are queries, keys, values, pages, table, positions, and slots: negative ones of rows that put
    nothing. There may be zeros as the last, which a kernel counts with and leaves as zeros: then it combines
    splits by itself.
    """
    attributes = {"scale": scale, "window": window or 0, "softcap": softcap or 0.0}
    result, new_pages = (
        Node(PAGED_STEP, tuple(inputs), {"part": part, **attributes}) for part in ("result", "pages")
    )
    return result, new_pages
