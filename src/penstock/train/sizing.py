"""Whether a model can fit at all, before anything is allocated for it."""

from __future__ import annotations

import psutil

from penstock.errors import SettingError
from penstock.formatting import format_bytes
from penstock.models import LanguageModel
from penstock.models.registry import configured, family_of
from penstock.models.settings import Settings
from penstock.models.sizes import sized
from penstock.runtime import Device
from penstock.train.config import Config, ModelConfig

_FLOAT32 = 4  # bytes
_MOMENTS = 2 * _FLOAT32  # AdamW's for each parameter


def check_fits(
    config: Config,
    vocab_size: int,
    device: Device,
    model: LanguageModel | None = None,
    training: bool = True,
) -> None:
    """Raise SettingError if a lower bound of a model's memory is more than the device or the host has.

    It counts what is certainly needed: weights and, in training, moments, the tokens of a batch, and a value
    of each layer for each token, which the gradient needs. A model that passes may still be too large.
    `model` is the model, if there is one already.
    """
    shape, itemsize = config.model, _FLOAT32 if config.model.precision == "float32" else _FLOAT32 // 2
    if model is None and shape.is_size:
        settings = Settings(sized(shape.name, vocab_size, shape.context), shape.name)
        model = configured(family_of(settings), settings, device)
    weights = trained = parameters(shape, vocab_size)
    width, layers = shape.width, shape.layers
    if model is not None:
        sizes = [(tensor.size, tensor.requires_grad) for tensor in model.parameters()]
        weights, trained = sum(size for size, _ in sizes), sum(size for size, learns in sizes if learns)
        width, layers = model.head_weight.shape[1], len(model.blocks)
    needed = (weights - trained) * itemsize + trained * _FLOAT32
    tokens = config.data.batch * (shape.context + 1)
    if training:
        needed += trained * _MOMENTS + tokens * _FLOAT32 * (1 + config.run.evaluate_batches)
        needed += tokens * width * layers * itemsize
    totals = [member.capabilities.total_bytes for member in device.members]
    there = max(psutil.virtual_memory().total, *totals)
    if needed > there:
        batches = f" and batches of {config.data.batch:,} x {shape.context:,} tokens" if training else ""
        smaller = (
            "a smaller model, or a smaller context or batch, may fit"
            if shape.name
            else "make layers, width, context, vocabulary or batch smaller"
        )
        raise SettingError(
            f"{shape.name or 'a GPT'} of {weights:,} parameters{batches} takes at least "
            f"{format_bytes(needed)}, and there are {format_bytes(there)}; {smaller}"
        )


def parameters(model: ModelConfig, vocab_size: int) -> int:
    """The number of parameters of a GPT."""
    block = 12 * model.width**2 + 13 * model.width
    return model.layers * block + (vocab_size + model.context + 2) * model.width
