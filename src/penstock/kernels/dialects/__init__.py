"""The languages that kernels are printed in, found by the capabilities of a device."""

from __future__ import annotations

from penstock.device.driver import Capabilities
from penstock.kernels.dialects.cuda import Cuda
from penstock.kernels.dialects.dialect import Dialect
from penstock.kernels.dialects.opencl import OpenCL
from penstock.kernels.dialects.wgsl import Wgsl

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (OpenCL(), Cuda(), Wgsl())}


def has_dialect(capabilities: Capabilities) -> bool:
    """Whether a device compiles text; else it runs functions of NumPy."""
    return capabilities.language in DIALECTS


def dialect_of(capabilities: Capabilities) -> Dialect:
    """The language of a device that compiles text."""
    return DIALECTS[capabilities.language]
