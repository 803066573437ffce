"""Watched values: small results that the host checks for errors whenever it reads something.

A value is checked without waiting, once it was written for the first time. Later commands may change it in
place, so it is checked until the last of them is known to be done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.drivers.driver import Bytes, Driver, Event
from penstock.memory.buffer import Buffer
from penstock.stream.future import Future

_MOST = 64  # unchecked values; eager expressions leave them until something is read
Judge = Callable[[npt.NDArray[Any]], Exception | None]


class Watched:
    """A buffer, and a function that checks its values."""

    __slots__ = ("buffer", "dtype", "first", "judge", "last")

    def __init__(self, buffer: Buffer, dtype: npt.DTypeLike, judge: Judge) -> None:
        self.buffer = buffer
        self.dtype = np.dtype(dtype)
        self.judge = judge
        self.first: Event | None = buffer.usage.event  # None once it is known to be done
        self.last: Event | None = self.first  # of the last command that writes the buffer


class Looking(NamedTuple):
    """A check in progress: the last command then, whether it was done, and the bytes being read."""

    watched: Watched
    last: Event | None
    final: bool
    values: Future[Bytes]


class Watching:
    """The watched values of a device."""

    def __init__(self, driver: Driver, peek: Callable[[Buffer], Future[Bytes]]) -> None:
        self._driver = driver
        self._peek = peek  # reads a buffer without waiting for pending commands
        self._pending: dict[Watched, None] = {}  # not checked finally

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, watched: Watched) -> None:
        """Check a value at the next read: a command that writes it was recorded."""
        watched.last = watched.buffer.usage.event
        self._pending[watched] = None
        if len(self._pending) > _MOST:
            self.look()

    def start(self, but: Sequence[Looking] = (), early: bool = True) -> list[Looking]:
        """Start to read the values that were written, except those in `but`, which were just read.

        `early`: there will be another check soon, which is enough for memory that the host shares.
        """
        looks = []
        seen = {looking.watched for looking in but}
        for watched in list(self._pending):
            if early and watched.buffer.memory.host is not None:
                continue
            if watched not in seen and self._is_done(watched.first):
                watched.first = None
                last = watched.last
                looks.append(Looking(watched, last, self._is_done(last), self._peek(watched.buffer)))
        return looks

    def finish(self, started: Sequence[Looking]) -> None:
        """Check the values that `start` reads. Raises the first error, with the others as notes."""
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
        """Check the present values, except those in `but`, which were just read."""
        if self._pending:
            self.finish(self.start(but, early=False))

    def clear(self) -> None:
        """Stop watching all values."""
        self._pending.clear()

    def _is_done(self, event: Event | None) -> bool:
        return event is None or self._driver.is_done(event)
