"""The OpenCL driver, on PyOpenCL: every platform's GPUs, and the CPU through PoCL.

Memory comes in one of three kinds, by what the device offers:

- `svm`: fine-grained shared virtual memory. Host and device use the same pointer, so mapping is free.
- `mapped`: buffers in memory that the device shares with the host; mapping takes a call but no copy.
- `device`: buffers in the device's own memory; data goes through pinned staging memory.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, Literal

import numpy as np
import pyopencl as cl

from penstock.drivers.driver import (
    Args,
    Bytes,
    Capabilities,
    Driver,
    Event,
    Grid,
    Kernel,
    Memory,
    Queue,
    Source,
    Waits,
    check_parameter_count,
    parameter_dtypes,
)
from penstock.drivers.opencl import invokers, pocl
from penstock.errors import CompileError, DeviceError
from penstock.lru import LRU

MemoryKind = Literal["svm", "mapped", "device"]

_NOTHING = np.zeros(1, np.uint8)
_MAX_PARTS = 256  # sub-buffers kept for an allocation
_LARGE = 4 << 20  # bytes from which on the size of pages matters
_LEAST_VECTOR_WIDTH = 4  # of a CPU
_BUFFER_PARAMETERS = 12  # bytes that a buffer takes of a kernel's parameters: a pointer and an offset
_OTHER_PARAMETERS = 128  # bytes for scalars
_DEFAULT_ALIGNMENT = 0  # means that of OpenCL's widest vector type, 128 bytes
_RW = cl.mem_flags.READ_WRITE
_SVM = cl.svm_mem_flags.READ_WRITE | cl.svm_mem_flags.SVM_FINE_GRAIN_BUFFER
_PROFILE = cl.profiling_info
_CLOCK_SECONDS = 1.0  # how long the measured offset of the device's clock is used
_ROUND_QUOTIENTS = "-cl-fp32-correctly-rounded-divide-sqrt"
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


def find_devices() -> list[cl.Device]:
    """Every OpenCL device: GPUs first, then other accelerators, then CPUs; the largest memory first."""
    devices: list[cl.Device] = []
    invokers.keep_in_memory()
    with pocl.own_folder():
        try:
            platforms = cl.get_platforms()
        except cl.Error:  # OpenCL reports it as an error that there is no platform
            return []
        for platform in platforms:
            with suppress(cl.Error):  # a platform whose hardware is absent
                devices += platform.get_devices()
    order = {"gpu": 0, "accelerator": 1, "cpu": 2}
    usable = [device for device in devices if device.available and device.compiler_available]
    return sorted(usable, key=lambda device: (order[_kind(device)], -device.global_mem_size))


def problem(device: cl.Device) -> str:
    """Why a device cannot be used; empty if it can."""
    return pocl.problem() if device.platform.name == pocl.PLATFORM else ""


class OpenCLDriver(Driver):
    """An OpenCL device."""

    times = True

    def __init__(self, device: cl.Device, name: str, memory: MemoryKind | None = None) -> None:
        self._memory_kind = memory or best_memory_kind(device)
        super().__init__(name, opencl_capabilities(device, self._memory_kind))
        self._context = cl.Context([device])
        self._maps = cl.CommandQueue(self._context)  # always idle, so that a map waits for nothing else
        self._clock: _Clock | None = None  # while commands are timed
        self._open_queues(timed=False)
        self._version = (device.platform.name, device.version, device.driver_version, device.name)
        self._cache = pocl.cache() if device.platform.name == pocl.PLATFORM else None
        self._copies: deque[Event] = deque()  # kept until done, because PyOpenCL's destructor waits for them

    def _open_queues(self, timed: bool) -> None:
        self.compute, self.incoming, self.outgoing = (_queue(self._context, timed) for _ in range(3))
        self._queues = (self.compute, self.incoming, self.outgoing, self._maps)

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
            host, _ = _enqueue_map(self._maps, buffer, _READ_WRITE, 0, (nbytes,), np.uint8)
            return Memory(buffer, nbytes, host, pinned)
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
            host.base.release(self._maps).wait()  # type: ignore[union-attr]  # unmaps
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
        dtypes = {name: parameter_dtypes(name, signature) for name, signature in signatures.items()}
        try:
            if self._cache is None:
                program = self._build(cl.Program(self._context, source))
            else:
                description = self._description(source)
                compile = partial(self._build, cl.Program(self._context, source))
                program = self._cache.build(description, len(signatures), self._loaded, compile)
            kernels = {}
            for name, signature in signatures.items():
                native = cl.Kernel(program, name)
                _set_types(native, signature, dtypes[name])
                # With its program, because some implementations do not return a kernel's program.
                kernels[name] = Kernel(name, signature, (native, program))
        except cl.Error as error:
            raise CompileError(f"{self.name} refused the source of {sorted(signatures)}:\n{error}") from None
        return kernels

    def compile_ahead(self, source: str, signatures: Mapping[str, Sequence[str]]) -> None:
        kernels = self.compile(source, signatures)
        if self._cache is not None:
            self._cache.keep(self._description(source))
        kernels.clear()  # not earlier: they keep the program alive, which is saved here

    @property
    def keeps_compiled(self) -> bool:
        return self._cache is not None

    def has_compiled(self, source: str) -> bool:
        return self._cache is not None and self._cache.has(self._description(source))

    def _description(self, source: str) -> str:
        """All that the compiled code of a source depends on."""
        return "\n".join((*self._version, *self._options, pocl.extra_flags(), source))

    @property
    def _options(self) -> list[str]:
        """The options for the compiler: no warnings, and quotients and roots that are rounded correctly."""
        return ["-w", *([_ROUND_QUOTIENTS] if self.capabilities.rounds_quotients else [])]

    def _build(self, program: cl.Program) -> cl.Program:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cl.CompilerWarning)
            # Without PyOpenCL's cache on disk, which is never emptied: drivers have their own.
            program.build(self._options, cache_dir=False)  # type: ignore[arg-type]
            return program

    def _loaded(self, binary: bytes) -> cl.Program | None:
        """A program from its binary; None if the driver refuses it, as it may do after an update."""
        try:
            return self._build(cl.Program(self._context, self._context.devices, [binary]))
        except cl.Error:
            return None

    def launch(
        self, queue: Queue, kernel: Kernel, grid: Grid, group: Grid, args: Args, waits: Waits
    ) -> Event:
        if self._cache is not None:
            self._cache.save_if_due()
        native, _ = kernel.native
        try:
            native.set_args(*args)
            return _enqueue_kernel(queue, native, grid, group, None, waits, True, False)
        except (cl.Error, RuntimeError) as error:
            raise DeviceError(str(error)) from None

    def bind(self, kernel: Kernel, grid: Grid, group: Grid, args: Args) -> Any:
        try:
            native = cl.Kernel(kernel.native[1], kernel.name)
            _set_types(native, kernel.signature, kernel.dtypes)
            native.set_args(*args)
        except (cl.Error, RuntimeError) as error:
            raise DeviceError(str(error)) from None
        return native, grid, group

    def rebind(self, bound: Any, position: int, dtype: np.dtype[Any], arg: Any) -> None:
        scalar = isinstance(arg, (int, float))
        _checked(bound[0].set_arg, position, dtype.type(arg) if scalar else arg)

    def replay(self, queue: Queue, bound: Sequence[Any], waits: Waits, events: list[Event]) -> None:
        if self._cache is not None:
            self._cache.save_if_due()
        try:
            for native, grid, group in bound:
                events.append(_enqueue_kernel(queue, native, grid, group, None, waits, True, False))
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
        event = _checked(cl.enqueue_copy, queue, target, source, wait_for=waits, **how)
        while self._copies and self.is_done(self._copies[0]):
            self._copies.popleft()
        self._copies.append(event)
        return event

    def map(self, memory: Memory, offset: int, nbytes: int, writable: bool) -> Bytes:
        if memory.host is not None:
            return memory.host[offset : offset + nbytes]
        flags = _READ_WRITE if writable else _READ
        mapped: Bytes
        mapped, _ = _checked(_enqueue_map, self._maps, memory.native, flags, offset, (nbytes,), np.uint8)
        return mapped

    def unmap(self, memory: Memory, mapped: Bytes) -> Event | None:
        if memory.host is not None:
            return None
        event = _checked(mapped.base.release, self._maps)  # type: ignore[union-attr]
        self._maps.flush()
        return event

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
        self._open_queues(on)
        self._clock = _Clock(self._context) if on else None

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
        for queue in self._queues:
            queue.finish()
        if self._cache is not None:
            self._cache.save()

    def abandon(self) -> None:
        # The child does not have PoCL's threads, so destructors could wait for ever: they must never run.
        natives = [part for memory in self._allocations for part in (memory.native, memory.host)]
        for native in (self._context, self._clock, *self._queues, *self._copies, *natives):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))


class _Clock:
    """Converts times of the device's clock to the host's. Both know when a command was recorded."""

    def __init__(self, context: cl.Context) -> None:
        self._queue = _queue(context, timed=True)  # always idle
        self._offset = self._due = 0.0
        self._set()

    def on_host(self, nanoseconds: int) -> float:
        """A time of the device in seconds of the host's clock."""
        if perf_counter() > self._due:  # the clocks drift
            self._set()
        return nanoseconds * 1e-9 + self._offset

    def _set(self) -> None:
        measured = []
        for _ in range(5):  # the best of 5, since the host may be interrupted in between
            before = perf_counter()
            event = cl.enqueue_marker(self._queue)
            after = perf_counter()
            event.wait()
            queued: Any = event.get_profiling_info(_PROFILE.QUEUED)
            measured.append((after - before, (before + after) / 2 - queued * 1e-9))
        self._offset = min(measured)[1]
        self._due = perf_counter() + _CLOCK_SECONDS


def _queue(context: cl.Context, timed: bool) -> cl.CommandQueue:
    if not timed:
        return cl.CommandQueue(context)
    return cl.CommandQueue(context, properties=cl.command_queue_properties.PROFILING_ENABLE)


def opencl_capabilities(device: cl.Device, memory: MemoryKind | None = None) -> Capabilities:
    """What `device` can do, without opening it."""
    extensions = device.extensions.split()
    kind = _kind(device)
    return Capabilities(
        description=device.name.strip(),
        vendor=device.vendor.strip(),
        api=f"{device.version.split(' PoCL')[0].strip()} ({device.platform.name.strip()})",
        kind=kind,
        language="opencl",
        total_bytes=device.global_mem_size,
        max_allocation_bytes=device.max_mem_alloc_size,
        offset_alignment=max(device.mem_base_addr_align // 8, 1),
        shared_memory=(memory or best_memory_kind(device)) != "device",
        compute_units=device.max_compute_units,
        max_group_size=device.max_work_group_size,
        local_bytes=device.local_mem_size,
        # By the device's type: some CPUs report 1, because their compiler vectorizes.
        vector_width=max(device.native_vector_width_float, _LEAST_VECTOR_WIDTH) if kind == "cpu" else 1,
        float16="cl_khr_fp16" in extensions,
        float64="cl_khr_fp64" in extensions,
        max_buffers=_most_buffers(device),
        rounds_quotients=bool(device.single_fp_config & cl.device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT),
        offloads=kind != "cpu" and (memory or best_memory_kind(device)) == "device",
        cache_bytes=device.global_mem_cache_size if kind == "cpu" else 0,
    )


def _most_buffers(device: cl.Device) -> int:
    """Limited by the bytes of a kernel's parameters. PoCL reports such a limit, but has none."""
    if device.platform.name == pocl.PLATFORM:
        return 1 << 16
    return (device.max_parameter_size - _OTHER_PARAMETERS) // _BUFFER_PARAMETERS


def _kind(device: cl.Device) -> Literal["gpu", "cpu", "accelerator"]:
    if device.type & cl.device_type.GPU:
        return "gpu"
    return "cpu" if device.type & cl.device_type.CPU else "accelerator"


def best_memory_kind(device: cl.Device) -> MemoryKind:
    """The kind of memory that saves the most copies on `device`."""
    with suppress(cl.Error):  # OpenCL 1.x does not have the query
        if device.svm_capabilities & cl.device_svm_capabilities.FINE_GRAIN_BUFFER:
            return "svm"
    return "mapped" if device.host_unified_memory else "device"


def _prefer_huge_pages(array: Bytes) -> None:
    """Ask Linux for pages of 2 MiB, as NumPy does for large arrays, so that there are fewer TLB misses."""
    if sys.platform == "linux":
        start = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = array.ctypes.data + array.nbytes - start
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), mmap.MADV_HUGEPAGE)  # may be refused


def _set_types(native: cl.Kernel, signature: Sequence[str], dtypes: Sequence[np.dtype[Any]]) -> None:
    check_parameter_count(native.function_name, native.num_args, signature)
    native.set_scalar_arg_dtypes(
        [None if kind.endswith("*") else dtype for kind, dtype in zip(signature, dtypes, strict=True)]
    )


def _checked(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except cl.Error as error:
        raise DeviceError(str(error)) from None


def _words(code: int) -> str:
    return str(cl.status_code.to_string(code, f"OpenCL error {code}"))  # type: ignore[operator]
