"""Attention as one primitive, where the device has kernels for it."""

from __future__ import annotations

import math

from penstock.graph import attention as graph
from penstock.tensor.core import Tensor, record
from penstock.tensor.manipulation import permute_dims, reshape


def attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Tensor | None:
    """softmax(query @ key.T * scale) @ value over the last two axes; None where there is no kernel for it."""
    alike = query.dtype == key.dtype == value.dtype and key.shape == value.shape
    if not alike or query.shape[:-2] != key.shape[:-2]:
        return None  # it broadcasts nothing
    if not _has_kernel(query, key.shape[-2], is_causal, scale):
        return None
    before = query.shape[:-2]
    heads = before[-1] if len(before) > 1 else 1
    # The primitive has a position's heads side by side.
    q, k, v = (
        permute_dims(reshape(one, (math.prod(before) // heads, heads, *one.shape[-2:])), (0, 2, 1, 3))
        for one in (query, key, value)
    )
    node = graph.attention(q._node, k._node, v._node, is_causal, scale)
    return reshape(permute_dims(record(node, q, k, v), (0, 2, 1, 3)), query.shape)


def packed_attention(packed: Tensor, is_causal: bool, scale: float) -> Tensor | None:
    """The same of (batch, length, 3, heads, width), as (batch, length, heads, width)."""
    query = permute_dims(packed[:, :, 0], (0, 2, 1, 3))
    if not _has_kernel(query, query.shape[-2], is_causal, scale):
        return None
    return record(graph.packed_attention(packed._node, is_causal, scale), packed)


def _has_kernel(query: Tensor, keys: int, is_causal: bool, scale: float) -> bool:
    from penstock.kernels.attention import has_attention  # imported late, as all that writes kernels

    queries, width = query.shape[-2:]
    device = query.device.capabilities
    return (
        query.size > 0
        and keys > 0
        and has_attention(device, query.dtype, width, queries, keys, is_causal, scale)
    )
