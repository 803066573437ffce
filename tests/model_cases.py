"""Small models of each family: their configurations, and weights that only depend on a name and a shape.

`data/make_models.py` computes with them by `transformers`; tests write them as files and load these.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

REFERENCE = Path(__file__).parent / "data" / "models.npz"
LENGTH = 48  # tokens of the sequences whose logits are stored
POSITIONS = slice(3, LENGTH, 9)  # of the logits that are stored
PROMPTS = (5, 17, 40)  # tokens of the ragged prompts
TOKENS = 200  # that follow each
LORA_REFERENCE = Path(__file__).parent / "data" / "lora.npz"
LORA_TARGETS: dict[str, str | list[str]] = {  # of the cases that PEFT trained
    "gpt2": ["c_attn", "mlp.c_proj"],
    "llama": ["q_proj", "v_proj"],
    "gemma3": "all-linear",
}
LORA_RANK, LORA_ALPHA, LORA_RATE, LORA_STEPS = 4, 6, 0.01, 8

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def scaled(**scaling: Any) -> dict[str, Any]:
    """A Llama with a rotary scaling."""
    return {**LLAMA, "rope_scaling": scaling}


CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 61,
        "n_positions": 256,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
    },
    "llama": LLAMA,
    "llama-biased": {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 12},
    "llama-linear": scaled(rope_type="linear", factor=3.0),
    "llama-dynamic": {**scaled(rope_type="dynamic", factor=8.0), "max_position_embeddings": 32},
    "llama-yarn": scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    "llama-llama3": scaled(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    "llama-longrope": scaled(
        rope_type="longrope",
        short_factor=[1.0, 1.1, 1.2, 1.3],
        long_factor=[1.0, 2.0, 3.5, 5.0],
        original_max_position_embeddings=32,
    ),
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 9},
    "qwen2": {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-window": {
        **LLAMA,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 10},
    "gemma2": {
        **LLAMA,
        "model_type": "gemma2",
        "head_dim": 8,
        "sliding_window": 11,
        "query_pre_attn_scalar": 6,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "pad_token_id": None,  # whose embedding transformers would not train
    },
    "gemma3": {
        **LLAMA,
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "sliding_window": 10,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 8,
        "rope_theta": 100000.0,
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
        "pad_token_id": None,
    },
}


def weight(name: str, shape: Sequence[int]) -> np.ndarray:
    """The values of a weight: large enough that a wrong epsilon or activation shows."""
    draw = np.random.default_rng(zlib.crc32(name.encode())).random(tuple(shape)) * 2 - 1
    if len(shape) == 1:
        return (0.2 * draw + ("norm" in name or "ln_" in name) * (not name.endswith("bias"))).astype(
            np.float32
        )
    scale = 1.0 if "emb" in name or "wte" in name or "wpe" in name else 2.5 * shape[-1] ** -0.5
    return (scale * draw).astype(np.float32)


def tokens(*shape: int) -> np.ndarray:
    """Token ids."""
    return np.random.default_rng(sum(shape)).integers(0, 61, shape)


def probe(name: str, shape: Sequence[int]) -> np.ndarray:
    """What gradients are multiplied with, so that a number says much about all of them."""
    return np.random.default_rng(zlib.crc32(f"probe {name}".encode())).standard_normal(tuple(shape))


def write_folder(folder: Path, case: str, shapes: Mapping[str, Sequence[int]], shards: int = 1) -> Path:
    """A folder in Hugging Face's layout, with the weights in one file or several."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[case]))
    weights = {name: weight(name, shape) for name, shape in shapes.items()}
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    places = {name: f"part-{number % shards}.safetensors" for number, name in enumerate(weights)}
    for file in set(places.values()):
        save_file({name: array for name, array in weights.items() if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder
