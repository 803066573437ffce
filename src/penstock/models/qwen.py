"""Qwen 2, 2.5 and 3: Llamas with biases of queries, keys and values, or with norms of queries and keys."""

from __future__ import annotations

from penstock.models.blocks import Transformer
from penstock.models.llama import architecture_of, layer_windows
from penstock.models.registry import family
from penstock.models.settings import Settings
from penstock.nn.layers import Where

_HEAD_SIZE = 128  # of Qwen 3, where a configuration lacks it


@family("qwen2", architecture="Qwen2ForCausalLM")
def qwen2(settings: Settings, device: Where) -> Transformer:
    """The model of a configuration of Qwen 2 or 2.5."""
    return Transformer(architecture_of(settings, windows=_windows(settings), qkv_bias=True), device)


@family("qwen3", architecture="Qwen3ForCausalLM")
def qwen3(settings: Settings, device: Where) -> Transformer:
    """The model of a configuration of Qwen 3."""
    biased = settings.boolean("attention_bias", False)
    sizes = architecture_of(
        settings,
        head_size=settings.integer("head_dim", _HEAD_SIZE),
        windows=_windows(settings),
        head_norms=True,
        qkv_bias=biased,
        out_bias=biased,
    )
    return Transformer(sizes, device)


def _windows(settings: Settings) -> tuple[int | None, ...]:
    """Layers from `max_window_layers` on have a window, if `use_sliding_window` says so."""
    layers = settings.integer("num_hidden_layers")
    null = not settings.has("sliding_window") and "sliding_window" in settings.values
    if null or not settings.boolean("use_sliding_window", False):
        return (None,) * layers
    first = settings.integer("max_window_layers", 28, least=0)
    kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    return layer_windows(settings, kinds)
