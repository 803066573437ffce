"""Batches that a thread makes and uploads ahead of their use.

Consumer and thread share a `_Line`, and the thread has no reference to the `Prefetch`. So a `Prefetch` that
nothing refers to is finalized, which stops its thread.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, overload

import numpy as np

from penstock.data.batches import Array
from penstock.data.errors import DataError
from penstock.runtime import Device
from penstock.tensor.core import Tensor, resolve
from penstock.tensor.creation import asarray

T_co = TypeVar("T_co", covariant=True)

DEPTH = 3  # batches that wait on the device, by default
_PATIENCE = 10.0  # seconds to wait for a batch that is being made when its thread is stopped


class Batches(Protocol[T_co]):
    """What can be prefetched: TextBatches, ArrayBatches, or anything else with these two."""

    def __next__(self) -> T_co:
        """The next batch: an array, or a tuple or dict of arrays. StopIteration ends it."""

    def state(self) -> int:
        """The number of the next sample."""


class Prefetch(Generic[T_co]):
    """Batches as tensors on a device, up to `depth` of them made ahead by a thread.

    Each array is uploaded in a single copy, without waiting. Use it in a `with` block, or `close` it; it also
    ends with the program, and with its last reference. `batches` belongs to the thread from then on: to
    resume later, make new batches that start at `state()`.

    >>> rows = ps.data.ArrayBatches(np.zeros((8, 3)), batch=4, seed=1)
    >>> with ps.data.Prefetch(rows) as batches:
    ...     print(next(batches)[0].shape)
    (4, 3)
    """

    @overload
    def __init__(
        self: Prefetch[Tensor],
        batches: Batches[Array],
        device: Device | str | None = None,
        depth: int = DEPTH,
    ) -> None: ...
    @overload
    def __init__(
        self: Prefetch[tuple[Tensor, ...]],
        batches: Batches[tuple[Array, ...]],
        device: Device | str | None = None,
        depth: int = DEPTH,
    ) -> None: ...
    def __init__(self, batches: Batches[Any], device: Device | str | None = None, depth: int = DEPTH) -> None:
        if depth < 1:
            raise DataError(f"a depth of 1 or more batches is needed, and {depth} was given")
        where = resolve(device)
        self.waited_seconds = 0.0  # how long `next` has waited for batches in total
        self._state = batches.state()
        self._line = _Line(lambda: _uploaded(next(batches), where), batches.state, depth)
        weakref.finalize(self, self._line.stop).atexit = False  # `_stop_all` comes before devices are closed

    def __iter__(self) -> Prefetch[T_co]:
        return self

    def __next__(self) -> T_co:
        start = time.perf_counter()
        try:
            self._line.take()
        finally:
            self.waited_seconds += time.perf_counter() - start
        # Atomic: an interrupt comes before it, and then the next call returns the same batch, or after it.
        (batch, self._state), self._line.taken = self._line.taken, None
        return batch  # type: ignore[no-any-return]

    def state(self) -> int:
        """The state of the batches after the last batch that was taken, not the last that was made."""
        return self._state

    def close(self) -> None:
        """Stop the thread and drop what it made ahead. Safe to call twice."""
        self._line.stop()
        self._line.join()

    def __enter__(self) -> Prefetch[T_co]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Line:
    """The queue between the thread and its consumer: at most `depth` batches that are ready."""

    def __init__(self, make: Callable[[], Any], state: Callable[[], int], depth: int) -> None:
        self._make, self._batches_state = make, state
        self._depth = depth
        self._ready: deque[tuple[Any, int]] = deque()
        self.taken: Any = None  # the batch that the consumer takes, and the state after it
        # Not a Condition, whose `with` is not atomic: an interrupt in it could leave a lock locked. A token
        # in either of these queues signals a change that the other side may wait for.
        self._lock = threading.Lock()
        self._for_consumer: SimpleQueue[None] = SimpleQueue()
        self._for_thread: SimpleQueue[None] = SimpleQueue()
        self._stopped = False
        self._error: BaseException | None = None  # why there are no more batches; StopIteration at the end
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="penstock prefetch", daemon=True)
        _lines.add(self)
        self._thread.start()

    def take(self) -> None:
        """Put the next batch and the state after it in `taken`. Raises the thread's error after the last."""
        if self._process != os.getpid():
            raise DataError("a Prefetch made before a fork has no thread in the child; make a new one there")
        while True:
            with self._lock:
                if self._stopped:
                    raise DataError("this Prefetch was closed")
                if self.taken is None and self._ready:
                    self.taken = self._ready[0]
                    del self._ready[0]
                if self.taken is not None:
                    _wake(self._for_thread)
                    return
                if isinstance(self._error, StopIteration):
                    raise StopIteration  # a new one: the frames that it passes refer to this object
                if self._error is not None:
                    raise self._error
            self._for_consumer.get()

    def stop(self) -> None:
        """Tell the thread to end, without waiting: a finalizer may call this inside any other call."""
        if self._process != os.getpid():
            return  # the thread belongs to the parent process
        self._stopped = True  # without the lock, which an interrupted call of this thread may hold
        self._ready.clear()
        self.taken = None
        _wake(self._for_thread)
        _wake(self._for_consumer)

    def join(self) -> None:
        """Wait until the thread has ended, which it does after the batch that it is making."""
        if self._process == os.getpid():
            self._thread.join(_PATIENCE)

    def _run(self) -> None:
        try:
            while self._has_room():
                item = self._make(), self._batches_state()
                with self._lock:
                    if not self._stopped:
                        self._ready.append(item)
                _wake(self._for_consumer)
                del item  # only the consumer keeps a reference
        except BaseException as error:
            self._error = error
            _wake(self._for_consumer)
        finally:
            del self._make, self._batches_state  # they reference the data

    def _has_room(self) -> bool:
        """Wait until another batch may be made; False if the thread is to end."""
        while not self._stopped and len(self._ready) >= self._depth:
            self._for_thread.get()
        return not self._stopped


def _wake(queue: SimpleQueue[None]) -> None:
    if queue.empty():  # one token is enough
        queue.put(None)


def _uploaded(batch: Any, device: Device) -> Any:
    """A batch with tensors for its arrays, in tuples and dicts too; texts stay as they are."""
    if isinstance(batch, tuple):
        return tuple(_uploaded(part, device) for part in batch)
    if isinstance(batch, dict):
        return {key: _uploaded(part, device) for key, part in batch.items()}
    return asarray(batch, device=device) if isinstance(batch, np.ndarray) else batch


_lines: weakref.WeakSet[_Line] = weakref.WeakSet()


def _stop_all() -> None:
    running = list(_lines)
    for line in running:
        line.stop()
    for line in running:
        line.join()


# After `registry`, which this module imports, so it runs before that closes the devices.
atexit.register(_stop_all)
