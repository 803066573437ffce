"""GGUF files: the same model as from Hugging Face's layout, and the `gguf` package's own dequantization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import model_cases as cases
import numpy as np
import pytest

import penstock as ps
from penstock.errors import CheckpointError
from penstock.nn import QuantizedLinear

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
BLOCK_BYTES = {"Q4_K": 144, "Q6_K": 210}  # of 256 items


def renamed(name: str) -> str:
    path, kind = name.rsplit(".", 1)
    if path.startswith("model.layers."):
        _, _, number, layer = path.split(".", 3)
        return f"blk.{number}.{NAMES[layer]}.{kind}"
    return f"{NAMES[path]}.{kind}"


def writer(path: Path, config: dict[str, Any]) -> gguf.GGUFWriter:
    made = gguf.GGUFWriter(path, config["model_type"])
    made.add_block_count(config["num_hidden_layers"])
    made.add_context_length(config["max_position_embeddings"])
    made.add_embedding_length(config["hidden_size"])
    made.add_feed_forward_length(config["intermediate_size"])
    made.add_head_count(config["num_attention_heads"])
    made.add_head_count_kv(config["num_key_value_heads"])
    made.add_layer_norm_rms_eps(config["rms_norm_eps"])
    made.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        made.add_key_length(config["head_dim"])
    return made


def finish(made: gguf.GGUFWriter) -> None:
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()


def in_pairs(array: np.ndarray, heads: int) -> np.ndarray:
    """Queries or keys in the order of llama.cpp, as its converter of Llamas writes them."""
    rows = array.shape[0]
    return array.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3"])
def test_a_model_is_the_same_as_from_a_folder(case: str, tmp_path: Path) -> None:
    config = cases.CONFIGS[case]
    shapes = json.loads(str(np.load(cases.REFERENCE)[f"{case}.about"]))["shapes"]
    made = writer(tmp_path / "model.gguf", config)
    for name, shape in shapes.items():
        array = cases.weight(name, shape)
        if config["model_type"] == "llama" and ("q_proj" in name or "k_proj" in name):
            key = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            array = in_pairs(array, config[key])
        made.add_tensor(renamed(name), array)
    finish(made)
    model = ps.models.load(tmp_path / "model.gguf", device="host")
    assert {tensor.dtype for tensor in model.parameters()} == {ps.float16}
    folder = cases.write_folder(tmp_path / "folder", case, shapes)
    wanted = ps.models.load(folder, device="host", dtype="float16").state_dict()
    result = model.state_dict()
    assert result.keys() == wanted.keys()
    for name, array in result.items():
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)
    ids = ps.asarray(cases.tokens(1, 20), device="host")
    logits = ps.models.load(tmp_path / "model.gguf", device="host", dtype="float32")(ids).numpy()
    exact = ps.models.load(folder, device="host")(ids).numpy()
    assert np.abs(logits - exact).max() < 0.05, "weights are rounded to float16"


def small(path: Path, **config: Any) -> gguf.GGUFWriter:
    """A file of a Llama, to which metadata can be added."""
    made = writer(path, {**cases.LLAMA, "num_hidden_layers": 1, **config})
    model = ps.models.build({**cases.LLAMA, "num_hidden_layers": 1}, device="host")
    for name, tensor in model.named_parameters():
        made.add_tensor(renamed(model.weight_name(name)[0]), tensor.numpy() * 1e5)
    return made


def test_weights_have_all_bits_of_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    finish(small(tmp_path / "model.gguf"))
    model = ps.models.load(tmp_path / "model.gguf", device="host", dtype="float32")
    assert (model.norm.weight.numpy() == 1e5).all(), "float16 ends at 65504"


def test_generation_stops_at_the_tokens_that_the_file_names(tmp_path: Path) -> None:
    made = small(tmp_path / "model.gguf")
    made.add_eos_token_id(7)
    made.add_eot_token_id(9)
    finish(made)
    model = ps.models.load(tmp_path / "model.gguf", device="host", dtype="float32")
    third = model.generate([3, 4], 3, temperature=0, stop_tokens=()).ids[2]
    assert model.config["eos_token_id"] == [7, 9]
    model.config = {**model.config, "eos_token_id": [third]}
    assert model.generate([3, 4], 9, temperature=0).finish_reason == "stop"


def test_rotary_positions_that_are_not_supported_are_named(tmp_path: Path) -> None:
    made = small(tmp_path / "model.gguf")
    made.add_rope_dimension_count(4)
    finish(made)
    with pytest.raises(CheckpointError, match="rotates 4 items of each head, and only whole heads"):
        ps.models.load(tmp_path / "model.gguf")
    made = small(tmp_path / "other.gguf")
    made.add_rope_scaling_attn_factors(0.5)
    finish(made)
    with pytest.raises(CheckpointError, match=r"has llama.rope.scaling.attn_factor = 0.5, which is not"):
        ps.models.load(tmp_path / "other.gguf")


@pytest.mark.parametrize(
    ("key", "value"), [("split.count", 2), ("llama.attention.scale", 0.5), ("llama.attention.causal", False)]
)
def test_metadata_of_other_computations_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    made = small(tmp_path / "model.gguf")
    add = {int: made.add_uint32, float: made.add_float32, bool: made.add_bool}[type(value)]
    add(key, value)
    finish(made)
    with pytest.raises(CheckpointError, match=f"has {key} = {value}, which is not supported"):
        ps.models.load(tmp_path / "model.gguf")


@pytest.mark.parametrize("key", ["scaling.factor", "scale_linear"])
def test_a_rotary_factor_without_a_type_is_linear(key: str, tmp_path: Path) -> None:
    made = small(tmp_path / "model.gguf")
    made.add_float32(f"llama.rope.{key}", 3.0)
    finish(made)
    model: Any = ps.models.load(tmp_path / "model.gguf", device="host", dtype="float32")
    wanted: Any = ps.models.build(
        {**model.config, "rope_scaling": {"rope_type": "linear", "factor": 3.0}}, device="host"
    )
    assert model.sizes.rotaries == wanted.sizes.rotaries
    plain: Any = ps.models.build({**model.config, "rope_scaling": None}, device="host")
    assert model.sizes.rotaries != plain.sizes.rotaries


def packed(kind: str, rows: int, columns: int) -> np.ndarray:
    """The bytes of a quantized tensor, with scales that are finite."""
    draw = np.random.default_rng(1)
    values = draw.normal(0, 0.1, (rows, columns)).astype(np.float32)
    if kind not in BLOCK_BYTES:
        return gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    blocks = draw.integers(0, 256, (rows, columns // 256, BLOCK_BYTES[kind])).astype(np.uint8)
    scale = np.frombuffer(np.array([0.01, 0.02], np.float16).tobytes(), np.uint8)
    if kind == "Q4_K":
        blocks[..., :4] = scale
    else:
        blocks[..., -2:] = scale[:2]
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def test_weights_are_those_that_gguf_dequantizes(kind: str, tmp_path: Path) -> None:
    config = {
        **cases.LLAMA,
        "model_type": "qwen3",
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }
    made = writer(tmp_path / "model.gguf", config)
    wanted = {}
    quantization = gguf.GGMLQuantizationType[kind]
    model = ps.models.build({**config, "vocab_size": 8, "tie_word_embeddings": True}, device="host")
    for name, tensor in model.named_parameters():
        theirs = renamed(model.weight_name(name)[0])
        if tensor.ndim == 1:
            array = np.linspace(0.5, 1.5, tensor.shape[0], dtype=np.float32)
            made.add_tensor(theirs, array)
            wanted[name] = array
        else:
            data = packed(kind, *tensor.shape)
            made.add_tensor(theirs, data, raw_dtype=quantization)
            wanted[name] = gguf.dequantize(data, quantization).reshape(tensor.shape)
    finish(made)
    loaded = ps.models.load(tmp_path / "model.gguf", device="host")
    half = ps.bfloat16 if kind == "BF16" else ps.float16
    assert {tensor.dtype for tensor in loaded.parameters()} == {half}
    for name, array in loaded.state_dict().items():
        np.testing.assert_array_equal(array, wanted[name].astype(half.numpy), err_msg=name)
    packed_model = ps.models.load(tmp_path / "model.gguf", device="host", quantized=True)
    layers = {path: part for path, part in packed_model.named_modules() if isinstance(part, QuantizedLinear)}
    assert len(layers) == (8 if kind in ("Q8_0", "Q4_0") else 0), "7 of the block, and the head"
    for path, layer in layers.items():
        layer.scales = layer.scales.astype("float32")  # as gguf multiplies
        name = "embed_tokens" if path == "lm_head" else path
        np.testing.assert_array_equal(layer.weight.numpy(), wanted[f"{name}.weight"], err_msg=path)
    if layers:
        ids = ps.asarray([[1, 2, 3]], device="host")
        again = ps.models.load(tmp_path / "model.gguf", device="host", quantized=True, dtype="float32")
        exact = ps.models.load(tmp_path / "model.gguf", device="host", dtype="float32")
        np.testing.assert_allclose(again(ids).numpy(), exact(ids).numpy(), rtol=1e-3, atol=2e-2)


def test_queries_and_keys_that_stay_packed_are_reordered(tmp_path: Path) -> None:
    config = {**cases.LLAMA, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96}
    made = writer(tmp_path / "model.gguf", config)
    model = ps.models.build({**config, "vocab_size": 8, "tie_word_embeddings": True}, device="host")
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, tensor in model.named_parameters():
        array = np.random.default_rng(2).normal(0, 0.1, tensor.shape).astype(np.float32)
        if tensor.ndim == 1:
            made.add_tensor(renamed(model.weight_name(name)[0]), array)
        else:
            made.add_tensor(renamed(model.weight_name(name)[0]), gguf.quantize(array, kind), raw_dtype=kind)
    finish(made)
    plain = ps.models.load(tmp_path / "model.gguf", device="host").state_dict()
    loaded = ps.models.load(tmp_path / "model.gguf", device="host", quantized=True)
    for path, layer in loaded.named_modules():
        if isinstance(layer, QuantizedLinear) and path != "lm_head":
            np.testing.assert_array_equal(layer.weight.numpy(), plain[f"{path}.weight"], err_msg=path)


def test_other_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(CheckpointError, match=r"model.gguf cannot be read"):
        ps.models.load(path)
    path.write_bytes(b"no model at all" * 9)
    with pytest.raises(CheckpointError, match=r"model.gguf cannot be read"):
        ps.models.load(path)
    made = gguf.GGUFWriter(path, "mamba")
    made.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    finish(made)
    with pytest.raises(CheckpointError, match="the architecture 'mamba', and llama, qwen2, qwen3 are read"):
        ps.models.load(path)
