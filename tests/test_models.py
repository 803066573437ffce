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

import penstock as ps
from penstock.models import LanguageModel

CASES = list(cases.CONFIGS)
FEW = ["llama", "gemma3"]  # cases that run on every device in the quick suite


def about(case: str) -> dict[str, Any]:
    return json.loads(str(np.load(cases.REFERENCE)[f"{case}.about"]))


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., LanguageModel]:
    def load(case: str, shards: int = 1, **options: Any) -> LanguageModel:
        folder = cases.write_folder(tmp_path / case, case, about(case)["shapes"], shards)
        return ps.models.load(folder, **options)

    return load


def check(model: LanguageModel, case: str) -> None:
    """Logits, loss and gradients."""
    wanted, known = np.load(cases.REFERENCE)[f"{case}.logits"], about(case)
    array, device = cases.tokens(2, cases.LENGTH), model.head_weight.device
    ids = ps.asarray(array, device=device)
    result = model(ids).numpy()[:, cases.POSITIONS]
    assert np.abs(result - wanted).max() < 6 * known["noise"], "about as exact as PyTorch"
    # Of whole sequences, as scalings may depend on their length; nothing follows the last token.
    targets = np.concatenate([array[:, 1:], np.full((2, 1), -100)], axis=1)
    loss = model.loss(ids, ps.asarray(targets, device=device))
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
def test_logits_loss_and_gradients(case: str, loaded: Callable[..., LanguageModel]) -> None:
    check(loaded(case, device="host"), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_on_the_device(case: str, loaded: Callable[..., LanguageModel]) -> None:
    check(loaded(case), case)


def check_greedy(model: LanguageModel, case: str, count: int = cases.TOKENS) -> None:
    prompts = [cases.tokens(length).tolist() for length in cases.PROMPTS]
    result = model.generate(prompts, count, temperature=0, stop_tokens=())
    wanted = np.load(cases.REFERENCE)[f"{case}.greedy"]
    for completion, ids in zip(result, wanted.tolist(), strict=True):
        assert completion.ids == ids[:count]
        assert completion.finish_reason == "length"


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_of_a_ragged_batch(case: str, loaded: Callable[..., LanguageModel]) -> None:
    check_greedy(loaded(case, device="host"), case)


@pytest.mark.parametrize("case", FEW)
def test_greedy_tokens_on_the_device(case: str, loaded: Callable[..., LanguageModel]) -> None:
    check_greedy(loaded(case), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in FEW])
def test_greedy_tokens_of_every_family_on_the_device(case: str, loaded: Callable[..., LanguageModel]) -> None:
    check_greedy(loaded(case), case)
