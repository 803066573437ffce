"""The WebGPU driver, on wgpu-native through wgpu-py's bindings: Metal, Vulkan and DX12.

WebGPU has one queue. The three lanes each record into an encoder of their own, and what is flushed is
submitted to that one queue, in order; so a command never has to wait on the device for one of another lane.
Launches become dispatches of one compute pass. Buffers go with a dispatch in a bind group, which is made when
a launch is bound, and scalars as immediates, or through a uniform buffer where there are none, or too few.

The library ends the process if it is told to submit something invalid. So what it has against an encoder when
that is finished keeps it from being submitted, and becomes the failure of the commands that are to blame.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from time import perf_counter
from typing import Any

import numpy as np
from wgpu.backends.wgpu_native import ffi, lib

from penstock.drivers.driver import (
    Bytes,
    Driver,
    Event,
    Grid,
    Kernel,
    Memory,
    Queue,
    Source,
    parameter_dtypes,
)
from penstock.drivers.webgpu.adapters import (
    BUFFER_UNIT,
    IMMEDIATES,
    TIMES,
    TIMES_BETWEEN_PASSES,
    Adapter,
    find_devices,
    webgpu_capabilities,
)
from penstock.drivers.webgpu.native import (
    COPY_DST,
    COPY_SRC,
    MAP_READ,
    STORAGE,
    UNIFORM,
    NativeBuffer,
    NativeDevice,
    Owned,
)
from penstock.drivers.webgpu.times import Clock, Moments, Queries
from penstock.drivers.webgpu.wgsl import PLACE_UNIT, SCALARS, KernelText, module_text, parse
from penstock.errors import CompileError, DeviceError, OutOfDeviceMemory

__all__ = ["Adapter", "WebGpuDriver", "find_devices", "webgpu_capabilities"]

_MEMORY = STORAGE | COPY_SRC | COPY_DST
_WORD = 4  # bytes; WebGPU copies and binds whole words
_MAX_GROUPS = 4096  # bind groups kept for launches to come
_MAX_PIPELINES = 32  # kept for one kernel: other sizes of a group, other buffers in one memory
# The uniform buffer of a queue, in bytes: in all, the most for one launch, and the step between launches.
_RING_BYTES, _RING_PART, _RING_STEP = 1 << 18, 4096, 256
_LEAST_READ = 4096  # bytes of the smallest buffer for reading back
_IDLE_READ_BYTES = 64 << 20  # kept for the next read
_MAX_STAGED = 64 << 20  # bytes on their way to the device that a queue holds back until it is flushed

_NULL = ffi.NULL
_set_pipeline = lib.wgpuComputePassEncoderSetPipeline
_set_group = lib.wgpuComputePassEncoderSetBindGroup
_set_immediates = lib.wgpuComputePassEncoderSetImmediates
_dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups

# A copy of any bytes, for what WebGPU does not copy itself: parts of words, and inside one buffer. The bytes
# beside the target's stay as they are, because words that are not wholly the target's change bit by bit.
_COPY_BYTES = """
kernel copy_bytes(to: array<atomic<u32>>, source: array<atomic<u32>>, start: u32, origin: u32, count: u32) {
    let word = start / 4u + u32(GROUP_0 * THREADS + THREAD);
    if (4u * word >= start + count) { return; }
    var bits = 0u;
    var mask = 0u;
    for (var k = 0u; k < 4u; k++) {
        let place = 4u * word + k;
        if (place >= start && place < start + count) {
            let at = origin + (place - start);
            bits |= ((atomicLoad(&source[at / 4u]) >> (8u * (at % 4u))) & 255u) << (8u * k);
            mask |= 255u << (8u * k);
        }
    }
    if (mask == 0xffffffffu) {
        atomicStore(&to[word], bits);
    } else {
        atomicAnd(&to[word], ~mask);
        atomicOr(&to[word], bits);
    }
}
"""
_COPY_SIGNATURE = ("uint32*", "uint32*", "uint32", "uint32", "uint32")
_COPY_GROUP = 64

_keys = itertools.count(1)  # of buffers that are no memory


class WebGpuDriver(Driver):
    """One WebGPU device. Without `immediates`, all scalars go through uniform buffers."""

    def __init__(self, adapter: Adapter, name: str, *, immediates: bool = True) -> None:
        self.name = name
        self.capabilities = webgpu_capabilities(adapter)
        limits = adapter.limits
        self._longest = limits["maxComputeWorkgroupsPerDimension"]
        self._group_limits = (
            limits["maxComputeInvocationsPerWorkgroup"],
            *(limits[f"maxComputeWorkgroupSize{axis}"] for axis in "XYZ"),
        )
        has_immediates = immediates and IMMEDIATES in adapter.features
        self._immediate_bytes = limits["maxImmediateSize"] if has_immediates else 0
        self._lock = threading.RLock()
        self._native = NativeDevice(adapter, name)
        self.compute, self.incoming, self.outgoing = self._queues = _Queue(), _Queue(), _Queue()
        self._allocations: set[Memory] = set()
        self._allocated = 0
        self._layouts: dict[int, Owned] = {}  # of bind groups, by how many buffers they hold
        self._scalars_layout: Owned | None = None
        self._pipeline_layouts: dict[tuple[int, int], Owned] = {}  # by buffers and bytes of immediates
        self._groups: OrderedDict[_Parts, Owned] = OrderedDict()
        self._groups_of: dict[int, set[_Parts]] = {}  # by the memory's number
        self._idle_reads: dict[int, list[NativeBuffer]] = {}  # buffers for reading back, by size
        self._idle_read_bytes = 0
        self._copier: Kernel | None = None
        self.times = TIMES in adapter.features
        self._times_copies = TIMES_BETWEEN_PASSES in adapter.features
        self._clock: Clock | None = None  # while commands are timed
        self._idle_queries: list[Queries] = []

    # Memory

    def allocate(self, nbytes: int, pinned: bool = False) -> Memory:
        if pinned:
            # WebGPU shows no memory to the host that a command uses, so this is the host's own.
            try:
                memory = Memory(None, nbytes, np.empty(nbytes, np.uint8), pinned)
            except MemoryError as error:
                raise OutOfDeviceMemory(f"the host has no {nbytes} bytes: {error}", asked=nbytes) from None
        else:
            buffer = self._buffer(_rounded(nbytes, BUFFER_UNIT), _MEMORY)
            memory = Memory(None, nbytes, None)
            memory.native = _Range(buffer, 0, buffer.nbytes, memory.serial)
        with self._lock:
            self._allocations.add(memory)
            self._allocated += nbytes
        return memory

    def _buffer(self, nbytes: int, usage: int) -> NativeBuffer:
        largest = self.capabilities.max_allocation_bytes
        if nbytes > largest:
            raise OutOfDeviceMemory(
                f"{self.name} has no {nbytes} bytes; one allocation may have {largest} bytes there",
                asked=nbytes,
            )
        return self._native.buffer(nbytes, usage)

    def free(self, memory: Memory) -> None:
        with self._lock:
            self._allocations.remove(memory)
            self._allocated -= memory.nbytes
            native, memory.native, memory.host = memory.native, None, None
            if memory.pinned:
                self._forget_reads()  # nothing will be read before there is such memory again
            else:
                self._forget_groups(memory.serial)
                native.buffer.destroy()  # at once: a bind group that a program holds would keep it

    def view(self, memory: Memory, offset: int, nbytes: int) -> Any:
        buffer = memory.native.buffer
        return _Range(
            buffer, offset, min(_rounded(nbytes, BUFFER_UNIT), buffer.nbytes - offset), memory.serial
        )

    @property
    def allocated_bytes(self) -> int:
        return self._allocated

    def native_handles(self) -> int:
        return len(self._native.life.open)

    # Kernels

    def compile(self, source: Source, signatures: Mapping[str, Sequence[str]]) -> dict[str, Kernel]:
        if not isinstance(source, str):
            raise CompileError("a WebGPU device takes WGSL as text, and functions were given")
        self._native.require_alive()
        dtypes = {name: parameter_dtypes(name, signature) for name, signature in signatures.items()}
        found = parse(source)
        kernels = {}
        for name, signature in signatures.items():
            if name not in found:
                raise CompileError(f"the source has no kernel {name!r}; there are {sorted(found)}")
            _check_signature(found[name], signature)
            function = _Function(found[name], dtypes[name])
            apart = range(len(function.kinds))
            self._module(function, (1,), apart, False, ())  # to hear what the compiler says
            kernels[name] = Kernel(name, signature, function)
        return kernels

    def _module(
        self,
        function: _Function,
        group: Grid,
        bindings: Sequence[int],
        folded: bool,
        windows: Sequence[int],
    ) -> Owned:
        by_buffer = self._goes_by_buffer(function, folded)
        most = self.capabilities.binding_bytes
        try:
            text = module_text(function.text, group, bindings, folded, by_buffer, windows, most)
        except CompileError as error:
            raise DeviceError(f"one binding has at most {most} bytes on {self.name}: {error}") from None
        return self._native.module(function.text.name, text)

    def _goes_by_buffer(self, function: _Function, folded: bool) -> bool:
        """Whether a kernel's scalars are too many for immediates."""
        return function.scalar_bytes[folded] > self._immediate_bytes

    def _pipeline(self, function: _Function, key: _Made) -> Owned:
        with self._lock:
            pipeline = function.pipelines.get(key)
        if pipeline is None:  # without the lock: it takes milliseconds
            pipeline = self._new_pipeline(function, key)
            with self._lock:
                while len(function.pipelines) >= _MAX_PIPELINES:
                    del function.pipelines[next(iter(function.pipelines))]
                function.pipelines[key] = pipeline
        return pipeline

    def _new_pipeline(self, function: _Function, key: _Made) -> Owned:
        group, bindings, folded, windows = key
        nbytes = function.scalar_bytes[folded]
        if self._goes_by_buffer(function, folded) and nbytes > _RING_PART:
            raise DeviceError(f"{nbytes} bytes of scalars; a kernel may have {_RING_PART} here")
        module = self._module(function, group, bindings, folded, windows)
        firsts = set(bindings)
        count = sum(windows[first] for first in firsts) if windows else len(firsts)
        layout = self._pipeline_layout(count, nbytes)
        return self._native.pipeline(function.text.name, module, layout)

    def _pipeline_layout(self, buffers: int, nbytes: int) -> Owned:
        with self._lock:
            found = self._pipeline_layouts.get((buffers, nbytes))
            if found is None:
                by_buffer = nbytes > self._immediate_bytes
                groups = [self._layout(buffers)] + ([self._layout_of_scalars()] if by_buffer else [])
                found = self._native.pipeline_layout(groups, 0 if by_buffer else nbytes)
                self._pipeline_layouts[buffers, nbytes] = found
            return found

    def _layout(self, buffers: int) -> Owned:
        if buffers not in self._layouts:
            self._layouts[buffers] = self._native.group_layout(buffers)
        return self._layouts[buffers]

    def _layout_of_scalars(self) -> Owned:
        if self._scalars_layout is None:
            self._scalars_layout = self._native.group_layout(1, uniform=True)
        return self._scalars_layout

    def _group(self, parts: _Parts, buffers: Sequence[NativeBuffer]) -> Owned:
        """A bind group of parts of memories, known or new."""
        with self._lock:
            group = self._groups.get(parts)
            if group is not None:
                self._groups.move_to_end(parts)
                return group
            bound = [(buffer, offset, size) for buffer, (_, offset, size) in zip(buffers, parts, strict=True)]
            group = self._groups[parts] = self._native.group(self._layout(len(parts)), bound)
            for serial, _, _ in parts:
                self._groups_of.setdefault(serial, set()).add(parts)
            if len(self._groups) > _MAX_GROUPS:
                oldest, _ = self._groups.popitem(last=False)
                for serial, _, _ in oldest:
                    self._groups_of[serial].discard(oldest)
            return group

    def _forget_groups(self, serial: int) -> None:
        for parts in self._groups_of.pop(serial, ()):
            self._groups.pop(parts, None)
            for other, _, _ in parts:
                if other in self._groups_of:
                    self._groups_of[other].discard(parts)

    def launch(
        self,
        queue: Queue,
        kernel: Kernel,
        grid: Grid,
        group: Grid,
        args: Sequence[Any],
        waits: list[Event] | None,
    ) -> Event:
        events: list[Event] = []
        self.replay(queue, (self.bind(kernel, grid, group, args),), waits, events)
        return events[0]

    def bind(self, kernel: Kernel, grid: Grid, group: Grid, args: Sequence[Any]) -> Any:
        self._native.require_alive()
        launch = _Launch(kernel.native, tuple(grid), tuple(group), list(args))
        self._prepare(launch)
        return launch

    def rebind(self, bound: Any, position: int, dtype: np.dtype[Any], arg: Any) -> None:
        bound.args[position] = arg
        bound.dispatch = None

    def _prepare(self, launch: _Launch) -> _Dispatch:
        """Make a launch's dispatch, of the arguments that it has now."""
        function, args = launch.function, launch.args
        sizes, folded = _sizes(launch.grid, launch.group, self._longest, self._group_limits)
        numbers = [args[position] for position in function.scalar_positions]
        bindings, windows, parts, buffers = [], [], [], []
        first: dict[tuple[_Part, str], int] = {}
        most = self.capabilities.binding_bytes
        for number, part in enumerate(self._bound_parts(function, args)):
            given: _Range = args[function.buffer_positions[number]]
            serial, start, size = part
            place = function.places[number]
            if place is not None:
                numbers[place] += (given.offset - start) // PLACE_UNIT
            windows.append(1 if size <= most else -(-size // most))
            key = (part, function.kinds[number])
            if key not in first:
                first[key] = number
                for offset in range(0, size, most):
                    parts.append((serial, start + offset, min(most, size - offset)))
                    buffers.append(given.buffer)
            bindings.append(first[key])
        divided = len(parts) > len(first)
        if len(parts) > self.capabilities.max_buffers:
            what = f"parts of memories, of at most {most} bytes each" if divided else "memories"
            raise DeviceError(f"{len(parts)} {what}; a kernel may have {self.capabilities.max_buffers} here")
        made_for = (launch.group, tuple(bindings), folded, tuple(windows) if divided else ())
        pipeline = self._pipeline(function, made_for)
        if folded:
            numbers += [sizes[0], *_folding(launch.grid)]
        nbytes = function.scalar_bytes[folded]
        scalars = ffi.new("uint8_t[]", function.packed(numbers, folded)) if nbytes else None
        group = self._group(tuple(parts), buffers)
        launch.dispatch = (
            pipeline, group, scalars, nbytes, self._goes_by_buffer(function, folded), *sizes
        )  # fmt: skip
        return launch.dispatch

    def _bound_parts(self, function: _Function, args: Sequence[Any]) -> list[_Part]:
        """For each buffer, what is bound for it: of its memory, as little or as much as it takes."""
        parts: list[_Part] = []
        large: dict[tuple[int, str], list[int]] = {}  # buffers of one memory that is larger than a binding
        most = self.capabilities.binding_bytes
        for number, position in enumerate(function.buffer_positions):
            given: _Range = args[position]
            if function.places[number] is None:
                parts.append((given.serial, given.offset, given.size))
            elif given.buffer.nbytes <= most:  # the whole memory, so that all that lies in one is one binding
                parts.append((given.serial, 0, given.buffer.nbytes))
            else:
                parts.append((given.serial, given.offset, given.size))
                large.setdefault((given.serial, function.kinds[number]), []).append(number)
        for numbers in large.values():
            _join(parts, numbers)
        return parts

    def replay(
        self, queue: Queue, bound: Sequence[Any], waits: list[Event] | None, events: list[Event]
    ) -> None:
        with self._lock:
            self._native.require_alive()
            for one in bound:
                events.append(self._record(queue, one.dispatch or self._prepare(one)))

    def _record(self, queue: _Queue, dispatch: _Dispatch) -> _Event:
        pipeline, group, scalars, nbytes, by_buffer, x, y, z = dispatch
        if by_buffer and queue.ring_used + nbytes > _RING_BYTES:
            self._submit(queue)
        if self._clock is not None:
            self._make_room(queue)
        native = queue.native_pass or self._begin_pass(queue)
        if pipeline is not queue.pipeline:
            _set_pipeline(native, pipeline.native)
            queue.pipeline = pipeline
        if group is not queue.group:
            _set_group(native, 0, group.native, 0, _NULL)
            queue.group = group
        if by_buffer:
            self._put_scalars(queue, scalars, nbytes)
        elif nbytes:
            _set_immediates(native, 0, scalars, nbytes)
        _dispatch(native, x, y, z)
        event = self._event(queue, dispatch)
        if event.batch.queries is not None:
            event.moment = event.batch.queries.used - 2
            self._end_pass(queue)  # each dispatch is a pass of its own, which knows its times
        return event

    def _put_scalars(self, queue: _Queue, scalars: Any, nbytes: int) -> None:
        """Let the next dispatch find its scalars in the queue's uniform buffer."""
        if queue.ring is None:
            buffer = self._buffer(_RING_BYTES + _RING_PART, UNIFORM | COPY_DST)
            group = self._native.group(self._layout_of_scalars(), [(buffer, 0, _RING_PART)])
            queue.ring = buffer, group
        ffi.memmove(queue.scalars + queue.ring_used, scalars, nbytes)
        queue.offset[0] = queue.ring_used
        queue.ring_used += _rounded(nbytes, _RING_STEP)
        _set_group(queue.native_pass, 1, queue.ring[1].native, 1, queue.offset)

    def _begin_pass(self, queue: _Queue) -> Any:
        queue.pipeline = queue.group = None
        queries = None if self._clock is None else self._batch(queue).queries
        how = _NULL if queries is None else queries.timed_pass()
        queue.native_pass = lib.wgpuCommandEncoderBeginComputePass(self._encoder(queue), how)
        return queue.native_pass

    def _encoder(self, queue: _Queue) -> Any:
        """The encoder of a queue, between passes."""
        if queue.encoder is None:
            queue.encoder = self._native.encoder()
        elif queue.native_pass is not None:
            self._end_pass(queue)
        return queue.encoder

    def _end_pass(self, queue: _Queue) -> None:
        lib.wgpuComputePassEncoderEnd(queue.native_pass)
        lib.wgpuComputePassEncoderRelease(queue.native_pass)
        queue.native_pass = None

    def _event(self, queue: _Queue, dispatch: _Dispatch | None = None, moment: int = -1) -> _Event:
        """The event of the command that was just recorded."""
        batch = self._batch(queue)
        event = _Event(batch, dispatch, moment)
        batch.events.append(event)
        return event

    def _batch(self, queue: _Queue) -> _Batch:
        if queue.batch is None:
            queue.batch = _Batch(queue)
            if self._clock is not None:
                queue.batch.queries = (
                    self._idle_queries.pop() if self._idle_queries else Queries(self._native)
                )
        return queue.batch

    # Copies

    def write(
        self, queue: Queue, memory: Memory, offset: int, source: Bytes, waits: list[Event] | None
    ) -> Event:
        with self._lock:
            self._native.require_alive()
            if offset % _WORD == 0 == source.nbytes % _WORD:
                self._write(queue, memory.native.buffer, offset, source)
                return self._event(queue)
            padded = np.zeros(_rounded(source.nbytes, BUFFER_UNIT), np.uint8)
            padded[: source.nbytes] = source
            staged = _Range(self._buffer(padded.nbytes, _MEMORY), 0, padded.nbytes, -next(_keys))
            self._write(queue, staged.buffer, 0, padded)
            event = self._copy_bytes(queue, memory.native, offset, staged, 0, source.nbytes)
            event.batch.temporary.append(staged.buffer)
            self._forget_groups(staged.serial)
            return event

    def _write(self, queue: _Queue, buffer: NativeBuffer, offset: int, source: Bytes) -> None:
        # WebGPU copies the bytes at once into memory of its own, which it holds until they were submitted and
        # have arrived: the caller bounds how many are submitted, and here it is bounded how many are not.
        if queue.staged + source.nbytes > _MAX_STAGED:
            self._submit(queue)
        self._native.write(buffer, offset, ffi.from_buffer(source), source.nbytes)
        self._native.raise_errors()
        queue.staged += source.nbytes

    def read(
        self, queue: Queue, target: Bytes, memory: Memory, offset: int, waits: list[Event] | None
    ) -> Event:
        start = offset // _WORD * _WORD
        nbytes = _rounded(offset + target.nbytes - start, _WORD)
        with self._lock:
            self._native.require_alive()
            buffer = self._read_buffer(nbytes)
            moment = self._copy(queue, buffer, 0, memory.native.buffer, start, nbytes)
            self._batch(queue).reads.append(_Read(buffer, nbytes, offset - start, target))
            return self._event(queue, moment=moment)

    def _copy(
        self,
        queue: _Queue,
        target: NativeBuffer,
        to: int,
        source: NativeBuffer,
        start: int,
        nbytes: int,
    ) -> int:
        """Record a copy between buffers; the number of its first moment, -1 where it is not timed."""
        queries, moment = None, -1
        if self._clock is not None and self._times_copies:
            self._make_room(queue)
            queries = self._batch(queue).queries
        encoder = self._encoder(queue)
        if queries is not None:
            moment = queries.used
            queries.mark(encoder)
        lib.wgpuCommandEncoderCopyBufferToBuffer(encoder, source.native, start, target.native, to, nbytes)
        if queries is not None:
            queries.mark(encoder)
        return moment

    def _read_buffer(self, nbytes: int) -> NativeBuffer:
        size = max(1 << (nbytes - 1).bit_length(), _LEAST_READ)
        size = max(min(size, self.capabilities.max_allocation_bytes), nbytes)
        if idle := self._idle_reads.get(size):
            self._idle_read_bytes -= size
            return idle.pop()
        return self._buffer(size, MAP_READ | COPY_DST)

    def copy(
        self,
        queue: Queue,
        target: Memory,
        target_offset: int,
        source: Memory,
        source_offset: int,
        nbytes: int,
        waits: list[Event] | None,
    ) -> Event:
        with self._lock:
            self._native.require_alive()
            to, start = target.native, source.native
            if target is source or target_offset % _WORD or source_offset % _WORD or nbytes % _WORD:
                return self._copy_bytes(queue, to, target_offset, start, source_offset, nbytes)
            moment = self._copy(queue, to.buffer, target_offset, start.buffer, source_offset, nbytes)
            return self._event(queue, moment=moment)

    def _copy_bytes(
        self,
        queue: _Queue,
        target: _Range,
        target_offset: int,
        source: _Range,
        source_offset: int,
        nbytes: int,
    ) -> _Event:
        if self._copier is None:
            self._copier = self.compile(_COPY_BYTES, {"copy_bytes": _COPY_SIGNATURE})["copy_bytes"]
        most = self.capabilities.binding_bytes
        large = max(target.size, source.size) > most
        # In parts of which any two of one memory lie in one binding, or so far apart that theirs do not meet.
        step = _rounded(most // 4, PLACE_UNIT) if large else nbytes
        for done in range(0, nbytes, step):
            count = min(step, nbytes - done)
            to, start = target_offset + done, source_offset + done
            words = -(-(to % _WORD + count) // _WORD)
            args: list[Any] = [target, source, to, start, count]
            if large:
                args = _narrowed(target, source, to, start, count, most)
            launch = _Launch(self._copier.native, (-(-words // _COPY_GROUP),), (_COPY_GROUP,), args)
            event = self._record(queue, self._prepare(launch))
        return event

    def map(self, memory: Memory, offset: int, nbytes: int, writable: bool) -> Bytes:
        raise DeviceError(f"{self.name} has memory of its own, which the host cannot map")

    def unmap(self, memory: Memory, mapped: Bytes) -> Event | None:
        raise DeviceError(f"{self.name} has memory of its own, which the host cannot map")

    # Order and completion

    def flush(self, queue: Queue) -> None:
        with self._lock:
            if queue.batch is not None:
                self._submit(queue)

    def _submit(self, queue: _Queue) -> None:
        """Give what was recorded to the device."""
        batch, queue.batch, queue.staged = self._batch(queue), None, 0
        if batch.queries is not None and batch.queries.used:
            self._ask_for_moments(queue, batch, batch.queries)
        commands, errors = self._finish(queue)
        if errors and not self._native.dead:
            if batch.moments is not None:
                batch.reads.pop().buffer.destroy()  # nothing has been written there
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

    def _finish(self, queue: _Queue) -> tuple[list[Owned], list[tuple[int, str]]]:
        """The commands in a queue's encoder, ready to be submitted, and what WebGPU has against them."""
        if queue.encoder is None:
            return [], self._native.take_errors()
        encoder, queue.encoder = self._encoder(queue), None
        command, errors = self._native.finish(encoder)
        return [command], errors

    def _finish_apart(self, queue: _Queue, batch: _Batch, words: str) -> list[Owned]:
        """The same, launch by launch, where WebGPU refused all together: only those to blame fail."""
        commands: list[Owned] = []
        events, batch.events, queue.ring_used = batch.events, [], 0
        for event in events:
            if event.dispatch is None:
                event.error = words
                continue
            queue.batch = _Batch(queue)
            self._record(queue, event.dispatch)
            command, errors = self._finish(queue)
            if errors:
                event.error = errors[0][1]
            else:
                commands += command
        batch.events, queue.batch = events, None
        return commands

    def _start(self, batch: _Batch, commands: list[Owned]) -> None:
        native = self._native
        batch.start = perf_counter()
        batch.index = native.submit(commands)
        expected = [native.expect(batch.told) for _ in range(1 + len(batch.reads))]
        batch.waiting.update(expected)
        batch.queue.in_flight.append(batch)
        native.when_done(expected[0])
        for read, number in zip(batch.reads, expected[1:], strict=True):
            native.when_mapped(read.buffer, number)
        native.take_errors()  # a callback has told them
        batch.submitted = True

    def is_done(self, event: Event) -> bool:
        batch: _Batch = event.batch
        if not batch.done and batch.submitted and not self._native.life.abandoned:
            self._native.poll()
            self._settle(batch)
        return batch.done

    def wait(self, event: Event) -> None:
        batch: _Batch = event.batch
        if not batch.submitted:
            self.flush(batch.queue)
        while not batch.done:
            self._native.poll(batch.index)
            self._settle(batch)

    def _settle(self, batch: _Batch) -> None:
        """End a batch that the device has finished: bring what was read to where it belongs."""
        if batch.waiting and not self._native.dead:
            return
        with self._lock:  # which the thread holds that still tells WebGPU of its callbacks
            if batch.done:
                return
            # Whoever waits for one takes all before it to be done, with what they read.
            in_flight = batch.queue.in_flight
            ended = in_flight[: in_flight.index(batch) + 1]
            if any(one.waiting for one in ended) and not self._native.dead:
                return
            del in_flight[: len(ended)]
            for one in ended:
                self._end(one)

    def _end(self, batch: _Batch) -> None:
        if self._native.dead or batch.error:
            batch.fail(self._native.dead)
            return
        for read in batch.reads:
            self._native.read_mapped(read.buffer, read.skip, read.target, read.target.nbytes)
            self._keep_read_buffer(read.buffer)
        if batch.moments is not None and self._clock is not None:
            self._clock.learn(batch.moments, batch.start, perf_counter())
            if batch.queries is not None:
                batch.queries.used = 0
                self._idle_queries.append(batch.queries)
        batch.end()

    def _keep_read_buffer(self, buffer: NativeBuffer) -> None:
        if self._idle_read_bytes + buffer.nbytes > _IDLE_READ_BYTES:
            buffer.destroy()
        else:
            self._idle_reads.setdefault(buffer.nbytes, []).append(buffer)
            self._idle_read_bytes += buffer.nbytes

    def _forget_reads(self) -> None:
        for buffers in self._idle_reads.values():
            for buffer in buffers:
                buffer.destroy()
        self._idle_reads.clear()
        self._idle_read_bytes = 0

    def failures(self, events: Sequence[Event]) -> list[tuple[int, str]]:
        told = [(position, event.batch.error or event.error) for position, event in enumerate(events)]
        return [(position, reason) for position, reason in told if reason]

    # Times

    def time_commands(self, on: bool) -> None:
        if on and not self.times:
            raise DeviceError(f"{self.name} does not tell when commands ran")
        with self._lock:
            self._clock = Clock(self._native) if on else None
            self._idle_queries.clear()
        for _ in range(3) if on else ():  # to learn how far the clocks are apart
            with self._lock:
                self._native.require_alive()
                self._begin_pass(self.compute)
                self._end_pass(self.compute)
                event = self._event(self.compute)
            self.flush(self.compute)
            self.wait(event)

    def _make_room(self, queue: _Queue) -> None:
        """Submit what is recorded where there is no room for the moments of one more command."""
        queries = self._batch(queue).queries
        if queries is not None and queries.full:
            self._submit(queue)

    def _ask_for_moments(self, queue: _Queue, batch: _Batch, queries: Queries) -> None:
        """Read the moments back with everything else that a batch reads."""
        buffer = self._read_buffer(queries.nbytes)
        queries.resolve(self._encoder(queue), buffer.native)
        batch.moments = np.zeros(queries.used, np.uint64)
        batch.reads.append(_Read(buffer, queries.nbytes, 0, batch.moments.view(np.uint8)))

    def ran(self, event: Event) -> tuple[float, float] | None:
        batch: _Batch = event.batch
        clock, moments, moment = self._clock, batch.moments, event.moment
        if clock is None or moments is None or moment < 0 or event.error or batch.error or not batch.done:
            return None
        start, end = int(moments[moment]), int(moments[moment + 1])
        return clock.on_host(start), clock.on_host(max(start, end))

    # Life cycle

    def close(self) -> None:
        if not self._native.life.abandoned:
            for queue in self._queues:
                self.flush(queue)
            self._native.finish_all()

    def abandon(self) -> None:
        # A lock of wgpu may have been held by a thread that did not come along: no call may be made any more.
        self._native.life.abandoned = True


_Part = tuple[int, int, int]  # of a memory: its number, offset, bytes
_Parts = tuple[_Part, ...]
# What a pipeline is made for: the group, for each buffer the first in the same binding, whether the grid is
# folded, and for each buffer how many bindings it has, where any has several.
_Made = tuple[Grid, tuple[int, ...], bool, tuple[int, ...]]


class _Range:
    """A part of a memory, as a kernel takes it."""

    __slots__ = ("buffer", "offset", "serial", "size")

    def __init__(self, buffer: NativeBuffer, offset: int, size: int, serial: int) -> None:
        self.buffer = buffer
        self.offset = offset
        self.size = size
        self.serial = serial  # the memory's number

    def around(self, start: int, end: int) -> _Range:
        """As little of the memory as can be bound for some of its bytes."""
        offset = start // PLACE_UNIT * PLACE_UNIT
        size = min(_rounded(end - offset, BUFFER_UNIT), self.buffer.nbytes - offset)
        return _Range(self.buffer, offset, size, self.serial)


# Pipeline, bind group, scalars, their bytes, whether they go through a uniform buffer, groups in each axis.
_Dispatch = tuple[Owned, Owned, Any, int, bool, int, int, int]


class _Queue:
    """A lane: what is recorded and not submitted."""

    __slots__ = (
        "batch", "encoder", "group", "in_flight", "native_pass", "offset", "pipeline", "ring", "ring_used",
        "scalars", "staged",
    )  # fmt: skip

    def __init__(self) -> None:
        self.batch: _Batch | None = None
        self.in_flight: list[_Batch] = []  # submitted and not known to be done, in order
        self.encoder: Any = None
        self.native_pass: Any = None  # inside the encoder
        self.pipeline: Owned | None = None  # set in the pass
        self.group: Owned | None = None
        self.staged = 0  # bytes of the host on their way
        self.ring: tuple[NativeBuffer, Owned] | None = None  # the uniform buffer and its bind group
        self.ring_used = 0
        self.scalars = ffi.new("uint8_t[]", _RING_BYTES)  # what will be written to it at the next submission
        self.offset = ffi.new("uint32_t *")


class _Batch:
    """Commands that are submitted together."""

    __slots__ = (
        "done", "error", "events", "index", "moments", "queries", "queue", "reads", "start", "submitted",
        "temporary", "waiting",
    )  # fmt: skip

    def __init__(self, queue: _Queue) -> None:
        self.queue = queue
        self.events: list[_Event] = []
        self.reads: list[_Read] = []
        self.temporary: list[NativeBuffer] = []  # needed until it is done
        self.index = 0  # of its submission
        self.start = 0.0  # when it was submitted
        self.queries: Queries | None = None  # where its commands are timed
        self.moments: Moments | None = None  # what these found, once it is done
        self.waiting: set[int] = set()  # callbacks to come
        self.submitted = False
        self.done = False
        self.error = ""

    def told(self, expected: int, problem: str) -> None:
        """Take notice of a callback."""
        self.error = self.error or problem
        self.waiting.discard(expected)

    def fail(self, reason: str) -> None:
        """End it without what it should have done."""
        self.error = self.error or reason
        self.submitted = True
        self.end()

    def end(self) -> None:
        """Let go of everything: nothing is needed of a batch but that it is done."""
        for event in self.events:
            event.dispatch = None
        self.events.clear()
        self.reads.clear()
        self.temporary.clear()
        self.queries = None
        self.done = True


class _Event:
    """One command of a batch."""

    __slots__ = ("batch", "dispatch", "error", "moment")

    def __init__(self, batch: _Batch, dispatch: _Dispatch | None, moment: int = -1) -> None:
        self.batch = batch
        self.moment = moment  # the number of its first, in those of the batch; -1 where it is not timed
        self.dispatch = dispatch  # where it is a launch, until that is done
        self.error = ""


class _Read:
    """A buffer to be mapped, and where its bytes go."""

    __slots__ = ("buffer", "nbytes", "skip", "target")

    def __init__(self, buffer: NativeBuffer, nbytes: int, skip: int, target: Bytes) -> None:
        self.buffer = buffer
        self.nbytes = nbytes
        self.skip = skip  # bytes before the first that was asked for
        self.target = target


class _Function:
    """A kernel: its text, where each of its parameters is found, and its pipelines."""

    def __init__(self, text: KernelText, dtypes: Sequence[np.dtype[Any]]) -> None:
        self.text = text
        self.buffer_positions = [i for i, one in enumerate(text.parameters) if one.is_buffer]
        self.scalar_positions = [i for i, one in enumerate(text.parameters) if not one.is_buffer]
        self.kinds = [one.type for one in text.buffers]
        numbers = {one.name: number for number, one in enumerate(text.scalars)}
        # For each buffer, which of the scalars is its place, where it has one.
        self.places = [numbers.get(f"{one.name}_place") for one in text.buffers]
        self.scalar_bytes = [text.scalar_bytes(folded) for folded in (False, True)]
        self.pipelines: dict[_Made, Owned] = {}
        self._dtypes = [dtypes[position] for position in self.scalar_positions]
        self._formats = [struct.Struct(text.scalar_format(folded)) for folded in (False, True)]

    def packed(self, numbers: list[Any], folded: bool) -> bytes:
        """Scalars as the kernel reads them."""
        form = self._formats[folded]
        try:
            return form.pack(*numbers)
        except (struct.error, OverflowError):  # a number that NumPy would round or wrap
            with np.errstate(all="ignore"):
                for position, dtype in enumerate(self._dtypes):
                    numbers[position] = np.asarray(numbers[position]).astype(dtype).item()
            return form.pack(*numbers)


class _Launch:
    """A kernel with its arguments."""

    __slots__ = ("args", "dispatch", "function", "grid", "group")

    def __init__(self, function: _Function, grid: Grid, group: Grid, args: list[Any]) -> None:
        self.function = function
        self.grid = grid
        self.group = group
        self.args = args
        self.dispatch: _Dispatch | None = None  # None: an argument has changed


def _join(parts: list[_Part], numbers: Sequence[int]) -> None:
    """Make one part of those that meet in one memory: WebGPU permits no two bindings of the same bytes."""
    together: list[int] = []
    start = end = 0
    for number in sorted(numbers, key=lambda one: parts[one][1]):
        serial, begin, size = parts[number]
        if begin >= end:
            together, start = [], begin
        together.append(number)
        end = max(end, begin + size)
        for one in together:
            parts[one] = (serial, start, end - start)


def _narrowed(target: _Range, source: _Range, to: int, start: int, count: int, most: int) -> list[Any]:
    """The arguments of a copy, with no more of large memories than it takes."""
    first, last = min(to, start), max(to, start) + count
    if target.serial == source.serial and last - first // PLACE_UNIT * PLACE_UNIT <= most - BUFFER_UNIT:
        both = target.around(first, last)
        return [both, both, to - both.offset, start - both.offset, count]
    there, here = target.around(to, to + count), source.around(start, start + count)
    return [there, here, to - there.offset, start - here.offset, count]


@lru_cache(maxsize=1024)
def _sizes(
    grid: Grid, group: Grid, longest: int, limits: tuple[int, ...]
) -> tuple[tuple[int, int, int], bool]:
    """The groups of a dispatch in each axis, and whether these are the grid's, folded into a rectangle."""
    most, *sizes = limits
    threads = groups = 1
    for size in group:
        threads *= size
    for size in grid:
        groups *= size
    fits = all(1 <= size <= limit for size, limit in zip(group, sizes, strict=False)) and threads <= most
    if not 1 <= len(grid) == len(group) <= 3 or min(grid) < 1 or not fits:
        raise DeviceError(
            f"grid and group need 1 to 3 positive sizes each, a group at most {most} threads, and "
            f"at most {', '.join(map(str, sizes))} in its axes"
        )
    if max(grid) <= longest:
        x, y, z = (*grid, 1, 1)[:3]
        return (x, y, z), False
    rows = -(-groups // longest)
    if rows > longest or groups >= 1 << 31:
        raise DeviceError(f"a grid of {groups} groups; one may have {min(longest**2, (1 << 31) - 1)} here")
    return (-(-groups // rows), rows, 1), True


def _folding(grid: Grid) -> tuple[int, int, int]:
    """What a kernel has to know of a folded grid: all of its groups, and its first two axes."""
    x, y, z = (*grid, 1, 1)[:3]
    return x * y * z, x, y


def _check_signature(kernel: KernelText, signature: Sequence[str]) -> None:
    if len(kernel.parameters) != len(signature):
        raise CompileError(
            f"kernel {kernel.name!r} has {len(kernel.parameters)} parameters, and the signature "
            f"({', '.join(signature)}) has {len(signature)}"
        )
    for parameter, kind in zip(kernel.parameters, signature, strict=True):
        if not (kind.endswith("*") if parameter.is_buffer else SCALARS[parameter.type][0] == kind):
            raise CompileError(
                f"parameter {parameter.name!r} of kernel {kernel.name!r} is {parameter.type}, "
                f"and the signature says {kind!r}"
            )


def _rounded(nbytes: int, unit: int) -> int:
    """At least one unit, and whole ones."""
    return max(-(-nbytes // unit), 1) * unit
