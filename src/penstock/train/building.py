"""What a configuration trains: the model, its optimizer, and the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.distributed import DataParallel
from penstock.errors import SettingError
from penstock.models import LanguageModel
from penstock.models.sizes import SIZES, context_key, sized
from penstock.nn import GPT
from penstock.nn.layers import Where
from penstock.optim import AdamW, Optimizer
from penstock.train.bases import check_context, own_context
from penstock.train.config import CONTEXT, MOST_CONTEXT, Config


def settled(config: Config) -> Config:
    """The configuration of a new run, with a context, and the whole path of its model.

    A SettingError names what does not go together, or that there is no such model.
    """
    setting = config.model
    if not config.lora.rank and (name := _changed(config.lora, "alpha", "dropout", "targets")):
        raise SettingError(f"lora.{name} is for adapters, and without a rank (--lora 8) there are none")
    if not setting.name:
        _check_no_adapters(config, "a GPT of one's own")
        return config if setting.context else config.changed({"model": {"context": CONTEXT}})
    if name := _changed(setting, "width", "layers", "heads"):
        raise SettingError(f"model.{name} is for a GPT of one's own, and not for {setting.name}")
    if setting.is_size:
        _check_no_adapters(config, f"the named size {setting.name}")
        own = SIZES[setting.name][context_key(SIZES[setting.name])]
        if setting.dropout and SIZES[setting.name]["model_type"] != "gpt2":
            raise SettingError(f"model.dropout is for a GPT, and {setting.name} has none")
        return config.changed({"model": {"context": setting.context or min(own, MOST_CONTEXT)}})
    if setting.dropout:
        raise SettingError("model.dropout is for training from scratch; that of adapters is lora.dropout")
    if _changed(config.data, "tokenizer"):
        raise SettingError(f"data.tokenizer is for training from scratch; {setting.name} has its own")
    path = Path(setting.name).absolute()
    if not path.exists():
        raise SettingError(
            f"there is no model {setting.name}; it is a folder, a GGUF file, or one of {', '.join(SIZES)}"
        )
    own = own_context(path)
    check_context(config, own)
    return config.changed(
        {"model": {"name": str(path), "context": setting.context or min(own, MOST_CONTEXT)}}
    )


def _changed(section: Any, *names: str) -> str:
    """The first of these settings that does not have its default value; empty: all have."""
    changed = (item.name for item in fields(section) if getattr(section, item.name) != item.default)
    return next((name for name in changed if name in names), "")


def _check_no_adapters(config: Config, what: str) -> None:
    if config.lora.rank:
        raise SettingError(
            f"LoRA adapters need a model that was trained before, and {what} begins with random weights; "
            "--model FOLDER names a model"
        )


def build_model(
    config: Config, vocab_size: int, device: Where = None, initialize: bool = True
) -> LanguageModel:
    """The model of a configuration that is trained from scratch; `initialize`: with fresh weights."""
    shape = config.model
    if shape.is_size:
        return ps.models.build(sized(shape.name, vocab_size, shape.context, shape.dropout), device)
    return GPT(
        vocab_size,
        shape.context,
        shape.width,
        shape.layers,
        shape.heads,
        shape.dropout,
        device=device,
        initialize=initialize,
    )


def make_optimizer(model: LanguageModel, config: Config) -> AdamW:
    """The optimizer of a configuration, for what is not frozen."""
    setting = config.optimizer
    trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
    matrices = [tensor for tensor in trained if tensor.ndim >= 2]
    others = [tensor for tensor in trained if tensor.ndim < 2]
    groups = [{"params": matrices, "weight_decay": setting.weight_decay}]
    if others:
        groups.append({"params": others, "weight_decay": 0.0})
    return AdamW(
        groups,
        lr=setting.learning_rate,
        betas=(setting.beta1, setting.beta2),
        clip_norm=setting.clip_norm,
    )


def parallel(optimizer: Optimizer, config: Config) -> Optimizer:
    """The optimizer for the ranks of a configuration: as it is, if batches have no shards."""
    setting = config.ranks
    if not setting.shards:
        return optimizer
    zero: Any = setting.zero
    return DataParallel(optimizer, shards=setting.shards, exact=setting.exact, zero=zero)


def loss_of(model: LanguageModel) -> Callable[[ps.Tensor], ps.Tensor]:
    """The loss of a batch of tokens (B, context + 1)."""

    def loss(tokens: ps.Tensor) -> ps.Tensor:
        return model.loss(tokens[:, :-1], tokens[:, 1:])

    return loss
