"""Models that runs begin with: those of folders, GGUF files and other runs, and of a run that goes on."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import penstock as ps
from penstock.errors import CheckpointError, SettingError
from penstock.files import open_regular
from penstock.models import LanguageModel
from penstock.models.gguf import read_gguf
from penstock.models.lora import adapters
from penstock.models.registry import configured, family_of
from penstock.models.settings import Settings, json_of
from penstock.models.tokenizing import tokenizer_of
from penstock.models.weights import stored_tensors
from penstock.nn.layers import Where
from penstock.nn.module import Module
from penstock.tensor.core import resolve
from penstock.train.checkpoint import Arrays, Checkpoint, checkpoint_files, files_of, text_config
from penstock.train.config import MOST_LAYERS, Config
from penstock.train.report import CONFIG_FILE
from penstock.train.sizing import check_fits

BASE = "base"  # of a checkpoint of adapters: the fingerprint of the model that they belong to
_CHUNK = 1 << 20  # bytes


def load_base(config: Config, device: Where = None) -> LanguageModel:
    """The model that a run fine-tunes, with adapters if it has any; adapters from before are merged.

    Under adapters, the weights of a GGUF file that can stay packed do.
    """
    setting, lora = config.model, config.lora
    packed_file = bool(lora.rank) and Path(setting.name).suffix == ".gguf"
    model = ps.models.load(setting.name, device=device, dtype=setting.precision, quantized=packed_file)
    try:
        ps.models.merge_lora(model)
    except TypeError as error:
        raise SettingError(f"{setting.name} cannot be fine-tuned: {error}") from None
    if model.tokenizer is None:
        raise SettingError(f"{setting.name} has no tokenizer.json, which fine-tuning needs; put it there")
    if model.tokenizer.vocab_size > model.vocab_size:
        raise SettingError(
            f"the tokenizer of {setting.name} has {model.tokenizer.vocab_size:,} tokens, and the model only "
            f"{model.vocab_size:,}"
        )
    packed = [path for path, module in model.named_modules() if _is_packed(module)]
    if packed and not lora.rank:
        raise SettingError(
            f"{setting.name} has weights that cannot be trained, as {packed[0]} is quantized; "
            "--lora 8 trains adapters beside them"
        )
    if lora.rank:
        targets = [name.strip() for name in lora.targets.split(",")]
        try:
            ps.models.add_lora(model, lora.rank, lora.alpha, targets, lora.dropout)
        except ValueError as error:
            raise SettingError(f"lora.targets: {error}") from None
    return model


def _is_packed(layer: Module) -> bool:
    """Whether a linear layer has no weight that can be trained."""
    return hasattr(layer, "in_features") and not isinstance(vars(layer).get("weight"), ps.Tensor)


def described(path: Path, device: Where = None) -> LanguageModel:
    """The model of a folder or a GGUF file without its weights, and so without memory for them."""
    config = read_gguf(path)[0] if path.suffix == ".gguf" else json_of(path / "config.json")
    settings = Settings(config, str(path))
    family = family_of(settings)
    if settings.integer(family.layers) > MOST_LAYERS:
        raise settings.error(family.layers, f"at most {MOST_LAYERS}")
    return configured(family, settings, device)


def own_context(path: Path) -> int:
    """The most positions that a model can take."""
    if path.is_dir() and not (path / "config.json").exists() and (path / CONFIG_FILE).exists():
        return Config().with_file(path / CONFIG_FILE).model.context  # of a GPT of one's own
    return described(path).context


def check_context(config: Config, own: int) -> None:
    """Raise SettingError if windows of tokens are longer than a model can take."""
    if config.model.context > own:
        raise SettingError(
            f"model.context is at most {own}, as {config.model.name} has it, not {config.model.context}"
        )


def fingerprint(path: Path) -> str:
    """A hash of the files that hold the weights of a model."""
    if path.suffix == ".gguf":
        files = [path]
    elif checkpoint_files(path):
        files = files_of(checkpoint_files(path)[-1])
    else:
        files = [path / "config.json", *sorted({stored.path for stored in stored_tensors(path).values()})]
    digest = blake2b(digest_size=16)
    for file in files:
        try:
            with open_regular(file) as opened:
                while chunk := opened.read(_CHUNK):
                    digest.update(chunk)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def check_base(config: Config, checkpoint: Checkpoint, run: Path) -> None:
    """Raise CheckpointError unless the model that a run's adapters belong to is there, as it was."""
    path = Path(config.model.name)
    needed = f"{run} has LoRA adapters of the model {path}, and no weights of its own"
    if not path.exists():
        raise CheckpointError(
            f"{needed}; it is not there. If it was moved: penstock train --resume {run} --model FOLDER, or "
            f"ps.models.load(FOLDER, adapter={str(run)!r})"
        )
    if fingerprint(path) != checkpoint.more.get(BASE):
        raise CheckpointError(f"{needed}; the files there are not those that the run began with")


def model_of_run(
    config: Config, run: Path, checkpoint: Checkpoint, device: Where = None
) -> LanguageModel | None:
    """The model of a run, whose checkpoint is to be loaded into it; None for a GPT of one's own."""
    first = text_config(checkpoint, run)
    began = first.model.name
    if config.lora != first.lora:
        raise SettingError(f"{run} goes on with its adapters: the settings under [lora] cannot change")
    if config.model.name != began and not config.lora.rank:
        raise SettingError(
            f"{run} goes on with its model, {began or 'a GPT of its own'}; "
            f"a run with {config.model.name} is a new one"
        )
    if not config.model.name:
        return None
    if config.lora.rank:
        check_base(config, checkpoint, run)
        model = load_base(config, device)
    else:
        model = described(run, device)
        check_fits(config, model.vocab_size, resolve(device), model, training=False)
        if config.model.precision != "float32":
            model.to(config.model.precision)
        if (run / "generation_config.json").is_file():
            model.generation_config = json_of(run / "generation_config.json")
    check_context(config, model.context)
    model.tokenizer = tokenizer_of(run)
    return model


def trained_tensors(model: LanguageModel) -> dict[str, ps.Tensor]:
    """What a checkpoint has of a model: all of it, or only its adapters."""
    if not adapters(model):
        return model.saved_tensors()
    return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}


def load_trained(model: LanguageModel, state: Arrays) -> None:
    """Load what was trained into a model; a KeyError or ValueError says what does not fit."""
    if not adapters(model):
        model.load_state_dict(state)
        return
    own = {name for name, tensor in model.named_parameters() if tensor.requires_grad}
    wrong = sorted(set(state) ^ own)
    if wrong:
        raise KeyError(f"the adapters are of other layers: {', '.join(wrong[:3])} differ")
    model.load_state_dict(state, strict=False)
