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

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from penstock.plan.copying import Traffic, Window, elapsed
from penstock.plan.deals import Deals
from penstock.plan.sequences import Drop, Gap, Link, Run, Sequel, State, Task
from penstock.plan.unfolding import Accesses, Unfolded, Unfolding

_STEP = 1 / 40  # of the first peak: about how much a sequence frees over the one before
_LEAST = 1 / 1024  # of the first peak without state: smaller values are not worth a run
_MOST_TRIES = 1000
_MOST_RUNS = 2_000_000  # that are looked at: larger graphs get fewer tries, each of which takes longer
_MOST_REPEATS = 2  # for each step, on average
_NOTED = 32  # places: after so many at which something is done, the next sequence may begin
_DEAR = 1.25  # times the price that was expected: what costs more is tried after others


_Copies = tuple[Traffic, Traffic]  # to the host, and from there
_Kind = tuple[Drop, int, int, float | None]  # of choices: bytes, the number of a use, and a task's price


class _Choice(NamedTuple):
    """What may be dropped next, and what then has to stay for it."""

    price: float
    gap: Gap
    drop: Drop
    freed: int  # bytes, where the most are live
    stays: frozenset[int] = frozenset()
    also: tuple[Gap, ...] = ()  # what goes with it in the same way


def sequels(
    tasks: Sequence[Task],
    order: Sequence[int],
    nbytes: Sequence[int],
    kept: frozenset[int],
    link: Link | None = None,
    state: State | None = None,
    new: frozenset[int] = frozenset(),
    at_any_price: bool = False,
) -> Iterator[Sequel]:
    """The given order, and then sequences that take less and less memory.

    What is in `kept` is never freed and takes no memory here: what the caller gives and gets. But `state`
    counts, at all times, unless it is moved; and so do the results `new`. Without `link`, nothing is.
    `at_any_price`: all that may go where the most is live goes at once, so the least is soon known.
    """
    search = Search(tasks, order, nbytes, kept, link, state or {}, new)
    best = search.unfolded({}, frozenset())
    assert best is not None
    yield best.sequel
    step = best.peak if at_any_price else int(best.peak * _STEP)
    search.least = max(int(best.load.max(initial=0) * _LEAST), 1)
    lowest = best.peak
    tried = _Tried(search)
    dropped: dict[Gap, Drop] = {}
    stays: frozenset[int] = frozenset()  # values that stay beyond their last use, for what is computed again
    useless = set[Hashable]()  # what was tried to drop since the last that helped: others may be the same
    possible = search.choices(best, dropped)
    width = len(possible)  # the most that are tried together: fewer after that has failed
    for _ in range(min(_MOST_TRIES, _MOST_RUNS // max(len(order), 1))):
        choices = tried.ranked(possible)
        if not choices:
            if not tried.forget():
                return
            continue
        freed = np.cumsum([choice.freed for choice in choices])
        several = choices[: min(1 + int(freed.searchsorted(step)), width)]
        for chosen in (several, choices[:1]) if len(several) > 1 else (several,):
            drops = {gap: each.drop for each in chosen for gap in (each.gap, *each.also)}
            trial_drops = {**dropped, **drops}
            trial_stays = stays.union(*(choice.stays for choice in chosen))
            most = math.inf if at_any_price else best.price + _DEAR * sum(map(tried.price, chosen))
            trial, key = None, (frozenset(drops.items()), trial_stays)
            if key not in useless:  # what a single choice costs has to be known
                limit = most if len(chosen) > 1 else math.inf
                trial = search.unfolded(trial_drops, trial_stays, limit, best)
            improves = trial is not None and trial.improves(best)
            if trial is not None and improves and (at_any_price or trial.price <= most):
                best, dropped, stays = trial, trial_drops, trial_stays
                width = 2 * len(chosen)
                break
            if trial is not None and not improves:
                useless.add(key)
            width = max(len(chosen) // 2, 1)
        else:
            if trial is None or not improves:
                tried.refuse(choices[0])
            else:
                tried.correct(choices[0], trial.price - best.price)
            width = len(possible)
            continue
        tried.changed = True
        useless.clear()
        possible = search.choices(best, dropped)
        if best.peak < lowest:
            lowest = best.peak
            yield best.sequel


def least_peak(
    tasks: Sequence[Task], nbytes: Sequence[int], kept: frozenset[int], state: State, new: frozenset[int]
) -> int:
    """Bytes below which no peak is without moves: all that a task reads and writes is there while it runs."""
    made = {value for task in tasks for value in task.writes} - kept

    def needed(task: Task) -> int:
        over = {value for value, over in zip(task.writes, task.over, strict=False) if over}
        return sum(nbytes[value] for value in made & {*task.reads, *task.writes} - over) + task.scratch

    return max(map(needed, tasks), default=0) + sum(nbytes[value] for value in (*state, *new))


class _Tried:
    """What is known of choices that were tried: those that did not help, and those that cost more."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._refused: set[tuple[Gap, Drop]] = set()
        # The prices of kinds that were more than expected: repeated layers have choices that are alike.
        self._prices: dict[_Kind, float] = {}
        self.changed = False  # whether another choice was taken since the first that is refused now

    def price(self, choice: _Choice) -> float:
        """What a choice costs, as far as is known."""
        return max(choice.price, self._prices.get(self._search.kind(choice), 0.0))

    def refuse(self, choice: _Choice) -> None:
        """Note that a choice does not help."""
        self._refused.add((choice.gap, choice.drop))

    def forget(self) -> bool:
        """Let what did not help be tried again, if it may help now; whether there is any."""
        changed, self.changed = self.changed and bool(self._refused), False
        self._refused.clear()
        return changed

    def correct(self, choice: _Choice, price: float) -> None:
        """Note what a choice costs, which is more than was known."""
        self._prices[self._search.kind(choice)] = price

    def ranked(self, choices: Sequence[_Choice]) -> list[_Choice]:
        """A choice for each gap, those first that free the most for their price."""
        left = [choice for choice in choices if (choice.gap, choice.drop) not in self._refused]
        left.sort(key=lambda choice: (self.price(choice) / choice.freed, choice.gap))
        return _first_of_each(left)


def _first_of_each(choices: Sequence[_Choice]) -> list[_Choice]:
    """The choices without others for a gap that one before is for."""
    first: dict[Gap, _Choice] = {}
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
        self.writer = {value: number for number, task in enumerate(tasks) for value in task.writes}
        self.uses: dict[int, list[int]] = {}  # places at which a value is written or read
        self.replaced: dict[int, int] = {}  # the place from which on a given value may be gone
        self._touched = [tuple(dict.fromkeys((*task.writes, *task.reads))) for task in tasks]
        for place, number in enumerate(order):
            for value in self._touched[number]:
                self.uses.setdefault(value, []).append(place)
            for value in tasks[number].replaces:
                self.replaced[value] = place
        self.replaced_reads = [  # by task: those of these that it reads
            [(value, self.replaced[value]) for value in task.reads if value in self.replaced]
            for task in tasks
        ]
        self.least = 1  # bytes of what may be dropped
        self._deals: Deals | None = None  # the last
        self.temporary = [value not in kept and value in self.writer for value in range(len(nbytes))]
        self.made_reads = [[value for value in task.reads if self.temporary[value]] for task in tasks]
        self.made = [(*reads, *task.writes) for reads, task in zip(self.made_reads, tasks, strict=True)]
        # The places after which temporaries are gone, and what is by place.
        self.end = [len(order)] * len(nbytes)
        self._ends: list[list[int]] = [[] for _ in order]
        for value, places in self.uses.items():
            if self.temporary[value]:
                self.end[value] = places[-1]
                self._ends[places[-1]].append(value)
        runs = [Run(number, task.reads, task.writes) for number, task in enumerate(tasks)]
        self.plain = [runs[number] for number in order]  # where nothing is dropped
        self.accesses = Accesses(tasks, order, nbytes, self.temporary)
        self._until = np.cumsum([0.0, *(tasks[number].price or 0.0 for number in order)])  # time at places

    # Sequences

    def unfolded(
        self,
        dropped: dict[Gap, Drop],
        stays: frozenset[int],
        most: float = math.inf,
        before: Unfolded | None = None,
    ) -> Unfolded | None:
        """The order with what was dropped brought back.

        None where something may not run twice, or where what does alone costs more than `most`. `before`: a
        sequence in which less was dropped, whose beginning may be the same.
        """
        new = frozenset(value for value in self.new if self.last_gap(value) in dropped)
        state = Unfolding(self, dropped, new, stays)
        done = self._resumed(state, before.unfolding) if before else 0
        leaving = self._leaving(dropped)
        current = state.current
        for number, place in enumerate(self._places(dropped)):
            if place < done:
                continue
            if number % _NOTED:
                state.run_until(place)
            else:
                state.note(place)
            task = self.tasks[self.order[place]]
            made: list[int] = []
            for value in task.reads:
                if current.get(value, value) < 0:
                    closure = self._closure(value, state, place)
                    if closure is None or state.work > most:
                        return None
                    if state.repeats > _MOST_REPEATS * len(self.order):
                        return None
                    for step in closure:
                        made += state.bring_back(step, place)
            state.run(place, tuple([current.get(value, value) for value in task.reads]))
            for value, how in leaving.get(place, ()):
                if how is Drop.MOVE:
                    state.send(value, place)
                current[value] = -1
            for value in self._ends[place]:
                if value in current and value not in stays:
                    current[value] = -1
            for value in made:
                uses = self.uses[value]
                since = dropped.get(Gap(value, bisect_right(uses, place) - 1))
                if uses[-1] <= place or since is Drop.ALWAYS or since is Drop.MOVE:
                    current[value] = -1
        state.run_until(len(self.order))
        return Unfolded(self, state)

    def _resumed(self, state: Unfolding, before: Unfolding) -> int:
        """Begin as a sequence in which less was dropped; the place from which on it is to be unfolded."""
        until, gone = len(self.order), dict[int, int]()
        for gap, how in state.dropped.items():
            if before.dropped.get(gap) is not how:
                place = self.uses[gap.value][gap.use] if gap.use >= 0 else -1
                gone[gap.value] = min(place, gone.get(gap.value, place))
                sent = how is Drop.MOVE and gap.use >= 0
                until = min(until, place if sent else self._next_touch(gap.value, place, before))
        moved = {gap.value for gap in before.dropped}
        for value in state.stays - before.stays:
            end = self.end[value]
            until = min(until, end if value in moved else self._next_touch(value, end, before))
        return state.resume(before, until, gone)

    def _next_touch(self, value: int, place: int, unfolding: Unfolding) -> int:
        """The place after another at which a value is next read, or its task runs again."""
        uses = self.uses[value]
        result = uses[next_use] if (next_use := bisect_right(uses, place)) < len(uses) else len(self.order)
        for use in uses:
            runs = unfolding.again.get(self.order[use], ())
            after = (unfolding.places[at] for at in runs)
            result = min(result, next((again for again in after if again > place), result))
        return result

    def price(self, unfolded: Unfolded) -> float:
        """How much longer a sequence takes than the order."""
        return elapsed(unfolded, self.tasks, self.nbytes, self._link) - float(self._until[-1])

    def _places(self, dropped: dict[Gap, Drop]) -> list[int]:
        """The places at which something is used from the first time on that it is dropped."""
        first: dict[int, int] = {}
        for value, use in dropped:
            first[value] = max(min(use, first.get(value, use)), 0)
        return sorted(set().union(*(self.uses[value][use:] for value, use in first.items())))

    def _leaving(self, dropped: dict[Gap, Drop]) -> dict[int, list[tuple[int, Drop]]]:
        """What is dropped after its use at each place."""
        result: dict[int, list[tuple[int, Drop]]] = {}
        for (value, use), how in dropped.items():
            if use >= 0:
                result.setdefault(self.uses[value][use], []).append((value, how))
        for place, values in result.items():
            if len(values) > 1:  # whatever was decided first
                values.sort(key=lambda each: self._touched[self.order[place]].index(each[0]))
        return result

    def _closure(self, value: int, state: Unfolding, place: int) -> list[int] | None:
        """The tasks that make a value, each after those that it needs, and `~v` where v is fetched.

        None: a task may not run again.
        """
        hosted = state.hosted
        if value in hosted:
            return [~value]
        result: list[int] = []
        there: set[int] = set()
        stack = [(self.writer[value], iter(self.tasks[self.writer[value]].reads))]
        while stack:
            number, reads = stack[-1]
            task = self.tasks[number]
            if task.price is None:
                return None
            for missing in reads:
                if missing in there or not state.is_gone(missing, place):
                    continue
                if missing not in hosted:
                    writer = self.writer[missing]
                    stack.append((writer, iter(self.tasks[writer].reads)))
                    break
                result.append(~missing)
                there.add(missing)
            else:
                stack.pop()
                result.append(number)
                there.update(task.writes)
        return result

    # What to drop

    def kind(self, choice: _Choice) -> _Kind:
        """What choices of the same kind in repeated layers have in common."""
        value, use = choice.gap
        writer = self.writer.get(value)
        return choice.drop, self.nbytes[value], use, None if writer is None else self.tasks[writer].price

    def choices(self, best: Unfolded, dropped: dict[Gap, Drop]) -> list[_Choice]:
        """What is live and idle where the most is live; first what frees the most for its price."""
        at = int(best.load.argmax())
        place = best.places[at]
        touched = {best.value_of[value] for value in (*best.runs[at].reads, *best.runs[at].writes)}
        copies = self._traffic(dropped, place) if self._moves else None
        gaps = self._idle_gaps(best, at, touched)
        again = {value: gap for value, gap in gaps.items() if gap not in dropped and self._price(value)}
        deals = self._deals = Deals(self, best, dropped, again, self._deals)
        reads = best.reads_after(at)
        result: list[_Choice] = []
        for value, gap in gaps.items():
            how = dropped.get(gap)
            size = self.nbytes[value]
            if how is Drop.MOVE:
                continue
            if copies is not None and gap != self.last_gap(value):
                price = self._moving(gap, copies, place)
                result.append(_Choice(price, gap, Drop.MOVE, size))
            once = self._price(value)
            if once is None or how is Drop.ALWAYS:
                continue
            if (deal := deals.of(value, reads[value])) is None:
                continue
            price, freed, stays, also = deal
            drop = Drop.ONCE if how is None else Drop.ALWAYS
            price = max(price, once) if drop is Drop.ALWAYS else price
            result.append(_Choice(price, gap, drop, freed, stays, also))
        if copies is not None:
            result += self._state_choices(best, place, touched, copies)
        return result

    def _price(self, value: int) -> float | None:
        """Of the task that makes a value; None: that may not run again."""
        return self.tasks[self.writer[value]].price if self.temporary[value] else None

    def _idle_gaps(self, best: Unfolded, at: int, touched: set[int]) -> dict[int, Gap]:
        """What is live at a run that does not use it, with the gap between its uses; large values only."""
        place = best.places[at]
        result: dict[int, Gap] = {}
        for value in best.live_beside(at):
            if value in touched or self.nbytes[value] < self.least:
                continue
            gap = Gap(value, bisect_left(self.uses[value], place) - 1)
            if gap.use >= 0 and self.next_use(gap) > place:
                result[value] = gap
        return result

    def _state_choices(
        self, best: Unfolded, place: int, touched: set[int], copies: _Copies
    ) -> Iterator[_Choice]:
        """State on the device that nothing uses at a place."""
        for value, new in self.state.items():
            if value in best.hosted or value in touched or new in touched or self.nbytes[value] < self.least:
                continue
            uses = self.uses[value]
            use = bisect_left(uses, place) - 1
            if use + 1 < len(uses) and uses[use + 1] <= place:
                continue
            gaps = [Gap(value, -1)]
            if 0 <= use < len(uses) - 1:
                gaps.append(Gap(value, use))
            if new is not None:
                gaps.append(self.last_gap(new))
            # It comes and goes at about the same time, and copies in both directions run together.
            price = max(self._moving(gap, copies, place) for gap in gaps)
            yield _Choice(price, gaps[0], Drop.MOVE, self.nbytes[value], also=tuple(gaps[1:]))
        for value in sorted(self.new - best.results):
            idle = place < self.uses[value][0] or place > self.uses[value][-1]
            if idle and self.nbytes[value] >= self.least:
                gap = self.last_gap(value)
                price = self._moving(gap, copies, place)
                yield _Choice(price, gap, Drop.MOVE, self.nbytes[value])

    def _traffic(self, dropped: dict[Gap, Drop], place: int) -> _Copies:
        """The copies to the host, and from there, of all that is moved."""
        windows = [self._windows(gap, place) for gap, how in dropped.items() if how is Drop.MOVE]
        sent, fetched = ([pair[way] for pair in windows] for way in (0, 1))
        return Traffic(filter(None, sent), self._until), Traffic(filter(None, fetched), self._until)

    def _moving(self, gap: Gap, copies: _Copies, place: int) -> float:
        """About what it takes to move a value: as long as kernels would wait for the copies, if at all."""
        waits = 0.0
        for window, traffic in zip(self._windows(gap, place), copies, strict=True):
            if window is not None:
                waits += traffic.wait(window) + self._link.copy
        return waits + 1e-12

    def _windows(self, gap: Gap, place: int) -> tuple[Window | None, Window | None]:
        """When a value that is moved goes to the host, and when it comes back.

        Where the most is live it is neither on its way there nor back.
        """
        start, end = self.uses[gap.value][gap.use] if gap.use >= 0 else -1, self.next_use(gap)
        takes = self.nbytes[gap.value] * self._link.byte
        apart = start < place < end
        sent = None if gap.value in self.state else Window(start + 1, place if apart else end, takes)
        fetched = None if end == len(self.order) else Window(place + 1 if apart else start + 1, end, takes)
        return sent, fetched

    def last_gap(self, value: int) -> Gap:
        """The time after the last use of a value."""
        return Gap(value, len(self.uses[value]) - 1)

    def next_use(self, gap: Gap) -> int:
        """The place of the use after a gap, or the end."""
        uses = self.uses[gap.value]
        return uses[gap.use + 1] if gap.use + 1 < len(uses) else len(self.order)
