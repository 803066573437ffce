"""Families of language models against `transformers`, on small models: logits to generated tokens.

`data/make_models.py` wrote what `transformers` computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_cases as cases
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import penstock as ps
from penstock.errors import CheckpointError
from penstock.models import LanguageModel, weights
from penstock.models.attending import whole

CASES = list(cases.CONFIGS)
# Not these: scalings of rotary embeddings that are other constants in the same kernels, whatever the length
# is, and what Qwen2 (biases) and Mistral (a window) have, too.
_LIKE_OTHERS = ("llama-linear", "llama-yarn", "llama-llama3", "llama-biased", "qwen2-window")
ON_DEVICE = [case for case in CASES if case not in _LIKE_OTHERS]
TRAINED = [case for case in ON_DEVICE if case in ("qwen3", "gemma2")]  # `test_reference.py` has a GPT-2
FEW = ["llama", "gemma3"]  # in the quick suite
Load = Callable[..., LanguageModel]


def about(case: str) -> dict[str, Any]:
    return json.loads(str(np.load(cases.REFERENCE)[f"{case}.about"]))


@pytest.fixture
def loaded(tmp_path: Path) -> Load:
    def load(case: str, shards: int = 1, **options: Any) -> LanguageModel:
        folder = cases.write_folder(tmp_path / case, case, about(case)["shapes"], shards)
        return ps.models.load(folder, **options)

    return load


def check_logits(model: LanguageModel, case: str) -> None:
    wanted = np.load(cases.REFERENCE)[f"{case}.logits"]
    ids = ps.asarray(cases.tokens(2, cases.LENGTH), device=model.head_weight.device)
    result = model(ids).numpy()[:, cases.POSITIONS]
    assert np.abs(result - wanted).max() < 6 * about(case)["noise"], "about as exact as PyTorch"


def check_gradients(model: LanguageModel, case: str) -> None:
    """The loss, and for each gradient its norm and a product with numbers that are known."""
    array, known = cases.tokens(2, cases.LENGTH), about(case)
    # Of whole sequences, as scalings may depend on their length; nothing follows the last token.
    targets = np.concatenate([array[:, 1:], np.full((2, 1), -100)], axis=1)
    ids, wanted = (ps.asarray(values, device=model.head_weight.device) for values in (array, targets))
    loss = model.loss(ids, wanted)
    loss.backward()
    assert loss.item() == pytest.approx(known["loss"], rel=1e-5)
    gradients = known["gradients"]
    for name, tensor in model.named_parameters():
        theirs, transposed = model.weight_name(name)
        gradient = tensor.grad.numpy().T if transposed else tensor.grad.numpy()
        dot, norm = gradients.pop(theirs)
        assert np.linalg.norm(gradient) == pytest.approx(norm, rel=1e-4), name
        probed = (gradient * cases.probe(theirs, gradient.shape)).sum()
        assert probed == pytest.approx(dot, abs=1e-3 * norm), name
    assert not gradients, "the model has all weights of the reference"


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, loaded: Load) -> None:
    check_logits(loaded(case, device="host"), case)


@pytest.mark.slow(*(case for case in CASES if case not in FEW))
@pytest.mark.parametrize("case", CASES)
def test_the_loss_and_all_gradients(case: str, loaded: Load) -> None:
    check_gradients(loaded(case, device="host"), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAINED)
def test_logits_loss_and_gradients_on_the_device(case: str, loaded: Load) -> None:
    model = loaded(case)
    check_logits(model, case)
    check_gradients(model, case)


def check_greedy(model: LanguageModel, case: str, count: int = cases.TOKENS) -> None:
    prompts = [cases.tokens(length).tolist() for length in cases.PROMPTS]
    result = model.generate(prompts, count, temperature=0, stop_tokens=())
    wanted = np.load(cases.REFERENCE)[f"{case}.greedy"]
    for completion, ids in zip(result, wanted.tolist(), strict=True):
        assert completion.ids == ids[:count]
        assert completion.finish_reason == "length"


@pytest.mark.parametrize("case", FEW)
def test_greedy_tokens_of_a_ragged_batch(case: str, loaded: Load) -> None:
    check_greedy(loaded(case, device="host"), case, 40)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_hundred_greedy_tokens_of_a_ragged_batch(case: str, loaded: Load) -> None:
    check_greedy(loaded(case, device="host"), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ON_DEVICE)
def test_two_hundred_greedy_tokens_on_the_device(case: str, loaded: Load) -> None:
    check_greedy(loaded(case), case)


# Files


def test_several_files_are_one(loaded: Load, tmp_path: Path) -> None:
    whole = loaded("llama", device="host").state_dict()
    (tmp_path / "llama" / "model.safetensors").unlink()
    parts = loaded("llama", shards=3, device="host").state_dict()
    assert whole.keys() == parts.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(parts[name], array)


@pytest.mark.parametrize("case", ["gpt2", "llama", "gemma2"])
@pytest.mark.parametrize("shard_bytes", ["5GB", 9000])
def test_a_saved_model_comes_back(case: str, shard_bytes: int | str, loaded: Load, tmp_path: Path) -> None:
    model = loaded(case, device="host")
    model.generation_config = {"do_sample": True, "top_k": 5}
    model.save(tmp_path / "saved", shard_bytes)
    files = {path.name for path in (tmp_path / "saved").iterdir()}
    assert ("model.safetensors.index.json" in files) == (shard_bytes == 9000)
    assert all(stored in load_names(tmp_path / "saved") for stored in about(case)["shapes"])
    again = ps.models.load(tmp_path / "saved", device="host")
    assert again.generation_config == {"do_sample": True, "top_k": 5}
    assert again.config | cases.CONFIGS[case] == dict(again.config)
    for (name, array), (_, copy) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        np.testing.assert_array_equal(array, copy, err_msg=name)


def load_names(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        names |= load_file(path).keys()
    return names


def test_nothing_of_a_model_that_was_saved_before_stays(loaded: Load, tmp_path: Path) -> None:
    model = loaded("llama", device="host")
    model.generation_config = {"do_sample": True, "top_k": 3}
    model.save(tmp_path / "saved", shard_bytes="10KB")
    model.generation_config = {}
    for shard_bytes in ("20KB", "5GB"):
        model.save(tmp_path / "saved", shard_bytes=shard_bytes)
        model.save(tmp_path / f"fresh {shard_bytes}", shard_bytes=shard_bytes)
        names = [
            sorted(path.name for path in (tmp_path / name).iterdir())
            for name in ("saved", f"fresh {shard_bytes}")
        ]
        assert names[0] == names[1]
        check_logits(ps.models.load(tmp_path / "saved", device="host"), "llama")


def test_weights_have_the_dtype_of_the_files_or_another(loaded: Load, tmp_path: Path) -> None:
    exact = loaded("qwen3", device="host")
    half = loaded("qwen3", device="host", dtype="bfloat16")
    assert {tensor.dtype for tensor in half.parameters()} == {ps.bfloat16}
    half.config = {**half.config, "torch_dtype": "float32"}  # as of an older file
    half.save(tmp_path / "half")
    again = ps.models.load(tmp_path / "half", device="host")
    assert again.head_weight.dtype == ps.bfloat16
    written = json.loads((tmp_path / "half" / "config.json").read_text())
    assert (written["dtype"], "torch_dtype" in written) == ("bfloat16", False)
    ids = ps.asarray(cases.tokens(1, 9), device="host")
    results = [model(ids).numpy().astype(np.float32) for model in (exact, half, again)]
    np.testing.assert_array_equal(results[1], results[2])
    assert 0 < np.abs(results[0] - results[1]).max() < 0.2
    assert len(again.generate([3, 4], 5, temperature=0).ids) == 5


def test_weights_are_loaded_as_floats_alone(tmp_path: Path) -> None:
    cases.write_folder(tmp_path, "llama", about("llama")["shapes"])
    with pytest.raises(
        ValueError, match=r"weights are floats, and int8 was given; ps.quantize makes integers"
    ):
        ps.models.load(tmp_path, device="host", dtype="int8")


def test_a_model_from_a_configuration_trains() -> None:
    ps.random.manual_seed(0)
    model = ps.models.build({**cases.LLAMA, "max_position_embeddings": 16}, device="host")
    optimizer = ps.optim.AdamW(model.parameters(), lr=1e-2)
    ids = ps.asarray(np.tile(np.arange(17), (2, 1)), device="host")
    losses = []
    for _ in range(12):
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(np.log(61), abs=0.3)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("llama", {"model_type": "bert"}, r"the model_type 'bert' is not known; there are gpt2, llama"),
        ("llama", {"hidden_size": None}, "config.json lacks hidden_size"),
        ("llama", {"hidden_size": 64}, r"embed_tokens.weight has the shape \(61, 32\), and \(61, 64\)"),
        ("llama", {"num_hidden_layers": 3}, "the number of layers is 2, and 3 by config.json"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads is a divisor of 4"),
        ("llama", {"hidden_act": "relu9"}, "hidden_act is one of silu, swish, gelu"),
        ("llama", {"rms_norm_eps": "x"}, "rms_norm_eps is a number, not 'x'"),
        ("llama", {"rope_scaling": {"rope_type": "odd"}}, "rope_type is one of default, linear"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling lacks factor"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor is a number of more than 0"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 1e-4}}, "scaling leaves no position"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 0}}, "beta_fast is a number"),
        ("llama", {"rope_theta": -5}, "rope_theta is a number of more than 0, not -5"),
        ("llama", {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 4}}, "by zero"),
        ("llama", {"attention_bias": True}, "lacks the weight model.layers.0.self_attn.q_proj.bias"),
        ("qwen2", {"model_type": "llama"}, "has weights that the family llama does not: model.layers.0"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types is a list of 3 times"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is false, not True"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor has to be 1.0, not 0.5"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "has rope_scaling and rope_parameters, which say other things",
        ),
        (
            "llama",
            {"tie_word_embeddings": True, "attention_bias": True, "architectures": ["LlamaForTokens"]},
            "q_proj.bias; by config.json it is a 'LlamaForTokens', not a LlamaForCausalLM",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(case: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = cases.write_folder(tmp_path, case, about(case)["shapes"])
    (folder / "config.json").write_text(json.dumps(cases.CONFIGS[case] | change))
    with pytest.raises(CheckpointError, match=message) as caught:
        ps.models.load(folder, device="host")
    assert str(folder) in str(caught.value)


def built(case: str, *without: str, **change: Any) -> Any:
    config = {key: value for key, value in cases.CONFIGS[case].items() if key not in without}
    return ps.models.build(config | change, device="host")


def test_only_a_configuration_is_built() -> None:
    name: Any = "llama-1b"
    with pytest.raises(
        TypeError, match=r"keys of a config.json, and 'llama-1b' was given; ps.models.load reads"
    ):
        ps.models.build(name)


def test_a_configuration_without_a_key_means_what_transformers_has_by_default() -> None:
    assert built("gemma2", "attn_logit_softcapping").sizes.softcap == 50
    assert built("gemma2", "final_logit_softcapping").sizes.logit_softcap == 30
    assert built("gemma2", attn_logit_softcapping=None).sizes.softcap is None
    assert built("gemma3").sizes.softcap is None
    assert built("gemma3", attn_logit_softcapping=5.0).sizes.softcap is None, "which transformers ignores"
    assert built("gemma3", final_logit_softcapping=5.0).sizes.logit_softcap == 5
    gpt = built("gpt2")
    assert (gpt.dropout.p, gpt.blocks[0].dropout.p) == (0.1, 0.1)
    assert gpt.blocks[0].attention.attention_dropout.p == 0.1
    without = built("gemma3", "rope_theta", "rope_local_base_freq").sizes.rotaries
    assert without == built("gemma3", rope_theta=1e6, rope_local_base_freq=1e4).sizes.rotaries
    assert built("mistral", "sliding_window").sizes.windows == (4096, 4096)
    assert built("mistral", sliding_window=None).sizes.windows == (None, None)
    assert built("qwen2-window", sliding_window=None).sizes.windows == (None, None)
    assert built("qwen3", "head_dim").sizes.head_size == 128
    for case, half in (("qwen3", 64), ("gemma2", 128)):
        assert len(built(case, "head_dim").sizes.rotaries[0].frequencies) == half
    assert built("llama", hidden_act="swish").sizes.activation is built("llama").sizes.activation


@pytest.mark.parametrize("key", ["mscale", "mscale_all_dim"])
def test_one_magnitude_of_yarn_alone_says_nothing(key: str) -> None:
    scaling = cases.CONFIGS["llama-yarn"]["rope_scaling"]
    alone = built("llama", rope_scaling=scaling | {key: 0.7}).sizes.rotaries
    assert alone == built("llama-yarn").sizes.rotaries, "as in transformers"


def test_rotary_positions_say_what_they_are_in_any_of_their_places() -> None:
    yarn = cases.CONFIGS["llama-yarn"]["rope_scaling"]
    wanted = built("llama-yarn", rope_theta=500.0).sizes.rotaries
    assert wanted == built("llama", "rope_theta", rope_scaling=yarn | {"rope_theta": 500.0}).sizes.rotaries
    assert (
        wanted
        == built("llama", rope_parameters=yarn | {"rope_theta": 500.0}, rope_scaling=yarn).sizes.rotaries
    )
    length = "original_max_position_embeddings"
    short = {key: value for key, value in yarn.items() if key != length}
    for scaling in (short, yarn | {length: 128}):  # the key beside them comes first, as in transformers
        change = {"rope_theta": 500.0, "rope_scaling": scaling, length: 32, "partial_rotary_factor": None}
        assert wanted == built("llama", **change).sizes.rotaries


def test_files_that_are_broken_are_named(tmp_path: Path) -> None:
    shapes = about("llama")["shapes"]
    with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
        ps.models.load(tmp_path)
    folder = cases.write_folder(tmp_path, "llama", shapes, shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["extra"] = "part-0.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lists extra, which part-0.safetensors does not have"):
        ps.models.load(folder)
    index["weight_map"]["extra"] = "../part-0.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="names files outside of its folder"):
        ps.models.load(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"index.json cannot be read"):
        ps.models.load(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"has no model.safetensors and .*; it has part-0.safetensors, part"
    ):
        ps.models.load(folder)
    cases.write_folder(tmp_path, "llama", shapes)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        ps.models.load(folder)


def test_a_weight_is_taken_from_the_file_that_the_index_names(loaded: Load, tmp_path: Path) -> None:
    folder = cases.write_folder(tmp_path, "llama", about("llama")["shapes"], shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    older = load_file(folder / "part-1.safetensors")
    older |= {name: 0 * array for name, array in load_file(folder / "part-0.safetensors").items()}
    assert set(older) == set(index["weight_map"])
    save_file(older, folder / "part-1.safetensors")
    check_logits(ps.models.load(folder, device="host"), "llama")


@pytest.mark.parametrize("dtype", [np.int8, np.bool_])
def test_weights_that_are_no_floats_are_refused(dtype: Any, tmp_path: Path) -> None:
    folder = cases.write_folder(tmp_path, "llama", about("llama")["shapes"])
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(dtype)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight is '(I8|BOOL)', and weights are F64, F32"):
        ps.models.load(folder, device="host")


def test_a_folder_of_adapters_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds adapters: load their model, with adapter="):
        ps.models.load(tmp_path)


def test_a_head_beside_a_tied_embedding_has_to_be_a_copy(tmp_path: Path) -> None:
    folder = cases.write_folder(tmp_path, "qwen2", about("qwen2")["shapes"])
    tensors = load_file(folder / "model.safetensors")
    head = tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, folder / "model.safetensors")
    check_logits(ps.models.load(folder, device="host"), "qwen2")
    head[60, 31] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight is no copy of the embedding, and by config"):
        ps.models.load(folder, device="host")


def test_matrices_of_several_dtypes_become_that_of_the_configuration(tmp_path: Path) -> None:
    folder = cases.write_folder(tmp_path, "llama", about("llama")["shapes"])
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.float16)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="weights of float16 and float32, and the dtype of"):
        ps.models.load(folder, device="host")
    for key in ("dtype", "torch_dtype"):
        (folder / "config.json").write_text(json.dumps(cases.LLAMA | {key: "float32"}))
        model = ps.models.load(folder, device="host")
        assert {tensor.dtype for tensor in model.parameters()} == {ps.float32}
        assert len(model.generate([3, 4], 5, temperature=0).ids) == 5
    half = ps.models.load(folder, device="host", dtype="float16")
    assert {tensor.dtype for tensor in half.parameters()} == {ps.float16}


def test_a_loaded_model_has_no_dropout_until_it_is_trained(tmp_path: Path) -> None:
    folder = cases.write_folder(tmp_path, "gpt2", about("gpt2")["shapes"])
    # What every configuration has that transformers wrote.
    (folder / "config.json").write_text(json.dumps(cases.CONFIGS["gpt2"] | {"resid_pdrop": 0.1}))
    model = ps.models.load(folder, device="host")
    check_logits(model, "gpt2")
    ids = ps.asarray(cases.tokens(2, cases.LENGTH), device="host")
    exact = model(ids).numpy()
    assert np.abs(model.train()(ids).numpy() - exact).max() > 0.1


@pytest.mark.parametrize("key", ["resid_pdrop", "embd_pdrop", "attn_pdrop"])
def test_each_dropout_of_a_configuration_has_its_own_place(key: str, tmp_path: Path) -> None:
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    built("gpt2", **none | {key: 0.25}).save(tmp_path)
    model = ps.models.load(tmp_path, device="host").train()
    ids = ps.asarray(cases.tokens(2, 4), device="host")
    assert json.loads((tmp_path / "config.json").read_text())[key] == 0.25
    assert np.abs(model(ids).numpy() - model(ids).numpy()).max() > 1e-4
    assert model.training
    embedded = model.embed(ids, whole(2, 4, "host")).numpy()
    assert (embedded == 0).any() == (key == "embd_pdrop")
    block = model.blocks[0]
    assert [block.dropout.p, block.attention.dropout.p] == [0.25 * (key == "resid_pdrop")] * 2
    model.generate([1, 2, 3], 4)  # in which nothing is dropped


def test_dropout_of_attention_weights() -> None:
    ps.random.manual_seed(1)
    attention = ps.nn.CausalSelfAttention(8, 2, attention_dropout=0.25, device="host")
    x = ps.asarray(cases.weight("x", (4, 6, 8)), device="host").requires_grad_()
    exact = attention.eval()(x).numpy()
    attention.train()
    drawn = np.stack([attention(x).numpy() for _ in range(400)])
    assert np.abs(drawn.mean(0) - exact).max() < 0.1, "it keeps the mean"
    first = drawn[:, :, 0] - attention.out.bias.numpy()  # which attends to itself alone, if at all
    nothing = (np.abs(first) < 1e-6).all(-1).mean()
    assert nothing == pytest.approx(0.25**2, abs=0.03), "of both heads"
    attention(x).sum().backward()
    assert x.grad is not None
    assert np.isfinite(x.grad.numpy()).all()


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2"])
def test_attention_dropout_of_other_families(case: str) -> None:
    model = built(case, attention_dropout=0.5)
    ids = ps.asarray(cases.tokens(2, 5), device="host")
    assert np.abs(model(ids).numpy() - model(ids).numpy()).max() > 1e-4
    model.generate([1, 2, 3], 4)
    model.eval()
    np.testing.assert_array_equal(model(ids).numpy(), model(ids).numpy())
    with pytest.raises(CheckpointError, match="attention_dropout is a number from 0 to less than 1"):
        built(case, attention_dropout=1.0)


def test_loading_has_no_second_copy_on_the_host(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[np.ndarray] = []
    upload = weights.StoredTensor.array

    def array(stored: weights.StoredTensor) -> np.ndarray:
        values = upload(stored)
        mapped.append(values)
        assert isinstance(values.base, np.memmap)
        return values

    monkeypatch.setattr(weights.StoredTensor, "array", array)
    model = loaded("llama", device="host")
    assert len(mapped) == len(model.parameters())
