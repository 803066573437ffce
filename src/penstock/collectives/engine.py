"""The interface of engines, which move arrays between ranks, and the engine of a single rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.errors import SettingError

Array = npt.NDArray[Any]
# all_to_all: part r of the array goes to rank r. The array of the others is a row, and so is the result.
Move = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier"]
# `tree_reduce` and `tree_scatter` sum along a fixed tree of ranks; the others in the order of the engine.
Operation = Literal[Move, "tree_reduce", "tree_scatter"]


@dataclass(frozen=True)
class Beat:
    """What a rank tells the others about once a second."""

    begun: int  # how many operations it has begun
    patient: bool  # it compiles, or writes: nobody counts the time that others wait for it
    ended: bool  # it has left, so it will begin nothing more


@dataclass(frozen=True)
class Exchange:
    """An operation under way."""

    is_done: Callable[[], bool]  # never waits
    result: Array  # valid once it is done


class DeviceRow:
    """A row in the memory of a CUDA device, as other libraries take it."""

    def __init__(self, address: int, nbytes: int, dtype: str) -> None:
        kind = np.dtype(dtype)
        self.__cuda_array_interface__ = {
            "shape": (nbytes // kind.itemsize,),
            "typestr": kind.str,
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class Engine:
    """What moves arrays between ranks. A single thread calls it, but for `launch`."""

    rank = 0
    size = 1
    name = "no engine"
    reaches = True  # whether the other ranks are there, and do not only stand in a plan
    on_device = False  # whether it moves the device's own memory, by `launch`

    def begin(self, operation: Move, array: Array) -> Exchange:
        """Start an operation on a contiguous array, which does not change until it is done.

        Every rank starts the same operations in the same order. `broadcast` sends from rank 0.
        """
        return Exchange(lambda: True, array.copy())

    def launch(self, operation: Move, source: DeviceRow, target: DeviceRow, stream: int) -> None:
        """Put an operation on rows of the device into a stream of commands."""
        raise NotImplementedError

    def beat(self, own: Beat) -> Mapping[int, Beat]:
        """Tell the others, and return what other ranks have told since the last call."""
        return {}

    def who(self, rank: int) -> str:
        """The process of a rank, for people."""
        return "this process"

    def abort(self) -> None:
        """End all ranks now, as this one cannot go on."""

    def close(self) -> None:
        """Free what it holds; no operation follows."""


class AbsentRanks(Engine):
    """Stands for ranks that are not there, for plans: their arrays are those of this rank."""

    name, reaches = "a plan", False

    def __init__(self, size: int) -> None:
        self.size = size

    def begin(self, operation: Move, array: Array) -> Exchange:
        """See `Engine.begin`."""
        length = result_shape(operation, self.size, array.size)
        return Exchange(lambda: True, np.resize(array.reshape(-1), length))

    def beat(self, own: Beat) -> Mapping[int, Beat]:
        """See `Engine.beat`."""
        return {rank: Beat(own.begun, True, False) for rank in range(1, self.size)}


def result_shape(operation: Operation, size: int, length: int) -> tuple[int, ...]:
    """The shape of the result for a row of so many items; SettingError if they cannot be divided."""
    if operation in ("reduce_scatter", "tree_scatter", "tree_reduce", "all_to_all") and length % size:
        raise SettingError(f"{operation} divides a row of {length} items, which {size} ranks do not divide")
    if operation in ("reduce_scatter", "tree_scatter"):
        return (length // size,)
    return (length * size,) if operation == "all_gather" else (length,)


def sent_bytes(operation: Operation, size: int, nbytes: int) -> int:
    """The bytes that a rank sends for an array of so many, at least: what the fastest algorithms send."""
    others = (size - 1) / size
    factor = {
        "all_reduce": 2 * others,
        "tree_reduce": 2 * others,
        "reduce_scatter": others,
        "tree_scatter": others,
        "all_to_all": others,
        "all_gather": size - 1,
        "broadcast": others,
        "barrier": 0,
    }
    return int(nbytes * factor[operation])


def tree_sum(rows: Array) -> Array:
    """The sum of rows: that of the first half and that of the second, each summed in the same way."""
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    return np.asarray(rows[0])


def check_summable(array: Array) -> None:
    """Refuse dtypes that engines have no sums of."""
    if array.dtype.kind not in "fiu" or array.dtype.itemsize < 4:
        raise SettingError(f"ranks sum numbers of 32 or 64 bits, and {array.dtype} was given; cast it")


def empty_result(operation: Move, size: int, array: Array) -> Array:
    """New memory for a result."""
    return np.empty(result_shape(operation, size, array.size), array.dtype)
