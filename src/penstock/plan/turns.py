"""Turns: which steps run at the same time. Steps of a turn are of one kind and independent of one another.

A step may move to a later step of its kind. What it reads then has to stay longer, so it moves only as far as
that takes little more memory. Steps never move forward: what the updates and norms of a network read is
computed one after another, so that only the last of them can have it all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from penstock.plan.order import Work

# By how much the peak of live bytes may grow. Where all updates of parameters wait for the last gradient, all
# gradients are live beside hardly any activations: mostly less than in the middle of the step.
_MORE = 1 / 16
_LITTLE = 4 << 20  # bytes, by which the peak may always grow
# Bytes. A step that reads more than this of what others wrote does not wait while as much again is read and
# written, since that would drive its inputs out of the cache: reading them anew takes longer than a launch.
_HOT = 8 << 20


def in_turns(
    steps: Sequence[Work],
    kinds: Sequence[Hashable | None],
    nbytes: Sequence[int],
    kept: frozenset[int],
    most: int,
    spare: bool = True,
) -> list[list[int]]:
    """The steps in order, in turns of at most `most` steps.

    Steps of one turn are equal in `kinds`; None goes with no other. What is in `kept` is never freed. Without
    `spare`, no more bytes may be live than in the order given.
    """
    turns = _Turns(steps, nbytes, kept, spare)
    for number in range(len(steps) - 1, -1, -1):
        turns.assign(number, kinds[number], most)
    return turns.result()


class _Turns:
    """Steps are assigned from the last to the first, each in a turn of its own or in a later one."""

    def __init__(
        self, steps: Sequence[Work], nbytes: Sequence[int], kept: frozenset[int], spare: bool
    ) -> None:
        self._steps = steps
        self._nbytes = nbytes
        self._kept = kept
        self._end = len(steps)
        self._at = list(range(len(steps)))  # where each step runs: the number of the last step of its turn
        self._members: dict[int, list[int]] = {}  # by the number of their last step; the first was added last
        self._positions: dict[Hashable, list[int]] = {}  # of the turns of each kind, the last first
        self._readers: dict[int, list[int]] = {}
        self._replacer: dict[int, int] = {}
        for number, step in enumerate(steps):
            for value in set(step.reads):
                self._readers.setdefault(value, []).append(number)
            for value in step.replaces:
                self._replacer[value] = number
        self._last = {value: readers[-1] for value, readers in self._readers.items()}
        self._live = self._profile()
        peak = int(self._live.max(initial=0))
        self._limit = peak + (max(int(peak * _MORE), _LITTLE) if spare else 0)

    def _profile(self) -> npt.NDArray[np.int64]:
        """The bytes that are live at each step."""
        change = np.zeros(self._end + 1, np.int64)
        for number, step in enumerate(self._steps):
            for value in step.writes:
                if value not in self._kept:
                    change[number] += self._nbytes[value]
                    change[self._last.get(value, number) + 1] -= self._nbytes[value]
        return change[:-1].cumsum()

    def assign(self, number: int, kind: Hashable | None, most: int) -> None:
        """Put a step into the last turn that it can join, or begin one."""
        if kind is not None:
            positions = self._positions.setdefault(kind, [])
            before = self._needed_at(number)
            free = [at for at in positions if at < before and len(self._members[at]) < most]
            if free and self._touched(number, self._kept) > _HOT:
                end = self._cold_at()
                free = [at for at in free if at <= end]
            if free and self._moved(number, free):
                self._members[self._at[number]].append(number)
                return
            positions.append(number)
        self._members[number] = [number]

    def _touched(self, number: int, without: frozenset[int] = frozenset()) -> int:
        """The bytes that a step reads and writes, but for some values."""
        step = self._steps[number]
        return sum(self._nbytes[value] for value in {*step.reads, *step.writes} - without)

    def _cold_at(self) -> int:
        """The position until which little is read and written, of all that comes next."""
        touched = 0
        for position in reversed(self._members):
            touched += sum(self._touched(number) for number in self._members[position])
            if touched > _HOT:
                return position
        return self._end

    def _needed_at(self, number: int) -> int:
        """Where the first step runs that reads what this one writes, or replaces what it reads."""
        step = self._steps[number]
        after = [reader for value in step.writes for reader in self._readers.get(value, ())]
        after += [self._replacer[value] for value in step.reads if self._replacer.get(value, number) > number]
        return min((self._at[reader] for reader in after), default=self._end)

    def _moved(self, number: int, positions: Sequence[int]) -> bool:
        """Let a step run at the first of some later positions until which what it reads can stay."""
        step = self._steps[number]
        outputs = [value for value in step.writes if value not in self._kept]
        inputs = [value for value in set(step.reads) if value not in self._kept]
        waiting = self._live[number : positions[0] + 1].copy()  # while it has not run yet
        for value in outputs:
            waiting[: self._last.get(value, number) + 1 - number] -= self._nbytes[value]
        for value in inputs:
            waiting[self._last[value] + 1 - number :] += self._nbytes[value]
        born = sum(self._nbytes[value] for value in outputs)
        most = np.maximum.accumulate(waiting)
        for position in positions:
            run = position - number
            if max(most[run - 1], waiting[run] + born) <= self._limit:
                self._live[number:position] = waiting[:run]
                self._live[position] = waiting[run] + born
                self._last.update({value: max(self._last[value], position) for value in inputs})
                self._at[number] = position
                return True
        return False

    def result(self) -> list[list[int]]:
        """The turns in the order in which they run."""
        return [sorted(self._members[position]) for position in sorted(self._members)]
