"""The families of models that are known, by their `model_type` in Hugging Face's configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.errors import CheckpointError
from penstock.models.settings import Settings
from penstock.nn.layers import Where, undrawn
from penstock.printable import shown

if TYPE_CHECKING:
    from penstock.models.model import LanguageModel

    Build = Callable[[Settings, Where], LanguageModel]

_MODULES = ("gpt2", "llama", "mistral", "qwen", "gemma")  # each registers its families


@dataclass(frozen=True)
class Family:
    """How a family is recognized and built."""

    model_type: str
    architecture: str  # the class of transformers, which files name
    layers: str  # the key of the number of layers
    build: Build  # a model without its weights


_FAMILIES: dict[str, Family] = {}


def family(model_type: str, architecture: str, layers: str = "num_hidden_layers") -> Callable[[Build], Build]:
    """Register the function that builds the models of a family from their configuration."""

    def register(build: Build) -> Build:
        _FAMILIES[model_type] = Family(model_type, architecture, layers, build)
        return build

    return register


def families() -> dict[str, Family]:
    """All families by `model_type`."""
    for name in _MODULES:
        import_module(f"penstock.models.{name}")
    return _FAMILIES


def family_of(settings: Settings) -> Family:
    """The family that a configuration names."""
    known, given = families(), settings.values.get("model_type")
    if not isinstance(given, str) or given not in known:
        raise CheckpointError(
            f"{settings.where}: the model_type {shown(given)} is not known; there are {', '.join(known)}"
        )
    return known[given]


def build(config: Mapping[str, Any], device: Where = None) -> LanguageModel:
    """A model with fresh weights from a configuration such as `{"model_type": "llama", ...}`.

    The keys are those of Hugging Face's `config.json`.
    """
    if not isinstance(config, Mapping):
        raise TypeError(
            f"a configuration is a dict with the keys of a config.json, and {config!r} was given; "
            f"ps.models.load reads a folder"
        )
    settings = Settings(config, "the configuration")
    model = configured(family_of(settings), settings, device)
    model.draw_weights()
    return model


def configured(kind: Family, settings: Settings, device: Where) -> LanguageModel:
    """A model of a family without weights."""
    try:
        with undrawn():
            model = kind.build(settings, device)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{settings.where} does not describe a model of the family {kind.model_type}: {error}"
        ) from None
    model.config = {"architectures": [kind.architecture], **settings.values}
    return model
