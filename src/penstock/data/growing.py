"""The tokens of a large text, which are made by other processes while the first of them are used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from itertools import accumulate
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from penstock.data.errors import DataError
from penstock.data.token_files import Tokens, token_dtype
from penstock.data.tokenizing import Job

_MOST_PROCESSES = 4
_PATIENCE = 5.0  # seconds that a process has to end
# Ctrl-C is for the process that trains, which may need more tokens before it stops.
_PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from penstock.data.tokenizing import main
main()
"""


class GrowingTokens:
    """Tokens in chunks that are made in order. What is not there yet is waited for."""

    def __init__(self, job: Job, folder: TemporaryDirectory[str] | None = None) -> None:
        """`folder` is removed together with the tokens, if they are not in the cache."""
        self.job = job
        self.dtype = token_dtype(job.vocab_size)
        self._chunks: list[Tokens] = []
        self._ends: list[int] = []  # of the chunks in the row of all tokens
        self._processes = _Processes(job)
        weakref.finalize(self, _end, self._processes, folder)
        if not all((job.folder.path / job.name(number)).exists() for number in range(self.count)):
            self._processes.start()

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return len(self.job.chunks)

    @property
    def replaced(self) -> int:
        """How many sequences that are not UTF-8 became U+FFFD in the chunks that were made so far."""
        return self._processes.replaced

    def chunk(self, number: int) -> tuple[int, int]:
        """Where a chunk begins and ends in the row of all tokens. Waits for it and those before it."""
        while len(self._chunks) <= number:
            at = len(self._chunks)
            tokens = self.job.tokens(at)
            if tokens is None:
                self._processes.wait(at)
                tokens = self.job.tokens(at)
            if tokens is None:
                raise DataError(
                    f"{self.job.folder.path / self.job.name(at)} was damaged or removed after it was written"
                )
            with suppress(OSError):
                os.utime(self.job.folder.path / self.job.name(at))  # files not used for long are removed
            self._chunks.append(tokens)
            self._ends = list(accumulate(map(len, self._chunks)))
        return (self._ends[number - 1] if number else 0), self._ends[number]

    def take(self, indices: Any) -> Tokens:
        """The tokens at some places of chunks that are there, in the shape of the indices."""
        places = np.asarray(indices)
        if len(self._chunks) == 1:
            return self._chunks[0].take(places)
        flat = places.ravel()
        result = np.empty(flat.shape, self.dtype)
        chunks = np.searchsorted(self._ends, flat, side="right")
        for number in np.unique(chunks).tolist():
            inside = chunks == number
            begin = self._ends[number] - len(self._chunks[number])
            result[inside] = self._chunks[number][flat[inside] - begin]
        return result.reshape(places.shape)

    def __len__(self) -> int:
        """How many tokens there are in all. Waits until all are made."""
        return self.chunk(self.count - 1)[1]

    def __getitem__(self, places: slice) -> Tokens:
        """Some of the tokens. Waits for them."""
        stop = len(self) if places.stop is None else places.stop
        number = 0
        while number < self.count and self.chunk(number)[1] < stop:
            number += 1
        return self.take(np.arange(*places.indices(self._ends[-1])))

    def close(self) -> None:
        """End the processes; the next wait starts them anew. Safe to call twice."""
        self._processes.stop()


class _Processes:
    """The processes of a job, and what they have said."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._running: list[subprocess.Popen[str]] = []
        self._changed = threading.Condition()
        self._done: set[int] = set()
        self._error: str | None = None
        self.replaced = 0  # undecodable sequences that became U+FFFD

    def start(self) -> None:
        with self._changed:
            if self._running:
                return
            count = len(self._job.chunks)
            number = min(_MOST_PROCESSES, max((os.cpu_count() or 2) // 2, 1), count)
            self._done, self._error = set(), None
            command = [sys.executable, "-P", "-c", _PROGRAM]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            for first in range(number):
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=environment,
                    text=True,
                    encoding="ascii",
                )
                self._running.append(process)
                mine = list(range(first, count, number))
                threading.Thread(target=self._listen, args=(process, mine), daemon=True).start()

    def wait(self, chunk: int) -> None:
        """Until a chunk is made; a DataError says why it cannot be."""
        self.start()
        with self._changed:
            self._changed.wait_for(lambda: chunk in self._done or self._error is not None)
            if chunk not in self._done:
                raise DataError(f"the text cannot be tokenized: {self._error}")

    def stop(self) -> None:
        with self._changed:
            running, self._running = self._running, []
            self._error = self._error or "it was stopped"
            self._changed.notify_all()
        for process in running:
            process.kill()
            process.wait(_PATIENCE)

    def _listen(self, process: subprocess.Popen[str], chunks: list[int]) -> None:
        """Send a process its job, and note what it says until it ends."""
        assert process.stdin is not None
        assert process.stdout is not None
        error = None
        try:
            process.stdin.write(self._job.to_json(chunks) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                said = json.loads(line)
                error = said.get("error")
                with self._changed:
                    if error is None:
                        self._done.add(said["chunk"])
                        self.replaced += said["replaced"]
                    self._changed.notify_all()
        except (OSError, ValueError):  # its end says more
            pass
        code = process.wait()
        if error is None and not self._done.issuperset(chunks):
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
            error = f"the process {process.pid} that does this ended {how}"
        with self._changed:
            if error is not None and process in self._running:
                self._error = self._error or error
            self._changed.notify_all()
        process.stdout.close()
        with suppress(OSError):  # what it has not read
            process.stdin.close()


def _end(processes: _Processes, folder: TemporaryDirectory[str] | None) -> None:
    processes.stop()
    if folder is not None:
        folder.cleanup()
