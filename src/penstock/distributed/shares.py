"""Shards of batches, and the means of what ranks compute of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.collectives.communicator import Communicator, Job, Traffic
from penstock.stream.future import Future

Values = dict[str, Future[npt.NDArray[Any]]]
_TRAFFIC = 4  # numbers of a rank's traffic


def part_of(batch: Any, number: int, count: int) -> Any:
    """A shard of a batch: as many of its samples as of the other shards, or one more."""
    if isinstance(batch, (tuple, list)):
        return tuple(part_of(part, number, count) for part in batch)
    if isinstance(batch, Mapping):
        return {key: part_of(part, number, count) for key, part in batch.items()}
    if not getattr(batch, "shape", ()):
        return batch
    length = batch.shape[0]
    return batch[number * length // count : (number + 1) * length // count]


@dataclass(frozen=True)
class Means:
    """The means over a global batch by name, and what each rank told along with its values."""

    values: dict[str, float]
    notes: list[list[float]]  # by rank
    traffic: list[Traffic]  # by rank, until the values were computed


class PendingMeans:
    """Means that ranks are exchanging."""

    def __init__(
        self,
        group: Communicator,
        job: Job,
        names: Sequence[str],
        sizes: Sequence[Sequence[int]],
        in_turn: bool,
    ) -> None:
        self._group, self._job, self._names, self._sizes = group, job, names, sizes
        self._in_turn = in_turn

    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._job.is_ready()

    def wait(self) -> Means:
        """The means; waits for the other ranks."""
        rows = self._job.wait().reshape(self._job.size, -1)
        weights = [size for parts in self._sizes for size in parts]
        notes = rows.shape[1] - len(self._names) * len(weights) // self._job.size
        table = rows[:, notes:]
        if self._in_turn:
            table = table.reshape(self._job.size, len(self._sizes) // self._job.size, -1).swapaxes(0, 1)
        table = table.reshape(-1, len(self._names))  # a line for each part of a batch
        means = {
            name: float(np.average(table[:, at], weights=weights)) for at, name in enumerate(self._names)
        }
        traffic = [Traffic(int(row[0]), int(row[1]), float(row[2]), float(row[3])) for row in rows]
        self._group.reported = traffic
        return Means(means, rows[:, _TRAFFIC:notes].tolist(), traffic)


def means(
    group: Communicator,
    values: Sequence[Values],
    sizes: Sequence[Sequence[int]],
    notes: Sequence[float] = (),
    in_turn: bool = False,
) -> PendingMeans:
    """Begin to exchange the values of this rank's parts of batches, in order: by shard, and in it by batch.

    `sizes` has the samples of the parts of all ranks. `notes` are numbers of the rank itself. `in_turn`: each
    rank has every so manieth shard, and not neighbours.
    """
    own = group.traffic
    told = [own.operations, own.sent_bytes, own.seconds, own.waited_seconds, *notes]
    job = group.submit("all_gather", _Numbers(values, told))
    return PendingMeans(group, job, list(values[0]), sizes, in_turn)


class _Numbers:
    """Numbers that the device may still compute."""

    def __init__(self, values: Sequence[Values], notes: Sequence[float]) -> None:
        self._values, self._notes = values, notes

    def is_ready(self) -> bool:
        return all(future.is_ready() for row in self._values for future in row.values())

    def wait(self) -> npt.NDArray[np.float64]:
        numbers = [float(future.wait()) for row in self._values for future in row.values()]
        return np.array([*self._notes, *numbers], np.float64)
