"""The sequences of a request: submitted together, delivered together, and cancelled together."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from penstock.models import Engine, Piece, QueueFull
from penstock.serving.delivery import Delivery
from penstock.serving.errors import ApiError, refused
from penstock.serving.metrics import Metrics
from penstock.serving.parameters import Asked

_RETRY_SECONDS = 1  # after which a client may ask again when the queue was full
_ENDS = ("stop", "length")

Arrived = tuple[int, Piece]  # the number of a choice, and a piece of it


class Generation:
    """The choices of a request on their way: `n` for the first prompt, then for the next."""

    def __init__(self, engine: Engine, delivery: Delivery, metrics: Metrics, asked: Asked) -> None:
        self._delivery, self._metrics = delivery, metrics
        self._streams = asked.parameters.stream
        self._arrived: deque[Arrived] = deque()
        self._event = asyncio.Event()
        self._error: ApiError | None = None
        self.count = len(asked.prompts) * asked.parameters.n
        self._unfinished = self.count  # changed by the engine's thread
        self._begun = time.perf_counter()
        self._last: list[float | None] = [None] * self.count  # when each choice got its last piece
        self._requests: list[Any] = []
        try:
            for number in range(self.count):
                self._requests.append(self._submitted(engine, asked, number))
        except BaseException:
            self.cancel(None)
            raise
        for number, request in enumerate(self._requests):
            request.on_piece(partial(self._note, number))

    async def pieces(self) -> AsyncIterator[list[Arrived]]:
        """The pieces, in lists of those that have come together."""
        left = self.count
        while left:
            await self._event.wait()
            self._event.clear()
            if self._error is not None:
                raise self._error
            arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
            for _, piece in arrived:
                if piece.finish_reason is not None:
                    left -= 1
                    if piece.finish_reason not in _ENDS:
                        raise ApiError(500, "the engine has failed, and the answer has no end")
            yield arrived

    def cancel(self, error: ApiError | None) -> None:
        """Give back all that the sequences hold, unless they are finished; `pieces` raises the error."""
        for request in self._requests:
            request.cancel()
        if self._error is None:
            self._error = error
            self._event.set()

    def _submitted(self, engine: Engine, asked: Asked, number: int) -> Any:
        which = number // asked.parameters.n
        seed = asked.parameters.seed
        options = asked.parameters.options
        if seed is not None:
            options = {**options, "seed": seed + number}
        try:
            return engine.submit(asked.prompts[which], max_tokens=asked.lengths[which], **options)
        except QueueFull as error:
            raise queue_full(str(error)) from None
        except ValueError as error:
            raise refused(str(error)) from None

    def _note(self, number: int, piece: Piece) -> None:
        """Take a piece, in the engine's thread."""
        now = time.perf_counter()
        last = self._last[number]
        if last is None:
            self._metrics.first_token.observe(now - self._begun)
        else:
            self._metrics.per_token.observe(now - last)
        self._last[number] = now
        self._arrived.append((number, piece))
        if piece.finish_reason is not None:
            self._unfinished -= 1
        if self._streams or not self._unfinished:
            self._delivery.ready(self._event)


def queue_full(message: str) -> ApiError:
    """The error of a request for which there is no place, now."""
    return ApiError(429, message, code="queue_full", headers={"Retry-After": str(_RETRY_SECONDS)})
