"""Attention, with masks, grouped queries and dropout."""

from __future__ import annotations

import math

from penstock.nn.functional.activations import softmax
from penstock.nn.functional.dropping import check_probability, dropout
from penstock.tensor import attention
from penstock.tensor.arithmetic import logical_and, where
from penstock.tensor.autograd import checkpoint
from penstock.tensor.broadcasting import broadcast, common_shape
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor
from penstock.tensor.creation import arange
from penstock.tensor.dtypes import bool_
from penstock.tensor.linear import matmul
from penstock.tensor.manipulation import astype, concat, expand_dims, reshape
from penstock.tensor.reduction import any as any_

_SCORES_AT_ONCE = (
    1 << 24
)  # of attention with a mask or dropout; more are computed in parts, and recomputed in the backward pass


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    lower_right: bool = False,
) -> Tensor:
    """softmax(query @ key.T * scale + mask) @ value, over the last two axes.

    With `is_causal`, query i attends to keys 0 to i. With `lower_right` too, the last query is aligned with
    the last key, as queries after cached keys need. A mask is boolean (True: attend) or is added to the
    scores; a query that may attend to nothing gives 0. With `enable_gqa`, each head of keys and values serves
    several heads of queries.

    The scores of all queries are never in memory together: if the device has no kernel for attention, long
    contexts are computed in parts of the queries, and each part is recomputed in the backward pass.

    >>> q = k = v = ps.zeros((2, 4, 5, 8))
    >>> ps.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).shape
    (2, 4, 5, 8)
    """
    shapes = f"{query.shape}, {key.shape} and {value.shape}"
    if enable_gqa:
        key, value = (_for_all_heads(query, part, shapes) for part in (key, value))
    if query.ndim < 2 or query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise ValueError(f"attention: shapes {shapes} do not fit together")
    check_probability(dropout_p)
    more_keys = key.shape[-2] - query.shape[-2]
    if lower_right and (not is_causal or more_keys < 0):
        raise ValueError(
            f"lower_right takes is_causal=True and no more queries than keys, not shapes {shapes}"
        )
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    if attn_mask is None and not dropout_p:
        if is_causal and not lower_right:
            return _causal(query, key, value, factor)
        return _attention(query, key, value, is_causal, factor)
    batch = common_shape(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    offset = (more_keys if lower_right else 0) if is_causal else None
    masked = Masked(key, value, attn_mask, (*batch, query.shape[-2], key.shape[-2]), offset)
    return masked.attended(query, factor, dropout_p)


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention, where kernels need as many keys as queries."""
    queries, keys = query.shape[-2], key.shape[-2]
    if queries < keys:  # no query attends to the rest
        key, value = key[..., :queries, :], value[..., :queries, :]
    if queries <= keys:
        return _attention(query, key, value, True, scale)
    later = _attention(query[..., keys:, :], key, value, False, scale)  # they attend to all keys
    if not keys:
        return later
    return concat([_attention(query[..., :keys, :], key, value, True, scale), later], axis=-2)


@composite
def _attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Tensor:
    return attention.attention(query, key, value, is_causal, scale)


@composite
def packed_attention(packed: Tensor, is_causal: bool = False, scale: float | None = None) -> Tensor:
    """Attention of queries, keys and values in one tensor: (batch, length, 3, heads, width of a head).

    The result has the shape (batch, length, heads, width of a head).

    >>> ps.nn.functional.packed_attention(ps.zeros((2, 5, 3, 4, 8)), is_causal=True).shape
    (2, 5, 4, 8)
    """
    if packed.ndim != 5 or packed.shape[2] != 3:
        raise ValueError(f"attention: shape {packed.shape} is not (batch, length, 3, heads, width)")
    factor = packed.shape[-1] ** -0.5 if scale is None else scale
    return attention.packed_attention(packed, is_causal, factor)


class Masked:
    """Keys and values with a mask of which keys each query attends to.

    With an `offset`, query i attends to no key after i + offset.
    """

    def __init__(
        self, key: Tensor, value: Tensor, mask: Tensor | None, scores: tuple[int, ...], offset: int | None
    ) -> None:
        if mask is not None:
            if mask.dtype.kind not in "bf":
                raise TypeError(f"a mask is boolean or of floating point, and {mask.dtype} was given")
            if common_shape(mask.shape, scores) != scores:
                raise ValueError(f"a mask of shape {mask.shape} does not fit scores of shape {scores}")
        self._key, self._value, self._mask = key, value, mask
        self._shape, self._offset = scores, offset

    def attended(self, query: Tensor, scale: float, dropout_p: float) -> Tensor:
        """The attended values of all queries, computed for a part of the queries at a time."""
        queries = self._shape[-2]
        rows = max(16, _SCORES_AT_ONCE // max(1, math.prod(self._shape[:-2]) * self._shape[-1]))
        parts = []
        for start in range(0, queries, rows):
            part = query[..., start : start + rows, :]

            def of_part(
                part: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, start: int = start
            ) -> Tensor:
                masked = Masked(key, value, mask, self._shape, self._offset)
                return matmul(dropout(masked.weights(part, start, scale), dropout_p), value)

            given = (part, self._key, self._value, self._mask)
            parts.append(of_part(*given) if rows >= queries else checkpoint(of_part, *given))
        return parts[0] if len(parts) == 1 else concat(parts, axis=-2)

    def weights(self, query: Tensor, start: int, scale: float) -> Tensor:
        """The attention weights of the queries from `start` on."""
        scores = matmul(query, self._key.mT) * scale
        seen, added = self._seen(start, query.shape[-2])
        if added is not None:
            scores = scores + astype(added, scores.dtype)
        if seen is None:
            return astype(softmax(scores), self._value.dtype)
        shape = common_shape(scores.shape, seen.shape)
        scores, seen = broadcast(scores, shape), broadcast(seen, shape)
        weights = softmax(where(seen, scores, -math.inf))
        weights = where(any_(seen, axis=-1, keepdims=True), weights, 0.0)
        return astype(weights, self._value.dtype)

    def _seen(self, start: int, count: int) -> tuple[Tensor | None, Tensor | None]:
        """The mask of keys for queries from `start` on, and a tensor to add to their scores."""
        keys = self._shape[-1]
        seen: Tensor | None = None
        added: Tensor | None = None
        mask = self._mask
        if mask is not None:
            several = mask.ndim > 1 and mask.shape[-2] > 1
            mask = mask[..., start : start + count, :] if several else mask
            seen = mask if mask.dtype == bool_ else mask > -math.inf
            added = None if mask.dtype == bool_ else where(seen, mask, 0.0)
        if self._offset is not None:
            device = self._key.device
            last = reshape(arange(start, start + count, device=device) + self._offset, (count, 1))
            causal = last >= arange(keys, device=device)
            seen = causal if seen is None else logical_and(seen, causal)
        return seen, added


def _for_all_heads(query: Tensor, part: Tensor, shapes: str) -> Tensor:
    """Keys or values, repeated for each head of the queries."""
    if query.ndim < 3 or part.ndim < 3 or not part.shape[-3] or query.shape[-3] % part.shape[-3]:
        raise ValueError(f"attention: the heads of shapes {shapes} do not fit together")
    before, heads, after = part.shape[:-3], part.shape[-3], part.shape[-2:]
    times = query.shape[-3] // heads
    spread = broadcast(expand_dims(part, axis=-3), (*before, heads, times, *after))
    return reshape(spread, (*before, heads * times, *after))
