"""Sampling of tokens on the device: no logits travel to the host.

A draw depends on the seed of its sequence, the position and the token only, not on the other sequences of a
batch. The token with the largest sum of its logit and a draw from Gumbel's distribution has the probability
that the logits give it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.nn import functional as F  # noqa: N812 - as everybody calls it
from penstock.tensor.arithmetic import log, logical_and, logical_or, maximum, where
from penstock.tensor.core import Tensor
from penstock.tensor.creation import arange
from penstock.tensor.dtypes import float32, int32, uint32
from penstock.tensor.manipulation import astype, reshape, take_along_axis
from penstock.tensor.ordering import logsumexp, topk
from penstock.tensor.reduction import argmax, cumulative_sum
from penstock.tensor.reduction import max as max_
from penstock.tensor.reduction import sum as sum_
from penstock.tensor.searching import sort

MOST_TOP = 20  # likeliest tokens whose log-probabilities can be asked for, as in OpenAI's interface
_ALL = 1 << 30  # top_k of those that have none
_NUMBERS = (float, type(None), int, Real)  # the usual ones first, as Real is slow to tell
_COLDEST = 1e-30  # logits divided by a lower temperature would be infinite; it takes the likeliest as well
_HOTTEST = 1e30  # logits divided by it are all the same


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    `temperature`: 0 always takes the likeliest token. `top_k`, `top_p`, `min_p`: only so many of the
    likeliest tokens, the fewest with this total probability, those with at least this share of the highest
    probability. `repetition_penalty`: more than 1 makes tokens less likely that are in the prompt or were
    drawn. `logprobs`: also give the logarithm of each token's probability, before any of these;
    `top_logprobs`: and those of so many of the likeliest tokens.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
            if not isinstance(value := getattr(self, name), _NUMBERS):  # as in a damaged file
                raise ValueError(f"{name} is a number, and {value!r} was given")
        if not self.temperature >= 0:
            raise ValueError(f"a temperature is 0 or more, and {self.temperature} was given")
        if self.top_k is not None and not (self.top_k >= 1 and float(self.top_k).is_integer()):
            raise ValueError(f"top_k is an integer of 1 or more, and {self.top_k} was given")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is in (0, 1], and {self.top_p} was given")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is in [0, 1], and {self.min_p} was given")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"a repetition_penalty is more than 0, and {self.repetition_penalty} was given")
        if not isinstance(self.top_logprobs, Integral) or not 0 <= self.top_logprobs <= MOST_TOP:
            raise ValueError(f"top_logprobs is 0 to {MOST_TOP}, and {self.top_logprobs} was given")


class Needs(NamedTuple):
    """What a batch needs to be computed; the rest is left out of its program."""

    draws: bool = False
    sorts: bool = False
    penalizes: bool = False
    logprobs: bool = False
    top: bool = False  # log-probabilities of the likeliest tokens

    def cover(self, other: Needs) -> bool:
        """Whether a program with these gives what the other needs."""
        return all(own >= theirs for own, theirs in zip(self, other, strict=True))


class Drawn(NamedTuple):
    """A token for each row, with what else was asked for; the likeliest tokens come first."""

    ids: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


def needs_of(settings: Sequence[Sampling]) -> Needs:
    """What sequences with these settings need."""
    drawing = [setting for setting in settings if setting.temperature > 0]
    return Needs(
        draws=bool(drawing),
        sorts=any(setting.top_k or (setting.top_p or 1.0) < 1 for setting in drawing),
        penalizes=any(setting.repetition_penalty != 1 for setting in settings),
        logprobs=any(setting.logprobs for setting in settings),
        top=any(setting.top_logprobs for setting in settings),
    )


def numbers_of(settings: Sequence[Sampling], rows: int = 0) -> npt.NDArray[np.float32]:
    """Temperature, top_k, top_p, log(min_p) and penalty of each sequence, as columns of the device's table.

    There are at least so many `rows`, of which those without a sequence have the default settings.
    """
    numbers = [
        (
            min(max(setting.temperature, _COLDEST), _HOTTEST) if setting.temperature else 0.0,
            float(min(setting.top_k or _ALL, _ALL)),
            setting.top_p or 1.0,
            math.log(setting.min_p) if setting.min_p else -math.inf,
            setting.repetition_penalty,
        )
        for setting in (*settings, *[Sampling()] * (rows - len(settings)))
    ]
    return np.array(numbers, np.float32).T


def seed_words(seed: int | None) -> npt.NDArray[np.uint32]:
    """Two words of a seed; without a seed, of the system's random numbers."""
    if seed is None:
        return np.frombuffer(os.urandom(8), np.uint32)
    return np.random.SeedSequence(seed).generate_state(2, np.uint32).astype(np.uint32)


def sample(
    logits: Tensor,
    numbers: Tensor,
    seeds: Tensor,
    positions: Tensor,
    seen: Tensor | None,
    needs: Needs,
) -> Drawn:
    """A token for each row of logits, and what else `needs` says.

    `numbers` are those of `numbers_of`, `seeds` two words for each row, `positions` those of the tokens, and
    `seen` says which tokens are in each sequence.
    """
    rows = logits.shape[0]
    given = astype(logits, float32)
    temperature, top_k, top_p, least, penalty = (reshape(numbers[k], (rows, 1)) for k in range(5))
    values = given
    if seen is not None:
        penalized = where(values < 0, values * penalty, values / penalty)
        values = where(seen, penalized, values)
    if needs.draws:
        scaled = values / where(temperature > 0, temperature, 1.0)
        kept = scaled >= max_(scaled, axis=-1, keepdims=True) + least
        if needs.sorts:
            kept = logical_and(kept, scaled >= _threshold(scaled, top_k, top_p))
        drawn = where(kept, scaled + _gumbel(seeds, positions, logits.shape[1]), -math.inf)
        values = where(temperature > 0, drawn, values)
    ids = astype(argmax(values, axis=-1), int32)
    if not (needs.logprobs or needs.top):
        return Drawn(ids)
    total = logsumexp(given, axis=-1, keepdims=True)
    chosen = take_along_axis(given, reshape(ids, (rows, 1)), axis=-1)
    logprobs = reshape(chosen - total, (rows,))
    if not needs.top:
        return Drawn(ids, logprobs)
    top = topk(given, min(MOST_TOP, given.shape[1]))
    return Drawn(ids, logprobs, astype(top.indices, int32), top.values - total)


def _threshold(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The least value that is among the `top_k` largest, and among the fewest of these with `top_p`."""
    count = scaled.shape[-1]
    ordered = sort(scaled, axis=-1, descending=True)
    rank = astype(arange(count, device=scaled.device), float32)
    first = where(rank < top_k, ordered, -math.inf)
    probabilities = F.softmax(first)
    before = cumulative_sum(probabilities, axis=-1) - probabilities
    # All have a total of 1, which sums of rounded probabilities may reach too early.
    kept = logical_and(logical_or(top_p >= 1, before < top_p), rank < top_k)
    kept = sum_(astype(kept, int32), axis=-1, keepdims=True)
    return take_along_axis(ordered, maximum(kept - 1, 0), axis=-1)


def _gumbel(seeds: Tensor, positions: Tensor, count: int) -> Tensor:
    """Draws from Gumbel's distribution, for each row and token."""
    rows = positions.shape[0]
    first, second = (reshape(seeds[:, k], (rows, 1)) for k in range(2))
    place = reshape(astype(positions, uint32), (rows, 1))
    key = _mixed(first ^ _mixed(place + second))
    tokens = astype(arange(count, dtype=int32, device=positions.device), uint32)
    words = _mixed(_mixed(tokens ^ key) + _mixed(key ^ second))
    # In the open interval from 0 to 1, in float32.
    uniform = (astype(words >> 8, float32) + 0.5) * 2.0**-24
    return -log(-log(uniform))


def _mixed(words: Tensor) -> Tensor:
    """A hash of 32-bit words in which every bit depends on all (the constants of Wellons' lowbias32)."""
    words = (words ^ (words >> 16)) * 0x7FEB352D
    words = (words ^ (words >> 15)) * 0x846CA68B
    return words ^ (words >> 16)
