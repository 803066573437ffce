"""GGUF, the files of llama.cpp: a configuration from the metadata, and weights, dequantized or packed.

The `gguf` package maps the file and knows its formats. Families are Llama, which is
Mistral too, and Qwen 2 and 3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from penstock.errors import CheckpointError
from penstock.files import require_regular
from penstock.graph.dtypes import DType
from penstock.graph.quantization import SHIFTS
from penstock.printable import shown

_FAMILIES = ("llama", "qwen2", "qwen3")
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_BITS = {"Q4_0": 4, "Q8_0": 8}  # formats of blocks of 32 integers with a scale
BLOCK = 32
# Tokens after which nothing follows: of a text, and of a turn in a conversation.
_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
# Metadata that changes what is computed, and the values that mean what these families compute.
_PLAIN: dict[str, Any] = {
    "split.count": 1,
    "{arch}.rope.scaling.attn_factor": 1,
    "{arch}.rope.scaling.yarn_attn_factor": 1,
    "{arch}.rope.scaling.yarn_ext_factor": 1,
    "{arch}.rope.scaling.yarn_log_multiplier": 0,
    "{arch}.attention.causal": True,
    "{arch}.attention.scale": 0,
    "{arch}.attn_logit_softcapping": 0,
    "{arch}.final_logit_softcapping": 0,
    "{arch}.embedding_scale": 1,
    "{arch}.residual_scale": 1,
    "{arch}.logit_scale": 1,
}
_FACTORS = "rope_freqs.weight"  # by which Llama 3's frequencies are divided


@dataclass(frozen=True)
class PackedTensor:
    """A tensor in a GGUF file."""

    shape: tuple[int, ...]
    read: Callable[[], npt.NDArray[Any]]
    bits: int = 0  # of its integers, if these can stay packed
    words: Callable[[], npt.NDArray[np.uint32]] | None = None  # its integers, packed as quantized layers do
    scales: Callable[[], npt.NDArray[Any]] | None = None  # of each block of 32

    def array(self) -> npt.NDArray[Any]:
        """Its values: of the dtype that was asked for, or bfloat16 if the file has it, and else float16."""
        return self.read()


def read_gguf(path: Path, dtype: DType | None = None) -> tuple[dict[str, Any], dict[str, PackedTensor]]:
    """The configuration of a file with Hugging Face's keys, and its tensors by Hugging Face's names.

    These are of `dtype`, or of 16 bits.
    """
    try:
        import gguf
    except ImportError:
        raise CheckpointError("GGUF files need the gguf package: pip install 'penstock[gguf]'") from None
    try:
        require_regular(path)
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    config = _config(path, reader)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    kinds = {tensor.tensor_type.name for tensor in reader.tensors}
    half = ml_dtypes.bfloat16 if "BF16" in kinds else np.float16
    half = half if dtype is None else dtype.numpy
    tensors: dict[str, PackedTensor] = {}
    for tensor in reader.tensors:
        match = _NAME.fullmatch(tensor.name)
        if tensor.name == _FACTORS:
            continue
        if match is None or match[2] not in (TOP_NAMES if match[1] is None else LAYER_NAMES):
            raise CheckpointError(f"{path} has a tensor that its family does not: {shown(tensor.name)}")
        name = TOP_NAMES[match[2]] if match[1] is None else f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}"
        rotated = heads.get(match[2], 0) if config["model_type"] == "llama" else 0
        shape = tuple(int(size) for size in reversed(tensor.shape))
        tensors[f"{name}.{match[3]}"] = PackedTensor(
            shape,
            partial(_values, path, tensor, rotated, half),
            _BITS.get(tensor.tensor_type.name, 0),
            partial(_words, tensor, rotated),
            partial(_scales, tensor, rotated, half),
        )
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    return config, tensors


def _config(path: Path, reader: Any) -> dict[str, Any]:
    fields = {name: field.contents() for name, field in reader.fields.items()}
    family = fields.get("general.architecture")
    if family not in _FAMILIES:
        raise CheckpointError(
            f"{path} has the architecture {shown(family)}, and {', '.join(_FAMILIES)} are read from GGUF"
        )
    config: dict[str, Any] = {"model_type": family}
    for name, key in _SIZES.items():
        if (value := fields.get(f"{family}.{name}")) is not None:
            config[key] = value
    for name, plain in _PLAIN.items():
        key = name.format(arch=family)
        if (value := fields.get(key, plain)) != plain:
            raise CheckpointError(f"{path} has {key} = {shown(value)}, which is not supported; {plain} is")
    rope = {
        key.removeprefix(f"{family}.rope."): value
        for key, value in fields.items()
        if key.startswith(f"{family}.rope.")
    }
    if scaling := _scaling(path, rope, config.get("max_position_embeddings")):
        config["rope_scaling"] = scaling
    ends = [fields[name] for name in _ENDS if isinstance(fields.get(name), int)]
    if ends:
        config["eos_token_id"] = ends
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if _FACTORS in tensors:
        factors = [float(factor) for factor in tensors[_FACTORS].data]
        config["rope_scaling"] = {
            "rope_type": "longrope",  # with the same factors for all lengths
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": config.get("max_position_embeddings"),
        }
    if "token_embd.weight" in tensors:
        config["vocab_size"] = int(tensors["token_embd.weight"].shape[-1])
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    missing = [key for key in (*_SIZES.values(), "vocab_size") if key not in config]
    if set(missing) - {"head_dim", "rope_theta"}:
        raise CheckpointError(f"{path} lacks the metadata of {', '.join(missing)}")
    rotated, size = fields.get(f"{family}.rope.dimension_count"), config.get("head_dim")
    if isinstance(rotated, int) and (
        rotated * config["num_attention_heads"] != config["hidden_size"] if size is None else rotated != size
    ):
        raise CheckpointError(f"{path} rotates {rotated} items of each head, and only whole heads can be")
    return config


def _scaling(path: Path, rope: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """How rotary embeddings are scaled, with Hugging Face's keys; empty: not at all."""
    factor = float(rope.get("scaling.factor", rope.get("scale_linear", 0.0))) or 1.0  # 0 is none in llama.cpp
    kind = rope.get("scaling.type", "linear")  # as llama.cpp has it where a factor stands alone
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(f"{path} has the rotary scaling {shown(kind)}; linear and yarn are known")
    if kind == "none" or factor == 1:
        return {}
    return {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": rope.get("scaling.original_context_length", context),
        "beta_fast": rope.get("scaling.yarn_beta_fast", 32.0),
        "beta_slow": rope.get("scaling.yarn_beta_slow", 1.0),
    }


def _values(path: Path, tensor: Any, heads: int, half: npt.DTypeLike) -> npt.NDArray[Any]:
    """The values of a tensor; `heads` of queries or keys are brought from llama.cpp's order to ours.

    llama.cpp turns neighbouring items of a head, and Hugging Face's files have the first halves of all pairs
    before the second.
    """
    from gguf import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        kind = tensor.tensor_type.name
        raise CheckpointError(f"{path}: {tensor.name} is {kind}, which gguf does not dequantize") from None
    values = values.reshape([int(size) for size in reversed(tensor.shape)])
    return _in_halves(values, heads).astype(half)


def _in_halves(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    if not heads:
        return rows
    return rows.reshape(heads, len(rows) // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _blocks(tensor: Any, heads: int) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor's blocks, (rows, blocks, bytes): a float16 scale and the integers."""
    columns, rows = (int(size) for size in tensor.shape)
    return _in_halves(tensor.data.reshape(rows, -1), heads).reshape(rows, columns // BLOCK, -1)


def _scales(tensor: Any, heads: int, half: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.ascontiguousarray(_blocks(tensor, heads)[..., :2]).view(np.float16)[..., 0].astype(half)


def _words(tensor: Any, heads: int) -> npt.NDArray[np.uint32]:
    """The integers as quantized layers have them, of which none is negative."""
    integers = _blocks(tensor, heads)[..., 2:]
    if _BITS[tensor.tensor_type.name] == 8:
        packed = integers ^ 0x80
    else:  # a byte has one of the first 16 integers of a block, and one of the last
        numbers = np.concatenate([integers & 15, integers >> 4], axis=-1)
        words = numbers.reshape(*numbers.shape[:2], -1, len(SHIFTS[4])).astype(np.uint32)
        packed = (words << np.array(SHIFTS[4], np.uint32)).sum(axis=-1, dtype=np.uint32)
    return np.ascontiguousarray(packed).reshape(len(packed), -1).view(np.uint32)
