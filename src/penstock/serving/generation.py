"""The sequences of a request: submitted together, delivered together, and cancelled together."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

from penstock.errors import EngineClosed, QueueFull
from penstock.models import Engine, Piece, Request
from penstock.serving.delivery import Delivery
from penstock.serving.errors import ApiError, refused
from penstock.serving.metrics import Metrics
from penstock.serving.parameters import Asked

_RETRY_SECONDS = 1  # after which a client may ask again when the queue was full

_QUIET_SECONDS = 10.0  # after which a stream says that it is alive

Arrived = tuple[int, Piece]  # the number of a choice, and a piece of it


class Generation:
    """The choices of a request on their way: `n` for the first prompt, then for the next."""

    def __init__(self, engine: Engine, delivery: Delivery, metrics: Metrics, asked: Asked) -> None:
        self._delivery, self._metrics = delivery, metrics
        self._streams = asked.parameters.stream
        self._arrived: deque[Arrived] = deque()
        self._event = asyncio.Event()
        self._error: ApiError | None = None
        self._closed = False
        self.count = len(asked.prompts) * asked.parameters.n
        self._unfinished = self.count
        self._lock = threading.Lock()  # earlier pieces come from the thread that registers for them
        self._begun = time.perf_counter()
        self._last: list[float | None] = [None] * self.count  # when each choice got its last piece
        self._requests: list[Request] = []
        try:
            for number in range(self.count):
                self._requests.append(self._submitted(engine, asked, number))
        except BaseException:
            self.close()
            raise
        for number, request in enumerate(self._requests):
            request.on_piece(partial(self._note, number))

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
            arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
            left -= sum(piece.finish_reason is not None for _, piece in arrived)
            yield arrived

    def cancel(self, error: ApiError) -> None:
        """End it: `pieces` raises the error."""
        self._error = self._error or error
        self._event.set()
        self.close()

    def close(self) -> None:
        """Give back all that the sequences hold, unless they are finished. Nothing is taken from here on."""
        self._closed = True
        for request in self._requests:
            if not request.done:
                request.cancel()
        self._requests.clear()  # which refer to this object

    def _submitted(self, engine: Engine, asked: Asked, number: int) -> Request:
        which = number // asked.parameters.n
        seed = asked.parameters.seed
        options = asked.parameters.options
        if seed is not None:
            options = {**options, "seed": seed + number}
        try:
            return engine.submit(asked.prompts[which], max_tokens=asked.lengths[which], **options)
        except QueueFull as error:
            raise queue_full(str(error)) from None
        except EngineClosed:
            raise engine_failed() from None
        except ValueError as error:
            raise refused(str(error)) from None

    def _note(self, number: int, piece: Piece | Exception) -> None:
        """Take a piece, in the engine's thread, or what the engine failed with."""
        if self._closed:  # and so may be the event loop
            return
        if isinstance(piece, Exception):
            self._error = self._error or engine_failed()
            self._delivery.ready(self._event, at_once=True)
            return
        is_first, is_last = self._last[number] is None, piece.finish_reason is not None
        self._arrived.append((number, piece))
        if piece.id >= 0:
            self._measure(number)
        with self._lock:
            self._unfinished -= is_last
            complete = not self._unfinished
        if self._streams or complete:
            self._delivery.ready(self._event, is_first or is_last)

    def _measure(self, number: int) -> None:
        now, last = time.perf_counter(), self._last[number]
        if last is None:
            self._metrics.first_token.observe(now - self._begun)
        else:
            self._metrics.per_token.observe(now - last)
        self._last[number] = now


def queue_full(message: str) -> ApiError:
    """The error of a request for which there is no place, now."""
    return ApiError(429, message, code="queue_full", headers={"Retry-After": str(_RETRY_SECONDS)})


def engine_failed(status: int = 500) -> ApiError:
    """The error of all requests after the engine has failed."""
    return ApiError(
        status, "the engine has failed, and the server must be started again", code="engine_failed"
    )
