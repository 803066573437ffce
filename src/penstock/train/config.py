"""What a run is made of: one tree of settings, read from TOML and written back into the run's folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from penstock.config import parse_bytes
from penstock.errors import SettingError
from penstock.files import parse_toml, read_text
from penstock.printable import shown

PRECISIONS = ("float32", "float16", "bfloat16")
TOKENIZERS = ("bpe", "bytes", "characters")
_MOST_LAYERS = 10_000  # each is Python objects and kernels, however narrow it is
_MOST_TOKENS = 1 << 22  # the library that trains a tokenizer takes memory for all of them at once


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the GPT."""

    context: int = 128  # tokens that it sees at once
    width: int = 128  # numbers for each token
    layers: int = 4
    heads: int = 4
    dropout: float = 0.0
    precision: str = "float32"  # of what is computed; with float16 and bfloat16, float32 masters are trained

    def __post_init__(self) -> None:
        for name in ("context", "width", "layers", "heads"):
            _check(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "1 or more")
        _check(self.layers <= _MOST_LAYERS, "model.layers", self.layers, f"at most {_MOST_LAYERS}")
        _check(self.width % self.heads == 0, "model.width", self.width, f"a multiple of heads, {self.heads}")
        _check(0 <= self.dropout < 1, "model.dropout", self.dropout, "from 0 to less than 1")
        _check(self.precision in PRECISIONS, "model.precision", self.precision, " or ".join(PRECISIONS))


@dataclass(frozen=True)
class DataConfig:
    """The text, and how it is cut into batches."""

    path: str = ""  # a file, or a folder of files; empty: the sources of the Python that runs
    tokenizer: str = "bpe"  # byte-level pairs made from the text, or plain bytes or characters
    vocabulary: int = 2048  # tokens of a bpe tokenizer; those of the other two come by themselves
    validation: float = 0.1  # the part of the text that is kept for validation
    batch: int = 16  # windows in a batch

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

    learning_rate: float = 1e-3  # the highest one
    final_rate: float = 1e-4
    warmup: int = 50  # steps until the highest rate
    weight_decay: float = 0.1  # of matrices alone
    beta1: float = 0.9
    beta2: float = 0.99
    clip_norm: float = 1.0  # the length that gradients, all as one vector, are cut to
    accumulate: int = 1  # batches whose gradients make one step

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

    steps: int = 1000
    seed: int = 1  # the same seed gives the same losses
    device: str = ""  # a name from `penstock devices`, or auto; empty: the default one
    memory: str = ""  # the most that is taken from the device, such as 2GiB; empty: what it gives
    evaluate_every: int = 100  # steps between two evaluations
    checkpoint_every: int = 0  # steps between two checkpoints; 0: one follows each evaluation
    evaluate_batches: int = 8

    def __post_init__(self) -> None:
        for name in ("steps", "evaluate_every", "evaluate_batches"):
            _check(getattr(self, name) >= 1, f"run.{name}", getattr(self, name), "1 or more")
        _check(self.checkpoint_every >= 0, "run.checkpoint_every", self.checkpoint_every, "0 or more")
        _check(0 <= self.seed < 1 << 64, "run.seed", self.seed, "from 0 to less than 2**64")
        if self.memory:
            parse_bytes(self.memory)


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)

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
        """The same as the text of a file, for `with_file`."""
        sections = []
        for name, values in self.tree().items():
            # What JSON makes of these kinds of value is TOML too.
            lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
            sections.append("\n".join([f"[{name}]", *lines, ""]))
        return "\n".join(sections)


def _known(name: str, part: Any, unknown: str, known: str) -> None:
    names = [item.name for item in fields(part)]
    if name not in names:
        raise SettingError(f"{unknown} {shown(name)}; {known} {', '.join(names)}")


def _of_kind(name: str, value: object, now: object) -> object:
    """The value, of the kind of the one that is there now."""
    kind = type(now)
    if type(value) is int and abs(value) >= 1 << 64:
        raise SettingError(f"{name} is less than 2**64, and {shown(value)} was given")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        wanted = {int: "an integer", float: "a number", str: "a text in quotes"}[kind]
        raise SettingError(f"{name} is {wanted}, and {shown(value)} was given")
    return value


def _check(right: bool, name: str, value: object, wanted: str) -> None:
    if not right:
        raise SettingError(f"{name} is {wanted}, and {shown(value)} was given")
