"""When streams are written.

An event loop that writes every token of every stream by itself has no time left for requests when there are
many. So it writes what has come together: after a delivery that took some processor time, the next waits
until four times as long has passed. First tokens and ends of answers do not wait.
"""

from __future__ import annotations

import asyncio
import time

_SHARE = 0.25  # of the time, for writing streams
_LONGEST = 0.1  # seconds that a token waits, at most


class Delivery:
    """Sets the events of streams, in the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: list[asyncio.Event] = []
        self._next = 0.0  # the time of the event loop before which there is no delivery

    def ready(self, event: asyncio.Event, at_once: bool) -> None:
        """Set an event, at once or soon."""
        if at_once:
            event.set()
            return
        if not self._ready:
            self._loop.call_at(max(self._next, self._loop.time()), self._deliver)
        self._ready.append(event)

    def _deliver(self) -> None:
        begun = time.thread_time()
        ready, self._ready = self._ready, []
        for event in ready:
            event.set()
        # The tasks that wait for these events run before this does.
        self._loop.call_soon(self._pause, begun)

    def _pause(self, begun: float) -> None:
        taken = time.thread_time() - begun
        self._next = self._loop.time() + min(taken * (1 / _SHARE - 1), _LONGEST)
