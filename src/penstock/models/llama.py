"""Llama 2 and 3, and what has their architecture: SmolLM, TinyLlama and others."""

from __future__ import annotations

from typing import Any

from penstock.errors import CheckpointError
from penstock.models.blocks import Architecture, Transformer
from penstock.models.registry import family
from penstock.models.rotary import rotary_of
from penstock.models.settings import Settings
from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.nn.layers import Where

ACTIVATIONS = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, "tanh"),
    "gelu_new": lambda x: F.gelu(x, "tanh"),
}


def architecture_of(settings: Settings, **variants: Any) -> Architecture:
    """The architecture of a configuration with Llama's keys; `variants` differ from Llama's."""
    settings.require("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    width, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    key_heads = settings.integer("num_key_value_heads", heads)
    if heads % key_heads:
        raise settings.error("num_key_value_heads", f"a divisor of {heads}, the number of heads")
    if not (settings.has("head_dim") or "head_size" in variants) and width % heads:
        raise CheckpointError(f"{settings.where}: hidden_size {width} is no multiple of {heads} heads")
    head_size = variants.get("head_size") or settings.integer("head_dim", width // heads)
    context, layers = settings.integer("max_position_embeddings", 2048), settings.integer("num_hidden_layers")
    sizes = {
        "vocab_size": settings.integer("vocab_size"),
        "width": width,
        "hidden": settings.integer("intermediate_size"),
        "heads": heads,
        "key_heads": key_heads,
        "head_size": head_size,
        "windows": (None,) * layers,
        "eps": settings.number("rms_norm_eps", 1e-6),
        "tied": settings.boolean("tie_word_embeddings", False),
        "activation": settings.choice("hidden_act", "silu", ACTIVATIONS),
        "initial_std": settings.number("initializer_range", 0.02),
        "attention_dropout": settings.share("attention_dropout", 0.0),
    }
    if "rotaries" not in variants:
        variants["rotaries"] = (rotary_of(settings, head_size, context),) * layers
    variants["context"] = max(rotary.context for rotary in variants["rotaries"])
    if not variants["context"]:  # a factor of rotary positions may divide it
        raise CheckpointError(f"{settings.where}: the factor of its rotary scaling leaves no position")
    return Architecture(**sizes | variants)


def layer_windows(settings: Settings, kinds: list[str]) -> tuple[int | None, ...]:
    """The window of each layer, of which `layer_types` says, or else `kinds`, whether it has one."""
    given = settings.values.get("layer_types") or kinds
    count = settings.integer("num_hidden_layers")
    if (
        not isinstance(given, list)
        or len(given) != count
        or set(given) - {"sliding_attention", "full_attention"}
    ):
        raise settings.error("layer_types", f"a list of {count} times sliding_attention or full_attention")
    if "sliding_attention" not in given:
        return (None,) * count
    window = settings.integer("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in given)


@family("llama", architecture="LlamaForCausalLM")
def llama(settings: Settings, device: Where) -> Transformer:
    """The model of a configuration."""
    biased = settings.boolean("attention_bias", False)
    sizes = architecture_of(
        settings,
        qkv_bias=biased,
        out_bias=biased,
        feed_forward_bias=settings.boolean("mlp_bias", False),
    )
    return Transformer(sizes, device)
