"""Attention."""

from __future__ import annotations

from typing import Any

import numpy as np

import penstock as ps
from penstock.onnx.dtypes import dtype_of
from penstock.onnx.registry import Call, operator

F = ps.nn.functional


@operator("Attention", since=23)
def attention(
    call: Call,
    query: ps.Tensor,
    key: ps.Tensor,
    value: ps.Tensor,
    mask: ps.Tensor | None = None,
    past_key: ps.Tensor | None = None,
    past_value: ps.Tensor | None = None,
    filled: ps.Tensor | None = None,
) -> Any:
    """Scaled dot-product attention, with what was kept of earlier keys and values, and these."""
    flat = query.ndim == 3
    if flat:
        query = _heads(query, call.get("q_num_heads"))
        key, value = (_heads(x, call.get("kv_num_heads")) for x in (key, value))
    past = 0 if past_key is None else past_key.shape[2]
    if past_key is not None and past_value is not None:
        key, value = ps.concat([past_key, key], axis=2), ps.concat([past_value, value], axis=2)
    scale = call.get("scale", query.shape[-1] ** -0.5)
    scores = None
    if mask is None and filled is None and _plain(call, past):
        causal, grouped = bool(call.get("is_causal", 0)), query.shape[1] != key.shape[1]
        y = F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    else:
        bias = _bias(call, query, key, mask, past, filled)
        y, scores = _composed(call, query, key, value, bias, scale)
    if flat:
        y = ps.reshape(ps.permute_dims(y, (0, 2, 1, 3)), (y.shape[0], y.shape[2], -1))
    return (y, key, value, scores) if any(map(call.wants, (1, 2, 3))) else y


def _plain(call: Call, past: int) -> bool:
    """Whether the attributes ask for no more than PyTorch's function does."""
    windows = (call.get("left_window_size", -1), call.get("right_window_size", -1))
    special = any(map(call.get, ("softcap", "softmax_precision"))) or call.wants(3)
    return windows == (-1, -1) and not special and not (past and call.get("is_causal", 0))


def _heads(x: ps.Tensor, count: int) -> ps.Tensor:
    """(batch, length, width) as (batch, heads, length, width of a head)."""
    return ps.permute_dims(ps.reshape(x, (*x.shape[:2], count, -1)), (0, 2, 1, 3))


def _bias(
    call: Call, query: ps.Tensor, key: ps.Tensor, mask: ps.Tensor | None, past: int, filled: ps.Tensor | None
) -> ps.Tensor | None:
    """What is added to the scores: minus infinity where a query does not see a key."""
    queries, keys, device = query.shape[2], key.shape[2], query.device
    never = ps.full((), -np.inf, dtype=query.dtype, device=device)
    nothing = ps.zeros((), dtype=query.dtype, device=device)
    row = ps.reshape(ps.arange(queries, dtype=ps.int64, device=device), (-1, 1))
    column = ps.arange(keys, dtype=ps.int64, device=device)
    at = row + past
    if filled is not None:  # for each item of the batch, how many keys are there
        count = ps.reshape(ps.astype(filled, ps.int64), (-1, 1, 1, 1))
        at = row + (count - queries)
    seen = []
    if call.get("is_causal", 0):
        seen.append(column <= at)
    if call.get("left_window_size", -1) >= 0:
        seen.append(at - column <= call.get("left_window_size"))
    if call.get("right_window_size", -1) >= 0:
        seen.append(column - at <= call.get("right_window_size"))
    if filled is not None:
        seen.append(column < count)
    biases = [ps.where(condition, nothing, never) for condition in seen]
    if mask is not None:
        given = ps.where(mask, nothing, never) if mask.dtype == ps.bool else mask
        short = keys - given.shape[-1]
        biases.append(ps.pad(given, (0, short), value=-np.inf) if short > 0 else given)
    return sum(biases[1:], start=biases[0]) if biases else None


def _composed(
    call: Call, query: ps.Tensor, key: ps.Tensor, value: ps.Tensor, bias: ps.Tensor | None, scale: float
) -> tuple[ps.Tensor, ps.Tensor]:
    """The result, and the scores at the stage that is asked for."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = ps.repeat(key, groups, axis=1), ps.repeat(value, groups, axis=1)
    root = scale**0.5
    stages = [(query * root) @ ps.matrix_transpose(key * root)]
    cap = call.get("softcap", 0.0)
    stages.append(cap * ps.tanh(stages[0] / cap) if cap else stages[0])
    stages.append(stages[1] if bias is None else stages[1] + bias)
    precision = call.get("softmax_precision")
    scores = stages[2]
    if precision is not None:
        scores = ps.astype(scores, getattr(ps, dtype_of(precision, str(call.node)).name))
    stages.append(ps.astype(_softmax(scores), query.dtype))
    return stages[3] @ value, stages[call.get("qk_matmul_output_mode", 0)]


def _softmax(x: ps.Tensor) -> ps.Tensor:
    """Softmax of rows; a row without any key that is seen is 0."""
    most = ps.max(x, axis=-1, keepdims=True)
    parts = ps.exp(x - ps.where(most == -np.inf, ps.zeros_like(most), most))
    total = ps.sum(parts, axis=-1, keepdims=True)
    return parts / ps.where(total == 0, ps.ones_like(total), total)
