"""Measurements on a machine that other processes use: repeated while it is busy, and kept on disk.

Other processes can only slow a measurement down, so the best of several counts. One that was taken on a busy
machine all the same is used for now, and taken again by a process that starts an hour later or more.
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
_SHORT = 0.02  # seconds; the system counts in such steps, and shorter measurements tell nothing
_AGAIN = 3600  # seconds until what was measured on a busy machine is measured again


class Watch:
    """How much the processors work for other processes, from its creation on."""

    def __init__(self) -> None:
        self._start, self._others = perf_counter(), _others_seconds()

    def busy(self) -> bool:
        """Whether others took a part of the machine that makes measurements wrong."""
        seconds = perf_counter() - self._start
        if seconds < _SHORT:
            return False
        return _others_seconds() - self._others > _BUSY * seconds * (psutil.cpu_count() or 1)


def measure_quietly(measure: Callable[[], T], best: Callable[[T, T], T]) -> tuple[T, bool]:
    """Measure up to three times, until the machine is quiet; the best result, and whether it was quiet.

    `best` merges two results into one.
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
    """One measurement in the tuning cache, with the time of it and whether the machine was quiet then."""

    def __init__(self, file: TuningCache, name: str) -> None:
        self._file, self._name = file, name

    def get(self) -> tuple[Any, bool]:
        """The value, None if there is none; and whether it should be measured again."""
        try:
            found = parse_json(self._file.get(self._name) or "null")
            return found["value"], not found["quiet"] and time() - float(found["time"]) > _AGAIN
        except (ValueError, TypeError, KeyError):  # never measured, or a file that somebody changed
            return None, True

    def put(self, value: Any, quiet: bool) -> None:
        """Keep it."""
        self._file.put(self._name, json.dumps({"value": value, "quiet": quiet, "time": time()}))


def device_key(purpose: str, capabilities: Capabilities) -> str:
    """What measurements depend on: they are made again where any of it has changed."""
    about = (capabilities.description, capabilities.vendor, capabilities.api, capabilities.compute_units)
    more = (capabilities.vector_width, capabilities.matmul_library, capabilities.tf32, np.__version__)
    return f"{purpose} {about} {more} penstock {version('penstock')}"


def _others_seconds() -> float:
    """How long all processors together have worked for other processes."""
    total = psutil.cpu_times()
    idle = total.idle + getattr(total, "iowait", 0.0)
    # `guest` is a part of `user`.
    counted = sum(total) - getattr(total, "guest", 0.0) - getattr(total, "guest_nice", 0.0)
    own = psutil.Process().cpu_times()
    return float(counted - idle - own.user - own.system)
