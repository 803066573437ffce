"""Records commands into encoders, submits them, and handles their completion.

wgpu aborts the process if invalid commands are submitted. So an encoder that has errors when it is finished
is not submitted, and the commands that cause them fail.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from wgpu.backends.wgpu_native import ffi, lib

from penstock.drivers.driver import Bytes
from penstock.drivers.webgpu.c_types import TYPES
from penstock.drivers.webgpu.launches import Dispatch
from penstock.drivers.webgpu.memory import ReadBuffers, rounded
from penstock.drivers.webgpu.native import COPY_DST, UNIFORM, NativeBuffer, NativeDevice, Owned
from penstock.drivers.webgpu.pipelines import MAX_SCALAR_BYTES
from penstock.drivers.webgpu.times import Moments, Queries, Timing

_RING_BYTES = 1 << 18  # of a queue's uniform buffer, in which each launch has its own scalars
_RING_STEP = 256  # bytes; the alignment of a launch's scalars in the uniform buffer
_MAX_STAGED = 64 << 20  # bytes of writes that a queue holds before they are submitted

_NULL = ffi.NULL
_set_pipeline = lib.wgpuComputePassEncoderSetPipeline
_set_group = lib.wgpuComputePassEncoderSetBindGroup
_set_immediates = lib.wgpuComputePassEncoderSetImmediates
_dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups


@dataclass(slots=True, eq=False)
class EncoderQueue:
    """Commands that are recorded and not submitted, and batches that are submitted and not done."""

    batch: Batch | None = None
    in_flight: list[Batch] = field(default_factory=list)  # in the order of submission
    encoder: Any = None
    native_pass: Any = None  # the open compute pass of the encoder
    pipeline: Owned | None = None  # set in the pass
    group: Owned | None = None
    staged: int = 0  # bytes that were written and not submitted
    ring: tuple[NativeBuffer, Owned] | None = None  # the uniform buffer and its bind group
    ring_used: int = 0
    # Written to the ring at the next submission.
    scalars: Any = field(default_factory=lambda: ffi.new(TYPES["uint8_t[]"], _RING_BYTES))
    offset: Any = field(default_factory=lambda: ffi.new(TYPES["uint32_t *"]))


@dataclass(slots=True, eq=False)
class Batch:
    """Commands that are submitted together."""

    queue: EncoderQueue
    queries: Queries | None = None  # if its commands are timed
    events: list[CommandEvent] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    temporary: list[NativeBuffer] = field(default_factory=list)  # needed until the batch is done
    index: int = 0  # of its submission
    start: float = 0.0  # when it was submitted
    moments: Moments | None = None  # the results of the queries, once the batch is done
    waiting: set[int] = field(default_factory=set)  # the keys of callbacks that have not come yet
    submitted: bool = False
    done: bool = False
    error: str = ""

    def told(self, expected: int, problem: str) -> None:
        """Handle a callback."""
        self.error = self.error or problem
        self.waiting.discard(expected)

    def fail(self, reason: str) -> None:
        """End the batch as failed."""
        self.error = self.error or reason
        self.submitted = True
        self.end()

    def end(self) -> None:
        """Mark the batch as done, and release everything that it references."""
        for event in self.events:
            event.dispatch = None
        self.events.clear()
        self.reads.clear()
        self.temporary.clear()
        self.queries = None
        self.done = True


@dataclass(slots=True, eq=False)
class CommandEvent:
    """A command of a batch."""

    batch: Batch
    dispatch: Dispatch | None  # of a launch, until it is done
    moment: int = -1  # the index of its start in the batch's moments; -1 if it is not timed
    error: str = ""


class Read(NamedTuple):
    """A buffer to be mapped, and where its bytes go."""

    buffer: NativeBuffer
    skip: int  # bytes before the first that was requested
    target: Bytes


class Recorder:
    """Records into queues, and submits them. The caller holds the driver's lock."""

    def __init__(self, native: NativeDevice, read_buffers: ReadBuffers) -> None:
        self._native = native
        self._read_buffers = read_buffers
        self.timing: Timing | None = None  # while commands are timed

    # Launches

    def launch(self, queue: EncoderQueue, dispatch: Dispatch) -> CommandEvent:
        """Record a dispatch."""
        pipeline, group, scalars, nbytes, uniform, x, y, z = dispatch
        if uniform and queue.ring_used + nbytes > _RING_BYTES:
            self.submit(queue)
        if self.timing is not None:
            self._make_room(queue)
        native = queue.native_pass or self.begin_pass(queue)
        if pipeline is not queue.pipeline:
            _set_pipeline(native, pipeline.native)
            queue.pipeline = pipeline
        if group is not queue.group:
            _set_group(native, 0, group.native, 0, _NULL)
            queue.group = group
        if uniform:
            self._put_scalars(queue, scalars, nbytes)
        elif nbytes:
            _set_immediates(native, 0, scalars, nbytes)
        _dispatch(native, x, y, z)
        event = self.event(queue, dispatch)
        if event.batch.queries is not None:
            event.moment = event.batch.queries.used - 2
            self.end_pass(queue)  # only passes have timestamps, so each dispatch is a pass of its own
        return event

    def _put_scalars(self, queue: EncoderQueue, scalars: Any, nbytes: int) -> None:
        """Put the scalars of the next dispatch into the queue's uniform buffer."""
        if queue.ring is None:
            buffer = self._native.buffer(_RING_BYTES + MAX_SCALAR_BYTES, UNIFORM | COPY_DST)
            group = self._native.group([(buffer, 0, MAX_SCALAR_BYTES)], uniform=True)
            queue.ring = buffer, group
        ffi.memmove(queue.scalars + queue.ring_used, scalars, nbytes)
        queue.offset[0] = queue.ring_used
        queue.ring_used += rounded(nbytes, _RING_STEP)
        _set_group(queue.native_pass, 1, queue.ring[1].native, 1, queue.offset)

    # Copies

    def write(self, queue: EncoderQueue, buffer: NativeBuffer, offset: int, source: Bytes) -> None:
        """Write bytes of the host to a buffer."""
        # WebGPU copies the bytes at once into memory of its own, which it holds until the submission is done.
        # The caller limits the bytes that are submitted, and this method those that are not. What is in the
        # encoder comes first, although it would run later.
        if queue.encoder is not None or queue.staged + source.nbytes > _MAX_STAGED:
            self.submit(queue)
        self._native.write(buffer, offset, ffi.from_buffer(source), source.nbytes)
        self._native.raise_errors()
        queue.staged += source.nbytes

    def copy(
        self, queue: EncoderQueue, target: NativeBuffer, to: int, source: NativeBuffer, start: int, size: int
    ) -> int:
        """Record a copy between buffers; the index of its first moment, -1 if it is not timed."""
        queries, moment = None, -1
        if self.timing is not None and self.timing.copies:
            self._make_room(queue)
            queries = self.batch(queue).queries
        encoder = self._encoder(queue)
        if queries is not None:
            moment = queries.used
            queries.mark(encoder)
        lib.wgpuCommandEncoderCopyBufferToBuffer(encoder, source.native, start, target.native, to, size)
        if queries is not None:
            queries.mark(encoder)
        return moment

    # Batches, encoders and passes

    def event(self, queue: EncoderQueue, dispatch: Dispatch | None = None, moment: int = -1) -> CommandEvent:
        """The event of the command that was just recorded."""
        batch = self.batch(queue)
        event = CommandEvent(batch, dispatch, moment)
        batch.events.append(event)
        return event

    def batch(self, queue: EncoderQueue) -> Batch:
        """The batch that commands of a queue are recorded into."""
        if queue.batch is None:
            queue.batch = Batch(queue, None if self.timing is None else self.timing.queries())
        return queue.batch

    def begin_pass(self, queue: EncoderQueue) -> Any:
        """Begin a compute pass, which is timed if commands are."""
        queue.pipeline = queue.group = None
        queries = None if self.timing is None else self.batch(queue).queries
        how = _NULL if queries is None else queries.timed_pass()
        queue.native_pass = lib.wgpuCommandEncoderBeginComputePass(self._encoder(queue), how)
        return queue.native_pass

    def end_pass(self, queue: EncoderQueue) -> None:
        """End the compute pass."""
        lib.wgpuComputePassEncoderEnd(queue.native_pass)
        lib.wgpuComputePassEncoderRelease(queue.native_pass)
        queue.native_pass = None

    def _encoder(self, queue: EncoderQueue) -> Any:
        """The encoder of a queue, between passes."""
        if queue.encoder is None:
            queue.encoder = self._native.encoder()
        elif queue.native_pass is not None:
            self.end_pass(queue)
        return queue.encoder

    def _make_room(self, queue: EncoderQueue) -> None:
        """Submit what is recorded if there is no room for the moments of another command."""
        queries = self.batch(queue).queries
        if queries is not None and queries.full:
            self.submit(queue)

    # Submission

    def submit(self, queue: EncoderQueue) -> None:
        """Submit what was recorded."""
        batch, queue.batch, queue.staged = self.batch(queue), None, 0
        if batch.queries is not None and batch.queries.used:
            self._read_moments(queue, batch, batch.queries)
        commands, errors = self._finish(queue)
        if errors and not self._native.dead:
            if batch.moments is not None:
                batch.reads.pop().buffer.destroy()  # no moments were written to it
                batch.moments = None
            commands = self._finish_apart(queue, batch, errors[0][1])
        if queue.ring_used and queue.ring is not None:
            ring, used, queue.ring_used = queue.ring[0], queue.ring_used, 0
            self._native.write(ring, 0, queue.scalars, used)
        for _, words in self._native.take_errors():
            batch.error = words
        if self._native.dead or batch.error:
            batch.fail(self._native.dead)
        else:
            self._start(batch, commands)

    def _read_moments(self, queue: EncoderQueue, batch: Batch, queries: Queries) -> None:
        """Add the moments to what a batch reads back."""
        buffer = self._read_buffers.take(queries.nbytes)
        queries.resolve(self._encoder(queue), buffer.native)
        batch.moments = np.zeros(queries.used, np.uint64)
        batch.reads.append(Read(buffer, 0, batch.moments.view(np.uint8)))

    def _finish(self, queue: EncoderQueue) -> tuple[list[Owned], list[tuple[int, str]]]:
        """The commands in a queue's encoder, ready to be submitted, and their errors."""
        if queue.encoder is None:
            return [], self._native.take_errors()
        encoder, queue.encoder = self._encoder(queue), None
        command, errors = self._native.finish(encoder)
        return [command], errors

    def _finish_apart(self, queue: EncoderQueue, batch: Batch, words: str) -> list[Owned]:
        """The commands of a refused batch, finished launch by launch, so that only invalid launches fail."""
        commands: list[Owned] = []
        events, batch.events, queue.ring_used = batch.events, [], 0
        for event in events:
            if event.dispatch is None:
                event.error = words
                continue
            queue.batch = Batch(queue)
            self.launch(queue, event.dispatch)
            command, errors = self._finish(queue)
            if errors:
                event.error = errors[0][1]
            else:
                commands += command
        batch.events, queue.batch = events, None
        return commands

    def _start(self, batch: Batch, commands: list[Owned]) -> None:
        native = self._native
        batch.start = perf_counter()
        batch.index = native.submit(commands)
        expected = [native.expect(batch.told) for _ in range(1 + len(batch.reads))]
        batch.waiting.update(expected)
        batch.queue.in_flight.append(batch)
        native.when_done(expected[0])
        for read, number in zip(batch.reads, expected[1:], strict=True):
            native.when_mapped(read.buffer, number)
        native.take_errors()  # the callbacks report them, too
        batch.submitted = True

    # Completion

    def end(self, batch: Batch) -> None:
        """End a batch that the device has finished, and all before it, and deliver what they read."""
        if batch.done:
            return
        # When a batch is done, all batches before it have to be done, including their reads.
        in_flight = batch.queue.in_flight
        ended = in_flight[: in_flight.index(batch) + 1]
        if any(earlier.waiting for earlier in ended) and not self._native.dead:
            return
        del in_flight[: len(ended)]
        for finished in ended:
            self._end(finished)

    def _end(self, batch: Batch) -> None:
        if self._native.dead or batch.error:
            batch.fail(self._native.dead)
            return
        for read in batch.reads:
            self._native.read_mapped(read.buffer, read.skip, read.target, read.target.nbytes)
            self._read_buffers.give_back(read.buffer)
        if batch.moments is not None and self.timing is not None:
            self.timing.learn(batch.queries, batch.moments, batch.start)
        batch.end()
