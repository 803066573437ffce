"""A sequence of runs while it is built and evaluated: where values are, and what is live at each run."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.plan.sequences import IN, OUT, Drop, Gap, Run, Sequel, Task

if TYPE_CHECKING:
    from penstock.plan.recomputing import Search

Ints = npt.NDArray[np.int64]

# Odd numbers by which others are multiplied, so that sums of several tell them apart.
_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93], np.uint64)


class Accesses:
    """What the tasks of an order read and write, as arrays: most of it stays in every sequence."""

    def __init__(
        self, tasks: Sequence[Task], order: Sequence[int], nbytes: Sequence[int], temporary: Sequence[bool]
    ) -> None:
        reads = [(place, value) for place, number in enumerate(order) for value in tasks[number].reads]
        writes = [(place, value) for place, number in enumerate(order) for value in tasks[number].writes]
        self.read_at, self.read = np.array(reads, np.int64).reshape(-1, 2).T
        self.written_at, self.written = np.array(writes, np.int64).reshape(-1, 2).T
        self.size = np.array(nbytes, np.int64)
        self.temporary = np.array(temporary, bool)
        self.last_use = np.full(len(nbytes), -1, np.int64)  # by value, the last place at which it is used
        np.maximum.at(self.last_use, self.read, self.read_at)
        np.maximum.at(self.last_use, self.written, self.written_at)
        self.scratch = np.array([tasks[number].scratch for number in order], np.int64)
        # By task, its results that may overwrite what it reads: number, bytes, and which reads are as large.
        self.over = [
            [
                (at, nbytes[value], positions)
                for at, (value, over) in enumerate(zip(task.writes, task.over, strict=False))
                if (positions := [k for k in over if nbytes[task.reads[k]] >= nbytes[value]])
            ]
            for task in tasks
        ]
        self.over_at = [place for place, number in enumerate(order) if self.over[number]]


class Unfolded:
    """A complete sequence: the lifetimes of its values, and the bytes that are live at each run."""

    def __init__(self, search: Search, unfolding: Unfolding) -> None:
        self.runs, self.places, self.value_of = unfolding.runs, unfolding.places, unfolding.value_of
        self.hosted, self.results = unfolding.state, unfolding.results
        late = unfolding.late - self.hosted
        stays = (search.state.keys() - self.hosted) | (search.new - self.results)
        # Bytes of results that cannot take over the memory of what they replace, and of state on the device.
        self.apart = sum(search.nbytes[value] for value in late | stays)
        self.again = unfolding.again  # tasks that run again, and where
        # The runs of the order itself, by position, after those for what they read.
        self.main = np.array(unfolding.main, np.int64)
        self._search, self.unfolding = search, unfolding
        self._first_copy = len(search.nbytes)
        self._born, self._last = self._lifetimes(unfolding)
        self._counted = self._counts()
        self.last: list[int] = self._last.tolist()
        self.load = self._load()

    @cached_property
    def born(self) -> list[int]:
        """The runs that write values; -1 of what is there or at the host."""
        result: list[int] = self._born.tolist()
        return result

    @cached_property
    def copies(self) -> dict[int, list[int]]:
        """The numbers of what is computed or fetched once more, by value."""
        result: dict[int, list[int]] = {}
        for number in range(self._first_copy, len(self.value_of)):
            if self.born[number] >= 0:
                result.setdefault(self.value_of[number], []).append(number)
        return result

    @cached_property
    def lives(self) -> npt.NDArray[np.uint64]:
        """By value, a number that tells from when to when it is on the device, between which places."""
        places = np.array(self.places, np.int64)
        runs = np.arange(len(places))
        times = 4 * places + np.sign(runs - self.main[places]) + 1  # before a place's own run, it, or after
        times = np.append(times, -1)  # of what no run writes or uses
        numbers = (times[self._born].astype(np.uint64) * _MIX[0]) ^ (
            times[self._last].astype(np.uint64) * _MIX[1]
        )
        result = np.zeros(self._first_copy, np.uint64)
        np.add.at(result, self.value_of, (numbers ^ (numbers >> np.uint64(29))) * _MIX[2])
        return result

    def _lifetimes(self, unfolding: Unfolding) -> tuple[Ints, Ints]:
        """The runs that write values and that use them last."""
        accesses, main = self._search.accesses, self.main
        born, last = (np.full(len(self.value_of), -1, np.int64) for _ in range(2))
        same = np.ones(len(main), bool)
        same[unfolding.changed] = False
        kept = same[accesses.read_at]
        np.maximum.at(last, accesses.read[kept], main[accesses.read_at[kept]])
        np.maximum.at(last, np.array(unfolding.read, np.int64), np.array(unfolding.read_at, np.int64))
        born[accesses.written] = main[accesses.written_at]
        born[self._first_copy :] = unfolding.born
        return born, np.maximum(last, born)

    def _counts(self) -> npt.NDArray[np.bool_]:
        """Which values take memory: not those of the caller, unless they are recomputed or moved."""
        counted = self._born >= 0
        counted[: self._first_copy] &= self._search.accesses.temporary
        for value in self.results:
            counted[value] = self._born[value] >= 0
        return counted

    def _load(self) -> Ints:
        accesses = self._search.accesses
        sizes = accesses.size[self.value_of]
        numbers = self._counted.nonzero()[0]
        change = np.zeros(len(self.runs) + 1, np.int64)
        np.add.at(change, self._born[numbers], sizes[numbers])
        np.subtract.at(change, self._last[numbers] + 1, sizes[numbers])
        result = change[:-1].cumsum()
        result[self.main] += accesses.scratch
        again = [at for runs in self.again.values() for at in runs]
        for at in again:
            result[at] += self._search.tasks[self.runs[at].task].scratch
        counted = self._counted.tolist()
        for at in (*self.main[accesses.over_at].tolist(), *again):
            if taken := self._taken_over(at, counted):
                result[at] -= taken
        return result

    def _taken_over(self, at: int, counted: list[bool]) -> int:
        """The bytes of results that take over the memory of what their task reads."""
        task, reads, writes = self.runs[at]
        total = 0
        taken: set[int] = set()
        for result, size, positions in self._search.accesses.over[task]:
            if not counted[writes[result]]:
                continue
            for position in positions:
                given = reads[position]
                if self.last[given] == at and counted[given] and given not in taken:
                    taken.add(given)
                    total += size
                    break
        return total

    def live_beside(self, run: int) -> Iterator[int]:
        """The values that are live before a run and after it, and may go: not the caller's on the device."""
        live = (self._counted & (self._born < run) & (self._last > run)).nonzero()[0]
        for value in dict.fromkeys(self.value_of[number] for number in live.tolist()):
            if self._search.temporary[value] or value in self.hosted or value in self.results:
                yield value

    @cached_property
    def price(self) -> float:
        """Of what is computed again, and of waiting for copies: asked for only where the memory is less."""
        return self._search.price(self)

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
        if self.born[value] <= run <= self.last[value] and self.born[value] >= 0:
            return True
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


class _Checkpoint(NamedTuple):
    """How far a sequence was before a place: lengths of its lists, and where values were."""

    place: int
    runs: int
    copies: int
    changed: int
    read: int
    repeats: int
    work: float
    late: frozenset[int]
    current: dict[int, int]
    hosted: dict[int, int]


class Unfolding:
    """Builds a sequence: the runs so far, and where values are."""

    def __init__(
        self, search: Search, dropped: Mapping[Gap, Drop], new: frozenset[int], stays: frozenset[int]
    ) -> None:
        """`new`: results that the host has in the end, beside the next values of state that it has.

        `stays`: values that are not gone after their last use.
        """
        self._search, self.dropped, self.stays = search, dropped, stays
        # What the host has at the start. The number of such a value is that which is there.
        self.state = state = frozenset(gap.value for gap in dropped if gap.use < 0)
        self.results = new.union(result for value in state if (result := search.state[value]) is not None)
        # Values that are not where they were written first, with the indices of their copies, or -1.
        self.current = dict.fromkeys(state, -1)
        # Values at the host, with the indices of their copies there.
        self.hosted = {value: value for value in state}
        self.runs: list[Run] = []
        self.places: list[int] = []
        self.main = [0] * len(search.order)
        self.changed: list[int] = []  # places of runs that read other copies
        # What runs that are not in the order read, and where.
        self.read: list[int] = []
        self.read_at: list[int] = []
        self.born: list[int] = []  # the runs that write copies; -1 of those at the host
        self._done = 0
        self.value_of = list(range(len(search.nbytes)))
        self.again: dict[int, list[int]] = {}
        self.repeats = 0
        self.work = 0.0  # of these
        self.late: set[int] = set()  # inputs that are read after a result could have overwritten them
        self._checkpoints: list[_Checkpoint] = []

    def note(self, place: int) -> None:
        """Note how far it is before a place, for sequences that are the same until then."""
        self.run_until(place)
        self._checkpoints.append(
            _Checkpoint(
                place,
                len(self.runs),
                len(self.born),
                len(self.changed),
                len(self.read),
                self.repeats,
                self.work,
                frozenset(self.late),
                self.current.copy(),
                self.hosted.copy(),
            )
        )

    def resume(self, other: Unfolding, until: int, gone: Mapping[int, int]) -> int:
        """Begin as another sequence, of which nothing changes until a place; returns a place before that.

        `gone`: values that are not on the device after a place any more.
        """
        for last in other._checkpoints:
            if last.place > until:
                break
            current = last.current | {value: -1 for value, place in gone.items() if place < last.place}
            hosted = {value: value for value in self.state} | last.hosted
            self._checkpoints.append(last._replace(current=current, hosted=hosted))
        if not self._checkpoints:
            return 0
        last = self._checkpoints[-1]
        self.current, self.hosted = last.current.copy(), last.hosted.copy()
        self.runs, self.places = other.runs[: last.runs], other.places[: last.runs]
        self.main[: last.place] = other.main[: last.place]
        self.changed = other.changed[: last.changed]
        self.read, self.read_at = other.read[: last.read], other.read_at[: last.read]
        self.born = other.born[: last.copies]
        self.value_of += other.value_of[len(self.value_of) :][: last.copies]
        for task, runs in other.again.items():
            if runs[0] < last.runs:
                self.again[task] = runs[: bisect_left(runs, last.runs)]
        self.repeats, self.work, self.late = last.repeats, last.work, set(last.late)
        self._done = last.place
        return last.place

    def is_gone(self, value: int, place: int) -> bool:
        """Whether a value that was there is not on the device at a place."""
        number = self.current.get(value)
        if number is not None:
            return number < 0
        return self._search.end[value] < place and value not in self.stays

    def run_until(self, place: int) -> None:
        """Run what stands before a place as it is."""
        count, first = place - self._done, len(self.runs)
        self.runs += self._search.plain[self._done : place]
        self.places += range(self._done, place)
        self.main[self._done : place] = range(first, first + count)
        self._done = place

    def run(self, place: int, reads: tuple[int, ...]) -> None:
        """Run what stands at a place, with these copies of what it reads."""
        run = self._search.plain[place]
        if reads != run.reads:
            run = Run(run.task, reads, run.writes)
            self.changed.append(place)
            self._note(reads)
        self.main[place] = len(self.runs)
        self.runs.append(run)
        self.places.append(place)
        self._done = place + 1

    def bring_back(self, step: int, place: int) -> list[int]:
        """Rerun a task, or fetch the value `~step`; returns the values that were missing."""
        current = self.current
        if step < 0:
            (current[~step],) = self._add(IN, (self.hosted[~step],), (~step,), place)
            return [~step]
        task = self._search.tasks[step]
        for value, until in self._search.replaced_reads[step]:
            if until < place:
                self.late.add(value)
        self.again.setdefault(step, []).append(len(self.runs))
        self.repeats += 1
        self.work += task.price or 0.0
        copies = self._add(step, tuple([current.get(v, v) for v in task.reads]), task.writes, place)
        made = []
        for copy, value in zip(copies, task.writes, strict=True):
            if self.is_gone(value, place):
                current[value] = copy
                made.append(value)
        return made

    def send(self, value: int, place: int) -> None:
        """Copy a value to the host, unless it is there already."""
        if value not in self.hosted:
            (self.hosted[value],) = self._add(OUT, (self.current.get(value, value),), (value,), place)

    def _add(self, task: int, reads: tuple[int, ...], values: tuple[int, ...], place: int) -> tuple[int, ...]:
        """Add a run that writes copies of values; returns their indices."""
        new = tuple(range(len(self.value_of), len(self.value_of) + len(values)))
        self.value_of += values
        self.born += [-1 if task == OUT else len(self.runs)] * len(new)
        self._note(reads)
        self.runs.append(Run(task, reads, new))
        self.places.append(place)
        return new

    def _note(self, reads: tuple[int, ...]) -> None:
        """Note what the next run reads."""
        self.read += reads
        self.read_at += [len(self.runs)] * len(reads)
