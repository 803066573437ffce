"""Shards of batches, and the means of what ranks compute of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.collectives.communicator import Communicator, Job
from penstock.stream.future import Future

Values = dict[str, Future[npt.NDArray[Any]]]


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
    """The means over a global batch by name, and a number that each rank gave along with its values."""

    values: dict[str, float]
    notes: list[list[float]]  # by rank


class PendingMeans:
    """Means that ranks are exchanging."""

    def __init__(
        self, job: Job, names: Sequence[str], sizes: Sequence[Sequence[int]], notes: int, in_turn: bool
    ) -> None:
        self._job, self._names, self._sizes, self._notes = job, names, sizes, notes
        self._in_turn = in_turn

    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._job.is_ready()

    def wait(self) -> Means:
        """The means; waits for the other ranks."""
        rows = self._job.wait().reshape(self._job.size, -1)
        notes = rows[:, : self._notes].tolist()
        table = rows[:, self._notes :]
        if self._in_turn:
            table = table.reshape(self._job.size, len(self._sizes) // self._job.size, -1).swapaxes(0, 1)
        table = table.reshape(-1, len(self._names))  # a line for each part of a batch
        weights = [size for parts in self._sizes for size in parts]
        means = {
            name: float(np.average(table[:, at], weights=weights)) for at, name in enumerate(self._names)
        }
        return Means(means, notes)


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
    source = _Numbers(values, notes)
    return PendingMeans(group.submit("all_gather", source), list(values[0]), sizes, len(notes), in_turn)


class _Numbers:
    """Numbers that the device may still compute."""

    def __init__(self, values: Sequence[Values], notes: Sequence[float]) -> None:
        self._values, self._notes = values, notes

    def is_ready(self) -> bool:
        return all(future.is_ready() for row in self._values for future in row.values())

    def wait(self) -> npt.NDArray[np.float64]:
        numbers = [float(future.wait()) for row in self._values for future in row.values()]
        return np.array([*self._notes, *numbers], np.float64)
