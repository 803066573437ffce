"""Less memory for more time: values that leave the device while nothing reads them, and come back.

Steps stand in an order. Between two of its uses a value may be dropped; then the step that made it runs once
more just before the next use, and before that whatever it reads that is not there either. The same step on
the same values gives the same bits. Or it is moved: a copy of it lies in the memory of the host meanwhile.
State, which is there before the steps and after them, may be at the host all the time but for its uses.
Of what is live where the most bytes are, that goes first which frees the most bytes for the least time, until
the peak cannot be lowered any more. What comes out is a list of sequences, each with a lower peak than the
one before. They do not depend on any budget, so that a smaller budget never takes more memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from penstock.plan.copying import Traffic, Window, elapsed
from penstock.plan.sequences import Link, Run, Sequel, State, Task
from penstock.plan.unfolding import Unfolded, Unfolding

_STEP = 1 / 40  # of the first peak: about how much a sequence frees over the one before
_LEAST = 1 / 1024  # of the first peak: smaller values are not worth a run
_MOST_TRIES = 1000
_MOST_RUNS = 3  # times as many as there are steps
_DEAR, _DEAREST = 1.5, 100.0  # times the price that was expected: what costs more is tried after all else
_SMALL = 1 / 16  # of what is dropped: what it is computed from stays, where that takes no more than this


class _Gap(NamedTuple):
    """The time between two uses of a value, by the number of the first.

    Of state, -1 is the time before the first use, and the last use begins the time until the end.
    """

    value: int
    use: int


class _Drop(Enum):
    ONCE = auto()  # when something needs it, it stays until its next use
    ALWAYS = auto()  # not even then
    MOVE = auto()  # it is at the host meanwhile


_Copies = tuple[Traffic, Traffic]  # to the host, and from there
_Kind = tuple[_Drop, int, int, float | None]  # of choices: bytes, the number of a use, and a task's price


class _Choice(NamedTuple):
    """What may be dropped next, and the small values that then have to stay for it."""

    rank: float  # bytes for the price
    price: float
    gap: _Gap
    drop: _Drop
    stays: frozenset[int]
    also: tuple[_Gap, ...] = ()  # what goes with it in the same way


def sequels(
    tasks: Sequence[Task],
    order: Sequence[int],
    nbytes: Sequence[int],
    kept: frozenset[int],
    link: Link | None = None,
    state: State | None = None,
    new: frozenset[int] = frozenset(),
) -> Iterator[Sequel]:
    """The given order, and then sequences that take less and less memory.

    What is in `kept` is never freed and takes no memory here: what the caller gives and gets. But `state`
    counts, at all times, unless it is moved; and so do the results `new`. Without `link`, nothing is.
    """
    search = Search(tasks, order, nbytes, kept, link, state or {}, new)
    best = search.unfolded({}, frozenset())
    assert best is not None
    yield best.sequel
    step = int(best.peak * _STEP)
    search.least = int(best.peak * _LEAST)
    lowest = best.peak
    refused = _Refused(search)
    dear = _DEAR
    dropped: dict[_Gap, _Drop] = {}
    stays: frozenset[int] = frozenset()  # values that stay beyond their last use, for what is computed again
    possible = search.choices(best, dropped)
    width = len(possible)  # the most that are tried together: fewer after that has failed
    for _ in range(_MOST_TRIES):
        choices = _first_of_each([each for each in possible if each not in refused])
        if not choices:
            if dear > _DEAREST or not refused.may_change:
                return
            dear *= 4  # the price is raised, and all is tried again
            refused = _Refused(search)
            continue
        freed = np.cumsum([nbytes[choice.gap.value] for choice in choices])
        several = choices[: min(1 + int(freed.searchsorted(step)), width)]
        for chosen in (several, choices[:1]) if len(several) > 1 else (several,):
            trial_drops = {**dropped, **{gap: each.drop for each in chosen for gap in (each.gap, *each.also)}}
            trial_stays = stays.union(*(choice.stays for choice in chosen))
            trial = search.unfolded(trial_drops, trial_stays)
            most = best.price + dear * sum(choice.price for choice in chosen)
            if trial is not None and trial.price <= most and trial.improves(best):
                best, dropped, stays = trial, trial_drops, trial_stays
                width = 2 * len(chosen)
                break
            width = max(len(chosen) // 2, 1)
        else:
            refused.add(choices[0], trial is not None and trial.price > most)
            width = len(possible)
            continue
        refused.may_change = True
        possible = search.choices(best, dropped)
        if best.peak < lowest:
            lowest = best.peak
            yield best.sequel


class _Refused:
    """Choices that did not help, or not for their price."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._each: set[tuple[_Gap, _Drop]] = set()
        self._alike: set[_Kind] = set()  # repeated layers have choices that are alike
        self.may_change = False  # whether one may help for a higher price, or since another was taken

    def add(self, choice: _Choice, dear: bool) -> None:
        """Refuse a choice; `dear`: for its price."""
        self._each.add((choice.gap, choice.drop))
        if dear:
            self.may_change = True
            self._alike.add(self._search.kind(choice))

    def __contains__(self, choice: _Choice) -> bool:
        alike = choice.drop is not _Drop.ONCE and self._search.kind(choice) in self._alike
        return alike or (choice.gap, choice.drop) in self._each


def _first_of_each(choices: Sequence[_Choice]) -> list[_Choice]:
    """The choices without others for a gap that one before is for."""
    first: dict[_Gap, _Choice] = {}
    for choice in choices:
        first.setdefault(choice.gap, choice)
    return list(first.values())


class Search:
    """What does not change while sequences are tried."""

    def __init__(
        self,
        tasks: Sequence[Task],
        order: Sequence[int],
        nbytes: Sequence[int],
        kept: frozenset[int],
        link: Link | None,
        state: State,
        new: frozenset[int],
    ) -> None:
        self.state, self.new = state, new
        self.tasks, self.order, self.nbytes, self._moves = tasks, order, nbytes, link is not None
        self._link = link or Link(0.0, 0.0)
        self._writer = {value: number for number, task in enumerate(tasks) for value in task.writes}
        self._uses: dict[int, list[int]] = {}  # places at which a value is written or read
        self.replaced: dict[int, int] = {}  # the place from which on a given value may be gone
        self._touched = [tuple(dict.fromkeys((*task.writes, *task.reads))) for task in tasks]
        for place, number in enumerate(order):
            for value in self._touched[number]:
                self._uses.setdefault(value, []).append(place)
            for value in tasks[number].replaces:
                self.replaced[value] = place
        self.least = 0  # bytes of what may be dropped
        self.temporary = [value not in kept and value in self._writer for value in range(len(nbytes))]
        self._over: list[list[int]] = [[] for _ in order]  # the temporaries that are used last at each place
        for value, uses in self._uses.items():
            if self.temporary[value]:
                self._over[uses[-1]].append(value)
        self._runs = [Run(number, task.reads, task.writes) for number, task in enumerate(tasks)]
        self._until = np.cumsum([0.0, *(tasks[number].price or 0.0 for number in order)])  # time at places

    # Sequences

    def unfolded(self, dropped: dict[_Gap, _Drop], stays: frozenset[int]) -> Unfolded | None:
        """The order with what was dropped brought back; None where something may not run twice."""
        new = frozenset(gap.value for gap in dropped if gap.value in self.new and gap == self._end(gap.value))
        state = Unfolding(self, frozenset(gap.value for gap in dropped if gap.use < 0), new)
        leaving = self._leaving(dropped)
        current = state.current
        for place, number in enumerate(self.order):
            task = self.tasks[number]
            made: list[int] = []
            for value in task.reads:
                if current[value] < 0:
                    closure = self._closure(value, state.current, state.hosted)
                    if closure is None or len(state.runs) > _MOST_RUNS * len(self.order):
                        return None
                    for step in closure:
                        made += state.bring_back(step, place)
            reads = tuple([current[value] for value in task.reads])
            state.runs.append(self._runs[number] if reads == task.reads else Run(number, reads, task.writes))
            state.places.append(place)
            for value in task.writes:
                current[value] = value
            for value, how in leaving.get(place, ()):
                if how is _Drop.MOVE:
                    state.send(value, place)
                current[value] = -1
            for value in self._over[place]:
                if value not in stays:
                    current[value] = -1
            for value in made:
                later = self._uses[value][-1] > place
                since = dropped.get(_Gap(value, bisect_right(self._uses[value], place) - 1))
                if not later or since in (_Drop.ALWAYS, _Drop.MOVE):
                    current[value] = -1
        result = Unfolded(self, state)
        result.price = elapsed(result, self.tasks, self.nbytes, self._link) - float(self._until[-1])
        return result

    def _leaving(self, dropped: dict[_Gap, _Drop]) -> dict[int, list[tuple[int, _Drop]]]:
        """What is dropped after its use at each place."""
        result: dict[int, list[tuple[int, _Drop]]] = {}
        for (value, use), how in dropped.items():
            if use >= 0:
                result.setdefault(self._uses[value][use], []).append((value, how))
        for place, values in result.items():
            if len(values) > 1:  # whatever was decided first
                values.sort(key=lambda each: self._touched[self.order[place]].index(each[0]))
        return result

    def _closure(self, value: int, current: list[int], hosted: Container[int]) -> list[int] | None:
        """The tasks that make a value, each after those that it needs, and `~v` where v is fetched.

        None: a task may not run again.
        """
        if value in hosted:
            return [~value]
        result: dict[int, None] = {}
        there: set[int] = set()
        stack = [self._writer[value]]
        while stack:
            number = stack[-1]
            task = self.tasks[number]
            if task.price is None:
                return None
            missing = next((v for v in task.reads if current[v] < 0 and v not in there), None)
            if missing is not None and missing in hosted:
                result[~missing] = None
                there.add(missing)
                continue
            if missing is not None:
                stack.append(self._writer[missing])
                continue
            stack.pop()
            result[number] = None
            there.update(task.writes)
        return list(result)

    # What to drop

    def kind(self, choice: _Choice) -> _Kind:
        """What choices of the same kind in repeated layers have in common."""
        value, use = choice.gap
        writer = self._writer.get(value)
        return choice.drop, self.nbytes[value], use, None if writer is None else self.tasks[writer].price

    def choices(self, best: Unfolded, dropped: dict[_Gap, _Drop]) -> list[_Choice]:
        """What is live and idle where the most is live; first what frees the most for its price."""
        at = int(best.load.argmax())
        place = best.places[at]
        touched = {best.value_of[value] for value in (*best.runs[at].reads, *best.runs[at].writes)}
        copies = self._traffic(dropped, place) if self._moves else None
        result: list[_Choice] = []
        for value, numbers in best.copies.items():
            if value in touched or not best.may_go(value) or self.nbytes[value] < self.least:
                continue
            if not any(best.born[copy] < at < best.last[copy] for copy in numbers):
                continue
            uses = self._uses[value]
            use = bisect_left(uses, place) - 1
            if use < 0 or use + 1 >= len(uses) or uses[use + 1] <= place:
                continue
            gap = _Gap(value, use)
            how = dropped.get(gap)
            if how is _Drop.MOVE:
                continue
            if copies is not None:
                price = self._moving(gap, copies, place)
                result.append(_Choice(self.nbytes[value] / price, price, gap, _Drop.MOVE, frozenset()))
            again = self.tasks[self._writer[value]].price if self.temporary[value] else None
            if again is None or how is _Drop.ALWAYS:
                continue
            price, stays = self._price(value, at, uses[use + 1], best, dropped)
            drop = _Drop.ONCE if how is None else _Drop.ALWAYS
            price = max(price, again) if drop is _Drop.ALWAYS else price
            result.append(_Choice(self.nbytes[value] / (price + 1e-12), price, gap, drop, stays))
        if copies is not None:
            result += self._state_choices(best, place, touched, copies)
        return sorted(result, key=lambda choice: (-choice.rank, choice.gap))

    def _state_choices(
        self, best: Unfolded, place: int, touched: set[int], copies: _Copies
    ) -> Iterator[_Choice]:
        """State on the device that nothing uses at a place."""
        for value, new in self.state.items():
            if value in best.hosted or value in touched or new in touched or self.nbytes[value] < self.least:
                continue
            uses = self._uses[value]
            use = bisect_left(uses, place) - 1
            if use + 1 < len(uses) and uses[use + 1] <= place:
                continue
            gaps = [_Gap(value, -1)]
            if 0 <= use < len(uses) - 1:
                gaps.append(_Gap(value, use))
            if new is not None:
                gaps.append(self._end(new))
            price = sum(self._moving(gap, copies, place) for gap in gaps)
            rank = self.nbytes[value] / price
            yield _Choice(rank, price, gaps[0], _Drop.MOVE, frozenset(), tuple(gaps[1:]))
        for value in sorted(self.new - best.results):
            idle = place < self._uses[value][0] or place > self._uses[value][-1]
            if idle and self.nbytes[value] >= self.least:
                gap = self._end(value)
                price = self._moving(gap, copies, place)
                yield _Choice(self.nbytes[value] / price, price, gap, _Drop.MOVE, frozenset())

    def _traffic(self, dropped: dict[_Gap, _Drop], place: int) -> _Copies:
        """The copies to the host, and from there, of all that is moved."""
        windows = [self._windows(gap, place) for gap, how in dropped.items() if how is _Drop.MOVE]
        sent, fetched = ([pair[way] for pair in windows] for way in (0, 1))
        return Traffic(filter(None, sent), self._until), Traffic(filter(None, fetched), self._until)

    def _moving(self, gap: _Gap, copies: _Copies, place: int) -> float:
        """About what it takes to move a value: as long as kernels would wait for the copies, if at all."""
        waits = 0.0
        for window, traffic in zip(self._windows(gap, place), copies, strict=True):
            if window is not None:
                waits += traffic.wait(window) + self._link.copy
        return waits + 1e-12

    def _windows(self, gap: _Gap, place: int) -> tuple[Window | None, Window | None]:
        """When a value that is moved goes to the host, and when it comes back.

        Where the most is live it is neither on its way there nor back.
        """
        start, end = self._between(gap)
        takes = self.nbytes[gap.value] * self._link.byte
        apart = start < place < end
        sent = None if gap.value in self.state else Window(start + 1, place if apart else end, takes)
        fetched = None if end == len(self.order) else Window(place + 1 if apart else start + 1, end, takes)
        return sent, fetched

    def _end(self, value: int) -> _Gap:
        """The time after the last use of a value."""
        return _Gap(value, len(self._uses[value]) - 1)

    def _between(self, gap: _Gap) -> tuple[int, int]:
        """The places of the uses before and after a gap."""
        uses = self._uses[gap.value]
        start = uses[gap.use] if gap.use >= 0 else -1
        return start, uses[gap.use + 1] if gap.use + 1 < len(uses) else len(self.order)

    def _price(
        self, value: int, at: int, next_place: int, best: Unfolded, dropped: dict[_Gap, _Drop]
    ) -> tuple[float, frozenset[int]]:
        """About what it takes to have a value again at its next use, and what had better stay for that."""
        end = best.main[next_place]
        writer = self._writer[value]
        if any(at < run <= end for run in best.again.get(writer, ())):
            return 0.0, frozenset()  # it is computed on the way
        total = 0.0
        seen = {writer}
        stack = [writer]
        stays = set()
        while stack:
            task = self.tasks[stack.pop()]
            total += task.price or 0.0
            for given in task.reads:
                if not self.temporary[given] or best.is_live(given, end):
                    continue
                needed = self._writer[given]
                if needed in seen or self._comes_back(given, next_place, dropped):
                    continue
                if self.nbytes[given] <= _SMALL * self.nbytes[value]:
                    stays.add(given)
                    continue
                seen.add(needed)
                stack.append(needed)
        return total, frozenset(stays)

    def _comes_back(self, value: int, place: int, dropped: dict[_Gap, _Drop]) -> bool:
        """Whether a value is computed again after a place anyway, so that it only has to come sooner."""
        use = bisect_right(self._uses[value], place) - 1
        return dropped.get(_Gap(value, use)) in (_Drop.ONCE, _Drop.MOVE)
