"""The metrics of each step: a line of JSON in the run's folder, and curves of bounded length."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

from penstock.collectives.communicator import Traffic
from penstock.data.files import written_whole
from penstock.errors import CheckpointError
from penstock.files import open_regular, parse_json
from penstock.formatting import format_bytes

FILE = "metrics.jsonl"
_MOST_POINTS = 500  # of a curve
_MOST_LINE = 1 << 16  # bytes; a longer line is not valid
_MOST_STEPS = 1 << 53  # the largest range of integers that floats represent exactly
_OF_RANKS = ("longest_rank_wait", "shortest_rank_wait", "sent_bytes", "hidden_exchange")
_MOST_RANKS = 16  # that have metrics each


@dataclass(frozen=True)
class RankTraffic:
    """What each rank has exchanged with the others in a step."""

    ranks: tuple[Traffic, ...]

    def named(self) -> dict[str, float]:
        """The values by name: of all, and of each rank unless there are many."""
        waits = [rank.waited_seconds for rank in self.ranks]
        values: dict[str, float] = {
            "longest_rank_wait": max(waits),
            "shortest_rank_wait": min(waits),
            "sent_bytes": sum(rank.sent_bytes for rank in self.ranks),
        }
        if (hidden := self.hidden) is not None:
            values["hidden_exchange"] = hidden
        for number, rank in enumerate(self.ranks if len(self.ranks) <= _MOST_RANKS else ()):
            values |= {f"rank_{number}_wait": rank.waited_seconds, f"rank_{number}_sent": rank.sent_bytes}
            if rank.hidden is not None:
                values[f"rank_{number}_hidden"] = rank.hidden
        return values

    @property
    def hidden(self) -> float | None:
        """The share of all ranks' exchanges that they did not wait for; None if there was none."""
        return sum(self.ranks, Traffic()).hidden

    def __str__(self) -> str:
        waits = [rank.waited_seconds for rank in self.ranks]
        spread = f"{1e3 * min(waits):.0f} to {1e3 * max(waits):.0f} ms"
        last = f"rank {waits.index(min(waits))} the least"
        sent = format_bytes(sum(rank.sent_bytes for rank in self.ranks))
        hidden = "" if self.hidden is None else f", {self.hidden:.0%} of exchanges hidden"
        return f"{len(self.ranks)} ranks waited {spread} ({last}), {sent} sent{hidden}"

    def lines(self) -> list[str]:
        """A line for each rank, unless there are many."""
        if len(self.ranks) > _MOST_RANKS:
            return []
        return [
            f"rank {number}: waited {1e3 * rank.waited_seconds:.1f} ms, {format_bytes(rank.sent_bytes)} sent"
            + ("" if rank.hidden is None else f", {rank.hidden:.0%} hidden")
            for number, rank in enumerate(self.ranks)
        ]


def is_of_ranks(name: str) -> bool:
    """Whether a metric says what ranks exchanged."""
    return name in _OF_RANKS or re.fullmatch(r"rank_\d+_(wait|sent|hidden)", name) is not None


@dataclass(frozen=True)
class Metrics:
    """The metrics of a step."""

    step: int  # the first is 1
    loss: float
    learning_rate: float
    seconds: float  # of training so far
    tokens_per_second: float | None  # of text; None of other data
    data_wait: float  # the share of the step's time spent waiting for data
    device_wait: float  # the share spent waiting for the device; most of it if the device is busy
    live_bytes: int
    planned_bytes: int  # the part of them in arenas, which hold the temporaries of programs
    pooled_bytes: int
    peak_bytes: int
    limit_bytes: int | None
    hit_rate: float  # of the pool
    validation_loss: float | None = None
    samples_per_second: float | None = None
    epoch: int | None = None  # the first is 1; None if the data has no end
    traffic: RankTraffic | None = None
    others: Mapping[str, float] = field(default_factory=dict)  # a user's own, by name

    def named(self) -> dict[str, Any]:
        """All values that there are, by name."""
        single = (item.name for item in fields(self) if item.name not in ("traffic", "others"))
        known = {name: value for name in single if (value := getattr(self, name)) is not None}
        return known | (self.traffic.named() if self.traffic else {}) | dict(self.others)

    @property
    def speed(self) -> tuple[float, str]:
        """How much data is trained on in a second, and what is counted."""
        if self.tokens_per_second is not None:
            return self.tokens_per_second, "tokens"
        return self.samples_per_second or 0.0, "samples"


NAMES = frozenset(item.name for item in fields(Metrics))  # which no metric of a user may have


class Curve:
    """Values over steps. If there are too many points, pairs of points are replaced by their mean."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._stride = 1  # values in a point
        self._gathered: list[tuple[float, float]] = []

    def add(self, step: float, value: float) -> None:
        """Add a value."""
        self._gathered.append((step, value))
        if len(self._gathered) < self._stride:
            return
        self.points.append(_mean(self._gathered))
        self._gathered = []
        if len(self.points) >= _MOST_POINTS:
            self.points = [_mean(self.points[at : at + 2]) for at in range(0, len(self.points), 2)]
            self._stride *= 2

    def shown(self) -> list[tuple[float, float]]:
        """All points, including the last, which may be the mean of fewer values."""
        return [*self.points, _mean(self._gathered)] if self._gathered else list(self.points)


def read_curves(run: Path) -> dict[str, Curve]:
    """The curves of a run by the metrics' names, from its file; empty if there is no file."""
    curves: dict[str, Curve] = {}
    for _, values in _lines(run / FILE):
        _note(curves, values)
    return curves


class MetricsLog:
    """The file of a run's metrics, and its curves by the metrics' names."""

    def __init__(self, run: Path | None, last_step: int) -> None:
        """Continue after a step: lines of later steps, which the checkpoint does not include, are removed.

        Without a folder, nothing is written or kept: another rank does.
        """
        self._path = None if run is None else run / FILE
        self._file: TextIO | None = None  # open from the first line that is added until `close`
        self.curves: dict[str, Curve] = {}
        if self._path is None:
            return
        lines = []
        for line, values in _lines(self._path):
            if values["step"] <= last_step:
                lines.append(line)
                _note(self.curves, values)
        with written_whole(self._path) as file:
            file.write("".join(lines).encode())

    def add(self, metrics: Metrics) -> None:
        """Write a line; a CheckpointError says that the disk is full."""
        if self._path is None:
            return
        values = metrics.named()
        line = json.dumps(values, allow_nan=False) + "\n"
        try:
            if self._file is None:
                self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - for many lines
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise CheckpointError(f"{self._path} could not be written: {error.strerror}") from error
        _note(self.curves, values)

    def close(self) -> None:
        """Close the file; another line opens it again. Safe to call twice."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # a full disk, which `add` has told
                file.close()

    def __del__(self) -> None:
        self.close()


def _note(curves: dict[str, Curve], values: dict[str, Any]) -> None:
    """Add the numeric values of a line: a file may have been edited."""
    for name, value in values.items():
        if isinstance(value, float) or (isinstance(value, int) and abs(value) < _MOST_STEPS):
            curves.setdefault(name, Curve()).add(values["step"], value)


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The complete lines of a file, as text and as values; a line that was cut off is ignored."""
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
