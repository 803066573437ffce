"""Batches of any dataset on a device: shuffled, made by processes, and resumed at any sample."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import numpy as np

from penstock.data.batches import InBlocks, Ints, shuffled
from penstock.data.collate import collate as stack
from penstock.data.datasets import Arrays
from penstock.data.errors import DataError
from penstock.data.prefetch import Prefetch
from penstock.data.table import Table
from penstock.data.workers import Workers
from penstock.runtime import Device

Collate = Callable[[Sequence[Any]], Any]


class Loader:
    """Batches of a dataset as tensors on a device: each `for` loop over it is an epoch.

    A dataset is anything with a length and items by index, such as a list, an array (also one that is mapped
    from a file), a Hugging Face dataset or a class of one's own; or an iterable, whose items come in its own
    order. An item is a sample: an array, a number, a text, or a tuple, list or dict of them. `Table` has the
    rows of Arrow and Parquet files.

    >>> loader = ps.data.Loader([(np.zeros(3), 0), (np.ones(3), 1)], batch=2)
    >>> [(x.shape, y.tolist()) for x, y in loader]
    [((2, 3), [0, 1])]
    """

    def __init__(
        self,
        dataset: Any,
        batch: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        workers: int = 0,
        collate: Collate = stack,
        device: Device | str | None = None,
        start: int = 0,
    ) -> None:
        """A loop that was left early is gone on with by the next one, as that over a new loader with `start`.

        `shuffle`: in an order that depends on `seed` and on the epoch. `drop_last`: no shorter last batch.

        Processes make the batches, as many as `workers`, or else a thread of this process does. In processes,
        the generators of `random` and of NumPy are seeded anew for each batch, so that batches do not depend
        on how many processes there are; of an iterable, each goes through all items and collates the batches
        that are its turn. `collate` makes a batch of samples; `padded` and `packed` are for
        samples of different lengths. `start` is the number of a sample, from `state`, to resume there.
        """
        for name, count in (("batch", batch), ("workers", workers), ("start", start), ("seed", seed)):
            if isinstance(count, bool) or not isinstance(count, (int, np.integer)):
                raise DataError(f"{name} is an integer, and {count!r} was given")
        if batch < 1 or start < 0 or workers < 0:
            raise DataError(
                f"a batch has 1 or more samples, workers and the start are 0 or more, and {batch}, {workers} "
                f"and {start} were given"
            )
        dataset = _dataset(dataset)
        self._size = _size(dataset)
        if self._size is None and shuffle:
            raise DataError(
                f"{type(dataset).__name__} has no items by index, so it cannot be shuffled; use "
                f"shuffle=False, or a dataset with __getitem__ and __len__"
            )
        self._batch, self._shuffle, self._seed, self._drop_last = batch, shuffle, seed, drop_last
        if self._size is not None and not len(self):
            raise DataError(f"a dataset of {self._size} samples has no batch of {batch}")
        self._make = _Make(dataset, collate) if self._size is not None else _Iterate(dataset, collate)
        self._device, self._next = device, start
        self._first = self._seen = 0  # of an iterable: the samples before this epoch, and those read so far
        self._loops = 0
        size = self._size or 0
        self._shuffled = InBlocks(lambda samples: shuffled(samples, size, seed)[1])
        self._worker_count = workers
        self._workers: Workers | None = None
        self._iterating = False

    def __len__(self) -> int:
        """How many batches an epoch has."""
        if self._size is None:
            raise TypeError(f"nobody knows how many items {type(self._make.dataset).__name__} has")
        return self._size // self._batch if self._drop_last else -(-self._size // self._batch)

    def __iter__(self) -> Iterator[Any]:
        self._check_idle()
        return self._epoch()

    def _check_idle(self) -> None:
        if self._iterating:
            raise DataError("this Loader is being iterated already; make another for a loop inside the first")

    def state(self) -> int:
        """The number of the sample after the last batch that was taken: what `start` takes to go on there."""
        return self._next

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was taken, with what tells whether the data is the same."""
        return {"next": self._next, "first": self._first, **self._kind}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`; a DataError says where the dataset or a setting is another."""
        if self._iterating:
            raise DataError("this Loader is being iterated; load its state before the loop, or after it")
        for name, value in self._kind.items():
            if state.get(name) != value:
                raise DataError(
                    f"the state is of a Loader with {name}={state.get(name)}, and this has {value}"
                )
        self._next, self._first = int(state["next"]), int(state["first"])

    @cached_property
    def _kind(self) -> dict[str, Any]:
        """What decides which batches come, as far as it is known without reading all of the data."""
        dataset = self._make.dataset
        return {
            "samples": self._size,
            "batch": self._batch,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "drop_last": self._drop_last,
            "contents": dataset.key() if isinstance(dataset, Arrays) else None,
        }

    def close(self) -> None:
        """End the worker processes; another loop starts them anew. Safe to call twice."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _epoch(self) -> Iterator[Any]:
        """The batches from the next sample to the end of its epoch."""
        self._check_idle()  # again, as two iterators may be made before the first batch of either
        self._iterating = True
        try:
            iterated = self._size is None
            made = self._iterated() if iterated else self._indexed()
            with Prefetch(_Batches(made, self._next), self._device) as prefetch:
                for batch in prefetch:
                    self._next = prefetch.state()
                    yield batch
            if iterated:
                self._first = self._next = self._seen
        finally:
            self._iterating = False

    def _made(self, requests: Iterable[tuple[int, Any]]) -> Iterator[Any]:
        """What is made of requests, each with its position, here or by processes."""
        if self._worker_count and self._workers is None:
            self._workers = Workers(self._make, self._worker_count, self._seed)
            weakref.finalize(self, self._workers.close)
        if self._workers is None:
            return (self._make(request) for _, request in requests)
        return self._workers.answers(requests)

    def _indexed(self) -> Iterator[tuple[Any, int]]:
        """The batches of a dataset with items by index, and the state after each."""
        ranges, ends = itertools.tee(self._ranges())
        made = self._made((start, self._order(start, stop)) for start, stop, _ in ranges)
        return zip(made, (end for _, _, end in ends), strict=False)

    def _ranges(self) -> Iterator[tuple[int, int, int]]:
        """The first sample of each batch, the sample after its last, and the state after it."""
        assert self._size is not None
        start, end = self._next, (self._next // self._size + 1) * self._size
        while start < end:
            stop = min(start + self._batch, end)
            after = end if self._drop_last and end - stop < self._batch else stop
            if stop - start == self._batch or not self._drop_last:
                yield start, stop, after
            start = after

    def _order(self, start: int, stop: int) -> Ints:
        """The indices of samples."""
        assert self._size is not None
        return self._shuffled(start, stop - start) if self._shuffle else np.arange(start, stop) % self._size

    def _iterated(self) -> Iterator[tuple[Any, int]]:
        """The batches of an iterable, of a new epoch if the last has ended, and the state after each."""
        while True:
            self._loops += 1
            begin = self._next - self._first
            asked = itertools.count(begin, self._batch)
            answers = self._made((start, (self._loops, start, self._batch)) for start in asked)
            batch, position = next(answers)
            if position > begin:
                break
            if not position:
                name = type(self._make.dataset).__name__
                raise DataError(
                    f"{name} gives no items; an iterator gives them once, and is no dataset for epochs"
                )
            self._first += position
        for start in itertools.count(begin, self._batch):
            self._seen = self._first + position
            if position - start == self._batch or (position > start and not self._drop_last):
                yield batch, self._seen
            if position - start < self._batch:
                return
            batch, position = next(answers)


@dataclass(frozen=True)
class _Make:
    """Makes the batch of some indices. It travels to worker processes."""

    dataset: Any
    collate: Collate

    def __call__(self, indices: Ints) -> Any:
        if isinstance(self.dataset, (Arrays, Table)) and self.collate is stack:
            return self.dataset.rows(indices)
        if hasattr(self.dataset, "__getitems__"):  # PyTorch's and Hugging Face's name
            return self.collate(self.dataset.__getitems__(indices.tolist()))
        return self.collate([self.dataset[index] for index in indices.tolist()])


@dataclass
class _Iterate:
    """Makes the batches of an iterable in order. It travels to worker processes, each of which iterates.

    A request is the number of the loop, the number of a sample and how many are wanted; the answer is the
    batch of as many as there are and the number of samples that were seen.
    """

    dataset: Any
    collate: Collate
    loop: int = 0
    position: int = 0
    items: Iterator[Any] | None = None

    def __call__(self, request: tuple[int, int, int]) -> tuple[Any, int]:
        loop, start, count = request
        if loop != self.loop or self.items is None:
            self.loop, self.position, self.items = loop, 0, iter(self.dataset)
        self.position += sum(1 for _ in itertools.islice(self.items, start - self.position))
        samples = list(itertools.islice(self.items, count))
        self.position += len(samples)
        return self.collate(samples) if samples else None, self.position


class _Batches:
    """Batches with the state after each, for `Prefetch`."""

    def __init__(self, made: Iterator[tuple[Any, int]], state: int) -> None:
        self._made, self._state = made, state

    def __next__(self) -> Any:
        batch, self._state = next(self._made)
        return batch

    def state(self) -> int:
        return self._state


def _dataset(given: Any) -> Any:
    """A dataset whose items are its rows, where those of an array or of a pyarrow.Table would not be."""
    if isinstance(given, np.ndarray):
        return Arrays(given)
    arrow = type(given).__module__.startswith("pyarrow") and hasattr(given, "column_names")
    return Table(given) if arrow else given


def _size(dataset: Any) -> int | None:
    """How many items a dataset has; None if it can only be iterated."""
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return len(dataset)
    if isinstance(dataset, Iterable):
        return None
    raise DataError(
        f"a dataset has items by index and a length, or can be iterated; {type(dataset).__name__} cannot"
    )
