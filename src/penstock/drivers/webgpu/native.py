"""WebGPU's objects, through the C functions of wgpu-native: made, owned, and told when something is wrong.

wgpu-py's own objects stay out of it: a call through them costs more than one of the library itself, and each
of its devices has a thread. WebGPU tells an error to a callback, on the thread that made the call; from there
it is raised, or taken by whoever can tell which command it belongs to.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

from wgpu.backends.wgpu_native import ffi, lib

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
from penstock.errors import CompileError, DeviceError, OutOfDeviceMemory

# Constants of webgpu.h and wgpu.h that cffi cannot take from a header.
MAP_READ, COPY_SRC, COPY_DST, UNIFORM, STORAGE = 0x1, 0x4, 0x8, 0x40, 0x80  # what a buffer is used for
_MAP_MODE_READ = 0x1
_COMPUTE_STAGE = 0x4
_NO_CHECKS = 0  # of indices and loops in a shader: other drivers have none either, and they cost time
_FEATURES = (IMMEDIATES, INT64, FLOAT16, TIMES, TIMES_BETWEEN_PASSES)  # taken where there are any
_ANY_TIME = lib.WGPUCallbackMode_AllowSpontaneous
_NULL = ffi.NULL

Told = Callable[[int, str], None]  # takes the number of what was expected, and what went wrong


class Life:
    """Which native objects a device has, and whether they may be touched."""

    __slots__ = ("abandoned", "open")

    def __init__(self) -> None:
        self.open: set[int] = set()  # every step on it is atomic: finalisers take no lock
        self.abandoned = False


class Owned:
    """A native object, for as long as this is there."""

    __slots__ = ("_life", "_release", "native")

    def __init__(self, life: Life, native: Any, release: Callable[[Any], None]) -> None:
        self._life = life
        self.native = native
        self._release = release
        life.open.add(id(self))

    def __del__(self) -> None:
        if not self._life.abandoned and not sys.is_finalizing():
            self._release(self.native)
        self._life.open.discard(id(self))


class NativeBuffer(Owned):
    """A native buffer."""

    __slots__ = ("nbytes",)

    def __init__(self, life: Life, native: Any, nbytes: int) -> None:
        super().__init__(life, native, lib.wgpuBufferRelease)
        self.nbytes = nbytes

    def destroy(self) -> None:
        """Give its memory back, whatever still refers to it."""
        if not self._life.abandoned:
            lib.wgpuBufferDestroy(self.native)


class NativeDevice:
    """A device of WebGPU with its queue."""

    def __init__(self, adapter: Adapter, name: str) -> None:
        self.name = name
        self.max_buffer_bytes = webgpu_capabilities(adapter).max_allocation_bytes
        self.life = Life()
        self.dead = ""  # why every call fails
        self.errors: dict[int, list[tuple[int, str]]] = {}  # by thread: what its last calls were told
        self.native = self._open(adapter)
        self.queue = lib.wgpuDeviceGetQueue(self.native)

    def _open(self, adapter: Adapter) -> Any:
        key = next(_keys)
        _devices[key] = self
        user = ffi.cast("void *", key)
        features = [feature for feature in _FEATURES if feature in adapter.features]
        wanted = ffi.new("WGPUFeatureName[]", [ffi.cast("WGPUFeatureName", feature) for feature in features])
        limits = ffi.new("WGPULimits *", adapter.limits)
        descriptor = ffi.new("WGPUDeviceDescriptor *")
        descriptor.requiredFeatureCount, descriptor.requiredFeatures = len(features), wanted
        descriptor.requiredLimits = limits
        lost, uncaptured = descriptor.deviceLostCallbackInfo, descriptor.uncapturedErrorCallbackInfo
        lost.mode, lost.callback, lost.userdata1 = _ANY_TIME, _lost_callback, user
        uncaptured.callback, uncaptured.userdata1 = _failed_callback, user
        request = ffi.new("WGPURequestDeviceCallbackInfo *")
        request.mode, request.callback, request.userdata1 = _ANY_TIME, _opened_callback, user
        lib.wgpuAdapterRequestDevice(adapter.native, descriptor, request[0])  # answers before it returns
        status, device, message = _answers.pop(key)
        if status != lib.WGPURequestDeviceStatus_Success:
            raise DeviceError(f"{self.name} could not be opened: {message}")
        return device

    # Errors

    def take_errors(self) -> list[tuple[int, str]]:
        """Kind and words of what WebGPU had against the last calls of this thread."""
        return self.errors.pop(get_ident(), []) if self.errors else []

    def raise_errors(self) -> None:
        """Raise the first of them."""
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
                f"{self.name} has no {nbytes} bytes; one allocation may have {largest} bytes there",
                asked=nbytes,
            )
        what = f"allocation of {nbytes} bytes"
        self.require_alive(what)
        descriptor = ffi.new("WGPUBufferDescriptor *")
        descriptor.size, descriptor.usage = nbytes, usage
        buffer = NativeBuffer(self.life, lib.wgpuDeviceCreateBuffer(self.native, descriptor), nbytes)
        for kind, words in self.take_errors():
            if kind == lib.WGPUErrorType_OutOfMemory:
                raise OutOfDeviceMemory(f"{self.name} has no {nbytes} bytes ({words})", asked=nbytes)
            raise DeviceError(words, what)
        return buffer

    def module(self, name: str, text: str) -> Owned:
        """A module of WGSL. Raises CompileError with the compiler's words."""
        self.require_alive()
        label, code = _String(name), _String(text)
        source = ffi.new("WGPUShaderSourceWGSL *")
        source.chain.sType = lib.WGPUSType_ShaderSourceWGSL
        source.code = code.view
        descriptor = ffi.new("WGPUShaderModuleDescriptor *")
        descriptor.nextInChain = ffi.cast("WGPUChainedStruct *", source)
        descriptor.label = label.view
        native = lib.wgpuDeviceCreateShaderModuleTrusted(self.native, descriptor, _NO_CHECKS)
        module = Owned(self.life, native, lib.wgpuShaderModuleRelease)
        for _, words in self.take_errors():
            raise CompileError(f"{self.name} refused the source of {name!r}:\n{words}\n{text}")
        return module

    def group_layout(self, count: int, *, uniform: bool = False) -> Owned:
        """How a bind group of so many storage buffers looks, or of uniform ones whose place can change."""
        kind = lib.WGPUBufferBindingType_Uniform if uniform else lib.WGPUBufferBindingType_Storage
        entries = ffi.new("WGPUBindGroupLayoutEntry[]", count)
        for number in range(count):
            entry = entries[number]
            entry.binding, entry.visibility = number, _COMPUTE_STAGE
            entry.buffer.type, entry.buffer.hasDynamicOffset = kind, uniform
        descriptor = ffi.new("WGPUBindGroupLayoutDescriptor *")
        descriptor.entryCount, descriptor.entries = count, entries
        native = lib.wgpuDeviceCreateBindGroupLayout(self.native, descriptor)
        return self._made(native, lib.wgpuBindGroupLayoutRelease)

    def group(self, layout: Owned, parts: Sequence[tuple[NativeBuffer, int, int]]) -> Owned:
        """A bind group of buffers, each with an offset and a size."""
        entries = ffi.new("WGPUBindGroupEntry[]", len(parts))
        for number, (buffer, offset, size) in enumerate(parts):
            entry = entries[number]
            entry.binding, entry.buffer, entry.offset, entry.size = number, buffer.native, offset, size
        descriptor = ffi.new("WGPUBindGroupDescriptor *")
        descriptor.layout, descriptor.entryCount, descriptor.entries = layout.native, len(parts), entries
        native = lib.wgpuDeviceCreateBindGroup(self.native, descriptor)
        return self._made(native, lib.wgpuBindGroupRelease)

    def pipeline_layout(self, groups: Sequence[Owned], immediate_bytes: int) -> Owned:
        """Which bind groups a pipeline takes, and how many bytes beside them."""
        array = ffi.new("WGPUBindGroupLayout[]", [group.native for group in groups])
        descriptor = ffi.new("WGPUPipelineLayoutDescriptor *")
        descriptor.bindGroupLayoutCount, descriptor.bindGroupLayouts = len(groups), array
        descriptor.immediateSize = immediate_bytes
        native = lib.wgpuDeviceCreatePipelineLayout(self.native, descriptor)
        return self._made(native, lib.wgpuPipelineLayoutRelease)

    def pipeline(self, name: str, module: Owned, layout: Owned) -> Owned:
        """A module's entry point, compiled for the device."""
        entry = _String(name)
        descriptor = ffi.new("WGPUComputePipelineDescriptor *")
        descriptor.label = descriptor.compute.entryPoint = entry.view
        descriptor.layout, descriptor.compute.module = layout.native, module.native
        native = lib.wgpuDeviceCreateComputePipeline(self.native, descriptor)
        return self._made(native, lib.wgpuComputePipelineRelease)

    def _made(self, native: Any, release: Callable[[Any], None]) -> Owned:
        made = Owned(self.life, native, release)
        self.raise_errors()
        return made

    # Commands

    def encoder(self) -> Any:
        """A command encoder, for `finish`."""
        return lib.wgpuDeviceCreateCommandEncoder(self.native, _NULL)

    def finish(self, encoder: Any) -> tuple[Owned, list[tuple[int, str]]]:
        """The commands of an encoder, and what WebGPU has against them; only without that may they start."""
        native = lib.wgpuCommandEncoderFinish(encoder, _NULL)
        lib.wgpuCommandEncoderRelease(encoder)
        return Owned(self.life, native, lib.wgpuCommandBufferRelease), self.take_errors()

    def write(self, buffer: NativeBuffer, offset: int, source: Any, nbytes: int) -> None:
        """Take a copy of bytes, and write them to a buffer before what is submitted next."""
        lib.wgpuQueueWriteBuffer(self.queue, buffer.native, offset, source, nbytes)

    def submit(self, commands: Sequence[Owned]) -> int:
        """Start commands; their index, for `poll`. The library ends the process if one of them is invalid."""
        array = ffi.new("WGPUCommandBuffer[]", [command.native for command in commands])
        return int(lib.wgpuQueueSubmitForIndex(self.queue, len(commands), array))

    def expect(self, told: Told) -> int:
        """A number for `when_done` or `when_mapped`, with which `told` is called then."""
        key = next(_keys)
        _waiting[key] = told
        return key

    def when_done(self, expected: int) -> None:
        """Call back when all that was submitted is done."""
        info = ffi.new("WGPUQueueWorkDoneCallbackInfo *")
        info.mode, info.callback, info.userdata1 = _ANY_TIME, _done_callback, ffi.cast("void *", expected)
        lib.wgpuQueueOnSubmittedWorkDone(self.queue, info[0])

    def when_mapped(self, buffer: NativeBuffer, expected: int) -> None:
        """Call back when a buffer can be read."""
        info = ffi.new("WGPUBufferMapCallbackInfo *")
        info.mode, info.callback, info.userdata1 = _ANY_TIME, _mapped_callback, ffi.cast("void *", expected)
        lib.wgpuBufferMapAsync(buffer.native, _MAP_MODE_READ, 0, buffer.nbytes, info[0])

    def read_mapped(self, buffer: NativeBuffer, start: int, target: Any, nbytes: int) -> None:
        """Copy bytes out of a buffer that can be read, which ends that."""
        mapped = lib.wgpuBufferGetConstMappedRange(buffer.native, 0, buffer.nbytes)
        ffi.memmove(ffi.from_buffer(target), ffi.cast("uint8_t *", mapped) + start, nbytes)
        lib.wgpuBufferUnmap(buffer.native)

    def poll(self, wait_for: int | None = None) -> None:
        """Let WebGPU call back for all that is done, after waiting for a submission if one is given."""
        index = _NULL if wait_for is None else ffi.new("WGPUSubmissionIndex *", wait_for)
        lib.wgpuDevicePoll(self.native, wait_for is not None, index)
        if _interrupts:
            raise _interrupts.pop()

    def finish_all(self) -> None:
        """Wait for all that was submitted."""
        lib.wgpuDevicePoll(self.native, True, _NULL)

    def __del__(self) -> None:
        if hasattr(self, "queue") and not self.life.abandoned and not sys.is_finalizing():
            lib.wgpuQueueRelease(self.queue)
            lib.wgpuDeviceRelease(self.native)


class _String:
    """A text as WebGPU takes it, for as long as this is there."""

    def __init__(self, text: str) -> None:
        data = text.encode()
        self._data = ffi.new("char[]", data)
        self.view = ffi.new("WGPUStringView *", (self._data, len(data)))[0]


# Callbacks. They get a number, by which they find what they are for.

_keys = itertools.count(1)
_devices: weakref.WeakValueDictionary[int, NativeDevice] = weakref.WeakValueDictionary()
_answers: dict[int, tuple[int, Any, str]] = {}  # to requests for a device
_waiting: dict[int, Told] = {}
_interrupts: list[BaseException] = []  # that came while WebGPU called back


def _key(user: Any) -> int:
    return int(ffi.cast("uintptr_t", user))


def _opened(status: int, device: Any, message: Any, user: Any, _: Any) -> None:
    _answers[_key(user)] = (status, device, text_of(message))


def _failed(_: Any, kind: int, message: Any, user: Any, __: Any) -> None:
    device = _devices.get(_key(user))
    if device is not None:
        words = text_of(message).removeprefix("Validation Error").strip().removeprefix("Caused by:").strip()
        device.errors.setdefault(get_ident(), []).append((kind, words))


def _lost(_: Any, reason: int, message: Any, user: Any, __: Any) -> None:
    device = _devices.get(_key(user))
    if device is not None:
        why = text_of(message)
        device.dead = f"the device was lost ({why}) and cannot be used any more in this process"


def _done(status: int, message: Any, user: Any, _: Any) -> None:
    _tell(_key(user), status == lib.WGPUQueueWorkDoneStatus_Success, message)


def _mapped(status: int, message: Any, user: Any, _: Any) -> None:
    _tell(_key(user), status == lib.WGPUMapAsyncStatus_Success, message)


def _tell(key: int, success: bool, message: Any) -> None:
    told = _waiting.get(key)
    if told is not None:
        told(key, "" if success else f"the device did not finish it: {text_of(message)}")
        _waiting.pop(key, None)


def _callback(signature: str, function: Callable[..., None]) -> Any:
    """A function for WebGPU to call, which does its work even where Ctrl-C is pressed meanwhile.

    Python takes notice of that at the first line that it runs, which is here if WebGPU waited when it came,
    and WebGPU cannot raise it. So the work is done again, and the interrupt kept until the call is over.
    """

    def finish(_: Any, error: BaseException, trace: Any) -> None:
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        function(*(trace.tb_frame.f_locals[name] for name in names))
        _interrupts.append(error)

    return ffi.callback(signature, function, onerror=finish)


_opened_callback = _callback(
    "void(WGPURequestDeviceStatus, WGPUDevice, WGPUStringView, void *, void *)", _opened
)
_failed_callback = _callback(
    "void(WGPUDevice const *, WGPUErrorType, WGPUStringView, void *, void *)", _failed
)
_lost_callback = _callback(
    "void(WGPUDevice const *, WGPUDeviceLostReason, WGPUStringView, void *, void *)", _lost
)
_done_callback = _callback("void(WGPUQueueWorkDoneStatus, WGPUStringView, void *, void *)", _done)
_mapped_callback = _callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)", _mapped)
