"""Native objects of OpenCL: queues, kernels with the types of their parameters, and the device's clock."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import pyopencl as cl

from penstock.drivers.driver import Kernel, check_parameter_count

_CLOCK_SECONDS = 1.0  # how long the measured offset of the device's clock is used


def open_queue(context: cl.Context, device: cl.Device, timed: bool = False) -> cl.CommandQueue:
    """A queue of a device of a context; `timed`: whether its events tell when commands ran."""
    if not timed:
        return cl.CommandQueue(context, device)
    return cl.CommandQueue(context, device, cl.command_queue_properties.PROFILING_ENABLE)


def typed_kernel(program: cl.Program, kernel: Kernel) -> cl.Kernel:
    """A native kernel, which knows the types of its parameters. Raises CompileError if it has others."""
    native = cl.Kernel(program, kernel.name)
    check_parameter_count(kernel.name, native.num_args, kernel.signature)
    native.set_scalar_arg_dtypes(
        [
            None if kind.endswith("*") else dtype
            for kind, dtype in zip(kernel.signature, kernel.dtypes, strict=True)
        ]
    )
    return native


class Clock:
    """Converts times of the device's clock to the host's. Both know when a command was recorded."""

    def __init__(self, queue: cl.CommandQueue) -> None:
        """`queue`: one of its own, which is always idle."""
        self._queue = queue
        self._offset = self._due = 0.0
        self._set()

    def on_host(self, nanoseconds: int) -> float:
        """A time of the device in seconds of the host's clock."""
        if perf_counter() > self._due:  # the clocks drift
            self._set()
        return nanoseconds * 1e-9 + self._offset

    def _set(self) -> None:
        measured = []
        for _ in range(5):  # the best of 5, since the host may be interrupted in between
            before = perf_counter()
            event = cl.enqueue_marker(self._queue)
            after = perf_counter()
            event.wait()
            queued: Any = event.get_profiling_info(cl.profiling_info.QUEUED)
            measured.append((after - before, (before + after) / 2 - queued * 1e-9))
        self._offset = min(measured)[1]
        self._due = perf_counter() + _CLOCK_SECONDS
