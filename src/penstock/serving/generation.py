"""The sequences of a request on their way: delivered together, and cancelled together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from penstock.models import Piece
from penstock.serving.delivery import Delivery
from penstock.serving.errors import SERVER_FAILED, ApiError, refused
from penstock.serving.link import Failed
from penstock.serving.metrics import Metrics

_RETRY_SECONDS = 1  # after which a client may ask again when the queue was full

_QUIET_SECONDS = 5.0  # after the first or the second, a stream without news says that it is alive

Arrived = tuple[int, Piece]  # the number of a choice, and a piece of it


class Generation:
    """The choices of a request: `n` for the first prompt, then for the next."""

    def __init__(self, count: int, streams: bool, delivery: Delivery, metrics: Metrics) -> None:
        self.count = self.unfinished = count
        self._streams, self._delivery, self._metrics = streams, delivery, metrics
        self._arrived: list[Arrived] = []
        self._event = asyncio.Event()
        self._error: ApiError | None = None
        self._loop = asyncio.get_running_loop()
        self._begun = self._loop.time()
        self._last: list[float | None] = [None] * count  # when each choice got its last piece
        self._timer = self._loop.call_later(_QUIET_SECONDS, self._tick)
        self._moved, self._quiet = False, False  # whether pieces came since the last tick; and not before it

    async def pieces(self) -> AsyncIterator[list[Arrived]]:
        """The pieces, in lists of those that have come together; an empty list when none came for long."""
        ended = False
        while not ended:
            await self._event.wait()
            self._event.clear()
            if self._error is not None:
                raise self._error
            ended = not self.unfinished
            arrived, self._arrived = self._arrived, []
            quiet, self._quiet = self._quiet, False
            if arrived or quiet:  # neither: a delivery of what an earlier one took along
                yield arrived

    def add(self, choice: int, piece: Piece, now: float) -> None:
        """Take a piece."""
        last, is_last = self._last[choice], piece.finish_reason is not None
        self._arrived.append((choice, piece))
        self._moved = True
        if piece.id >= 0:
            if last is None:
                self._metrics.first_token.observe(now - self._begun)
            else:
                self._metrics.per_token.observe(now - last)
            self._last[choice] = now
        self.unfinished -= is_last
        if self._streams or not self.unfinished:
            self._delivery.ready(self._event, last is None or is_last)

    def fail(self, error: ApiError) -> None:
        """End it: `pieces` raises the error."""
        self._error = self._error or error
        self._event.set()

    def close(self) -> None:
        """Nobody waits for it any more."""
        self._timer.cancel()

    def _tick(self) -> None:
        if not self._moved:
            self._quiet = True
            self._event.set()
        self._moved = False
        self._timer = self._loop.call_later(_QUIET_SECONDS, self._tick)


def error_of(failed: Failed) -> ApiError:
    """What a client is told of a request that the engine did not take, or did not finish."""
    if failed.why == "full":
        return queue_full(failed.message)
    if failed.why == "server":
        return ApiError(500, SERVER_FAILED)
    return engine_failed() if failed.why == "engine" else refused(failed.message)


def queue_full(message: str) -> ApiError:
    """The error of a request for which there is no place, now."""
    return ApiError(429, message, code="queue_full", headers={"Retry-After": str(_RETRY_SECONDS)})


def engine_failed(status: int = 500) -> ApiError:
    """The error of all requests after the engine has failed."""
    return ApiError(
        status, "the engine has failed, and the server must be started again", code="engine_failed"
    )
