"""The configuration of a run: a tree of settings, read from TOML and written to the run's folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from penstock.config import explanation, parse_bytes, setting
from penstock.errors import SettingError
from penstock.files import parse_toml, read_text
from penstock.models.sizes import SIZES
from penstock.printable import shown

PRECISIONS = ("float32", "float16", "bfloat16")
TOKENIZERS = ("bpe", "bytes", "characters")
CONTEXT, MOST_CONTEXT = 128, 1024  # what is taken of a GPT, and at most of another model, if none is set
MOST_LAYERS = 10_000  # each takes Python objects and kernels, however narrow it is
_WIDEST = 30  # columns of a file of settings before the explanations, but for values that are longer
_SEVERAL = ("ranks.zero",)  # settings of several types, which check their values themselves
_MOST_TOKENS = 1 << 22  # the library that trains a tokenizer allocates memory for all of them


@dataclass(frozen=True)
class ModelConfig:
    """The model: a GPT of some shape, a named size, or the model in a folder."""

    name: str = setting(
        "", "a named size, a folder or GGUF file with a model, or a run; empty: a GPT of these sizes"
    )
    context: int = setting(
        0,
        f"tokens that the model sees at once; 0: {CONTEXT}, or what a named model has, up to {MOST_CONTEXT}",
    )
    width: int = setting(128, "the embedding size")
    layers: int = setting(4, "blocks of attention and MLP")
    heads: int = setting(4, "heads of attention; they divide the width")
    dropout: float = setting(0.0, "the chance of each value to be left out in training")
    precision: str = setting(
        "float32", "dtype of the computation: float32; or float16 or bfloat16 with float32 masters"
    )

    def __post_init__(self) -> None:
        _check(self.context >= 0, "model.context", self.context, "0 or more")
        for name in ("width", "layers", "heads"):
            _check(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "1 or more")
        _check(self.layers <= MOST_LAYERS, "model.layers", self.layers, f"at most {MOST_LAYERS}")
        _check(self.width % self.heads == 0, "model.width", self.width, f"a multiple of heads, {self.heads}")
        _check(0 <= self.dropout < 1, "model.dropout", self.dropout, "from 0 to less than 1")
        _check(self.precision in PRECISIONS, "model.precision", self.precision, " or ".join(PRECISIONS))

    @property
    def is_size(self) -> bool:
        """Whether it is a named size, which is trained from scratch."""
        return self.name in SIZES

    @property
    def is_loaded(self) -> bool:
        """Whether its weights come from files."""
        return bool(self.name) and not self.is_size


@dataclass(frozen=True)
class DataConfig:
    """The text, and how it is cut into batches."""

    path: str = setting("", "a file or a folder of text; empty: the sources of this Python")
    tokenizer: str = setting("bpe", "how text becomes tokens: bpe, trained on the text; bytes; or characters")
    vocabulary: int = setting(2048, "kinds of token of a bpe tokenizer; the others have as many as they need")
    validation: float = setting(0.1, "the part of the text that is kept for validation")
    batch: int = setting(16, "windows in a batch")

    def __post_init__(self) -> None:
        _check(self.tokenizer in TOKENIZERS, "data.tokenizer", self.tokenizer, " or ".join(TOKENIZERS))
        _check(
            256 <= self.vocabulary <= _MOST_TOKENS,
            "data.vocabulary",
            self.vocabulary,
            f"256 or more, and at most {_MOST_TOKENS}",
        )
        _check(0 <= self.validation < 1, "data.validation", self.validation, "from 0 to less than 1")
        _check(self.batch >= 1, "data.batch", self.batch, "1 or more")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, and its rate: up in even steps, then down along half a cosine."""

    learning_rate: float = setting(1e-3, "the highest rate, after the warmup")
    final_rate: float = setting(1e-4, "the rate of the last step, at the end of half a cosine")
    warmup: int = setting(50, "steps until the highest rate")
    weight_decay: float = setting(0.1, "decay of the matrices and embeddings, and of nothing else")
    beta1: float = setting(0.9, "the decay of the mean of the gradients")
    beta2: float = setting(0.99, "the decay of the mean of their squares")
    clip_norm: float = setting(1.0, "the largest global norm of the gradients")
    accumulate: int = setting(1, "batches whose gradients are added for a step")

    def __post_init__(self) -> None:
        for name in ("learning_rate", "final_rate", "warmup", "weight_decay"):
            _check(getattr(self, name) >= 0, f"optimizer.{name}", getattr(self, name), "0 or more")
        for name in ("beta1", "beta2"):
            _check(
                0 <= getattr(self, name) < 1,
                f"optimizer.{name}",
                getattr(self, name),
                "from 0 to less than 1",
            )
        _check(self.clip_norm > 0, "optimizer.clip_norm", self.clip_norm, "more than 0")
        _check(self.accumulate >= 1, "optimizer.accumulate", self.accumulate, "1 or more")


@dataclass(frozen=True)
class RunConfig:
    """How long, and on what."""

    steps: int = setting(1000, "steps of the whole run")
    seed: int = setting(1, "the same seed gives the same losses")
    device: str = setting("", "a name from `penstock devices`, or auto; empty: the default device")
    memory: str = setting("", "a budget for the memory of the device, such as 2GiB; empty: no limit")
    evaluate_every: int = setting(100, "steps between two evaluations")
    checkpoint_every: int = setting(0, "steps between two checkpoints; 0: after each evaluation")
    evaluate_batches: int = setting(8, "batches of an evaluation")

    def __post_init__(self) -> None:
        for name in ("steps", "evaluate_every", "evaluate_batches"):
            _check(getattr(self, name) >= 1, f"run.{name}", getattr(self, name), "1 or more")
        _check(self.checkpoint_every >= 0, "run.checkpoint_every", self.checkpoint_every, "0 or more")
        _check(0 <= self.seed < 1 << 64, "run.seed", self.seed, "from 0 to less than 2**64")
        if self.memory:
            parse_bytes(self.memory)


@dataclass(frozen=True)
class LoRAConfig:
    """Adapters that are trained instead of all weights."""

    rank: int = setting(0, "rank of LoRA adapters, which are trained in place of all weights; 0: no adapters")
    alpha: float = setting(16.0, "adapters are multiplied by alpha / rank")
    dropout: float = setting(0.0, "the chance of each input of an adapter to be left out in training")
    targets: str = setting("all-linear", "layers with adapters, such as q_proj,v_proj; or all-linear")

    def __post_init__(self) -> None:
        _check(self.rank >= 0, "lora.rank", self.rank, "0 or more")
        _check(self.alpha > 0, "lora.alpha", self.alpha, "more than 0")
        _check(0 <= self.dropout < 1, "lora.dropout", self.dropout, "from 0 to less than 1")


@dataclass(frozen=True)
class RanksConfig:
    """Several devices, with a process each."""

    shards: int = setting(
        0, "parts of a batch, whose gradients are summed in a fixed order; 0: 8 on several devices"
    )
    exact: bool = setting(True, "the number of devices changes no bit; false: sums in the engine's order")

    zero: int | str = setting(
        "auto",
        "1: each device keeps a part of the optimizer's state; 2: and of gradients; 3: and of parameters; "
        "auto: the least that the memory budget allows, 0 without one",
    )

    def __post_init__(self) -> None:
        known = self.zero in (0, 1, 2, 3, "auto") and not isinstance(self.zero, bool)
        _check(known, "ranks.zero", self.zero, "0, 1, 2, 3 or auto")
        powers = self.shards & (self.shards - 1) == 0 and 0 <= self.shards <= 128
        _check(powers, "ranks.shards", self.shards, "0 or a power of 2 up to 128")


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    ranks: RanksConfig = field(default_factory=RanksConfig)

    def changed(self, tree: Mapping[str, Any], where: str = "the settings") -> Config:
        """With the values of a tree in place of its own; a SettingError says what is unknown or wrong."""
        parts = {}
        for name, values in tree.items():
            _known(name, self, f"{where}: there is no section", "the sections are")
            if not isinstance(values, Mapping):
                raise SettingError(f"{where}: [{name}] is a section, and {shown(values)} was given")
            part = getattr(self, name)
            for key in values:
                _known(key, part, f"{where}: [{name}] has no key", "its keys are")
            given = {
                key: _of_kind(f"{name}.{key}", value, getattr(part, key)) for key, value in values.items()
            }
            parts[name] = replace(part, **given)
        return replace(self, **parts)

    def with_file(self, path: Path) -> Config:
        """With the values of a TOML file in place of its own."""
        try:
            tree = parse_toml(read_text(path))
        except OSError as error:
            raise SettingError(f"the configuration {path} cannot be read: {error.strerror}") from None
        except ValueError as error:  # not TOML, or not UTF-8
            raise SettingError(f"{path} is not TOML: {error}") from None
        return self.changed(tree, str(path))

    def tree(self) -> dict[str, dict[str, Any]]:
        """All values by section and key, for `changed`."""
        return asdict(self)

    def toml(self) -> str:
        """The settings as the text of a file, for `with_file`, each with its explanation."""
        sections = []
        for section in fields(self):
            values = getattr(self, section.name)
            # For these types of value, JSON is valid TOML.
            pairs = {
                f"{key.name} = {json.dumps(getattr(values, key.name), ensure_ascii=False)}": explanation(key)
                for key in fields(values)
            }
            width = min(max(map(len, pairs)), _WIDEST)
            lines = [f"{pair:<{width}}  # {explained}" for pair, explained in pairs.items()]
            sections.append("\n".join([f"[{section.name}]", *lines, ""]))
        return "\n".join(sections)


def _known(name: str, part: Any, unknown: str, known: str) -> None:
    names = [item.name for item in fields(part)]
    if name not in names:
        raise SettingError(f"{unknown} {shown(name)}; {known} {', '.join(names)}")


def _of_kind(name: str, value: object, now: object) -> object:
    """The value, checked to have the type of the present value."""
    kind = type(now)
    if name in _SEVERAL:
        return value
    if type(value) is int and abs(value) >= 1 << 64:
        raise SettingError(f"{name} is less than 2**64, and {shown(value)} was given")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        wanted = {int: "an integer", float: "a number", str: "a text in quotes", bool: "true or false"}[kind]
        raise SettingError(f"{name} is {wanted}, and {shown(value)} was given")
    return value


def _check(right: bool, name: str, value: object, wanted: str) -> None:
    if not right:
        raise SettingError(f"{name} is {wanted}, and {shown(value)} was given")
