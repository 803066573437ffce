"""Ranks that are threads of this process, each with a device of its own."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.collectives.engine import (
    Array,
    Beat,
    Engine,
    Exchange,
    Move,
    check_summable,
    result_shape,
)


class Room:
    """Where the threads meet: the arrays of each operation, until all have read its result."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.given: dict[int, dict[int, Array]] = {}  # by the operation's number, and by rank
        self.left: dict[int, int] = {}  # how many ranks have not read a result yet
        self.beats: dict[int, Beat] = {}


class LocalEngine(Engine):
    """A rank of a `Room`."""

    name = "threads"

    def __init__(self, room: Room, rank: int) -> None:
        self.rank, self.size = rank, room.size
        self._room, self._number = room, 0

    def begin(self, operation: Move, array: Array) -> Exchange:
        """See `Engine.begin`."""
        number, room = self._number, self._room
        self._number += 1
        if operation in ("all_reduce", "reduce_scatter"):
            check_summable(array)
        result = np.empty(result_shape(operation, self.size, array.size), array.dtype)
        with room.lock:
            room.given.setdefault(number, {})[self.rank] = array.copy()  # others may read it later
            room.left.setdefault(number, room.size)

        def is_done() -> bool:
            with room.lock:
                given = room.given[number]
                if len(given) < room.size:
                    return False
                result[...] = _combined(operation, [given[rank] for rank in range(room.size)], self.rank)
                room.left[number] -= 1
                if not room.left[number]:
                    del room.given[number], room.left[number]
            return True

        return Exchange(is_done, result)

    def beat(self, own: Beat) -> Mapping[int, Beat]:
        """See `Engine.beat`."""
        with self._room.lock:
            self._room.beats[self.rank] = own
            return {rank: beat for rank, beat in self._room.beats.items() if rank != self.rank}

    def who(self, rank: int) -> str:
        """See `Engine.who`."""
        return "a thread of this process"


def _combined(operation: Move, arrays: Sequence[Array], rank: int) -> Array:
    size = len(arrays)
    if operation == "all_gather":
        return np.concatenate([array.reshape(-1) for array in arrays])
    if operation == "broadcast":
        return arrays[0].reshape(-1)
    if operation == "barrier":
        return arrays[rank]
    rows = np.stack([array.reshape(-1) for array in arrays])
    if operation == "all_reduce":
        return np.asarray(rows.sum(axis=0, dtype=rows.dtype))
    parts = rows.reshape(size, size, -1)[:, rank]
    return (
        np.asarray(parts.sum(axis=0, dtype=rows.dtype))
        if operation == "reduce_scatter"
        else parts.reshape(-1)
    )


class DelayedEngine(Engine):
    """Another engine whose operations begin and end after random times, for tests."""

    def __init__(self, engine: Engine, seed: int, longest: float = 0.01) -> None:
        self._engine, self._longest = engine, longest
        self._random = random.Random(seed * 1000 + engine.rank)
        self.rank, self.size, self.name = engine.rank, engine.size, f"{engine.name} with delays"

    def begin(self, operation: Move, array: Array) -> Exchange:
        """See `Engine.begin`."""
        time.sleep(self._random.uniform(0, self._longest))
        exchange = self._engine.begin(operation, array)
        until = time.monotonic() + self._random.uniform(0, self._longest)
        return Exchange(lambda: time.monotonic() >= until and exchange.is_done(), exchange.result)

    def beat(self, own: Beat) -> Mapping[int, Beat]:
        """See `Engine.beat`."""
        return self._engine.beat(own)

    def who(self, rank: int) -> str:
        """See `Engine.who`."""
        return self._engine.who(rank)

    def abort(self) -> None:
        """See `Engine.abort`."""
        self._engine.abort()

    def close(self) -> None:
        """See `Engine.close`."""
        self._engine.close()
