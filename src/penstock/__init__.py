"""Penstock: neural networks on any GPU, inside a memory budget that you set."""

from importlib.metadata import version as _version

from penstock import errors, memory
from penstock.memory.buffer import Buffer
from penstock.registry import default_device, devices, use
from penstock.runtime import Device
from penstock.stream.future import Future, FutureState

__version__ = _version("penstock")

__all__ = [
    "Buffer",
    "Device",
    "Future",
    "FutureState",
    "default_device",
    "devices",
    "errors",
    "memory",
    "use",
]
