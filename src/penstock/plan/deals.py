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
_ROUNDS = 3  # in which the price for a byte settles


class Deal(NamedTuple):
    """Bytes that are free where the most are live, and what that takes."""

    price: float
    freed: int
    stays: frozenset[int] = frozenset()
    also: tuple[Gap, ...] = ()  # other results that go with it


class Deals:
    """The deals for what is idle where the most is live."""

    def __init__(
        self, search: Search, best: Unfolded, dropped: Mapping[Gap, Drop], idle: Mapping[int, Gap]
    ) -> None:
        """`idle`: what may be dropped there."""
        self._search, self._best, self._dropped, self._idle = search, best, dropped, idle
        self._at = int(best.load.argmax())
        self._beside: dict[tuple[int, int], list[Gap]] = {}
        self._there: dict[tuple[int, int], bool] = {}

    def of(self, value: int, place: int) -> Deal | None:
        """The best deal for a value that is needed again at a place; None: it would free nothing."""
        search, best = self._search, self._best
        writer, size = search.writer[value], search.nbytes[value]
        end = best.main[place]
        runs = best.again.get(writer, ())
        if bisect_right(runs, end) > bisect_right(runs, self._at):
            return Deal(0.0, size)  # it is computed on the way
        result: Deal | None = None
        rate = _FIRST_RATE * (search.tasks[writer].price or 0.0) / max(size, 1)
        for _ in range(_ROUNDS):
            closure = _Closure(self, place, end, rate)
            if closure.added(writer, math.inf) == math.inf:
                return result
            gaps = [gap for task in closure.tasks for gap in self.beside(task, place) if gap.value != value]
            nbytes = search.nbytes
            freed = size + sum(nbytes[gap.value] for gap in gaps) - sum(nbytes[v] for v in closure.stays)
            price = sum(search.tasks[task].price or 0.0 for task in closure.tasks)
            if freed > 0 and (result is None or price * result.freed < result.price * freed):
                result = Deal(price, freed, frozenset(closure.stays), tuple(gaps))
                rate = price / freed
            elif freed > 0:
                break
            else:
                rate *= _FIRST_RATE
        return result

    def beside(self, task: int, place: int) -> list[Gap]:
        """The results of a task that may be dropped until a place, or longer."""
        if (gaps := self._beside.get((task, place))) is None:
            idle = [self._idle[value] for value in self._search.tasks[task].writes if value in self._idle]
            gaps = [gap for gap in idle if self._search.next_use(gap) >= place]
            self._beside[task, place] = gaps
        return gaps

    def may_stay(self, value: int) -> bool:
        """Whether a value can stay beyond its last use."""
        last = self._search.last_gap(value)
        return last not in self._dropped and self._search.uses[value][-1] < self._best.places[self._at]

    def is_there(self, value: int, place: int, end: int) -> bool:
        """Whether a value needs nothing at a place, or is computed again after it anyway, only too late.

        If its task has other results, these may be what it is computed again for, and gone by then.
        """
        if (there := self._there.get((value, place))) is None:
            there = self._there[value, place] = self._is_there(value, place, end)
        return there

    def _is_there(self, value: int, place: int, end: int) -> bool:
        search = self._search
        if not search.temporary[value] or self._best.is_live(value, end):
            return True
        use = bisect_right(search.uses[value], place) - 1
        how = self._dropped.get(Gap(value, use))
        return how is Drop.MOVE or (how is Drop.ONCE and len(search.tasks[search.writer[value]].writes) == 1)


class _Closure:
    """Tasks that run again together, and what stays for them, at a price for a byte."""

    def __init__(self, deals: Deals, place: int, end: int, rate: float) -> None:
        self._deals, self._place, self._end, self._rate = deals, place, end, rate
        self.tasks: dict[int, None] = {}
        self.stays: dict[int, None] = {}

    def added(self, number: int, most: float) -> float:
        """Add a task, with the cheapest way to have what it reads; its cost, infinite if more than `most`."""
        search = self._deals._search
        task = search.tasks[number]
        if task.price is None:
            return math.inf
        beside = self._deals.beside(number, self._place)
        total = task.price - self._rate * sum(search.nbytes[gap.value] for gap in beside)
        self.tasks[number] = None
        for value in task.reads:
            if total > most:
                return math.inf
            if value in self.stays or self._deals.is_there(value, self._place, self._end):
                continue
            writer = search.writer[value]
            if writer in self.tasks:
                continue
            keep = self._rate * search.nbytes[value] if self._deals.may_stay(value) else math.inf
            tasks, stays = len(self.tasks), len(self.stays)
            again = self.added(writer, min(keep, most - total))
            if keep < again:
                _cut(self.tasks, tasks)
                _cut(self.stays, stays)
                self.stays[value] = None
            total += min(keep, again)
        return total if total <= most else math.inf


def _cut(numbers: dict[int, None], count: int) -> None:
    """Leave only the first so many."""
    while len(numbers) > count:
        numbers.popitem()
