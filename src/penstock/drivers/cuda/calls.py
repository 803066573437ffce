"""Calls of CUDA's driver API: their errors, and which of these are fatal for the device."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cu

NO_MEMORY = (
    cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY,
    cu.CUresult.CUDA_ERROR_INVALID_VALUE,  # for sizes that are impossible on any device
)
FATAL = {  # errors after which CUDA accepts nothing more from the process
    cu.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,
    cu.CUresult.CUDA_ERROR_LAUNCH_TIMEOUT,
    cu.CUresult.CUDA_ERROR_ASSERT,
    cu.CUresult.CUDA_ERROR_HARDWARE_STACK_ERROR,
    cu.CUresult.CUDA_ERROR_ILLEGAL_INSTRUCTION,
    cu.CUresult.CUDA_ERROR_MISALIGNED_ADDRESS,
    cu.CUresult.CUDA_ERROR_INVALID_ADDRESS_SPACE,
    cu.CUresult.CUDA_ERROR_INVALID_PC,
    cu.CUresult.CUDA_ERROR_LAUNCH_FAILED,
    cu.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE,
    cu.CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED,
    cu.CUresult.CUDA_ERROR_UNKNOWN,
}
ELSEWHERE = {  # errors in a thread whose current context is another or none
    cu.CUresult.CUDA_ERROR_INVALID_CONTEXT,
    cu.CUresult.CUDA_ERROR_INVALID_HANDLE,
}


class CudaError(Exception):
    """A call of CUDA that failed."""

    def __init__(self, code: Any) -> None:
        super().__init__(words(code))
        self.code = code


def checked(result: tuple[Any, ...]) -> Any:
    """The results of a call; raises CudaError if it failed."""
    if result[0]:
        raise CudaError(result[0])
    return result[1] if len(result) == 2 else result[1:]


def words(code: Any) -> str:
    """CUDA's name and description of an error."""
    _, name = cu.cuGetErrorName(code)
    _, text = cu.cuGetErrorString(code)
    return f"{(name or b'').decode()}: {(text or b'').decode()}" if name else f"CUDA error {int(code)}"
