"""How long kernels wait for copies to the host and from there, and what another copy would cost.

Copies run beside the kernels, a single one at a time in either direction. What is sent takes memory until the
host has it, and what is fetched from the start of its copy on; so kernels wait not only for what they read,
but also for what has to leave before there is room for what they write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.drivers.rates import BESIDE
from penstock.plan.sequences import OUT, Link, Task
from penstock.plan.unfolding import Unfolded

# Of the time of a copy: the least price of a choice. What it slows is counted with the whole.
_HIDDEN = 1 / 64


def elapsed(unfolded: Unfolded, tasks: Sequence[Task], nbytes: Sequence[int], link: Link) -> float:
    """How long a sequence takes in the memory of its peak."""
    if all(run.task >= 0 for run in unfolded.runs):
        return sum(tasks[run.task].price or 0.0 for run in unfolded.runs)
    load = unfolded.load.tolist()
    room = max(load, default=0)
    now, sent, fetched = 0.0, 0.0, 0.0  # until when kernels run, and copies in each direction
    busy = 0.0  # how long kernels run, slowed by copies beside them
    begins: list[float] = []  # when kernels reach each run
    there = dict.fromkeys(unfolded.hosted, 0.0)  # when the host has a value
    leaving: deque[tuple[float, int]] = deque()  # what still takes memory: until when, and bytes
    left = 0  # bytes of these
    for at, run in enumerate(unfolded.runs):
        if run.task >= 0:
            while leaving and (leaving[0][0] <= now or load[at] + left > room):
                end, size = leaving.popleft()
                left -= size
                now = max(now, end)
            begins.append(now)
            load[at] += left
            now += tasks[run.task].price or 0.0
            busy += tasks[run.task].price or 0.0
            continue
        begins.append(now)
        load[at] += left
        (number,) = run.reads
        size = nbytes[unfolded.value_of[number]]
        now += link.copy
        busy += link.copy + BESIDE * size * link.byte
        if run.task == OUT:
            there[run.writes[0]] = sent = max(now, sent) + size * link.byte
            leaving.append((sent, size))
            left += size
            continue
        earliest = max(there[number], fetched)
        while at > 0 and begins[at] > earliest and load[at - 1] + size <= room:
            at -= 1
            load[at] += size
        fetched = max(begins[at], earliest) + size * link.byte
        now = max(now, fetched)
    return max(now, busy, sent)


class Window(NamedTuple):
    """The time in which a copy may run, as places between tasks, and how long it takes."""

    first: int
    last: int
    takes: float


class Traffic:
    """The copies of a search so far, in one direction."""

    def __init__(self, given: Iterable[Window], until: npt.NDArray[np.float64]) -> None:
        """`until`: the time at each place."""
        windows = list(given)
        self._until = until
        self._first = np.array([window.first for window in windows], int)
        self._last = np.array([window.last for window in windows], int)
        self._takes = np.array([window.takes for window in windows], float)
        self._waits: dict[Window, float] = {}  # by window: moments of a parameter have the same

    def wait(self, window: Window) -> float:
        """About how long kernels would wait for another copy; at least a little, so that none is free."""
        if window not in self._waits:
            self._waits[window] = self._waited(window)
        return self._waits[window]

    def _waited(self, window: Window) -> float:
        inside = (self._first >= window.first) & (self._last <= window.last)
        beside = (self._first < window.last) & (self._last > window.first)
        first = min(window.first, int(self._first[beside].min(initial=window.first)))
        last = max(window.last, int(self._last[beside].max(initial=window.last)))
        free = min(
            self._time(window.first, window.last) - float(self._takes[inside].sum()),
            self._time(first, last) - float(self._takes[beside].sum()),
        )
        return max(window.takes - max(free, 0.0), _HIDDEN * window.takes)

    def _time(self, first: int, last: int) -> float:
        return float(self._until[last] - self._until[first])
