"""What the process of the engine does for that of HTTP: sequences of requests, and how the engine is."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.errors import EngineClosed, QueueFull
from penstock.models import Engine, Piece, Request
from penstock.serving.link import Close, Failed, Link, Listening, Look, Pieces, Seen, Submit
from penstock.terminal import complain


class Backend:
    """Answers the messages of the process of HTTP, in a thread of its own."""

    def __init__(self, engine: Engine, link: Link) -> None:
        self.engine = engine
        self.listening = False  # whether the other process accepts connections
        self._link = link
        self._open: dict[int, list[Request]] = {}  # the sequences of requests that are not finished
        self._arrived: deque[tuple[Any, ...]] = deque()  # pieces that were not sent yet
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._told = False  # whether the log was told of a failure
        engine.after_step(self._send)
        threading.Thread(target=self._work, name="penstock requests", daemon=True).start()

    def _work(self) -> None:
        handlers: dict[type, Callable[[Any], None]] = {
            Submit: self._submit,
            Close: self._close,
            Look: self._look,
            Listening: self._listens,
        }
        for message in self._link:
            try:
                handlers[type(message)](message)
            except Exception:  # which is no reason to leave other requests unanswered
                complain(traceback.format_exc())
                self._link.send(Failed(message.number, "server"))

    def _submit(self, asked: Submit) -> None:
        requests: list[Request] = []
        try:
            for choice in range(len(asked.prompts) * asked.n):
                requests.append(self._submitted(asked, choice))
        except Exception as error:
            for request in requests:
                request.cancel()
            if not isinstance(error, QueueFull | EngineClosed | ValueError):
                raise
            self._link.send(self._refusal(asked.number, error))
            return
        self._open[asked.number] = list(requests)
        for choice, request in enumerate(requests):
            request.on_piece(partial(self._note, asked.number, choice, request))
        self._send()  # the pieces that came before: there may be no further step

    def _submitted(self, asked: Submit, choice: int) -> Request:
        options = asked.options if asked.seed is None else {**asked.options, "seed": asked.seed + choice}
        prompt = choice // asked.n
        return self.engine.submit(asked.prompts[prompt], max_tokens=asked.lengths[prompt], **options)

    def _refusal(self, number: int, error: Exception) -> Failed:
        if isinstance(error, QueueFull):
            return Failed(number, "full", str(error))
        if isinstance(error, EngineClosed):
            self._tell_failure()
            return Failed(number, "engine")
        return Failed(number, "wrong", str(error))

    def _note(self, number: int, choice: int, request: Request, piece: Piece | Exception) -> None:
        """Take a piece, mostly in the engine's thread, or what the engine failed with."""
        if isinstance(piece, Exception):
            self._tell_failure()
            self._link.send(Failed(number, "engine"))
            return
        self._arrived.append((number, choice, *piece))
        if piece.finish_reason is not None:
            with self._lock:
                unfinished = self._open.get(number, [])
                if request in unfinished:
                    unfinished.remove(request)
                if not unfinished:
                    self._open.pop(number, None)

    def _send(self) -> None:
        """Send what has come."""
        if self._arrived:
            with self._sending:  # two threads would exchange the order of their messages
                arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
                self._link.send(Pieces(arrived))

    def _close(self, closed: Close) -> None:
        with self._lock:
            unfinished = self._open.pop(closed.number, ())
        for request in unfinished:
            request.cancel()

    def _look(self, asked: Look) -> None:
        failed = self._tell_failure()
        self._link.send(Seen(asked.number, self.engine.stats(), self.engine.preparing, failed))

    def _listens(self, message: Listening) -> None:
        self.listening = True

    def _tell_failure(self) -> bool:
        """Whether the engine has failed. The first time, the log is told why."""
        failure = self.engine.failure
        if failure is not None and not self._told:
            self._told = True
            complain("".join(traceback.format_exception(failure)) + "the engine has failed")
        return failure is not None
