"""The settings of convolutions, and what NumPy computes for them: the oracle of every test."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.graph.node import Array
from penstock.graph.windows import window_count

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Geometry:
    """The settings of windows, for each axis."""

    stride: tuple[int, ...]
    padding: Pairs  # zeros before and after
    dilation: tuple[int, ...]
    groups: int = 1

    def counts(self, lengths: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
        """How many windows there are along each axis."""
        whole = [n + before + after for n, (before, after) in zip(lengths, self.padding, strict=True)]
        along = zip(whole, sizes, self.stride, self.dilation, strict=True)
        return tuple(window_count(*axis) for axis in along)


def reached(counts: Sequence[int], sizes: Sequence[int], geometry: Geometry) -> tuple[int, ...]:
    """The lengths up to the last window; items after it, of an output padding, are 0."""
    along = zip(counts, sizes, geometry.stride, geometry.dilation, strict=True)
    return tuple((n - 1) * step + (size - 1) * apart + 1 for n, size, step, apart in along)


def _items(
    geometry: Geometry, sizes: Sequence[int], counts: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """The items of a window, each with the slices of padded images that it is at in all windows."""
    items = []
    for item in itertools.product(*map(range, sizes)):
        starts = [k * apart for k, apart in zip(item, geometry.dilation, strict=True)]
        ends = zip(starts, counts, geometry.stride, strict=True)
        items.append((item, tuple(slice(k, k + (n - 1) * step + 1, step) for k, n, step in ends)))
    return items


def _last(indices: Iterable[Any]) -> Any:
    """An index of the last axes."""
    return (..., *indices)


def _padded_array(x: Array, geometry: Geometry) -> Array:
    ends = [(max(0, before), max(0, after)) for before, after in geometry.padding]
    wide = np.pad(x, [(0, 0), (0, 0), *ends])
    along = zip(wide.shape[2:], geometry.padding, strict=True)
    kept = (slice(max(0, -before), n - max(0, -after)) for n, (before, after) in along)
    return np.asarray(wide[_last(kept)])


def _in_groups(x: Array, axis: int, groups: int) -> Array:
    return x.reshape(*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])


def convolution_reference(x: Array, weight: Array, geometry: Geometry) -> Array:
    """The convolution by NumPy: a product for each item of a window."""
    sizes, groups = weight.shape[2:], geometry.groups
    counts = geometry.counts(x.shape[2:], sizes)
    images, matrices = _in_groups(_padded_array(x, geometry), 1, groups), _in_groups(weight, 0, groups)
    parts = (
        np.einsum("bgc...,goc->bgo...", images[_last(at)], matrices[_last(item)])
        for item, at in _items(geometry, sizes, counts)
    )
    return np.asarray(sum(parts)).reshape(x.shape[0], weight.shape[0], *counts)


def transpose_reference(x: Array, weight: Array, geometry: Geometry, lengths: tuple[int, ...]) -> Array:
    """Its transpose."""
    sizes, groups = weight.shape[2:], geometry.groups
    lengths_reached = [
        max(end, n + before + max(0, after))
        for end, n, (before, after) in zip(
            reached(x.shape[2:], sizes, geometry), lengths, geometry.padding, strict=True
        )
    ]
    whole = np.zeros((x.shape[0], groups, weight.shape[1], *lengths_reached), x.dtype)
    images, matrices = _in_groups(x, 1, groups), _in_groups(weight, 0, groups)
    for item, at in _items(geometry, sizes, x.shape[2:]):
        whole[_last(at)] += np.einsum("bgo...,goc->bgc...", images, matrices[_last(item)])
    kept = (slice(before, before + n) for n, (before, _) in zip(lengths, geometry.padding, strict=True))
    return np.reshape(whole[_last(kept)], (x.shape[0], -1, *lengths))


def weight_reference(x: Array, g: Array, geometry: Geometry, sizes: tuple[int, ...]) -> Array:
    """Its gradient by the weight."""
    groups = geometry.groups
    images, outputs = _in_groups(_padded_array(x, geometry), 1, groups), _in_groups(g, 1, groups)
    result = np.zeros((g.shape[1], x.shape[1] // groups, *sizes), x.dtype)
    for item, at in _items(geometry, sizes, g.shape[2:]):
        flat = (each.reshape(*each.shape[:3], -1) for each in (images[_last(at)], outputs))
        part = np.einsum("bgcn,bgon->goc", *flat)
        result[_last(item)] = part.reshape(g.shape[1], -1)
    return result
