"""How the ranks of a run share its batches, and agree on when it ends."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.collectives.communicator import Traffic
from penstock.collectives.world import communicator
from penstock.distributed.data_parallel import DataParallel
from penstock.distributed.pieces import Piece
from penstock.distributed.shares import Means, Values, means, part_of
from penstock.errors import SettingError
from penstock.nn.module import Module
from penstock.optim.optimizer import Optimizer
from penstock.tensor.core import Tensor
from penstock.train.feed import Batch, samples_in, some_samples_in, uploaded
from penstock.train.metrics import RankTraffic

Evaluated = dict[str, float] | None
Stop = signal.Signals | bool | None  # why a run should end: a signal, or a callback's wish
_BY_ITSELF = -1  # stopped by a callback, not by a signal


class Pending(Protocol):
    """The values of a step that is not done yet."""

    def wait(self) -> Means:
        """Their means over the samples."""


@dataclass(frozen=True)
class _Own:
    """Those of a step without other ranks."""

    values: Sequence[Values]
    sizes: Sequence[int]

    def wait(self) -> Means:
        return Means(_means([_read(batch) for batch in self.values], self.sizes), [], [])


def _read(values: Values) -> dict[str, float]:
    return {name: float(future.wait()) for name, future in values.items()}


def _means(rows: Sequence[Mapping[str, float]], sizes: Sequence[int]) -> dict[str, float]:
    """The means of values of batches over their samples, by name."""
    return {name: float(np.average([row[name] for row in rows], weights=sizes)) for name in rows[0]}


class Ranks:
    """The ranks of a run as this rank sees them; without DataParallel, it is alone."""

    def __init__(self, model: Module, optimizers: Sequence[Optimizer]) -> None:
        self.group = communicator()
        self._parallel = next((each for each in optimizers if isinstance(each, DataParallel)), None)
        if self.group.size > 1 and (self._parallel is None or len(optimizers) > 1):
            raise SettingError(
                f"{self.group.size} ranks train together with ps.distributed.DataParallel(optimizer), and "
                f"{' and '.join(type(each).__name__ for each in optimizers)} was given"
            )
        self._buffers = dict(model.named_buffers()) if self._parallel else {}
        self.writes = self.group.rank == 0  # the folder of the run
        self.begin()

    def begin(self) -> None:
        """Begin to train, perhaps not for the first time."""
        self.wish: Stop = None  # whether this rank wants the run to end
        self._stop = 0  # the signal that another rank, or this one, has told of
        self._last_step: int | None = None  # after which all ranks stop
        self._before: Sequence[Traffic] = ()  # what each rank had exchanged before
        self._checked = False  # whether the buffers that a step changes are known
        self._choose: Callable[[Any], None] | None = None  # what the first batch is needed for

    @property
    def chooses(self) -> bool:
        """Whether the stage of sharding is to be chosen yet."""
        return self._parallel is not None and self._parallel.chooses

    def choose(
        self,
        step: Callable[..., Any],
        accumulate: int,
        own: bool,
        memory: int | None,
        say: Callable[[str], None],
    ) -> None:
        """Have the next batch that is split choose the stage of sharding for a step; see `train`."""
        parallel = self._parallel
        assert parallel is not None

        def choose(batch: Any) -> None:
            part = part_of(batch, 0, parallel.shards)
            size, total = samples_in(part), accumulate * samples_in(batch)
            with parallel.sharing(*((size, total) if own else (1, 1))):
                own_part = uploaded(part, parallel.device)
                chosen = parallel.choose(step, own_part, size, total, True, True, memory=memory)
            if chosen:
                say(chosen)

        self._choose = choose

    def split(self, batch: Any) -> list[Any]:
        """The parts of a global batch that this rank computes."""
        if self._parallel is None:
            return [batch]
        if self._choose is not None:
            choose, self._choose = self._choose, None
            choose(batch)
        return [part_of(batch, number, self._parallel.shards) for number in self._parallel.own_numbers]

    def whole(self, device: str | None = None) -> AbstractContextManager[None]:
        """A block, which all ranks enter, in which the model's parameters are whole: see `gathered`."""
        return nullcontext() if self._parallel is None else self._parallel.gathered(device)

    def train(self, step: Callable[..., Any], batches: Sequence[Batch], own: bool) -> Pending:
        """Submit a step on this rank's parts of some batches whose gradients are added.

        `own`: the step is a user's, who knows of no shares.
        """
        sizes = [batch.size for batch in batches]
        values: list[Values] = []
        if self._parallel is None:
            for at, batch in enumerate(batches):
                results = step(batch.parts[0], sizes[at], sum(sizes), at == 0, at == len(batches) - 1)
                values.append({name: value.numpy_async() for name, value in results.items()})
            return _Own(values, sizes)
        shards = self._parallel.shards
        parts = [[_part_size(size, number, shards) for size in sizes] for number in range(shards)]
        if not all(size for row in parts for size in row):
            raise SettingError(f"batches of {sizes} samples are too small for {shards} shards")
        before = {} if self._checked else {name: each.detach() for name, each in self._buffers.items()}
        for leaf, number in enumerate(self._parallel.own()):
            for at, batch in enumerate(batches):
                size, last = parts[number][at], at == len(batches) - 1
                with self._parallel.sharing(*((size, sum(sizes)) if own else (1, 1))):
                    results = step(batch.parts[leaf], size, sum(sizes), at == 0, last)
                values.append({name: value.numpy_async() for name, value in results.items()})
        self._check_buffers(before)
        stop = self.wish
        why = (int(stop) if isinstance(stop, signal.Signals) else _BY_ITSELF) if stop else 0
        return means(self.group, values, parts, [float(why)], self._parallel.zero == 3)

    def _check_buffers(self, before: Mapping[str, Tensor]) -> None:
        """Refuse a step that changes buffers in a way of its own: ranks would have different values."""
        assert self._parallel is not None
        for name, old in before.items():
            buffer = self._buffers[name]
            if buffer._node is not old._node and not self._parallel.statistics.has(buffer):
                raise SettingError(
                    f"the step changes {name}, and ranks would have different values of it; only the running "
                    "statistics of ps.nn's layers become the mean over ranks. Compute it after the step, or "
                    "use a single device without DataParallel"
                )
        self._checked = True

    def evaluate(self, values_of: Callable[[Any], Mapping[str, Tensor]], batches: Iterable[Any]) -> Evaluated:
        """The means of the values of batches, which ranks compute in turn; None if there is no batch."""
        sizes: list[int] = []
        own: list[Values] = []
        for number, batch in enumerate(batches):
            sizes.append(some_samples_in(batch))
            if number % self.group.size == self.group.rank:
                results = values_of(batch)
                own.append({name: value.numpy_async() for name, value in results.items()})
        if not sizes:
            return None
        rest = len(sizes) % self.group.size
        if self._parallel is not None and self._parallel.zero == 3 and 0 < rest <= self.group.rank:
            values_of(batch)  # all ranks gather parameters together, so that all compute a batch
        rows = [_read(values) for values in own]
        if self.group.size == 1:
            return _means(rows, sizes)
        names = json.loads(self.group.share(json.dumps(list(rows[0]) if rows else []).encode()))
        table = np.full((-(-len(sizes) // self.group.size), len(names)), np.nan)
        for row, values in zip(table, rows, strict=False):
            row[:] = [values[name] for name in names]
        parts = self.group.run("all_gather", table.reshape(-1)).reshape(self.group.size, *table.shape)
        ordered = parts.swapaxes(0, 1).reshape(-1, len(names))[: len(sizes)]
        return _means([dict(zip(names, row.tolist(), strict=True)) for row in ordered], sizes)

    def pieces(self, model: Mapping[str, Tensor]) -> list[Piece] | None:
        """What this rank writes of a checkpoint, if it does not write all."""
        if self.group.size == 1 or self._parallel is None:
            return None
        return list(self._parallel.pieces(model))

    def common_state(self) -> dict[str, npt.NDArray[Any]]:
        """The optimizer's state that is not in `pieces`."""
        assert self._parallel is not None
        return self._parallel.common_state()

    def told(self, means: Means, step: int) -> RankTraffic | None:
        """Take note of what ranks told with a step; what they have exchanged since the step before."""
        flags = [int(row[0]) for row in means.notes if row[0]]
        if flags and self._last_step is None:
            # Every rank has read what was told with a step after the next.
            self._stop, self._last_step = max(flags), step + 1
        before, self._before = self._before or means.traffic, means.traffic
        if len(means.traffic) < 2:
            return None
        return RankTraffic(tuple([now.since(then) for now, then in zip(means.traffic, before, strict=True)]))

    def stops(self, step: int, own: Stop) -> bool:
        """Whether the run ends now, after a step, as this rank or another wants."""
        if self.group.size == 1:
            return bool(own)
        return self._last_step is not None and step >= self._last_step

    def stopped_by(self, own: signal.Signals | None) -> signal.Signals | None:
        """The signal that ended the run, of whatever rank."""
        return signal.Signals(self._stop) if own is None and self._stop > 0 else own


def _part_size(size: int, number: int, shards: int) -> int:
    return (number + 1) * size // shards - number * size // shards
