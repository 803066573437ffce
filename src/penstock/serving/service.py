"""What all requests share in the process of HTTP: the way to the engine, and what is on its way."""

from __future__ import annotations

import asyncio
import socket
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from penstock.models import Piece
from penstock.serving.delivery import Delivery
from penstock.serving.errors import ApiError
from penstock.serving.generation import Generation, error_of, queue_full
from penstock.serving.link import (
    Close,
    End,
    Failed,
    Look,
    Pieces,
    Seen,
    Submit,
    packed,
    received,
)
from penstock.serving.metrics import Metrics
from penstock.serving.parameters import Asked, Target
from penstock.terminal import complain


@dataclass(frozen=True)
class Settings:
    """What a server is told: the name of its model, its key (empty: none), and its limits."""

    name: str
    key: str = ""
    request_bytes: int = 4 << 20
    requests: int = 320  # at a time, with those that wait
    choices: int = 256  # of a request: as many as the queue takes
    local: bool = True  # whether only this machine can reach it


class Service:
    """The requests that are being answered; `connected` leads to the process of the engine."""

    def __init__(self, target: Target, settings: Settings, connected: socket.socket) -> None:
        self.target, self.settings = target, settings
        self.metrics = Metrics()
        self.created = int(time.time())
        self.on_end: Callable[[float], None] = lambda grace: None  # called when the server is to end
        self.on_loss: Callable[[], None] = lambda: None  # called when the process of the engine is gone
        self._connected = connected
        self._numbers = count()
        self._live: dict[int, Generation] = {}
        self._looks: dict[int, asyncio.Future[Seen]] = {}
        self._admitted = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Inside, requests can be answered, by the event loop."""
        self._delivery = Delivery()
        reader, self._writer = await asyncio.open_connection(sock=self._connected)
        listening = asyncio.create_task(self._listen(reader))
        try:
            yield
        finally:
            listening.cancel()
            self._writer.close()

    def send(self, message: NamedTuple) -> None:
        """Send a message to the engine."""
        self._writer.write(packed(message))

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """A request that is read and answered inside, so that the memory of all of them is bounded."""
        if self._admitted >= self.settings.requests:
            raise queue_full(f"{self._admitted} requests are being answered already")
        self._admitted += 1
        try:
            yield
        finally:
            self._admitted -= 1

    @contextmanager
    def generation(self, asked: Asked) -> Iterator[Generation]:
        """The sequences of a request. What is not finished at the end is cancelled."""
        given, number = asked.parameters, next(self._numbers)
        choices = len(asked.prompts) * given.n
        generation = Generation(choices, given.stream, self._delivery, self.metrics)
        self._live[number] = generation
        try:
            self.send(Submit(number, asked.prompts, asked.lengths, given.n, given.seed, given.options))
            yield generation
        finally:
            del self._live[number]
            generation.close()
            if generation.unfinished:
                self.send(Close(number))

    async def look(self) -> Seen:
        """How the engine is."""
        number = next(self._numbers)
        future: asyncio.Future[Seen] = asyncio.get_running_loop().create_future()
        self._looks[number] = future
        try:
            self.send(Look(number))
            return await future
        finally:
            del self._looks[number]

    def cancel_all(self) -> None:
        """End all answers that are on their way."""
        for generation in list(self._live.values()):
            generation.fail(ApiError(503, "the server is shutting down", code="shutting_down"))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Take what the engine's process says, until it is gone."""
        try:
            async for message in received(reader):
                self._handle(message)
        except Exception:  # without this task, every request would wait for ever
            complain(traceback.format_exc())
        self.on_loss()

    def _handle(self, message: Pieces | Failed | Seen | End) -> None:
        if isinstance(message, Pieces):
            self._take(message)
        elif isinstance(message, End):
            self.on_end(message.grace)
        elif message.number in self._live:
            assert isinstance(message, Failed)
            self._live[message.number].fail(error_of(message))
        elif message.number in self._looks and not self._looks[message.number].done():
            if isinstance(message, Seen):
                self._looks[message.number].set_result(message)
            else:
                self._looks[message.number].set_exception(error_of(message))

    def _take(self, message: Pieces) -> None:
        now, live = asyncio.get_running_loop().time(), self._live
        for number, choice, *fields in message.arrived:
            if number in live:  # and not cancelled meanwhile
                live[number].add(choice, Piece(*fields), now)
