"""A sequence of runs while it is built and evaluated: where values are, and what is live at each run."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from penstock.plan.sequences import IN, OUT, Run, Sequel, Task

if TYPE_CHECKING:
    from penstock.plan.recomputing import Search

_COPY = Task((), ())


class Unfolded:
    """A complete sequence: the lifetimes of its values, and the bytes that are live at each run."""

    def __init__(self, search: Search, unfolding: Unfolding) -> None:
        self.runs, self.places, self.value_of = unfolding.runs, unfolding.places, unfolding.value_of
        self.hosted, self.results = unfolding.state, unfolding.results
        value_of = self.value_of
        late = unfolding.late - self.hosted
        stays = (search.state.keys() - self.hosted) | (search.new - self.results)
        # Bytes of results that cannot take over the memory of what they replace, and of state on the device.
        self.apart = sum(search.nbytes[value] for value in late | stays)
        self.again = unfolding.again  # tasks that run again, and where
        self.price = 0.0
        self._search = search
        self.born = [-1] * len(value_of)
        self.last = [-1] * len(value_of)
        self.copies: dict[int, list[int]] = {}  # by value
        born, last = self.born, self.last
        for at, run in enumerate(self.runs):
            for value in run.reads:
                last[value] = at
            if run.task != OUT:
                for value in run.writes:
                    born[value] = last[value] = at
                    self.copies.setdefault(value_of[value], []).append(value)
        self.load = self._load()

    @cached_property
    def main(self) -> dict[int, int]:
        """The runs of the order itself, by position; runs that bring values back come before them."""
        return {place: at for at, place in enumerate(self.places) if self.runs[at].task >= 0}

    def _load(self) -> npt.NDArray[np.int64]:
        search, change = self._search, [0] * (len(self.runs) + 1)
        at_once = [0] * len(self.runs)  # bytes that are live during a single run
        for at, run in enumerate(self.runs):
            if run.task == OUT:
                continue  # it writes to the host
            task = search.tasks[run.task] if run.task >= 0 else _COPY
            at_once[at] += task.scratch
            taken: set[int] = set()
            for number, value in enumerate(run.writes):
                if self._is_free(value):
                    continue
                size = search.nbytes[self.value_of[value]]
                change[at] += size
                change[self.last[value] + 1] -= size
                for position in task.over[number] if task.over else ():
                    given = run.reads[position]
                    fits = search.nbytes[self.value_of[given]] >= size and given not in taken
                    own = self.born[given] >= 0 and not self._is_free(given)
                    if fits and own and self.last[given] == at:
                        taken.add(given)
                        at_once[at] -= size  # the result takes over the memory of its input
                        break
        return np.array(change[:-1], np.int64).cumsum() + np.array(at_once, np.int64)

    def _is_free(self, number: int) -> bool:
        """Whether a value is in memory of the caller: not a temporary, and neither recomputed nor moved."""
        value = self.value_of[number]
        return number == value and not self._search.temporary[value] and value not in self.results

    def may_go(self, value: int) -> bool:
        """Whether a value is not the caller's on the device."""
        return self._search.temporary[value] or value in self.hosted or value in self.results

    @property
    def peak(self) -> int:
        """The peak of live bytes."""
        return int(self.load.max(initial=0)) + self.apart

    @property
    def place(self) -> int:
        """The position in the order at which the most bytes are live."""
        return self.places[int(self.load.argmax())] if self.places else 0

    def most_at(self, place: int) -> int:
        """The peak of live bytes among the runs at a position of the order."""
        first, end = bisect_left(self.places, place), bisect_right(self.places, place)
        return int(self.load[first:end].max()) + self.apart

    def improves(self, other: Unfolded) -> bool:
        """Whether it takes less at the other sequence's peak, and nowhere more than that peak."""
        return self.peak <= other.peak and self.most_at(other.place) < other.peak

    def is_live(self, value: int, run: int) -> bool:
        """Whether a copy of a value is on the device at a run."""
        return any(self.born[copy] <= run <= self.last[copy] for copy in self.copies.get(value, ()))

    def reads_after(self, run: int) -> dict[int, int]:
        """The places at which values are first read after a run."""
        result: dict[int, int] = {}
        for at in range(len(self.runs) - 1, run, -1):
            for number in self.runs[at].reads:
                result[self.value_of[number]] = self.places[at]
        return result

    @property
    def sequel(self) -> Sequel:
        """The result of the search, for the planner."""
        again = tuple(task for task, runs in self.again.items() for _ in runs)
        load = tuple((self.load + self.apart).tolist())
        return Sequel(
            tuple(self.runs),
            tuple(self.value_of),
            self.peak,
            self.price,
            again,
            load,
            self.hosted,
            self.results,
        )


class Unfolding:
    """Builds a sequence: the runs so far, and where values are."""

    def __init__(self, search: Search, state: frozenset[int], new: frozenset[int]) -> None:
        """`state`: what the host has at the start. The number of such a value is that which is there.

        `new`: results that it has in the end, beside the next values of these.
        """
        self._search = search
        self.state = state
        self.results = new.union(result for value in state if (result := search.state[value]) is not None)
        away = [gone or value in state for value, gone in enumerate(search.temporary)]
        self.current = [-1 if gone else value for value, gone in enumerate(away)]
        # Values at the host, with the indices of their copies there.
        self.hosted = {value: value for value in state}
        self.runs: list[Run] = []
        self.places: list[int] = []
        self.value_of = list(range(len(search.nbytes)))
        self.again: dict[int, list[int]] = {}
        self.repeats = 0
        self.late: set[int] = set()  # inputs that are read after a result could have overwritten them

    def bring_back(self, step: int, place: int) -> list[int]:
        """Rerun a task, or fetch the value `~step`; returns the values that were missing."""
        if step < 0:
            written: tuple[int, ...] = (~step,)
            copies = self._add(IN, (self.hosted[~step],), written, place)
        else:
            task = self._search.tasks[step]
            self.late.update(v for v in task.reads if self._search.replaced.get(v, place) < place)
            self.again.setdefault(step, []).append(len(self.runs))
            self.repeats += 1
            written = task.writes
            copies = self._add(step, tuple(self.current[v] for v in task.reads), written, place)
        made = []
        for copy, value in zip(copies, written, strict=True):
            if self.current[value] < 0:
                self.current[value] = copy
                made.append(value)
        return made

    def send(self, value: int, place: int) -> None:
        """Copy a value to the host, unless it is there already."""
        if value not in self.hosted:
            (self.hosted[value],) = self._add(OUT, (self.current[value],), (value,), place)

    def _add(self, task: int, reads: tuple[int, ...], values: tuple[int, ...], place: int) -> tuple[int, ...]:
        """Add a run that writes copies of values; returns their indices."""
        new = tuple(range(len(self.value_of), len(self.value_of) + len(values)))
        self.value_of += values
        self.runs.append(Run(task, reads, new))
        self.places.append(place)
        return new
