"""Copies between host and device, without waiting: through a staging ring, or directly in shared memory."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.drivers.driver import Bytes, Driver, Event, Queue
from penstock.errors import DeviceError
from penstock.memory.buffer import Buffer, Usage
from penstock.memory.pool import BufferPool
from penstock.memory.staging import Slot, StagingRing
from penstock.stream.future import Future
from penstock.stream.hostview import HostView
from penstock.stream.queue import BufferSize, BufferSizes, CommandQueue
from penstock.stream.recorder import Command
from penstock.stream.stream import Stream
from penstock.stream.watching import Looking, Watching

# Up to this many bytes, a copy by the host is faster than a command of the device.
_SMALL = 256 << 10
# Up to so many, a copy to the device takes less time than queues to wait for each other.
_ALONG = 64 << 10


class Transfers:
    """Uploads, downloads, device copies and host views of a device."""

    def __init__(self, driver: Driver, stream: Stream, staging: BufferPool, staging_bytes: int) -> None:
        self._driver = driver
        self._stream = stream
        # A ring for each direction: a download that waits for its kernel must not block the next upload.
        self._rings = {
            verb: StagingRing(driver, staging, staging_bytes // 2) for verb in ("upload", "download")
        }
        self._shared = driver.capabilities.shared_memory
        self.watching = Watching(driver, self._peek)

    def upload(self, buffer: Buffer, array: npt.ArrayLike, offset: int = 0) -> None:
        """Copy `array` into `buffer`. The array may change as soon as the call returns."""
        self._stream.check_available()
        source = _bytes_of(np.ascontiguousarray(array))
        check_range(buffer, offset, source.nbytes)
        if not source.nbytes:
            return
        if buffer.hosted:
            np.copyto(self._at_the_host(buffer, offset, source.nbytes, writes=True), source)
            return
        if self._copied_in_place(buffer, offset, source, writes=True):
            return
        chunk = self._rings["upload"].chunk_bytes
        with self._stream.lock:
            for start in range(0, source.nbytes, chunk):
                self._upload_chunk(buffer, offset + start, source[start : start + chunk])

    def download(
        self, buffer: Buffer, dtype: npt.DTypeLike, shape: Sequence[int], offset: int = 0
    ) -> Future[npt.NDArray[Any]]:
        """The values of `buffer` after the commands recorded so far, as an array.

        If a watched value shows an error, the future has that error.
        """
        self._stream.check_available()
        item = np.dtype(dtype)
        nbytes = item.itemsize * math.prod(shape)
        check_range(buffer, offset, nbytes)
        target = _new_bytes(nbytes, buffer, offset)
        result = target.view(item).reshape(shape)
        if not nbytes:
            return Future.ready(result)
        if buffer.hosted:
            np.copyto(target, self._at_the_host(buffer, offset, nbytes, writes=False))
            return _made(lambda: self._looked_at(result))
        if not self._shared:
            return self._download_staged(buffer, offset, target, result)
        if nbytes <= _SMALL and self._copied_in_place(buffer, offset, target, writes=False):
            return Future.ready(result) if not self.watching else _made(lambda: self._looked_at(result))
        with self._stream.lock:
            before = buffer.usage.own_event
            event = self._record(
                self._stream.outgoing,
                ("download", nbytes, None, (BufferSize(buffer.nbytes), target)),
                (buffer,),
                lambda queue, waits: self._driver.read(
                    queue, target, buffer.memory, buffer.offset + offset, waits
                ),
            )
        return Future(
            poll=partial(self._driver.is_done, event),
            block=partial(self._stream.wait, event, "download"),
            finish=lambda: self._looked_at(self._checked(result, (before, event))),
        )

    def fetched(
        self, buffer: Buffer, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> npt.NDArray[Any] | None:
        """A copy of a small buffer's values, if nothing is to be waited for, looked at or told; else None.

        The caller holds `Device.running`.
        """
        if self.watching or buffer.hosted or buffer.nbytes > _SMALL:
            return None
        values: npt.NDArray[Any] | None = self.at_hand(buffer, dtype, shape)
        return None if values is None else values.copy()

    def reading(self, buffer: Buffer, dtype: npt.DTypeLike, shape: Sequence[int]) -> Future[npt.NDArray[Any]]:
        """The same without a copy, if the host sees the memory: later commands may change the values."""
        host, usage = buffer.memory.host, buffer.usage
        if host is None:
            return self.download(buffer, dtype, shape)
        with self._stream.lock:
            self._stream.check_available()
            if usage.batch is not None:
                usage.batch.queue.submit()
            event = usage.event
        result: npt.NDArray[Any] = np.ndarray(shape, dtype, host, buffer.offset)
        if event is None:
            return _made(lambda: self._looked_at(result))
        return Future(
            poll=partial(self._driver.is_done, event),
            block=partial(self._stream.wait, event, "download"),
            finish=lambda: self._looked_at(self._checked(result, (event,))),
        )

    def copy(
        self, target: Buffer, target_offset: int, source: Buffer, source_offset: int, nbytes: int
    ) -> None:
        """Copy `nbytes` bytes between two buffers of the device, of which one may lie at the host."""
        self._stream.check_available()
        check_range(target, target_offset, nbytes)
        check_range(source, source_offset, nbytes)
        to, start = target.offset + target_offset, source.offset + source_offset
        if target.memory is source.memory and abs(to - start) < nbytes:
            raise ValueError(f"the two ranges of {nbytes} bytes overlap; copy through a third buffer")
        if not nbytes:
            return
        here, there = source.memory.host, target.memory.host
        verb, queue = ("upload", self._stream.incoming) if source.hosted else ("copy", self._stream.outgoing)

        def recorded(queue: Queue, waits: list[Event] | None) -> Event:
            if source.hosted and not target.hosted:
                assert here is not None
                return self._driver.write(queue, target.memory, to, here[start : start + nbytes], waits)
            if target.hosted and not source.hosted:
                assert there is not None
                return self._driver.read(queue, there[to : to + nbytes], source.memory, start, waits)
            return self._driver.copy(queue, target.memory, to, source.memory, start, nbytes, waits)

        with self._stream.lock:
            sizes = BufferSizes((target.nbytes, source.nbytes))
            self._record(queue, (verb, nbytes, None, sizes), (target, source), recorded)

    def exchange(self, target: Buffer, source: Buffer, work: Callable[[int, int, int], None]) -> None:
        """Have another library fill a buffer from another; `work` gets their addresses and a stream.

        It runs beside the kernels, on the queue of uploads: copies from arenas must not wait for it.
        """
        self._stream.check_available()
        to, start = (self._driver.view(each.memory, each.offset, each.nbytes) for each in (target, source))
        with self._stream.lock:
            sizes = BufferSizes((target.nbytes, source.nbytes))
            self._record(
                self._stream.incoming,
                ("exchange", source.nbytes, None, sizes),
                (target, source),
                lambda queue, waits: self._driver.foreign(
                    queue, lambda stream: work(to, start, stream), waits
                ),
            )

    def view(
        self, buffer: Buffer, dtype: npt.DTypeLike, shape: Sequence[int], offset: int, writable: bool
    ) -> HostView:
        """A view of `buffer` for a `with` block."""
        item = np.dtype(dtype)
        check_range(buffer, offset, item.itemsize * math.prod(shape))
        return HostView(self._stream, self, buffer, item, tuple(shape), offset, writable)

    def at_hand(self, buffer: Buffer, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """The values in place, if the host shares their memory and no command is pending; else None.

        The caller keeps the buffer alive and holds `Device.running`, so that nothing is written meanwhile.
        """
        host, usage = buffer.memory.host, buffer.usage
        if host is None or usage.writer or self._stream.unavailable:
            return None
        event = usage.event
        if event is not None:
            if not self._driver.is_done(event):
                return None
            with self._stream.lock:
                self._stream.check([usage.own_event])
                if usage.event is event:  # no other thread has recorded a command since
                    usage.forget()
        return np.ndarray(shape, dtype, host, buffer.offset)

    def filled(self, buffer: Buffer, array: npt.NDArray[Any]) -> bool:
        """Copy `array` into a buffer that nobody else has yet, where the host sees it; else False.

        Profiles are to be told of copies: where there are any, this copies nothing.
        """
        target = None if self._stream.recorders else self.at_hand(buffer, array.dtype, array.shape)
        if target is None:
            return False
        np.copyto(target, array)
        return True

    def release_staging(self) -> None:
        """Free the staging memory, unless it is in use."""
        with self._stream.lock:
            for ring in self._rings.values():
                ring.clear()

    def _at_the_host(self, buffer: Buffer, offset: int, nbytes: int, writes: bool) -> Bytes:
        """The bytes of a buffer that lies at the host, once the device is done with them."""
        usage = buffer.usage
        while True:
            with self._stream.lock:
                buffer.refuse_if_viewed(reads_only=not writes)
                event = usage.event
                if event is None or self._driver.is_done(event):
                    self._stream.check([usage.own_event])
                    assert buffer.memory.host is not None
                    return buffer.memory.host[buffer.offset + offset :][:nbytes]
                if usage.batch is not None:
                    usage.batch.queue.submit()
            self._stream.wait(event, "upload" if writes else "download")

    def _copied_in_place(self, buffer: Buffer, offset: int, array: Bytes, writes: bool) -> bool:
        """Copy by the host, if it shares the memory and the device is done with it."""
        usage = buffer.usage
        with self._stream.lock:
            if not self._shared or not (usage.event is None or self._driver.is_done(usage.event)):
                return False
            buffer.refuse_if_viewed(reads_only=not writes)
            if not writes:
                self._stream.check([usage.own_event])
            recorders = self._stream.recorders
            start = perf_counter() if recorders else 0.0
            mapped = self._driver.map(buffer.memory, buffer.offset + offset, array.nbytes, writes)
            try:
                np.copyto(*((mapped, array) if writes else (array, mapped)))
            finally:
                if (event := self._driver.unmap(buffer.memory, mapped)) is not None:
                    usage.batch, usage.event = None, event
            for recorder in recorders:
                verb = "upload" if writes else "download"
                recorder.copied_by_host(verb, array.nbytes, start, perf_counter())
        return True

    def _record(
        self,
        queue: CommandQueue,
        command: Command,
        buffers: Sequence[Buffer],
        copy: Callable[[Queue, list[Event] | None], Event],
        ordered: bool = True,
    ) -> Event:
        """Record and submit a copy; `ordered`: after the commands that use the buffers now.

        A copy that is not ordered is not noted as their last use, since pending commands may end later.
        """
        waits = queue.dependencies(buffers, reads_only=command[0] == "download") if ordered else None
        return self._stream.record_copy(
            queue, command, buffers if ordered else (), lambda native: copy(native, waits)
        )

    def _staged(
        self,
        verb: str,
        buffer: Buffer,
        nbytes: int,
        copy: Callable[[Slot, Queue, list[Event] | None], Event],
        ordered: bool = True,
    ) -> Slot:
        queue = self._queue(verb, buffer.usage, nbytes)
        ring = self._rings[verb]
        slot = ring.reserve(nbytes, self._wait_for_staging)

        def copy_through(queue: Queue, waits: list[Event] | None) -> Event:
            slot.event = copy(slot, queue, waits)
            return slot.event

        try:
            # A copy that is not noted as the last use has to keep its buffer alive.
            args = BufferSizes((buffer.nbytes,)) if ordered else (buffer,)
            command: Command = (verb, nbytes, None, args)
            self._record(queue, command, (buffer,), copy_through, ordered)
        except BaseException as error:
            # Otherwise the slot is in use by the copy; after an interrupt, the copy was waited for.
            if slot.event is None or not isinstance(error, DeviceError):
                ring.cancel(slot)
            raise
        return slot

    def _queue(self, verb: str, usage: Usage, nbytes: int) -> CommandQueue:
        """The queue of a copy through staging memory.

        A short upload that has to follow a kernel goes along with the kernels: no queue waits for another.
        """
        if verb != "upload":
            return self._stream.outgoing
        follows = nbytes <= _ALONG and usage.batch is not None and usage.batch.queue.runs_kernels
        return self._stream.compute if follows else self._stream.incoming

    def _wait_for_staging(self, event: Event) -> None:
        self._stream.compute.submit()  # of which the copy may be a part
        self._stream.wait(event, "staging")

    def _upload_chunk(self, buffer: Buffer, offset: int, chunk: Bytes) -> None:
        def write(slot: Slot, queue: Queue, waits: list[Event] | None) -> Event:
            np.copyto(slot.array, chunk)
            return self._driver.write(queue, buffer.memory, buffer.offset + offset, slot.array, waits)

        self._staged("upload", buffer, chunk.nbytes, write)

    def _download_staged(
        self, buffer: Buffer, offset: int, target: Bytes, result: npt.NDArray[Any], ordered: bool = True
    ) -> Future[npt.NDArray[Any]]:
        """A download in chunks. If the ring is full, it waits until earlier chunks have left it.

        Watched values are read along with it, unless it is such a read itself, which is not `ordered`.
        """
        ring = self._rings["download"]
        chunk = ring.chunk_bytes
        slots: list[Slot] = []
        with self._stream.lock:
            before = buffer.usage.own_event
            for start in range(0, target.nbytes, chunk):
                part = target[start : start + chunk]

                def read(
                    slot: Slot,
                    queue: Queue,
                    waits: list[Event] | None,
                    start: int = start,
                    part: Bytes = part,
                ) -> Event:
                    at = buffer.offset + offset + start
                    event = self._driver.read(queue, slot.array, buffer.memory, at, waits)
                    slot.carry = partial(np.copyto, part, slot.array)
                    return event

                slots.append(self._staged("download", buffer, part.nbytes, read, ordered))
            started = self.watching.start() if ordered and self.watching else []

        def finish() -> npt.NDArray[Any]:
            with self._stream.lock:
                for slot in slots:
                    ring.finish(slot)
                ring.retire()
            self._checked(result, (before, *(slot.event for slot in slots)))
            if not ordered:
                return result
            self.watching.finish(started)
            return self._looked_at(result, started)

        return Future(
            poll=lambda: all(self._driver.is_done(slot.event) for slot in slots),
            block=lambda: self._stream.wait(slots[-1].event, "download"),
            finish=finish,
        )

    def _peek(self, buffer: Buffer) -> Future[Bytes]:
        """The present values of a small buffer, without waiting for pending commands."""
        if buffer.memory.host is not None:
            return Future.ready(buffer.memory.host[buffer.offset :][: buffer.nbytes].copy())
        target = np.empty(buffer.nbytes, np.uint8)
        if not self._shared:
            return self._download_staged(buffer, 0, target, target, ordered=False)
        with self._stream.lock:
            event = self._record(
                self._stream.outgoing,
                ("download", buffer.nbytes, None, (buffer, target)),  # it keeps the buffer, see `_staged`
                (buffer,),
                lambda queue, waits: self._driver.read(queue, target, buffer.memory, buffer.offset, waits),
                ordered=False,
            )
        return Future(
            poll=partial(self._driver.is_done, event),
            block=partial(self._stream.wait, event, "download"),
            finish=lambda: self._checked(target, (event,)),
        )

    def _looked_at(self, result: npt.NDArray[Any], but: Sequence[Looking] = ()) -> npt.NDArray[Any]:
        """The result, after a check of the watched values."""
        self.watching.look(but)
        return result

    def _checked(self, result: npt.NDArray[Any], events: Sequence[Event | None]) -> npt.NDArray[Any]:
        self._stream.check(events)
        self._stream.retire()
        return result


def check_range(buffer: Buffer, offset: int, nbytes: int) -> None:
    """Raise ValueError unless the bytes are inside the buffer."""
    if offset < 0 or nbytes < 0 or offset + nbytes > buffer.nbytes:
        raise ValueError(f"bytes {offset} to {offset + nbytes} are not inside {buffer!r}")


def _made(finish: Callable[[], npt.NDArray[Any]]) -> Future[npt.NDArray[Any]]:
    """A future that waits for nothing."""
    return Future(poll=lambda: True, block=lambda: None, finish=finish)


def _bytes_of(array: npt.NDArray[Any]) -> Bytes:
    """A contiguous array's memory."""
    return array.reshape(-1).view(np.uint8)


def _new_bytes(nbytes: int, buffer: Buffer, offset: int) -> Bytes:
    """New memory for a copy of the bytes at `offset`, with the same offset in its page if that is known.

    For blocks larger than the cache, the C library's copy into untouched memory takes 1.5 times as long
    unless source and target have the same offset in their pages.
    """
    if nbytes <= _SMALL or buffer.memory.host is None:
        return np.empty(nbytes, np.uint8)
    source = buffer.memory.host.ctypes.data + buffer.offset + offset
    space = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
    start = (source - space.ctypes.data) % mmap.PAGESIZE
    return space[start : start + nbytes]
