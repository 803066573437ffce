"""Models from folders in Hugging Face's layout."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import CheckpointError, PenstockWarning
from penstock.graph.dtypes import DType
from penstock.models.gguf import read_gguf
from penstock.models.lora import CONFIG as ADAPTER
from penstock.models.lora import load_lora
from penstock.models.model import LanguageModel
from penstock.models.quantized import keep_packed, prepare
from penstock.models.registry import Family, configured, family_of
from penstock.models.settings import Settings, json_of
from penstock.models.tokenizing import tokenizer_of
from penstock.models.weights import StoredTensor, stored_tensors
from penstock.nn.layers import Where
from penstock.nn.state import assign
from penstock.printable import shown
from penstock.tensor.core import Tensor, from_numpy
from penstock.tensor.dtypes import checked

_LAYER = re.compile(r"\.(\d{1,6})\.")
# Tensors that older files have beside the weights: masks, and frequencies.
_NO_WEIGHT = re.compile(r".*(\.attn\.(masked_)?bias|\.rotary_emb\.inv_freq)")
_FLOATS = ("F64", "F32", "F16", "BF16")
_HEAD = "lm_head.weight"
# Settings of generation that are not followed, and the values with which they change nothing.
_IGNORED = {
    **dict.fromkeys(("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
    **dict.fromkeys(("force_words_ids", "constraints", "penalty_alpha", "dola_layers", "top_h")),
    **dict.fromkeys(("watermarking_config", "max_time")),
    "token_healing": False,
    **dict.fromkeys(("guidance_scale", "encoder_repetition_penalty", "typical_p"), 1.0),
    **dict.fromkeys(
        ("no_repeat_ngram_size", "min_length", "min_new_tokens", "epsilon_cutoff", "eta_cutoff"), 0
    ),
    "num_beams": 1,
}
_ROWS = 4096  # of a matrix that are compared at a time


class Stored(Protocol):
    """A tensor in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    def array(self) -> npt.NDArray[Any]:
        """Its values."""


def load(
    folder: str | Path,
    *,
    device: Where = None,
    dtype: DType | str | None = None,
    adapter: str | Path | None = None,
    quantized: bool = False,
) -> LanguageModel:
    """The model in a folder with `config.json` and safetensors files, as Hugging Face has it, or a GGUF file.

    The folder of a run of `penstock train` gives the model of its last checkpoint. Otherwise weights
    go from the mapped files to the device one after another, in the dtype of the files (that of the
    configuration, where matrices have several), or in `dtype`. Where there are `tokenizer.json` and
    `generation_config.json`, the model has them too. `adapter` is a folder with LoRA adapters in PEFT's
    layout, which stay beside the weights; see `merge_lora`. The model is in evaluation mode, as in
    transformers: `model.train()` before training with dropout, which `ps.Trainer` calls itself.

    `quantized`: what is Q4_0 or Q8_0 in a GGUF file stays so on the device, and everything else is
    dequantized. A folder is loaded as it was saved, and `ps.quantize` quantizes what it holds.
    """
    path = folder = Path(folder)
    if quantized and path.suffix != ".gguf":
        raise ValueError(f"quantized=True is for GGUF files, and {folder} is none; see ps.quantize")
    if (path / "checkpoints").is_dir() and not any(path.glob("model*.safetensors")):
        from penstock.train.loading import load_run

        model = load_run(path, device)
        return _adapted(model if dtype is None else model.to(checked(dtype)), path, adapter)
    wanted = None if dtype is None else checked(dtype)
    if wanted is not None and wanted.kind != "f":
        raise ValueError(f"weights are floats, and {wanted} was given; ps.quantize makes integers of them")
    stored: Mapping[str, Stored]
    if path.suffix == ".gguf":
        config, stored = read_gguf(path, wanted)
        settings, folder = Settings(config, str(path)), path.parent
    else:
        if not (folder / "config.json").exists() and (folder / ADAPTER).exists():
            raise CheckpointError(f"{folder} holds adapters: load their model, with adapter={str(folder)!r}")
        settings = Settings(json_of(folder / "config.json"), str(folder / "config.json"))
        family_of(settings)  # before the files are read
        stored = stored_tensors(folder)
    kind = family_of(settings)
    _check_layers(path, kind, settings, stored)
    model = configured(kind, settings, device)
    prepare(model, settings)
    if quantized:
        stored = keep_packed(model, stored)
    _load_weights(path, kind, model, settings, stored, wanted)
    if (folder / "generation_config.json").is_file():
        model.generation_config = json_of(folder / "generation_config.json")
        _tell_what_is_ignored(folder, model.generation_config)
    model.tokenizer = tokenizer_of(folder)
    return _adapted(model, path, adapter)


def _tell_what_is_ignored(folder: Path, config: Mapping[str, Any]) -> None:
    """Warn of settings of generation that other libraries follow, and that change tokens."""
    ignored = [
        name for name in _IGNORED if config.get(name, _IGNORED[name]) not in (None, _IGNORED[name], [])
    ]
    if ignored:
        warnings.warn(
            f"generation does not follow {', '.join(ignored)} of {folder / 'generation_config.json'}",
            PenstockWarning,
            stacklevel=3,
        )


def _adapted(model: LanguageModel, path: Path, adapter: str | Path | None) -> LanguageModel:
    """A model that was loaded from a path, with its adapters, in evaluation mode."""
    model.source = path.absolute()
    if adapter is not None:
        load_lora(model, Path(adapter))
    return model.eval()


def _check_layers(folder: Path, kind: Family, settings: Settings, stored: Mapping[str, Stored]) -> None:
    """Check the number of layers against the files, before a model of that size is built."""
    numbers = {int(match[1]) for name in stored if (match := _LAYER.search(name))}
    if len(numbers) != settings.integer(kind.layers):
        raise CheckpointError(
            f"{folder} does not hold a model of its own configuration: the number of layers is "
            f"{len(numbers)}, and {settings.integer(kind.layers)} by config.json"
        )


def _load_weights(
    folder: Path,
    kind: Family,
    model: LanguageModel,
    settings: Settings,
    stored: Mapping[str, Stored],
    dtype: DType | None,
) -> None:
    """Give a model its weights, after a check of all names and shapes."""
    sources: list[tuple[Tensor, Stored, bool]] = []
    used = set()
    for name, tensor in model.file_tensors():
        theirs, transposed = model.weight_name(name)
        # Files of a model without its head lack the first part of all names.
        theirs = theirs if theirs in stored else theirs.partition(".")[2]
        if theirs not in stored:
            weight = model.weight_name(name)[0]
            raise CheckpointError(f"{folder} lacks the weight {weight}{_of_a_class(kind, settings)}")
        wanted = tensor.shape[::-1] if transposed else tensor.shape
        if stored[theirs].shape != wanted:
            raise CheckpointError(
                f"{folder} does not hold a model of its own configuration: {theirs} has the shape "
                f"{stored[theirs].shape}, and {wanted} by config.json"
            )
        _check_dtype(folder, theirs, tensor, stored[theirs])
        used.add(theirs)
        sources.append((tensor, stored[theirs], transposed))
    beyond = sorted(name for name in stored if name not in used and not _NO_WEIGHT.fullmatch(name))
    if _HEAD in beyond:  # where the head is the embedding
        _check_head(folder, model, stored[_HEAD], sources)
        beyond.remove(_HEAD)
    if beyond:
        raise CheckpointError(
            f"{folder} has weights that the family {kind.model_type} does not: {', '.join(beyond[:3])}"
            f"{_of_a_class(kind, settings)}"
        )
    dtype = _common_dtype(folder, settings, sources) if dtype is None else dtype
    for tensor, source, transposed in sources:
        array = source.array().T if transposed else source.array()
        convert = dtype is not None and tensor.dtype.kind == "f"
        given = array.astype(dtype.numpy) if dtype is not None and convert else array
        assign(tensor, from_numpy(given, tensor.device))


def _check_dtype(folder: Path, name: str, tensor: Tensor, source: Stored) -> None:
    """Raise where a weight is no float in a file: it may be an integer that has a scale somewhere."""
    if tensor.dtype.kind == "f" and isinstance(source, StoredTensor) and source.dtype not in _FLOATS:
        raise CheckpointError(
            f"{folder}: {name} is {shown(source.dtype)}, and weights are {', '.join(_FLOATS)}; "
            f"of quantized models, those that penstock wrote and GGUF files are read"
        )


def _of_a_class(kind: Family, settings: Settings) -> str:
    """What a message says of files that are of another class of transformers."""
    named = settings.values.get("architectures")
    if not isinstance(named, list) or not named or kind.architecture in named:
        return ""
    return f"; by config.json it is a {shown(named[0])}, not a {kind.architecture}"


def _common_dtype(
    folder: Path, settings: Settings, sources: Sequence[tuple[Tensor, Stored, bool]]
) -> DType | None:
    """That of the configuration, as in transformers, where matrices have several."""
    files = [source for _, source, _ in sources if isinstance(source, StoredTensor) and len(source.shape) > 1]
    kinds = sorted({str(file.numpy_dtype) for file in files if file.dtype in _FLOATS})
    if len(kinds) < 2:
        return None
    name = settings.values.get("dtype") or settings.values.get("torch_dtype")  # of older configurations
    if name not in kinds:
        raise CheckpointError(
            f"{folder} has weights of {' and '.join(kinds)}, and the dtype of config.json is none of these; "
            f"ps.models.load(folder, dtype={kinds[0]!r}) converts all"
        )
    return checked(name)


def _check_head(
    folder: Path, model: LanguageModel, head: Stored, sources: Sequence[tuple[Tensor, Stored, bool]]
) -> None:
    """Raise unless a head that is not used is a copy of the embedding."""
    embedding = next((source for tensor, source, _ in sources if tensor is model.head_weight), None)
    if embedding is None:  # a quantized copy of it is the head
        return
    starts = range(0, embedding.shape[0], _ROWS)
    one, other = head.array(), embedding.array()
    if one.shape != other.shape or not all(
        np.array_equal(one[start : start + _ROWS], other[start : start + _ROWS]) for start in starts
    ):
        raise CheckpointError(
            f"{folder} does not hold a model of its own configuration: {_HEAD} is no copy of the embedding, "
            f"and by config.json (tie_word_embeddings) it is"
        )
