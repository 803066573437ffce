"""The WebGPU driver, on wgpu-native through wgpu-py's bindings: Metal, Vulkan and DX12.

WebGPU has a single queue. Each of the three queues here records into an encoder of its own, which a flush
submits to that queue; so commands never have to wait for other queues on the device. Successive launches are
dispatches of a compute pass. Buffers are passed in bind groups, which are created when a launch is bound, and
scalars as immediates, or in a uniform buffer if the device has no or too few immediates.

wgpu gives nobody the code that it compiled, but the system keeps it in a cache of its own. So it is only
noted what was compiled on this machine.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from penstock.drivers.binaries import Binaries
from penstock.drivers.driver import Args, Bytes, Driver, Event, Grid, Kernel, Memory, Queue, Source, Waits
from penstock.drivers.webgpu.adapters import (
    BUFFER_ALIGNMENT,
    IMMEDIATES,
    TIMES,
    TIMES_BETWEEN_PASSES,
    Adapter,
    webgpu_capabilities,
)
from penstock.drivers.webgpu.byte_copies import ByteCopies
from penstock.drivers.webgpu.launches import Binder, BindGroups, Launch
from penstock.drivers.webgpu.memory import MEMORY_USAGE, WORD, Range, ReadBuffers, rounded
from penstock.drivers.webgpu.native import NativeDevice
from penstock.drivers.webgpu.pipelines import Pipelines
from penstock.drivers.webgpu.recorder import Batch, CommandEvent, EncoderQueue, Read, Recorder
from penstock.drivers.webgpu.times import Timing
from penstock.errors import DeviceError
from penstock.lru import LRU

_MAX_AHEAD = 64  # sources whose kernels were compiled ahead, and are kept until they are asked for
_temporary_serials = itertools.count(-1, -1)  # of buffers that are no `Memory`


class WebGpuDriver(Driver):
    """A WebGPU device. Without `immediates`, all scalars are passed in uniform buffers."""

    def __init__(self, adapter: Adapter, name: str, *, immediates: bool = True) -> None:
        super().__init__(name, webgpu_capabilities(adapter))
        can = self.capabilities
        has_immediates = immediates and IMMEDIATES in adapter.features
        self.compute, self.incoming, self.outgoing = self._queues = [EncoderQueue() for _ in range(3)]
        self.times = TIMES in adapter.features
        self._lock = threading.RLock()
        self._native = NativeDevice(adapter, name)
        immediate_bytes = adapter.limits["maxImmediateSize"] if has_immediates else 0
        self._pipelines = Pipelines(self._native, immediate_bytes, can.binding_bytes, self._lock)
        self._groups = BindGroups(self._native, self._lock)
        self._binder = Binder(adapter, can, self._pipelines, self._groups)
        self._byte_copies = ByteCopies(self._pipelines, can.binding_bytes)
        self._read_buffers = ReadBuffers(self._native)
        self._times_copies = TIMES_BETWEEN_PASSES in adapter.features
        self._recorder = Recorder(self._native, self._read_buffers)
        self._ahead: LRU[str, dict[str, Kernel]] = LRU(_MAX_AHEAD)
        self._noted = Binaries()  # empty, as the system has the code

    # Memory

    def allocate(self, nbytes: int, pinned: bool = False) -> Memory:
        if pinned:
            # WebGPU cannot map memory while commands use it, so this is ordinary memory of the host.
            memory = Memory(None, nbytes, self._host_bytes(nbytes), pinned)
        else:
            buffer = self._native.buffer(rounded(nbytes, BUFFER_ALIGNMENT), MEMORY_USAGE)
            memory = Memory(None, nbytes, None)
            memory.native = Range(buffer, 0, buffer.nbytes, memory.serial)
        self._allocations.add(memory)
        return memory

    def free(self, memory: Memory) -> None:
        with self._lock:
            self._allocations.remove(memory)
            native, memory.native, memory.host = memory.native, None, None
            if memory.pinned:
                self._read_buffers.clear()  # reads need pinned memory, so there will be none soon
            else:
                self._groups.forget(memory.serial)
                native.buffer.destroy()  # explicitly, because bind groups of programs keep references to it

    def view(self, memory: Memory, offset: int, nbytes: int) -> Any:
        buffer = memory.native.buffer
        size = min(rounded(nbytes, BUFFER_ALIGNMENT), buffer.nbytes - offset)
        return Range(buffer, offset, size, memory.serial)

    def native_handles(self) -> int:
        return len(self._native.handles.open)

    # Kernels

    def compile(self, source: Source, signatures: Mapping[str, Sequence[str]]) -> dict[str, Kernel]:
        with self._lock:
            ahead = self._ahead.pop(source, None) if isinstance(source, str) else None
        return ahead or self._pipelines.compile(source, signatures)

    def compile_ahead(
        self, source: str, signatures: Mapping[str, Sequence[str]], groups: Mapping[str, Grid]
    ) -> None:
        kernels = self._pipelines.compile(source, signatures)
        for name, kernel in kernels.items():
            self._pipelines.create_ahead(kernel.native, groups[name])
        with self._lock:
            self._ahead[source] = kernels
        self._noted.put(self._description(source), b"")

    @property
    def keeps_compiled(self) -> bool:
        # Software that stands in for a GPU compiles a kernel when it first runs.
        return self.capabilities.kind == "gpu"

    def has_compiled(self, source: str) -> bool:
        return source in self._ahead or self._noted.has(self._description(source))

    def _description(self, source: str) -> str:
        """All that the compiled code of a source depends on."""
        can = self.capabilities
        return "\n".join((can.api, can.description, version("wgpu"), source))

    def bind(self, kernel: Kernel, grid: Grid, group: Grid, args: Args) -> Any:
        self._native.require_alive()
        launch = Launch(kernel.native, tuple(grid), tuple(group), list(args))
        self._binder.dispatch(launch)
        return launch

    def rebind(self, bound: Any, position: int, dtype: np.dtype[Any], arg: Any) -> None:
        bound.args[position] = arg
        bound.dispatch = None

    def replay(self, queue: Queue, bound: Sequence[Any], waits: Waits, events: list[Event]) -> None:
        with self._lock:
            self._native.require_alive()
            for launch in bound:
                dispatch = launch.dispatch or self._binder.dispatch(launch)
                events.append(self._recorder.launch(queue, dispatch))

    # Copies

    def write(self, queue: Queue, memory: Memory, offset: int, source: Bytes, waits: Waits) -> Event:
        with self._lock:
            self._native.require_alive()
            if offset % WORD == 0 == source.nbytes % WORD:
                self._recorder.write(queue, memory.native.buffer, offset, source)
                return self._recorder.event(queue)
            padded = np.zeros(rounded(source.nbytes, BUFFER_ALIGNMENT), np.uint8)
            padded[: source.nbytes] = source
            buffer = self._native.buffer(padded.nbytes, MEMORY_USAGE)
            staged = Range(buffer, 0, padded.nbytes, next(_temporary_serials))
            self._recorder.write(queue, buffer, 0, padded)
            event = self._copy_bytes(queue, memory.native, offset, staged, 0, source.nbytes)
            event.batch.temporary.append(buffer)
            self._groups.forget(staged.serial)
            return event

    def read(self, queue: Queue, target: Bytes, memory: Memory, offset: int, waits: Waits) -> Event:
        start = offset // WORD * WORD
        nbytes = rounded(offset + target.nbytes - start, WORD)
        with self._lock:
            self._native.require_alive()
            buffer = self._read_buffers.take(nbytes)
            moment = self._recorder.copy(queue, buffer, 0, memory.native.buffer, start, nbytes)
            self._recorder.batch(queue).reads.append(Read(buffer, offset - start, target))
            return self._recorder.event(queue, moment=moment)

    def copy(
        self, queue: Queue, target: Memory, to: int, source: Memory, start: int, nbytes: int, waits: Waits
    ) -> Event:
        with self._lock:
            self._native.require_alive()
            if target is source or to % WORD or start % WORD or nbytes % WORD:
                return self._copy_bytes(queue, target.native, to, source.native, start, nbytes)
            there, here = target.native.buffer, source.native.buffer
            moment = self._recorder.copy(queue, there, to, here, start, nbytes)
            return self._recorder.event(queue, moment=moment)

    def _copy_bytes(
        self, queue: EncoderQueue, target: Range, to: int, source: Range, start: int, nbytes: int
    ) -> CommandEvent:
        """Record a copy by a kernel; the event of its last launch."""
        for launch in self._byte_copies.launches(target, to, source, start, nbytes):
            event = self._recorder.launch(queue, self._binder.dispatch(launch))
        return event

    # Order and completion

    def flush(self, queue: Queue) -> None:
        with self._lock:
            if queue.batch is not None:
                self._recorder.submit(queue)

    def is_done(self, event: Event) -> bool:
        batch: Batch = event.batch
        if not batch.done and batch.submitted and not self._native.handles.abandoned:
            self._native.poll()
            self._end_if_finished(batch)
        return batch.done

    def wait(self, event: Event) -> None:
        batch: Batch = event.batch
        if not batch.submitted:
            self.flush(batch.queue)
        while not batch.done:
            self._native.poll(batch.index)
            self._end_if_finished(batch)

    def _end_if_finished(self, batch: Batch) -> None:
        if batch.waiting and not self._native.dead:
            return
        with self._lock:  # a thread that is still registering callbacks holds it
            self._recorder.end(batch)

    def failures(self, events: Sequence[Event]) -> list[tuple[int, str]]:
        reasons = [(position, event.batch.error or event.error) for position, event in enumerate(events)]
        return [(position, reason) for position, reason in reasons if reason]

    # Times

    def time_commands(self, on: bool) -> None:
        if on and not self.times:
            raise DeviceError(f"{self.name} does not tell when commands ran")
        with self._lock:
            self._recorder.timing = Timing(self._native, self._times_copies) if on else None
        for _ in range(3) if on else ():  # to measure the offset of the device's clock
            with self._lock:
                self._native.require_alive()
                self._recorder.begin_pass(self.compute)
                self._recorder.end_pass(self.compute)
                event = self._recorder.event(self.compute)
            self.flush(self.compute)
            self.wait(event)

    def ran(self, event: Event) -> tuple[float, float] | None:
        batch: Batch = event.batch
        timing, moments, moment = self._recorder.timing, batch.moments, event.moment
        if timing is None or moments is None or moment < 0 or event.error or batch.error or not batch.done:
            return None
        start, end = int(moments[moment]), int(moments[moment + 1])
        return timing.on_host(start), timing.on_host(max(start, end))

    # Life cycle

    def close(self) -> None:
        if not self._native.handles.abandoned:
            for queue in self._queues:
                self.flush(queue)
            self._native.finish_all()

    def abandon(self) -> None:
        # A thread that does not exist in the child may have held a lock of wgpu, so no call may be made.
        self._native.handles.abandoned = True
