"""The data of the search for less memory: tasks with their prices, runs, and sequences of runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

# In place of a task, of runs that are copies: to the host, from there; and until when the first keeps what it
# reads, which is no step at all.
OUT, IN, HOLD = -1, -2, -3


class Task(NamedTuple):
    """A step: the indices of the values that it reads and writes, and the price of running it once more."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    replaces: tuple[int, ...] = ()  # given values whose memory its results take, if nothing reads them later
    over: tuple[tuple[int, ...], ...] = ()  # for each result: indices in `reads` of what it may overwrite
    scratch: int = 0  # bytes
    price: float | None = 1.0  # of another run; None: it must run once


class Link(NamedTuple):
    """The prices of copies to the host or back."""

    byte: float  # while it is on its way
    copy: float  # to start one, which holds up kernels too


# Given values that may be at the host before the first use and after the last, each with the result that is
# its next value; None: it is only read.
State = Mapping[int, int | None]


class Gap(NamedTuple):
    """The time between two uses of a value, by the number of the first.

    Of state, -1 is the time before the first use; the last use begins the time until the end.
    """

    value: int
    use: int


class Drop(Enum):
    """How a value leaves the device in a gap."""

    ONCE = auto()  # when something needs it, it stays until its next use
    ALWAYS = auto()  # not even then
    MOVE = auto()  # it is at the host meanwhile


class Run(NamedTuple):
    """A run of a task, or a copy. A value that is computed or fetched once more gets a new index."""

    task: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True)
class Sequel:
    """Tasks in an order, some of them several times, and the memory that they take."""

    runs: tuple[Run, ...]
    value_of: tuple[int, ...]  # by number: the value that it is, or is another copy of
    peak_bytes: int  # the most that are live at a run
    price: float  # of what is computed again, and of waiting for copies
    again: tuple[int, ...]  # the tasks that are, in order
    load: tuple[int, ...] = ()  # bytes that are live at each run
    hosted: frozenset[int] = frozenset()  # state that is at the host when nothing uses it
    results: frozenset[int] = frozenset()  # what is at the host in the end: next values of these, and others

    @property
    def moves(self) -> bool:
        """Whether anything is copied to the host or from there."""
        return any(run.task in (OUT, IN) for run in self.runs)
