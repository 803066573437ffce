"""Sequences of several lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.tensor.arithmetic import where
from penstock.tensor.core import Tensor, from_numpy
from penstock.tensor.creation import arange, full
from penstock.tensor.dtypes import int64
from penstock.tensor.manipulation import astype, concat, moveaxis, reshape, stack
from penstock.tensor.padding import pad


@dataclass(frozen=True)
class PackedSequence:
    """Padded sequences of several lengths, (time, batch, ...), and their lengths."""

    padded: Tensor
    lengths: Tensor

    def with_values(self, padded: Tensor) -> PackedSequence:
        """Other sequences of the same lengths."""
        return replace(self, padded=padded)


def pack_padded_sequence(
    input: Tensor,
    lengths: Tensor | Sequence[int],
    batch_first: bool = False,
    enforce_sorted: bool = False,
) -> PackedSequence:
    """Padded sequences with their lengths, for recurrent layers; in any order unless `enforce_sorted`.

    What is longer than all sequences is cut off, unless the lengths are a tensor, which is not read.
    """
    if input.ndim < 2:
        raise ValueError(f"padded sequences have 2 axes or more, and the shape {input.shape} was given")
    padded = moveaxis(input, 0, 1) if batch_first else input
    if not isinstance(lengths, Tensor):
        array = np.asarray(lengths, np.int64)
        if array.size and not 1 <= array.min() <= array.max() <= padded.shape[0]:
            raise ValueError(f"lengths are from 1 to {padded.shape[0]}, and {array.tolist()} were given")
        if enforce_sorted and (np.diff(array) > 0).any():
            raise ValueError(f"enforce_sorted needs descending lengths, and {array.tolist()} were given")
        lengths = from_numpy(array, input.device)
        padded = padded[: int(array.max())] if array.size else padded
    if lengths.shape != padded.shape[1:2]:
        raise ValueError(f"a length is needed for each of {padded.shape[1]}, not shape {lengths.shape}")
    return PackedSequence(padded, astype(lengths, int64))


def pad_packed_sequence(
    sequence: PackedSequence,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The sequences, with `padding_value` beyond their ends up to `total_length`, and their lengths."""
    padded = sequence.padded
    if total_length is not None:
        if total_length < padded.shape[0]:
            raise ValueError(f"total_length is {padded.shape[0]} or more, and {total_length} was given")
        padded = pad(padded, (*[0] * (2 * padded.ndim - 1), total_length - padded.shape[0]))
    times = reshape(arange(padded.shape[0], device=padded.device), (-1, 1))
    inside = reshape(times < sequence.lengths, (*padded.shape[:2], *[1] * (padded.ndim - 2)))
    result = where(inside, padded, padding_value)
    return (moveaxis(result, 0, 1) if batch_first else result), sequence.lengths


def pad_sequence(
    sequences: Sequence[Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Tensor:
    """Stack sequences, padded with `padding_value` to the length of the longest at one side."""
    if not sequences:
        raise ValueError("pad_sequence needs a sequence")
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side is 'left' or 'right', and {padding_side!r} was given")
    longest = max(sequence.shape[0] for sequence in sequences)
    padded = []
    for sequence in sequences:
        shape = (longest - sequence.shape[0], *sequence.shape[1:])
        rest = full(shape, padding_value, dtype=sequence.dtype, device=sequence.device)
        parts = [sequence, rest] if padding_side == "right" else [rest, sequence]
        padded.append(concat(parts) if shape[0] else sequence)
    return stack(padded, axis=0 if batch_first else 1)
