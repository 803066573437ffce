"""The OpenCL driver."""

from penstock.drivers.opencl.devices import best_memory_kind, find_devices, opencl_capabilities, problem
from penstock.drivers.opencl.driver import OpenCLDriver

__all__ = ["OpenCLDriver", "best_memory_kind", "find_devices", "opencl_capabilities", "problem"]
