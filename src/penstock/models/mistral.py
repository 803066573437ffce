"""Mistral: a Llama whose layers attend to a window of the latest positions."""

from __future__ import annotations

from penstock.models.blocks import Transformer
from penstock.models.llama import architecture_of
from penstock.models.registry import family
from penstock.models.settings import Settings
from penstock.nn.layers import Where


@family("mistral", architecture="MistralForCausalLM")
def mistral(settings: Settings, device: Where) -> Transformer:
    """The model of a configuration; later versions of Mistral have no window: it is null."""
    windowed = settings.has("sliding_window") or "sliding_window" not in settings.values
    window = settings.integer("sliding_window", 4096) if windowed else None
    layers = settings.integer("num_hidden_layers")
    return Transformer(architecture_of(settings, windows=(window,) * layers), device)
