"""Which CUDA devices there are, and what they can do."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from typing import Any

from cuda.bindings import driver as cu

from penstock.drivers.cuda.calls import CudaError, checked
from penstock.drivers.driver import Capabilities
from penstock.errors import DeviceError

Attribute = cu.CUdevice_attribute
_ALIGNMENT = 256  # bytes, as of cuMemAlloc; kernels get the offsets of buffers in this unit

_contexts: dict[int, Any] = {}  # by device; kept until the process ends, as other libraries do
_contexts_lock = threading.Lock()


def find_devices() -> list[int]:
    """The ordinals of the CUDA devices, the largest memory first. Raises DeviceError with CUDA's reason."""
    try:
        checked(cu.cuInit(0))
        count = checked(cu.cuDeviceGetCount())
    except (CudaError, RuntimeError) as error:  # RuntimeError: NVIDIA's driver library is not installed
        raise DeviceError(str(error)) from None
    sizes = {number: checked(cu.cuDeviceTotalMem(native_device(number))) for number in range(count)}
    return sorted(sizes, key=lambda number: -sizes[number])


def cuda_capabilities(device: int) -> Capabilities:
    """What a device can do, without opening it."""
    checked(cu.cuInit(0))
    version = checked(cu.cuDriverGetVersion())
    major = attribute(device, Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
    total = checked(cu.cuDeviceTotalMem(native_device(device)))
    return Capabilities(
        description=checked(cu.cuDeviceGetName(256, native_device(device))).split(b"\0")[0].decode(),
        vendor="NVIDIA",
        api=f"CUDA {version // 1000}.{version % 1000 // 10} ({architecture_of(device)})",
        kind="gpu",
        language="cuda",
        total_bytes=total,
        max_allocation_bytes=total,
        offset_alignment=_ALIGNMENT,
        shared_memory=False,
        compute_units=attribute(device, Attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        max_group_size=attribute(device, Attribute.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
        local_bytes=attribute(device, Attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK),
        vector_width=1,
        float16=True,
        float64=True,
        matmul_library=find_spec("nvmath") is not None,
        tensor_cores=major >= 8,
        clusters=major >= 9,
        offloads=True,
    )


def native_device(number: int) -> Any:
    """CUDA's handle of a device."""
    return checked(cu.cuDeviceGet(number))


def attribute(device: int, which: Any) -> int:
    """An attribute of a device."""
    return int(checked(cu.cuDeviceGetAttribute(which, native_device(device))))


def architecture_of(device: int) -> str:
    """The architecture that code is compiled for, such as `sm_90a`."""
    major = attribute(device, Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
    minor = attribute(device, Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    # From Hopper on, "a" permits features that only this architecture has.
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def context_of(device: int) -> Any:
    """The device's primary context, which all libraries of this process share."""
    with _contexts_lock:
        if device not in _contexts:
            _contexts[device] = checked(cu.cuDevicePrimaryCtxRetain(native_device(device)))
        return _contexts[device]
