"""PyTorch as the other side, if it is installed."""

from __future__ import annotations

import importlib
from typing import Any

import numpy.typing as npt

from penstock.bench.errors import BenchmarkError
from penstock.runtime import Device


class Torch:
    """PyTorch on the hardware of a Penstock device."""

    def __init__(self, device: Device) -> None:
        try:
            self.module: Any = importlib.import_module("torch")
        except ImportError as error:
            raise BenchmarkError(
                f"--against torch needs PyTorch, which cannot be loaded here ({error}); pip install torch "
                f"brings it"
            ) from None
        self.where = self._where(device)
        self.version: str = self.module.__version__

    def _where(self, device: Device) -> str:
        """PyTorch's name for the same hardware."""
        capabilities = device.capabilities
        if capabilities.language == "cuda":
            if not self.module.cuda.is_available():
                raise BenchmarkError(
                    f"PyTorch {self.module.__version__} has no CUDA here to set {device.name} against"
                )
            return device.name
        if capabilities.kind in ("cpu", "host"):
            return "cpu"
        raise BenchmarkError(
            f"PyTorch is set against CUDA devices and CPUs, and {device.name} is "
            f"{capabilities.description} through {capabilities.api}"
        )

    def tensor(self, array: npt.NDArray[Any]) -> Any:
        """A new tensor with the values of an array."""
        return self.module.from_numpy(array).to(self.where, copy=True)

    def sync(self) -> None:
        """Wait until nothing is pending."""
        if self.where != "cpu":
            self.module.cuda.synchronize(self.where)
