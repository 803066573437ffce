"""Small results that the host judges whenever it reads something.

A result is looked at without waiting for anything, once it was written for the first time. Later commands may
add to it in place, so it is looked at again until the last of them is known to be done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.drivers.driver import Bytes, Driver, Event
from penstock.memory.buffer import Buffer
from penstock.stream.future import Future

_MOST = 64  # that wait to be looked at; they are what eager expressions leave until something is read
Judge = Callable[[npt.NDArray[Any]], Exception | None]


class Watched:
    """A buffer, and what finds the error in its values, if there is one."""

    __slots__ = ("buffer", "dtype", "first", "judge", "last")

    def __init__(self, buffer: Buffer, dtype: npt.DTypeLike, judge: Judge) -> None:
        self.buffer = buffer
        self.dtype = np.dtype(dtype)
        self.judge = judge
        self.first: Event | None = buffer.usage.event  # until it is known to be done
        self.last: Event | None = self.first  # of the last command that wrote here


class Looking(NamedTuple):
    """One look: which command was the last one, whether it was done, and the bytes on their way."""

    watched: Watched
    last: Event | None
    final: bool
    values: Future[Bytes]


class Watching:
    """What is watched on one device."""

    def __init__(self, driver: Driver, peek: Callable[[Buffer], Future[Bytes]]) -> None:
        self._driver = driver
        self._peek = peek  # what a buffer holds now, whatever is under way
        self._pending: dict[Watched, None] = {}  # not known to be right

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, watched: Watched) -> None:
        """Look at this at the next occasion: a command has been recorded that writes it."""
        watched.last = watched.buffer.usage.event
        self._pending[watched] = None
        if len(self._pending) > _MOST:
            self.look()

    def start(self, but: Sequence[Looking] = (), early: bool = True) -> list[Looking]:
        """Begin to read what was written, in its present state; but not what was read just now.

        `early`: there is another look later, which is soon enough for what the host sees anyway.
        """
        found = []
        seen = {looking.watched for looking in but}
        for watched in list(self._pending):
            if early and watched.buffer.memory.host is not None:
                continue
            if watched not in seen and self._is_done(watched.first):
                watched.first = None
                last = watched.last
                found.append(Looking(watched, last, self._is_done(last), self._peek(watched.buffer)))
        return found

    def finish(self, started: Sequence[Looking]) -> None:
        """Judge what was begun to be read. All errors are told once, as notes to the first one."""
        errors = []
        for watched, last, final, future in started:
            error = watched.judge(future.wait().view(watched.dtype))
            if error is not None:
                errors.append(error)
            if watched.last is last and (final or (error is not None and self._is_done(last))):
                self._pending.pop(watched, None)
        for error in errors[1:]:
            errors[0].add_note(str(error))
        if errors:
            raise errors[0]

    def look(self, but: Sequence[Looking] = ()) -> None:
        """Judge what is there now; but not what was read just now."""
        if self._pending:
            self.finish(self.start(but, early=False))

    def clear(self) -> None:
        """Watch nothing any more."""
        self._pending.clear()

    def _is_done(self, event: Event | None) -> bool:
        return event is None or self._driver.is_done(event)
