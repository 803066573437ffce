"""Taking samples: rounds over all cases, and in each round every side of a case in turn."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.bench.case import Call, Case
from penstock.bench.peer import Torch
from penstock.bench.results import Measured
from penstock.errors import OutOfDeviceMemory
from penstock.runtime import Device

_PAUSE = 0.02  # seconds, in which the threads of the previous side stop spinning
_LEAST_ROUNDS = 9  # of a case, the minimum for an interval of a ratio
_MOST_SECONDS = 15.0  # after which a long case gets no more than that minimum
_WARM_CALLS = 3  # the first captures, the second may record a device graph, and both compile
_MOST_CALLS = 10_000  # in a sample


@dataclass(frozen=True)
class Effort:
    """The effort of a measurement."""

    rounds: int
    sample_seconds: float  # of a sample, with as many calls as fit, at least one
    ceiling_seconds: float


FULL = Effort(rounds=30, sample_seconds=0.02, ceiling_seconds=0.5)
QUICK = Effort(rounds=_LEAST_ROUNDS, sample_seconds=0.005, ceiling_seconds=0.1)


class Side:
    """A case in a library: calls, and the wait for them."""

    def __init__(self, call: Call, sync: Callable[[], None], most_calls: int, sample_seconds: float) -> None:
        self._call = call
        self._sync = sync
        for _ in range(_WARM_CALLS):
            call()
            sync()
        self._calls = 1
        while (taken := self._timed()) < sample_seconds / 2 and self._calls < most_calls:
            self._calls = min(2 * self._calls, most_calls)
        self._calls = max(1, min(most_calls, round(sample_seconds / taken * self._calls)))
        self._short = taken < sample_seconds

    def sample(self) -> float:
        """The seconds of a call: the mean over the calls of a sample."""
        if self._short:
            self._call()  # wakes the side's threads, and warms the caches
            self._sync()
        return self._timed() / self._calls

    def _timed(self) -> float:
        start = time.perf_counter()
        for _ in range(self._calls):
            self._call()
        self._sync()
        return time.perf_counter() - start


@dataclass
class _Running:
    case: Case
    sides: list[Side]
    samples: list[list[float]] = field(default_factory=list)  # of each round, for each side
    spent: float = 0.0

    @property
    def goes_on(self) -> bool:
        return len(self.samples) < _LEAST_ROUNDS or self.spent < _MOST_SECONDS

    def take(self) -> None:
        start = time.perf_counter()
        times = []
        for side in self.sides:
            if len(self.sides) > 1:
                time.sleep(_PAUSE)
            times.append(side.sample())
        self.samples.append(times)
        self.spent += time.perf_counter() - start

    def measured(self) -> Measured:
        ours, *peers = ([*column] for column in zip(*self.samples, strict=True))
        case = self.case
        return Measured(
            case.name, case.size, case.flops, case.nbytes, case.way, ours, peers[0] if peers else []
        )


def measure(
    cases: Sequence[Case],
    device: Device,
    peer: Torch | None,
    effort: Effort,
    tell: Callable[[str], None] = lambda doing: None,
) -> tuple[list[Measured], list[str]]:
    """The times of the cases that fit into the device's memory; and the others, with the reasons.

    `tell` is called before each case is prepared and before each round.
    """
    running, left_out = [], []
    for case in cases:
        tell(f"preparing {case.label}")
        try:
            running.append(_Running(case, _sides(case, device, peer, effort.sample_seconds)))
        except OutOfDeviceMemory as error:
            left_out.append(f"{case.label}: {str(error).splitlines()[0]}")
    for number in range(effort.rounds):
        tell(f"round {number + 1} of {effort.rounds}")
        with _without_collector():
            for sampled in running:
                if sampled.goes_on:
                    sampled.take()
    return [sampled.measured() for sampled in running], left_out


def _sides(case: Case, device: Device, peer: Torch | None, seconds: float) -> list[Side]:
    # Results of pending calls take memory, so the more a call moves, the fewer are pending.
    room = device.capabilities.total_bytes // 8
    most = max(1, min(_MOST_CALLS, math.floor(room / max(case.nbytes, 1))))
    sides = [Side(case.penstock(device), device.sync, most, seconds)]
    if peer is not None:
        sides.append(Side(case.torch(peer), peer.sync, most, seconds))
    return sides


@contextmanager
def _without_collector() -> Iterator[None]:
    """Run Python's garbage collector before the block, and not inside it."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
