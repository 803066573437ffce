"""What a device does while a profile is on: exact totals, and the last single events."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from copy import copy
from time import perf_counter
from typing import Any, Literal, NamedTuple

from penstock.collectives.communicator import Traffic
from penstock.collectives.world import communicator
from penstock.drivers.driver import Cost, Kernel
from penstock.memory.pool import PoolStatistics
from penstock.profiling.lines import LineLog
from penstock.profiling.memory_log import MemoryLog
from penstock.profiling.records import OTHER
from penstock.runtime import Device
from penstock.stream.recorder import Ran, Run
from penstock.stream.stream import PROFILE

KEPT = 1 << 16  # single events, and as many actions on memory: about 20 MB in total
_MAX_WAITS = 1024  # between two kernels
_MAX_NAMES = 4096  # kernels and lines that are counted separately

Kind = Literal["kernel", "copy", "wait"]
Where = Literal["device", "host"]


class Total:
    """All calls of a kernel, copies in a direction, or waits of a line."""

    __slots__ = (
        "calls",
        "cost",
        "detail",
        "idle",
        "kind",
        "least",
        "most",
        "name",
        "nbytes",
        "seconds",
        "timed",
        "where",
    )

    def __init__(
        self, kind: Kind, name: str, where: Where, detail: str = "", cost: Cost | None = None
    ) -> None:
        self.kind = kind
        self.name = name
        self.where = where
        self.detail = detail
        self.cost = cost
        self.calls = 0
        self.timed = 0  # calls whose times are known
        self.nbytes = 0  # of copies
        self.seconds = 0.0
        self.idle = 0.0  # of the device, after waits, until the next kernel starts
        self.least = float("inf")
        self.most = 0.0

    def add(self, times: tuple[float, float] | None, nbytes: int = 0) -> None:
        """Count a call."""
        self.calls += 1
        self.nbytes += nbytes
        if times is not None:
            seconds = times[1] - times[0]
            self.timed += 1
            self.seconds += seconds
            self.least = min(self.least, seconds)
            self.most = max(self.most, seconds)


class Event(NamedTuple):
    """A call, on a queue of the device or a thread of the host, in seconds of `perf_counter`."""

    track: str
    total: Total
    start: float
    end: float
    nbytes: int


class DeviceRecorder:
    """Totals and events of a device. The stream calls it, from any thread."""

    def __init__(self, device: Device, kept: int = KEPT) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._totals: dict[tuple[Any, ...], Total] = {}
        self._last_end: dict[str, float] = {}  # by queue
        self._waits: deque[tuple[float, Total]] = deque(
            maxlen=_MAX_WAITS
        )  # ends of waits since the last kernel
        self.events: deque[Event] = deque(maxlen=kept)
        self._seen = 0
        self._pool_before = device.pool.stats()
        self._pool_after: PoolStatistics | None = None
        self._traffic_before = copy(communicator().traffic)
        self._reported_before = communicator().reported
        self.exchanged = Traffic()  # between ranks, once it has ended
        self.rank_waits: list[float] = []  # seconds that each rank waited meanwhile, as far as they told
        self.lines = lines = LineLog()
        self.memory = MemoryLog(device.pool, device.memory_blocks()[0], kept, lines.runs_so_far)

    def begin(self) -> None:
        """Start to record commands."""
        self.device.log_memory(self.memory)
        try:
            self.device.stream.add_recorder(self)
        except BaseException:
            self.device.unlog_memory(self.memory)
            raise

    def end(self) -> None:
        """Wait for pending commands, and stop recording."""
        try:
            self.device.stream.remove_recorder(self)
        finally:
            self.device.unlog_memory(self.memory)
            self.memory.finish()
            self._pool_after = self.device.pool.stats()
            group = communicator()
            self.exchanged = group.traffic.since(self._traffic_before)
            before = self._reported_before or [Traffic()] * len(group.reported)
            told = zip(group.reported, before, strict=True)
            self.rank_waits = [now.since(then).waited_seconds for now, then in told]

    # Notifications of the stream

    def finished(self, queue: str, commands: Sequence[Ran]) -> None:
        """See Recorder."""
        with self._lock:
            latest = self._last_end.get(queue, 0.0)
            for (what, size, _, _), times in commands:
                if isinstance(what, Kernel):
                    total, nbytes = self._kernel(what), 0
                else:
                    assert isinstance(size, int)
                    total, nbytes = self._total("copy", what, "device"), size
                total.add(times, nbytes)
                if times is not None:
                    # A queue runs its commands sequentially, but converted times may overlap by a little.
                    start = max(times[0], latest)
                    if queue == "compute":
                        self._idled(start, latest)
                    latest = max(times[1], start)
                    self._keep(Event(queue, total, start, latest, nbytes))
            self._last_end[queue] = latest
        self.memory.process(latest or None)

    def waited(self, where: str, why: str, start: float, end: float) -> None:
        """See Recorder."""
        if why != PROFILE:
            total = self._on_thread("wait", where, why, 0, start, end)
            self.lines.waited(where, end)
            with self._lock:
                self._waits.append((end, total))

    def copied_by_host(self, verb: str, nbytes: int, start: float, end: float) -> None:
        """See Recorder."""
        self._on_thread("copy", verb, "", nbytes, start, end)

    def computed_by_host(self, what: str, start: float, end: float) -> None:
        """See Recorder."""
        self._on_thread("kernel", f"numpy {what}", "", 0, start, end)

    def computed(self, run: Run) -> None:
        """See Recorder."""
        self.lines.computed(run)

    def sent(self, array: Any, start: float, end: float) -> None:
        """See Recorder."""
        self.lines.sent(array, start, end)

    def fetched(self, array: Any) -> None:
        """See Recorder."""
        self.lines.fetched(array, perf_counter())

    # Results

    @property
    def dropped(self) -> int:
        """Events that are not kept."""
        return self._seen - len(self.events)

    def totals(self, kind: Kind) -> list[Total]:
        """All totals of a kind, the longest time first."""
        with self._lock:
            totals = [total for total in self._totals.values() if total.kind == kind]
        return sorted(totals, key=lambda total: (-total.seconds, -total.calls))

    def requests(self) -> tuple[int, int]:
        """Requests for memory that the pool served from idle blocks, and those that it did not."""
        after, before = self._pool_after or self.device.pool.stats(), self._pool_before
        return after.hits - before.hits, after.misses - before.misses

    def given_back(self) -> int:
        """The bytes of blocks that the pool returned to the driver."""
        after, before = self._pool_after or self.device.pool.stats(), self._pool_before
        made = sum(miss.nbytes for miss in self.memory.misses.values())
        return max(before.live_bytes + before.pooled_bytes + made - after.live_bytes - after.pooled_bytes, 0)

    def kept_events(self) -> list[Event]:
        """The last events, in the order in which they became known."""
        with self._lock:
            return list(self.events)

    def _on_thread(self, kind: Kind, name: str, detail: str, nbytes: int, start: float, end: float) -> Total:
        thread = threading.current_thread()
        with self._lock:
            total = self._total(kind, name, "host", detail)
            total.add((start, end), nbytes)
            self._keep(Event(f"{thread.name} ({thread.ident})", total, start, end, nbytes))
        return total

    # The lock is held from here on.

    def _kernel(self, kernel: Kernel) -> Total:
        detail = kernel.cost.shapes if kernel.cost else ""  # a kernel may serve several shapes
        total = self._total("kernel", kernel.name, "device", detail)
        if total.calls == 0 and total.name != OTHER:
            total.cost = kernel.cost
        return total

    def _total(self, kind: Kind, name: str, where: Where, detail: str = "") -> Total:
        key = (kind, name, where, detail)
        total = self._totals.get(key)
        if total is None:
            if len(self._totals) >= _MAX_NAMES and name != OTHER:
                return self._total(kind, OTHER, where)
            total = self._totals[key] = Total(kind, name, where, detail)
        return total

    def _idled(self, start: float, before: float) -> None:
        """At the start of a kernel, attribute the device's idle time before it to the last wait."""
        last: tuple[float, Total] | None = None
        while self._waits and self._waits[0][0] <= start:
            last = self._waits.popleft()
        if last is not None:
            last[1].idle += start - max(last[0], before)

    def _keep(self, event: Event) -> None:
        self._seen += 1
        self.events.append(event)
