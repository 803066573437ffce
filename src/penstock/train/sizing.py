"""Whether a model can fit at all, before anything is allocated for it."""

from __future__ import annotations

import psutil

from penstock.errors import SettingError
from penstock.formatting import format_bytes
from penstock.runtime import Device
from penstock.train.config import Config, ModelConfig

_FLOAT32 = 4  # bytes
_MOMENTS = 2 * _FLOAT32  # AdamW's for each parameter


def check_fits(config: Config, vocab_size: int, device: Device, training: bool = True) -> None:
    """Raise SettingError if a lower bound of a model's memory is more than the device or the host has.

    It counts what is certainly needed: weights and, in training, moments, the tokens of a batch, and a value
    of each layer for each token, which the gradient needs. A model that passes may still be too large.
    """
    model = config.model
    weights = parameters(model, vocab_size)
    needed = weights * _FLOAT32
    tokens = config.data.batch * (model.context + 1)
    if training:
        itemsize = _FLOAT32 if model.precision == "float32" else _FLOAT32 // 2
        needed += weights * _MOMENTS + tokens * _FLOAT32 * (1 + config.run.evaluate_batches)
        needed += tokens * model.width * model.layers * itemsize
    totals = [member.capabilities.total_bytes for member in device.members]
    there = max(psutil.virtual_memory().total, *totals)
    if needed > there:
        batches = f" and batches of {config.data.batch:,} x {model.context:,} tokens" if training else ""
        raise SettingError(
            f"a GPT of {weights:,} parameters{batches} takes at least {format_bytes(needed)}, and there are "
            f"{format_bytes(there)}; make layers, width, context, vocabulary or batch smaller"
        )


def parameters(model: ModelConfig, vocab_size: int) -> int:
    """The number of parameters of a GPT."""
    block = 12 * model.width**2 + 13 * model.width
    return model.layers * block + (vocab_size + model.context + 2) * model.width
