"""What a training step would take on several ranks, from what one takes and the link between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log2

from penstock.errors import SettingError
from penstock.execution.memory_plan import MemoryPlan
from penstock.formatting import format_bytes, format_seconds

_UNITS = {"b": 1 / 8, "B": 1.0}
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_MESSAGE = 5e-6  # seconds until a message begins to arrive, on a usual interconnect
_BACKWARD = 2 / 3  # of a step, in which gradients are exchanged
_BUCKET = 4 << 20  # bytes, as DataParallel has them: the last is exchanged when all is computed


def parse_rate(text: str) -> float:
    """Bytes per second, from 400Gb/s or 50GB/s."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)([bB])(?:/s|ps)\s*", text)
    try:
        rate = float(match[1]) * _PREFIXES[match[2]] * _UNITS[match[3]] if match else 0.0
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise SettingError(
            f"a link has bits or bytes per second, as 400Gb/s or 50GB/s, and {text!r} was given"
        )
    return rate


@dataclass(frozen=True)
class Scaling:
    """A step of several ranks, by an alpha-beta model: messages take some time each, and bytes."""

    ranks: int
    batch: int  # of a rank
    compute_seconds: float
    exchange_seconds: float
    exposed_seconds: float  # of them, those that no computation hides
    sent_bytes: int  # by a rank
    rank_bytes: dict[int, int]  # memory of a rank by the stage of sharding

    @property
    def step_seconds(self) -> float:
        """How long a step takes."""
        return self.compute_seconds + self.exposed_seconds

    @property
    def efficiency(self) -> float:
        """The share of a step in which ranks compute."""
        return self.compute_seconds / self.step_seconds

    def __str__(self) -> str:
        memory = ", ".join(
            f"{format_bytes(size)} with zero={stage}" for stage, size in self.rank_bytes.items()
        )
        step, compute, wait, exchange = map(
            format_seconds,
            (self.step_seconds, self.compute_seconds, self.exposed_seconds, self.exchange_seconds),
        )
        return (
            f"{self.ranks} ranks with a batch of {self.batch} each: {step} for a step, {compute} to compute, "
            f"{wait} to wait; {format_bytes(self.sent_bytes)} sent by each in {exchange}; "
            f"efficiency {self.efficiency:.0%}\nmemory of a rank: {memory}"
        )


def predicted(
    plans: Mapping[int, MemoryPlan], batch: int, parameters: int, ranks: int, link: float
) -> Scaling:
    """The step of ranks that each take what the plan of a stage of sharding says for a batch.

    Gradients go along the link once to be summed and once back, in float32. The time is that of stages up to
    2: with zero=3, parameters go along it once more.
    """
    plan = plans[0]
    compute = plan.unlimited_seconds
    if compute is None:
        why = plan.note or f"the rates of {plan.device} are not known"
        raise SettingError(f"no time can be predicted: {why}")
    sent = int(2 * 4 * parameters * (ranks - 1) / ranks)
    buckets = max(1, 4 * parameters // _BUCKET)
    messages = 2 * ceil(log2(ranks)) * buckets  # halving and doubling, as engines do where latency counts
    exchange = messages * _MESSAGE + sent / link if ranks > 1 else 0.0
    exposed = max(exchange - _BACKWARD * compute, exchange / buckets) if ranks > 1 else 0.0
    memory = {stage: planned.unlimited_bytes for stage, planned in plans.items()}
    return Scaling(ranks, batch, compute, exchange, exposed, sent, memory)
