"""Multi-head attention with its projections, in PyTorch's layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.nn.functional.attention import Masked
from penstock.nn.layers import Linear, Where, drawn
from penstock.nn.module import Module
from penstock.nn.parameter import Parameter
from penstock.tensor.arithmetic import logical_and, logical_not, where
from penstock.tensor.core import Tensor
from penstock.tensor.creation import zeros
from penstock.tensor.dtypes import bool_
from penstock.tensor.linear import matmul
from penstock.tensor.manipulation import moveaxis, permute_dims, reshape
from penstock.tensor.reduction import mean


class MultiheadAttention(Module):
    """Multi-head attention of queries to keys and values, with input and output projections.

    Masks are PyTorch's: a boolean mask is True where a query may *not* attend.

    >>> x = ps.zeros((3, 5, 8))
    >>> output, weights = ps.nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x)
    >>> output.shape, weights.shape
    ((3, 5, 8), (3, 5, 5))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Where = None,
    ) -> None:
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"a width of {embed_dim} cannot be divided among {num_heads} heads")
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.batch_first = batch_first
        if (self.kdim, self.vdim) == (embed_dim, embed_dim):
            bound = math.sqrt(6 / (4 * embed_dim))  # xavier_uniform_ of all three
            self.in_proj_weight: Parameter | None = drawn((3 * embed_dim, embed_dim), bound, device)
        else:
            self.in_proj_weight = None
            for name, width in (("q", embed_dim), ("k", self.kdim), ("v", self.vdim)):
                bound = math.sqrt(6 / (embed_dim + width))
                setattr(self, f"{name}_proj_weight", drawn((embed_dim, width), bound, device))
        self.in_proj_bias = Parameter(zeros((3 * embed_dim,), device=device)) if bias else None
        self.out_proj = Linear(embed_dim, embed_dim, bias, device)
        if bias:
            self.out_proj.bias = Parameter(zeros((embed_dim,), device=device))

    def extra_repr(self) -> str:
        """Its sizes."""
        return f"{self.embed_dim}, {self.num_heads}, dropout={self.dropout}, batch_first={self.batch_first}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The attended values for each query, and the attention weights if `need_weights`.

        Shapes are (length, batch, width), (batch, length, width) with `batch_first`, or (length, width).
        """
        unbatched = query.ndim == 2
        if query.ndim not in (2, 3) or not query.ndim == key.ndim == value.ndim:
            shapes = f"{query.shape}, {key.shape} and {value.shape}"
            raise ValueError(f"attention takes 2 or 3 axes, and shapes {shapes} were given")
        inputs = [query, key, value]
        if unbatched:
            inputs = _each_once(inputs, lambda x: reshape(x, (1, *x.shape)))
            if key_padding_mask is not None:
                key_padding_mask = reshape(key_padding_mask, (1, *key_padding_mask.shape))
        elif not self.batch_first:
            inputs = _each_once(inputs, lambda x: moveaxis(x, 0, 1))
        q, k, v = (self._heads(x) for x in self._projected(*inputs))
        mask = self._mask(q, k, attn_mask, key_padding_mask)
        dropped = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = (*q.shape[:-1], k.shape[-2])
            weights = Masked(k, v, mask, scores, 0 if is_causal else None).weights(q, 0, q.shape[-1] ** -0.5)
            weights = F.dropout(weights, dropped)
            mixed = matmul(weights, v)
            weights = mean(weights, axis=1) if average_attn_weights else weights
            weights = weights[0] if unbatched else weights
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropped, is_causal)
        batch, heads, length, width = mixed.shape
        result: Tensor = self.out_proj(
            reshape(permute_dims(mixed, (0, 2, 1, 3)), (batch, length, heads * width))
        )
        if unbatched:
            return result[0], weights
        return (result if self.batch_first else moveaxis(result, 0, 1)), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Queries, keys and values; a single product if all come from the same tensor."""
        width, bias = self.embed_dim, self.in_proj_bias
        if self.in_proj_weight is not None and query is key is value:
            packed = F.linear(query, self.in_proj_weight, bias)
            return [packed[..., at * width : (at + 1) * width] for at in range(3)]
        if self.in_proj_weight is None:
            weights = [getattr(self, f"{name}_proj_weight") for name in "qkv"]
        else:
            weights = [self.in_proj_weight[at * width : (at + 1) * width] for at in range(3)]
        biases = [None if bias is None else bias[at * width : (at + 1) * width] for at in range(3)]
        inputs = (query, key, value)
        return [F.linear(x, weight, b) for x, weight, b in zip(inputs, weights, biases, strict=True)]

    def _heads(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = reshape(x, (batch, length, self.num_heads, width // self.num_heads))
        return permute_dims(parts, (0, 2, 1, 3))

    def _mask(self, q: Tensor, k: Tensor, mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """Both masks combined for `scaled_dot_product_attention`, where True means to attend."""
        batch, heads, queries, keys = *q.shape[:3], k.shape[2]
        if mask is not None:
            shapes = ((queries, keys), (batch * heads, queries, keys))
            if mask.shape not in shapes:
                raise ValueError(f"attn_mask is of shape {shapes[0]} or {shapes[1]}, not {mask.shape}")
            mask = mask if mask.ndim == 2 else reshape(mask, (batch, heads, queries, keys))
            mask = logical_not(mask) if mask.dtype == bool_ else mask
        if padding is None:
            return mask
        if padding.shape != (batch, keys):
            raise ValueError(f"key_padding_mask is of shape {(batch, keys)}, and {padding.shape} was given")
        padding = reshape(padding, (batch, 1, 1, keys))
        padding = logical_not(padding) if padding.dtype == bool_ else padding
        if mask is None:
            return padding
        if mask.dtype == padding.dtype == bool_:
            return logical_and(mask, padding)
        first, second = (where(m, 0.0, -math.inf) if m.dtype == bool_ else m for m in (mask, padding))
        return first + second


def _each_once(inputs: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Apply a change to each distinct tensor once, so that `query is key` still holds."""
    changed = {id(x): change(x) for x in inputs}
    return [changed[id(x)] for x in inputs]
