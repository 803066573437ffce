"""The types of WebGPU's header that the driver uses, by their names in C.

With each name of a type that is new to it, cffi parses all names that the header declares, which takes it 30
milliseconds. So they are parsed at once here, as the parameters of a function.
"""

from __future__ import annotations

from typing import Any

from wgpu.backends.wgpu_native import ffi

_NAMES = (
    "WGPUAdapter[]",
    "WGPUAdapterInfo *",
    "WGPUBindGroupDescriptor *",
    "WGPUBindGroupEntry[]",
    "WGPUBindGroupLayoutDescriptor *",
    "WGPUBindGroupLayoutEntry[]",
    "WGPUBindGroupLayout[]",
    "WGPUBufferDescriptor *",
    "WGPUBufferMapCallback",
    "WGPUBufferMapCallbackInfo *",
    "WGPUChainedStruct *",
    "WGPUCommandBuffer[]",
    "WGPUComputePassDescriptor *",
    "WGPUComputePipelineDescriptor *",
    "WGPUDeviceDescriptor *",
    "WGPUDeviceLostCallback",
    "WGPUFeatureName",
    "WGPUFeatureName[]",
    "WGPUGlobalReport *",
    "WGPUInstanceDescriptor *",
    "WGPUInstanceExtras *",
    "WGPULimits *",
    "WGPUPassTimestampWrites *",
    "WGPUPipelineLayoutDescriptor *",
    "WGPUQuerySetDescriptor *",
    "WGPUQueueWorkDoneCallback",
    "WGPUQueueWorkDoneCallbackInfo *",
    "WGPURequestDeviceCallback",
    "WGPURequestDeviceCallbackInfo *",
    "WGPUShaderModuleDescriptor *",
    "WGPUShaderSourceWGSL *",
    "WGPUSubmissionIndex *",
    "WGPUSupportedFeatures *",
    "WGPUUncapturedErrorCallback",
    "char[]",
    "uint8_t *",
    "uint8_t[]",
    "uint32_t *",
    "uintptr_t",
    "void *",
)


def _parsed() -> dict[str, Any]:
    # Pointers to them, since parameters that are arrays would become pointers.
    pointers = [f"{name[:-2]} (*)[]" if name.endswith("[]") else f"{name} *" for name in _NAMES]
    function = ffi.typeof(f"void (*)({', '.join(pointers)})")
    return {name: pointer.item for name, pointer in zip(_NAMES, function.args, strict=True)}


TYPES = _parsed()
