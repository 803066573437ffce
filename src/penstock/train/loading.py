"""Loads trained models from the folder of a run, or from a folder in Hugging Face's layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

import penstock as ps
from penstock.data import Tokenizer, load_tokenizer
from penstock.data.tokenizer import TextStream
from penstock.errors import CheckpointError
from penstock.models import LanguageModel, TextTokenizer
from penstock.nn.layers import Where, undrawn
from penstock.tensor.core import resolve
from penstock.train.bases import load_trained, model_of_run
from penstock.train.building import build_model
from penstock.train.checkpoint import FOLDER, load_last, text_config
from penstock.train.sizing import check_fits
from penstock.train.text_trainer import TOKENIZER_FILE


def load_run(folder: Path, device: Where = None) -> LanguageModel:
    """The model of a run of `penstock train`, with its tokenizer, from the last valid checkpoint."""
    checkpoint, _ = load_last(folder)
    config = text_config(checkpoint, folder)
    with undrawn():
        model = model_of_run(config, folder, checkpoint, device)
        if model is None:
            tokenizer = load_tokenizer(folder / TOKENIZER_FILE)
            check_fits(config, tokenizer.vocab_size, resolve(device), training=False)
            model = build_model(config, tokenizer.vocab_size, device, initialize=False)
            model.tokenizer = tokenizer
    try:
        load_trained(model, checkpoint.model)
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"the tokenizer and the checkpoint in {folder} do not fit: {error}") from None
    return model


def load_model(folder: Path) -> tuple[LanguageModel, Tokenizer | TextTokenizer | None]:
    """A model on the default device, and its tokenizer if the folder has one."""
    if folder.suffix != ".gguf" and not any((folder / name).exists() for name in ("config.json", FOLDER)):
        raise CheckpointError(
            f"{folder} is neither the folder of a run nor one with the config.json and safetensors of a "
            f"model, nor a file such as model.gguf"
        )
    model = ps.models.load(folder)
    return model, model.tokenizer


def stream_text(
    model: LanguageModel,
    tokenizer: Tokenizer | TextTokenizer,
    prompt: npt.ArrayLike,
    count: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> Iterator[str]:
    """The text that follows the tokens of a prompt, piece by piece."""
    decoder = tokenizer.stream()
    ids = np.asarray(prompt).reshape(-1).tolist()
    if isinstance(decoder, TextStream):
        decoder.follow(ids)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    for piece in model.stream(ids, count, **options):
        yield decoder.push([piece.id])
    yield decoder.finish()
