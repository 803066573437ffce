"""When copies begin and end: as early and as late as memory permits, so that kernels wait little for them.

A value comes back before it is needed, by as much time as its copy takes, and what goes to the host stays
until its copy is done. Both only as far as no more is live anywhere than at the peak: an early copy never
raises it. What stands in a sequence for a copy from the host is its latest safe start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.plan.sequences import HOLD, IN, OUT, Link, Run, Sequel, Task


def prefetched(sequel: Sequel, tasks: Sequence[Task], nbytes: Sequence[int], link: Link) -> Sequel:
    """The same sequence with time for its copies; `link` as for `sequels`."""
    return _Windows(sequel, tasks, nbytes, link).sequel()


class _Windows:
    def __init__(self, sequel: Sequel, tasks: Sequence[Task], nbytes: Sequence[int], link: Link) -> None:
        self._sequel = sequel
        self._runs = sequel.runs
        self._byte = link.byte
        self._nbytes = nbytes
        self._load = list(sequel.load)
        prices = [tasks[run.task].price or 0.0 if run.task >= 0 else 0.0 for run in sequel.runs]
        self._begins = np.cumsum([0.0, *prices]).tolist()  # when kernels reach each run
        self._sent = {run.writes[0]: at for at, run in enumerate(sequel.runs) if run.task == OUT}

    def sequel(self) -> Sequel:
        """Fetches before what they stand before now, and marks of how long what is sent stays."""
        fetches = self._fetches()
        holds = self._holds(fetches)
        runs: list[Run] = []
        for at, run in enumerate(self._runs):
            runs += fetches.get(at, ())
            if run.task != IN:
                runs.append(run)
            runs += holds.get(at, ())
        return replace(self._sequel, runs=tuple(runs))

    def _size(self, number: int) -> int:
        return self._nbytes[self._sequel.value_of[number]]

    def _room(self, at: int, size: int) -> bool:
        return self._load[at] + size <= self._sequel.peak_bytes

    def _fetches(self) -> dict[int, list[Run]]:
        """The fetches, by the run that they stand before: from the last on, each done before the next."""
        result: dict[int, list[Run]] = {}
        busy = float("inf")  # from when on the link has other things to do
        for number in range(len(self._runs) - 1, -1, -1):
            run = self._runs[number]
            if run.task != IN:
                continue
            size = self._size(run.reads[0])
            busy = min(busy, self._begins[number]) - size * self._byte
            at = number
            sent = self._sent.get(run.reads[0], -1)  # state is there from the start
            while at - 1 > sent and self._begins[at] > busy and self._room(at - 1, size):
                at -= 1
                self._load[at] += size
            result.setdefault(at, []).insert(0, run)
        return result

    def _holds(self, fetches: dict[int, list[Run]]) -> dict[int, list[Run]]:
        """Marks, by the run that they stand after."""
        first: dict[int, int] = {}  # for each value at the host, before which run it is first fetched
        for at, runs in fetches.items():
            for run in runs:
                first[run.reads[0]] = min(at, first.get(run.reads[0], at))
        result: dict[int, list[Run]] = {}
        sent = 0.0  # until when the link is busy
        for number, run in enumerate(self._runs):
            if run.task != OUT:
                continue
            size = self._size(run.reads[0])
            sent = max(sent, self._begins[number]) + size * self._byte
            end = first.get(run.writes[0], len(self._runs))
            at = number
            while at + 1 < end and self._begins[at + 1] < sent and self._room(at + 1, size):
                at += 1
                self._load[at] += size
            if at > number:
                result.setdefault(at, []).append(Run(HOLD, run.reads, ()))
        return result
