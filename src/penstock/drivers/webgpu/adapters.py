"""Which devices WebGPU supports, and what they can do. No device is opened here."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import psutil
from wgpu.backends.wgpu_native import ffi, lib

from penstock.drivers.driver import Capabilities
from penstock.drivers.environment import environment
from penstock.drivers.webgpu.c_types import TYPES
from penstock.drivers.webgpu.wgsl import OFFSET_ALIGNMENT

BUFFER_ALIGNMENT = 16  # bytes; sizes of buffers are multiples of it, the size of the largest WGSL item
# Features and backends of wgpu.h that cffi does not know.
IMMEDIATES, INT64, TIMES_BETWEEN_PASSES = 0x30001, 0x30026, 0x30024
FLOAT16 = lib.WGPUFeatureName_ShaderF16
TIMES = lib.WGPUFeatureName_TimestampQuery
_VULKAN, _METAL, _DX12 = 1 << 0, 1 << 2, 1 << 3
# Guesses of what WebGPU does not report for a discrete GPU: its memory, on which only the pool's limit and
# messages depend, and its compute units.
_GPU_BYTES = 4 << 30
_GPU_UNITS = 32
# Kernels index a buffer's words by 32-bit signed integers, even a step beyond the last.
_MOST_BYTES = (1 << 33) - (1 << 20)

_VENDORS = {
    0x1002: "AMD",
    0x106B: "Apple",
    0x10DE: "NVIDIA",
    0x13B5: "ARM",
    0x5143: "Qualcomm",
    0x8086: "Intel",
}
_APIS = {  # in order of preference for a GPU that several support
    lib.WGPUBackendType_Vulkan: "Vulkan",
    lib.WGPUBackendType_Metal: "Metal",
    lib.WGPUBackendType_D3D12: "DX12",
}
_Sort = Literal["discrete", "integrated", "other", "cpu"]
_SORTS: dict[int, _Sort] = {  # in order of preference
    lib.WGPUAdapterType_DiscreteGPU: "discrete",
    lib.WGPUAdapterType_IntegratedGPU: "integrated",
    lib.WGPUAdapterType_Unknown: "other",
    lib.WGPUAdapterType_CPU: "cpu",
}


@dataclass(frozen=True)
class Adapter:
    """A device as WebGPU lists it."""

    native: Any
    name: str
    vendor: str
    driver: str  # the driver below WebGPU, and its version
    api: str
    sort: _Sort
    hardware: tuple[int, int]  # vendor ID and device ID, which are the same in every API
    limits: dict[str, int]
    features: frozenset[int]


_instance_lock = threading.Lock()
_instance: Any = None  # kept until the process ends
_adapters: list[Adapter] = []


def find_devices() -> list[Adapter]:
    """All WebGPU adapters, the best first. A GPU that several APIs support is listed once."""
    global _instance
    with _instance_lock:
        if _instance is None:
            extras = ffi.new(TYPES["WGPUInstanceExtras *"])
            extras.chain.sType = lib.WGPUSType_InstanceExtras
            extras.backends = _VULKAN | _METAL | _DX12  # not OpenGL, which is slow to load and lacks features
            descriptor = ffi.new(TYPES["WGPUInstanceDescriptor *"])
            descriptor.nextInChain = ffi.cast(TYPES["WGPUChainedStruct *"], extras)
            # Without Mesa's device selection layer, which prints a message if there is no display.
            with environment("NODEVICE_SELECT", "1"):
                _instance = lib.wgpuCreateInstance(descriptor)
                _adapters.extend(_enumerate(_instance))
        return list(_adapters)


def _enumerate(instance: Any) -> list[Adapter]:
    count = lib.wgpuInstanceEnumerateAdapters(instance, ffi.NULL, ffi.NULL)
    natives = ffi.new(TYPES["WGPUAdapter[]"], count)
    count = lib.wgpuInstanceEnumerateAdapters(instance, ffi.NULL, natives)
    return best_adapters([_adapter(natives[index]) for index in range(count)])


def best_adapters(adapters: Sequence[Adapter]) -> list[Adapter]:
    """The best adapters first, each GPU by the best API that supports it."""
    apis, sorts = list(_APIS.values()), list(_SORTS.values())
    usable = [adapter for adapter in adapters if adapter.api in apis]
    best: dict[tuple[int, int], str] = {}
    for adapter in sorted(usable, key=lambda adapter: apis.index(adapter.api)):
        best.setdefault(adapter.hardware, adapter.api)
    once = [adapter for adapter in usable if best[adapter.hardware] == adapter.api]
    return sorted(once, key=lambda adapter: sorts.index(adapter.sort))


def _adapter(native: Any) -> Adapter:
    info = ffi.new(TYPES["WGPUAdapterInfo *"])
    limits = ffi.new(TYPES["WGPULimits *"])
    features = ffi.new(TYPES["WGPUSupportedFeatures *"])
    lib.wgpuAdapterGetInfo(native, info)
    lib.wgpuAdapterGetLimits(native, limits)
    lib.wgpuAdapterGetFeatures(native, features)
    try:
        return Adapter(
            native=native,
            name=text_of(info.device) or "unnamed adapter",
            vendor=_VENDORS.get(info.vendorID) or text_of(info.vendor) or "unknown",
            driver=text_of(info.description),
            api=_APIS.get(info.backendType, ""),
            sort=_SORTS.get(info.adapterType, "other"),
            hardware=(info.vendorID, info.deviceID),
            limits={name: getattr(limits, name) for name in dir(limits) if name != "nextInChain"},
            features=frozenset(int(features.features[index]) for index in range(features.featureCount)),
        )
    finally:
        lib.wgpuAdapterInfoFreeMembers(info[0])
        lib.wgpuSupportedFeaturesFreeMembers(features[0])


def webgpu_capabilities(adapter: Adapter) -> Capabilities:
    """What an adapter can do, without opening it."""
    limits, cpu = adapter.limits, adapter.sort == "cpu"
    largest = min(limits["maxBufferSize"], _MOST_BYTES) // BUFFER_ALIGNMENT * BUFFER_ALIGNMENT
    return Capabilities(
        description=adapter.name,
        vendor=adapter.vendor,
        api=f"WebGPU on {adapter.api}" + (f" ({adapter.driver})" if adapter.driver else ""),
        kind="cpu" if cpu else "gpu",
        language="wgsl",
        total_bytes=_GPU_BYTES if adapter.sort == "discrete" else psutil.virtual_memory().total,
        max_allocation_bytes=largest,
        offset_alignment=OFFSET_ALIGNMENT,
        shared_memory=False,
        compute_units=(os.cpu_count() or 1) if cpu else _GPU_UNITS,
        max_group_size=limits["maxComputeInvocationsPerWorkgroup"],
        local_bytes=limits["maxComputeWorkgroupStorageSize"],
        vector_width=1,
        float16=FLOAT16 in adapter.features,
        float64=False,
        int64=INT64 in adapter.features,
        max_buffers=limits["maxStorageBuffersPerShaderStage"],
        binding_bytes=limits["maxStorageBufferBindingSize"] // OFFSET_ALIGNMENT * OFFSET_ALIGNMENT,
    )


def native_counts() -> dict[str, int]:
    """How many objects of each kind wgpu holds for all devices of this process."""
    report = ffi.new(TYPES["WGPUGlobalReport *"])
    lib.wgpuGenerateReport(_instance, report)
    return {name: getattr(report.hub, name).numAllocated for name in dir(report.hub)}


def text_of(view: Any) -> str:
    """The text of a WGPUStringView."""
    return ffi.string(view.data, view.length).decode(errors="replace").strip() if view.data else ""
