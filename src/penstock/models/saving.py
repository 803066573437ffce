"""Models to folders in Hugging Face's layout."""

from __future__ import annotations

from pathlib import Path

from penstock.config import parse_bytes
from penstock.errors import CheckpointError
from penstock.models.lora import adapters
from penstock.models.model import LanguageModel
from penstock.models.quantized import file_setting
from penstock.models.settings import write_json
from penstock.models.tokenizing import SETTINGS, TEMPLATE, TOKENIZER, TextTokenizer
from penstock.models.weights import write_tensors

DESCRIPTION = (
    "config.json",
    "generation_config.json",
    TOKENIZER,
    SETTINGS,
    TEMPLATE,
)  # all but weights


def save(model: LanguageModel, folder: Path, shard_bytes: int | str) -> None:
    """Write the configuration, the weights, and what belongs to the tokenizer."""
    if adapters(model):
        raise CheckpointError(
            "the model has LoRA adapters: ps.models.merge_lora(model) puts them into its weights, and "
            "ps.models.save_lora(model, folder) writes them alone"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder, model.file_weights(), parse_bytes(shard_bytes))
    save_description(model, folder)


def save_description(model: LanguageModel, folder: Path) -> None:
    """Write all but the weights: the configuration, and what belongs to the tokenizer."""
    config = {**model.file_config(), **file_setting(model), "dtype": str(model.head_weight.dtype)}
    config.pop("torch_dtype", None)  # the name of older files, which may say another
    write_json(folder / "config.json", config)
    if model.generation_config:
        write_json(folder / "generation_config.json", dict(model.generation_config))
    else:  # of a model that was saved here before
        (folder / "generation_config.json").unlink(missing_ok=True)
    if model.tokenizer is not None:
        if isinstance(model.tokenizer, TextTokenizer):
            model.tokenizer.save_to(folder)
        else:  # that of a run
            model.tokenizer.save(folder / TOKENIZER)
