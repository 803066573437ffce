"""The blocks that the families after GPT-2 share, and the model that consists of them.

A family is an `Architecture`: sizes, and which of the variants that are known here it has. Weights have the
names of Hugging Face.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.models.attending import Attention, CacheShape
from penstock.models.model import LanguageModel
from penstock.models.rotary import Rotary, rotated
from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.nn.layers import Embedding, Linear, Where
from penstock.nn.module import Module
from penstock.nn.parameter import Parameter
from penstock.tensor.arithmetic import tanh
from penstock.tensor.autograd import checkpoint
from penstock.tensor.core import Tensor
from penstock.tensor.creation import full
from penstock.tensor.manipulation import permute_dims, reshape


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What a transformer of this kind consists of."""

    vocab_size: int
    context: int
    width: int
    hidden: int  # items between the two halves of a feed-forward network
    heads: int
    key_heads: int  # each of which serves several heads of queries
    head_size: int
    rotaries: tuple[Rotary, ...]  # for each layer
    windows: tuple[int | None, ...]  # for each layer, how many positions it attends to; None: all
    eps: float
    tied: bool  # the head has the weights of the embedding
    activation: Callable[[Tensor], Tensor] = F.silu
    qkv_bias: bool = False
    out_bias: bool = False
    feed_forward_bias: bool = False
    head_norms: bool = False  # of queries and keys
    scale: float | None = None  # of scores; None: by the size of a head
    softcap: float | None = None  # of scores
    attention_dropout: float = 0.0  # of attention weights, in training
    logit_softcap: float | None = None
    norms_around: bool = False  # a norm before and after each half of a block; otherwise only before
    norm_offset: float = 0.0  # added to the weights of norms
    embedding_scale: float = 1.0
    initial_std: float = 0.02

    def cache_shapes(self) -> list[CacheShape]:
        """What each layer keeps of a position."""
        return [
            CacheShape(self.key_heads, self.head_size, window, rotary.length or None)
            for window, rotary in zip(self.windows, self.rotaries, strict=True)
        ]


class Norm(Module):
    """Mean square 1 along the last axis, then scaled by the weight plus an offset."""

    def __init__(self, size: int, eps: float, offset: float = 0.0, device: Where = None) -> None:
        self.eps, self.offset = eps, offset
        self.weight = Parameter(full((size,), 1.0 - offset, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """The normalized items."""
        weight = self.weight + self.offset if self.offset else self.weight
        return F.rms_norm(x, self.weight.shape, weight, self.eps)

    def extra_repr(self) -> str:
        """Its sizes."""
        return f"{self.weight.shape}, eps={self.eps}, offset={self.offset}"


class SelfAttention(Module):
    """Attention with rotary positions, in which several heads of queries may share keys and values."""

    def __init__(self, sizes: Architecture, layer: int, device: Where = None) -> None:
        width, queries, keys = sizes.width, sizes.heads, sizes.key_heads
        self.layer, self.heads, self.key_heads, self.head_size = layer, queries, keys, sizes.head_size
        self.rotary, self.window, self.softcap = sizes.rotaries[layer], sizes.windows[layer], sizes.softcap
        self.scale = self.head_size**-0.5 if sizes.scale is None else sizes.scale
        self.dropout = sizes.attention_dropout
        self.q_proj = Linear(width, queries * self.head_size, sizes.qkv_bias, device)
        self.k_proj = Linear(width, keys * self.head_size, sizes.qkv_bias, device)
        self.v_proj = Linear(width, keys * self.head_size, sizes.qkv_bias, device)
        self.o_proj = Linear(queries * self.head_size, width, sizes.out_bias, device)
        norms = sizes.head_norms
        self.q_norm = Norm(self.head_size, sizes.eps, sizes.norm_offset, device) if norms else None
        self.k_norm = Norm(self.head_size, sizes.eps, sizes.norm_offset, device) if norms else None

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """The attended values of each position whose output is used."""
        query = self._heads(self.q_proj(attention.taken(self.layer, x)), self.heads)
        key = self._heads(self.k_proj(x), self.key_heads)
        value = self._heads(self.v_proj(x), self.key_heads)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query = rotated(query, attention.queries(self.layer).angles(self.rotary))
        key = rotated(key, attention.angles(self.rotary))
        limits = (self.scale, self.window, self.softcap)
        dropped = self.dropout if self.training else 0.0
        mixed = attention.attend(self.layer, query, key, value, *limits, dropped)
        batch, _, length, _ = mixed.shape
        return self.o_proj(reshape(permute_dims(mixed, (0, 2, 1, 3)), (batch, length, -1)))

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        batch, length, _ = x.shape
        return permute_dims(reshape(x, (batch, length, heads, self.head_size)), (0, 2, 1, 3))


class FeedForward(Module):
    """Two layers, between which an activation of one product gates another."""

    def __init__(self, sizes: Architecture, device: Where = None) -> None:
        bias = sizes.feed_forward_bias
        self.activation = sizes.activation
        self.gate_proj = Linear(sizes.width, sizes.hidden, bias, device)
        self.up_proj = Linear(sizes.width, sizes.hidden, bias, device)
        self.down_proj = Linear(sizes.hidden, sizes.width, bias, device)

    def forward(self, x: Tensor) -> Tensor:
        """The output of each position."""

        def down(gate: Tensor, up: Tensor) -> Tensor:
            return self.down_proj(self.activation(gate) * up)

        # What is gated is cheap to recompute in the backward pass, and large to keep.
        return checkpoint(down, self.gate_proj(x), self.up_proj(x))


class Block(Module):
    """Attention and a feed-forward network, each with a norm before it and a residual connection."""

    def __init__(self, sizes: Architecture, layer: int, device: Where = None) -> None:
        def norm() -> Norm:
            return Norm(sizes.width, sizes.eps, sizes.norm_offset, device)

        self.input_layernorm = norm()
        self.self_attn = SelfAttention(sizes, layer, device)
        self.post_attention_layernorm = norm()
        if sizes.norms_around:  # then the norm above follows the attention
            self.pre_feedforward_layernorm = norm()
            self.post_feedforward_layernorm = norm()
        self.norms_around = sizes.norms_around
        self.mlp = FeedForward(sizes, device)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """The output of the block, at the positions where it is used."""
        attended = self.self_attn(self.input_layernorm(x), attention)
        x = attention.taken(self.self_attn.layer, x)
        if not self.norms_around:
            x = x + attended
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Transformer(LanguageModel):
    """From token ids to the logits of the next token at each position."""

    def __init__(self, sizes: Architecture, device: Where = None) -> None:
        self.vocab_size, self.context, self.sizes = sizes.vocab_size, sizes.context, sizes
        self.embed_tokens = Embedding(sizes.vocab_size, sizes.width, device=device)
        self.layers = [Block(sizes, layer, device) for layer in range(len(sizes.windows))]
        self.norm = Norm(sizes.width, sizes.eps, sizes.norm_offset, device)
        self.lm_head = None if sizes.tied else Linear(sizes.width, sizes.vocab_size, False, device)

    @property
    def blocks(self) -> list[Any]:  # type: ignore[override]
        """See `LanguageModel`."""
        return self.layers

    @property
    def cache_shapes(self) -> list[CacheShape]:
        """See `LanguageModel`."""
        return self.sizes.cache_shapes()

    @property
    def head_weight(self) -> Tensor:
        """See `LanguageModel`."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def embed(self, token_ids: Tensor, attention: Attention) -> Tensor:
        """See `LanguageModel`."""
        x: Tensor = self.embed_tokens(token_ids)
        return x * self.sizes.embedding_scale if self.sizes.embedding_scale != 1 else x

    def logits(self, features: Tensor) -> Tensor:
        """See `LanguageModel`."""
        logits = super().logits(features)
        cap = self.sizes.logit_softcap
        return logits if cap is None else tanh(logits / cap) * cap

    def loss(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """See `LanguageModel`."""
        if self.sizes.logit_softcap is None:
            return super().loss(token_ids, targets)
        logits = self.logits(reshape(self.features(token_ids), (-1, self.sizes.width)))
        return F.cross_entropy(logits, reshape(targets, (-1,)))

    def initial_std(self, name: str) -> float | None:
        """See `LanguageModel`."""
        return None if "norm" in name else self.sizes.initial_std

    def weight_name(self, name: str) -> tuple[str, bool]:
        """See `LanguageModel`."""
        name = name.replace(".base_layer.", ".")  # of a layer with an adapter
        return (name if name.startswith("lm_head") else f"model.{name}"), False
