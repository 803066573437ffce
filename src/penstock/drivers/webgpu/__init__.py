"""The WebGPU driver."""

from penstock.drivers.webgpu.adapters import Adapter, find_devices, webgpu_capabilities
from penstock.drivers.webgpu.driver import WebGpuDriver

__all__ = ["Adapter", "WebGpuDriver", "find_devices", "webgpu_capabilities"]
