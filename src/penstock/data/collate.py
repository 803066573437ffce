"""Samples to batches: stacked where they have the same shape, filled up or packed where their lengths differ.

A sample is an array, a number, a text, or a tuple, list or dict of them at any depth; a batch has the same
structure, with arrays for the numbers and lists for the texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.data.batches import Array, Ints
from penstock.data.errors import DataError


def collate(samples: Sequence[Any]) -> Any:
    """A batch of samples whose arrays have the same shapes, with a new first axis.

    >>> ps.data.collate([(1, "a"), (2, "b")])
    (array([1, 2]), ['a', 'b'])
    """
    return _joined(samples, _stacked)


def padded(samples: Sequence[Any], value: float = 0, multiple: int = 1) -> Any:
    """A batch of samples whose arrays have different lengths, filled up with `value`, and the lengths.

    Lengths are those of the first axis. All arrays are as long as the longest, rounded up to a `multiple`: a
    jitted step is compiled once for each length, and few of them are left. The batch is a pair of what
    `collate` would give and an array of the lengths.

    >>> values, lengths = ps.data.padded([np.ones(1, int), np.ones(3, int)])
    >>> values.tolist(), lengths.tolist()
    ([[1, 0, 0], [1, 1, 1]], [1, 3])
    """
    if multiple < 1:
        raise DataError(f"lengths are rounded up to a multiple of 1 or more, and {multiple} was given")
    lengths = _lengths(samples)
    length = -(-int(lengths.max()) // multiple) * multiple
    return _joined(samples, partial(_filled, lengths=lengths, length=length, value=value)), lengths


def packed(samples: Sequence[Any]) -> Any:
    """A batch of samples whose arrays have different lengths, one after the other, and the lengths.

    Nothing is filled up: arrays are joined along their first axis, and a pair of them and of the lengths is
    the batch.

    >>> values, lengths = ps.data.packed([np.ones(1, int), np.ones(3, int)])
    >>> values.tolist(), lengths.tolist()
    ([1, 1, 1, 1], [1, 3])
    """
    lengths = _lengths(samples)
    return _joined(samples, partial(_end_to_end, lengths=lengths)), lengths


def _joined(samples: Sequence[Any], join: Callable[[list[Array]], Array]) -> Any:
    """A batch with the structure of the samples, whose arrays are joined."""
    if not samples:
        raise DataError("a batch needs a sample")
    first = samples[0]
    if isinstance(first, Mapping):
        if any(not isinstance(sample, Mapping) or sample.keys() != first.keys() for sample in samples):
            raise DataError(f"the samples of a batch have the same keys, and not all have {list(first)}")
        return {key: _joined([sample[key] for sample in samples], join) for key in first}
    if isinstance(first, (tuple, list)):
        if any(not isinstance(sample, (tuple, list)) or len(sample) != len(first) for sample in samples):
            raise DataError(f"the samples of a batch have the same parts, and not all have {len(first)}")
        return tuple(_joined(list(parts), join) for parts in zip(*samples, strict=True))
    if isinstance(first, (str, bytes)) or first is None:
        return list(samples)
    if any(isinstance(sample, float) for sample in samples):
        # Whole numbers among them, too: the dtype of a batch does not depend on which samples are in it.
        samples = [float(sample) if type(sample) is int else sample for sample in samples]
    return join([_array(sample) for sample in samples])


def _array(sample: Any) -> Array:
    array = np.asarray(sample)
    if array.dtype == object:
        raise DataError(
            f"a sample is made of arrays, numbers and texts, and {type(sample).__name__} was given"
        )
    return array.astype(np.float32) if isinstance(sample, float) else array


def _stacked(arrays: list[Array]) -> Array:
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        few = ", ".join(map(str, sorted(shapes)[:3]))
        raise DataError(
            f"the samples of a batch have different shapes, such as {few}; collate=ps.data.padded fills them "
            f"up, and collate=ps.data.packed puts them one after the other"
        )
    result = np.stack(arrays)
    if result.dtype.kind == "f" and all(array.dtype.kind in "iu" for array in arrays):
        raise DataError(
            "the integers of a batch are in uint64 and in a signed dtype, and none holds them all"
        )
    return result


def _lengths(samples: Sequence[Any]) -> Ints:
    """The lengths of samples: those of their first arrays that have one."""
    lengths = [_length(sample) for sample in samples]
    if not lengths or None in lengths:
        raise DataError("samples that are filled up or packed have an array with an axis, and some have none")
    return np.array(lengths, np.int64)


def _length(sample: Any) -> int | None:
    if isinstance(sample, Mapping):
        sample = tuple(sample.values())
    if isinstance(sample, (tuple, list)):
        known = (_length(part) for part in sample)
        return next((length for length in known if length is not None), None)
    if isinstance(sample, (str, bytes)) or sample is None:
        return None
    array = np.asarray(sample)
    return array.shape[0] if array.ndim else None


def _same_lengths(arrays: list[Array], lengths: Ints) -> bool:
    """Whether arrays have the lengths of their samples, and else the same shapes; no others are joined."""
    rest = {array.shape[1:] for array in arrays}
    return len(rest) == 1 and all(
        array.ndim and len(array) == length for array, length in zip(arrays, lengths, strict=True)
    )


def _filled(arrays: list[Array], lengths: Ints, length: int, value: float) -> Array:
    if not _same_lengths(arrays, lengths):
        return _stacked(arrays)  # of the same shape in all samples, such as a label
    shape = (len(arrays), length, *arrays[0].shape[1:])
    result = np.full(shape, value, np.result_type(*arrays))
    for row, array in zip(result, arrays, strict=True):
        row[: len(array)] = array
    return result


def _end_to_end(arrays: list[Array], lengths: Ints) -> Array:
    return np.concatenate(arrays) if _same_lengths(arrays, lengths) else _stacked(arrays)
