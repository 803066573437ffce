"""What a profile knows about a device, as plain records, for `ps.advise` and for traces.

Times are seconds over the whole profile unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.collectives.world import communicator
from penstock.errors import DeviceNotFound
from penstock.measuring.ceilings import Ceilings
from penstock.memory.trace import Action
from penstock.profiling.lines import Handover, Runs, Transfers
from penstock.profiling.recorder import DeviceRecorder
from penstock.registry import find
from penstock.runtime import Device

_QUARTERS = 4  # of all runs; a leak adds memory in each of them


@dataclass
class KernelTime:
    """A kernel with its shapes."""

    name: str
    shapes: str
    where: str  # device or host
    calls: int
    seconds: float
    least_seconds: float  # of a call
    product: str  # the dtype of the matrices that it multiplies; empty if it multiplies none


@dataclass
class Waiting:
    """A line that waited for the device."""

    where: str
    called: str
    why: str
    count: int
    seconds: float
    idle_seconds: float  # of the device, after these waits, until the next kernel started


@dataclass
class Missing:
    """A line whose requests for memory went to the driver."""

    where: str
    count: int
    nbytes: int
    seconds: float
    sizes: int  # how many different sizes


@dataclass
class Keeping:
    """A line that allocates memory repeatedly and does not release it."""

    where: str
    blocks: int
    nbytes: int
    quarters: tuple[int, ...]  # how many of the blocks were added in each quarter of all runs


@dataclass
class Evidence:
    """A device during a profile."""

    device: str
    description: str
    kind: str  # gpu, cpu, accelerator or host
    units: int  # of a CPU: the cores, which the host uses too
    fast_float16: bool  # whether it has tensor cores for float16 and bfloat16
    seconds: float  # from the first use of the device to the last
    busy_seconds: float | None  # of kernels; None if the device does not time commands
    peak_bytes: int  # live
    taken_bytes: int  # live and idle together, at most
    total_bytes: int
    limit_bytes: int | None
    pool_hits: int
    pool_misses: int
    given_back_bytes: int  # that the pool returned to the driver
    tight_misses: int  # further misses of a pool that is limited to `peak_bytes`
    kernels: list[KernelTime] = field(default_factory=list)
    waits: list[Waiting] = field(default_factory=list)
    runs: list[Runs] = field(default_factory=list)
    transfers: list[Transfers] = field(default_factory=list)
    handovers: list[Handover] = field(default_factory=list)
    misses: list[Missing] = field(default_factory=list)
    keeping: list[Keeping] = field(default_factory=list)
    ranks: int = 1  # that train together
    exchanged_seconds: float = 0.0  # of exchanges between them
    waited_for_ranks: float = 0.0  # of these seconds, those that the program waited
    sent_bytes: int = 0  # to other ranks
    rank_waits: list[float] = field(default_factory=list)  # the same of every rank, as far as they told
    rates: dict[str, float] = field(default_factory=dict)  # the device's best rates; see `Ceilings`

    @property
    def build_seconds(self) -> float:
        """The time in which programs were built."""
        return sum(run.build_seconds for run in self.runs)

    @property
    def working_seconds(self) -> float:
        """The time without that of building programs, which does not grow with the length of a run."""
        return max(self.seconds - self.build_seconds, 0.0)

    def rate(self, what: str) -> float | None:
        """A rate, if it is known."""
        return self.rates.get(what)


def gathered(recorder: DeviceRecorder, measure: bool) -> Evidence:
    """The evidence of a recorder. `measure`: whether to measure rates that are unknown."""
    device, log, lines = recorder.device, recorder.memory, recorder.lines
    can = device.capabilities
    hits, misses = recorder.requests()
    kernels = [
        KernelTime(
            name=total.name,
            shapes=total.detail,
            where=total.where,
            calls=total.calls,
            seconds=total.seconds,
            least_seconds=total.least if total.timed else 0.0,
            product=total.cost.product if total.cost else "",
        )
        for total in recorder.totals("kernel")
    ]
    timed = device.driver.times
    busy = sum(kernel.seconds for kernel in kernels if kernel.where == "device")
    return Evidence(
        device=device.name,
        description=can.description,
        kind=can.kind,
        units=can.compute_units,
        fast_float16=can.tensor_cores or can.matmul_library,
        seconds=max(lines.last - lines.first, 0.0),
        busy_seconds=busy if timed else None,
        peak_bytes=log.peak_bytes,
        taken_bytes=log.taken_bytes,
        total_bytes=can.total_bytes,
        limit_bytes=None if device.stream.unavailable else device.limit_bytes,
        pool_hits=hits,
        pool_misses=misses,
        given_back_bytes=recorder.given_back(),
        tight_misses=misses_within(log.actions, log.peak_bytes) - misses_within(log.actions, None),
        kernels=kernels,
        waits=[
            Waiting(
                total.name, lines.called(total.name), total.detail, total.calls, total.seconds, total.idle
            )
            for total in recorder.totals("wait")
        ],
        runs=lines.runs(),
        transfers=lines.transfers(),
        handovers=lines.handovers(),
        misses=[
            Missing(where, miss.count, miss.nbytes, miss.seconds, len(miss.sizes))
            for where, miss in log.misses.items()
        ],
        keeping=_keeping(log.kept(), lines.count),
        rates=_rates(device, kernels, measure),
        **_exchanged(recorder),
    )


def _exchanged(recorder: DeviceRecorder) -> dict[str, Any]:
    traffic = recorder.exchanged
    return {
        "ranks": communicator().size,
        "exchanged_seconds": traffic.seconds,
        "waited_for_ranks": traffic.waited_seconds,
        "sent_bytes": traffic.sent_bytes,
        "rank_waits": recorder.rank_waits,
    }


def restored(record: Mapping[str, Any]) -> Evidence:
    """The evidence in a trace."""
    kinds: dict[str, type] = {
        "kernels": KernelTime,
        "waits": Waiting,
        "runs": Runs,
        "transfers": Transfers,
        "handovers": Handover,
        "misses": Missing,
        "keeping": Keeping,
    }
    lists = {name: [kind(**item) for item in record[name]] for name, kind in kinds.items()}
    for kept in lists["keeping"]:
        kept.quarters = tuple(kept.quarters)
    return Evidence(**{**record, **lists})


def misses_within(actions: Iterable[Action], limit: int | None) -> int:
    """How many requests would go to the driver, if live and idle blocks together had at most `limit` bytes.

    It simulates a pool that frees the block that is idle for longest first.
    """
    idle: dict[int, int] = {}  # serial -> bytes, the longest idle first
    by_size: dict[int, list[int]] = {}  # serials, some of which may have been freed
    live = pooled = misses = 0
    for action in actions:
        serial, nbytes = action.block.serial, action.block.nbytes
        if not action.out:
            live, pooled = live - nbytes, pooled + nbytes
            idle[serial] = nbytes
            by_size.setdefault(nbytes, []).append(serial)
            continue
        live += nbytes
        fitting = by_size.get(nbytes, [])
        while fitting and fitting[-1] not in idle:
            fitting.pop()
        if fitting:
            pooled -= idle.pop(fitting.pop())
        else:
            misses += 1
        while limit is not None and idle and live + pooled > limit:
            pooled -= idle.pop(next(iter(idle)))
    return misses


def _keeping(kept: Mapping[str, list[tuple[int, int]]], runs: int) -> list[Keeping]:
    keeping = []
    for where, blocks in kept.items():
        quarters = [0] * _QUARTERS
        for before, _ in blocks:
            quarters[min(_QUARTERS * before // max(runs, 1), _QUARTERS - 1)] += 1
        keeping.append(Keeping(where, len(blocks), sum(nbytes for _, nbytes in blocks), tuple(quarters)))
    return keeping


def measured(evidence: Evidence) -> Evidence:
    """The evidence of a trace with missing rates added, measured if the device is on this machine."""
    if evidence.device.endswith(".toml"):
        return evidence  # a file describes the device, which is not there
    try:
        device = find(evidence.device)
    except DeviceNotFound:
        return evidence
    if device.capabilities.description != evidence.description:
        return evidence
    return replace(evidence, rates=_rates(device, evidence.kernels, measure=True) | evidence.rates)


def _rates(device: Device, kernels: list[KernelTime], measure: bool) -> dict[str, float]:
    """The rates that rules need: for the dtypes in use, and for half precision if the device is fast."""
    ceilings = Ceilings(device)
    ceilings.bandwidth(measure)
    ceilings.launches(measure)
    ceilings.recorded(measure)
    dtypes = {kernel.product for kernel in kernels if kernel.product} | {"float32"}
    if device.capabilities.matmul_library:
        dtypes |= {"bfloat16"}
    for dtype in sorted(dtypes):
        ceilings.operations(dtype, measure)
    return ceilings.known()
