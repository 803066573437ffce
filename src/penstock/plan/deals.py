"""What a dropped value costs: the tasks that bring it back, and what had better stay for them.

To run a task again, all that it reads has to be there. What is not can be computed again, too, or stay from
its last use on, which takes memory where the most is live. A price for a byte decides which; the right price
is that of the deal itself, time for bytes. Other results of the tasks that run again come back by the way, so
they go with the value.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from penstock.plan.sequences import Drop, Gap
from penstock.plan.unfolding import Unfolded

if TYPE_CHECKING:
    from penstock.plan.recomputing import Search

_FIRST_RATE = 4.0  # times the price of the last task for a byte of its result: about what a byte may cost
_MOST_TRIES = 256  # to add a task, as ways may double with each; after that, what may stay does
_ROUNDS = 3  # in which the price for a byte settles


class Deal(NamedTuple):
    """Bytes that are free where the most are live, and what that takes."""

    price: float
    freed: int
    stays: frozenset[int] = frozenset()
    also: tuple[Gap, ...] = ()  # other results that go with it


class _Needs(NamedTuple):
    """What it takes to run a task again at a place, whatever a byte costs."""

    price: float | None  # of the task
    beside: tuple[Gap, ...]  # its results that may be dropped until then, or longer
    freed: int  # bytes of these
    missing: tuple[tuple[int, int, int | None], ...]  # values, what writes them, bytes of those that may stay


class _Place(NamedTuple):
    """What is known of a place."""

    needs: dict[int, _Needs]  # by task
    values: set[int]  # all that these tasks read and write
    deals: dict[int, Deal | None]  # by value


class Deals:
    """The deals for what is idle where the most is live."""

    def __init__(
        self,
        search: Search,
        best: Unfolded,
        dropped: Mapping[Gap, Drop],
        idle: Mapping[int, Gap],
        before: Deals | None = None,
    ) -> None:
        """`idle`: what may be dropped there. `before`: the deals for a sequence in which less was dropped."""
        self._search, self._best, self._dropped, self._idle = search, best, dropped, idle
        self._at = int(best.load.argmax())
        self._over = search.accesses.last_use < best.places[self._at]  # values that are used only before
        self._places: dict[int, _Place] = {}
        if before is not None:
            changed = self._changed(before)
            self._places = {place: self._kept(there, changed) for place, there in before._places.items()}

    def _kept(self, there: _Place, changed: set[int]) -> _Place:
        """What is still true of a place."""
        if changed.isdisjoint(there.values):
            return there
        made = self._search.made
        needs = {task: needs for task, needs in there.needs.items() if changed.isdisjoint(made[task])}
        return _Place(needs, set().union(*(made[task] for task in needs)), {})

    def _changed(self, before: Deals) -> set[int]:
        """The values of which something is not as it was before that deals depend on."""
        different = (self._best.lives != before._best.lives) | (self._over != before._over)
        dropped = self._dropped.items() - before._dropped.items()
        idle = self._idle.items() ^ before._idle.items()
        return {*different.nonzero()[0].tolist(), *(gap.value for gap, _ in dropped), *(v for v, _ in idle)}

    def of(self, value: int, place: int) -> Deal | None:
        """The best deal for a value that is needed again at a place; None: it would free nothing."""
        search, best = self._search, self._best
        writer, size = search.writer[value], search.nbytes[value]
        runs = best.again.get(writer, ())
        if bisect_right(runs, best.main[place]) > bisect_right(runs, self._at):
            return Deal(0.0, size)  # it is computed on the way
        there = self._places.setdefault(place, _Place({}, set(), {}))
        if value not in there.deals:
            there.deals[value] = self._best_deal(value, place, there)
        return there.deals[value]

    def _best_deal(self, value: int, place: int, there: _Place) -> Deal | None:
        search, needs = self._search, there.needs
        writer, size = search.writer[value], search.nbytes[value]
        result: Deal | None = None
        rate = _FIRST_RATE * (search.tasks[writer].price or 0.0) / max(size, 1)
        for _ in range(_ROUNDS):
            closure = _Closure(self, there, place, rate)
            if closure.added(writer, math.inf) == math.inf:
                return result
            gaps = [gap for task in closure.tasks for gap in needs[task].beside if gap.value != value]
            nbytes = search.nbytes
            freed = size + sum(nbytes[gap.value] for gap in gaps) - sum(nbytes[v] for v in closure.stays)
            price = sum(needs[task].price or 0.0 for task in closure.tasks)
            if freed > 0 and (result is None or price * result.freed < result.price * freed):
                result = Deal(price, freed, frozenset(closure.stays), tuple(gaps))
                rate = price / freed
            elif freed > 0:
                break
            else:
                rate *= _FIRST_RATE
        return result

    def needs(self, task: int, place: int) -> _Needs:
        """What it takes to run a task again at a place."""
        search = self._search
        self._places[place].values.update(search.made[task])
        idle = [self._idle[value] for value in search.tasks[task].writes if value in self._idle]
        beside = tuple([gap for gap in idle if search.next_use(gap) >= place])
        missing = tuple(
            [
                (value, search.writer[value], search.nbytes[value] if self._may_stay(value) else None)
                for value in search.made_reads[task]
                if not self._is_there(value, place)
            ]
        )
        freed = sum(search.nbytes[gap.value] for gap in beside)
        return _Needs(search.tasks[task].price, beside, freed, missing)

    def _may_stay(self, value: int) -> bool:
        """Whether a value can stay beyond its last use."""
        last = self._search.last_gap(value)
        return last not in self._dropped and self._search.uses[value][-1] < self._best.places[self._at]

    def _is_there(self, value: int, place: int) -> bool:
        """Whether a value needs nothing at a place, or is computed again after it anyway, only too late.

        If its task has other results, these may be what it is computed again for, and gone by then.
        """
        search = self._search
        if self._best.is_live(value, self._best.main[place]):
            return True
        use = bisect_right(search.uses[value], place) - 1
        how = self._dropped.get(Gap(value, use))
        return how is Drop.MOVE or (how is Drop.ONCE and len(search.tasks[search.writer[value]].writes) == 1)


class _Closure:
    """Tasks that run again together, and what stays for them, at a price for a byte."""

    def __init__(self, deals: Deals, there: _Place, place: int, rate: float) -> None:
        """`there`: what is known of the place."""
        self._deals, self._needs, self._place, self._rate = deals, there.needs, place, rate
        self._tries = _MOST_TRIES
        self.tasks: dict[int, None] = {}
        self.stays: dict[int, None] = {}

    def added(self, number: int, most: float) -> float:
        """Add a task, with the cheapest way to have what it reads; its cost, infinite if more than `most`."""
        needs = self._needs.get(number)
        if needs is None:
            needs = self._needs[number] = self._deals.needs(number, self._place)
        self._tries -= 1
        if needs.price is None or self._tries < 0:
            return math.inf
        rate, tasks, stays = self._rate, self.tasks, self.stays
        total = needs.price - rate * needs.freed
        tasks[number] = None
        for value, writer, size in needs.missing:
            if total > most:
                return math.inf
            if writer in tasks or value in stays:
                continue
            keep = math.inf if size is None else rate * size
            task_count, stay_count = len(tasks), len(stays)
            again = self.added(writer, min(keep, most - total))
            if keep < again:
                _cut(tasks, task_count)
                _cut(stays, stay_count)
                stays[value] = None
            total += min(keep, again)
        return total if total <= most else math.inf


def _cut(numbers: dict[int, None], count: int) -> None:
    """Leave only the first so many."""
    while len(numbers) > count:
        numbers.popitem()
