"""Sizes of models by name: configurations with Hugging Face's keys, of published models and of tiny ones.

They say what a model consists of, and have no weights.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _gpt2(width: int, layers: int, heads: int, context: int = 1024) -> Config:
    return {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": context,
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _llama(
    width: int, hidden: int, layers: int, heads: int, key_heads: int, vocab_size: int, **more: Any
) -> Config:
    """The keys that all families but GPT-2 have; `more` are further keys, or other values."""
    return {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "tie_word_embeddings": True,
        **more,
    }


_LLAMA2: Config = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
_LLAMA3: Config = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
_SMOLLM: Config = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0}
_MISTRAL: Config = {
    "model_type": "mistral",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
}
_QWEN2: Config = {"model_type": "qwen2", "max_position_embeddings": 32768, "rope_theta": 1000000.0}
_QWEN3: Config = {
    "model_type": "qwen3",
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "head_dim": 128,
}
_GEMMA2: Config = {
    "model_type": "gemma2",
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3: Config = {
    "model_type": "gemma3_text",
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "sliding_window": 512,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}
_TINY: Config = {"max_position_embeddings": 256, "head_dim": 16}
_TINY_GEMMA: Config = {**_TINY, "sliding_window": 64, "query_pre_attn_scalar": 16}
_TINY_SIZES = (64, 192, 2, 4, 2, 2048)

SIZES: dict[str, Config] = {
    "gpt2-tiny": _gpt2(64, 2, 4, 256),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "llama-tiny": _llama(*_TINY_SIZES, **_LLAMA3 | _TINY),
    "llama-1b": _llama(2048, 8192, 16, 32, 8, 128256, **_LLAMA3),
    "llama-3b": _llama(3072, 8192, 28, 24, 8, 128256, **_LLAMA3),
    "llama-8b": _llama(4096, 14336, 32, 32, 8, 128256, **_LLAMA3 | {"tie_word_embeddings": False}),
    "llama2-7b": _llama(4096, 11008, 32, 32, 32, 32000, **_LLAMA2),
    "tinyllama-1.1b": _llama(2048, 5632, 22, 32, 4, 32000, **_LLAMA2 | {"max_position_embeddings": 2048}),
    "smollm-135m": _llama(576, 1536, 30, 9, 3, 49152, **_SMOLLM),
    "smollm-360m": _llama(960, 2560, 32, 15, 5, 49152, **_SMOLLM),
    "smollm-1.7b": _llama(2048, 8192, 24, 32, 32, 49152, **_SMOLLM),
    "mistral-tiny": _llama(*_TINY_SIZES, **_MISTRAL | _TINY | {"sliding_window": 64}),
    "mistral-7b": _llama(4096, 14336, 32, 32, 8, 32000, **_MISTRAL),
    "qwen2.5-tiny": _llama(*_TINY_SIZES, **_QWEN2 | _TINY),
    "qwen2.5-0.5b": _llama(896, 4864, 24, 14, 2, 151936, **_QWEN2),
    "qwen2.5-1.5b": _llama(1536, 8960, 28, 12, 2, 151936, **_QWEN2),
    "qwen2.5-3b": _llama(2048, 11008, 36, 16, 2, 151936, **_QWEN2),
    "qwen2.5-7b": _llama(3584, 18944, 28, 28, 4, 152064, **_QWEN2 | {"tie_word_embeddings": False}),
    "qwen3-tiny": _llama(*_TINY_SIZES, **_QWEN3 | _TINY),
    "qwen3-0.6b": _llama(1024, 3072, 28, 16, 8, 151936, **_QWEN3),
    "qwen3-1.7b": _llama(2048, 6144, 28, 16, 8, 151936, **_QWEN3),
    "qwen3-4b": _llama(2560, 9728, 36, 32, 8, 151936, **_QWEN3),
    "qwen3-8b": _llama(4096, 12288, 36, 32, 8, 151936, **_QWEN3 | {"tie_word_embeddings": False}),
    "gemma2-tiny": _llama(*_TINY_SIZES, **_GEMMA2 | _TINY_GEMMA),
    "gemma2-2b": _llama(2304, 9216, 26, 8, 4, 256000, **_GEMMA2),
    "gemma3-tiny": _llama(*_TINY_SIZES, **_GEMMA3 | _TINY_GEMMA | {"sliding_window_pattern": 2}),
    "gemma3-270m": _llama(640, 2048, 18, 4, 1, 262144, **_GEMMA3),
    "gemma3-1b": _llama(1152, 6912, 26, 4, 1, 262144, **_GEMMA3),
}


def sized(name: str, vocab_size: int, context: int = 0, dropout: float = 0.0) -> dict[str, Any]:
    """The configuration of a named size, with another vocabulary, and another context unless that is 0.

    GPT-2 may have dropout, of embeddings and residual paths.
    """
    config = SIZES[name]
    changes: dict[str, Any] = {"vocab_size": vocab_size}
    if context:
        changes[context_key(config)] = context
    if config["model_type"] == "gpt2":
        changes |= {"resid_pdrop": dropout, "embd_pdrop": dropout}
    return {**config, **changes}


def context_key(config: Config) -> str:
    """The key of the context in a configuration."""
    return "n_positions" if config["model_type"] == "gpt2" else "max_position_embeddings"
