"""Scaled dot-product attention."""

from __future__ import annotations

import math

from penstock.graph import attention as graph
from penstock.graph import elementwise
from penstock.graph import paged_attention as paging
from penstock.tensor import dtypes
from penstock.tensor.broadcasting import broadcast, common_shape
from penstock.tensor.core import Tensor, record
from penstock.tensor.manipulation import permute_dims, reshape


def attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Tensor:
    """softmax(query @ key.mT * scale) @ value over the last two axes; causal: of earlier positions only."""
    _check(query, key, value)
    alike = query.dtype == key.dtype == value.dtype and key.shape == value.shape
    before = query.shape[:-2]
    if not alike or before != key.shape[:-2]:
        return _of_any_shapes(query, key, value, is_causal, scale)
    heads = before[-1] if len(before) > 1 else 1
    # The primitive takes (batch, length, heads, width).
    shape = (math.prod(before[:-1]), heads) if len(before) > 1 else (math.prod(before), heads)
    q, k, v = (
        permute_dims(reshape(operand, (*shape, *operand.shape[-2:])), (0, 2, 1, 3))
        for operand in (query, key, value)
    )
    node = graph.attention(q._node, k._node, v._node, is_causal, scale)
    return reshape(permute_dims(record(node, q, k, v), (0, 2, 1, 3)), query.shape)


def packed_attention(packed: Tensor, is_causal: bool, scale: float) -> Tensor:
    """Attention of queries, keys and values in one (batch, length, 3, heads, width).

    The result is (batch, length, heads, width).
    """
    _check(packed)
    return record(graph.packed_attention(packed._node, is_causal, scale), packed)


def paged_attention(
    query: Tensor,
    pages: Tensor,
    table: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention to keys and values in pages; see `graph/paged_attention.py`.

    Queries are (rows, heads, length, head size), and the result too.
    """
    _check(query, pages)
    q = permute_dims(query, (0, 2, 1, 3))
    given = (pages._node, table._node, positions._node)
    node = paging.paged_attention(q._node, *given, scale, window, softcap)
    return permute_dims(record(node, q, pages, table, positions), (0, 2, 1, 3))


def paged_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    counters: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Put the keys and values of single positions into pages, and attend; the pages after that too.

    Queries, keys and values are (rows, heads, 1, head size), and the result too. Rows with a negative slot
    put nothing. With `counters`, zeros, a kernel may combine the splits of long sequences by itself.
    """
    _check(query, key, value, pages)
    single = [permute_dims(operand, (0, 2, 1, 3)) for operand in (query, key, value)]
    given = [*single, pages, table, positions, slots, *([] if counters is None else [counters])]
    result, new = paging.paged_step([tensor._node for tensor in given], scale, window, softcap)
    return permute_dims(record(result, *given), (0, 2, 1, 3)), record(new, *given)


def _of_any_shapes(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Tensor:
    """Values of another width, different dtypes, or axes that broadcast: composed of other operations."""
    scores = dtypes.promote(query.dtype, key.dtype)
    kinds = (scores, scores, dtypes.promote(scores, value.dtype))
    batch = common_shape(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    q, k, v = [
        broadcast(record(elementwise.cast(operand._node, dtype), operand), batch + operand.shape[-2:])
        for operand, dtype in zip((query, key, value), kinds, strict=True)
    ]
    return record(graph.attend(q._node, k._node, v._node, is_causal, scale), q, k, v)


def _check(*operands: Tensor) -> None:
    for operand in operands:
        if operand.dtype.kind != "f":
            raise TypeError(f"attention does not take {operand.dtype}")
