"""What all requests share: the model with its engine, and what is on its way."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.models import Engine, LanguageModel
from penstock.serving.delivery import Delivery
from penstock.serving.errors import ApiError
from penstock.serving.generation import Generation, engine_failed, queue_full
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
    """A model that answers, and what it is answering."""

    def __init__(self, engine: Engine, model: LanguageModel, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.target = Target(model, settings.name, engine.context)
        self.metrics = Metrics()
        self.created = int(time.time())
        self._delivery: Delivery | None = None
        self._live: set[Generation] = set()
        self._admitted = 0
        self._told = False  # whether the log was told of a failure

    def start(self) -> None:
        """Begin, in the event loop."""
        self._delivery = Delivery()

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
        assert self._delivery is not None
        generation = Generation(self.engine, self._delivery, self.metrics, asked)
        self._live.add(generation)
        try:
            yield generation
        finally:
            self._live.discard(generation)
            generation.close()
            self._tell_failure()

    def cancel_all(self) -> None:
        """End all answers that are on their way."""
        for generation in list(self._live):
            generation.cancel(ApiError(503, "the server is shutting down", code="shutting_down"))

    def check(self) -> None:
        """Raise an error if the engine has failed."""
        if self._tell_failure():
            raise engine_failed(503)

    def _tell_failure(self) -> bool:
        """Whether the engine has failed. The first time, the log is told why."""
        failure = self.engine.failure
        if failure is not None and not self._told:
            self._told = True
            complain("".join(traceback.format_exception(failure)) + "the engine has failed")
        return failure is not None
