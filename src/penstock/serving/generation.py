"""The sequences of a request on their way: delivered together, and cancelled together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from penstock.models import Piece
from penstock.serving.delivery import Delivery
from penstock.serving.errors import ApiError, refused
from penstock.serving.link import Failed
from penstock.serving.metrics import Metrics

_RETRY_SECONDS = 1  # after which a client may ask again when the queue was full

_QUIET_SECONDS = 10.0  # after which a stream says that it is alive

Arrived = tuple[int, Piece]  # the number of a choice, and a piece of it


class Generation:
    """The choices of a request: `n` for the first prompt, then for the next."""

    def __init__(self, count: int, streams: bool, delivery: Delivery, metrics: Metrics) -> None:
        self.count, self._streams = count, streams
        self._delivery, self._metrics = delivery, metrics
        self._arrived: list[Arrived] = []
        self._unfinished = count
        self._event, self._taken = asyncio.Event(), asyncio.Event()
        self._error: ApiError | None = None
        self._begun = asyncio.get_running_loop().time()
        self._last: list[float | None] = [None] * count  # when each choice got its last piece

    async def taken(self) -> None:
        """Wait until the engine has taken the request, or raise why it has not."""
        await self._taken.wait()
        if self._error is not None:
            raise self._error

    async def pieces(self) -> AsyncIterator[list[Arrived]]:
        """The pieces, in lists of those that have come together; an empty list when none came for long."""
        left = self.count
        while left:
            with suppress(TimeoutError):
                async with asyncio.timeout(_QUIET_SECONDS):
                    await self._event.wait()
            self._event.clear()
            if self._error is not None:
                raise self._error
            arrived, self._arrived = self._arrived, []
            left -= sum(piece.finish_reason is not None for _, piece in arrived)
            yield arrived

    # What the event loop is told by the engine

    def begin(self) -> None:
        """The engine has taken it."""
        self._taken.set()

    def add(self, choice: int, piece: Piece, now: float) -> None:
        """Take a piece."""
        last, is_last = self._last[choice], piece.finish_reason is not None
        self._arrived.append((choice, piece))
        if piece.id >= 0:
            if last is None:
                self._metrics.first_token.observe(now - self._begun)
            else:
                self._metrics.per_token.observe(now - last)
            self._last[choice] = now
        self._unfinished -= is_last
        if self._streams or not self._unfinished:
            self._delivery.ready(self._event, last is None or is_last)

    def fail(self, error: ApiError) -> None:
        """End it: `taken` or `pieces` raises the error."""
        self._error = self._error or error
        self._taken.set()
        self._event.set()


def error_of(failed: Failed) -> ApiError:
    """What a client is told of a request that the engine did not take, or did not finish."""
    if failed.why == "full":
        return queue_full(failed.message)
    return engine_failed() if failed.why == "engine" else refused(failed.message)


def queue_full(message: str) -> ApiError:
    """The error of a request for which there is no place, now."""
    return ApiError(429, message, code="queue_full", headers={"Retry-After": str(_RETRY_SECONDS)})


def engine_failed(status: int = 500) -> ApiError:
    """The error of all requests after the engine has failed."""
    return ApiError(
        status, "the engine has failed, and the server must be started again", code="engine_failed"
    )
