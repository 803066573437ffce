"""The languages of kernels."""

from __future__ import annotations

from penstock.drivers.driver import Capabilities
from penstock.kernels.dialects.cuda import Cuda
from penstock.kernels.dialects.dialect import Dialect
from penstock.kernels.dialects.opencl import OpenCL
from penstock.kernels.dialects.wgsl import Wgsl

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (OpenCL(), Cuda(), Wgsl())}


def dialect_of(capabilities: Capabilities) -> Dialect:
    """The language of a device that compiles text."""
    return DIALECTS[capabilities.language]
