"""Measurements on a machine with other load: repeated while it is busy, and kept on disk.

Other processes can only slow a measurement down, so the best of several counts. A measurement on a busy
machine is used for now, and repeated by a process that starts an hour later or more.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from time import perf_counter, time
from typing import Any, TypeVar

import numpy as np
import psutil

from penstock.drivers.driver import Capabilities
from penstock.files import parse_json
from penstock.tuning_cache import TuningCache

T = TypeVar("T")

_ROUNDS = 3  # at most, while the machine is busy
_BUSY = 0.15  # the share of all processors that others may use
_SHORT = 0.02  # seconds; the resolution of the system's counters
_REPEAT = 3600  # seconds until a measurement on a busy machine is repeated


class Watch:
    """How much the processors have worked for other processes since its creation."""

    def __init__(self) -> None:
        self._start, self._others = perf_counter(), _others_seconds()

    def busy(self) -> bool:
        """Whether other processes used so much of the machine that measurements are wrong."""
        seconds = perf_counter() - self._start
        if seconds < _SHORT:
            return False
        return _others_seconds() - self._others > _BUSY * seconds * (psutil.cpu_count() or 1)


def measure_quietly(measure: Callable[[], T], best: Callable[[T, T], T]) -> tuple[T, bool]:
    """Measure up to three times, until the machine is quiet; the best result, and whether it was quiet.

    `best` combines two results.
    """
    watch = Watch()
    result = measure()
    for _ in range(_ROUNDS - 1):
        if not watch.busy():
            return result, True
        watch = Watch()
        result = best(result, measure())
    return result, not watch.busy()


class Record:
    """A measurement in the tuning cache, with its time and whether the machine was quiet."""

    def __init__(self, file: TuningCache, name: str) -> None:
        self._file, self._name = file, name

    def get(self) -> tuple[Any, bool]:
        """The value, None if there is none; and whether it should be remeasured."""
        try:
            record = parse_json(self._file.get(self._name) or "null")
            return record["value"], not record["quiet"] and time() - float(record["time"]) > _REPEAT
        except (ValueError, TypeError, KeyError):  # never measured, or the file is not valid
            return None, True

    def put(self, value: Any, quiet: bool) -> None:
        """Write a value."""
        self._file.put(self._name, json.dumps({"value": value, "quiet": quiet, "time": time()}))


def device_key(purpose: str, capabilities: Capabilities) -> str:
    """What measurements depend on: if any of it changes, they are repeated."""
    about = (capabilities.description, capabilities.vendor, capabilities.api, capabilities.compute_units)
    more = (capabilities.vector_width, capabilities.matmul_library, capabilities.tf32, np.__version__)
    return f"{purpose} {about} {more} penstock {version('penstock')}"


def _others_seconds() -> float:
    """The total time that all processors have worked for other processes."""
    total = psutil.cpu_times()
    idle = total.idle + getattr(total, "iowait", 0.0)
    # `guest` is a part of `user`.
    counted = sum(total) - getattr(total, "guest", 0.0) - getattr(total, "guest_nice", 0.0)
    own = psutil.Process().cpu_times()
    return float(counted - idle - own.user - own.system)
