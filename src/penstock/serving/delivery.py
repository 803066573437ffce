"""What the engine's thread generates, on its way to the event loop that writes answers.

Both need Python's lock. An event loop that is woken for each token of each stream would take it from the
engine most of the time, so it takes what has come together: after a delivery that took some processor time,
the next waits until ten times as long has passed. First tokens and ends of answers do not wait.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

_SHARE = 0.1  # of the time, for writing streams
_LONGEST = 0.1  # seconds that a token waits, at most


class Delivery:
    """Sets events of the event loop for the engine's thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: deque[asyncio.Event] = deque()
        self._scheduled = False  # whether a delivery is on its way
        self._next = 0.0  # the time of the event loop before which there is none

    def ready(self, event: asyncio.Event, at_once: bool) -> None:
        """Have an event set, at once or soon. Called by the engine's thread."""
        if at_once:
            self._loop.call_soon_threadsafe(event.set)
            return
        self._ready.append(event)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._schedule)

    def _schedule(self) -> None:
        self._loop.call_at(max(self._next, self._loop.time()), self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False  # first, so that whoever appends from here on schedules another
        begun = time.thread_time()
        while self._ready:
            self._ready.popleft().set()
        # The tasks that wait for these events run before this does.
        self._loop.call_soon(self._pause, begun)

    def _pause(self, begun: float) -> None:
        taken = time.thread_time() - begun
        self._next = self._loop.time() + min(taken * (1 / _SHARE - 1), _LONGEST)
