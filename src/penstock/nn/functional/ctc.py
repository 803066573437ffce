"""Connectionist temporal classification: labels of a sequence with unknown positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.nn.functional.common import wide
from penstock.nn.functional.losses import reduced
from penstock.tensor.arithmetic import equal, exp, log, logical_and, maximum, not_equal, where
from penstock.tensor.broadcasting import broadcast
from penstock.tensor.core import Tensor, from_numpy
from penstock.tensor.creation import arange, full
from penstock.tensor.dtypes import int64
from penstock.tensor.manipulation import astype, concat, expand_dims, reshape, squeeze, take_along_axis

Lengths = Tensor | Sequence[int]
_NEVER = -1e30  # the logarithm of probability 0: finite, so that gradients are not NaN


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """The negative log-probability of target sequences, summed over all alignments.

    `log_probs` is (time, batch, classes), `targets` (batch, longest target). If a target has no alignment,
    the loss is infinite, or 0 with `zero_infinity`. The mean divides each loss by the length of its target.

    >>> log_probs = ps.log_softmax(ps.zeros((4, 1, 3)), -1)
    >>> round(ps.nn.functional.ctc_loss(log_probs, ps.asarray([[1]]), [4], [1]).item(), 4)
    2.0919
    """
    if log_probs.ndim != 3 or targets.ndim != 2 or targets.shape[0] != log_probs.shape[1]:
        raise ValueError(
            f"ctc_loss takes log_probs of (time, batch, classes) and targets of (batch, length), and "
            f"{log_probs.shape} and {targets.shape} were given"
        )
    steps, _, classes = log_probs.shape
    if targets.dtype.kind not in "iu":
        raise TypeError(f"targets are integers, and {targets.dtype} was given")
    if not 0 <= blank < classes:
        raise ValueError(f"blank is one of {classes} classes, and {blank} was given")
    inputs = _lengths("input_lengths", input_lengths, log_probs, steps)
    lengths = _lengths("target_lengths", target_lengths, log_probs, targets.shape[1])
    logs = wide(log_probs)
    labels = _with_blanks(astype(targets, int64), lengths, blank)
    # At every time, the log-probability of each label and of the blanks between them.
    positions = broadcast(expand_dims(labels, axis=0), (steps, *labels.shape))
    label_logs = take_along_axis(logs, positions, axis=2)
    total = _total(label_logs, labels, inputs, lengths, blank)
    losses = where(total > _NEVER / 2, -total, 0.0 if zero_infinity else np.inf)
    if reduction == "mean":
        return reduced(losses / maximum(astype(lengths, losses.dtype), 1.0), "mean")
    return reduced(losses, reduction)


def _with_blanks(targets: Tensor, lengths: Tensor, blank: int) -> Tensor:
    """Targets with blanks before, between and after the labels, and beyond the end."""
    batch, longest = targets.shape
    inside = arange(longest, device=targets.device) < expand_dims(lengths, axis=1)
    known = expand_dims(where(inside, targets, blank), axis=2)
    blanks = full((batch, longest, 1), blank, dtype=int64, device=targets.device)
    pairs = reshape(concat([blanks, known], axis=2), (batch, 2 * longest))
    return concat([pairs, full((batch, 1), blank, dtype=int64, device=targets.device)], axis=1)


def _total(log_probs: Tensor, labels: Tensor, inputs: Tensor, lengths: Tensor, blank: int) -> Tensor:
    """The log-probability of all alignments, by the forward recursion over time."""
    steps, batch, width = log_probs.shape
    device, dtype = log_probs.device, log_probs.dtype
    positions = arange(width, device=device)
    never = full((batch, 2), _NEVER, dtype=dtype, device=device)
    # The blank between two labels may be skipped, unless the labels are equal.
    before = concat([full((batch, 2), blank, dtype=int64, device=device), labels[:, :-2]], axis=1)
    skips = logical_and(not_equal(labels, blank), not_equal(labels, before))
    state = where(positions < 2, log_probs[0], _NEVER)
    state = where(equal(expand_dims(inputs, axis=1), 0), where(equal(positions, 0), 0.0, _NEVER), state)
    for time in range(1, steps):
        padded = concat([never, state], axis=1)
        paths = [state, padded[:, 1:-1], where(skips, padded[:, :-2], _NEVER)]
        moved = _log_of_sum(paths) + log_probs[time]
        state = where(expand_dims(time < inputs, axis=1), maximum(moved, _NEVER), state)
    last = expand_dims(lengths * 2, axis=1)
    end = squeeze(take_along_axis(state, last, axis=1), 1)
    label = squeeze(take_along_axis(state, maximum(last - 1, 0), axis=1), 1)
    return _log_of_sum([end, where(lengths > 0, label, _NEVER)])


def _log_of_sum(logs: Sequence[Tensor]) -> Tensor:
    most = logs[0]
    for part in logs[1:]:
        most = maximum(most, part)
    most = most.detach()
    total = exp(logs[0] - most)
    for part in logs[1:]:
        total = total + exp(part - most)
    return most + log(total)


def _lengths(name: str, given: Lengths, beside: Tensor, most: int) -> Tensor:
    batch = beside.shape[1]
    if not isinstance(given, Tensor):
        array = np.asarray(given, np.int64)
        if array.size and not 0 <= array.min() <= array.max() <= most:
            raise ValueError(f"{name} are from 0 to {most}, and {array.tolist()} were given")
        given = from_numpy(array, beside.device)
    if given.shape != (batch,):
        raise ValueError(f"{name} are of shape {(batch,)}, and {given.shape} was given")
    return astype(given, int64)
