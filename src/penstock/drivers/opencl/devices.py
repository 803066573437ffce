"""OpenCL's devices, and what each can do."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

import pyopencl as cl

from penstock.drivers.driver import Capabilities
from penstock.drivers.opencl import invokers, pocl, pocl_cpu

MemoryKind = Literal["svm", "mapped", "device"]

# Of a CPU, in items of 4 bytes. PoCL reports 16 on CPUs whose registers hold 8.
_LEAST_VECTOR_WIDTH = 4
_MOST_VECTOR_WIDTH = 8  # without AVX-512
_BUFFER_PARAMETERS = 12  # bytes that a buffer takes of a kernel's parameters: a pointer and an offset
_OTHER_PARAMETERS = 128  # bytes for scalars


def find_devices() -> list[cl.Device]:
    """Every OpenCL device: GPUs first, then other accelerators, then CPUs; the largest memory first."""
    devices: list[cl.Device] = []
    invokers.keep_in_memory()
    with pocl.own_folder(), pocl.both_devices():
        try:
            platforms = cl.get_platforms()
        except cl.Error:  # OpenCL reports it as an error that there is no platform
            return []
        for platform in platforms:
            with suppress(cl.Error):  # a platform whose hardware is absent
                found = platform.get_devices()
                if platform.name == pocl.PLATFORM:
                    for device in found:
                        pocl_cpu.name_cpu(device)
                devices += pocl.without_inline(found)
    order = {"gpu": 0, "accelerator": 1, "cpu": 2}
    usable = [device for device in devices if device.available and device.compiler_available]
    return sorted(usable, key=lambda device: (order[_kind(device)], -device.global_mem_size))


def problem(device: cl.Device) -> str:
    """Why a device cannot be used; empty if it can."""
    return pocl.problem() if device.platform.name == pocl.PLATFORM else ""


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
        vector_width=_vector_width(device) if kind == "cpu" else 1,
        float16="cl_khr_fp16" in extensions,
        float64="cl_khr_fp64" in extensions,
        max_buffers=_most_buffers(device),
        rounds_quotients=bool(device.single_fp_config & cl.device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT),
        kernel_counters=device.platform.name == pocl.PLATFORM and kind == "cpu" and pocl.is_known(),
        offloads=kind != "cpu" and (memory or best_memory_kind(device)) == "device",
        cache_bytes=device.global_mem_cache_size if kind == "cpu" else 0,
    )


def _vector_width(device: cl.Device) -> int:
    """The items of a vector register of a CPU. Some report 1, because their compiler vectorizes."""
    width = max(device.native_vector_width_float, _LEAST_VECTOR_WIDTH)
    return width if pocl_cpu.has_avx512(device) else min(width, _MOST_VECTOR_WIDTH)


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
