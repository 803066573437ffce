"""The thread of a rank that drives its engine, so that operations run while the device computes.

It also tells the other ranks every second that this one is there, and ends the run where one of them is not.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.collectives.engine import Array, Beat, Engine, Exchange, Operation, sent_bytes, tree_sum
from penstock.errors import RankLost

_BEAT = 1.0  # seconds between two beats
_SILENT = 30.0  # seconds without a beat until a rank counts as lost
_GRACE = 10.0  # seconds that a program has to end by itself after a rank was lost
_SHORT, _LONG = 20e-6, 1e-3  # seconds between two looks at an operation under way
_URGENT, _SOON = 1e-4, 5e-3  # the same while nothing is left to hide it behind, and for how long
_ATTENDED = 0.1  # seconds between two looks at the device, while the program waits for it and will tell


@dataclass
class Traffic:
    """What a rank has exchanged so far."""

    operations: int = 0
    sent_bytes: int = 0  # at least
    seconds: float = 0.0  # that operations took, with the time until other ranks came
    waited_seconds: float = 0.0  # of them, those that the program waited for: the others were hidden

    @property
    def hidden(self) -> float | None:
        """The share of exchanges that the program did not wait for; None if there was none."""
        return max(0.0, 1 - self.waited_seconds / self.seconds) if self.seconds > 0 else None

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.operations + other.operations,
            self.sent_bytes + other.sent_bytes,
            self.seconds + other.seconds,
            self.waited_seconds + other.waited_seconds,
        )

    def since(self, before: Traffic) -> Traffic:
        """What was exchanged after a copy of this."""
        return Traffic(
            self.operations - before.operations,
            self.sent_bytes - before.sent_bytes,
            self.seconds - before.seconds,
            self.waited_seconds - before.waited_seconds,
        )


class Source(Protocol):
    """An array that the device may still compute."""

    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> Array:
        """The array."""


class Given:
    """An array that is there."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def is_ready(self) -> bool:
        """See `Source`."""
        return True

    def wait(self) -> Array:
        """See `Source`."""
        return self._array


class Job:
    """An operation that was handed to the thread; a `Source` of its result."""

    def __init__(self, communicator: Communicator, operation: Operation, source: Source) -> None:
        self.operation = operation
        self.source: Source | None = source
        self.done = threading.Event()
        self.result: Array | None = None
        self.error: BaseException | None = None
        self._communicator = communicator
        self.size = communicator.size

    def is_ready(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self.done.is_set()

    def wait(self) -> Array:
        """The result; RankLost if another rank is gone."""
        if not self.done.is_set():
            before = self._communicator.exchange_seconds()
            with self._communicator.attending(self):
                self.done.wait()
            # Of this operation and of those before it, whose results may be asked for later.
            self._communicator.traffic.waited_seconds += self._communicator.exchange_seconds() - before
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class Communicator:
    """The ranks of a program as this rank sees them.

    `timeout` is how many seconds the others wait for a rank that is there but does not come; while a rank
    compiles or writes (`patient`), that time does not count.
    """

    def __init__(self, engine: Engine, timeout: float = 50.0) -> None:
        self.engine, self.timeout = engine, timeout
        self.rank, self.size = engine.rank, engine.size
        self.exchanges = self.size > 1 or engine.on_device  # whether there is anything to do
        self.traffic = Traffic()
        self.reported: list[Traffic] = []  # that of every rank, as they told with a step
        self.failure: RankLost | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._uncomputed: deque[Job] = deque()  # in order; the device may still compute their arrays
        self._computed = threading.Event()  # of one of them, if the program waits for the device
        self._attends = self._waits = False  # the program waits for the device, or for a job
        self._begun = 0
        self._clock: tuple[float, float | None] = 0.0, None  # seconds of operations, and when one began
        self._patient = 0  # blocks of both threads
        self._lock = threading.Lock()
        self._heard: dict[int, tuple[float, Beat]] = {}  # when each rank was heard, and what it said
        self._next_beat = 0.0
        self._closing, self._together = False, True
        self._thread: threading.Thread | None = None
        if self.size > 1:
            now = time.monotonic()
            self._heard = {
                rank: (now, Beat(0, True, False)) for rank in range(self.size) if rank != self.rank
            }
            self._thread = threading.Thread(target=self._run, name="penstock ranks", daemon=True)
            self._thread.start()

    # For the program

    def submit(self, operation: Operation, source: Source) -> Job:
        """Begin an operation on the array of a source when it is ready, after all that came before."""
        job = Job(self, operation, source)
        if self._thread is None:
            job.result = np.ascontiguousarray(source.wait())  # of a single rank: its own array
            job.done.set()
        elif self.failure is not None:
            raise self.failure
        else:
            self._uncomputed.append(job)
            self._jobs.put(job)
        return job

    @contextmanager
    def attending(self, job: Job) -> Iterator[None]:
        """In a block, the program waits for a job; before, it waits for the device, and tells the thread.

        That takes less of a core than looking often.
        """
        self._attends = self._waits = True
        try:
            for each in tuple(self._uncomputed):
                source = each.source
                if source is not None:
                    with suppress(Exception):  # which the thread raises too
                        source.wait()
                    self._computed.set()
                if each is job:
                    break
            self._attends = False
            yield
        finally:
            self._attends = self._waits = False

    def run(self, operation: Operation, array: Array) -> Array:
        """The result of an operation; waits for it."""
        return self.submit(operation, Given(array)).wait()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.run("barrier", np.zeros(1, np.uint8))

    def share(self, data: bytes) -> bytes:
        """The bytes of rank 0, of whatever length."""
        length = int(self.run("broadcast", np.array([len(data)], np.int64))[0])
        own = np.frombuffer(data, np.uint8) if self.rank == 0 else np.zeros(length, np.uint8)
        return self.run("broadcast", own).tobytes()

    def collect(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, of whatever lengths."""
        lengths = self.run("all_gather", np.array([len(data)], np.int64)).tolist()
        own = np.frombuffer(data.ljust(max(lengths)), np.uint8)
        rows = self.run("all_gather", own).reshape(self.size, -1)
        return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Let the others wait as long as this block takes."""
        with self._lock:
            self._patient += 1
        try:
            yield
        finally:
            with self._lock:
                self._patient -= 1

    def close(self, together: bool = True) -> None:
        """Leave: after every rank has come as far, or at once. Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._closing, self._together = True, together
        self._jobs.put(None)
        thread.join()

    def fail(self, why: str) -> None:
        """End all ranks, as this one cannot go on."""
        print(f"rank {self.rank} of {self.size}: {why}", file=sys.stderr, flush=True)
        self.engine.abort()

    def count(self, operation: Operation, nbytes: int) -> None:
        """Count an operation on so many bytes."""
        self.traffic.operations += 1
        self.traffic.sent_bytes += sent_bytes(operation, self.size, nbytes)

    def exchange_seconds(self) -> float:
        """The seconds that operations took until now."""
        done, begun = self._clock
        return done if begun is None else done + time.perf_counter() - begun

    # The thread

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_BEAT)
            except queue.Empty:
                self._look(waiting=False)
                continue
            if job is None:
                break
            try:
                job.result = self._done(job)
            except BaseException as error:
                job.error = error
            job.source = None
            self._uncomputed.popleft()
            job.done.set()
        self._leave()

    def _done(self, job: Job) -> Array:
        assert job.source is not None
        array = self._array(job.source)
        if self.failure is not None:
            raise self.failure
        self._begun += 1
        self.count(job.operation, array.nbytes)
        begun = time.perf_counter()
        self._clock = self.traffic.seconds, begun
        result = self._moved(job.operation, array)
        self.traffic.seconds += time.perf_counter() - begun
        self._clock = self.traffic.seconds, None
        return result

    def _moved(self, operation: Operation, array: Array) -> Array:
        if operation != "tree_reduce" and operation != "tree_scatter":
            return self._completed(self.engine.begin(operation, array))
        parts = self._completed(self.engine.begin("all_to_all", array))
        own = tree_sum(parts.reshape(self.size, -1))
        return own if operation == "tree_scatter" else self._completed(self.engine.begin("all_gather", own))

    def _array(self, source: Source) -> Array:
        """The array of a source; while the device computes, the others are told to be patient."""
        with self.patient():
            delay = _SHORT
            while not source.is_ready():
                self._look(waiting=False)
                self._computed.wait(_ATTENDED if self._attends else delay)
                self._computed.clear()
                delay = min(1.5 * delay, _LONG)
        return np.ascontiguousarray(source.wait())

    def _completed(self, exchange: Exchange, waiting: bool = True) -> Array:
        start, delay = time.monotonic(), _SHORT
        while not exchange.is_done():
            self._look(waiting, start)
            if self.failure is not None:
                raise self.failure
            time.sleep(delay)
            urgent = self._waits and self._jobs.empty() and time.monotonic() - start < _SOON
            delay = min(1.5 * delay, _URGENT if urgent else _LONG)
        return exchange.result

    def _look(self, waiting: bool, start: float = 0.0) -> None:
        """Tell the others that this rank is there, and see whether they are."""
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + _BEAT
        own = Beat(self._begun, self._patient > 0, self._closing)
        try:
            for rank, beat in self.engine.beat(own).items():
                self._heard[rank] = now, beat
            lost = self._lost(now, waiting, start)
        except Exception as error:  # of the engine, which may notice a lost rank first
            lost = f"{self.engine.name} failed: {error}"
        if lost and self.failure is None:
            self.failure = RankLost(lost)
            threading.Thread(target=self._end_soon, daemon=True).start()

    def _lost(self, now: float, waiting: bool, start: float) -> str:
        """Which rank is gone or does not come, in words; empty if none."""
        for rank, (heard, beat) in self._heard.items():
            who = f"rank {rank} of {self.size} ({self.engine.who(rank)})"
            late = beat.begun < self._begun
            if beat.ended and waiting and late:
                return f"{who} has ended, and rank {self.rank} waits for its operation {self._begun}"
            if beat.ended:
                continue
            if now - heard > _SILENT:
                return f"{who} was not heard for {now - heard:.0f} s: it died, or its machine did"
            if beat.patient:
                continue
            if waiting and late and now - start > self.timeout:
                return (
                    f"{who} hangs: it has begun {beat.begun} operations between ranks, and rank {self.rank} "
                    f"has waited {now - start:.0f} s for its operation {self._begun}"
                )
        return ""

    def _end_soon(self) -> None:
        """A program that waits for anything else would hang."""
        time.sleep(_GRACE)
        self.fail(str(self.failure))

    def _leave(self) -> None:
        """Wait for the other ranks, however long they take, while they are there."""
        try:
            self.engine.beat(Beat(self._begun, False, True))
            if self.failure is None and self._together:
                self._completed(self.engine.begin("barrier", np.zeros(1, np.uint8)), waiting=False)
            self.engine.close()
        except RankLost as error:
            self.fail(str(error))
