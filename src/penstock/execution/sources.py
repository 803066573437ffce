"""The kernels of a schedule: those that are compiled from text, and functions."""

from __future__ import annotations

from typing import Any

from penstock.compiler.launches import arranged, fused_buffers, launch_parts
from penstock.compiler.schedule import Schedule
from penstock.kernels.cache import KernelCache
from penstock.kernels.concatenation import Call
from penstock.kernels.source import KernelSource
from penstock.runtime import Device


def kernel_sources(
    schedule: Schedule, device: Device, cache: KernelCache, anywhere: bool = False
) -> list[KernelSource]:
    """The kernels of a schedule that are compiled from text and known before the first run.

    All are known if they serve any arrangement of buffers (`anywhere`).
    """
    can = device.capabilities
    parts = launch_parts(schedule, can)
    if fused_buffers(parts) and not anywhere:
        calls = [call for part in parts if isinstance(part, list) for call in part if isinstance(call, Call)]
    else:
        launches = arranged(parts, schedule, can, None if anywhere else (), cache.sizes)
        items = [item for part in launches if isinstance(part, list) for item in part]
        calls = [item for item in items if isinstance(item, Call)]
    functions = functions_of(schedule)
    return [call.source for call in calls if call.source.name not in functions]


def functions_of(schedule: Schedule) -> dict[str, Any]:
    """The functions of library calls and NumPy kernels, by the names of kernels."""
    return {
        call.source.name: step.lowering.function
        for step in schedule.groups
        for call in step.calls
        if step.lowering is not None and step.lowering.function is not None
    }
