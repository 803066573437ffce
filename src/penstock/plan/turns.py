"""Turns: sets of steps that run at the same time, of the same kind and independent of each other.

A step may be delayed until a later step of its kind. Its inputs then live longer, so it is delayed only while
that takes little more memory. Steps are never moved to an earlier position: the inputs of a network's updates
and norms are computed at different times, so only the position of the last can have all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.plan.order import Work

# The share by which the peak of live bytes may grow. If all updates of parameters wait for the last gradient,
# all gradients are live at the end, but hardly any activations: mostly less than in the middle of the step.
_MORE = 1 / 16
_LITTLE = 4 << 20  # bytes, by which the peak may always grow
# Bytes. A step that accesses more than this is not delayed past steps that access as much, since its inputs
# would be evicted from the cache: reading them from memory takes longer than a launch.
_HOT = 8 << 20


class Memory(NamedTuple):
    """What else is known of the memory of a step."""

    over: tuple[tuple[int, ...], ...] = ()  # for each result: indices in `reads` of what it may overwrite
    scratch: int = 0  # bytes


def in_turns(
    steps: Sequence[Work],
    kinds: Sequence[Hashable | None],
    nbytes: Sequence[int],
    kept: frozenset[int],
    most: int,
    memory: Sequence[Memory] | None = None,
) -> list[list[int]]:
    """The steps in order, in turns of at most `most` steps.

    Steps of a turn have the same kind; a step of kind None is alone. Values in `kept` are never freed.
    With `memory`, the peak of live bytes must not exceed that of the given order.
    """
    turns = _Turns(steps, nbytes, kept, memory)
    for number in range(len(steps) - 1, -1, -1):
        turns.assign(number, kinds[number], most)
    return turns.result()


class _Turns:
    """Assigns steps to turns, from the last to the first: each to a later turn, or to a new turn."""

    def __init__(
        self,
        steps: Sequence[Work],
        nbytes: Sequence[int],
        kept: frozenset[int],
        memory: Sequence[Memory] | None,
    ) -> None:
        self._steps = steps
        self._nbytes = nbytes
        self._kept = kept
        self._end = len(steps)
        self._at = list(range(len(steps)))  # position of each step: the index of its turn's last step
        self._members: dict[int, list[int]] = {}  # the steps of each turn, by position, the last turn first
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
        self._scratch = [each.scratch for each in memory] if memory else [0] * len(steps)
        # Values whose memory a result takes over at their last use, with the bytes of the result.
        self._taken_over: dict[int, int] = {}
        if memory:
            self._live += self._scratch
            for number, each in enumerate(memory):
                self._take_over(number, each.over)
        peak = int(self._live.max(initial=0))
        self._limit = peak if memory else peak + max(int(peak * _MORE), _LITTLE)

    def _profile(self) -> npt.NDArray[np.int64]:
        """The bytes that are live at each step."""
        change = np.zeros(self._end + 1, np.int64)
        for number, step in enumerate(self._steps):
            for value in step.writes:
                if value not in self._kept:
                    change[number] += self._nbytes[value]
                    change[self._last.get(value, number) + 1] -= self._nbytes[value]
        return change[:-1].cumsum()

    def _take_over(self, number: int, over: Sequence[Sequence[int]]) -> None:
        """Note which results of a step overwrite what dies there, and need no memory of their own."""
        step = self._steps[number]
        for result, positions in zip(step.writes, over, strict=False):
            dying = (step.reads[at] for at in positions if self._last[step.reads[at]] == number)
            free = (value for value in dying if value not in self._kept and value not in self._taken_over)
            given = next((value for value in free if self._nbytes[value] >= self._nbytes[result]), None)
            if result not in self._kept and given is not None:
                self._taken_over[given] = self._nbytes[result]
                self._live[number] -= self._nbytes[result]

    def assign(self, number: int, kind: Hashable | None, most: int) -> None:
        """Add a step to the latest turn that it can join, or start a turn."""
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
        """The bytes that a step reads and writes, except those of some values."""
        step = self._steps[number]
        return sum(self._nbytes[value] for value in {*step.reads, *step.writes} - without)

    def _cold_at(self) -> int:
        """The position up to which the following steps access at most `_HOT` bytes."""
        touched = 0
        for position in reversed(self._members):
            touched += sum(self._touched(number) for number in self._members[position])
            if touched > _HOT:
                return position
        return self._end

    def _needed_at(self, number: int) -> int:
        """The position of the first step that reads its outputs, or replaces its inputs."""
        step = self._steps[number]
        after = [reader for value in step.writes for reader in self._readers.get(value, ())]
        after += [self._replacer[value] for value in step.reads if self._replacer.get(value, number) > number]
        return min((self._at[reader] for reader in after), default=self._end)

    def _moved(self, number: int, positions: Sequence[int]) -> bool:
        """Delay a step to the first of some positions for which memory suffices; whether there is any."""
        step = self._steps[number]
        outputs = [value for value in step.writes if value not in self._kept]
        inputs = [value for value in set(step.reads) if value not in self._kept]
        waiting = self._live[number : positions[0] + 1].copy()  # live bytes while it has not run yet
        waiting[0] -= self._scratch[number]
        for value in outputs:
            waiting[: self._last.get(value, number) + 1 - number] -= self._nbytes[value]
        for value in inputs:
            last = self._last[value] - number
            waiting[last + 1 :] += self._nbytes[value]
            waiting[last : last + 1] += self._taken_over.get(value, 0)  # somebody else reads it there now
        born = sum(self._nbytes[value] for value in outputs) + self._scratch[number]
        most = np.maximum.accumulate(waiting)
        for position in positions:
            run = position - number
            if max(most[run - 1], waiting[run] + born) <= self._limit:
                self._live[number:position] = waiting[:run]
                self._live[position] = waiting[run] + born
                for value in inputs:
                    if self._last[value] <= position:
                        self._taken_over.pop(value, None)
                self._last.update({value: max(self._last[value], position) for value in inputs})
                self._at[number] = position
                return True
        return False

    def result(self) -> list[list[int]]:
        """The turns in the order in which they run."""
        return [sorted(self._members[position]) for position in sorted(self._members)]
