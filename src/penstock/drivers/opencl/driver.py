"""The OpenCL driver, on PyOpenCL: every platform's GPUs, and the CPU through PoCL.

Memory comes in one of three kinds, by what the device offers:

- `svm`: fine-grained shared virtual memory. Host and device use the same pointer, so mapping is free.
- `mapped`: buffers in memory that the device shares with the host; mapping takes a call but no copy.
- `device`: buffers in the device's own memory; data goes through pinned staging memory.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyopencl as cl

from penstock.drivers.driver import (
    KERNEL_COUNTERS,
    Args,
    Bytes,
    Driver,
    Event,
    Grid,
    Kernel,
    Launcher,
    Memory,
    Queue,
    Source,
    Waits,
)
from penstock.drivers.opencl import pocl, pocl_cpu
from penstock.drivers.opencl.devices import MemoryKind, best_memory_kind, opencl_capabilities
from penstock.drivers.opencl.inline import InlineDevice, InlineLaunch, InlineProgram, inline_launch
from penstock.drivers.opencl.natives import Clock, open_queue, typed_kernel
from penstock.drivers.opencl.programs import ProgramCache
from penstock.errors import CompileError, DeviceError
from penstock.lru import LRU

_NOTHING = np.zeros(1, np.uint8)
_MAX_PARTS = 256  # sub-buffers kept for an allocation
_LARGE = 4 << 20  # bytes from which on the size of pages matters
_DEFAULT_ALIGNMENT = 0  # means that of OpenCL's widest vector type, 128 bytes
_RW = cl.mem_flags.READ_WRITE
_SVM = cl.svm_mem_flags.READ_WRITE | cl.svm_mem_flags.SVM_FINE_GRAIN_BUFFER
_PROFILE = cl.profiling_info
_INLINE_SECONDS = 8e-6  # what a launch takes that the calling thread runs, from the operator on
_ROUND_QUOTIENTS = "-cl-fp32-correctly-rounded-divide-sqrt"
_numbers = itertools.count()  # of drivers
_STATUS = cl.event_info.COMMAND_EXECUTION_STATUS
_READ, _READ_WRITE = cl.map_flags.READ, cl.map_flags.READ | cl.map_flags.WRITE
# Typed as Any: their stubs require keywords, which would cost a third of a microsecond for every launch.
_enqueue_kernel: Any = cl.enqueue_nd_range_kernel
_enqueue_map: Any = cl.enqueue_map_buffer
_NO_MEMORY = {
    cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE,
    cl.status_code.OUT_OF_RESOURCES,
    cl.status_code.OUT_OF_HOST_MEMORY,
    cl.status_code.INVALID_BUFFER_SIZE,
}


class OpenCLDriver(Driver):
    """An OpenCL device."""

    times = True

    def __init__(self, device: cl.Device, name: str, memory: MemoryKind | None = None) -> None:
        self._memory_kind = memory or best_memory_kind(device)
        self._number = next(_numbers)
        super().__init__(name, opencl_capabilities(device, self._memory_kind))
        self._device = device
        self._inline_native = pocl.inline_device(device) if self._memory_kind == "svm" else None
        both = [native for native in (device, self._inline_native) if native is not None]
        self._context = cl.Context(both)
        self._inline: InlineDevice | None = None  # unless it is asked for
        self._last: Event | None = None  # the last command of `compute`; None if it is known to be done
        self._maps = open_queue(self._context, device)  # always idle, so that a map waits for nothing else
        # PoCL crashes where two threads map and unmap a buffer. A finalizer may free memory at any time.
        self._mapping = threading.RLock()
        self._clock: Clock | None = None  # while commands are timed
        self._open_queues(timed=False)
        self._cache = pocl.cache() if device.platform.name == pocl.PLATFORM else ProgramCache()
        self._copies: deque[Event] = deque()  # kept until done, because PyOpenCL's destructor waits for them

    def _open_queues(self, timed: bool) -> None:
        self.compute, self.incoming, self.outgoing = (
            open_queue(self._context, self._device, timed) for _ in range(3)
        )
        inline = () if self._inline is None else (self._inline.open_queue(timed),)
        self._queues = (self.compute, self.incoming, self.outgoing, self._maps, *inline)

    # Memory

    def allocate(self, nbytes: int, pinned: bool = False) -> Memory:
        try:
            memory = self._allocate(nbytes, pinned)
        except cl.Error as error:
            if error.code not in _NO_MEMORY:
                raise DeviceError(str(error), f"allocation of {nbytes} bytes") from None
            raise self._no_memory(nbytes, _words(error.code)) from None
        self._allocations.add(memory)
        return memory

    def _allocate(self, nbytes: int, pinned: bool) -> Memory:
        if self._memory_kind == "svm":
            svm = cl.SVMAllocation(self._context, nbytes, _DEFAULT_ALIGNMENT, _SVM)
            host = svm.buf.view(np.uint8).reshape(-1)
            if nbytes >= _LARGE and self.capabilities.kind == "cpu":
                _prefer_huge_pages(host)
            return Memory(svm, nbytes, host, pinned)
        if pinned:
            buffer = cl.Buffer(self._context, _RW | cl.mem_flags.ALLOC_HOST_PTR, nbytes)
            return Memory(buffer, nbytes, self._mapped(buffer, _READ_WRITE, 0, nbytes), pinned)
        shared = cl.mem_flags.ALLOC_HOST_PTR if self._memory_kind == "mapped" else 0
        buffer = cl.Buffer(self._context, _RW | shared, nbytes)
        # Drivers allocate at first use, so the buffer is used now to detect a lack of memory here. (Migrating
        # it would do that too, but NVIDIA's driver crashes if another thread records a kernel meanwhile.)
        cl.enqueue_fill_buffer(self._maps, buffer, _NOTHING, 0, 1).wait()
        return Memory(buffer, nbytes, None)

    def free(self, memory: Memory) -> None:
        self._allocations.remove(memory)
        host, memory.host = memory.host, None
        native, memory.native = memory.native, None
        memory.parts = None
        if memory.pinned and self._memory_kind != "svm":
            assert host is not None
            self._unmapped(host).wait()
        native.release()

    def view(self, memory: Memory, offset: int, nbytes: int) -> Any:
        if self._memory_kind == "svm":
            assert memory.host is not None
            return cl.SVM(memory.host[offset : offset + nbytes])
        # Sub-buffers are kept with their memory: NVIDIA's driver may crash when a sub-buffer is released just
        # after a command used it, and creating them costs more than a launch.
        if memory.parts is None:
            memory.parts = LRU(_MAX_PARTS)
        part = memory.parts.use((offset, nbytes))
        if part is None:
            part = memory.parts[offset, nbytes] = memory.native.get_sub_region(offset, nbytes)
        return part

    def native_handles(self) -> int:
        # Every buffer, SVM allocation, program and queue holds a reference to the context.
        return int(self._context.reference_count)

    # Kernels

    def compile(self, source: Source, signatures: Mapping[str, Sequence[str]]) -> dict[str, Kernel]:
        if not isinstance(source, str):
            raise CompileError("an OpenCL device takes OpenCL C as text, and functions were given")
        kernels = {name: Kernel(name, signature, None) for name, signature in signatures.items()}
        program, inline = self._program(source, signatures, self._device), None
        if self._inline is not None:
            self._inline.note_compiled()
            native = self._inline.native
            build = partial(self._whole_program, source, signatures, native)
            inline = InlineProgram(self._inline, signatures, build, self._is_kept(source, native))
        try:
            for kernel in kernels.values():
                # With its program, because some implementations do not return a kernel's program.
                kernel.native = typed_kernel(program, kernel), program, inline
        except cl.Error as error:
            raise self._refusal(signatures, error) from None
        return kernels

    def _program(self, source: str, names: Collection[str], device: cl.Device) -> cl.Program:
        """A source of kernels with these names, compiled for a device or loaded from disk."""
        try:
            program = cl.Program(self._context, self._own(source))
            compile = partial(self._build, program, device, _version(source))
            if self._cache is None:
                return compile()
            description, load = self._description(source, device), partial(self._loaded, device)
            return self._cache.build(description, len(names), load, compile)
        except cl.Error as error:
            raise self._refusal(names, error) from None

    def _own(self, source: str) -> str:
        """A source that is another for each driver of the process if its kernels have counters.

        PoCL loads the code of equal sources once, and drivers run kernels at the same time.
        """
        return f"#define DRIVER {self._number}\n{source}" if KERNEL_COUNTERS in source else source

    def _refusal(self, names: Collection[str], error: cl.Error) -> CompileError:
        hint = pocl_cpu.HINT if pocl_cpu.REFUSED in str(error) else ""
        return CompileError(f"{self.name} refused the source of {sorted(names)}:\n{error}{hint}")

    def _whole_program(self, source: str, names: Collection[str], device: cl.Device) -> cl.Program:
        """The same with the code of all its kernels, which is kept on disk."""
        program = self._program(source, names, device)
        if self._cache is not None:
            self._cache.keep(self._description(source, device))
        return program

    def compile_ahead(
        self, source: str, signatures: Mapping[str, Sequence[str]], groups: Mapping[str, Grid]
    ) -> None:
        self._whole_program(source, signatures, self._device)

    @property
    def keeps_compiled(self) -> bool:
        return self._cache is not None

    def has_compiled(self, source: str) -> bool:
        return self._is_kept(source, self._device)

    def _is_kept(self, source: str, device: cl.Device) -> bool:
        return self._cache is not None and self._cache.has(self._description(source, device))

    def _description(self, source: str, device: cl.Device) -> str:
        """All that the compiled code of a source depends on."""
        version = device.platform.name, device.version, device.driver_version, device.name
        parts = *version, pocl_cpu.given_name(device), *self._options, pocl.extra_flags(), self._own(source)
        return "\n".join(parts)

    @property
    def _options(self) -> list[str]:
        """The options for the compiler: no warnings, and quotients and roots that are rounded correctly."""
        return ["-w", *([_ROUND_QUOTIENTS] if self.capabilities.rounds_quotients else [])]

    def _build(self, program: cl.Program, device: cl.Device, version: Sequence[str] = ()) -> cl.Program:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cl.CompilerWarning)
            # Without PyOpenCL's cache on disk, which is never emptied: drivers have their own.
            program.build([*version, *self._options], devices=[device], cache_dir=False)  # type: ignore[arg-type]
            return program

    def _loaded(self, device: cl.Device, binary: bytes) -> cl.Program | None:
        """A program from its binary; None if the driver refuses it, as it may do after an update."""
        try:
            return self._build(cl.Program(self._context, [device], [binary]), device)
        except cl.Error:
            return None

    def launch(
        self, queue: Queue, kernel: Kernel, grid: Grid, group: Grid, args: Args, waits: Waits
    ) -> Event:
        if self._cache is not None:
            self._cache.save_if_due()
        native, *_ = kernel.native
        try:
            native.set_args(*args)
            return self._noted(queue, _enqueue_kernel(queue, native, grid, group, None, waits, True, False))
        except (cl.Error, RuntimeError) as error:
            raise DeviceError(str(error)) from None

    def launcher(self, kernel: Kernel, grid: Grid, group: Grid) -> Launcher:
        inline = inline_launch(kernel.native[-1], kernel, grid, group)
        if inline is None:
            return super().launcher(kernel, grid, group)

        def launch(queue: Queue, args: Args, waits: Waits) -> Event | None:
            try:
                if inline.is_ready() and not waits and self._may_run_inline(queue):
                    event = inline.run(args)
                    # Where something is timed or has failed, the event tells of it.
                    return event if self._clock is not None or event.get_info(_STATUS) else None
            except cl.Error as error:
                raise DeviceError(str(error)) from None
            return self.launch(queue, kernel, grid, group, args, waits)

        return launch

    def launch_inline(self) -> bool:
        if self._inline is None and self._inline_native is not None and self._cache is not None:
            self._inline = InlineDevice(self._context, self._inline_native)
            self._queues += (self._inline.queue,)
            self.launch_seconds = _INLINE_SECONDS
        return self._inline is not None

    def _noted(self, queue: Queue, event: Event) -> Event:
        """An event of a queue, which is noted if launches on it may be inline."""
        if queue is self.compute:
            self._last = event
        return event

    def _may_run_inline(self, queue: Queue) -> bool:
        """Whether all commands of a queue are done, so that what runs now is in order, and would not wait."""
        if queue is not self.compute or (self._last is not None and not self.is_done(self._last)):
            return False
        self._last = None
        return self._cache is not None and not self._cache.is_compiling

    def bind(self, kernel: Kernel, grid: Grid, group: Grid, args: Args) -> Any:
        _, program, inline = kernel.native
        try:
            native = typed_kernel(program, kernel)
            native.set_args(*args)
        except (cl.Error, RuntimeError) as error:
            raise DeviceError(str(error)) from None
        return _Bound(native, grid, group, inline_launch(inline, kernel, grid, group, args))

    def rebind(self, bound: Any, position: int, dtype: np.dtype[Any], arg: Any) -> None:
        scalar = isinstance(arg, (int, float))
        value = dtype.type(arg) if scalar else arg
        _checked(bound.native.set_arg, position, value)
        if bound.inline is not None:
            _checked(bound.inline.set_arg, position, value)

    def replay(self, queue: Queue, bound: Sequence[Any], waits: Waits, events: list[Event]) -> None:
        if self._cache is not None:
            self._cache.save_if_due()
        try:
            for native, grid, group, inline in bound:
                if inline is not None and inline.is_ready() and not waits and self._may_run_inline(queue):
                    events.append(inline.run())
                    continue
                event = _enqueue_kernel(queue, native, grid, group, None, waits, True, False)
                events.append(self._noted(queue, event))
                waits = None  # the queue is in order, so the others wait with the first
        except cl.Error as error:
            raise DeviceError(str(error)) from None

    # Copies

    def write(self, queue: Queue, memory: Memory, offset: int, source: Bytes, waits: Waits) -> Event:
        if self._memory_kind == "svm":
            target = self.view(memory, offset, source.nbytes)
            return self._copy(queue, target, cl.SVM(source), waits, is_blocking=False)
        return self._copy(queue, memory.native, source, waits, dst_offset=offset, is_blocking=False)

    def read(self, queue: Queue, target: Bytes, memory: Memory, offset: int, waits: Waits) -> Event:
        if self._memory_kind == "svm":
            source = self.view(memory, offset, target.nbytes)
            return self._copy(queue, cl.SVM(target), source, waits, is_blocking=False)
        return self._copy(queue, target, memory.native, waits, src_offset=offset, is_blocking=False)

    def copy(
        self, queue: Queue, target: Memory, to: int, source: Memory, start: int, nbytes: int, waits: Waits
    ) -> Event:
        if self._memory_kind == "svm":
            assert target.host is not None
            part = target.host[to : to + nbytes]
            return self.read(queue, part, source, start, waits)
        offsets = {"src_offset": start, "dst_offset": to}
        return self._copy(queue, target.native, source.native, waits, byte_count=nbytes, **offsets)

    def _copy(self, queue: Queue, target: Any, source: Any, waits: Waits, **how: int) -> Event:
        event = self._noted(queue, _checked(cl.enqueue_copy, queue, target, source, wait_for=waits, **how))
        self._release_copies()
        self._copies.append(event)
        return event

    def _release_copies(self) -> None:
        """Let go of copies that are done, and of the arrays that events keep until they are waited for."""
        while self._copies and self.is_done(self._copies[0]):
            with suppress(cl.Error):  # its failure is told by `failures`
                self._copies[0].wait()
            self._copies.popleft()

    def map(self, memory: Memory, offset: int, nbytes: int, writable: bool) -> Bytes:
        if memory.host is not None:
            return memory.host[offset : offset + nbytes]
        flags = _READ_WRITE if writable else _READ
        mapped: Bytes = _checked(self._mapped, memory.native, flags, offset, nbytes)
        return mapped

    def unmap(self, memory: Memory, mapped: Bytes) -> Event | None:
        if memory.host is not None:
            return None
        event = _checked(self._unmapped, mapped)
        self._maps.flush()
        return event

    def _mapped(self, buffer: cl.Buffer, flags: int, offset: int, nbytes: int) -> Bytes:
        with self._mapping:
            mapped: Bytes = _enqueue_map(self._maps, buffer, flags, offset, (nbytes,), np.uint8)[0]
        return mapped

    def _unmapped(self, mapped: Bytes) -> Event:
        with self._mapping:
            return mapped.base.release(self._maps)  # type: ignore[union-attr]

    # Order and completion

    def flush(self, queue: Queue) -> None:
        _checked(queue.flush)

    def is_done(self, event: Event) -> bool:
        status: int = event.get_info(_STATUS)
        return status <= 0  # 0 means complete, negative values are errors

    def wait(self, event: Event) -> None:
        try:
            event.wait()
        except cl.Error:
            if event.get_info(_STATUS) > 0:
                raise  # the wait has failed, not the command

    def failures(self, events: Sequence[Event]) -> list[tuple[int, str]]:
        try:
            if len(events) == 1:
                events[0].wait()  # the event of a copy releases its array by this
            else:
                cl.wait_for_events(list(events))  # raises if any of the commands has failed
                self._release_copies()
            return []
        except cl.Error:
            statuses = [event.get_info(_STATUS) for event in events]
        return [(position, _words(status)) for position, status in enumerate(statuses) if status < 0]

    # Times

    def time_commands(self, on: bool) -> None:
        # Queues with profiling are slower, so they are used only while commands are timed.
        for queue in self._queues:
            queue.finish()
        self._copies.clear()  # an event keeps its queue alive
        self._last = None
        self._open_queues(on)
        self._clock = Clock(open_queue(self._context, self._device, timed=True)) if on else None

    def ran(self, event: Event) -> tuple[float, float] | None:
        clock = self._clock
        if clock is None:
            return None
        try:
            start = event.get_profiling_info(_PROFILE.START)
            end = event.get_profiling_info(_PROFILE.END)
        except cl.Error:  # the command failed, or was recorded before
            return None
        return clock.on_host(start), clock.on_host(end)

    # Life cycle

    def close(self) -> None:
        if self._inline is not None:
            self._inline.close()
        for queue in self._queues:
            queue.finish()
        if self._cache is not None:
            self._cache.save()

    def abandon(self) -> None:
        # The child does not have PoCL's threads, so destructors could wait for ever: they must never run.
        natives = [part for memory in self._allocations for part in (memory.native, memory.host)]
        for native in (self._context, self._clock, self._last, *self._queues, *self._copies, *natives):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))


class _Bound(NamedTuple):
    """A launch with its arguments."""

    native: cl.Kernel
    grid: Grid
    group: Grid
    inline: InlineLaunch | None  # what runs it in the calling thread


def _prefer_huge_pages(array: Bytes) -> None:
    """Ask Linux for pages of 2 MiB, as NumPy does for large arrays, so that there are fewer TLB misses."""
    if sys.platform == "linux":
        start = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = array.ctypes.data + array.nbytes - start
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), mmap.MADV_HUGEPAGE)  # may be refused


def _version(source: str) -> list[str]:
    """The option for the version of the language, if a source needs another than compilers take."""
    return ["-cl-std=CL2.0"] if KERNEL_COUNTERS in source else []


def _checked(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except cl.Error as error:
        raise DeviceError(str(error)) from None


def _words(code: int) -> str:
    return str(cl.status_code.to_string(code, f"OpenCL error {code}"))  # type: ignore[operator]
