"""The CUDA driver for NVIDIA's GPUs, on cuda.core and the driver API of cuda.bindings.

Kernels are CUDA C that NVRTC compiles for the device, or launches of a library. The launches of a program can
be captured in a CUDA graph, whose arguments can still be changed.

An error inside a kernel, such as an illegal address, is fatal for the device in this process: CUDA returns it
for every later call. All commands that were not known to be done have failed then, and all later commands
fail; the error is reported for the first of them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from penstock.drivers.cuda.calls import ELSEWHERE, FATAL, NO_MEMORY, CudaError, checked, words
from penstock.drivers.cuda.code import Compiler, Function
from penstock.drivers.cuda.devices import architecture_of, context_of, cuda_capabilities
from penstock.drivers.cuda.events import Clock, CudaEvent, EventPool, elapsed
from penstock.drivers.cuda.graphs import Graph
from penstock.drivers.cuda.launches import GraphCopy, Launch, LibraryCall
from penstock.drivers.cuda.memory import Allocator, release
from penstock.drivers.driver import (
    Args,
    Bytes,
    Driver,
    Event,
    Grid,
    Handles,
    Kernel,
    Launcher,
    Memory,
    Queue,
    Source,
    Waits,
    parameter_dtypes,
)
from penstock.errors import CompileError, DeviceError

_NOT_READY = cu.CUresult.CUDA_ERROR_NOT_READY


class CudaDriver(Driver):
    """A CUDA device."""

    reaches_pinned = True
    times = True
    few_launches = 4

    def __init__(self, device: int, name: str) -> None:
        super().__init__(name, cuda_capabilities(device))
        self._context = context_of(device)
        self._enter()
        self._allocator = Allocator(device)
        self._compiler = Compiler(architecture_of(device))
        self._captured = Handles()
        self._events = EventPool()
        made = [checked(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)) for _ in range(4)]
        self.compute, self.incoming, self.outgoing, self._capturing = self._queues = made
        # CUDA's own setting: every call waits for its command, so that failures are attributed exactly.
        self._blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
        self.graphs = not self._blocking
        self._at_once = self._blocking  # whether every command has an event of its own
        self._clock: Clock | None = None  # while commands are timed
        self._open: dict[Queue, CudaEvent] = {}  # by queue: the event of the commands since the last flush
        self._launcher = 0  # the thread that launched last
        self._dead = ""  # the error that ended the device
        self._abandoned = False

    # Memory

    def allocate(self, nbytes: int, pinned: bool = False) -> Memory:
        self._enter()
        try:
            memory = self._allocator.allocate(nbytes, pinned)
        except CudaError as error:
            if error.code in FATAL:
                self._end(error.code)
                raise DeviceError(
                    f"a command before it failed ({error})", f"allocation of {nbytes} bytes"
                ) from None
            if error.code not in NO_MEMORY:
                raise DeviceError(str(error), f"allocation of {nbytes} bytes") from None
            raise self._no_memory(nbytes, str(error)) from None
        self._allocations.add(memory)
        return memory

    def free(self, memory: Memory) -> None:
        self._allocations.remove(memory)
        address, mapped = self._allocator.forget(memory)
        if not self._abandoned:
            self._enter()
            release(address, mapped, memory.pinned)

    def view(self, memory: Memory, offset: int, nbytes: int) -> Any:
        return memory.native + offset

    def native_handles(self) -> int:
        loaded = len(self._compiler.modules.open) + len(self._captured.open)
        return len(self._allocations) + loaded + self._events.in_use

    # Kernels

    def compile(self, source: Source, signatures: Mapping[str, Sequence[str]]) -> dict[str, Kernel]:
        dtypes = {name: parameter_dtypes(name, signature) for name, signature in signatures.items()}
        self._enter()
        if not isinstance(source, str):
            return {name: self._library(name, source, signature) for name, signature in signatures.items()}
        try:
            functions = self._compiler.functions(source, signatures, dtypes)
        except CudaError as error:
            raise CompileError(f"{self.name} refused the code of {sorted(signatures)}: {error}") from None
        return {name: Kernel(name, signatures[name], functions[name]) for name in signatures}

    def compile_ahead(
        self, source: str, signatures: Mapping[str, Sequence[str]], groups: Mapping[str, Grid]
    ) -> None:
        self._compiler.compile_ahead(source)

    @property
    def keeps_compiled(self) -> bool:
        return True

    def has_compiled(self, source: str) -> bool:
        return self._compiler.has(source)

    def _library(self, name: str, functions: Mapping[str, Any], signature: Sequence[str]) -> Kernel:
        launch = functions.get(name)
        if not callable(launch) or not hasattr(launch, "prepare"):
            raise CompileError(
                f"a CUDA device takes CUDA C as text, or launches of a library, which have a method "
                f"`prepare`; functions were given, and {name!r} has no such method"
            )
        launch.prepare(self)
        self._enter()
        return Kernel(name, signature, launch)

    def launcher(self, kernel: Kernel, grid: Grid, group: Grid) -> Launcher:
        bound = self.bind(kernel, grid, group, ())  # for all launches, since calls for a queue are ordered
        if not isinstance(bound, Launch):
            return partial(self._launch_library, bound)
        pack, opened = bound.pack, self._open

        # `set` and `record` of the launch, without their calls: these take as long as all that they do.
        def launch(queue: Queue, args: Args, waits: Waits) -> Event:
            try:
                pack(*args)
            except (struct.error, OverflowError):
                bound.set(args)
            # The context is not set if this thread launched last, to save a tenth of the time of a launch.
            if waits or self._at_once or queue is not bound.queue or self._launcher != get_ident():
                return self._launch(queue, bound, waits)
            code = bound.call()[0]
            if code:
                return self._launch_again(code, queue, bound)
            event = opened.get(queue)
            return self._event(queue) if event is None else event

        return launch

    def _launch_library(self, bound: LibraryCall, queue: Queue, args: Args, waits: Waits) -> Event:
        bound.set(args)
        if waits or self._at_once or self._launcher != get_ident():
            return self._launch(queue, bound, waits)
        try:
            bound.record(queue)
        except CudaError as error:
            return self._launch_again(error.code, queue, bound)
        return self._event(queue)

    def _launch_again(self, code: Any, queue: Queue, bound: Launch | LibraryCall) -> Event:
        """Record a launch that failed, if that was for a context that is not current; else refuse it."""
        if code not in ELSEWHERE:
            self._refuse(CudaError(code))
        return self._launch(queue, bound, None)

    def _launch(self, queue: Queue, bound: Launch | LibraryCall, waits: Waits) -> Event:
        """Record a launch in a context that may have to be entered, and which may be timed."""
        try:
            self._begin(queue, waits)
            self._launcher = get_ident()
            if self._clock is not None:
                self._clock.note_start(queue)
            bound.record(queue)
        except CudaError as error:
            self._refuse(error)
        return self._event(queue)

    def bind(self, kernel: Kernel, grid: Grid, group: Grid, args: Args) -> Any:
        if isinstance(kernel.native, Function):
            return Launch(kernel.native, grid, group, args, kernel.early)
        return LibraryCall(kernel.native, args)

    def rebind(self, bound: Any, position: int, dtype: np.dtype[Any], arg: Any) -> None:
        bound.change(position, arg)

    def replay(self, queue: Queue, bound: Sequence[Any], waits: Waits, events: list[Event]) -> None:
        recorded = 0
        try:
            self._begin(queue, waits)
            for launch in bound:
                if self._clock is not None:
                    self._clock.note_start(queue)
                launch.record(queue)
                recorded += 1
                if self._at_once:
                    events.append(self._event(queue))
                    recorded = 0
        except CudaError as error:
            self._refuse(error)
            recorded = len(bound) - len(events)
        finally:
            if recorded:
                events += [self._event(queue)] * recorded

    def capture(self, bound: Sequence[Any], after: Sequence[Sequence[int]]) -> Any:
        self._enter()
        try:
            return Graph(bound, after, self._capturing, self._captured)
        except CudaError as error:
            raise DeviceError(str(error)) from None

    def bind_copy(self, target: Any, source: Any, nbytes: int, to_device: bool) -> Any:
        return GraphCopy(target, source, nbytes, to_device, self._context)

    # Copies

    def write(self, queue: Queue, memory: Memory, offset: int, source: Bytes, waits: Waits) -> Event:
        return self._copy(queue, memory.native + offset, _address(source), source.nbytes, waits)

    def read(self, queue: Queue, target: Bytes, memory: Memory, offset: int, waits: Waits) -> Event:
        return self._copy(queue, _address(target), memory.native + offset, target.nbytes, waits)

    def copy(
        self, queue: Queue, target: Memory, to: int, source: Memory, start: int, nbytes: int, waits: Waits
    ) -> Event:
        return self._copy(queue, target.native + to, source.native + start, nbytes, waits)

    def foreign(self, queue: Queue, work: Callable[[int], None], waits: Waits) -> Event:
        try:
            self._begin(queue, waits)
            work(int(queue))
        except CudaError as error:
            self._refuse(error)
        return self._event(queue)

    def _copy(self, queue: Queue, target: int, source: int, nbytes: int, waits: Waits) -> Event:
        try:
            self._begin(queue, waits)
            if self._clock is not None:
                self._clock.note_start(queue)
            checked(cu.cuMemcpyAsync(target, source, nbytes, queue))
        except CudaError as error:
            self._refuse(error)
        return self._event(queue)

    # Order and completion

    def flush(self, queue: Queue) -> None:
        event = self._open.pop(queue, None)
        if event is not None:
            self._enter()
            self._record(event)

    def is_done(self, event: Event) -> bool:
        if event.done or event.native is None or self._abandoned:
            return bool(event.done)
        self._enter()
        (code,) = cu.cuEventQuery(event.native)
        if code == _NOT_READY:
            return False
        self._complete(event, code)
        return True

    def wait(self, event: Event) -> None:
        if event.native is None:
            self.flush(event.queue)
        if not event.done:
            self._enter()
            self._complete(event, cu.cuEventSynchronize(event.native)[0])

    def failures(self, events: Sequence[Event]) -> list[tuple[int, str]]:
        failed = {event for event in {*events} if self.is_done(event) and event.error}  # most share an event
        if not failed:
            return []
        return [(position, event.error) for position, event in enumerate(events) if event in failed]

    def _enter(self) -> None:
        """Make the device's context current in this thread; other libraries may have set another."""
        cu.cuCtxSetCurrent(self._context)

    def _begin(self, queue: Queue, waits: Waits) -> None:
        cu.cuCtxSetCurrent(self._context)
        if waits:
            for event in waits:
                if not event.done:
                    checked(cu.cuStreamWaitEvent(queue, event.native, 0))

    def _refuse(self, error: CudaError) -> None:
        """Raise the error of a command that CUDA refused; a fatal error is kept for the events instead."""
        if error.code not in FATAL:
            raise DeviceError(str(error)) from None
        self._end(error.code)

    def _end(self, code: Any) -> None:
        """Make every later command fail."""
        self._at_once = True
        self._dead = self._dead or (
            f"{words(code)}. This command or a command soon after it failed, and the device cannot be used "
            f"any more in this process; set CUDA_LAUNCH_BLOCKING=1 in the environment to learn which it was"
        )

    def _event(self, queue: Queue) -> Event:
        """The event of the last command. All commands until the next flush share an event, to save time."""
        event = self._open.get(queue)
        if event is None:
            event = self._open[queue] = CudaEvent(queue, self._events.idle)
        if self._clock is not None:
            self._clock.give_start(event)
        if not self._at_once:
            return event
        if self._dead:
            del self._open[queue]
            event.done, event.error = True, self._dead
        else:
            self.flush(queue)
            if self._blocking:
                self.wait(event)
        return event

    def _record(self, event: Event) -> None:
        """Record the native event of an event."""
        try:
            event.native = self._events.mark(event.queue, event.idle)
        except CudaError as error:
            self._refuse(error)
            event.done, event.error = True, self._dead

    def _complete(self, event: Event, code: Any) -> None:
        if code:
            self._end(code)
            event.error = self._dead
        event.done = True

    # Times

    def time_commands(self, on: bool) -> None:
        self._enter()
        self._at_once = on or self._blocking or bool(self._dead)
        if self._clock is not None:
            self._clock.close()
        self._clock = Clock(self._events, self._capturing) if on else None
        if not on:
            self._events.destroy_timed()

    def ran(self, event: Event) -> tuple[float, float] | None:
        if event.start is None or event.native is None or not event.done or event.error:
            return None
        self._enter()
        try:
            start = event.base.seconds + elapsed(event.base.native, event.start)
            return start, start + elapsed(event.start, event.native)
        except CudaError:  # the device has failed since
            return None

    # Life cycle

    def close(self) -> None:
        self._enter()
        for queue in self._queues:
            cu.cuStreamSynchronize(queue)

    def abandon(self) -> None:
        # CUDA cannot be used after a fork: a child must not even release what its parent created.
        self._abandoned = True
        self._compiler.modules.abandoned = self._captured.abandoned = True

    def __del__(self) -> None:
        if getattr(self, "_abandoned", True):  # also where __init__ failed
            return
        self._enter()
        for queue in self._queues:
            cu.cuStreamDestroy(queue)
        self._events.destroy()


def _address(array: Bytes) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
