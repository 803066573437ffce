"""The CUDA driver."""

from penstock.drivers.cuda.code import compile_text
from penstock.drivers.cuda.devices import cuda_capabilities, find_devices
from penstock.drivers.cuda.driver import CudaDriver

__all__ = ["CudaDriver", "compile_text", "cuda_capabilities", "find_devices"]
