"""Processes that make batches, and the memory that they share with the process that asks for them.

Processes make the batches in turn, so batches come in order whoever is slow. Arrays lie
in shared memory, in a ring of slots for each process: a slot is written again only after the batch that was
in it has been copied out, as no more batches are asked for ahead than there are slots.
"""

from __future__ import annotations

import multiprocessing
import pickle
import random
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from penstock.data.errors import DataError

AHEAD = 2  # batches that each process makes ahead of their use
_ALIGNMENT = 64  # bytes, of arrays in shared memory
_PATIENCE = 5.0  # seconds that a process has to end by itself

Make = Callable[[Any], Any]  # a batch, of what it is asked for with


class Workers:
    """Processes that call `make`. They end with `close`, or with this process."""

    def __init__(self, make: Make, count: int, seed: int) -> None:
        # Not forked: a driver's threads and locks do not survive that.
        context = multiprocessing.get_context("spawn")
        try:
            pickle.dumps(make)
        except Exception as error:
            raise DataError(
                f"dataset and collate are sent to the worker processes, and cannot be pickled: {error}; "
                "define them at the top of a module, or use workers=0"
            ) from error
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._slots: dict[tuple[int, int], SharedMemory] = {}  # by process and slot
        self._asked = self._taken = 0
        self._lock = threading.Lock()  # a thread of an earlier loop may still take its last batch
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, make, seed), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    @property
    def ahead(self) -> int:
        """How many batches may be asked for before the first of them is taken."""
        return AHEAD * len(self._processes)

    def answers(self, requests: Iterable[tuple[int, Any]]) -> Iterator[Any]:
        """What is made of requests, each with its position, ahead of their use and in order."""
        self.discard()  # what a loop that ended early has asked for
        waiting = 0
        for position, request in requests:
            self.ask(position, request)
            waiting += 1
            if waiting == self.ahead:
                yield self.take()
                waiting -= 1
        for _ in range(waiting):
            yield self.take()

    def ask(self, position: int, request: Any) -> None:
        """Ask for a batch; its position seeds the generators of random numbers."""
        worker = self._asked % len(self._connections)
        self._asked += 1
        with suppress(OSError):  # of a process that has ended, which `take` tells
            self._connections[worker].send((position, request))

    def take(self) -> Any:
        """The next batch that was asked for; the error of `make` is raised as it was there."""
        with self._lock:
            worker = self._taken % len(self._connections)
            try:
                answer = self._connections[worker].recv()
            except (EOFError, OSError):
                raise self._death(worker) from None
            self._taken += 1
            if isinstance(answer, BaseException):
                raise answer
            data, slot, name, places = answer
            memory = self._memory(worker, slot, name) if name else None
            shared = memory.buf if memory else None
            buffers = [bytearray(shared[start:stop] if shared else b"") for start, stop in places]
        return pickle.loads(data, buffers=buffers)

    def discard(self) -> None:
        """Drop what was asked for and not taken."""
        while self._taken < self._asked:
            with suppress(Exception):
                self.take()
                continue
            if not self._processes[self._taken % len(self._processes)].is_alive():
                raise self._death(self._taken % len(self._processes))

    def close(self) -> None:
        """End the processes, and give back what they share. Safe to call twice."""
        for connection in self._connections:
            with suppress(OSError):
                connection.send(None)
            connection.close()
        for process in self._processes:
            process.join(_PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()
        for memory in self._slots.values():
            memory.close()
            with suppress(FileNotFoundError):
                memory.unlink()
        self._processes, self._connections, self._slots = [], [], {}

    def _memory(self, worker: int, slot: int, name: str) -> SharedMemory:
        """The shared memory of a slot, which has another name after it has grown."""
        known = self._slots.get((worker, slot))
        if known is None or known.name != name:
            if known is not None:
                known.close()
            try:
                known = self._slots[worker, slot] = SharedMemory(name)
            except FileNotFoundError:  # a process removes its memory when it ends
                raise self._death(worker) from None
        return known

    def _death(self, worker: int) -> DataError:
        process = self._processes[worker]
        process.join(_PATIENCE)
        code = process.exitcode
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with status {code}"
        return DataError(
            f"worker {worker} of {len(self._processes)}, process {process.pid}, ended {how}. "
            f"Processes import the program anew, so what it runs must stand under `if "
            f'__name__ == "__main__":`. Killed processes may lack memory: use fewer workers'
        )


class _Ring:
    """The slots of a process, in turn."""

    def __init__(self) -> None:
        self._slots: list[SharedMemory | None] = [None] * AHEAD
        self._next = 0

    def put(self, buffers: Sequence[memoryview]) -> tuple[int, str, list[tuple[int, int]]]:
        """Write buffers to the next slot: its number, its memory's name, and where they begin and end."""
        slot, self._next = self._next, (self._next + 1) % AHEAD
        places, end = [], 0
        for buffer in buffers:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + buffer.nbytes
            places.append((start, end))
        if not end:
            return slot, "", places
        memory = self._slots[slot]
        if memory is None or memory.size < end:
            self._free(slot)
            memory = self._slots[slot] = SharedMemory(create=True, size=end)
        shared = memory.buf
        assert shared is not None  # it is open
        for buffer, (start, stop) in zip(buffers, places, strict=True):
            shared[start:stop] = buffer
        return slot, memory.name, places

    def close(self) -> None:
        for slot in range(AHEAD):
            self._free(slot)

    def _free(self, slot: int) -> None:
        memory = self._slots[slot]
        if memory is not None:
            memory.close()
            with suppress(FileNotFoundError):
                memory.unlink()


def _serve(connection: Connection, make: Make, seed: int) -> None:
    """The life of a process: batches, until there is nothing to answer to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    ring = _Ring()
    try:
        while (asked := connection.recv()) is not None:
            position, request = asked
            random.seed(f"{seed} {position}")
            np.random.seed([word & 0xFFFFFFFF for word in (seed, seed >> 32, position, position >> 32)])
            connection.send(_answer(make, request, ring))
    except (EOFError, OSError):  # the other side is gone
        pass
    finally:
        ring.close()


def _answer(make: Make, request: Any, ring: _Ring) -> Any:
    try:
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(make(request), protocol=5, buffer_callback=buffers.append)
        return data, *ring.put([buffer.raw() for buffer in buffers])
    except Exception as error:
        error.add_note(f"in a worker process:\n{traceback.format_exc()}")
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return DataError(f"a batch could not be made: {traceback.format_exc()}")
        return error
