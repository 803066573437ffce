"""Operators that read and write items by their indices."""

from __future__ import annotations

from typing import Any

import numpy as np

import penstock as ps
from penstock.onnx.registry import Call, operator


@operator("Gather", folds=True)
def gather(call: Call, x: Any, indices: Any) -> Any:
    """The parts along an axis that indices name, in the shape of the indices."""
    axis = call.get("axis", 0) % x.ndim
    parts = call.xp.take(x, call.xp.reshape(indices, (-1,)), axis=axis)
    return call.xp.reshape(parts, (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


@operator("GatherElements", since=11)
def gather_elements(call: Call, x: ps.Tensor, indices: ps.Tensor) -> ps.Tensor:
    """Along an axis, for each position the item that its index names."""
    axis = call.get("axis", 0) % x.ndim
    return ps.gather(x, axis, counted(indices, x.shape[axis]))


def counted(indices: ps.Tensor, length: int) -> ps.Tensor:
    """Indices from the start where they count from the end."""
    return ps.where(indices < 0, indices + length, indices)


@operator("GatherND", since=11)
def gather_nd(call: Call, x: ps.Tensor, indices: ps.Tensor) -> ps.Tensor:
    """The parts that rows of indices name, each along the first axes."""
    batch = call.get("batch_dims", 0)
    key = list(ps.unstack(indices, axis=-1))
    ndim = indices.ndim - 1
    before = [
        ps.reshape(
            ps.arange(x.shape[axis], dtype=indices.dtype, device=x.device),
            [-1 if other == axis else 1 for other in range(ndim)],
        )
        for axis in range(batch)
    ]
    return x[(*before, *key)]


@operator("Scatter", "ScatterElements", since=9)
def scatter_elements(call: Call, x: ps.Tensor, indices: ps.Tensor, updates: ps.Tensor) -> ps.Tensor:
    """`x` with updates at the items that indices name along an axis."""
    axis = call.get("axis", 0) % x.ndim
    index = counted(indices, x.shape[axis])
    reduction = call.get("reduction", "none")
    if reduction == "none":
        return ps.scatter(x, axis, index, updates)
    if reduction == "add":
        return ps.scatter_add(x, axis, index, updates)
    raise call.refuse(f"reduction {reduction}", "none and add are")


@operator("ScatterND", since=11)
def scatter_nd(call: Call, x: ps.Tensor, indices: ps.Tensor, updates: ps.Tensor) -> ps.Tensor:
    """`x` with updates at the parts that rows of indices name."""
    reduction = call.get("reduction", "none")
    if reduction not in ("none", "add"):
        raise call.refuse(f"reduction {reduction}", "none and add are")
    lengths = x.shape[: indices.shape[-1]]
    position = ps.zeros(indices.shape[:-1], dtype=ps.int64, device=x.device)
    for index, length in zip(ps.unstack(indices, axis=-1), lengths, strict=True):
        position = position * length + counted(index, length)
    rest = x.shape[len(lengths) :]
    rows = ps.reshape(x, (int(np.prod(lengths)), -1))
    position, updates = ps.reshape(position, (-1,)), ps.reshape(updates, (-1, rows.shape[1]))
    if reduction == "add":
        changed = ps.index_add(rows, 0, position, updates)
    else:
        changed = ps.scatter(rows, 0, ps.broadcast_to(position[:, None], updates.shape), updates)
    return ps.reshape(changed, (*lengths, *rest))


@operator("TensorScatter", since=24)
def tensor_scatter(
    call: Call, cache: ps.Tensor, update: ps.Tensor, start: ps.Tensor | None = None
) -> ps.Tensor:
    """A cache with an update written along an axis, from a position of its own for each item of the batch."""
    axis = call.get("axis", -2) % cache.ndim
    length = update.shape[axis]
    begin = ps.zeros((cache.shape[0],), dtype=ps.int64, device=cache.device) if start is None else start
    steps = ps.arange(length, dtype=begin.dtype, device=cache.device)
    position = begin[:, None] + steps
    if call.get("mode", "linear") == "circular":
        position = position % cache.shape[axis]
    shape = [1] * cache.ndim
    shape[0], shape[axis] = cache.shape[0], length
    return ps.scatter(cache, axis, ps.broadcast_to(ps.reshape(position, shape), update.shape), update)


@operator("OneHot", since=9, host=(1,))
def one_hot(call: Call, indices: ps.Tensor, depth: Any, values: ps.Tensor) -> ps.Tensor:
    """The second value at the class that each index names along a new axis, the first at the others."""
    count = int(depth.item())
    axis = call.get("axis", -1) % (indices.ndim + 1)
    classes = ps.arange(count, dtype=ps.int64, device=indices.device)
    shape = [-1 if other == axis else 1 for other in range(indices.ndim + 1)]
    index = ps.astype(indices, ps.int64)
    chosen = ps.expand_dims(counted(index, count), axis=axis) == ps.reshape(classes, shape)
    return ps.where(chosen, values[1], values[0])


@operator("NonZero", since=9, folds=True)
def nonzero(call: Call, x: Any) -> Any:
    """The indices of the items that are not 0, a row for each axis."""
    return call.xp.astype(call.xp.stack(list(call.xp.nonzero(x))), call.xp.int64)


@operator("Compress", since=9, host=(1,))
def compress(call: Call, x: ps.Tensor, condition: Any) -> ps.Tensor:
    """The parts along an axis, or the items of all, for which a condition is true."""
    axis = call.get("axis")
    index = call.tensor(np.flatnonzero(condition))
    return ps.take(ps.reshape(x, (-1,)) if axis is None else x, index, axis=axis or 0)


@operator("Unique", since=11, folds=True, host=(0,))
def unique(call: Call, x: Any) -> Any:
    """The distinct items or parts, their first places, which of them each item is, and how often each is."""
    axis = call.get("axis")
    values, first, inverse, counts = np.unique(
        x, return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = inverse.reshape(-1)
    if not call.get("sorted", 1):
        order = np.argsort(first)
        values = np.take(values, order, axis=axis or 0)
        first, counts, inverse = first[order], counts[order], np.argsort(order)[inverse]
    return values, first, inverse, counts
