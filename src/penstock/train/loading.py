"""Loads trained models from the folder of a run, or from a folder in Hugging Face's layout of GPT-2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy.typing as npt

import penstock as ps
from penstock.data import Tokenizer, load_tokenizer
from penstock.errors import CheckpointError
from penstock.nn import GPT
from penstock.train.building import build_model
from penstock.train.checkpoint import FOLDER, load_last, text_config
from penstock.train.sizing import check_fits
from penstock.train.text_trainer import TOKENIZER_FILE


def load_model(folder: Path) -> tuple[GPT, Tokenizer | None]:
    """A model on the default device, in float32, and its tokenizer if the folder has one."""
    if (folder / FOLDER).is_dir():
        checkpoint, _ = load_last(folder)
        config = text_config(checkpoint, folder)
        tokenizer = load_tokenizer(folder / TOKENIZER_FILE)
        check_fits(config, tokenizer.vocab_size, ps.default_device(), training=False)
        model = build_model(config, tokenizer.vocab_size)
        try:
            model.load_state_dict(checkpoint.model)
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"the tokenizer and the checkpoint in {folder} do not fit: {error}"
            ) from None
        return model, tokenizer
    if (folder / "config.json").is_file():
        path = folder / TOKENIZER_FILE
        return GPT.from_pretrained(folder), load_tokenizer(path) if path.is_file() else None
    raise CheckpointError(
        f"{folder} is neither the folder of a run nor one with the config.json and safetensors of a GPT-2"
    )


def stream_text(
    model: GPT,
    tokenizer: Tokenizer | None,
    prompt: npt.ArrayLike,
    count: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> Iterator[str]:
    """The text that follows the tokens of a prompt, piece by piece; without a tokenizer, the ids."""
    decoder = tokenizer.stream() if tokenizer else None
    for token in model.generate(prompt, count, temperature, top_k, top_p, seed):
        yield decoder.push([token]) if decoder else f"{token} "
    if decoder:
        yield decoder.finish()
