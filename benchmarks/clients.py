"""Clients of a server, in processes of their own, which ask question after question and compare answers."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

PATIENCE = 600  # seconds without a byte after which a client gives up, as OpenAI's does
MOST_PROBLEMS = 10  # that are told
CORES = 4  # for each process of clients, so that they are not what is measured


@dataclass(frozen=True)
class Question:
    """A request, and the answer that it should get."""

    prompt: str
    seed: int
    tokens: int
    temperature: float
    answer: str


@dataclass
class Tally:
    """What clients have seen."""

    ends: Counter[str] = field(default_factory=Counter)
    first_token: list[float] = field(default_factory=list)
    slowest: float = 0.0  # seconds of a whole answer
    problems: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Take in what others have seen."""
        self.ends += other.ends
        self.first_token += other.first_token
        self.slowest = max(self.slowest, other.slowest)
        self.problems = (self.problems + other.problems)[:MOST_PROBLEMS]


class Client(threading.Thread):
    """Asks one question after the other until it is told to stop."""

    def __init__(self, place: Place, number: int, tally: Tally) -> None:
        super().__init__(name=f"client {number}", daemon=True)
        parts = urlsplit(place.url)
        assert parts.hostname is not None
        self._host, self._port = parts.hostname, parts.port
        self._draw = random.Random(number)
        self._tally, self._place = tally, place
        self.stop = threading.Event()

    def run(self) -> None:
        connection = self._connection()
        while not self.stop.is_set():
            question = self._draw.choice(self._place.asked)
            leaves = self._draw.random() < self._place.leaving
            start = time.perf_counter()
            try:
                self._ask(connection, question, leaves)
            except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
                self._note("lost", f"after {time.perf_counter() - start:.1f} s: {error!r}")
                leaves = True
            if leaves:
                connection.close()
                connection = self._connection()
        connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=PATIENCE)

    def _ask(self, connection: http.client.HTTPConnection, question: Question, leaves: bool) -> None:
        streams = leaves or self._draw.random() < 0.5
        body = {
            "prompt": question.prompt,
            "seed": question.seed,
            "max_tokens": question.tokens,
            "temperature": question.temperature,
            "stream": streams,
        }
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status == 429:
            answer.read()
            self._note("refused")
            time.sleep(float(answer.headers["Retry-After"]) * self._draw.random())
        elif answer.status != 200:
            self._note("lost", f"{answer.status}: {answer.read()[:200]!r}")
        elif streams:
            self._read_stream(answer, question, start, leaves)
        else:
            choice = json.loads(answer.read())["choices"][0]
            self._tally.slowest = max(self._tally.slowest, time.perf_counter() - start)
            self._check(question, choice["text"], choice["finish_reason"])

    def _read_stream(
        self, answer: http.client.HTTPResponse, question: Question, start: float, leaves: bool
    ) -> None:
        text, reason = "", None
        for line in answer:
            if line.startswith(b":"):  # a comment: the server is alive
                continue
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                answer.read()
                self._check(question, text, reason)
                return
            if data:
                if not text:
                    self._tally.first_token.append(time.perf_counter() - start)
                choice = json.loads(data)["choices"][0]
                text, reason = text + choice["text"], choice["finish_reason"] or reason
                if leaves:
                    self._note("left")
                    return
        self._note("lost", f"a stream without its end: {text[-80:]!r}")

    def _check(self, question: Question, text: str, reason: str | None) -> None:
        if text == question.answer and reason == "length":
            self._note("equal")
        else:
            self._note("different", f"{question.prompt[:40]!r} -> {text[:60]!r} not {question.answer[:60]!r}")

    def _note(self, end: str, problem: str = "") -> None:
        with self._place.ended.get_lock():
            self._place.ended.value += 1
            self._tally.ends[end] += 1
        if problem and len(self._tally.problems) < MOST_PROBLEMS:
            self._tally.problems.append(problem)


@dataclass(frozen=True)
class Place:
    """Where clients ask, and what; the number of answers that have ended is shared by all of them."""

    url: str
    asked: list[Question]
    leaving: float
    ended: Any  # a `Value` of multiprocessing


def asking(place: Place, numbers: Sequence[int], connection: Connection) -> None:
    """A process of clients: forget the times so far when told so; at the end, give back what was seen."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tally = Tally()
    clients = [Client(place, number, tally) for number in numbers]
    for client in clients:
        client.start()
    while connection.recv() == "forget":
        tally.first_token.clear()
    for client in clients:
        client.stop.set()
    for client in clients:
        client.join(PATIENCE)
    connection.send(tally)


class Clients:
    """Clients in processes of their own."""

    def __init__(self, url: str, asked: list[Question], leaving: float, count: int) -> None:
        """`count` clients, a share of which leaves a stream: `leaving`."""
        context = multiprocessing.get_context("spawn")
        self._place, self._count = Place(url, asked, leaving, context.Value("q", 0)), count
        self._connections: list[Connection] = []
        processes = min(max((os.cpu_count() or 1) // CORES, 1), count)
        for number in range(processes):
            ours, theirs = context.Pipe()
            given = self._place, range(number, count, processes), theirs
            context.Process(target=asking, args=given, daemon=True).start()
            theirs.close()
            self._connections.append(ours)

    def wait(self, answers: int, seconds: float) -> None:
        """Until there are so many answers for each client, or for so many seconds."""
        limit = time.perf_counter() + seconds
        while self._place.ended.value < answers * self._count and time.perf_counter() < limit:
            time.sleep(0.1)

    def forget(self) -> None:
        """Measure from here on."""
        for connection in self._connections:
            connection.send("forget")

    def stop(self) -> Tally:
        """What they have seen, when each has its last answer."""
        tally = Tally()
        for connection in self._connections:
            connection.send("stop")
        for connection in self._connections:
            tally.add(connection.recv())
        return tally
