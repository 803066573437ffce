"""Settings from the environment, checked once, and sizes in bytes such as `64KiB`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from penstock.errors import SettingError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter + "B": 1000**_power, _letter + "IB": 1024**_power, _letter: 1024**_power}
_SIZE = re.compile(r"\s*(\d{1,99}(?:\.\d+)?)\s*([A-Z]*)\s*", re.IGNORECASE)


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
    """The system's folder for files that can be recreated."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "penstock"


def setting(default: Any, explained: str) -> Any:
    """A field of a dataclass of settings, which `penstock config` explains."""
    return field(default=default, metadata={"explanation": explained})


def explanation(item: Field[Any]) -> str:
    """What a field that `setting` made is for."""
    return str(item.metadata["explanation"])


@dataclass(frozen=True)
class Settings:
    """The settings of a device. `PENSTOCK_` and a field's name in capitals is its environment variable."""

    device: str = setting("", "the name of the default device, or auto; unset: the best")
    max_commands: int = setting(100, "commands gathered before they are submitted")
    max_bytes: int = setting(1 << 30, "bytes that gathered commands may touch before they are submitted")
    max_in_flight: int = setting(8, "submissions that may be pending")
    staging_bytes: int = setting(64 << 20, "bytes for transfers, on devices with memory of their own")
    memory_limit: int | None = setting(None, "a budget for the memory of a device; unset: no limit")
    pool_capacity: int = setting(512, "idle buffers that are kept of each size")
    pool_bytes: int | None = setting(None, "idle bytes that are kept; unset: a quarter of the memory")
    pool_seconds: float = setting(60.0, "after which an idle buffer is returned to the driver")
    trace_memory: bool = setting(False, "record which line of the program allocated what")
    force_kernels: bool = setting(False, "kernels for everything, however small: for tests of kernels")
    reuse_graphs: bool = setting(True, "replay gradients and updates that repeat, without jit as well")
    compile_ahead: bool = setting(True, "compile in threads, and do not wait for it")
    check_indices: bool = setting(True, "refuse indices, ids and class targets that are out of range")
    tf32: bool = setting(False, "float32 products on tensor cores, factors rounded to 10 bits")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """The settings from `PENSTOCK_…` variables, with defaults for the others."""
        environment = os.environ if environment is None else environment
        given: dict[str, object] = {}
        for each in fields(cls):
            variable = variable_of(each.name)
            if text := environment.get(variable, "").strip():
                given[each.name] = _parse(variable, each.name, text)
        return cls(**given)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        for name in ("max_commands", "max_bytes", "max_in_flight", "staging_bytes", "pool_capacity"):
            least = 0 if name == "pool_capacity" else 1
            if getattr(self, name) < least:
                raise SettingError(f"{name} must be at least {least}, and {getattr(self, name)} was given")
        if self.pool_seconds < 0:
            raise SettingError(f"pool_seconds cannot be negative, and {self.pool_seconds} was given")


def variable_of(name: str) -> str:
    """The environment variable of a field of `Settings`."""
    return "PENSTOCK_" + name.upper()


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
