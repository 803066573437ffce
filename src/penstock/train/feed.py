"""The batches of a run, epoch after epoch, on its device, with the position after each of them.

Data is anything that can be iterated, once for each epoch. Data with `state_dict` and `load_state_dict`, such
as a `ps.data.Loader`, is resumed by them; of other data, the batches that were seen are read and skipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.data import DataError
from penstock.nn.state import as_array
from penstock.runtime import Device
from penstock.tensor.core import Tensor
from penstock.tensor.creation import asarray


@dataclass(frozen=True)
class Batch:
    """The parts of a batch that this process trains on, on its device, and how many samples all of it has."""

    parts: list[Any]
    size: int


@dataclass(frozen=True)
class _Ahead:
    """A batch that was read and not taken yet, and the state of the data after it."""

    batch: Batch
    state: Any


class Feed:
    """Batches in order, and the position after the last that was taken."""

    def __init__(
        self, data: Any, device: Device, split: Callable[[Any], list[Any]] = lambda batch: [batch]
    ) -> None:
        """`split` gives the parts of a batch that are trained on here."""
        if not hasattr(data, "__iter__"):
            raise DataError(f"data gives batches in a loop, and {type(data).__name__} cannot be iterated")
        self._data, self._device, self._split = data, device, split
        self._data_state = state_of(data)
        self._is_stateful = self._data_state is not None
        self._iterator: Iterator[Any] | None = None
        self._ahead: _Ahead | None = None
        self._taken = 0  # batches of this epoch
        self._expected: str | None = None  # the kind of an epoch's first batch
        self.epoch = 0  # epochs that have ended
        self.waited_seconds = 0.0  # how long it was waited for batches

    def batches_in_epoch(self) -> int | None:
        """How many batches an epoch has, if the data knows that."""
        try:
            return len(self._data)
        except TypeError:
            return None

    def described(self) -> dict[str, Any]:
        """The data in a few plain values."""
        state = self._data_state if isinstance(self._data_state, dict) else {}
        fixed = {name: value for name, value in state.items() if name not in ("next", "first")}
        return {"name": type(self._data).__name__, "batches": self.batches_in_epoch(), **fixed}

    def take(self, most: int) -> list[Batch]:
        """The next batches of an epoch: as many as asked for, or those until its end."""
        self.look_ahead()
        taken: list[Batch] = []
        while len(taken) < most:
            ahead = self._read()
            if ahead is None and taken:
                break
            if ahead is None:
                raise DataError(
                    f"{type(self._data).__name__} gave no batch in epoch {self.epoch + 1}; an iterator gives "
                    "its batches once, so give what can be iterated again, such as a list or a ps.data.Loader"
                )
            taken.append(ahead.batch)
            self._taken += 1
            self._data_state, self._ahead = ahead.state, None
        return taken

    def look_ahead(self) -> None:
        """Read the next batch, if there is one, so that the end of an epoch is known."""
        if self._taken:
            self._read()

    def read(self) -> None:
        """Read the next batch, if none is there yet."""
        self._read()

    def at_start(self) -> bool:
        """Whether the next batch is the first of an epoch; known after `look_ahead`."""
        return not self._taken

    def state(self) -> dict[str, Any]:
        """The position after the last batch that was taken, for `load_state`."""
        return {
            "epoch": self.epoch,
            "batches": self._taken,
            "data": self._data_state,
            "length": self.batches_in_epoch(),
            "kind": self._expected,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`; a DataError says where the data is not that of the state."""
        if state["length"] != self.batches_in_epoch():
            raise DataError(
                f"an epoch of the data had {state['length']} batches, and has {self.batches_in_epoch()} now"
            )
        if self._is_stateful != (state["data"] is not None):
            raise DataError(f"the data was of another kind than {type(self._data).__name__}")
        self.close()
        if self._is_stateful:
            self._data.load_state_dict(state["data"])
        elif self._iterator is not None and self._iterator is self._data:
            raise DataError(f"a {type(self._data).__name__} cannot go back to where a checkpoint was written")
        self._iterator = self._ahead = None
        self.epoch, self._taken = state["epoch"], state["batches"]
        self._data_state, self._expected = state["data"], state["kind"]

    def close(self) -> None:
        """Stop what reads ahead. Data without a state stays open, since it may give batches only once."""
        if self._is_stateful and self._iterator is not None:
            _close(self._iterator)
            self._iterator = self._ahead = None

    def _read(self) -> _Ahead | None:
        """Read the next batch, if none is there yet; None at the end of an epoch, which another follows."""
        if self._ahead is not None:
            return self._ahead
        start = time.perf_counter()
        try:
            if self._iterator is None:
                self._iterator = self._opened()
            batch = next(self._iterator)
        except StopIteration:
            self._iterator = None
            if self._taken:
                self.epoch, self._taken = self.epoch + 1, 0
                self._data_state = state_of(self._data)
            return None
        finally:
            self.waited_seconds += time.perf_counter() - start
        if not self._is_stateful and not self._taken:
            self._check_kind(batch)
        parts = [uploaded(part, self._device) for part in self._split(batch)]
        self._ahead = _Ahead(Batch(parts, some_samples_in(batch)), state_of(self._data))
        return self._ahead

    def _opened(self) -> Iterator[Any]:
        """An iterator from the next batch of the epoch on."""
        if self._is_stateful:
            self._data.load_state_dict(self._data_state)
        iterator: Iterator[Any] = iter(self._data)
        for number in range(0 if self._is_stateful else self._taken):
            try:
                batch = next(iterator)
            except StopIteration:
                raise DataError(
                    f"the run has seen {self._taken} batches of this epoch, and the data has {number} now"
                ) from None
            if number == 0:
                self._check_kind(batch)
        return iterator

    def _check_kind(self, batch: Any) -> None:
        """Compare the first batch of an epoch with that of the first epoch, also of an earlier process."""
        kind = kind_of(batch)
        if self._expected is not None and kind != self._expected:
            raise DataError(f"the first batch of an epoch was {self._expected}, and is {kind} now")
        self._expected = kind


def state_of(data: Any) -> Any:
    """The state of data that can go on from it; None of other data."""
    return data.state_dict() if hasattr(data, "state_dict") and hasattr(data, "load_state_dict") else None


@contextmanager
def closed_after(data: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """The batches of an epoch; what reads them ahead ends with the block, also by an exception."""
    iterator = iter(data)
    try:
        yield iterator
    finally:
        _close(iterator)


def _close(iterator: Iterator[Any]) -> None:
    if isinstance(iterator, Generator):
        iterator.close()


def uploaded(batch: Any, device: Device) -> Any:
    """A batch with tensors for its arrays, also those of other libraries, in tuples, lists and dicts."""
    if isinstance(batch, (tuple, list)):
        return tuple(uploaded(part, device) for part in batch)
    if isinstance(batch, Mapping):
        return {key: uploaded(part, device) for key, part in batch.items()}
    if isinstance(batch, Tensor) or not hasattr(batch, "shape"):
        return batch
    return asarray(as_array(batch), device=device)


def tensors_of(batch: Any) -> Iterator[Any]:
    """The tensors of a batch, or its arrays, in order."""
    if isinstance(batch, (tuple, list)):
        for part in batch:
            yield from tensors_of(part)
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from tensors_of(part)
    elif hasattr(batch, "shape"):
        yield batch


def samples_in(batch: Any) -> int:
    """How many samples a batch has: the length of its first tensor that has an axis."""
    return next((int(part.shape[0]) for part in tensors_of(batch) if len(part.shape)), 1)


def some_samples_in(batch: Any) -> int:
    """The same; a DataError where there are none, of which a loss would be no number."""
    if not (count := samples_in(batch)):
        raise DataError(f"a batch has no samples ({kind_of(batch)}); leave it out")
    return count


def kind_of(batch: Any) -> str:
    """The shapes and dtypes of a batch in words."""
    kinds = [f"{str(part.dtype).removeprefix('torch.')} {tuple(part.shape)}" for part in tensors_of(batch)]
    return ", ".join(kinds) or type(batch).__name__
