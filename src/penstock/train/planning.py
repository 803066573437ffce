"""The memory plan of a training step under each budget, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np

import penstock as ps
from penstock.collectives.communicator import Communicator
from penstock.collectives.engine import AbsentRanks
from penstock.collectives.world import as_rank
from penstock.data import ByteTokenizer, CharTokenizer, find_text, python_sources
from penstock.data.prefetch import DEPTH
from penstock.errors import SettingError
from penstock.execution.memory_plan import MemoryPlan
from penstock.formatting import format_bytes
from penstock.train.bases import load_base
from penstock.train.building import build_model, loss_of, make_optimizer, parallel
from penstock.train.config import Config
from penstock.train.scaling import Scaling, parse_rate, predicted
from penstock.train.stepping import training_step

Fitted = Literal["batch", "context"]
# From the largest size that fits to the next that is tried; longer contexts take longer to be planned.
_MOST_GROWTH = {"batch": 64, "context": 8}
_NEVER = 1 << 62
_NEARLY = 15 / 16  # of the size that would take all bytes: it fits, and one that is an eighth larger does not


def plan_step(config: Config) -> MemoryPlan:
    """The memory plan of a settled configuration's training step on the default device.

    Its model, its optimizer and the batches that wait on the device are created, and no step runs.
    """
    return _planned(_step_of(config), config)


def _step_of(config: Config) -> Callable[..., object]:
    """The jitted step of a configuration, for batches of any size."""
    ps.random.manual_seed(config.run.seed)
    if config.model.is_loaded:
        model = load_base(config)
    else:
        model = build_model(config, _vocabulary(config))
        model.to(getattr(ps, config.model.precision))
    return training_step(loss_of(model), parallel(make_optimizer(model, config), config))


def _planned(step: Callable[..., object], config: Config) -> MemoryPlan:
    """The memory plan of a step for the batches of a configuration."""
    batch, accumulate = config.data.batch, config.optimizer.accumulate
    empty = np.zeros((batch, config.model.context + 1), np.int32)
    waiting = 1 + DEPTH + config.run.evaluate_batches  # one more is read ahead
    tokens, *_waiting = [ps.asarray(empty) for _ in range(accumulate + waiting)]
    plan: MemoryPlan = ps.memory.plan(step, tokens, batch, batch * accumulate, True, accumulate == 1)
    return plan


def plan_ranks(config: Config, ranks: int, link: str) -> Scaling:
    """What a step takes on several ranks, which share the configuration's batch."""
    if ranks < 1 or config.data.batch % ranks:
        raise SettingError(f"{ranks} ranks do not divide a batch of {config.data.batch}; set data.batch")
    rate = parse_rate(link)
    batch = config.data.batch // ranks
    model = build_model(config, _vocabulary(config))
    parameters = sum(tensor.size for tensor in model.parameters())
    del model
    plans: dict[int, MemoryPlan] = {}
    for stage in range(4 if config.model.precision != "float16" else 1):
        setting = {"data": {"batch": batch}, "ranks": {"shards": 1, "exact": False, "zero": stage}}
        with as_rank(Communicator(AbsentRanks(ranks))):
            plans[stage] = plan_step(config.changed(setting))
    return predicted(plans, batch, parameters, ranks, rate)


def largest_fit(
    config: Config, limit_bytes: int, what: Fitted, report: Callable[[int, bool], None]
) -> tuple[Config, MemoryPlan]:
    """The configuration with the largest batch or context that fits, up to an eighth, with its plan.

    The plan is for this budget only. `report` gets every size that is tried, and whether it fits. Raises
    SettingError where not even 1 fits.
    """
    step = _step_of(config) if what == "batch" else None  # the same for all batches
    given = config.data.batch if what == "batch" else config.model.context

    def with_size(size: int) -> Config:
        return config.changed({"data" if what == "batch" else "model": {what: size}})

    bounds, largest = _Bounds(limit_bytes, given, _MOST_GROWTH[what]), None
    while (size := bounds.next_size()) is not None:
        candidate = with_size(size)
        plan = _planned(step or _step_of(candidate), candidate)
        fits = plan.fits(limit_bytes)
        report(size, fits)
        bounds.note(size, fits, partial(getattr, plan, "least_bytes"), _growth(plan, what))
        if fits:
            largest = candidate, plan.within(limit_bytes)
    if largest is None:
        limit = format_bytes(limit_bytes)
        raise SettingError(f"not even a {what} of 1 fits into {limit}; use a smaller model")
    return largest


def _growth(plan: MemoryPlan, what: Fitted) -> float:
    """From how many times a size on it takes far more, as values have too many items for fused kernels."""
    if what == "batch" or plan.growth < 1:
        return plan.growth
    # The scores of attention in parts grow with the power 3/2 of the context, a little by leaps.
    return max(_NEARLY * math.cbrt(plan.growth**2), 1.0)


class _Bounds:
    """Between which sizes the largest lies that fits: bytes are nearly in proportion, so few are tried."""

    def __init__(self, limit_bytes: int, first: int, most_growth: int) -> None:
        self._limit, self._first, self._most_growth = limit_bytes, first, most_growth
        # Sizes, from small to large, and what tells the bytes that they take.
        self._fitting: list[tuple[int, Callable[[], int]]] = [(0, lambda: 0)]
        self._high: tuple[int, Callable[[], int]] | None = None  # the smallest that does not fit
        self._leap = _NEVER  # the largest size before programs take far more
        self._tried = 0  # since two bounds are known

    def note(self, size: int, fits: bool, nbytes: Callable[[], int], growth: float = _NEVER) -> None:
        """Note whether a size fits; `nbytes` is only asked where it matters how much it takes.

        `growth`: from how many times this size on it takes far more.
        """
        self._tried += self._high is not None
        if fits:
            self._fitting.append((size, nbytes))
        else:
            self._high = size, nbytes
        self._leap = min(int(size * growth), _NEVER)

    def next_size(self) -> int | None:
        """The size to be tried next: that which would take nearly all bytes, if they are in proportion.

        None: the largest is known, up to an eighth.
        """
        low, high = self._fitting[-1][0], self._high
        apart = max(low // 8, 1)  # what is nearer to the largest that fits is not told apart
        if not low and high is None:
            return self._first
        if high is not None and high[0] - low <= apart:
            return None
        least, most = low + apart, self._most_growth * low if high is None else high[0] - apart
        if self._tried % 3 == 2:  # bytes grow by leaps
            return math.isqrt(least * most)
        known = [*self._fitting[:-1], *([high] if high is not None else [])]
        if low <= self._leap < (high[0] if high is not None else _NEVER):
            known, most = self._fitting[:-1], min(most, self._leap)
        if least >= most:
            return least
        reached = self._reached(known[-1]) if known else _NEVER
        return max(least, min(reached, most))

    def _reached(self, known: tuple[int, Callable[[], int]]) -> int:
        """The size that would take nearly all bytes if they are in proportion, by the largest and another."""
        (low, nbytes_of), (size, more_of) = self._fitting[-1], known
        nbytes, more = nbytes_of(), more_of()
        if nbytes == more:
            return _NEVER
        return int(_NEARLY * (low + (self._limit - nbytes) * (size - low) / (more - nbytes)))


def _vocabulary(config: Config) -> int:
    """The kinds of token: for characters, those of the text."""
    if config.data.tokenizer == "bytes":
        return ByteTokenizer().vocab_size
    if config.data.tokenizer == "characters":
        text = find_text(config.data.path) if config.data.path else python_sources()
        return CharTokenizer(text).vocab_size
    return config.data.vocabulary
