"""Memory budgets for a block of code, on every device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any, Protocol

from penstock.config import parse_bytes
from penstock.memory.ledger import opened_devices
from penstock.memory.resource import in_force


class Plannable(Protocol):
    """A function whose memory can be planned: a jitted function."""

    def memory_plan(self, *args: Any, **kwargs: Any) -> Any:
        """The memory of a call with these arguments under each budget."""
        ...


def plan(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The memory and time of a jitted function under budgets from none to the smallest, as a table.

    The function is captured with these arguments, and nothing of it runs.

    >>> step = ps.jit(lambda x: (x * x).sum())
    >>> type(ps.memory.plan(step, ps.ones(4))).__name__
    'MemoryPlan'
    """
    if not hasattr(function, "memory_plan"):
        raise TypeError(f"a function under @ps.jit has a memory plan, and {function!r} was given")
    planned: Plannable = function
    return planned.memory_plan(*args, **kwargs)


class _Budget(ContextDecorator):
    """A budget in force inside `with` blocks, or calls of the functions that it decorates."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __enter__(self) -> None:
        in_force.append(self._nbytes)
        try:
            for device in opened_devices():
                device.keep_within(self._nbytes)
        except BaseException:
            in_force.remove(self._nbytes)
            raise

    def __exit__(self, *_: object) -> None:
        in_force.remove(self._nbytes)  # in one call: other threads add and remove theirs at any time


def budget(limit: int | str) -> _Budget:
    """Let no device take more than `limit`, such as "2GiB", inside a `with` block.

    It counts all memory taken from the device: parameters, moments, inputs, results and temporaries, live
    and idle. A program that does not fit recomputes values instead of keeping them, or has them at the host
    while nothing uses them if the device has memory of its own, with the same results to the last bit; if it
    cannot fit, it raises OutOfDeviceMemory before anything runs, with the smallest budget that would do.
    Inside another budget, or with a device's `limit_bytes`, the smaller limit holds. It applies to all
    threads. The same budget may be used for several blocks, inside each other too.

    >>> with ps.memory.budget("1GiB"):
    ...     print(ps.default_device().limit_bytes)
    1073741824
    """
    return _Budget(parse_bytes(limit))
