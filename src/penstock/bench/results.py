"""The results of a run, and their file."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from penstock.bench.case import Way
from penstock.bench.ceilings import Ceilings
from penstock.bench.errors import BenchmarkError
from penstock.bench.peer import Torch
from penstock.bench.statistics import Interval, median_interval
from penstock.data.files import written_whole
from penstock.files import parse_json, read_text
from penstock.runtime import Device

FORMAT = 1  # of the file format, for files that an older Penstock could not read


@dataclass(frozen=True)
class Measured:
    """A case on a device."""

    name: str
    size: str
    flops: float
    nbytes: float
    way: Way
    seconds: list[float]  # of a call, in each round
    torch_seconds: list[float]  # in the same rounds; empty without PyTorch

    @property
    def label(self) -> str:
        """The name and the size."""
        return f"{self.name} {self.size}"

    @property
    def time(self) -> Interval:
        """Seconds of a call."""
        return median_interval(self.seconds)

    def with_more(self, other: Measured) -> Measured:
        """The case with the samples of more rounds."""
        seconds, peers = self.seconds + other.seconds, self.torch_seconds + other.torch_seconds
        return replace(self, seconds=seconds, torch_seconds=peers)


@dataclass(frozen=True)
class Hardware:
    """The identity of a device."""

    name: str
    description: str
    api: str
    kind: str
    compute_units: int
    tf32: bool

    @classmethod
    def of(cls, device: Device) -> Hardware:
        """The identity of a given device."""
        can = device.capabilities
        return cls(device.name, can.description, can.api, can.kind, can.compute_units, can.tf32)

    def __str__(self) -> str:
        return f"{self.name} ({self.description}, {self.compute_units} units)"

    def is_same(self, other: Hardware) -> bool:
        """Whether times of both can be compared; its interface and its settings may have changed."""
        mine, theirs = (
            (hardware.name, hardware.description, hardware.compute_units) for hardware in (self, other)
        )
        return mine == theirs


@dataclass(frozen=True)
class DeviceResults:
    """All cases on a device."""

    hardware: Hardware
    ceilings: Ceilings
    measured: list[Measured]
    left_out: list[str]  # cases that the device has no memory for, and why


@dataclass(frozen=True)
class Results:
    """A run."""

    versions: dict[str, str]
    only: list[str]  # the requested cases; empty: all
    devices: list[DeviceResults]

    def of(self, hardware: Hardware, source: str) -> DeviceResults:
        """The results of a device; a BenchmarkError names the devices of the run if it is not among them."""
        for device in self.devices:
            if device.hardware.is_same(hardware):
                return device
        there = ", ".join(str(device.hardware) for device in self.devices)
        raise BenchmarkError(f"{source} was measured on {there}, and cannot be compared with {hardware}")

    def save(self, path: str | Path) -> None:
        """Write the file, which `load` reads."""
        tree = {"what": "penstock bench", "format": FORMAT, **asdict(self)}
        with written_whole(Path(path)) as file:
            file.write((json.dumps(tree, indent=1, allow_nan=False) + "\n").encode())


def versions(peer: Torch | None = None) -> dict[str, str]:
    """The software versions that times depend on, besides the device."""
    known = {
        "penstock": version("penstock"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": platform.platform(),
    }
    return known if peer is None else {**known, "torch": peer.version}


def load(path: str | Path) -> Results:
    """Read a file that `Results.save` wrote; a BenchmarkError says what is wrong with it."""
    try:
        tree = parse_json(read_text(Path(path)))
    except OSError as error:
        raise BenchmarkError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # neither JSON nor UTF-8
        raise BenchmarkError(f"{path} is damaged: {error}") from None
    if not isinstance(tree, dict) or tree.get("what") != "penstock bench":
        raise BenchmarkError(f"{path} was not written by penstock bench --save")
    if tree.get("format") != FORMAT:
        raise BenchmarkError(
            f"{path} has version {tree.get('format')!r} of the format, and this Penstock reads version "
            f"{FORMAT}; write it again with --save"
        )
    try:
        return _results(tree)
    except (KeyError, TypeError, ValueError) as error:
        raise BenchmarkError(f"{path} is damaged: {_reason(error)}") from None


def _results(tree: dict[str, Any]) -> Results:
    devices = [
        DeviceResults(
            _record(Hardware, device["hardware"]),
            _record(Ceilings, device["ceilings"]),
            [_record(Measured, case) for case in _list(device["measured"], dict)],
            _list(device["left_out"], str),
        )
        for device in _list(tree["devices"], dict)
    ]
    if not devices:
        raise ValueError("it has no device")
    texts = {str(name): str(value) for name, value in dict(tree["versions"]).items()}
    return Results(texts, _list(tree["only"], str), devices)


_Record = TypeVar("_Record", Hardware, Ceilings, Measured)
_KINDS: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int),
    "float": lambda value: isinstance(value, (int, float)) and math.isfinite(value) and value >= 0,
    "Way": lambda value: value in ("device", "upload", "download"),
    "list[float]": lambda value: isinstance(value, list) and all(_is_time(item) for item in value),
}


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < math.inf


def _record(kind: type[_Record], tree: Any) -> _Record:
    """A dataclass from its values by name, each checked against its annotation."""
    values = {}
    for item in fields(kind):
        values[item.name] = value = tree[item.name]
        if not _KINDS[str(item.type)](value):
            raise ValueError(f"{item.name} is {value!r}")
    if kind is Measured and not values["seconds"]:
        raise ValueError(f"{values['name']} has no times")
    return kind(**values)


def _list(value: Any, kind: type) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise ValueError(f"{str(value)[:40]!r} is not a list of {kind.__name__}")
    return value


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
