"""What a profile knows of one device, as plain records: what `ps.advise` judges by, and traces keep.

Times are seconds over the whole profile unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.errors import DeviceNotFound
from penstock.measuring.ceilings import Ceilings
from penstock.memory.trace import Action
from penstock.profiling.lines import Handover, Runs, Transfers
from penstock.profiling.recorder import DeviceRecorder
from penstock.registry import find
from penstock.runtime import Device

_QUARTERS = 4  # of all runs, in each of which memory is kept that grows


@dataclass
class KernelTime:
    """One kernel, by what it takes and gives."""

    name: str
    shapes: str
    where: str  # device or host
    calls: int
    seconds: float
    least_seconds: float  # of one call
    product: str  # the dtype of the matrices that it multiplies, if it does


@dataclass
class Waiting:
    """One line that waited for the device."""

    where: str
    called: str
    why: str
    count: int
    seconds: float
    idle_seconds: float  # of the device, after these waits: until the next kernel began


@dataclass
class Missing:
    """One line whose requests for memory went to the driver."""

    where: str
    count: int
    nbytes: int
    seconds: float
    sizes: int  # that differ


@dataclass
class Keeping:
    """One line that asks for memory again and again, and lets nothing go."""

    where: str
    blocks: int
    nbytes: int
    quarters: tuple[int, ...]  # of them, how many each quarter of all runs added


@dataclass
class Evidence:
    """One device during a profile."""

    device: str
    description: str
    kind: str  # gpu, cpu, accelerator or host
    units: int  # of a CPU: the cores, which the host uses too
    fast_float16: bool  # whether it has units for products of float16 and bfloat16
    seconds: float  # from the first use of the device to the last
    busy_seconds: float | None  # of kernels; None where no times are known
    peak_bytes: int  # live
    taken_bytes: int  # live and idle together, at most
    total_bytes: int
    limit_bytes: int | None
    pool_hits: int
    pool_misses: int
    given_back_bytes: int  # that the pool gave back to the driver
    tight_misses: int  # further misses of a pool that may hold no more than `peak_bytes`
    kernels: list[KernelTime] = field(default_factory=list)
    waits: list[Waiting] = field(default_factory=list)
    runs: list[Runs] = field(default_factory=list)
    transfers: list[Transfers] = field(default_factory=list)
    handovers: list[Handover] = field(default_factory=list)
    misses: list[Missing] = field(default_factory=list)
    keeping: list[Keeping] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)  # what the device reaches; see `Ceilings`

    @property
    def build_seconds(self) -> float:
        """The time in which programs were built."""
        return sum(run.build_seconds for run in self.runs)

    @property
    def working_seconds(self) -> float:
        """The time without building programs, which happens once however long a script runs."""
        return max(self.seconds - self.build_seconds, 0.0)

    def rate(self, what: str) -> float | None:
        """A rate, if it is known."""
        return self.rates.get(what)


def gathered(recorder: DeviceRecorder, measure: bool) -> Evidence:
    """The evidence of a recorder. `measure`: whether to measure rates that are not known yet."""
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
    )


def restored(found: Mapping[str, Any]) -> Evidence:
    """What a trace has, as a record again."""
    kinds: dict[str, type] = {
        "kernels": KernelTime,
        "waits": Waiting,
        "runs": Runs,
        "transfers": Transfers,
        "handovers": Handover,
        "misses": Missing,
        "keeping": Keeping,
    }
    lists = {name: [kind(**record) for record in found[name]] for name, kind in kinds.items()}
    for kept in lists["keeping"]:
        kept.quarters = tuple(kept.quarters)
    return Evidence(**{**found, **lists})


def misses_within(actions: Iterable[Action], limit: int | None) -> int:
    """How many requests would go to the driver, if live and idle blocks together had at most `limit` bytes.

    The pool is simulated: the block that was idle for longest is given back first.
    """
    idle: dict[int, int] = {}  # serial to bytes, the longest idle first
    by_size: dict[int, list[int]] = {}  # serials, some of which may have gone meanwhile
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
    found = []
    for where, blocks in kept.items():
        quarters = [0] * _QUARTERS
        for before, _ in blocks:
            quarters[min(_QUARTERS * before // max(runs, 1), _QUARTERS - 1)] += 1
        found.append(Keeping(where, len(blocks), sum(nbytes for _, nbytes in blocks), tuple(quarters)))
    return found


def measured(evidence: Evidence) -> Evidence:
    """The evidence of a trace with the rates that it lacks, measured if its device is on this machine."""
    try:
        device = find(evidence.device)
    except DeviceNotFound:
        return evidence
    if device.capabilities.description != evidence.description:
        return evidence
    return replace(evidence, rates=_rates(device, evidence.kernels, measure=True) | evidence.rates)


def _rates(device: Device, kernels: list[KernelTime], measure: bool) -> dict[str, float]:
    """The rates that rules ask for: operations of the dtypes in use, and of half precision where it pays."""
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
