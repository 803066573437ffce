"""A file that describes a device: what it can do, its memory and its rates, in TOML."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from penstock.config import parse_bytes
from penstock.drivers.driver import Capabilities
from penstock.drivers.rates import StepRates
from penstock.errors import SettingError
from penstock.files import parse_toml, read_text

_KINDS, _LANGUAGES = ("gpu", "cpu"), ("cuda", "opencl", "wgsl")
_DTYPES = ("float32", "float16", "bfloat16", "float64")
_COMMON: dict[str, Any] = {
    "description": "a device that is not there",
    "vendor": "",
    "api": "",
    "offset_alignment": 256,
    "shared_memory": False,
    "compute_units": 32,
    "max_group_size": 1024,
    "local_bytes": 48 << 10,
    "float16": True,
    "float64": True,
}
_GPU: dict[str, Any] = {"vector_width": 1}
_CPU: dict[str, Any] = {"vector_width": 8, "shared_memory": True}
_CUDA: dict[str, Any] = {"matmul_library": True, "tensor_cores": True, "clusters": True, "offloads": True}
_WGSL: dict[str, Any] = {"float64": False, "int64": False, "max_buffers": 8, "binding_bytes": 128 << 20}
# Of the fields of Capabilities, as they are written.
_TYPES: dict[str, type[Any]] = {"str": str, "int": int, "bool": bool}


def read_description(path: Path) -> tuple[Capabilities, StepRates]:
    """What a file says of a device; SettingError names the file, the key and what would do."""
    try:
        content = parse_toml(read_text(path))
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SettingError(f"{path} is no TOML: {error}") from None
    file = _File(path, content)
    return file.capabilities(), file.rates()


class _File:
    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self._path = path
        self._device, self._rates = (self._table(content, name) for name in ("device", "rates"))
        if other := set(content) - {"device", "rates"}:
            self._refuse(min(other), "nothing that is known; there are [device] and [rates]")

    def capabilities(self) -> Capabilities:
        given = dict(self._device)
        kind = self._choice(given.pop("kind", None), "device.kind", _KINDS)
        language = self._choice(given.pop("language", None), "device.language", _LANGUAGES)
        if "memory" not in given:
            self._refuse("device.memory", "missing; write it like '8GiB'")
        try:
            memory = parse_bytes(given.pop("memory"))
        except SettingError as error:
            self._refuse("device.memory", str(error))
        known: dict[str, Any] = {"total_bytes": memory, "max_allocation_bytes": memory, **_COMMON}
        known |= {"kind": kind, "language": language, **(_GPU if kind == "gpu" else _CPU)}
        known |= {"cuda": _CUDA, "wgsl": _WGSL}.get(language, {})
        types = {field.name: _TYPES.get(str(field.type)) for field in fields(Capabilities)}
        for name, value in given.items():
            wanted = types.get(name)
            if wanted is None:
                self._refuse(f"device.{name}", "nothing that is known")
            if type(value) is not wanted or (wanted is int and value < 0):
                self._refuse(f"device.{name}", f"{value!r}, and {wanted.__name__} is wanted")
            known[name] = value
        return Capabilities(**known)

    def rates(self) -> StepRates:
        given = dict(self._rates)
        operations = {
            dtype: self._rate(rate, f"rates.operations.{dtype}")
            for dtype, rate in self._table(given, "operations", "rates.").items()
        }
        given.pop("operations")
        if unknown := set(operations) - set(_DTYPES):
            self._refuse(f"rates.operations.{min(unknown)}", f"no dtype of products: {', '.join(_DTYPES)}")
        if "float32" not in operations:
            self._refuse("rates.operations.float32", "missing; it is the number of operations a second")
        names = ("bandwidth", "launch", "link", "attention")
        if other := set(given) - set(names):
            self._refuse(f"rates.{min(other)}", f"nothing that is known: {', '.join(names)} and operations")
        rates = {"attention": 1.0, **given}
        rates = {name: self._rate(rates.get(name), f"rates.{name}") for name in names}
        return StepRates(operations=operations, **rates)

    def _table(self, content: Mapping[str, Any], name: str, inside: str = "") -> Mapping[str, Any]:
        table = content.get(name)
        if not isinstance(table, dict):
            self._refuse(f"[{inside}{name}]", "no table" if name in content else "missing")
        return table

    def _choice(self, value: object, key: str, choices: tuple[str, ...]) -> Any:
        if value not in choices:
            said = "missing" if value is None else repr(value)
            self._refuse(key, f"{said}; it is {' or '.join(choices)}")
        return value

    def _rate(self, value: object, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            unit = "seconds" if key == "rates.launch" else "a number per second, such as 1.0e12"
            said = "missing" if value is None else repr(value)
            self._refuse(key, f"{said}; it is more than 0, {unit}")
        return float(value)

    def _refuse(self, key: str, problem: str) -> NoReturn:
        raise SettingError(f"{self._path}: {key} is {problem}")


def description_text(capabilities: Capabilities, rates: StepRates) -> str:
    """The file of a device."""
    skipped = ("total_bytes", "kind", "language")
    about = {"kind": capabilities.kind, "language": capabilities.language, "memory": capabilities.total_bytes}
    about |= {
        field.name: getattr(capabilities, field.name)
        for field in fields(Capabilities)
        if field.name not in skipped
    }
    operations = {f"operations.{dtype}": rate for dtype, rate in rates.operations.items()}
    numbers = {name: getattr(rates, name) for name in ("bandwidth", "launch", "link", "attention")}
    return "\n".join(
        [
            "# What training steps reach: bytes and operations a second, and seconds for a launch.",
            "[device]",
            *(f"{name} = {json.dumps(value)}" for name, value in about.items()),
            "",
            "[rates]",
            *(f"{name} = {float(f'{value:.4g}')!r}" for name, value in (numbers | operations).items()),
            "",
        ]
    )
