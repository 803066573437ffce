"""When copies begin and end: as early and as late as memory permits, so that kernels wait little for them.

A value comes back before it is needed, by as much time as its copy takes, and what goes to the host stays
until its copy is done. Both only as far as no more is live anywhere than at the peak: an early copy never
raises it. What stands in a sequence for a copy from the host is its latest safe start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.plan.copying import Timing
from penstock.plan.sequences import HOLD, IN, Link, Run, Sequel, Task


def prefetched(sequel: Sequel, tasks: Sequence[Task], nbytes: Sequence[int], link: Link) -> Sequel:
    """The same sequence with time for its copies; `link` as for `sequels`.

    Fetches stand before the runs beside which they begin, and marks after those until which what is sent
    stays.
    """
    timing = Timing(sequel, tasks, nbytes, link)
    fetches = timing.fetches()
    runs: list[Run] = []
    for at, run in enumerate(sequel.runs):
        runs += [sequel.runs[fetch] for fetch in fetches.get(at, ())]
        if run.task != IN:
            runs.append(run)
        runs += [Run(HOLD, sequel.runs[sent_by].reads, ()) for sent_by in timing.holds.get(at, ())]
    return replace(sequel, runs=tuple(runs))
