"""LoRA adapters: what they compute against PEFT and finite differences, their files, and what stays frozen.

`data/make_lora.py` wrote what PEFT computes, with its own files.
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
from penstock.models import LanguageModel
from penstock.models.lora import adapters

TRAINED = list(cases.LORA_TARGETS)


def shapes(case: str) -> dict[str, list[int]]:
    return json.loads(str(np.load(cases.REFERENCE)[f"{case}.about"]))["shapes"]


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., LanguageModel]:
    """A model with the adapters that PEFT wrote."""

    def load(case: str, **options: Any) -> LanguageModel:
        store = np.load(cases.LORA_REFERENCE)
        folder = cases.write_folder(tmp_path / case, case, shapes(case))
        adapter = tmp_path / f"{case}-adapter"
        adapter.mkdir()
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (adapter / file).write_bytes(store[f"{case}.{file}"].tobytes())
        return ps.models.load(folder, adapter=adapter, **{"device": "host"} | options)

    return load


Load = Callable[..., LanguageModel]


def trained(model: LanguageModel) -> dict[str, ps.Tensor]:
    return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}


def check_logits(model: LanguageModel, wanted: np.ndarray) -> None:
    ids = ps.asarray(cases.tokens(2, cases.LENGTH), device=model.head_weight.device)
    result = model(ids).numpy()[:, cases.POSITIONS]
    np.testing.assert_allclose(result, wanted, atol=2e-5 * np.abs(wanted).max())


# Against PEFT


@pytest.mark.slow("gemma3")
@pytest.mark.parametrize("case", TRAINED)
def test_adapters_of_peft_give_its_logits_and_its_losses_in_training(case: str, loaded: Load) -> None:
    store, model = np.load(cases.LORA_REFERENCE), loaded(case)
    check_logits(model, store[f"{case}.logits"])
    optimizer = ps.optim.AdamW(trained(model).values(), lr=cases.LORA_RATE, weight_decay=0.1)
    ids = ps.asarray(cases.tokens(2, cases.LENGTH), device="host")

    @ps.jit
    def step(ids: ps.Tensor) -> ps.Tensor:
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        return loss

    losses = [step(ids).item() for _ in range(cases.LORA_STEPS)]
    np.testing.assert_allclose(losses, store[f"{case}.losses"], rtol=2e-4)
    ps.models.merge_lora(model)
    wanted = store[f"{case}.merged"]
    result = model(ids).numpy()[:, cases.POSITIONS]
    np.testing.assert_allclose(result, wanted, atol=2e-3 * np.abs(wanted).max())


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAINED)
def test_adapters_on_the_device(case: str, loaded: Load) -> None:
    check_logits(loaded(case, device=None), np.load(cases.LORA_REFERENCE)[f"{case}.logits"])


@pytest.mark.parametrize("case", TRAINED)
def test_files_are_those_of_peft(case: str, loaded: Load, tmp_path: Path) -> None:
    model = loaded(case)
    ps.models.save_lora(model, tmp_path / "saved")
    theirs = load_file(tmp_path / f"{case}-adapter" / "adapter_model.safetensors")
    ours = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)
    wanted = json.loads((tmp_path / f"{case}-adapter" / "adapter_config.json").read_text())
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    named = {name.rpartition(".")[2] for name in config.pop("target_modules")}
    assert named == {name.rpartition(".")[2] for name in wanted["target_modules"]}
    assert config.pop("base_model_name_or_path") == str(tmp_path / case)
    assert config == {name: wanted[name] for name in config}


# What is computed


@pytest.mark.slow("llama")
@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_gradients_are_finite_differences(case: str, loaded: Load) -> None:
    model = loaded(case)
    ids = ps.asarray(cases.tokens(1, 7), device="host")
    loss_of = ps.jit(lambda: model.loss(ids[:, :-1], ids[:, 1:]))
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    gradients = {name: tensor.grad.numpy().astype(np.float64) for name, tensor in trained(model).items()}
    for name, tensor in list(trained(model).items())[:4]:
        value, gradient = tensor.numpy(), gradients[name]
        for direction in (gradient, cases.probe(name, value.shape)):
            unit = (1e-2 * direction / np.linalg.norm(direction)).astype(np.float32)
            losses = []
            for sign in (1, -1):
                tensor._become(ps.asarray(value + sign * unit, device="host")._node)
                with ps.no_grad():
                    losses.append(loss_of().item())
            slope = (gradient * unit).sum() * 2
            assert losses[0] - losses[1] == pytest.approx(slope, abs=2e-4 * np.linalg.norm(gradient)), name
        tensor._become(ps.asarray(value, device="host")._node)
    assert all(tensor.grad is None for tensor in model.parameters() if not tensor.requires_grad)


def test_an_adapter_starts_as_nothing_and_merges_exactly() -> None:
    layer = ps.nn.Linear(6, 4, device="host")
    x = ps.asarray(np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32), device="host")
    before, weight = layer(x).numpy(), layer.weight.numpy().astype(np.float64)
    adapted = ps.nn.LoRA(layer, rank=2, alpha=3)
    np.testing.assert_array_equal(adapted(x).numpy(), before)
    high = np.random.default_rng(2).normal(size=(4, 2)).astype(np.float32)
    adapted.lora_B.weight._become(ps.asarray(high, device="host")._node)
    low = adapted.lora_A.weight.numpy().astype(np.float64)
    assert adapted.merged() is layer
    np.testing.assert_allclose(layer.weight.numpy(), weight + 1.5 * high @ low, rtol=1e-6, atol=1e-7)
    assert not layer.weight.requires_grad


@pytest.mark.slow("gemma3")
@pytest.mark.parametrize("case", ["gpt2", "gemma3"])
def test_text_is_the_same_before_and_after_merging(case: str, loaded: Load, tmp_path: Path) -> None:
    model = loaded(case)
    with pytest.raises(CheckpointError, match=r"merge_lora\(model\) puts them into its weights"):
        model.save(tmp_path / "merged")
    plain = ps.models.load(tmp_path / case, device="host").generate([1, 2, 3], 12, temperature=0).ids
    apart = model.generate([1, 2, 3], 12, temperature=0).ids
    ps.models.merge_lora(model)
    assert not adapters(model)
    assert model.generate([1, 2, 3], 12, temperature=0).ids == apart != plain
    model.save(tmp_path / "merged")
    again = ps.models.load(tmp_path / "merged", device="host")
    assert again.generate([1, 2, 3], 12, temperature=0).ids == apart
    ps.models.add_lora(again, rank=1)  # nothing of the programs before is used
    assert again.generate([1, 2, 3], 12, temperature=0).ids == apart


@pytest.mark.slow("bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_adapters_have_the_dtype_of_their_layer(dtype: str, loaded: Load) -> None:
    model = loaded("llama", dtype=dtype)
    assert {str(tensor.dtype) for tensor in model.parameters()} == {dtype}
    ids = ps.asarray(cases.tokens(1, 9), device="host")
    assert str(model(ids).dtype) == dtype
    apart = model(ids).numpy().astype(np.float32)
    ps.models.merge_lora(model)
    merged = model(ids).numpy().astype(np.float32)
    assert np.abs(apart - merged).max() < 0.05 * np.abs(apart).max()


class Packed(ps.nn.Module):
    """A linear layer whose weights are bytes."""

    def __init__(self, in_features: int, out_features: int) -> None:
        self.in_features, self.out_features = in_features, out_features
        values = np.random.default_rng(1).integers(-9, 9, (out_features, in_features)).astype(np.int8)
        self.packed = ps.asarray(values, device="host")
        self.scales = ps.asarray(np.full((out_features, 1), 0.1, np.float16), device="host")

    @property
    def weight(self) -> ps.Tensor:
        return self.packed.astype(ps.float16) * self.scales

    def forward(self, x: ps.Tensor) -> ps.Tensor:
        return ps.nn.functional.linear(x, self.weight.astype(x.dtype))


def test_any_layer_with_sizes_has_adapters_and_only_weights_merge() -> None:
    ps.random.manual_seed(3)
    adapted = ps.nn.LoRA(Packed(6, 4), rank=2)
    assert [name for name, _ in adapted.named_parameters()] == ["lora_A.weight", "lora_B.weight"]
    assert {str(tensor.dtype) for tensor in adapted.parameters()} == {"float16"}, "that of the scales"
    x = ps.asarray(np.ones((3, 6), np.float32), device="host")
    optimizer = ps.optim.SGD(adapted.parameters(), lr=0.02)
    losses = []
    for _ in range(40):
        loss = (adapted(x) ** 2).mean()
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    with pytest.raises(TypeError, match=r"Packed has no floating-point weight of shape \(4, 6\)"):
        adapted.merged()
    with pytest.raises(TypeError, match="not for Dropout"):
        ps.nn.LoRA(ps.nn.Dropout())
    with pytest.raises(ValueError, match="a rank is 1 or more"):
        ps.nn.LoRA(ps.nn.Linear(2, 2), rank=0)


def test_merging_stops_before_anything_changes() -> None:
    ps.random.manual_seed(0)
    model = ps.models.build(cases.CONFIGS["llama"], device="host")
    model.layers[1].mlp.up_proj = Packed(32, 40)
    ps.models.add_lora(model, rank=2)
    before = model.state_dict()
    with pytest.raises(TypeError, match="Packed"):
        ps.models.merge_lora(model)
    assert len(adapters(model)) == 14
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


# What is chosen


def test_targets_are_names_of_files() -> None:
    def paths(case: str, targets: str | list[str]) -> set[str]:
        model = ps.models.build(cases.CONFIGS[case], device="host")
        return set(adapters(ps.models.add_lora(model, rank=1, targets=targets)))

    assert len(paths("llama", "all-linear")) == 14
    assert paths("llama", ["self_attn.q_proj"]) == {f"layers.{layer}.self_attn.q_proj" for layer in (0, 1)}
    assert paths("gpt2", "c_attn") == {f"blocks.{layer}.attention.qkv" for layer in (0, 1)}
    assert paths("gpt2", ["c_proj"]) == {
        f"blocks.{layer}.{part}" for layer in (0, 1) for part in ("attention.out", "down")
    }
    with pytest.raises(
        ValueError, match=r"no layer is called 'wte'; there are attn.c_attn, attn.c_proj, mlp"
    ):
        paths("gpt2", "wte")
    model = ps.models.add_lora(ps.models.build(cases.CONFIGS["gpt2"], device="host"))
    names = {model.weight_name(name)[0] for name, _ in model.named_parameters() if "lora" not in name}
    assert names == set(shapes("gpt2")), "the names of weights beside adapters"
    with pytest.raises(ValueError, match="has LoRA adapters already"):
        ps.models.add_lora(model)


# What is frozen


@pytest.mark.slow("gpt2", "gemma2")
@pytest.mark.parametrize("case", ["gpt2", "llama", "gemma2"])
def test_frozen_weights_have_no_gradients_and_no_moments(case: str) -> None:
    sizes = {"n_embd": 128} if case == "gpt2" else {"hidden_size": 128, "intermediate_size": 256}
    model = ps.models.build({**cases.CONFIGS[case], **sizes})
    matrices = [tensor for tensor in model.parameters() if tensor.ndim == 2 and tensor.shape[0] >= 128]
    ps.models.add_lora(model, rank=1)
    learned = trained(model)
    optimizer = ps.optim.AdamW(learned.values(), lr=0.01)

    @ps.jit
    def step(ids: ps.Tensor) -> ps.Tensor:
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        optimizer.backward(loss)
        optimizer.step()
        return loss

    plan = ps.memory.plan(step, ps.asarray(cases.tokens(1, 5)))
    weights = sum(tensor.size * 4 for tensor in model.parameters())
    moments = 2 * sum(tensor.size * 4 for tensor in learned.values())
    assert plan.held_bytes < weights + moments + (64 << 10)  # other tests may have left some
    temporaries = plan.unlimited_bytes - plan.held_bytes
    # Far too little for the gradients of all weights: each is computed nowhere.
    assert temporaries < sum(tensor.size * 4 for tensor in matrices) / 8


def test_frozen_weights_do_not_change_by_a_bit(loaded: Load) -> None:
    model = loaded("gpt2")
    before = model.state_dict()
    optimizer = ps.optim.AdamW(trained(model).values(), lr=0.01)
    ids = ps.asarray(cases.tokens(2, 9), device="host")
    for _ in range(3):
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        assert all(tensor.grad is None for tensor in model.parameters() if not tensor.requires_grad)
        optimizer.step()
    learned = trained(model)
    for name, array in model.state_dict().items():
        assert (array.tobytes() == before[name].tobytes()) == (name not in learned), name


# Files that are not right


def test_files_that_do_not_fit_are_refused(loaded: Load, tmp_path: Path) -> None:
    loaded("llama")
    folder = tmp_path / "llama-adapter"
    config = json.loads((folder / "adapter_config.json").read_text())
    weights = load_file(folder / "adapter_model.safetensors")
    first = next(name for name in weights if "0.self_attn.q_proj.lora_A" in name)

    def refused(message: str, changes: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        (folder / "adapter_config.json").write_text(json.dumps(config | changes))
        save_file(tensors, folder / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match=message) as caught:
            ps.models.load(tmp_path / "llama", device="host", adapter=folder)
        assert str(folder) in str(caught.value)

    other = {name: array for name, array in weights.items() if name != first}
    refused("peft_type has to be LORA, not 'IA3'", {"peft_type": "IA3"}, weights)
    refused("use_dora has to be False", {"use_dora": True}, weights)
    refused("modules_to_save has to be None", {"modules_to_save": ["lm_head"]}, weights)
    refused("init_lora_weights is true, false, gaussian", {"init_lora_weights": "pissa_niter_4"}, weights)
    refused("kasa_config has to be None", {"kasa_config": {"beta": 1}}, weights)
    refused("r is an integer", {"r": "8"}, weights)
    refused(r"shape \(4, 32\), and \(1000000, 32\)", {"r": 1000000}, weights)
    refused("alpha above 0", {"lora_alpha": 0}, weights)
    refused("lora_alpha is a number, not -inf", {"lora_alpha": -1e400}, weights)
    refused("lora_dropout|probability", {"lora_dropout": 2}, weights)
    refused("lacks lora_A or lora_B of model.layers.0.self_attn.q_proj", {}, other)
    refused("holds no adapter", {}, {})
    refused("shape", {}, other | {first: np.zeros((4, 31), np.float32)})
    refused("I32 of shape", {}, other | {first: np.zeros((4, 32), np.int32)})
    for name in ("lm_head", "model.layers.7.self_attn.q_proj", "../../model.layers.0.self_attn.q_proj", ""):
        key = f"base_model.model.{name}.lora_A.weight"
        refused("belongs to no linear layer", {}, other | {key: weights[first]})
    refused("belongs to no linear layer", {}, other | {"model.embed_tokens.lora_embedding_A": weights[first]})
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is an object"):
        ps.models.load(tmp_path / "llama", device="host", adapter=folder)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors cannot be read"):
        ps.models.load(tmp_path / "llama", device="host", adapter=folder)
    with pytest.raises(CheckpointError, match=r"adapter_config.json cannot be read"):
        ps.models.load(tmp_path / "llama", device="host", adapter=tmp_path / "llama")
