"""How long kernels wait for copies to the host and from there, and what another copy would cost.

Copies run beside the kernels, a single one at a time in either direction. What is sent takes memory until the
host has it, and what is fetched from the start of its copy on; so kernels wait not only for what they read,
but also for what has to leave before there is room for what they write.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.drivers.rates import BESIDE
from penstock.plan.sequences import OUT, Link, Sequel, Task
from penstock.plan.unfolding import Unfolded

# Of the time of a copy: the least price of a choice. What it slows is counted with the whole.
_HIDDEN = 1 / 64


def elapsed(unfolded: Unfolded, tasks: Sequence[Task], nbytes: Sequence[int], link: Link) -> float:
    """How long a sequence takes in the memory of its peak."""
    if all(run.task >= 0 for run in unfolded.runs):
        return sum(tasks[run.task].price or 0.0 for run in unfolded.runs)
    return Timing(unfolded, tasks, nbytes, link).seconds


class Timing:
    """A sequence in time, in the memory of its peak: copies begin as early as memory and the link permit."""

    def __init__(
        self, sequence: Unfolded | Sequel, tasks: Sequence[Task], nbytes: Sequence[int], link: Link
    ) -> None:
        self._runs, self._tasks, self._link = sequence.runs, tasks, link
        self._sizes, self._value_of = nbytes, sequence.value_of
        self._load: list[int] = np.asarray(sequence.load).tolist()
        self._room = max(self._load, default=0)
        self._now, self._sent, self._fetched = 0.0, 0.0, 0.0  # until when kernels run, and copies either way
        self._begins: list[float] = []  # when kernels reach each run
        self._there = dict.fromkeys(sequence.hosted, (0.0, -1))  # when the host has a value; the copy's run
        self._leaving: deque[tuple[float, int, int]] = deque()  # what takes memory: until when, bytes, run
        self._left = 0  # bytes of these
        self._fetches: list[tuple[int, int, float]] = []  # the run before which each may begin, its run, time
        self.holds: dict[int, list[int]] = {}  # by run: what is sent and takes memory until after it, as runs
        self.seconds = self._simulated()

    def _simulated(self) -> float:
        busy = 0.0  # how long kernels run, slowed by copies beside them
        for at, run in enumerate(self._runs):
            if self._leaving:
                self._make_room(at)
            if run.task >= 0:
                price = self._tasks[run.task].price or 0.0
                busy += price
            else:
                price = self._link.copy
                size = self._sizes[self._value_of[run.reads[0]]]
                busy += price + BESIDE * size * self._link.byte
            self._begins.append(self._now)
            self._load[at] += self._left
            self._now += price
            if run.task == OUT:
                self._send(at, size)
            elif run.task < 0:
                self._fetch(at, size)
        for _, _, sent_by in self._leaving:
            self._hold(sent_by, len(self._runs))
        return max(self._now, busy, self._sent)

    def _make_room(self, at: int) -> None:
        """Wait for what is sent, as far as the memory of a run is not free without that."""
        leaving, needed = self._leaving, self._load[at]
        while leaving and (leaving[0][0] <= self._now or needed + self._left > self._room):
            end, size, sent_by = leaving.popleft()
            self._left -= size
            self._now = max(self._now, end)
            self._hold(sent_by, at)

    def _send(self, at: int, size: int) -> None:
        self._sent = max(self._now, self._sent) + size * self._link.byte
        self._there[self._runs[at].writes[0]] = self._sent, at
        self._leaving.append((self._sent, size, at))
        self._left += size

    def _hold(self, sent_by: int, until: int) -> None:
        """Note that a value takes memory until before a run."""
        if until - 1 > sent_by:
            self.holds.setdefault(until - 1, []).append(sent_by)

    def _fetch(self, at: int, size: int) -> None:
        there, sent_by = self._there[self._runs[at].reads[0]]
        earliest, first = max(there, self._fetched), at
        begins, load, most = self._begins, self._load, self._room - size
        while first - 1 > sent_by and begins[first] > earliest and load[first - 1] <= most:
            first -= 1
            load[first] += size
        takes = size * self._link.byte
        self._fetches.append((first, at, takes))
        self._fetched = max(self._begins[first], earliest) + takes
        self._now = max(self._now, self._fetched)

    def fetches(self) -> dict[int, list[int]]:
        """By run: the fetches, as runs, that begin before it. As late as nothing waits longer for them."""
        result: dict[int, list[int]] = {}
        begins = [*self._begins, self._now]
        busy = math.inf  # from when on the link has other things to do
        for first, at, takes in reversed(self._fetches):
            busy = min(busy, begins[at + 1]) - takes
            latest = bisect_right(begins, busy, first, at + 1) - 1
            result.setdefault(max(first, latest), []).insert(0, at)
        return result


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
        first = np.array([window.first for window in windows], int)
        last = np.array([window.last for window in windows], int)
        takes = np.array([window.takes for window in windows], float)
        # Sorted, and beside them how early those begin that end after each, and the other way round.
        by_last, by_first = last.argsort(), first.argsort()
        self._lasts, self._firsts = last[by_last].tolist(), first[by_first].tolist()
        earliest = np.minimum.accumulate(first[by_last][::-1])[::-1]
        latest = np.maximum.accumulate(last[by_first])
        self._earliest, self._latest = [*earliest.tolist(), len(until)], [-1, *latest.tolist()]
        # What those take that end first, and those that begin first; and of the latter, each by itself.
        self._ended, self._begun = ([0.0, *takes[order].cumsum().tolist()] for order in (by_last, by_first))
        self._last, self._takes = last[by_first], takes[by_first]
        self._waits: dict[Window, float] = {}  # by window: moments of a parameter have the same

    def wait(self, window: Window) -> float:
        """About how long kernels would wait for another copy; at least a little, so that none is free."""
        if window not in self._waits:
            self._waits[window] = self._waited(window)
        return self._waits[window]

    def _waited(self, window: Window) -> float:
        ended = bisect_right(self._lasts, window.first)
        begins, begun = (bisect_left(self._firsts, place) for place in (window.first, window.last))
        inside = self._takes[begins:begun][self._last[begins:begun] <= window.last].sum()
        first, last = min(window.first, self._earliest[ended]), max(window.last, self._latest[begun])
        free: float = min(
            self._time(window.first, window.last) - float(inside),
            self._time(first, last) - (self._begun[begun] - self._ended[ended]),
        )
        return max(window.takes - max(free, 0.0), _HIDDEN * window.takes)

    def _time(self, first: int, last: int) -> float:
        return float(self._until[last] - self._until[first])
