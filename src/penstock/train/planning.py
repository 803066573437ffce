"""The memory plan of a training step under each budget, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
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
    config: Config, limit_bytes: int, what: Fitted, report: Callable[[int, MemoryPlan, bool], None]
) -> tuple[Config, MemoryPlan]:
    """The configuration with the largest batch or context that fits a budget, by powers of 2 and bisection.

    With it, its plan. `report` gets every size that is tried, its plan, and whether it fits. Raises
    SettingError where not even 1 fits.
    """
    step = _step_of(config) if what == "batch" else None  # the same for all batches
    fitting: dict[int, MemoryPlan] = {}  # the largest so far

    def with_size(size: int) -> Config:
        return config.changed({"data" if what == "batch" else "model": {what: size}})

    def fits(size: int) -> bool:
        candidate = with_size(size)
        plan = _planned(step or _step_of(candidate), candidate)
        will_do = plan.fits(limit_bytes)
        report(size, plan, will_do)
        if will_do:
            fitting.clear()
            fitting[size] = plan
        return will_do

    if not fits(1):
        raise SettingError(
            f"not even a {what} of 1 fits into {format_bytes(limit_bytes)}; use a smaller model"
        )
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(low // 16, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return with_size(low), fitting[low]


def _vocabulary(config: Config) -> int:
    """The kinds of token: for characters, those of the text."""
    if config.data.tokenizer == "bytes":
        return ByteTokenizer().vocab_size
    if config.data.tokenizer == "characters":
        text = find_text(config.data.path) if config.data.path else python_sources()
        return CharTokenizer(text).vocab_size
    return config.data.vocabulary
