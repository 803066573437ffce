"""Models to folders in Hugging Face's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.config import parse_bytes
from penstock.files import atomic_file
from penstock.models.model import LanguageModel
from penstock.models.quantized import file_setting
from penstock.models.tokenizing import TOKENIZER, TextTokenizer
from penstock.models.weights import write_tensors


def save(model: LanguageModel, folder: Path, shard_bytes: int | str) -> None:
    """Write the configuration, the weights, and what belongs to the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = model.file_weights()
    write_tensors(folder, weights, parse_bytes(shard_bytes))
    config = {**model.file_config(), **file_setting(model), "dtype": str(model.head_weight.dtype)}
    _write_json(folder / "config.json", config)
    if model.generation_config:
        _write_json(folder / "generation_config.json", dict(model.generation_config))
    if model.tokenizer is not None:
        if isinstance(model.tokenizer, TextTokenizer):
            model.tokenizer.save_to(folder)
        else:  # that of a run
            model.tokenizer.save(folder / TOKENIZER)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with atomic_file(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())
