"""Models in Hugging Face's layout, against what PyTorch computed with them: logits to training.

The files are not part of the project: `cases.py` says where `gpt2_tiny` and the others are.
"""

from __future__ import annotations

from pathlib import Path

import cases
import numpy as np
import pytest
from safetensors.numpy import load_file

import penstock as ps
from penstock import optim

pytestmark = cases.needs_cases


@pytest.fixture(params=["gpt2_tiny", pytest.param("llama_tiny", marks=pytest.mark.slow), "qwen2_tiny"])
def folder(request: pytest.FixtureRequest) -> Path:
    return cases.FOLDER / request.param


@pytest.fixture
def reference(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "reference.safetensors")


def batch(reference: dict[str, np.ndarray]) -> tuple[ps.Tensor, ps.Tensor]:
    ids = reference["input_ids"]
    return ps.asarray(ids[:, :-1]), ps.asarray(ids[:, 1:])


def test_logits(folder: Path, reference: dict[str, np.ndarray]) -> None:
    model = ps.models.load(folder)
    result = ps.jit(model.forward)(ps.asarray(reference["input_ids"])).numpy()
    exact = reference["logits_f64"]
    noise = np.abs(reference["logits"] - exact).max()
    assert np.abs(result - exact).max() < 4 * noise, "about as far from the exact logits as PyTorch is"


def test_the_loss_and_all_gradients(folder: Path, reference: dict[str, np.ndarray]) -> None:
    model = ps.models.load(folder)

    @ps.jit
    def backward(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        loss = model.loss(x, y)
        loss.backward()
        return loss

    loss = backward(*batch(reference)).item()
    assert loss == pytest.approx(float(reference["loss"][0]), rel=1e-5)
    wanted = {}
    for name, _ in model.named_parameters():
        theirs, transposed = model.weight_name(name)
        wanted[name] = reference[f"grad.{theirs}"].T if transposed else reference[f"grad.{theirs}"]
    assert len(wanted) == sum(name.startswith("grad.") for name in reference)
    for name, tensor in model.named_parameters():
        assert tensor.grad is not None
        size = np.abs(wanted[name]).max()
        np.testing.assert_allclose(
            tensor.grad.numpy(), wanted[name], rtol=1e-3, atol=1e-5 * size, err_msg=name
        )


def test_greedy_tokens(folder: Path, reference: dict[str, np.ndarray]) -> None:
    model = ps.models.load(folder)
    wanted = reference["greedy"].tolist()
    prompts = [ids[:8] for ids in wanted]
    result = model.generate(prompts, len(wanted[0]) - 8, temperature=0, stop_tokens=())
    assert [[*prompt, *each.ids] for prompt, each in zip(prompts, result, strict=True)] == wanted


def test_the_losses_of_twenty_steps(folder: Path, reference: dict[str, np.ndarray]) -> None:
    model = ps.models.load(folder)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    @ps.jit
    def step(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        loss = model.loss(x, y)
        loss.backward()
        optimizer.step()
        return loss

    result = [step(*batch(reference)).item() for _ in reference["adamw_losses"]]
    np.testing.assert_allclose(result, reference["adamw_losses"], atol=1e-4, rtol=1e-4)


def test_a_saved_copy_is_the_same(folder: Path, tmp_path: Path) -> None:
    ps.models.load(folder).save(tmp_path)
    wanted, result = (load_file(path / "model.safetensors") for path in (folder, tmp_path))
    assert set(result) == set(wanted)
    for name, array in result.items():
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)
