"""A GPT-2 in Hugging Face's layout, against what PyTorch computed with it: logits to training.

The files are not part of the project: `cases.py` says where `gpt2_tiny` is.
"""

from __future__ import annotations

from pathlib import Path

import cases
import numpy as np
import pytest
from safetensors.numpy import load_file

import penstock as ps
from penstock import nn, optim
from penstock.nn import pretrained

pytestmark = cases.needs_cases
FOLDER = cases.FOLDER / "gpt2_tiny"


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    return load_file(FOLDER / "reference.safetensors")


def batch(reference: dict[str, np.ndarray]) -> tuple[ps.Tensor, ps.Tensor]:
    ids = reference["input_ids"]
    return ps.asarray(ids[:, :-1]), ps.asarray(ids[:, 1:])


def test_logits(reference: dict[str, np.ndarray]) -> None:
    model = nn.GPT.from_pretrained(FOLDER)
    result = ps.jit(model.forward)(ps.asarray(reference["input_ids"])).numpy()
    exact = reference["logits_f64"]
    noise = np.abs(reference["logits"] - exact).max()
    assert np.abs(result - exact).max() < 4 * noise, "about as far from the exact logits as PyTorch is"


def test_the_loss_and_all_gradients(reference: dict[str, np.ndarray]) -> None:
    model = nn.GPT.from_pretrained(FOLDER)

    @ps.jit
    def backward(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        loss = model.loss(x, y)
        loss.backward()
        return loss

    loss = backward(*batch(reference)).item()
    assert loss == pytest.approx(float(reference["loss"][0]), rel=1e-5)
    wanted = {}
    for name, array in reference.items():
        if name.startswith("grad.transformer."):
            ours = pretrained._ours(name.removeprefix("grad.transformer."))
            assert ours is not None, name
            wanted[ours] = array.T if pretrained._is_linear(ours, array) else array
    assert set(wanted) == {name for name, _ in model.named_parameters()}
    for name, tensor in model.named_parameters():
        assert tensor.grad is not None
        size = np.abs(wanted[name]).max()
        np.testing.assert_allclose(
            tensor.grad.numpy(), wanted[name], rtol=1e-3, atol=1e-5 * size, err_msg=name
        )


def test_greedy_tokens(reference: dict[str, np.ndarray]) -> None:
    model = nn.GPT.from_pretrained(FOLDER)
    for ids, wanted in zip(reference["input_ids"], reference["greedy"], strict=True):
        prompt = ids[:8]
        result = model.generate(prompt, len(wanted) - len(prompt), temperature=0)
        assert [*prompt, *result] == wanted.tolist()


def test_the_losses_of_twenty_steps(reference: dict[str, np.ndarray]) -> None:
    model = nn.GPT.from_pretrained(FOLDER)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    @ps.jit
    def step(x: ps.Tensor, y: ps.Tensor) -> ps.Tensor:
        loss = model.loss(x, y)
        loss.backward()
        optimizer.step()
        return loss

    result = [step(*batch(reference)).item() for _ in reference["adamw_losses"]]
    np.testing.assert_allclose(result, reference["adamw_losses"], atol=1e-4, rtol=1e-4)


def test_a_saved_copy_is_the_same(tmp_path: Path) -> None:
    nn.GPT.from_pretrained(FOLDER).save_pretrained(tmp_path)
    wanted, result = (load_file(folder / "model.safetensors") for folder in (FOLDER, tmp_path))
    assert set(result) == set(wanted)
    for name, array in result.items():
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)
