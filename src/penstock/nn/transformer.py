"""Transformer layers and stacks of layers, with PyTorch's names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.nn.attention import MultiheadAttention
from penstock.nn.containers import ModuleList
from penstock.nn.dropping import Dropout
from penstock.nn.layers import Linear, Where
from penstock.nn.module import Module
from penstock.nn.normalization import LayerNorm
from penstock.tensor.core import Tensor

Activation = str | Callable[[Tensor], Tensor]


class _Layer(Module):
    """The base of both layers: self-attention and a feed-forward network, each with a residual connection."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Where = None,
    ) -> None:
        self.self_attn = MultiheadAttention(
            d_model, nhead, dropout, bias, batch_first=batch_first, device=device
        )
        self._add_attention(d_model, nhead, dropout, bias, batch_first, device)
        self.linear1 = Linear(d_model, dim_feedforward, bias, device)
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias, device)
        for number in range(1, self._paths + 1):
            setattr(self, f"norm{number}", LayerNorm(d_model, layer_norm_eps, bias=bias, device=device))
            setattr(self, f"dropout{number}", Dropout(dropout))
        self.norm_first = norm_first
        self.activation = activation

    _paths = 2  # residual connections

    def _add_attention(self, *args: Any) -> None:
        """Add cross-attention, in layers that have it."""

    def _residual(self, number: int, x: Tensor, path: Callable[[Tensor], Tensor]) -> Tensor:
        """x plus a path, with the norm and the dropout of a number."""
        norm, dropout = getattr(self, f"norm{number}"), getattr(self, f"dropout{number}")
        if self.norm_first:
            result: Tensor = x + dropout(path(norm(x)))
        else:
            result = norm(x + dropout(path(x)))
        return result

    def _attend(self, x: Tensor, mask: Tensor | None, padding: Tensor | None, is_causal: bool) -> Tensor:
        mixed: Tensor = self.self_attn(x, x, x, padding, False, mask, is_causal=is_causal)[0]
        return mixed

    def _feed_forward(self, x: Tensor) -> Tensor:
        wide = self.linear1(x)
        active = named(self.activation)(wide)
        result: Tensor = self.linear2(self.dropout(active))
        return result


def named(activation: Activation) -> Callable[[Tensor], Tensor]:
    """An activation function, given as a function or by name."""
    return F.named_activation(activation) if isinstance(activation, str) else activation


class TransformerEncoderLayer(_Layer):
    """Self-attention, then a feed-forward network.

    >>> ps.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)(ps.zeros((3, 5, 8))).shape
    (3, 5, 8)
    """

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """The output of the layer."""
        x = self._residual(1, src, lambda x: self._attend(x, src_mask, src_key_padding_mask, is_causal))
        return self._residual(2, x, self._feed_forward)


class TransformerDecoderLayer(_Layer):
    """Self-attention, attention to `memory`, then a feed-forward network.

    >>> layer = ps.nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
    >>> layer(ps.zeros((3, 5, 8)), ps.zeros((3, 7, 8))).shape
    (3, 5, 8)
    """

    _paths = 3

    def _add_attention(self, *args: Any) -> None:
        d_model, nhead, dropout, bias, batch_first, device = args
        self.multihead_attn = MultiheadAttention(
            d_model, nhead, dropout, bias, batch_first=batch_first, device=device
        )

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """The output of the layer."""

        def other(x: Tensor) -> Tensor:
            mixed: Tensor = self.multihead_attn(
                x, memory, memory, memory_key_padding_mask, False, memory_mask, is_causal=memory_is_causal
            )[0]
            return mixed

        x = self._residual(1, tgt, lambda x: self._attend(x, tgt_mask, tgt_key_padding_mask, tgt_is_causal))
        x = self._residual(2, x, other)
        return self._residual(3, x, self._feed_forward)


class _Stack(Module):
    """Copies of a layer, which start with the same weights, and an optional norm after them."""

    def __init__(self, layer: Module, num_layers: int, norm: Module | None = None) -> None:
        if num_layers < 1:
            raise ValueError(f"a stack needs 1 layer or more, and {num_layers} was given")
        self.layers = ModuleList([copy.deepcopy(layer) for _ in range(num_layers)])
        self.norm = norm

    def _run(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, *args, **kwargs)
        return x if self.norm is None else self.norm(x)


class TransformerEncoder(_Stack):
    """A stack of encoder layers.

    >>> layer = ps.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> ps.nn.TransformerEncoder(layer, 2)(ps.zeros((3, 5, 8))).shape
    (3, 5, 8)
    """

    def __init__(self, encoder_layer: Module, num_layers: int, norm: Module | None = None) -> None:
        super().__init__(encoder_layer, num_layers, norm)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """The output of the last layer."""
        return self._run(src, mask, src_key_padding_mask, is_causal)


class TransformerDecoder(_Stack):
    """A stack of decoder layers.

    >>> layer = ps.nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
    >>> ps.nn.TransformerDecoder(layer, 2)(ps.zeros((3, 5, 8)), ps.zeros((3, 7, 8))).shape
    (3, 5, 8)
    """

    def __init__(self, decoder_layer: Module, num_layers: int, norm: Module | None = None) -> None:
        super().__init__(decoder_layer, num_layers, norm)

    def forward(self, tgt: Tensor, memory: Tensor, *masks: Tensor | None, **more: Any) -> Tensor:
        """The output of the last layer; masks are those of `TransformerDecoderLayer`."""
        return self._run(tgt, memory, *masks, **more)
