"""Gemma 2 and 3 (of text): norms on both sides of each half of a block, and windows in most layers.

Gemma 2 has soft caps, and Gemma 3 norms of queries and keys.
"""

from __future__ import annotations

import math

from penstock.models.blocks import Transformer
from penstock.models.llama import ACTIVATIONS, architecture_of, layer_windows
from penstock.models.registry import family
from penstock.models.rotary import plain, rotary_of
from penstock.models.settings import Settings
from penstock.nn.layers import Where

# What a configuration means that lacks these keys; soft caps that are null are none.
_SOFTCAP, _LOGIT_SOFTCAP = 50.0, 30.0  # of Gemma 2
_BASE, _LOCAL_BASE = 1e6, 10000.0  # of Gemma 3's rotary embeddings: without a window, and with one


@family("gemma2", architecture="Gemma2ForCausalLM")
def gemma2(settings: Settings, device: Where) -> Transformer:
    """The model of a configuration of Gemma 2."""
    layers = settings.integer("num_hidden_layers")
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    softcap = settings.optional_number("attn_logit_softcapping", _SOFTCAP)
    return _gemma(settings, kinds, device, _LOGIT_SOFTCAP, softcap=softcap)


@family("gemma3_text", architecture="Gemma3ForCausalLM")
def gemma3(settings: Settings, device: Where) -> Transformer:
    """The model of a configuration of Gemma 3, whose layers with a window have positions of their own.

    Scores have no soft cap, whatever `attn_logit_softcapping` says: transformers does not heed it here.
    """
    layers, period = settings.integer("num_hidden_layers"), settings.integer("sliding_window_pattern", 6)
    kinds = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]
    head_size, context = settings.integer("head_dim", 256), settings.integer("max_position_embeddings", 2048)
    distant = rotary_of(settings, head_size, context, "full_attention", _BASE)
    if settings.has("rope_parameters"):
        near = rotary_of(settings, head_size, context, "sliding_attention")
    else:
        near = plain(settings.positive("rope_local_base_freq", _LOCAL_BASE), head_size, context)
    windows = layer_windows(settings, kinds)
    rotaries = tuple(distant if window is None else near for window in windows)
    return _gemma(settings, kinds, device, None, head_norms=True, rotaries=rotaries)


def _gemma(
    settings: Settings, kinds: list[str], device: Where, logit_softcap: float | None, **variants: object
) -> Transformer:
    if settings.boolean("use_bidirectional_attention", False):
        raise settings.error("use_bidirectional_attention", "false")
    biased = settings.boolean("attention_bias", False)
    sizes = architecture_of(
        settings,
        windows=layer_windows(settings, kinds),
        head_size=settings.integer("head_dim", 256),
        tied=settings.boolean("tie_word_embeddings", True),
        activation=settings.choice("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS),
        scale=settings.number("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_softcap=settings.optional_number("final_logit_softcapping", logit_softcap),
        qkv_bias=biased,
        out_bias=biased,
        norms_around=True,
        norm_offset=1.0,
        embedding_scale=math.sqrt(settings.integer("hidden_size")),
        **variants,
    )
    return Transformer(sizes, device)
