"""What is measured at each step: a line of JSON in the run's folder, and curves of bounded length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.data.files import written_whole
from penstock.errors import CheckpointError
from penstock.files import open_regular, parse_json

FILE = "metrics.jsonl"
_MOST_POINTS = 500  # of a curve
_MOST_LINE = 1 << 16  # bytes; what is longer is no line of ours
_MOST_STEPS = 1 << 53  # which a float still tells apart


@dataclass(frozen=True)
class Metrics:
    """One step."""

    step: int  # the first is 1
    loss: float
    learning_rate: float
    seconds: float  # of training so far
    tokens_per_second: float
    data_wait: float  # the share of the step's time in which it waited for data
    device_wait: float  # the same for the device: on a busy one most of it
    live_bytes: int
    planned_bytes: int  # the part of them that is arenas, where the temporaries of programs have their places
    pooled_bytes: int
    peak_bytes: int
    limit_bytes: int | None
    hit_rate: float  # of the pool
    validation_loss: float | None = None


class Curve:
    """Values over steps. When there are too many points, neighbours become their mean."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._stride = 1  # values in a point
        self._gathered: list[tuple[float, float]] = []

    def add(self, step: float, value: float) -> None:
        """One more value."""
        self._gathered.append((step, value))
        if len(self._gathered) < self._stride:
            return
        self.points.append(_mean(self._gathered))
        self._gathered = []
        if len(self.points) >= _MOST_POINTS:
            self.points = [_mean(self.points[at : at + 2]) for at in range(0, len(self.points), 2)]
            self._stride *= 2

    def shown(self) -> list[tuple[float, float]]:
        """All points, also that of the last values, which may be fewer than those of the others."""
        return [*self.points, _mean(self._gathered)] if self._gathered else list(self.points)


def read_curves(run: Path) -> dict[str, Curve]:
    """The curves of a run by the metrics' names, from its file; none where there is no file."""
    curves: dict[str, Curve] = {}
    for _, values in _lines(run / FILE):
        _note(curves, values)
    return curves


class MetricsLog:
    """The file of a run's metrics, and its curves by the metrics' names."""

    def __init__(self, run: Path, last_step: int) -> None:
        """Go on after a step: lines of later ones, which a checkpoint does not know of, are removed."""
        self._path = run / FILE
        self.curves: dict[str, Curve] = {}
        lines = []
        for line, values in _lines(self._path):
            if values["step"] <= last_step:
                lines.append(line)
                _note(self.curves, values)
        with written_whole(self._path) as file:
            file.write("".join(lines).encode())

    def add(self, metrics: Metrics) -> None:
        """Write a line; a CheckpointError says that the disk is full."""
        values = {name: value for name, value in asdict(metrics).items() if value is not None}
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(values, allow_nan=False) + "\n")
        except OSError as error:
            raise CheckpointError(f"{self._path} could not be written: {error.strerror}") from error
        _note(self.curves, values)


def _note(curves: dict[str, Curve], values: dict[str, Any]) -> None:
    """Add what a line says, as far as it is numbers: a file may have been changed by hand."""
    for name, value in values.items():
        if isinstance(value, float) or (isinstance(value, int) and abs(value) < _MOST_STEPS):
            curves.setdefault(name, Curve()).add(values["step"], value)


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The whole lines of a file, as text and as values; one that a kill cut off is left out."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    with file:
        while data := file.readline(_MOST_LINE):
            line = data.decode(errors="replace")
            with suppress(ValueError):
                values = parse_json(line)
                if line.endswith("\n") and isinstance(values, dict) and _is_step(values.get("step")):
                    yield line, values


def _is_step(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST_STEPS


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    return points[-1][0], sum(value for _, value in points) / len(points)
