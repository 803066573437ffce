"""Arrays in pieces: what each rank writes of a checkpoint, and reads of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.tensor.core import Tensor

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Piece:
    """Some of the items of an array, in their order, which lie in a tensor from `offset` on."""

    name: str
    shape: tuple[int, ...]  # of the whole array
    start: int
    stop: int
    tensor: Tensor
    offset: int


def own_pieces(tensors: Mapping[str, Tensor], rank: int, size: int) -> Iterator[Piece]:
    """A rank's pieces of tensors that every rank has whole; all ranks get about as many bytes."""
    total = sum(tensor._node.nbytes for tensor in tensors.values())
    low, high = (number * total // size for number in (rank, rank + 1))
    before = 0
    for name, tensor in tensors.items():
        count, width = tensor.size, tensor._node.dtype.itemsize
        start, stop = (min(max(-((before - edge) // width), 0), count) for edge in (low, high))
        if start < stop or (not count and not rank):
            yield Piece(name, tensor.shape, start, stop, tensor, start)
        before += tensor._node.nbytes


class PiecedArrays(Mapping[str, Array]):
    """Arrays by name whose items lie in several places, mostly in files, and are read when asked for."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], pieces: Mapping[str, Sequence[tuple[int, Array]]]
    ) -> None:
        """`pieces` has flat arrays in order, with the number of their first item; ValueError if any lack."""
        self._shapes, self._pieces = dict(shapes), dict(pieces)
        self._last: tuple[str, Array] | None = None  # the array that was read last
        for name, shape in self._shapes.items():
            end = 0
            for start, array in self._pieces.get(name, ()):
                if start != end:
                    break
                end += array.size
            if end != prod(shape) or not self._pieces.get(name):
                raise ValueError(f"{name} lacks items after {end} of {prod(shape)}")

    def __len__(self) -> int:
        return len(self._shapes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __getitem__(self, name: str) -> Array:
        if self._last is None or self._last[0] != name:
            shape = self._shapes[name]
            self._last = name, self.items_of(name, 0, prod(shape)).reshape(shape)
        return self._last[1]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of an array, which is not read."""
        return self._shapes[name]

    def items_of(self, name: str, start: int, stop: int) -> Array:
        """Some items of an array; no others are read."""
        parts = [array[max(start - first, 0) : max(stop - first, 0)] for first, array in self._pieces[name]]
        return np.concatenate(parts)

    def below(self, prefix: str) -> PiecedArrays:
        """Those whose names begin with a prefix, without it."""
        names = {name.removeprefix(prefix): name for name in self._shapes if name.startswith(prefix)}
        return PiecedArrays(
            {short: self._shapes[name] for short, name in names.items()},
            {short: self._pieces[name] for short, name in names.items()},
        )


def items_of(state: Mapping[str, npt.ArrayLike], name: str, start: int, stop: int) -> Array:
    """Some items of an array of a state; of a state in pieces, no others are read."""
    if isinstance(state, PiecedArrays):
        return state.items_of(name, start, stop)
    return np.asarray(state[name]).reshape(-1)[start:stop]


def check_shapes(state: Mapping[str, npt.ArrayLike], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise KeyError or ValueError unless a state has arrays of these shapes."""
    for name, wanted in shapes.items():
        given = state.shape_of(name) if isinstance(state, PiecedArrays) else np.shape(state[name])
        if given != wanted:
            raise ValueError(f"{name} has shape {wanted}, and {given} was given")
