"""Attention, with masks, grouped queries and dropout."""

from __future__ import annotations

import math

from penstock.nn.functional.activations import softmax
from penstock.nn.functional.dropping import check_probability, dropout
from penstock.tensor import attention
from penstock.tensor.arithmetic import logical_and, tanh, where
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
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(query @ key.T * scale + mask) @ value, over the last two axes.

    With `is_causal`, query i attends to keys 0 to i. With `lower_right` too, the last query is aligned with
    the last key, as queries after cached keys need. A mask is boolean (True: attend) or is added to the
    scores; a query that may attend to nothing gives 0. With `enable_gqa`, each head of keys and values serves
    several heads of queries. With a `window`, which takes `is_causal`, a query attends to that many keys at
    most, the last of which is its own. With a `softcap`, scores s become softcap * tanh(s / softcap).

    The scores of all queries are never in memory together: if the device has no kernel for attention, long
    contexts are computed in parts of the queries, and each part is recomputed in the backward pass.

    >>> q = k = v = ps.zeros((2, 4, 5, 8))
    >>> ps.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).shape
    (2, 4, 5, 8)
    """
    shapes = f"{query.shape}, {key.shape} and {value.shape}"
    groups = 1
    if enable_gqa:
        groups = _groups(query, key, value, shapes)
        if key.shape[:-2] != value.shape[:-2] or query.shape[:-3] != key.shape[:-3]:
            key, value, groups = (*(_for_all_heads(part, query) for part in (key, value)), 1)
    if query.ndim < 2 or query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise ValueError(f"attention: shapes {shapes} do not fit together")
    check_probability(dropout_p)
    more_keys = key.shape[-2] - query.shape[-2]
    if lower_right and (not is_causal or more_keys < 0):
        raise ValueError(
            f"lower_right takes is_causal=True and no more queries than keys, not shapes {shapes}"
        )
    _check_limits(is_causal, window, softcap)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    if window is not None and window >= key.shape[-2]:
        window = None  # which hides no key
    if attn_mask is None and not dropout_p and window is None and softcap is None:
        if groups > 1:  # a kernel takes as many heads of keys as of queries
            key, value = (_for_all_heads(part, query) for part in (key, value))
        if is_causal and not lower_right:
            return _causal(query, key, value, factor)
        return _attention(query, key, value, is_causal, factor)
    offset = (more_keys if lower_right else 0) if is_causal else None
    if groups == 1:
        batch = common_shape(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        scores = (*batch, query.shape[-2], key.shape[-2])
        return Masked(key, value, attn_mask, scores, offset, window, softcap).attended(
            query, factor, dropout_p
        )
    # The heads that share keys are a further axis.
    rows = _by_group(query, groups)
    mask = None if attn_mask is None else _by_group(attn_mask, groups)
    masked = Masked(key, value, mask, (*rows.shape[:-1], key.shape[-2]), offset, window, softcap)
    return reshape(masked.attended(rows, factor, dropout_p), (*query.shape[:-1], value.shape[-1]))


def _check_limits(is_causal: bool, window: int | None, softcap: float | None) -> None:
    if window is not None and (window < 1 or not is_causal):
        raise ValueError(f"a window is 1 or more and takes is_causal=True, and {window} was given")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"a softcap is more than 0, and {softcap} was given")


def _by_group(x: Tensor, groups: int) -> Tensor:
    """With the axis of heads, the third from the end, divided into groups that share keys."""
    if x.ndim < 3:
        return x
    *before, heads, rows, columns = x.shape
    return reshape(x, (*before, *((1, 1) if heads == 1 else (heads // groups, groups)), rows, columns))


def _product(rows: Tensor, matrix: Tensor) -> Tensor:
    """`rows @ matrix`; those of a group of heads are rows of one product, so that nothing is repeated."""
    if rows.ndim <= matrix.ndim:
        return matmul(rows, matrix)
    *before, groups, count, width = rows.shape
    product = matmul(reshape(rows, (*before, groups * count, width)), matrix)
    return reshape(product, (*before, groups, count, matrix.shape[-1]))


def _causal_mask(queries: int, keys: int, offset: int, window: int | None, like: Tensor) -> Tensor:
    """Which keys each query attends to."""
    last = reshape(arange(queries, device=like.device) + offset, (queries, 1))
    index = arange(keys, device=like.device)
    seen = last >= index
    return seen if window is None else logical_and(seen, last - window < index)


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

    With an `offset`, query i attends to no key after i + offset; with a `window`, to that many before.
    """

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scores: tuple[int, ...],
        offset: int | None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        if mask is not None:
            if mask.dtype.kind not in "bf":
                raise TypeError(f"a mask is boolean or of floating point, and {mask.dtype} was given")
            if common_shape(mask.shape, scores) != scores:
                raise ValueError(f"a mask of shape {mask.shape} does not fit scores of shape {scores}")
        self._key, self._value, self._mask = key, value, mask
        self._shape, self._offset = scores, offset
        self._window, self._softcap = window, softcap

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
                masked = Masked(key, value, mask, self._shape, self._offset, self._window, self._softcap)
                return _product(dropout(masked.weights(part, start, scale), dropout_p), value)

            given = (part, self._key, self._value, self._mask)
            parts.append(of_part(*given) if rows >= queries else checkpoint(of_part, *given))
        return parts[0] if len(parts) == 1 else concat(parts, axis=-2)

    def weights(self, query: Tensor, start: int, scale: float) -> Tensor:
        """The attention weights of the queries from `start` on."""
        scores = _product(query, self._key.mT) * scale
        if self._softcap is not None:
            scores = tanh(scores / self._softcap) * self._softcap
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
        seen: Tensor | None = None
        added: Tensor | None = None
        mask = self._mask
        if mask is not None:
            several = mask.ndim > 1 and mask.shape[-2] > 1
            mask = mask[..., start : start + count, :] if several else mask
            seen = mask if mask.dtype == bool_ else mask > -math.inf
            added = None if mask.dtype == bool_ else where(seen, mask, 0.0)
        if self._offset is not None:
            causal = _causal_mask(count, self._shape[-1], start + self._offset, self._window, self._key)
            seen = causal if seen is None else logical_and(seen, causal)
        return seen, added


def _groups(query: Tensor, key: Tensor, value: Tensor, shapes: str) -> int:
    """How many heads of queries each head of keys and values serves."""
    for part in (key, value):
        if query.ndim < 3 or part.ndim < 3 or not part.shape[-3] or query.shape[-3] % part.shape[-3]:
            raise ValueError(f"attention: the heads of shapes {shapes} do not fit together")
    return int(query.shape[-3] // key.shape[-3])


def _for_all_heads(part: Tensor, query: Tensor) -> Tensor:
    """Keys or values, repeated for each head of the queries."""
    before, heads, after = part.shape[:-3], part.shape[-3], part.shape[-2:]
    times = query.shape[-3] // heads
    spread = broadcast(expand_dims(part, axis=-3), (*before, heads, times, *after))
    return reshape(spread, (*before, heads * times, *after))
