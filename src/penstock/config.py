"""Settings: what the environment says, checked once, and sizes in bytes as people write them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from penstock.errors import SettingError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter + "B": 1000**_power, _letter + "IB": 1024**_power, _letter: 1024**_power}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Z]*)\s*", re.IGNORECASE)


def parse_bytes(size: int | str) -> int:
    """A number of bytes from `4096`, `"64KiB"`, `"1.5 GB"` or `"2G"` (a bare letter counts in 1024s)."""
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise SettingError(f"a size in bytes cannot be negative, and {size} was given")
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None or match[2].upper() not in _UNITS:
        raise SettingError(f"{size!r} is not a size in bytes; write it like 4096, '64KiB', '1.5GB' or '2G'")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def cache_folder() -> Path:
    """Where the system wants files that can be made again."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "penstock"


@dataclass(frozen=True)
class Settings:
    """What can be set for a device; `PENSTOCK_` and the field's name in capitals sets it from outside."""

    device: str = ""  # the default device's name, or auto; empty: the best one found
    max_commands: int = 100  # commands gathered before they are submitted
    max_bytes: int = 1 << 30  # bytes of memory that gathered commands may hold before they are submitted
    max_in_flight: int = 8  # submissions that the device may be behind the host
    staging_bytes: int = 64 << 20  # the rings through which devices with memory of their own exchange data
    memory_limit: int | None = None  # bytes that may be taken from the driver; None: what the driver gives
    pool_capacity: int = 512  # idle buffers kept per size class
    pool_bytes: int | None = None  # idle bytes kept in all; None: a quarter of the device's memory
    pool_seconds: float = 60.0  # an idle buffer older than this goes back to the driver
    trace_memory: bool = False  # remember which line of the user's code allocated what
    force_kernels: bool = False  # kernels for everything, however small: for tests of kernels
    reuse_graphs: bool = True  # call gradients, updates and functions that were recorded before
    compile_ahead: bool = True  # on a CPU, a thread compiles, and what is new does not wait for it
    check_indices: bool = True  # whether indices, ids and class targets that are out of range are refused
    tf32: bool = False  # products of float32 on tensor cores, of factors rounded to 10 bits of fraction

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """The settings in force, from `PENSTOCK_…` variables over the defaults."""
        environment = os.environ if environment is None else environment
        given: dict[str, object] = {}
        for field in fields(cls):
            variable = "PENSTOCK_" + field.name.upper()
            if text := environment.get(variable, "").strip():
                given[field.name] = _parse(variable, field.name, text)
        return cls(**given)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        for name in ("max_commands", "max_bytes", "max_in_flight", "staging_bytes", "pool_capacity"):
            least = 0 if name == "pool_capacity" else 1
            if getattr(self, name) < least:
                raise SettingError(f"{name} must be at least {least}, and {getattr(self, name)} was given")
        if self.pool_seconds < 0:
            raise SettingError(f"pool_seconds cannot be negative, and {self.pool_seconds} was given")


_FLAGS = ("trace_memory", "force_kernels", "reuse_graphs", "compile_ahead", "check_indices", "tf32")


def _parse(variable: str, name: str, text: str) -> object:
    try:
        if name == "device":
            return text
        if name in _FLAGS:
            return {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}[
                text.lower()
            ]
        if name == "pool_seconds":
            return float(text)
        if name in ("max_commands", "max_in_flight", "pool_capacity"):
            return int(text)
        return parse_bytes(text)
    except (ValueError, KeyError) as error:
        kinds = {"pool_seconds": "a number of seconds", **dict.fromkeys(_FLAGS, "0 or 1")}
        wanted = kinds.get(name, "an integer")
        if isinstance(error, SettingError):
            wanted = "a size such as 4096, 64KiB or 2G"
        raise SettingError(f"{variable}={text!r} cannot be used: {wanted} is wanted") from None
