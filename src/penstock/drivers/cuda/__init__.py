"""The CUDA driver."""

from penstock.drivers.cuda.driver import CudaDriver, compile_text, cuda_capabilities, find_devices

__all__ = ["CudaDriver", "compile_text", "cuda_capabilities", "find_devices"]
