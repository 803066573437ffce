"""Memory over time, by the line of code that holds it: exact totals, and the last actions."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.drivers.driver import Memory
from penstock.memory.pool import BufferPool
from penstock.memory.snapshots import History
from penstock.memory.trace import Action, Block
from penstock.profiling.records import OTHER

BEFORE = "(before the profile)"  # the owner of what was live at the beginning, and not traced
_MAX_OWNERS = 1000
_MAX_SIZES = 256  # different sizes that are counted per owner


@dataclass
class Misses:
    """Requests of an owner that went to the driver."""

    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    sizes: set[int] = field(default_factory=set)  # at most `_MAX_SIZES` of them


class MemoryLog:
    """What a profile knows about a device's memory blocks.

    Finalizers note actions without a lock; the next request for memory processes them.
    """

    def __init__(
        self, pool: BufferPool, live: list[Block], kept: int, runs: Callable[[], int] = lambda: 0
    ) -> None:
        """`live`: blocks traced already; `kept`: how many actions and samples to keep; `runs`: so far."""
        self._runs = runs
        self._pool = pool
        self._lock = threading.Lock()
        self._noted: deque[Action] = deque()
        self.note: Callable[[Action], object] = self._noted.append
        self._live = {block.serial: block for block in live}
        self._held: Counter[str] = Counter()
        for block in live:
            self._held[block.site] += block.nbytes
        self._known = self._held.total()
        self.actions: deque[Action] = deque(maxlen=kept)
        self._seen = 0
        self.samples: deque[tuple[float, int, int]] = deque(maxlen=kept)  # seconds, live and pooled bytes
        self._asked: dict[str, tuple[int, int]] = {}  # requested blocks and bytes, by owner
        self._newer_from = Memory(None, 0, None).serial
        self._idle: list[tuple[int, int]] = []
        start, idle = pool.balance()
        self._before = max(start - self._known, 0)  # untraced bytes from before the profile, still live
        self.peak_bytes = start
        self.taken_bytes = start + idle  # the most that was live and idle together
        self._since: dict[int, int] = {}  # by serial: the number of runs when a live block was allocated
        self._last_serial = self._newer_from  # of the driver's allocations so far
        self.misses: dict[str, Misses] = {}  # requests that went to the driver, by owner
        self._before_peak = self._before  # the same, at the peak
        self._at_peak = self._owners()
        self._rising = False  # whether the peak is now, and its owners are not recorded yet

    def process(self, seconds: float | None = None) -> None:
        """Process the actions that were noted. With `seconds`, also sample the pool at that time."""
        with self._lock:
            while self._noted:
                self._sort_in(self._noted.popleft())
            live, pooled = self._pool.balance()
            self.taken_bytes = max(self.taken_bytes, live + pooled)
            self._before = min(self._before, max(live - self._known, 0))
            if seconds is None and self.actions:
                seconds = self.actions[-1].seconds
            if seconds is not None:
                self.samples.append((seconds, live, pooled))

    def finish(self) -> None:
        """End the log."""
        self.process()
        if self._rising:
            self._at_peak, self._rising = self._owners(), False
        self._idle = self._pool.idle()

    @property
    def dropped(self) -> int:
        """Actions that are not kept."""
        return self._seen - len(self.actions)

    def owners(self) -> list[tuple[str, int, int, int]]:
        """Owner, bytes at the peak, requested blocks and bytes; the most bytes at the peak first."""
        with self._lock:
            at_peak = self._owners() if self._rising else self._at_peak
            names = dict.fromkeys([*at_peak, *self._asked])
            rows = [(name, at_peak.get(name, 0), *self._asked.get(name, (0, 0))) for name in names]
        return sorted(rows, key=lambda row: (-row[1], -row[3]))

    def held_before(self) -> dict[str, int]:
        """The bytes that each owner held before the first action that is kept."""
        with self._lock:
            held = Counter(self._held)
            for action in self.actions:
                held[action.block.site] -= action.block.nbytes if action.out else -action.block.nbytes
        return dict(+held)

    def kept(self) -> dict[str, list[tuple[int, int]]]:
        """The blocks that each owner still holds: the number of runs when they were requested, and bytes."""
        with self._lock:
            held: dict[str, list[tuple[int, int]]] = {}
            for serial, since in self._since.items():
                block = self._live[serial]
                held.setdefault(block.site, []).append((since, block.nbytes))
        return held

    def history(self, device: str, epoch: float) -> History:
        """The contents of a snapshot. `epoch` is added to times to get seconds since 1970."""
        with self._lock:
            return History(
                device=device,
                live=list(self._live.values()),
                idle=list(self._idle),
                untraced_bytes=self._before,
                actions=list(self.actions),
                newer_from=self._newer_from,
                epoch=epoch,
                dropped=self.dropped,
                most=self.actions.maxlen or 0,
            )

    # The lock is held from here on.

    def _owners(self) -> dict[str, int]:
        return dict(self._held) | ({BEFORE: self._before_peak} if self._before_peak else {})

    def _sort_in(self, action: Action) -> None:
        block, nbytes = action.block, action.block.nbytes
        self._seen += 1
        self.actions.append(action)
        if action.out:
            self._live[block.serial] = block
            self._since[block.serial] = self._runs()
            self._note_miss(action)
            self._held[block.site] += nbytes
            self._known += nbytes
            count, total = self._asked.get(self._name(block.site), (0, 0))
            self._asked[self._name(block.site)] = count + 1, total + nbytes
            if self._known + self._before > self.peak_bytes:
                self.peak_bytes, self._rising = self._known + self._before, True
                self._before_peak = self._before
            return
        if self._rising:
            self._at_peak, self._rising = self._owners(), False
        if self._live.pop(block.serial, None) is None:
            return  # it was allocated before the profile, and not traced
        self._since.pop(block.serial, None)
        self._known -= nbytes
        self._held[block.site] -= nbytes
        if not self._held[block.site]:
            del self._held[block.site]

    def _note_miss(self, action: Action) -> None:
        """Count a block if the driver has just allocated it: then its serial number is new."""
        if action.block.serial <= self._last_serial:
            return
        self._last_serial = action.block.serial
        misses = self.misses.setdefault(self._name(action.block.site), Misses())
        misses.count += 1
        misses.nbytes += action.block.nbytes
        misses.seconds += action.took
        if len(misses.sizes) < _MAX_SIZES:
            misses.sizes.add(action.block.nbytes)

    def _name(self, site: str) -> str:
        return site if site in self._asked or len(self._asked) < _MAX_OWNERS else OTHER
