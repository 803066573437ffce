"""Batches in a shuffled order that is computed, not stored: sample number n is always the same.

Every epoch has a permutation of its own. So a stream can be resumed from the number of its next sample in any
process, and the order takes no memory however long the data is.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.data.errors import DataError
from penstock.data.growing import GrowingTokens

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 6  # half-steps of the permutation
_BLOCK = 1024  # samples whose order is computed together
_PHASE = _ROUNDS  # the index of the hash that shifts an epoch's windows; those before it permute


class TextBatches:
    """Batches of windows of a text, without end: arrays (batch, context + 1) of int32 ids.

    Inputs are `ids[:, :-1]` and targets are `ids[:, 1:]`, so both are views of a single upload. The windows
    of an epoch are adjacent, and each is seen once; the start of the first differs between epochs. A batch
    may contain windows of two epochs.

    >>> batches = ps.data.TextBatches(np.arange(100), batch=4, context=8, seed=1)
    >>> next(batches).shape
    (4, 9)
    """

    def __init__(self, tokens: Array, batch: int, context: int, seed: int, start: int = 0) -> None:
        _check_batch(batch, start)
        self._tokens = np.asarray(tokens)
        if self._tokens.ndim != 1 or self._tokens.dtype.kind not in "iu":
            raise DataError(
                f"tokens are integers in one dimension, and {self._tokens.dtype} of shape "
                f"{self._tokens.shape} was given"
            )
        if context < 1 or len(self._tokens) <= context:
            raise _too_short(context, len(self._tokens))
        self.batch, self.context, self.seed = batch, context, seed
        windows = _Windows(len(self._tokens), context, seed)
        self.epoch_samples = windows.count
        self._starts = InBlocks(windows.starts)
        self._offsets = np.arange(context + 1)
        self._next = start

    def __iter__(self) -> TextBatches:
        return self

    def __next__(self) -> npt.NDArray[np.int32]:
        starts = self._starts(self._next, self.batch)
        self._next += self.batch
        return self._tokens.take(starts[:, None] + self._offsets).astype(np.int32)

    def state(self) -> int:
        """The number of the next sample: what `start` takes to go on from here."""
        return self._next


class ChunkBatches:
    """Batches like those of `TextBatches`, of tokens that are made in chunks while the first are used.

    The windows of the first epoch are shuffled within each chunk, and chunks follow each other in order: so
    the windows do not depend on how fast the tokens are made. From the second epoch on all windows are
    shuffled, as by `TextBatches`. In the first epoch, no window has tokens of two chunks.
    """

    def __init__(self, tokens: GrowingTokens, batch: int, context: int, seed: int, start: int = 0) -> None:
        _check_batch(batch, start)
        if context < 1:
            raise DataError(f"a context has 1 or more tokens, and {context} was given")
        self._tokens = tokens
        self.batch, self.context, self.seed = batch, context, seed
        self._offsets = np.arange(context + 1)
        self._next = start
        self._chunk = -1
        self._end: int | None = 0  # the sample after those of the chunk; None after the first epoch
        self._starts = InBlocks(lambda samples: samples)  # of the chunk

    def __iter__(self) -> ChunkBatches:
        return self

    def __next__(self) -> npt.NDArray[np.int32]:
        parts, left, sample = [], self.batch, self._next
        while left:
            while self._end is not None and sample >= self._end:
                self._advance()
            number = left if self._end is None else min(left, self._end - sample)
            parts.append(self._starts(sample, number))
            sample, left = sample + number, left - number
        ids = self._tokens.take(np.concatenate(parts)[:, None] + self._offsets).astype(np.int32)
        self._next = sample
        return ids

    def state(self) -> int:
        """The number of the next sample: what `start` takes to go on from here."""
        return self._next

    def _advance(self) -> None:
        """Go to the next chunk, or to the epochs after the first. Waits for the tokens."""
        self._chunk += 1
        if self._chunk == self._tokens.count:
            self._shuffle_all()
            return
        begin, end = self._tokens.chunk(self._chunk)
        chunk, first, count = self._chunk, self._end or 0, (end - begin - 1) // self.context
        self._end = first + count

        def starts(samples: Ints) -> Ints:
            # A permutation for each chunk, as for an epoch. Those beyond the chunk are not used.
            return begin + self.context * shuffled(samples - first + chunk * count, count, self.seed)[1]

        self._starts = InBlocks(starts)

    def _shuffle_all(self) -> None:
        length, first = len(self._tokens), self._end or 0
        if length <= self.context:
            raise _too_short(self.context, length)
        windows = _Windows(length, self.context, self.seed)
        self._starts = InBlocks(lambda samples: windows.starts(samples - first + windows.count))
        self._end = None


class _Windows:
    """Adjacent windows of tokens, shuffled in each epoch; the start of the first differs between epochs."""

    def __init__(self, length: int, context: int, seed: int) -> None:
        self._context, self._seed = context, seed
        self.count = max((length - 1) // context - 1, 1)  # 1 less than fit, so that all can shift
        self._shifts = min(length - 1 - self.count * context, context - 1) + 1

    def starts(self, samples: Ints) -> Ints:
        """The first token of each sample's window."""
        epochs, windows = shuffled(samples, self.count, self._seed)
        shifts = _hash(self._seed, epochs, _PHASE) % np.uint64(self._shifts)
        return shifts.astype(np.int64) + windows * self._context


class ArrayBatches:
    """Batches of the rows of arrays that have the same first axis, without end: tuples of arrays.

    Every row is seen at most once per epoch. Rows that do not fill a last batch are left out, others in each
    epoch, unless `keep_last` is set: then the last batch is shorter.

    >>> rows, labels = next(ps.data.ArrayBatches(np.zeros((10, 3)), np.arange(10), batch=4, seed=1))
    >>> rows.shape, labels.shape
    ((4, 3), (4,))
    """

    def __init__(
        self, *arrays: npt.ArrayLike, batch: int, seed: int, start: int = 0, keep_last: bool = False
    ) -> None:
        _check_batch(batch, start)
        self._arrays = tuple(np.asarray(array) for array in arrays)
        shapes = [array.shape for array in self._arrays]
        rows = {shape[0] if shape else 0 for shape in shapes}
        if len(rows) != 1 or rows == {0}:
            raise DataError(f"arrays need the same number of rows, at least one; their shapes are {shapes}")
        self.epoch_samples = rows.pop()
        self.batch, self.seed, self.keep_last = batch, seed, keep_last
        if batch > self.epoch_samples and not keep_last:
            raise DataError(f"a batch of {batch} cannot be filled with {self.epoch_samples} rows")
        self._rows = InBlocks(lambda samples: shuffled(samples, self.epoch_samples, seed)[1])
        self._next = start

    @property
    def epoch_batches(self) -> int:
        """How many batches an epoch has."""
        return -(-self.epoch_samples // self.batch) if self.keep_last else self.epoch_samples // self.batch

    def __iter__(self) -> ArrayBatches:
        return self

    def __next__(self) -> tuple[Array, ...]:
        left = self.epoch_samples - self._next % self.epoch_samples
        if left < self.batch and not self.keep_last:
            self._next += left
            left = self.epoch_samples
        size = min(self.batch, left)
        rows = self._rows(self._next, size)
        self._next += size
        return tuple(array[rows] for array in self._arrays)

    def state(self) -> int:
        """The number of the next sample: what `start` takes to go on from here."""
        return self._next


def shuffled(samples: Ints, count: int, seed: int) -> tuple[Ints, Ints]:
    """The epoch of each sample, and which of `count` items it is: a permutation of them in every epoch.

    It is a Feistel network: an item is a pair of digits, and each digit in turn is shifted by a hash of the
    other. This is a permutation of slightly more than `count` pairs; results beyond the items are permuted
    until they are among them (cycle walking).
    """
    epochs, items = np.divmod(samples, count)
    high = isqrt(count - 1) + 1
    low = -(-count // high)
    outside = np.arange(len(items))
    keys = [_hash(seed, epochs, number) for number in range(_ROUNDS)]
    while len(outside):
        first, second = np.divmod(items[outside].astype(np.uint64), np.uint64(low))
        for number in range(0, _ROUNDS, 2):
            first = (first + _mixed(second ^ keys[number][outside]) % np.uint64(high)) % np.uint64(high)
            second = (second + _mixed(first ^ keys[number + 1][outside]) % np.uint64(low)) % np.uint64(low)
        items[outside] = first * np.uint64(low) + second
        outside = outside[items[outside] >= count]
    return epochs, items


class InBlocks:
    """A function of sample numbers, computed for many of them together."""

    def __init__(self, function: Callable[[Ints], Ints]) -> None:
        self._function = function
        self._first = 0
        self._results = np.empty(0, np.int64)

    def __call__(self, start: int, number: int) -> Ints:
        """The results of some samples that follow each other."""
        if not self._first <= start <= start + number <= self._first + len(self._results):
            self._first = start
            self._results = self._function(np.arange(start, start + max(number, _BLOCK)))
        return self._results[start - self._first : start - self._first + number]


def _hash(seed: int, epochs: Ints, number: int) -> _Words:
    """64 bits for each epoch, which depend on the seed and the number."""
    key = _mixed(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    key = _mixed(key ^ np.uint64(number))
    return _mixed(key ^ epochs.astype(np.uint64))


def _mixed(words: _Words) -> _Words:
    """Every bit of the result depends on every bit of the input: the finalizer of SplitMix64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _too_short(context: int, length: int) -> DataError:
    need = max(context, 1) + 1
    return DataError(f"windows of a context of {context} need {need} tokens, and there are {length}")


def _check_batch(batch: int, start: int) -> None:
    if batch < 1 or start < 0:
        raise DataError(f"a batch has 1 or more samples and starts at 0 or later; given: {batch} and {start}")
