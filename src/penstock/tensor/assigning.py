"""`x[mask] = value` and `x[indices] = value` as graph operations, so both work inside `jit`."""

from __future__ import annotations

from typing import Any

from penstock.graph import creating, elementwise, reducing, shaping
from penstock.graph.contraction import gather, put_rows, scatter_add
from penstock.graph.node import Node, Shape
from penstock.tensor import dtypes
from penstock.tensor.broadcasting import broadcast, broadcast_node
from penstock.tensor.core import Tensor, record


def by_mask(x: Tensor, key: Any, value: Tensor) -> Tensor | None:
    """`x` with `value` where a mask is true; None if the key or the value has another form.

    The value has to be the same for all items that the mask selects, since their order depends on its values.
    """
    parts = list(key) if isinstance(key, tuple) else [key]
    masks = [at for at, part in enumerate(parts) if isinstance(part, Tensor) and part.dtype == dtypes.bool_]
    others = [part for at, part in enumerate(parts) if at not in masks]
    if len(masks) != 1 or not all(part is Ellipsis or part == slice(None) for part in others):
        return None
    mask: Tensor = parts[masks[0]]
    after = parts[masks[0] + 1 :]
    axis = masks[0] if Ellipsis not in parts[: masks[0]] else x.ndim - mask.ndim - len(after)
    if not mask.ndim or axis < 0 or x.shape[axis : axis + mask.ndim] != mask.shape:
        return None
    behind = x.ndim - axis - mask.ndim
    shape = (1,) * (axis + 1 + behind - value.ndim) + value.shape
    if value.size == 1:
        shape = (1,) * (axis + 1 + behind)
    if len(shape) != axis + 1 + behind or shape[axis] != 1:
        return None
    shape = (*shape[:axis], *(1,) * mask.ndim, *shape[axis + 1 :])
    given = broadcast(record(shaping.reshape(value._node, shape), value), x.shape)
    condition = shaping.reshape(mask._node, (*(1,) * axis, *mask.shape, *(1,) * behind))
    node = elementwise.where(broadcast_node(condition, x.shape), given._node, x._node)
    return record(node, x, given, mask)


def by_indices(x: Tensor, indices: Tensor, value: Tensor, distinct: bool) -> Tensor:
    """`x` with values at flat indices of its items; if an index occurs twice, the later value wins.

    `distinct`: no index occurs twice.
    """
    count = indices.size
    if not count or not x.size:
        broadcast(value, indices.shape)
        return record(x._node, x)
    target = shaping.reshape(indices._node, (count,))
    values = shaping.reshape(broadcast(value, indices.shape)._node, (count,))
    sources = _positions(count)  # for each index, which value goes there
    if not distinct:
        order = elementwise.cast(reducing.argsort(target, 0, False), dtypes.int64)
        target = gather(target, order)
        last = elementwise.not_equal(_part(target, 1, count), _part(target, 0, count - 1))
        last = shaping.concat([last, elementwise.full((1,), dtypes.bool_, True)], 0)
        target = elementwise.where(last, target, elementwise.like(target, x.size))  # out of range: ignored
        sources = order
    # For each item, 1 + the position of its new value; 0 if it keeps its old value.
    taken = scatter_add(elementwise.add(sources, elementwise.like(sources, 1)), target, x.size)
    none = elementwise.like(taken, 0)
    index = elementwise.maximum(elementwise.subtract(taken, elementwise.like(taken, 1)), none)
    stays = elementwise.equal(taken, none)
    node = elementwise.where(stays, shaping.reshape(x._node, (x.size,)), gather(values, index))
    return record(shaping.reshape(node, x.shape), x, value, indices)


def with_rows(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """`x` with `rows` at a one-dimensional index of its first axis, whose items differ.

    Rows whose index is out of range are dropped. In a jitted function that replaces `x` by the result, only
    the rows are written.
    """
    return record(put_rows(x._node, rows._node, index._node), x, rows)


def flat_indices(x: Tensor) -> Tensor:
    """The flat, row-major index of each item, in the shape of `x`."""
    return Tensor(shaping.reshape(_positions(x.size), x.shape), x.device)


def _positions(count: int) -> Node:
    return Node(creating.POSITIONS, (), {"count": count, "dtype": dtypes.int64})


def _part(x: Node, start: int, stop: int) -> Node:
    shape: Shape = (stop - start,)
    return shaping.reshape(shaping.slice_(x, ((start, stop - start, 1),)), shape)
