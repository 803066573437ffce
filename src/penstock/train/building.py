"""What a configuration trains: the model, its optimizer, and the loss."""

from __future__ import annotations

from collections.abc import Callable

import penstock as ps
from penstock.distributed import DataParallel
from penstock.nn import GPT
from penstock.optim import AdamW, Optimizer
from penstock.train.config import Config


def build_model(config: Config, vocab_size: int) -> GPT:
    """The model of a configuration, with fresh weights, on the default device."""
    shape = config.model
    return GPT(vocab_size, shape.context, shape.width, shape.layers, shape.heads, shape.dropout)


def make_optimizer(model: GPT, config: Config) -> AdamW:
    """The optimizer of a configuration."""
    setting = config.optimizer
    matrices = [tensor for tensor in model.parameters() if tensor.ndim >= 2]
    others = [tensor for tensor in model.parameters() if tensor.ndim < 2]
    return AdamW(
        [{"params": matrices, "weight_decay": setting.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=setting.learning_rate,
        betas=(setting.beta1, setting.beta2),
        clip_norm=setting.clip_norm,
    )


def parallel(optimizer: Optimizer, config: Config) -> Optimizer:
    """The optimizer for the ranks of a configuration: as it is, if batches have no shards."""
    setting = config.ranks
    if not setting.shards:
        return optimizer
    return DataParallel(optimizer, shards=setting.shards, exact=setting.exact, zero=setting.zero)


def loss_of(model: GPT) -> Callable[[ps.Tensor], ps.Tensor]:
    """The loss of a batch of tokens (B, context + 1)."""

    def loss(tokens: ps.Tensor) -> ps.Tensor:
        return model.loss(tokens[:, :-1], tokens[:, 1:])

    return loss
