"""Messages between the process of the engine and that of HTTP, over a pair of sockets.

Each process has its own Python lock: the engine's steps wait neither for requests that are read nor for
streams that are written. The pair is known to these processes alone, so that messages may be pickled.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from penstock.models import EngineStats, Piece

_HEAD = 4  # bytes of a message's size

Arrived = tuple[int, int, Piece]  # the numbers of a request and of its choice, and a piece


# From the process of HTTP


class Submit(NamedTuple):
    """Have prompts continued: `n` sequences of the first, then of the next."""

    number: int  # of the request
    prompts: list[list[int]]
    lengths: list[int]  # tokens that may follow each
    n: int
    seed: int | None  # of the first sequence; the others have its successors
    options: dict[str, Any]


class Close(NamedTuple):
    """No more is wanted of a request that is not finished: it is cancelled."""

    number: int


class Look(NamedTuple):
    """Ask how the engine is."""

    number: int  # of the question


class Listening(NamedTuple):
    """Connections are accepted."""


# From the process of the engine


class Failed(NamedTuple):
    """There will be no answer: the queue is "full", the request "wrong", the "engine" or "server" failed."""

    number: int
    why: str
    message: str = ""


class Pieces(NamedTuple):
    """What a step has generated: the fields of `Arrived`, as pickling plain tuples takes less time."""

    arrived: list[tuple[Any, ...]]


class Seen(NamedTuple):
    """How the engine is; of the programs that it prepares, how many there are, and will be."""

    number: int
    stats: EngineStats
    preparing: tuple[int, int]
    failed: bool


class End(NamedTuple):
    """Answers on their way have so many seconds, then the process ends."""

    grace: float


def packed(message: NamedTuple) -> bytes:
    """The bytes of a message."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(_HEAD) + data


class Link:
    """The engine's end, for any thread."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._lock = connected, threading.Lock()
        self._received = connected.makefile("rb")

    def send(self, message: NamedTuple) -> None:
        """Send a message. It waits for the other process to read earlier ones if these are many."""
        data = packed(message)
        with self._lock, suppress(OSError):  # of a process that has ended, which its parent notices
            self._socket.sendall(data)

    def __iter__(self) -> Iterator[Any]:
        """The messages of the other process, until it ends."""
        with suppress(OSError):
            while len(head := self._received.read(_HEAD)) == _HEAD:
                size = int.from_bytes(head)
                if len(data := self._received.read(size)) < size:
                    return
                yield pickle.loads(data)

    def close(self) -> None:
        """End it; the other process notices."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._received.close()
        self._socket.close()


async def received(reader: asyncio.StreamReader) -> AsyncIterator[Any]:
    """The messages of the engine's process, until that ends."""
    with suppress(asyncio.IncompleteReadError, OSError):
        while True:
            size = int.from_bytes(await reader.readexactly(_HEAD))
            yield pickle.loads(await reader.readexactly(size))
