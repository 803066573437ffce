"""Mistral: a Llama whose layers attend to a window of the latest positions."""

from __future__ import annotations

from penstock.models.blocks import Transformer
from penstock.models.llama import architecture_of
from penstock.models.registry import family
from penstock.models.settings import Settings
from penstock.nn.layers import Where


@family("mistral", architecture="MistralForCausalLM")
def mistral(settings: Settings, device: Where) -> Transformer:
    """The model of a configuration; later versions of Mistral have no window."""
    window = settings.integer("sliding_window") if settings.has("sliding_window") else None
    layers = settings.integer("num_hidden_layers")
    return Transformer(architecture_of(settings, windows=(window,) * layers), device)
