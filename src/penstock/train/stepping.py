"""What a run computes: the jitted step that trains on a batch, and the values of a batch without training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from math import gcd
from typing import Any, TypeAlias

import penstock as ps
from penstock.errors import SettingError
from penstock.nn.module import evaluating
from penstock.optim.optimizer import Optimizer

LOSS = "loss"

Loss: TypeAlias = Callable[[Any, Any], ps.Tensor]  # of a model's outputs and the targets
Values: TypeAlias = ps.Tensor | Mapping[str, ps.Tensor]  # a loss, or a loss and metrics by name
Step: TypeAlias = Callable[..., Values]  # of the parts of a batch


def batch_values(model: ps.nn.Module, loss: Loss, metrics: Mapping[str, Loss]) -> Step:
    """A function of the parts of a batch: the loss and the metrics of a model.

    The last part of a batch is the targets, and those before it are the model's inputs. Inputs of a model in
    float16 or bfloat16 are converted to its dtype, and its outputs to float32.
    """
    dtypes = {tensor.dtype for tensor in model.parameters()}
    narrow = dtypes.pop() if len(dtypes) == 1 and dtypes <= {ps.float16, ps.bfloat16} else None

    def values(*batch: Any) -> dict[str, ps.Tensor]:
        if len(batch) < 2:
            raise SettingError(
                f"a batch has the model's inputs and the targets, and {len(batch)} part was given; for "
                "batches of another form, define the loss with @trainer.batch_loss"
            )
        *inputs, targets = batch
        if narrow is None:
            outputs = model(*inputs)
        else:
            outputs = _converted(model(*(_converted(part, narrow) for part in inputs)), ps.float32)
        named = {name: metric(outputs, targets) for name, metric in metrics.items()}
        return {LOSS: loss(outputs, targets), **named}

    return values


def _converted(value: Any, dtype: Any) -> Any:
    """Floating-point tensors in another dtype, also in tuples, lists and dicts."""
    if isinstance(value, ps.Tensor):
        return value.astype(dtype) if ps.isdtype(value.dtype, "real floating") else value
    if isinstance(value, (tuple, list)):
        return tuple(_converted(part, dtype) for part in value)
    if isinstance(value, Mapping):
        return {key: _converted(part, dtype) for key, part in value.items()}
    return value


def training_step(values_of: Step, optimizer: Optimizer) -> Callable[..., dict[str, ps.Tensor]]:
    """A jitted function that trains on a batch of several whose gradients are added.

    `size` of `total` samples are in this batch. `first` and `last`: whether it begins and ends the step; at
    the first batch there are no gradients yet to add to.
    """

    @ps.jit
    def train_step(batch: Any, size: int, total: int, first: bool, last: bool) -> dict[str, ps.Tensor]:
        values = named(values_of(*parts_of(batch)))
        loss, common = values[LOSS], gcd(size, total)
        share = loss if size == total else loss * (size // common) / (total // common)
        optimizer.backward(share)
        if last:
            optimizer.step()
        return values

    return train_step


def own_step(step: Step) -> Callable[..., dict[str, ps.Tensor]]:
    """The same for a user's own step, which does all of it."""

    @ps.jit
    @wraps(step)
    def train_step(batch: Any, size: int, total: int, first: bool, last: bool) -> dict[str, ps.Tensor]:
        return named(step(*parts_of(batch)))

    return train_step


def evaluation_step(values_of: Step) -> Callable[[Any], dict[str, ps.Tensor]]:
    """A jitted function: the values of a batch, in evaluation mode."""

    @ps.jit
    def evaluate(batch: Any) -> dict[str, ps.Tensor]:
        with ps.no_grad():
            return named(values_of(*parts_of(batch)))

    def in_evaluation_mode(batch: Any) -> dict[str, ps.Tensor]:
        with evaluating():  # around the call: a replay is for the mode that it was captured in
            return evaluate(batch)

    return in_evaluation_mode


def parts_of(batch: Any) -> tuple[Any, ...]:
    """The arguments of a function of a batch: the parts of a tuple, or else the batch."""
    return batch if isinstance(batch, tuple) else (batch,)


def named(values: Values) -> dict[str, ps.Tensor]:
    """The values of a batch by name; a SettingError says what they lack."""
    result = dict(values) if isinstance(values, Mapping) else {LOSS: values}
    if LOSS not in result:
        raise SettingError(f"a step returns its loss, or a dict with {LOSS!r} in it; it has {sorted(result)}")
    for name, value in result.items():
        if not isinstance(value, ps.Tensor) or value.size != 1:
            shape = f"shape {value.shape}" if isinstance(value, ps.Tensor) else type(value).__name__
            raise SettingError(f"{name} is a tensor with a single value, and {shape} was given; use its mean")
    return result
