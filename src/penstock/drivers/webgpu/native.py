"""WebGPU's objects and their errors, through the C functions of wgpu-native.

wgpu-py's own objects are not used, because calls through them are slower, and each of its devices has a
thread. WebGPU reports an error to a callback, in the thread that made the call. After the call the error is
raised, or taken by code that knows which command it belongs to.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from threading import get_ident
from typing import Any

from wgpu.backends.wgpu_native import ffi, lib

from penstock.drivers.driver import Handles
from penstock.drivers.webgpu.adapters import (
    FLOAT16,
    IMMEDIATES,
    INT64,
    TIMES,
    TIMES_BETWEEN_PASSES,
    Adapter,
    text_of,
    webgpu_capabilities,
)
from penstock.drivers.webgpu.c_types import TYPES
from penstock.errors import CompileError, DeviceError, OutOfDeviceMemory

# Constants of webgpu.h and wgpu.h that cffi does not know.
MAP_READ, COPY_SRC, COPY_DST, UNIFORM, STORAGE = 0x1, 0x4, 0x8, 0x40, 0x80  # what a buffer is used for
_MAP_MODE_READ = 0x1
_COMPUTE_STAGE = 0x4
_NO_CHECKS = 0  # of indices and loops in a shader: they cost time, and other drivers have none either
_FEATURES = (IMMEDIATES, INT64, FLOAT16, TIMES, TIMES_BETWEEN_PASSES)  # requested if available
_ANY_TIME = lib.WGPUCallbackMode_AllowSpontaneous
_NULL = ffi.NULL

Told = Callable[[int, str], None]  # takes the key of a callback, and an error message or ""


class Owned:
    """Owns a native object, and releases it when it is deleted."""

    __slots__ = ("_handles", "_release", "native")

    def __init__(self, handles: Handles, native: Any, release: Callable[[Any], None]) -> None:
        self._handles = handles
        self.native = native
        self._release = release
        handles.open.add(id(self))

    def __del__(self) -> None:
        if not self._handles.abandoned and not sys.is_finalizing():
            self._release(self.native)
        self._handles.open.discard(id(self))


class NativeBuffer(Owned):
    """A native buffer."""

    __slots__ = ("nbytes",)

    def __init__(self, handles: Handles, native: Any, nbytes: int) -> None:
        super().__init__(handles, native, lib.wgpuBufferRelease)
        self.nbytes = nbytes

    def destroy(self) -> None:
        """Free its memory, even if there are references to it."""
        if not self._handles.abandoned:
            lib.wgpuBufferDestroy(self.native)


class NativeDevice:
    """A WebGPU device with its queue."""

    def __init__(self, adapter: Adapter, name: str) -> None:
        self.name = name
        self.max_buffer_bytes = webgpu_capabilities(adapter).max_allocation_bytes
        self.handles = Handles()
        self.dead = ""  # why the device was lost
        self.errors: dict[int, list[tuple[int, str]]] = {}  # by thread: the errors of its last calls
        self._layouts: dict[Hashable, Owned] = {}  # of bind groups and pipelines
        self._layouts_lock = threading.Lock()
        self.native = self._open(adapter)
        self.queue = lib.wgpuDeviceGetQueue(self.native)

    def _open(self, adapter: Adapter) -> Any:
        key = next(_keys)
        _devices[key] = self
        features = [feature for feature in _FEATURES if feature in adapter.features]
        names = [ffi.cast(TYPES["WGPUFeatureName"], feature) for feature in features]
        wanted = ffi.new(TYPES["WGPUFeatureName[]"], names)
        limits = ffi.new(TYPES["WGPULimits *"], adapter.limits)
        fields = {
            "requiredFeatureCount": len(features),
            "requiredFeatures": wanted,
            "requiredLimits": limits,
            "deviceLostCallbackInfo": _call_back(_lost, key),
            "uncapturedErrorCallbackInfo": _call_back(_failed, key, mode=False),
        }
        descriptor = ffi.new(TYPES["WGPUDeviceDescriptor *"], fields)
        request = ffi.new(TYPES["WGPURequestDeviceCallbackInfo *"], _call_back(_opened, key))
        lib.wgpuAdapterRequestDevice(adapter.native, descriptor, request[0])  # calls back before it returns
        status, device, message = _answers.pop(key)
        if status != lib.WGPURequestDeviceStatus_Success:
            raise DeviceError(f"{self.name} could not be opened: {message}")
        return device

    # Errors

    def take_errors(self) -> list[tuple[int, str]]:
        """Kind and message of the errors of the last calls of this thread."""
        return self.errors.pop(get_ident(), []) if self.errors else []

    def raise_errors(self) -> None:
        """Raise the first error of the last calls of this thread."""
        for _, words in self.take_errors():
            raise DeviceError(words)

    def require_alive(self, command: str = "") -> None:
        """Raise if the device was lost."""
        if self.dead:
            raise DeviceError(self.dead, command)

    # Objects

    def buffer(self, nbytes: int, usage: int) -> NativeBuffer:
        """A new buffer. Raises OutOfDeviceMemory."""
        largest = self.max_buffer_bytes
        if nbytes > largest:
            raise OutOfDeviceMemory(
                f"{self.name} has no {nbytes} bytes; an allocation may have at most {largest} bytes there",
                asked=nbytes,
            )
        what = f"allocation of {nbytes} bytes"
        self.require_alive(what)
        descriptor = ffi.new(TYPES["WGPUBufferDescriptor *"], {"size": nbytes, "usage": usage})
        buffer = NativeBuffer(self.handles, lib.wgpuDeviceCreateBuffer(self.native, descriptor), nbytes)
        for kind, words in self.take_errors():
            if kind == lib.WGPUErrorType_OutOfMemory:
                raise OutOfDeviceMemory(f"{self.name} has no {nbytes} bytes ({words})", asked=nbytes)
            raise DeviceError(words, what)
        return buffer

    def module(self, name: str, text: str) -> Owned:
        """A shader module from WGSL. Raises CompileError with the compiler's message."""
        self.require_alive()
        code = {"chain": {"sType": lib.WGPUSType_ShaderSourceWGSL}, "code": _string(text)}
        source = ffi.new(TYPES["WGPUShaderSourceWGSL *"], code)
        fields = {"nextInChain": ffi.cast(TYPES["WGPUChainedStruct *"], source), "label": _string(name)}
        descriptor = ffi.new(TYPES["WGPUShaderModuleDescriptor *"], fields)
        native = lib.wgpuDeviceCreateShaderModuleTrusted(self.native, descriptor, _NO_CHECKS)
        module = Owned(self.handles, native, lib.wgpuShaderModuleRelease)
        for _, words in self.take_errors():
            raise CompileError(f"{self.name} refused the source of {name!r}:\n{words}\n{text}")
        return module

    def group(self, parts: Sequence[tuple[NativeBuffer, int, int]], *, uniform: bool = False) -> Owned:
        """A bind group of storage or uniform buffers, each with an offset and a size."""
        entries = [
            {"binding": number, "buffer": buffer.native, "offset": offset, "size": size}
            for number, (buffer, offset, size) in enumerate(parts)
        ]
        array = ffi.new(TYPES["WGPUBindGroupEntry[]"], entries)
        layout = self._group_layout(len(parts), uniform)
        return self.create("BindGroup", layout=layout.native, entryCount=len(parts), entries=array)

    def pipeline(self, name: str, module: Owned, buffers: int, immediate_bytes: int | None) -> Owned:
        """A compute pipeline of a module's entry point, with so many storage buffers.

        Scalars are immediates of so many bytes; None means that they are in a uniform buffer.
        """
        layout = self._pipeline_layout(buffers, immediate_bytes)
        entry = _string(name)
        compute = {"entryPoint": entry, "module": module.native}
        return self.create("ComputePipeline", label=entry, layout=layout.native, compute=compute)

    def _group_layout(self, count: int, uniform: bool) -> Owned:
        """The layout of a bind group of storage buffers, or of uniform buffers with dynamic offsets."""

        def create() -> Owned:
            kind = lib.WGPUBufferBindingType_Uniform if uniform else lib.WGPUBufferBindingType_Storage
            entry = {"visibility": _COMPUTE_STAGE, "buffer": {"type": kind, "hasDynamicOffset": uniform}}
            entries = [{"binding": number, **entry} for number in range(count)]
            array = ffi.new(TYPES["WGPUBindGroupLayoutEntry[]"], entries)
            return self.create("BindGroupLayout", entryCount=count, entries=array)

        return self._layout(("group", count, uniform), create)

    def _pipeline_layout(self, buffers: int, immediate_bytes: int | None) -> Owned:
        groups = [self._group_layout(buffers, False)]
        if immediate_bytes is None:
            groups.append(self._group_layout(1, True))

        def create() -> Owned:
            array = ffi.new(TYPES["WGPUBindGroupLayout[]"], [group.native for group in groups])
            sizes = {"bindGroupLayoutCount": len(groups), "immediateSize": immediate_bytes or 0}
            return self.create("PipelineLayout", bindGroupLayouts=array, **sizes)

        return self._layout(("pipeline", buffers, immediate_bytes), create)

    def _layout(self, key: Hashable, create: Callable[[], Owned]) -> Owned:
        with self._layouts_lock:
            if key not in self._layouts:
                self._layouts[key] = create()
            return self._layouts[key]

    def create(self, kind: str, **fields: Any) -> Owned:
        """A native object of a kind such as "BindGroup", from the fields of its descriptor."""
        descriptor = ffi.new(TYPES[f"WGPU{kind}Descriptor *"], fields)
        native = getattr(lib, f"wgpuDeviceCreate{kind}")(self.native, descriptor)
        made = Owned(self.handles, native, getattr(lib, f"wgpu{kind}Release"))
        self.raise_errors()
        return made

    # Commands

    def encoder(self) -> Any:
        """A new command encoder."""
        return lib.wgpuDeviceCreateCommandEncoder(self.native, _NULL)

    def finish(self, encoder: Any) -> tuple[Owned, list[tuple[int, str]]]:
        """The commands of an encoder, and its errors; they may be submitted only if there are none."""
        native = lib.wgpuCommandEncoderFinish(encoder, _NULL)
        lib.wgpuCommandEncoderRelease(encoder)
        return Owned(self.handles, native, lib.wgpuCommandBufferRelease), self.take_errors()

    def write(self, buffer: NativeBuffer, offset: int, source: Any, nbytes: int) -> None:
        """Copy bytes at once, and write them to a buffer before the next submission."""
        lib.wgpuQueueWriteBuffer(self.queue, buffer.native, offset, source, nbytes)

    def submit(self, commands: Sequence[Owned]) -> int:
        """Submit commands; the index for `poll`. wgpu aborts the process if a command is invalid."""
        array = ffi.new(TYPES["WGPUCommandBuffer[]"], [command.native for command in commands])
        return int(lib.wgpuQueueSubmitForIndex(self.queue, len(commands), array))

    def expect(self, told: Told) -> int:
        """Register `told` for a callback; its key, for `when_done` or `when_mapped`."""
        key = next(_keys)
        _waiting[key] = told
        return key

    def when_done(self, expected: int) -> None:
        """Call back when everything that was submitted is done."""
        info = ffi.new(TYPES["WGPUQueueWorkDoneCallbackInfo *"], _call_back(_done, expected))
        lib.wgpuQueueOnSubmittedWorkDone(self.queue, info[0])

    def when_mapped(self, buffer: NativeBuffer, expected: int) -> None:
        """Call back when a buffer can be read."""
        info = ffi.new(TYPES["WGPUBufferMapCallbackInfo *"], _call_back(_mapped, expected))
        lib.wgpuBufferMapAsync(buffer.native, _MAP_MODE_READ, 0, buffer.nbytes, info[0])

    def read_mapped(self, buffer: NativeBuffer, start: int, target: Any, nbytes: int) -> None:
        """Copy bytes out of a mapped buffer, and unmap it."""
        mapped = lib.wgpuBufferGetConstMappedRange(buffer.native, 0, buffer.nbytes)
        ffi.memmove(ffi.from_buffer(target), ffi.cast(TYPES["uint8_t *"], mapped) + start, nbytes)
        lib.wgpuBufferUnmap(buffer.native)

    def poll(self, wait_for: int | None = None) -> None:
        """Run the callbacks of all that is done, after waiting for a submission if its index is given."""
        index = _NULL if wait_for is None else ffi.new(TYPES["WGPUSubmissionIndex *"], wait_for)
        lib.wgpuDevicePoll(self.native, wait_for is not None, index)
        if _interrupts:
            raise _interrupts.pop()

    def finish_all(self) -> None:
        """Wait for everything that was submitted."""
        lib.wgpuDevicePoll(self.native, True, _NULL)

    def __del__(self) -> None:
        if hasattr(self, "queue") and not self.handles.abandoned and not sys.is_finalizing():
            self._layouts.clear()
            lib.wgpuQueueRelease(self.queue)
            lib.wgpuDeviceRelease(self.native)


def _string(text: str) -> dict[str, Any]:
    """A text as a field of WebGPU's structures. It has to be kept alive while the structure is used."""
    data = text.encode()
    return {"data": ffi.new(TYPES["char[]"], data), "length": len(data)}


def _call_back(callback: Any, key: int, *, mode: bool = True) -> dict[str, Any]:
    """The fields of a structure that registers a callback with a key."""
    fields = {"callback": callback, "userdata1": ffi.cast(TYPES["void *"], key)}
    return {"mode": _ANY_TIME, **fields} if mode else fields


# Callbacks. They get a key, by which they look up what they are for.

_keys = itertools.count(1)
_devices: weakref.WeakValueDictionary[int, NativeDevice] = weakref.WeakValueDictionary()
_answers: dict[int, tuple[int, Any, str]] = {}  # to requests for a device
_waiting: dict[int, Told] = {}
_interrupts: list[BaseException] = []  # exceptions that interrupted a callback, to be raised by `poll`


def _callback(type_name: str) -> Callable[[Callable[..., None]], Any]:
    """A decorator for WebGPU's callbacks, which complete even if Ctrl-C interrupts them.

    If Ctrl-C is pressed while WebGPU waits, Python raises KeyboardInterrupt in the first Python code that
    runs, which is the callback, and an exception cannot pass through WebGPU. So the callback is run a second
    time, and the interrupt is kept until the call into WebGPU returns.
    """

    def native(function: Callable[..., None]) -> Any:
        def finish(_: Any, error: BaseException, trace: Any) -> None:
            names = function.__code__.co_varnames[: function.__code__.co_argcount]
            function(*(trace.tb_frame.f_locals[name] for name in names))
            _interrupts.append(error)

        return ffi.callback(TYPES[type_name], function, onerror=finish)

    return native


def _key(user: Any) -> int:
    return int(ffi.cast(TYPES["uintptr_t"], user))


@_callback("WGPURequestDeviceCallback")
def _opened(status: int, device: Any, message: Any, user: Any, _: Any) -> None:
    _answers[_key(user)] = (status, device, text_of(message))


@_callback("WGPUUncapturedErrorCallback")
def _failed(_: Any, kind: int, message: Any, user: Any, __: Any) -> None:
    device = _devices.get(_key(user))
    if device is not None:
        words = text_of(message).removeprefix("Validation Error").strip().removeprefix("Caused by:").strip()
        device.errors.setdefault(get_ident(), []).append((kind, words))


@_callback("WGPUDeviceLostCallback")
def _lost(_: Any, reason: int, message: Any, user: Any, __: Any) -> None:
    device = _devices.get(_key(user))
    if device is not None:
        why = text_of(message)
        device.dead = f"the device was lost ({why}) and cannot be used any more in this process"


@_callback("WGPUQueueWorkDoneCallback")
def _done(status: int, message: Any, user: Any, _: Any) -> None:
    _tell(_key(user), status == lib.WGPUQueueWorkDoneStatus_Success, message)


@_callback("WGPUBufferMapCallback")
def _mapped(status: int, message: Any, user: Any, _: Any) -> None:
    _tell(_key(user), status == lib.WGPUMapAsyncStatus_Success, message)


def _tell(key: int, success: bool, message: Any) -> None:
    told = _waiting.get(key)
    if told is not None:
        told(key, "" if success else f"the device did not finish it: {text_of(message)}")
        _waiting.pop(key, None)
