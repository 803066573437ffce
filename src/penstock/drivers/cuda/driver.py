"""The CUDA driver, on NVIDIA's cuda.core and the driver API of its bindings: NVIDIA's GPUs.

Kernels are C that NVRTC compiles for the device, or the launches of a library. A program's launches can
become one graph, whose arguments still change one by one.

An error inside a kernel, such as an address that nobody allocated, ends the device for this process: CUDA
answers every later call with it. Commands that were not known to be done by then have all failed, and so have
those that are recorded later; the first of them is told.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from threading import get_ident
from time import perf_counter
from typing import Any

import numpy as np
from cuda.bindings import driver as cu
from cuda.bindings import nvrtc

from penstock.drivers.binaries import Binaries
from penstock.drivers.driver import (
    Bytes,
    Capabilities,
    Driver,
    Event,
    Grid,
    Kernel,
    Memory,
    Queue,
    Source,
    parameter_dtypes,
)
from penstock.errors import CompileError, DeviceError, OutOfDeviceMemory

_MAPPED_FROM = 32 << 20  # bytes, from which on memory is mapped piece by piece
_PIECE = 64 << 20  # bytes of the pieces
_CLOCK_SECONDS = 1.0  # after which the device's clock is compared with the host's again
_ALIGNMENT = 256  # bytes, as cuMemAlloc aligns, and the unit of places in a kernel
_MAX_IDLE_EVENTS = 1024
_SLOT = 8  # bytes of one argument in a launch's block; no scalar has more
# How `struct` writes a scalar, by NumPy's word for it.
_FORMATS = {"b1": "?", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q"}
_FORMATS |= {"f2": "e", "f4": "f", "f8": "d"}
_UNTIMED = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
_TIMED = cu.CUevent_flags.CU_EVENT_DEFAULT
_NOT_READY = cu.CUresult.CUDA_ERROR_NOT_READY
_NO_MEMORY = (
    cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY,
    cu.CUresult.CUDA_ERROR_INVALID_VALUE,  # sizes that no device could have
)
_Attribute = cu.CUdevice_attribute
_FATAL = {  # errors after which CUDA accepts nothing more from the process
    cu.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,
    cu.CUresult.CUDA_ERROR_LAUNCH_TIMEOUT,
    cu.CUresult.CUDA_ERROR_ASSERT,
    cu.CUresult.CUDA_ERROR_HARDWARE_STACK_ERROR,
    cu.CUresult.CUDA_ERROR_ILLEGAL_INSTRUCTION,
    cu.CUresult.CUDA_ERROR_MISALIGNED_ADDRESS,
    cu.CUresult.CUDA_ERROR_INVALID_ADDRESS_SPACE,
    cu.CUresult.CUDA_ERROR_INVALID_PC,
    cu.CUresult.CUDA_ERROR_LAUNCH_FAILED,
    cu.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE,
    cu.CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED,
    cu.CUresult.CUDA_ERROR_UNKNOWN,
}

_ELSEWHERE = {  # what CUDA says to a thread whose current device is another, or none
    cu.CUresult.CUDA_ERROR_INVALID_CONTEXT,
    cu.CUresult.CUDA_ERROR_INVALID_HANDLE,
}

_contexts: dict[int, Any] = {}  # by device; kept for the life of the process, as other libraries do
_contexts_lock = threading.Lock()
_import_lock = threading.Lock()


class _CudaError(Exception):
    """A call that failed, before it is known what for."""

    def __init__(self, code: Any) -> None:
        super().__init__(_words(code))
        self.code = code


def find_devices() -> list[int]:
    """The numbers of the CUDA devices, the largest memory first. Raises DeviceError with CUDA's reason."""
    try:
        _checked(cu.cuInit(0))
        count = _checked(cu.cuDeviceGetCount())
    except (_CudaError, RuntimeError) as error:  # RuntimeError: the library of NVIDIA's driver is not there
        raise DeviceError(str(error)) from None
    sizes = {number: _checked(cu.cuDeviceTotalMem(_device(number))) for number in range(count)}
    return sorted(sizes, key=lambda number: -sizes[number])


class CudaDriver(Driver):
    """One CUDA device."""

    reaches_pinned = True
    times = True

    def __init__(self, device: int, name: str) -> None:
        self.name = name
        self.capabilities = cuda_capabilities(device)
        self._device = _device(device)
        self._context = _context(device)
        self._enter()
        self._architecture = _architecture(device)
        self._maps = bool(
            _attribute(device, _Attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
        )
        self._location = cu.CUmemLocation()
        self._location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._location.id = device
        made = [_checked(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)) for _ in range(4)]
        self.compute, self.incoming, self.outgoing, self._capturing = self._queues = made
        # CUDA's own setting. Here, too, every command then waits for its end, and failures are told exactly.
        self._blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
        self.graphs = not self._blocking
        self._at_once = self._blocking  # whether every command has an event of its own
        self._clock: _Clock | None = None  # while commands are timed
        self._binaries = Binaries()
        self._lock = threading.Lock()
        self._allocations: dict[Memory, int] = {}  # with the bytes of the mapped ones; 0 for others
        self._allocated = 0
        self._modules = _Alive()
        self._captured = _Alive()
        self._idle_events: deque[Any] = deque()
        self._idle_timed: deque[Any] = deque()  # the same of events that know their time
        self._events = 0  # native ones, idle or in use
        self._open: dict[Queue, _Event] = {}  # by queue, of what was recorded since the last flush
        self._starts: dict[Queue, tuple[Any, _Base]] = {}  # by queue, of the command that comes next
        self._launcher = 0  # the thread that launched last
        self._dead = ""  # why every call fails
        self._abandoned = False

    # Memory

    def allocate(self, nbytes: int, pinned: bool = False) -> Memory:
        self._enter()
        mapped = 0
        try:
            if pinned:
                address = int(_checked(cu.cuMemHostAlloc(nbytes, cu.CU_MEMHOSTALLOC_PORTABLE)))
            elif self._maps and nbytes >= _MAPPED_FROM:
                address, mapped = self._map(nbytes)
            else:
                address = int(_checked(cu.cuMemAlloc(nbytes)))
        except _CudaError as error:
            if error.code in _FATAL:
                self._end(error.code)
                raise DeviceError(
                    f"a command before it failed ({error})", f"allocation of {nbytes} bytes"
                ) from None
            if error.code not in _NO_MEMORY:
                raise DeviceError(str(error), f"allocation of {nbytes} bytes") from None
            largest = self.capabilities.max_allocation_bytes
            hint = f"; one allocation may have {largest} bytes there" if nbytes > largest else ""
            raise OutOfDeviceMemory(
                f"{self.name} has no {nbytes} bytes ({error}){hint}", asked=nbytes
            ) from None
        host = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)) if pinned else None
        memory = Memory(address, nbytes, host, pinned)
        with self._lock:
            self._allocations[memory] = mapped
            self._allocated += nbytes
        return memory

    def _map(self, nbytes: int) -> tuple[int, int]:
        """A range of addresses with pieces of memory behind it: none need be as large as the whole."""
        how = cu.CUmemAllocationProp()
        how.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        how.location = self._location
        least = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granule = _checked(cu.cuMemGetAllocationGranularity(how, least))
        total = -(-nbytes // granule) * granule
        start = int(_checked(cu.cuMemAddressReserve(total, 0, 0, 0)))
        mapped = 0
        try:
            while mapped < total:
                size = min(_PIECE, total - mapped)
                piece = _checked(cu.cuMemCreate(size, how, 0))
                try:
                    _checked(cu.cuMemMap(start + mapped, size, 0, piece, 0))
                finally:
                    cu.cuMemRelease(piece)  # it stays for as long as it is mapped
                mapped += size
            access = cu.CUmemAccessDesc()
            access.location = self._location
            access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            _checked(cu.cuMemSetAccess(start, total, [access], 1))
        except BaseException:
            _unmap(start, mapped, total)
            raise
        return start, total

    def free(self, memory: Memory) -> None:
        with self._lock:
            mapped = self._allocations.pop(memory)
            self._allocated -= memory.nbytes
        address, memory.native, memory.host = memory.native, None, None
        if self._abandoned:
            return
        self._enter()
        # A device that has failed refuses these, too, and its memory goes with the process.
        if mapped:
            _unmap(address, mapped, mapped)
        elif memory.pinned:
            cu.cuMemFreeHost(address)
        else:
            cu.cuMemFree(address)

    def view(self, memory: Memory, offset: int, nbytes: int) -> Any:
        return memory.native + offset

    @property
    def allocated_bytes(self) -> int:
        return self._allocated

    def native_handles(self) -> int:
        events = self._events - len(self._idle_events) - len(self._idle_timed)
        return len(self._allocations) + len(self._modules.found) + len(self._captured.found) + events

    # Kernels

    def compile(self, source: Source, signatures: Mapping[str, Sequence[str]]) -> dict[str, Kernel]:
        dtypes = {name: parameter_dtypes(name, signature) for name, signature in signatures.items()}
        self._enter()
        if not isinstance(source, str):
            return {name: self._library(name, source, signature) for name, signature in signatures.items()}
        try:
            module = _Module(self._code(source), self._modules)
            kernels = {}
            for name, signature in signatures.items():
                function = _Function(module, name, signature, dtypes[name])
                kernels[name] = Kernel(name, signature, _Launch(function))
        except _CudaError as error:
            raise CompileError(f"{self.name} refused the code of {sorted(signatures)}: {error}") from None
        return kernels

    def _library(self, name: str, functions: Mapping[str, Any], signature: Sequence[str]) -> Kernel:
        launch = functions.get(name)
        if not callable(launch) or not hasattr(launch, "prepare"):
            raise CompileError(
                f"a CUDA device takes CUDA C as text, or launches of a library, which have a method "
                f"`prepare`; functions were given, and {name!r} is no such launch"
            )
        launch.prepare(self)
        self._enter()
        return Kernel(name, signature, launch)

    def _code(self, text: str) -> bytes:
        """The code of a text for this device, from the disk where it was compiled before."""
        said = f"{nvrtc.nvrtcVersion()[1:]} {self._architecture}\n{text}"
        code = self._binaries.get(said)
        if code is None:
            code = compile_text(text, self._architecture)
            self._binaries.put(said, code)
        return code

    def launch(
        self,
        queue: Queue,
        kernel: Kernel,
        grid: Grid,
        group: Grid,
        args: Sequence[Any],
        waits: list[Event] | None,
    ) -> Event:
        bound = kernel.native
        if isinstance(bound, _Launch):  # calls on one queue come one after another, so it serves them all
            bound.set(grid, group, args)
        else:
            bound = self.bind(kernel, grid, group, args)
        try:
            # Without entering, which is a tenth of a launch: mostly the thread has launched something before.
            if waits or self._launcher != get_ident() or self._clock is not None:
                self._begin(queue, waits)
                self._launcher = get_ident()
            if self._clock is not None:
                self._note_start(queue, self._clock)
            try:
                bound.record(queue)
            except _CudaError as error:
                if error.code not in _ELSEWHERE:
                    raise
                self._enter()
                bound.record(queue)
        except _CudaError as error:
            self._refuse(error)
        return self._event(queue)

    def bind(self, kernel: Kernel, grid: Grid, group: Grid, args: Sequence[Any]) -> Any:
        if isinstance(kernel.native, _Launch):
            return _Launch(kernel.native.function, grid, group, args)
        return _LibraryCall(kernel.native, args)

    def rebind(self, bound: Any, position: int, dtype: np.dtype[Any], arg: Any) -> None:
        bound.change(position, arg)

    def replay(
        self, queue: Queue, bound: Sequence[Any], waits: list[Event] | None, events: list[Event]
    ) -> None:
        recorded = 0
        try:
            self._begin(queue, waits)
            for one in bound:
                if self._clock is not None:
                    self._note_start(queue, self._clock)
                one.record(queue)
                recorded += 1
                if self._at_once:
                    events.append(self._event(queue))
                    recorded = 0
        except _CudaError as error:
            self._refuse(error)
            recorded = len(bound) - len(events)
        finally:
            if recorded:
                events += [self._event(queue)] * recorded

    def capture(self, bound: Sequence[Any], after: Sequence[Sequence[int]]) -> Any:
        self._enter()
        try:
            return _Graph(bound, after, self._capturing, self._captured)
        except _CudaError as error:
            raise DeviceError(str(error)) from None

    # Copies

    def write(
        self, queue: Queue, memory: Memory, offset: int, source: Bytes, waits: list[Event] | None
    ) -> Event:
        return self._copy(queue, memory.native + offset, _address(source), source.nbytes, waits)

    def read(
        self, queue: Queue, target: Bytes, memory: Memory, offset: int, waits: list[Event] | None
    ) -> Event:
        return self._copy(queue, _address(target), memory.native + offset, target.nbytes, waits)

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
        return self._copy(queue, target.native + target_offset, source.native + source_offset, nbytes, waits)

    def _copy(self, queue: Queue, target: int, source: int, nbytes: int, waits: list[Event] | None) -> Event:
        try:
            self._begin(queue, waits)
            if self._clock is not None:
                self._note_start(queue, self._clock)
            _checked(cu.cuMemcpyAsync(target, source, nbytes, queue))
        except _CudaError as error:
            self._refuse(error)
        return self._event(queue)

    def map(self, memory: Memory, offset: int, nbytes: int, writable: bool) -> Bytes:
        raise DeviceError(f"{self.name} has memory of its own, which the host cannot map")

    def unmap(self, memory: Memory, mapped: Bytes) -> Event | None:
        raise DeviceError(f"{self.name} has memory of its own, which the host cannot map")

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
        self._settle(event, code)
        return True

    def wait(self, event: Event) -> None:
        if event.native is None:
            self.flush(event.queue)
        if not event.done:
            self._enter()
            self._settle(event, cu.cuEventSynchronize(event.native)[0])

    def failures(self, events: Sequence[Event]) -> list[tuple[int, str]]:
        return [
            (position, event.error)
            for position, event in enumerate(events)
            if self.is_done(event) and event.error
        ]

    def _enter(self) -> None:
        """Let CUDA's calls on this thread mean this device, whatever other libraries have set."""
        cu.cuCtxSetCurrent(self._context)

    def _begin(self, queue: Queue, waits: list[Event] | None) -> None:
        cu.cuCtxSetCurrent(self._context)
        if waits:
            for event in waits:
                if not event.done:
                    _checked(cu.cuStreamWaitEvent(queue, event.native, 0))

    def _refuse(self, error: _CudaError) -> None:
        """Raise what CUDA has against a command, unless that is the failure of another one."""
        if error.code not in _FATAL:
            raise DeviceError(str(error)) from None
        self._end(error.code)

    def _end(self, code: Any) -> None:
        """From here on, every command fails."""
        self._at_once = True
        self._dead = self._dead or (
            f"{_words(code)}. This command failed, or one soon after it, and the device cannot be used any "
            f"more in this process; with CUDA_LAUNCH_BLOCKING=1 in the environment it is told exactly"
        )

    def _event(self, queue: Queue) -> Event:
        """The event of what was recorded last: one for all until the next flush, because each takes time."""
        event = self._open.get(queue)
        if event is None:
            event = self._open[queue] = _Event(queue, self._idle_events)
        if self._clock is not None:
            event.start, event.base = self._starts.pop(queue, (None, None))
            event.idle = self._idle_timed  # for the event at its end has to know its time, too
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
        """Give an event its place on its queue."""
        try:
            event.native = self._mark(event.queue, event.idle)
        except _CudaError as error:
            self._refuse(error)
            event.done, event.error = True, self._dead

    def _mark(self, queue: Queue, idle: deque[Any]) -> Any:
        """A native event at this place on a queue; one of the idle ones, where there is any."""
        while len(idle) > _MAX_IDLE_EVENTS:
            self._destroy(idle)
        try:
            native = idle.pop()
        except IndexError:
            native = _checked(cu.cuEventCreate(_UNTIMED if idle is self._idle_events else _TIMED))
            self._events += 1
        try:
            _checked(cu.cuEventRecord(native, queue))
        except _CudaError:
            idle.append(native)
            raise
        return native

    def _destroy(self, idle: deque[Any]) -> None:
        cu.cuEventDestroy(idle.popleft())
        self._events -= 1

    def _settle(self, event: Event, code: Any) -> None:
        if code:
            self._end(code)
            event.error = self._dead
        event.done = True

    # Times

    def time_commands(self, on: bool) -> None:
        self._enter()
        self._at_once = on or self._blocking or bool(self._dead)
        self._clock = _Clock(lambda: self._mark(self._capturing, self._idle_timed)) if on else None
        while not on and self._idle_timed:
            self._destroy(self._idle_timed)

    def _note_start(self, queue: Queue, clock: _Clock) -> None:
        """Let the next command on a queue know when it begins."""
        if queue in self._starts:  # of a command that was refused
            self._idle_timed.append(self._starts.pop(queue)[0])
        base = clock.base(self._idle_timed)  # which has to come first
        self._starts[queue] = self._mark(queue, self._idle_timed), base

    def ran(self, event: Event) -> tuple[float, float] | None:
        if event.start is None or event.native is None or not event.done or event.error:
            return None
        self._enter()
        try:
            start = event.base.seconds + _elapsed(event.base.native, event.start)
            return start, start + _elapsed(event.start, event.native)
        except _CudaError:  # of a device that has failed since
            return None

    # Life cycle

    def close(self) -> None:
        self._enter()
        for queue in self._queues:
            cu.cuStreamSynchronize(queue)

    def abandon(self) -> None:
        # CUDA does not survive a fork: a child may not even release what its parent made.
        self._abandoned = True
        self._modules.abandoned = self._captured.abandoned = True

    def __del__(self) -> None:
        if getattr(self, "_abandoned", True):  # also where __init__ failed
            return
        self._enter()
        for queue in self._queues:
            cu.cuStreamDestroy(queue)
        for idle in (self._idle_events, self._idle_timed):
            while idle:
                cu.cuEventDestroy(idle.pop())


class _Alive:
    """Which native objects of a kind there are, and whether they may be touched."""

    def __init__(self) -> None:
        self.found: set[int] = set()  # every step on it is atomic: finalisers take no lock
        self.abandoned = False


class _Event:
    """A moment on a queue. Its native event serves the next one when nothing refers to this any more."""

    __slots__ = ("base", "done", "error", "idle", "native", "queue", "start")

    def __init__(self, queue: Queue, idle: deque[Any]) -> None:
        self.queue = queue
        self.native: Any = None  # until the queue is flushed
        self.done = False
        self.error = ""  # why the command failed
        self.idle = idle
        self.start: Any = None  # a native event before the command, where that is timed
        self.base: _Base | None = None

    def __del__(self) -> None:
        for native in (self.native, self.start):
            if native is not None:
                self.idle.append(native)  # one atomic step: a finaliser may come inside any other call


class _Base:
    """A native event whose moment is known on the host's clock: others are told by their distance from it."""

    __slots__ = ("_idle", "native", "seconds")

    def __init__(self, native: Any, seconds: float, idle: deque[Any]) -> None:
        self.native = native
        self.seconds = seconds
        self._idle = idle

    def __del__(self) -> None:
        self._idle.append(self.native)


class _Clock:
    """The device's clock on the host's."""

    def __init__(self, mark: Callable[[], Any]) -> None:
        """`mark` records a native event where nothing is in its way."""
        self._mark = mark
        self._base: _Base | None = None
        self._due = 0.0

    def base(self, idle: deque[Any]) -> _Base:
        """A moment in the last second: the two clocks drift apart, and long distances are told roughly."""
        if self._base is None or perf_counter() > self._due:
            found = []
            for _ in range(5):  # the host may be interrupted meanwhile, but not every time
                before = perf_counter()
                native = self._mark()
                _checked(cu.cuEventSynchronize(native))
                after = perf_counter()
                found.append((after - before, _Base(native, (before + after) / 2, idle)))
            self._base = min(found, key=lambda pair: pair[0])[1]
            self._due = perf_counter() + _CLOCK_SECONDS
        return self._base


class _Module:
    """Loaded code, for as long as a kernel of it is there."""

    def __init__(self, code: bytes, alive: _Alive) -> None:
        self.native = _checked(cu.cuModuleLoadData(code))
        self._alive = alive
        alive.found.add(id(self))

    def __del__(self) -> None:
        if hasattr(self, "native") and not self._alive.abandoned:
            cu.cuModuleUnload(self.native)
            self._alive.found.discard(id(self))


class _Function:
    """A kernel's code, and how each of its arguments is written into memory."""

    def __init__(
        self, module: _Module, name: str, signature: Sequence[str], dtypes: Sequence[np.dtype[Any]]
    ) -> None:
        try:
            self.native = _checked(cu.cuModuleGetFunction(module.native, name.encode()))
        except _CudaError as error:
            raise CompileError(f"the source has no kernel {name!r} ({error})") from None
        self._module = module
        kinds = [
            ("u8" if kind.endswith("*") else dtype.str[1:])
            for kind, dtype in zip(signature, dtypes, strict=True)
        ]
        self.formats = [struct.Struct(_FORMATS[kind]) for kind in kinds]
        # All arguments at once, each in a slot of its own.
        self.format = struct.Struct(
            "=" + "".join(f"{_FORMATS[kind]}{_SLOT - int(kind[1:])}x" for kind in kinds)
        )
        self.dtypes = dtypes
        sizes: list[int] = []
        while not (found := cu.cuFuncGetParamInfo(self.native, len(sizes)))[0]:
            sizes.append(found[2])
        if len(sizes) != len(signature):
            raise CompileError(
                f"kernel {name!r} has {len(sizes)} parameters, and the signature "
                f"({', '.join(signature)}) has {len(signature)}"
            )
        for position, (size, form) in enumerate(zip(sizes, self.formats, strict=True)):
            if size != form.size:
                raise CompileError(
                    f"parameter {position} of kernel {name!r} has {size} bytes, and {signature[position]!r} "
                    f"has {form.size}"
                )


class _Launch:
    """A kernel with its arguments in a block of memory, from which CUDA copies them with every launch."""

    __slots__ = ("_block", "_node", "_params", "_pointers", "_shape", "_sizes", "changes", "function")

    def __init__(
        self, function: _Function, grid: Grid = (), group: Grid = (), args: Sequence[Any] = ()
    ) -> None:
        self.function = function
        count = len(function.formats)
        self._block = (ctypes.c_uint64 * count)()
        start = ctypes.addressof(self._block)
        self._pointers = (ctypes.c_uint64 * count)(*range(start, start + _SLOT * count, _SLOT))
        self._params = ctypes.addressof(self._pointers)
        self._node: Any = None  # the launch as a graph wants it, made when first asked for
        self.changes: list[_Bound] | None = None  # of the graph that this is part of
        self._shape: tuple[Grid, Grid] | None = None
        self._sizes: tuple[int, ...] = ()
        self.set(grid, group, args)

    def set(self, grid: Grid, group: Grid, args: Sequence[Any]) -> None:
        """Give it other sizes and arguments."""
        if (grid, group) != self._shape:
            self._shape = grid, group
            self._sizes = (*grid, *(1,) * (3 - len(grid)), *group, *(1,) * (3 - len(group)))
        try:
            self.function.format.pack_into(self._block, 0, *args)
        except (struct.error, OverflowError):
            for position, arg in enumerate(args):
                self._put(position, arg)

    def _put(self, position: int, arg: Any) -> None:
        form = self.function.formats[position]
        try:
            form.pack_into(self._block, _SLOT * position, arg)
        except (struct.error, OverflowError):  # a number that NumPy would round or wrap
            form.pack_into(self._block, _SLOT * position, self.function.dtypes[position].type(arg))

    def change(self, position: int, arg: Any) -> None:
        """Give it another argument."""
        self._put(position, arg)
        if self.changes is not None:
            self.changes.append(self)

    def record(self, queue: Queue) -> None:
        """Launch it."""
        try:
            (code,) = cu.cuLaunchKernel(self.function.native, *self._sizes, 0, queue, self._params, 0)
        except OverflowError:
            code = cu.CUresult.CUDA_ERROR_INVALID_VALUE
        if code:
            raise _CudaError(code)

    def add_to(self, graph: Any, after: list[Any], queue: Queue) -> Any:
        """A node of a graph that does the same."""
        self._node = cu.CUDA_KERNEL_NODE_PARAMS()
        self._node.func = self.function.native
        self._node.gridDimX, self._node.gridDimY, self._node.gridDimZ = self._sizes[:3]
        self._node.blockDimX, self._node.blockDimY, self._node.blockDimZ = self._sizes[3:]
        self._node.kernelParams = self._params
        return _checked(cu.cuGraphAddKernelNode(graph, after, len(after), self._node))

    def update(self, graph: Any, node: Any, queue: Queue) -> None:
        """Give a node of an executable graph the arguments of this."""
        _checked(cu.cuGraphExecKernelNodeSetParams(graph, node, self._node))


class _LibraryCall:
    """A library's launch with its arguments."""

    __slots__ = ("_args", "_launch", "changes")

    def __init__(self, launch: Callable[..., None], args: Sequence[Any]) -> None:
        self._launch = launch
        self._args = list(args)
        self.changes: list[_Bound] | None = None

    def change(self, position: int, arg: Any) -> None:
        """Give it another argument."""
        self._args[position] = arg
        if self.changes is not None:
            self.changes.append(self)

    def record(self, queue: Queue) -> None:
        """Launch it."""
        try:
            self._launch(int(queue), *self._args)
        except Exception as error:  # any failure of a library is the device's
            raise DeviceError(f"{type(error).__name__}: {error}") from error

    def add_to(self, graph: Any, after: list[Any], queue: Queue) -> Any:
        """A node of a graph that does the same."""
        inside = self._captured(queue)
        try:
            return _checked(cu.cuGraphAddChildGraphNode(graph, after, len(after), inside))
        finally:
            cu.cuGraphDestroy(inside)

    def update(self, graph: Any, node: Any, queue: Queue) -> None:
        """Give a node of an executable graph what the library makes of the arguments now."""
        inside = self._captured(queue)
        try:
            _checked(cu.cuGraphExecChildGraphNodeSetParams(graph, node, inside))
        finally:
            cu.cuGraphDestroy(inside)

    def _captured(self, queue: Queue) -> Any:
        """What the library launches, as a graph."""
        # Without CUDA's checks: another thread, or a finaliser on this one, may allocate and free meanwhile,
        # which touches nothing that is captured.
        _checked(cu.cuStreamBeginCapture(queue, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        try:
            self.record(queue)
        except BaseException:
            cu.cuGraphDestroy(cu.cuStreamEndCapture(queue)[1])
            raise
        return _checked(cu.cuStreamEndCapture(queue))


_Bound = _Launch | _LibraryCall


class _Graph:
    """Launches as one. Where an argument of theirs changes, so does their node, before the next launch."""

    def __init__(
        self, bound: Sequence[_Bound], after: Sequence[Sequence[int]], queue: Queue, alive: _Alive
    ) -> None:
        self._bound = bound
        self._after = after
        self._queue = queue  # on which libraries' launches are captured
        self._alive = alive
        self._changes: list[_Bound] = []
        self._build()
        alive.found.add(id(self))
        for one in bound:
            one.changes = self._changes

    def _build(self) -> None:
        graph = _checked(cu.cuGraphCreate(0))
        nodes: dict[_Bound, Any] = {}
        try:
            for number in _soonest(self._after):
                before = [nodes[self._bound[one]] for one in self._after[number]]
                nodes[self._bound[number]] = self._bound[number].add_to(graph, before, self._queue)
            native = _checked(cu.cuGraphInstantiate(graph, 0))
        except BaseException:
            cu.cuGraphDestroy(graph)
            raise
        self._graph, self._native, self._nodes = graph, native, nodes  # nodes live as long as their graph

    def record(self, queue: Queue) -> None:
        """Launch it."""
        if self._changes:
            self._update()
        _checked(cu.cuGraphLaunch(self._native, queue))

    def _update(self) -> None:
        try:
            for one in dict.fromkeys(self._changes):
                one.update(self._native, self._nodes[one], self._queue)
        except _CudaError as error:
            if error.code in _FATAL:
                raise
            # A library may launch other kernels for other arguments, which only a new graph can hold.
            graph, native = self._graph, self._native
            self._build()
            cu.cuGraphExecDestroy(native)
            cu.cuGraphDestroy(graph)
        self._changes.clear()

    def __del__(self) -> None:
        if not hasattr(self, "_graph") or self._alive.abandoned:
            return
        cu.cuGraphExecDestroy(self._native)
        cu.cuGraphDestroy(self._graph)
        self._alive.found.discard(id(self))
        for one in self._bound:
            if one.changes is self._changes:
                one.changes = None


def _elapsed(first: Any, last: Any) -> float:
    """Seconds between two native events."""
    return float(_checked(cu.cuEventElapsedTime(first, last))) / 1000


def _soonest(after: Sequence[Sequence[int]]) -> list[int]:
    """Launches by when they can start, those first that most others wait for, one after another.

    CUDA puts the nodes of a graph on streams in the order in which it gets them.
    """
    start, rest = [0] * len(after), [0] * len(after)
    for number, before in enumerate(after):
        start[number] = max((1 + start[one] for one in before), default=0)
    for number in range(len(after) - 1, -1, -1):
        for one in after[number]:
            rest[one] = max(rest[one], 1 + rest[number])
    return sorted(range(len(after)), key=lambda number: (start[number], -rest[number]))


def compile_text(text: str, architecture: str) -> bytes:
    """CUDA C as code for an architecture such as `sm_90`. Raises CompileError with the compiler's words."""
    # Imported late: it takes a quarter of a second, and code that is on disk needs no compiler. By one thread
    # at a time: a second one would see the module before its names are there.
    with _import_lock:
        from cuda.core import Program, ProgramOptions

    try:
        program = Program(text, "c++", ProgramOptions(arch=architecture))
        return bytes(program.compile("cubin").code)
    except Exception as error:  # cuda.core has no public class for it
        raise CompileError(f"NVRTC refused the source:\n{error}") from None


def cuda_capabilities(device: int) -> Capabilities:
    """What a device can do, without opening it."""
    _checked(cu.cuInit(0))
    version = _checked(cu.cuDriverGetVersion())
    total = _checked(cu.cuDeviceTotalMem(_device(device)))
    return Capabilities(
        description=_checked(cu.cuDeviceGetName(256, _device(device))).split(b"\0")[0].decode(),
        vendor="NVIDIA",
        api=f"CUDA {version // 1000}.{version % 1000 // 10} ({_architecture(device)})",
        kind="gpu",
        language="cuda",
        total_bytes=total,
        max_allocation_bytes=total,
        offset_alignment=_ALIGNMENT,
        shared_memory=False,
        compute_units=_attribute(device, _Attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        max_group_size=_attribute(device, _Attribute.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
        local_bytes=_attribute(device, _Attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK),
        vector_width=1,
        float16=True,
        float64=True,
        matmul_library=find_spec("nvmath") is not None,
        tensor_cores=_attribute(device, _Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) >= 8,
    )


def _device(number: int) -> Any:
    return _checked(cu.cuDeviceGet(number))


def _attribute(device: int, which: Any) -> int:
    return int(_checked(cu.cuDeviceGetAttribute(which, _device(device))))


def _architecture(device: int) -> str:
    major = _attribute(device, _Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
    minor = _attribute(device, _Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    # From Hopper on, "a" lets code have what only this architecture has.
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def _context(device: int) -> Any:
    """The device's primary context, which libraries in this process share."""
    with _contexts_lock:
        if device not in _contexts:
            _contexts[device] = _checked(cu.cuDevicePrimaryCtxRetain(_device(device)))
        return _contexts[device]


def _unmap(start: int, mapped: int, total: int) -> None:
    if mapped:
        cu.cuMemUnmap(start, mapped)
    cu.cuMemAddressFree(start, total)


def _address(array: Bytes) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _checked(result: tuple[Any, ...]) -> Any:
    """What a call gave, or its error."""
    if result[0]:
        raise _CudaError(result[0])
    return result[1] if len(result) == 2 else result[1:]


def _words(code: Any) -> str:
    _, name = cu.cuGetErrorName(code)
    _, text = cu.cuGetErrorString(code)
    return f"{(name or b'').decode()}: {(text or b'').decode()}" if name else f"CUDA error {int(code)}"
