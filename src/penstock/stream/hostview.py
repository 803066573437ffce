"""Host views of device memory: a buffer is claimed from the device for the length of a `with` block."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.drivers.driver import Bytes, Event
from penstock.memory.buffer import Buffer
from penstock.stream.future import Future
from penstock.stream.stream import Stream
from penstock.stream.watching import Watching


class Mapping:
    """The bytes of a buffer in shared memory, for a `with` block. Nothing is copied."""

    claimed = False

    def __init__(self, stream: Stream, buffer: Buffer, offset: int, nbytes: int, writable: bool) -> None:
        self._stream = stream
        self._buffer = buffer
        self._offset = buffer.offset + offset
        self._nbytes = nbytes
        self._writable = writable
        self._mapped: Bytes | None = None

    def __enter__(self) -> Bytes:
        driver, memory = self._buffer.driver, self._buffer.memory
        try:
            claim(self._stream, self._buffer, self._writable, self)
            self._mapped = driver.map(memory, self._offset, self._nbytes, self._writable)
        except BaseException:
            unclaim(self._stream, self._buffer, self)
            raise
        return self._mapped

    def __exit__(self, *_: object) -> None:
        event = None
        try:
            if self._mapped is not None:
                event = self._buffer.driver.unmap(self._buffer.memory, self._mapped)
        finally:
            self._mapped = None
            unclaim(self._stream, self._buffer, self, event)

    def __del__(self) -> None:
        if self.claimed:
            _let_go(self._buffer, self)


class Claimant(Protocol):
    """A claim of the host on a buffer."""

    claimed: bool


class Transfer(Protocol):
    """What a view of a device's own memory needs: two copies, and the check of watched values at reads."""

    @property
    def watching(self) -> Watching:
        """See Transfers."""
        ...

    def upload(self, buffer: Buffer, array: npt.ArrayLike, offset: int = 0) -> None:
        """See Transfers."""
        ...

    def download(
        self, buffer: Buffer, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int = 0
    ) -> Future[npt.NDArray[Any]]:
        """See Transfers."""
        ...


class HostView:
    """A buffer as a NumPy array inside a `with` block; the device leaves the buffer alone until its end.

    Values written through a writable view are copied to the device once, at the end of the block. If host and
    device share memory, nothing is copied. The array must be used inside the block only.
    """

    claimed = False

    def __init__(
        self,
        stream: Stream,
        transfers: Transfer,
        buffer: Buffer,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        offset: int,
        writable: bool,
    ) -> None:
        self._stream = stream
        self._transfers = transfers
        self._buffer = buffer
        self._dtype = dtype
        self._shape = shape
        self._offset = offset
        self._writable = writable
        self._mapping: Mapping | None = None
        self._array: npt.NDArray[Any] | None = None

    def __enter__(self) -> npt.NDArray[Any]:
        try:
            return self._entered()
        except BaseException:
            if self._mapping is not None:
                self._mapping.__exit__()
            unclaim(self._stream, self._buffer, self)
            raise

    def _entered(self) -> npt.NDArray[Any]:
        nbytes = self._dtype.itemsize * math.prod(self._shape)
        if not self._buffer.driver.capabilities.shared_memory:
            self._array = self._transfers.download(
                self._buffer, self._dtype, self._shape, self._offset
            ).wait()
            claim(self._stream, self._buffer, self._writable, self)
        elif nbytes:
            self._mapping = Mapping(self._stream, self._buffer, self._offset, nbytes, self._writable)
            window = _Window(self._buffer, self._mapping.__enter__(), self._writable)
            try:
                self._transfers.watching.look()
            except BaseException:
                self._mapping.__exit__()
                self._mapping = None
                raise
            self._array = np.asarray(window).view(self._dtype).reshape(self._shape)
        else:
            self._array = np.empty(self._shape, self._dtype)
        self._array.flags.writeable = self._writable
        return self._array

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        array, self._array = self._array, None
        if self._mapping is not None:
            mapping, self._mapping = self._mapping, None
            mapping.__exit__(kind, error, trace)
        elif not self._buffer.driver.capabilities.shared_memory:
            unclaim(self._stream, self._buffer, self)
            if self._writable:
                assert array is not None
                self._transfers.upload(self._buffer, array, self._offset)

    def __del__(self) -> None:
        if self.claimed:
            _let_go(self._buffer, self)


class _Window:
    """Exposes bytes to NumPy. Every array made of it keeps the buffer alive, so no array dangles.

    Arrays of a read-only view cannot be made writable.
    """

    def __init__(self, buffer: Buffer, mapped: Bytes, writable: bool) -> None:
        self._keep = (buffer, mapped)
        address, _ = mapped.__array_interface__["data"]
        self.__array_interface__ = mapped.__array_interface__ | {"data": (address, not writable)}


def claim(stream: Stream, buffer: Buffer, writable: bool, claimant: Claimant) -> None:
    """Claim `buffer` for the host, after waiting for the device. Many views may read, or one may write."""
    usage = buffer.usage
    while True:
        with stream.lock:
            stream.check_available()
            buffer.refuse_if_viewed(reads_only=not writable)
            event = usage.event
            if event is None or buffer.driver.is_done(event):
                stream.check([usage.own_event])
                usage.forget()
                usage.viewers += 1
                usage.writer = writable
                claimant.claimed = True
                return
            if usage.batch is not None:
                usage.batch.queue.submit()
        stream.wait(event, "view")


def unclaim(stream: Stream, buffer: Buffer, claimant: Claimant, event: Event | None = None) -> None:
    """End a claim, if there is one. The next command on `buffer` waits for `event`, if that is given."""
    usage = buffer.usage
    with stream.lock:
        if event is not None:
            if usage.event is not None:  # a download was started in the meantime
                stream.wait(usage.event, "view")
            usage.batch, usage.event = None, event
        if claimant.claimed:
            _let_go(buffer, claimant)


def _let_go(buffer: Buffer, claimant: Claimant) -> None:
    """End a claim. Finalizers call it if an interrupt prevented the end of a block, so it takes no lock."""
    buffer.usage.viewers -= 1
    buffer.usage.writer = False
    claimant.claimed = False
