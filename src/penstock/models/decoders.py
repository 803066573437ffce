"""Decoders: sequences of a batch with their cached keys and values, and the programs that extend them.

There is a program for each bucket of batch size, of new tokens and of positions that are attended to, not for
each length. All of the state is on the device: a step needs nothing from the host, and gives it token ids.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.graph.dtypes import DType
from penstock.models.attending import CachedAttention
from penstock.models.sampling import Needs, Sampling, needs_of, numbers_of, sample, seed_words
from penstock.nn.module import evaluating
from penstock.runtime import Device
from penstock.stream.future import Future
from penstock.tensor.arithmetic import maximum, where
from penstock.tensor.assigning import with_rows
from penstock.tensor.core import Tensor, from_numpy, resolve
from penstock.tensor.creation import arange, ones, zeros
from penstock.tensor.dtypes import bool_, float32, int32, uint32
from penstock.tensor.jit import jit
from penstock.tensor.manipulation import reshape
from penstock.tensor.recording import no_grad

if TYPE_CHECKING:
    from penstock.models.model import LanguageModel

CHUNK = 512  # tokens of a prompt that a step takes at most
_SHORTEST, _LEAST_REACH = 16, 64  # the smallest buckets of new tokens, and of positions that are attended to


def bucket(number: int, least: int, most: int) -> int:
    """The smallest power of two times `least` that is not below a number, but at most `most`."""
    size = least
    while size < number:
        size *= 2
    return min(size, most)


class Step(NamedTuple):
    """The tokens of a step on their way to the host: for which slots, and what they are."""

    slots: Sequence[int]
    ids: Future[npt.NDArray[Any]]
    logprobs: Future[npt.NDArray[Any]] | None


class Decoder:
    """A batch of sequences, each in its slot, with memory for `capacity` positions of each."""

    def __init__(self, model: LanguageModel, slots: int, capacity: int) -> None:
        weight = model.head_weight
        self.slots, self.capacity = slots, capacity
        self.lengths = [0] * slots  # positions of each slot that are written
        self._device, self._dtype, self._vocab_size = resolve(weight.device), weight.dtype, model.vocab_size
        self._model = weakref.ref(model)  # which has this decoder, and is freed together with it
        self._needs = Needs()
        self._shapes = model.cache_shapes
        self._caches = [self._empty((2, slots, 1, 1, 1), weight.dtype) for _ in self._shapes]
        self._starts, self._tokens = (self._empty((slots,), int32) for _ in range(2))
        self._active, self._logprobs = self._empty((slots,), int32), self._empty((slots,), float32)
        self._numbers, self._seeds = self._empty((5, slots), float32), self._empty((slots, 2), uint32)
        self._seen = self._empty((slots * model.vocab_size,), bool_)
        self._known_active: list[int] = []
        self._prefill, self._next = _jitted(self._take_prompts), _jitted(self._take_token)

    def key(self) -> tuple[Any, ...]:
        """Equal for decoders that can take the same batches."""
        return self.slots, self.capacity, self._device, self._dtype

    @property
    def _network(self) -> LanguageModel:
        model = self._model()
        assert model is not None, "who generates holds the model"
        return model

    def _empty(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        return zeros(shape, dtype=dtype, device=self._device)

    # State

    def begin(self, settings: Sequence[Sampling], seeds: Sequence[int | None]) -> None:
        """Start anew, with the settings of each sequence; further slots stay empty."""
        more = self.slots - len(settings)
        self._needs = needs_of(settings)
        self.lengths = [0] * self.slots
        self._set(self._numbers, numbers_of([*settings, *[Sampling()] * more]))
        words = [*(seed_words(seed) for seed in seeds), *[np.zeros(2, np.uint32)] * more]
        self._set(self._seeds, np.stack(words))
        self._set_active([])
        for cache, shape in zip(self._caches, self._shapes, strict=True):
            size = (2, self.slots, shape.heads, self.capacity, shape.head_size)
            cache._become(self._empty(size, self._dtype)._node)
        self._seen._become(self._empty(self._seen.shape, bool_)._node)

    def release(self) -> None:
        """Give the memory of the caches back; the programs stay."""
        for tensor in (*self._caches, self._seen):
            tensor._become(self._empty(tensor.shape, tensor.dtype)._node)

    def _set(self, tensor: Tensor, values: npt.NDArray[Any]) -> None:
        tensor._become(from_numpy(values, self._device)._node)

    def _set_active(self, slots: Sequence[int]) -> None:
        if slots != self._known_active or not slots:
            flags = np.zeros(self.slots, np.int32)
            flags[list(slots)] = 1
            self._set(self._active, flags)
            self._known_active = list(slots)

    # Steps

    def prompts(self, given: Mapping[int, Sequence[int]]) -> Step:
        """Take the prompts of slots, from their first position on; the next token of each."""
        longest = max(map(len, given.values()))
        ids = self._padded(given)
        lengths = np.array([len(given.get(slot, ())) for slot in range(self.slots)], np.int32)
        result: tuple[Tensor, Tensor | None] = (self._tokens, None)
        for start in range(0, longest, CHUNK):
            length = bucket(min(longest - start, CHUNK), min(_SHORTEST, self.capacity), self.capacity)
            part = np.zeros((self.slots, length), np.int32)
            piece = ids[:, start : start + length][:, :CHUNK]
            part[:, : piece.shape[1]] = piece
            counts = np.clip(lengths - start, 0, min(length, CHUNK))
            reach = bucket(start + length, _LEAST_REACH, self.capacity)
            control = np.stack([np.full(self.slots, start, np.int32), counts, lengths])
            result = self._run(
                self._prefill,
                part,
                control.astype(np.int32),
                reach=reach,
                fresh=start == 0,
                needs=self._needs,
            )
        for slot, prompt in given.items():
            self.lengths[slot] = len(prompt)
        return self._step(sorted(given), result)

    def tokens(self, slots: Sequence[int]) -> Step:
        """Append the token of the last step to each of these sequences; the next token of each."""
        self._set_active(slots)
        reach = bucket(1 + max(self.lengths[slot] for slot in slots), _LEAST_REACH, self.capacity)
        result = self._run(self._next, reach=reach, needs=self._needs)
        for slot in slots:
            self.lengths[slot] += 1
        return self._step(slots, result)

    def _padded(self, given: Mapping[int, Sequence[int]]) -> npt.NDArray[np.int32]:
        longest = max(map(len, given.values()))
        ids = np.zeros((self.slots, longest), np.int32)
        for slot, prompt in given.items():
            ids[slot, : len(prompt)] = prompt
        return ids

    def _run(self, program: Any, *arrays: npt.NDArray[Any], **fixed: Any) -> tuple[Tensor, Tensor | None]:
        with no_grad(), evaluating():
            ids, logprobs = program(*(from_numpy(array, self._device) for array in arrays), **fixed)
        return ids, logprobs

    def _step(self, slots: Sequence[int], result: tuple[Tensor, Tensor | None]) -> Step:
        ids, logprobs = result
        return Step(slots, ids.numpy_async(), None if logprobs is None else logprobs.numpy_async())

    # What the programs compute

    def _take_prompts(
        self, ids: Tensor, control: Tensor, *, reach: int, fresh: bool, needs: Needs
    ) -> tuple[Tensor, Tensor | None]:
        """A part of the prompts; slots that it completes get a token."""
        starts, counts, lengths = (control[k] for k in range(3))
        slots, length = ids.shape
        attention = CachedAttention(self._caches, self._shapes, starts, counts, lengths, length, reach, fresh)
        features = self._network.run(ids, attention)
        rows = reshape(features, (slots * length, features.shape[-1]))
        last = arange(slots, dtype=int32, device=ids.device) * length + maximum(counts - 1, 0)
        if needs.penalizes:
            inside = arange(length, dtype=int32, device=ids.device) < reshape(counts, (slots, 1))
            self._see(where(inside, ids, -1))
        ends = lengths == starts + counts
        ends = where(counts > 0, ends, False)
        return self._chosen(rows[last], starts + counts, ends, needs)

    def _take_token(self, *, reach: int, needs: Needs) -> tuple[Tensor, Tensor | None]:
        """The token of the last step, in the slots that are active."""
        active, starts = self._active, self._starts
        attention = CachedAttention(
            self._caches, self._shapes, starts, active, starts + 1, 1, reach, fresh=False
        )
        features = self._network.run(reshape(self._tokens, (self.slots, 1)), attention)
        rows = reshape(features, (self.slots, features.shape[-1]))
        return self._chosen(rows, starts + active, active > 0, needs)

    def _chosen(
        self, features: Tensor, lengths: Tensor, ends: Tensor, needs: Needs
    ) -> tuple[Tensor, Tensor | None]:
        """Draw the next tokens, and note them where sequences end here."""
        logits = self._network.logits(features)
        seen = reshape(self._seen, (self.slots, -1)) if needs.penalizes else None
        ids, logprobs = sample(logits, self._numbers, self._seeds, lengths, seen, needs)
        if needs.penalizes:
            self._see(reshape(where(ends, ids, -1), (self.slots, 1)))
        self._tokens._rebind(where(ends, ids, self._tokens))
        self._starts._rebind(where(ends, lengths, self._starts))
        if logprobs is not None:
            self._logprobs._rebind(where(ends, logprobs, self._logprobs))
        return self._tokens, None if logprobs is None else self._logprobs

    def _see(self, ids: Tensor) -> None:
        """Note tokens, (slots, length), as part of their sequences; -1 is none."""
        slots, length = ids.shape
        first = arange(slots, dtype=int32, device=ids.device) * self._vocab_size
        index = reshape(where(ids >= 0, ids + reshape(first, (slots, 1)), -1), (slots * length,))
        self._seen._rebind(
            with_rows(self._seen, index, ones((slots * length,), dtype=bool_, device=ids.device))
        )


def _jitted(method: Callable[..., Any]) -> Any:
    """A jitted method that does not keep its object, which holds it, alive."""
    reference = weakref.WeakMethod(method)

    def run(*args: Any, **fixed: Any) -> Any:
        bound = reference()
        assert bound is not None
        return bound(*args, **fixed)

    return jit(run)


class Decoders:
    """The decoder of a model's last generation, kept for the next; copies of a model have none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: Decoder | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Decoders:
        return Decoders()

    def __reduce__(self) -> tuple[type[Decoders], tuple[()]]:
        return Decoders, ()

    def take(self, model: LanguageModel, slots: int, capacity: int) -> Decoder:
        """A decoder that nobody else uses."""
        with self._lock:
            idle, self._idle = self._idle, None
        weight = model.head_weight
        device: Device = resolve(weight.device)
        if idle is not None and idle.key() == (slots, capacity, device, weight.dtype):
            return idle
        return Decoder(model, slots, capacity)

    def give_back(self, decoder: Decoder) -> None:
        """Keep a decoder for the next generation, without its memory."""
        decoder.release()
        with self._lock:
            self._idle = decoder
