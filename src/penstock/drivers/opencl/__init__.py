"""The OpenCL driver."""

from penstock.drivers.opencl.driver import (
    OpenCLDriver,
    best_memory_kind,
    find_devices,
    opencl_capabilities,
    problem,
)

__all__ = ["OpenCLDriver", "best_memory_kind", "find_devices", "opencl_capabilities", "problem"]
