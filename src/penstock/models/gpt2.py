"""GPT-2: learned positions, norms with biases, and the exact weights of Hugging Face's folders."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError
from penstock.models.attending import Attention, CacheShape
from penstock.models.model import LanguageModel
from penstock.models.registry import family
from penstock.models.settings import Settings
from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.nn.dropping import Dropout
from penstock.nn.layers import Embedding, Linear, Where
from penstock.nn.module import Module
from penstock.nn.normalization import LayerNorm
from penstock.printable import shown
from penstock.tensor.autograd import checkpoint
from penstock.tensor.core import Tensor
from penstock.tensor.creation import zeros
from penstock.tensor.manipulation import permute_dims, reshape

_INITIAL_STD = 0.02  # standard deviation of the initial weights, as in GPT-2
_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")
_LAYERS = {
    "norm1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "norm2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_TABLES = ("transformer.wte", "transformer.wpe")
_TOP = {"tokens": "wte", "positions": "wpe", "norm": "ln_f"}


class CausalSelfAttention(Module):
    """Multi-head attention of every position to itself and earlier positions.

    >>> ps.nn.CausalSelfAttention(8, 2)(ps.zeros((3, 5, 8))).shape
    (3, 5, 8)
    """

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        device: Where = None,
        layer: int = 0,
        attention_dropout: float = 0.0,
    ) -> None:
        """`dropout` is that of the output, and `attention_dropout` that of attention weights."""
        if heads < 1 or width % heads:
            raise ValueError(f"a width of {width} cannot be divided among {heads} heads")
        self.heads, self.layer = heads, layer
        self.qkv = Linear(width, 3 * width, bias, device)
        self.out = Linear(width, width, bias, device)
        self.dropout, self.attention_dropout = Dropout(dropout), Dropout(attention_dropout)

    def forward(self, x: Tensor, attention: Attention | None = None) -> Tensor:
        """The attended values of each position."""
        return self.mixed(self.qkv(x), attention)

    def mixed(self, qkv: Tensor, attention: Attention | None = None) -> Tensor:
        """Like `forward`, from queries, keys and values that are concatenated in the last axis."""
        batch, length, wide = qkv.shape
        width = wide // 3
        parts = reshape(qkv, (batch, length, 3, self.heads, width // self.heads))
        dropped = self.attention_dropout.p if self.training else 0.0
        if (attention is None or not attention.cached) and not dropped:
            mixed = F.packed_attention(parts, is_causal=True)
        elif attention is None or not attention.cached:
            query, key, value = (permute_dims(parts[:, :, at], (0, 2, 1, 3)) for at in range(3))
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True)
            mixed = permute_dims(mixed, (0, 2, 1, 3))
        else:
            queries = attention.taken(self.layer, qkv)[:, :, :width]
            query = reshape(queries, (batch, -1, self.heads, width // self.heads))
            sides = (query, parts[:, :, 1], parts[:, :, 2])
            scale = (width // self.heads) ** -0.5
            query, key, value = (permute_dims(side, (0, 2, 1, 3)) for side in sides)
            mixed = permute_dims(attention.attend(self.layer, query, key, value, scale), (0, 2, 1, 3))
        result: Tensor = self.dropout(self.out(reshape(mixed, (batch, -1, width))))
        return result


class Block(Module):
    """Attention and a feed-forward network, each with a residual connection.

    >>> ps.nn.Block(8, 2)(ps.zeros((3, 5, 8))).shape
    (3, 5, 8)
    """

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        eps: float = 1e-5,
        device: Where = None,
        layer: int = 0,
        attention_dropout: float = 0.0,
    ) -> None:
        self.norm1 = LayerNorm(width, eps, bias=bias, device=device)
        self.attention = CausalSelfAttention(width, heads, dropout, bias, device, layer, attention_dropout)
        self.norm2 = LayerNorm(width, eps, bias=bias, device=device)
        self.up = Linear(width, 4 * width, bias, device)
        self.down = Linear(4 * width, width, bias, device)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, attention: Attention | None = None) -> Tensor:
        """The output of the block, at the positions where it is used."""
        # Norms and activations are cheap to recompute in the backward pass, and large to keep.
        qkv = checkpoint(lambda x: self.attention.qkv(self.norm1(x)), x)
        x = x if attention is None else attention.taken(self.attention.layer, x)
        x = x + self.attention.mixed(qkv, attention)
        wide = checkpoint(lambda x: self.up(self.norm2(x)), x)
        result: Tensor = x + self.dropout(checkpoint(lambda wide: self.down(F.gelu(wide, "tanh")), wide))
        return result


class GPT(LanguageModel):
    """From token ids to the logits of the next token at each position.

    >>> model = ps.nn.GPT(vocab_size=16, context=8, width=8, layers=1, heads=2)
    >>> model(ps.zeros((2, 8), dtype=ps.int32)).shape
    (2, 8, 16)
    """

    def __init__(
        self,
        vocab_size: int,
        context: int = 128,
        width: int = 384,
        layers: int = 6,
        heads: int = 6,
        dropout: float = 0.0,
        bias: bool = True,
        eps: float = 1e-5,
        device: Where = None,
        initialize: bool = True,
        embedding_dropout: float | None = None,
        attention_dropout: float = 0.0,
    ) -> None:
        """`initialize`: draw the weights; otherwise they have to be loaded.

        `dropout` is that of the outputs of attention and feed-forward networks, and of embeddings too unless
        `embedding_dropout` is given; `attention_dropout` is that of attention weights.
        """
        sizes = {
            "vocab_size": vocab_size,
            "context": context,
            "width": width,
            "layers": layers,
            "heads": heads,
        }
        for name, number in sizes.items():
            if number < 1:
                raise ValueError(f"a GPT needs a {name} of 1 or more, and {number} was given")
        self.vocab_size, self.context, self.width, self.heads = vocab_size, context, width, heads
        self.eps = eps
        self.tokens = Embedding(vocab_size, width, device=device)
        self.positions = Embedding(context, width, device=device)
        self.dropout = Dropout(dropout if embedding_dropout is None else embedding_dropout)
        self.blocks = [
            Block(width, heads, dropout, bias, eps, device, layer, attention_dropout)
            for layer in range(layers)
        ]
        self.norm = LayerNorm(width, eps, bias=bias, device=device)
        if initialize:
            self.draw_weights()

    @property
    def cache_shapes(self) -> list[CacheShape]:
        """See `LanguageModel`."""
        return [CacheShape(self.heads, self.width // self.heads)] * len(self.blocks)

    @property
    def head_weight(self) -> Tensor:
        """See `LanguageModel`."""
        return self.tokens.weight if self.lm_head is None else self.lm_head.weight

    def embed(self, token_ids: Tensor, attention: Attention) -> Tensor:
        """See `LanguageModel`."""
        return self.dropout(self.tokens(token_ids) + self.positions(attention.positions))

    def initial_std(self, name: str) -> float | None:
        """See `LanguageModel`."""
        if "norm" in name:
            return None
        is_residual = name.endswith(("out.weight", "down.weight"))
        return _INITIAL_STD / math.sqrt(2 * len(self.blocks)) if is_residual else _INITIAL_STD

    def weight_name(self, name: str) -> tuple[str, bool]:
        """See `LanguageModel`. GPT-2 has linear weights as (inputs, outputs)."""
        path, kind = name.replace(".base_layer.", ".").rsplit(".", 1)  # of a layer with an adapter
        if path == "lm_head":  # quantized
            return name, False
        if path in _TOP:
            return f"transformer.{_TOP[path]}.{kind}", False
        _, number, layer = path.split(".", 2)
        return f"transformer.h.{number}.{_LAYERS[layer]}.{kind}", kind == "weight" and "norm" not in layer

    def file_config(self) -> dict[str, Any]:
        """See `LanguageModel`."""
        own = {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": self.vocab_size,
            "n_positions": self.context,
            "n_embd": self.width,
            "n_layer": len(self.blocks),
            "n_head": self.heads,
            "layer_norm_epsilon": self.eps,
            "activation_function": "gelu_new",
            "resid_pdrop": self.blocks[0].dropout.p,
            "embd_pdrop": self.dropout.p,
            "attn_pdrop": self.blocks[0].attention.attention_dropout.p,
            "tie_word_embeddings": True,
        }
        return {**self.config, **own}

    def file_weights(self) -> list[tuple[str, Tensor, bool]]:
        """See `LanguageModel`. GPT-2 always has biases: they are 0 where this model has none."""
        weights = super().file_weights()
        names = {name for name, _, _ in weights}
        for name, tensor, _ in [*weights]:
            layer, _, kind = name.rpartition(".")
            bias = f"{layer}.bias"
            if kind not in ("weight", "packed") or layer in (*_TABLES, "lm_head"):
                continue
            if bias not in names:
                zero = zeros((tensor.shape[0],), dtype=self.tokens.weight.dtype, device=tensor.device)
                weights.append((bias, zero, False))
        return weights

    def save_pretrained(self, folder: str | Path) -> None:
        """The same as `save`."""
        self.save(folder)


@family("gpt2", architecture="GPT2LMHeadModel", layers="n_layer")
def gpt2(settings: Settings, device: Where) -> GPT:
    """The model of a configuration."""
    settings.require("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
    settings.fixed(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, tie_word_embeddings=True)
    activation = settings.values.get("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        raise CheckpointError(
            f"{settings.where}: the activation {shown(activation)} is not GPT-2's {_ACTIVATIONS}"
        )
    width = settings.integer("n_embd")
    if settings.integer("n_inner", 4 * width) != 4 * width:
        raise settings.error("n_inner", f"4 times n_embd, {4 * width}")
    return GPT(
        vocab_size=settings.integer("vocab_size"),
        context=settings.integer("n_positions"),
        width=width,
        layers=settings.integer("n_layer"),
        heads=settings.integer("n_head"),
        dropout=settings.share("resid_pdrop", 0.1),
        embedding_dropout=settings.share("embd_pdrop", 0.1),
        attention_dropout=settings.share("attn_pdrop", 0.1),
        eps=settings.share("layer_norm_epsilon", 1e-5),
        device=device,
        initialize=False,
    )
