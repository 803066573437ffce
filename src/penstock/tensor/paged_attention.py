"""Attention to keys and values in pages, for generation."""

from __future__ import annotations

from penstock.graph import paged_attention as graph
from penstock.tensor.core import Tensor, record


def paged_attention(
    query: Tensor,
    cache: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """What the last position of each sequence attends to, (sequences, heads, head size).

    `query` has that shape; `cache` (2, pages, key heads, page size, head size), its keys first; `table`
    (sequences, pages of a sequence), the pages of each; `lengths` (sequences,), how many positions each has.
    The scores are never in memory.
    """
    node = graph.paged_attention(
        query._node, cache._node, table._node, lengths._node, scale, window or 0, softcap or 0.0
    )
    return record(node, query, cache, table, lengths)
