"""How well a model predicts a text: the mean cross-entropy of its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.models.model import LanguageModel
from penstock.nn.module import evaluating
from penstock.tensor.core import from_numpy
from penstock.tensor.jit import jit
from penstock.tensor.recording import no_grad

_IGNORED = -100  # a target that counts for nothing


@dataclass(frozen=True)
class Evaluation:
    """The mean cross-entropy of predicted tokens, in nats."""

    tokens: int
    loss: float

    @property
    def perplexity(self) -> float:
        """Of how many equally likely tokens the next would have to be guessed."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluate(
    model: LanguageModel,
    ids: npt.ArrayLike,
    context: int | None = None,
    batch: int = 8,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Evaluation:
    """Predict every token of a text but the first, from those before it in windows of `context` tokens.

    The windows do not overlap; by default they are as long as the model's context, `batch` of them at a time.
    `progress` is told of each batch how many tokens were predicted.
    """
    text = np.asarray(ids).reshape(-1)
    length = model.context if context is None else context
    if not 1 <= length <= model.context or batch < 1:
        raise ValueError(
            f"a context is from 1 to {model.context}, a batch 1 or more, and {length} and {batch} were given"
        )
    if len(text) < 2:
        raise ValueError(f"there is nothing to predict in a text of {len(text)} tokens")
    inputs, targets = _windows(text, min(length, len(text) - 1), batch)
    loss_of = jit(model.loss)
    device, total, seen = model.head_weight.device, 0.0, 0
    with no_grad(), evaluating():
        for at in range(0, len(inputs), batch):
            rows = slice(at, at + batch)
            count = int((targets[rows] != _IGNORED).sum())
            loss = loss_of(from_numpy(inputs[rows], device), from_numpy(targets[rows], device))
            total += count * loss.item()
            seen += count
            progress(count)
    return Evaluation(seen, total / seen)


def _windows(
    text: npt.NDArray[np.integer], length: int, batch: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Inputs and targets, (windows, length), filled up to a multiple of `batch`: one program serves all."""
    count = -(-(len(text) - 1) // length)
    rows = -(-count // batch) * batch
    inputs, targets = np.zeros(rows * length, np.int64), np.full(rows * length, _IGNORED, np.int64)
    inputs[: len(text) - 1], targets[: len(text) - 1] = text[:-1], text[1:]
    return inputs.reshape(rows, length), targets.reshape(rows, length)
