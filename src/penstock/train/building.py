"""What a configuration trains: the model, its optimizer, and the step."""

from __future__ import annotations

from collections.abc import Callable

import penstock as ps
from penstock.nn import GPT
from penstock.optim import AdamW
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


def make_steps(
    model: GPT, optimizer: AdamW, config: Config
) -> tuple[Callable[[ps.Tensor, bool, bool], ps.Tensor], Callable[[ps.Tensor], ps.Tensor]]:
    """The step that trains on a batch of tokens, and the loss of a batch without training."""
    accumulate = config.optimizer.accumulate

    @ps.jit
    def train_step(tokens: ps.Tensor, first: bool, last: bool) -> ps.Tensor:
        # At the `first` batch there are no gradients yet to add to.
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        optimizer.backward(loss if accumulate == 1 else loss / accumulate)
        if last:
            optimizer.step()
        return loss

    @ps.jit
    def loss_of(tokens: ps.Tensor) -> ps.Tensor:
        with ps.no_grad():
            return model.loss(tokens[:, :-1], tokens[:, 1:])

    return train_step, loss_of
