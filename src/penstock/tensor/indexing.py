"""Indexing of tensors with slices, integer arrays and masks; reading and assigning."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.callsite import user_line
from penstock.errors import CaptureError
from penstock.graph import elementwise, shaping
from penstock.graph.bounds import Bound, bounded, known_range
from penstock.graph.contraction import gather
from penstock.graph.node import Node, Shape
from penstock.memory.buffer import Buffer
from penstock.runtime import Device
from penstock.tensor import assigning, dtypes
from penstock.tensor.broadcasting import broadcast, broadcast_node, common_shape
from penstock.tensor.capture import capture
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor, from_numpy, install, record
from penstock.tensor.operands import as_number, number_in
from penstock.tensor.repeated import sliced

_FEW = 1 << 16  # items of an index that the host checks faster than a kernel is launched
Slices = tuple[tuple[int, int, int], ...]  # (start, count, step) of each axis


def get(x: Tensor, key: Any, operation: str = "x[index]") -> Tensor:
    """`x[key]`; an error for an index that is out of range names the `operation`."""
    node = x._node
    plain = _plain(node.shape, key)
    if plain is not None:
        return sliced(x, *plain)
    if isinstance(key, Tensor) and node.shape:
        if key.dtype.kind in "iu":
            return along(x, key, 0, operation)
        if key.dtype is dtypes.bool_ and key.ndim and key.shape == node.shape[: key.ndim]:
            return _where_true(x, key)
    axis = _only_indexed(key, len(node.shape))
    if axis is not None:
        return along(x, key[axis], axis, operation)
    keys = _expanded(x, key)
    if any(isinstance(part, Tensor) for part in keys):
        return _get_by_arrays(x, keys, operation)
    slices, shape = _basic(x, keys)
    return record(shaping.reshape(shaping.slice_(x._node, slices), shape), x)


def _only_indexed(key: Any, ndim: int) -> int | None:
    """The axis of a key's only index, which is a tensor of integers, after whole axes; else None."""
    if type(key) is not tuple or not 0 < len(key) <= ndim or not isinstance(key[-1], Tensor):
        return None
    *before, index = key
    for part in before:
        if type(part) is not slice or part != slice(None):
            return None
    return len(before) if index.dtype.kind in "iu" else None


def along(x: Tensor, index: Tensor, axis: int, operation: str) -> Tensor:
    """The slices of `x` at integer indices along an axis; the axes of the index replace that axis."""
    least = least_known(index, x._node.shape[axis])
    if least is not None:
        return _along_checked(axis, least < 0)(x, index)
    return _picked(x, index, _index_node(index, axis, x, operation), axis)


def least_known(index: Tensor, length: int) -> int | None:
    """The least item of an index that is known to be in range of an axis, or from its end; else None."""
    if index._node.span is None:
        _note_range(index)
    span = index._node.span
    return span[0] if span is not None and -length <= span[0] and span[1] < length else None


def assume_known(index: Tensor, length: int, from_end: bool = False) -> None:
    """Have a stand-in for indices be in range of an axis; `from_end`: some may count from its end."""
    if index._node.span is None:
        index._node.span = (-length if from_end else 0, length - 1)


@cache
def _along_checked(axis: int, from_end: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """The same for indices that are known to be in range; `from_end`: some may be negative."""

    @composite
    def along_axis(x: Tensor, index: Tensor) -> Tensor:
        node = elementwise.cast(index._node, dtypes.int64)
        return _picked(x, index, _from_start(node, x.shape[axis]) if from_end else node, axis)

    return along_axis


def _picked(x: Tensor, index: Tensor, picked: Node, axis: int) -> Tensor:
    """The slices of `x` along an axis at `picked`, which is made of the index."""
    node, count = x._node, picked.ndim
    if not axis:
        return record(gather(node, picked), x, index)
    rows = gather(shaping.permute(node, (axis, *range(axis), *range(axis + 1, node.ndim))), picked)
    order = (*range(count, count + axis), *range(count), *range(count + axis, rows.ndim))
    return record(shaping.permute(rows, order), x, index)


def table_rows(x: Tensor, index: Tensor, operation: str) -> Tensor:
    """The rows `x[index]`; negative indices are out of range."""
    _note_range(index)
    return looked_up(x, record(in_range(index._node, x.shape, 0, operation, x.device), index))


def looked_up(x: Tensor, index: Tensor) -> Tensor:
    """The rows `x[index]` of an index that is known to be in range."""
    return record(gather(x._node, index._node), x, index)


def in_range(
    index: Node,
    shape: Shape,
    axis: int,
    operation: str,
    device: Device,
    from_end: Node | None = None,
) -> Node:
    """An index for an axis of a shape, with a check of its range unless that is known already.

    `from_end`: the original index, if the length of the axis was added to its negative items.
    """
    known = known_range(index)
    if not math.prod(index.shape) or (known is not None and known[0] >= 0 and known[1] < shape[axis]):
        return index
    if not device.checks_indices:
        return index
    bound = Bound(operation, shape, axis, user_line(), from_end is not None)
    if not bound.length:
        raise bound.error(0)
    given = index if from_end is None else from_end
    if isinstance(given.value, Buffer) and capture.get() is None:
        bound.index = weakref.ref(given)
    return bounded(index, bound)


def _note_range(index: Tensor) -> None:
    """Note the range of a small index if the host can read its items without waiting."""
    node = index._node
    buffer = node.value
    if node.span is not None or not isinstance(buffer, Buffer) or capture.get() is not None:
        return
    device = index.device
    if not 0 < node.size <= _FEW or device.dispatcher is not None:
        return
    with device.running:
        items = device.layers().transfers.at_hand(buffer, np.dtype(node.dtype), node.shape)
        if items is not None:
            node.span = int(items.min()), int(items.max())


def changed(x: Tensor, key: Any, value: Any) -> Tensor:
    """`x` with `x[key]` replaced by `value`."""
    if not isinstance(value, Tensor):
        number = number_in(value, x.dtype, x.device)
        value = _given(value, x) if number is None else number
    if type(key) is Tensor and key.shape == x.shape and not value.ndim and key.dtype == dtypes.bool_:
        return _masked(x, key, value)
    plain = _plain(x.shape, key)
    if plain is not None:
        return _changed_by_slices(x, value, *plain)
    value = record(elementwise.cast(value._node, x.dtype), value)
    masked = assigning.by_mask(x, key, value)
    if masked is not None:
        return masked
    keys = _expanded(x, key)
    if any(isinstance(part, Tensor) for part in keys):
        return _changed_by_arrays(x, keys, value)
    return _changed_by_slices(x, value, *_basic(x, keys))


def _given(value: Any, x: Tensor) -> Tensor:
    """The value of an assignment that is no tensor."""
    as_given = isinstance(value, np.ndarray)
    array = value.astype(x.dtype) if as_given else np.asarray(as_number(value), x.dtype.numpy)
    return from_numpy(array, x.device)


@composite
def _masked(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    """`x` with a single value where a mask is true."""
    given = broadcast_node(elementwise.cast(value._node, x.dtype), x.shape)
    return record(elementwise.where(mask._node, given, x._node), x, mask, value)


@composite
def _changed_by_slices(x: Tensor, value: Tensor, slices: Slices, shape: Shape) -> Tensor:
    value = record(elementwise.cast(value._node, x.dtype), value)
    kept: Shape = tuple(count for _, count, _ in slices)
    part = shaping.reshape(broadcast(value, shape)._node, kept)
    inside = shaping.pad(elementwise.full(kept, dtypes.bool_, True), slices, x.shape)
    node = elementwise.where(inside, shaping.pad(part, slices, x.shape), x._node)
    return record(node, x, value)


def _changed_by_arrays(x: Tensor, keys: list[Any], value: Tensor) -> Tensor:
    """`x` with values at the items that index arrays select; the later of two for the same item wins."""
    operation = "x[index] = value"
    arrays = [key for key in keys if isinstance(key, Tensor)]
    if any(array.dtype == dtypes.bool_ for array in arrays):
        indices = from_numpy(_flat_indices(x, keys, operation), x.device)
    else:
        if capture.get() is None:  # raise for a bad index before anything changes
            _check_arrays(x, keys, operation)
        indices = _get_by_arrays(assigning.flat_indices(x), keys, operation)
    return assigning.by_indices(x, indices, value, distinct=all(array.size == 1 for array in arrays))


def _flat_indices(x: Tensor, keys: list[Any], operation: str) -> npt.NDArray[Any]:
    """The flat indices of the items that a key selects; the host reads its arrays for that."""
    key = _check_arrays(x, keys, operation)
    return np.asarray(np.arange(x.size).reshape(x.shape)[key])


def _check_arrays(x: Tensor, keys: list[Any], operation: str) -> tuple[Any, ...]:
    """The key with its arrays as NumPy arrays, after a check of their range."""
    key = tuple(part.numpy() if isinstance(part, Tensor) else part for part in keys)
    for position, part in enumerate(key):
        if isinstance(part, np.ndarray) and part.dtype.kind in "iu":
            _check_array(part, x, sum(before is not None for before in keys[:position]), operation)
    return key


def _expanded(x: Tensor, key: Any) -> list[Any]:
    """The parts of a key, one for each axis or new axis; masks are converted to integers."""
    parts = list(key) if isinstance(key, tuple) else [key]
    parts = [_as_array(part) for part in parts]
    taken = sum(_axes_taken(part) for part in parts)
    dots = [position for position, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index may have only one ellipsis")
    if taken > x.ndim:
        raise IndexError(f"{taken} indices are too many for shape {x.shape}")
    fill = [slice(None)] * (x.ndim - taken)
    position = dots[0] if dots else len(parts)
    parts[position : position + 1] = fill
    result: list[Any] = []
    for part in parts:
        axis = sum(key is not None for key in result)
        if isinstance(part, np.ndarray):
            part = _from_host(part, x, axis)
        if isinstance(part, Tensor) and part.dtype == dtypes.bool_:
            result += _from_mask(x, part, axis)
        else:
            result.append(part)
    return result


def _check_array(part: npt.NDArray[Any], x: Tensor, axis: int, operation: str) -> None:
    for index in (int(part.min()), int(part.max())) if part.size else ():
        _checked_index(index, axis, x.shape, operation)


def _from_host(part: npt.NDArray[Any], x: Tensor, axis: int) -> Tensor:
    """A NumPy array as an index tensor; its range is checked here."""
    if part.dtype.kind == "b":
        return from_numpy(part, x.device)
    _check_array(part, x, axis, "x[index]")
    part = part.astype(np.int64)
    index = from_numpy(np.where(part < 0, part + x.shape[axis], part), x.device)
    return Tensor(bounded(index._node, Bound("x[index]", x.shape, axis, "", checked=True)), x.device)


def _as_array(part: Any) -> Any:
    if isinstance(part, (list, np.ndarray, bool, np.bool_)):
        array = np.asarray(part)
        if array.dtype.kind not in "iub" and array.size:
            raise IndexError(f"an index has integers or booleans, and {array.dtype} was given")
        return array if array.size or array.dtype == bool else array.astype(np.int64)
    if isinstance(part, Tensor) and part.dtype.kind not in "iub":
        raise IndexError(f"an index has integers or booleans, and {part.dtype} was given")
    return part


def _axes_taken(part: Any) -> int:
    if part is None or part is Ellipsis:
        return 0
    return part.ndim if isinstance(part, (Tensor, np.ndarray)) and part.dtype == dtypes.bool_ else 1


def _from_mask(x: Tensor, mask: Tensor, axis: int) -> list[Tensor]:
    """A mask as the indices at which it is true; reads the mask, since their number depends on its values."""
    if mask.shape != x.shape[axis : axis + mask.ndim]:
        raise IndexError(f"a mask of shape {mask.shape} does not fit shape {x.shape} at axis {axis}")
    if not mask.ndim:
        return [mask]
    indices = np.nonzero(_read(mask))
    return [_from_host(index, x, axis + offset) for offset, index in enumerate(indices)]


def _where_true(x: Tensor, mask: Tensor) -> Tensor:
    """The items, or slices, of `x` where a mask of its leading axes is true."""
    index = from_numpy(np.flatnonzero(_read(mask)), x.device)
    rows = shaping.reshape(x._node, (mask.size, *x.shape[mask.ndim :]))
    return record(gather(rows, index._node), x)


def _read(mask: Tensor) -> npt.NDArray[Any]:
    """The values of a mask, on which the length of a result depends."""
    try:
        return mask.numpy()
    except CaptureError:
        raise CaptureError(
            f"x[mask] has as many items as the mask of shape {mask.shape} has true values, and inside a "
            f"jitted function these are not known; use where(mask, x, other) or x * mask, or x[mask] = value "
            f"with the same value for all of them"
        ) from None


def _plain(shape: Shape, key: Any) -> tuple[Slices, Shape] | None:
    """The slices that a key of Python integers, slices, None and an ellipsis reads, and the resulting shape.

    None if the key has anything else, or an index out of range.
    """
    if type(key) is int and shape and -shape[0] <= key < shape[0]:  # the most frequent, and soon done
        return ((key % shape[0], 1, 1), *[(0, length, 1) for length in shape[1:]]), shape[1:]
    parts = key if type(key) is tuple else (key,)
    slices: list[tuple[int, int, int]] = []
    result: list[int] = []
    at, ndim = 0, len(shape)  # the axis of a part
    for part in parts:
        if type(part) is slice:
            if at == ndim:
                return None
            start, stop, step = part.indices(shape[at])
            count = stop - start if step == 1 else len(range(start, stop, step))
            slices.append((start, count, step) if count > 0 else (0, 0, 1))
            result.append(count if count > 0 else 0)
            at += 1
        elif type(part) is int:
            if at == ndim or not -shape[at] <= part < shape[at]:
                return None
            slices.append((part % shape[at], 1, 1))
            at += 1
        elif part is None:
            result.append(1)
        elif part is Ellipsis:
            taken = [type(other) for other in parts if other is not None]
            if taken.count(type(Ellipsis)) > 1 or len(taken) - 1 > ndim:
                return None
            left = shape[at : at + ndim + 1 - len(taken)]
            slices += [(0, length, 1) for length in left]
            result += left
            at += len(left)
        else:
            return None
    if at < ndim:
        slices += [(0, length, 1) for length in shape[at:]]
        result += shape[at:]
    return tuple(slices), tuple(result)


def _basic(x: Tensor, keys: list[Any]) -> tuple[Slices, Shape]:
    """Like `_plain`, for a key with a part for each axis; integers may be of any type with `__index__`."""
    parts: list[Any] = []
    for key in keys:
        axis = sum(part is not None for part in parts)
        plain = key is None or isinstance(key, slice)
        parts.append(key if plain else _checked_index(key, axis, x.shape))
    result = _plain(x.shape, tuple(parts))
    assert result is not None
    return result


def _checked_index(key: Any, axis: int, shape: Shape, operation: str = "x[index]") -> int:
    try:
        index = key.__index__()
    except (AttributeError, TypeError):
        raise IndexError(f"an index of type {type(key).__name__} cannot be used") from None
    length = shape[axis]
    if not -length <= index < length:
        raise Bound(operation, shape, axis, user_line(), from_end=True).error(index)
    return int(index % length)


def _get_by_arrays(x: Tensor, keys: list[Any], operation: str) -> Tensor:
    """Indexing with integer arrays by NumPy's rules.

    The arrays broadcast together; their axes come first, or stay in position if the arrays are adjacent.
    """
    if any(isinstance(key, Tensor) and key.dtype == dtypes.bool_ for key in keys):
        index = from_numpy(_flat_indices(x, keys, operation), x.device)
        return record(gather(shaping.reshape(x._node, (x.size,)), index._node), x)
    arrays = [position for position, key in enumerate(keys) if key is not None and not isinstance(key, slice)]
    plain = [slice(None) if position in arrays else key for position, key in enumerate(keys)]
    slices, shape = _basic(x, plain)
    base = shaping.reshape(shaping.slice_(x._node, slices), shape)
    axes = [sum(key is not None for key in keys[:position]) for position in arrays]
    indices = [
        _index_node(keys[position], axis, x, operation) for position, axis in zip(arrays, axes, strict=True)
    ]
    batch = common_shape(*(index.shape for index in indices))
    others = [axis for axis in range(len(shape)) if axis not in arrays]
    front = shaping.permute(base, (*arrays, *others))
    lengths = front.shape[: len(arrays)]
    rows = shaping.reshape(front, (int(np.prod(lengths)), *front.shape[len(arrays) :]))
    picked = gather(rows, _linear(indices, lengths, batch))
    if arrays == list(range(arrays[0], arrays[-1] + 1)):
        count, before = len(batch), arrays[0]
        order = (*range(count, count + before), *range(count), *range(count + before, picked.ndim))
        picked = shaping.permute(picked, order)
    return record(picked, x, *(key for key in keys if isinstance(key, Tensor)))


def _index_node(key: Any, axis: int, x: Tensor, operation: str) -> Node:
    """An index without negative items, which count from the end."""
    if not isinstance(key, Tensor):
        return elementwise.full((), dtypes.int64, _checked_index(key, axis, x.shape, operation))
    _note_range(key)
    given, length = key._node, x.shape[axis]
    known = known_range(given)
    inside = known is not None and known[0] >= -length and known[1] < length
    if not inside:
        known = known_range(given, spans=False)  # the error message does not depend on the values
    if given.dtype.kind == "u" or (known is not None and known[0] >= 0):
        return elementwise.cast(in_range(given, x.shape, axis, operation, x.device), dtypes.int64)
    node = _from_start(elementwise.cast(given, dtypes.int64), length)
    if inside:
        return node
    return in_range(node, x.shape, axis, operation, x.device, from_end=given)


def _from_start(index: Node, length: int) -> Node:
    """An index with the length of its axis added to negative items."""
    wrapped = elementwise.add(index, elementwise.like(index, length))
    return elementwise.where(elementwise.less(index, elementwise.like(index, 0)), wrapped, index)


def _linear(indices: list[Node], lengths: Shape, shape: Shape) -> Node:
    """The row-major index into the merged axes."""
    total = broadcast_node(indices[0], shape)
    for index, length in zip(indices[1:], lengths[1:], strict=True):
        total = elementwise.multiply(total, elementwise.like(total, length))
        total = elementwise.add(total, broadcast_node(index, shape))
    return total


def _replace(x: Tensor, key: Any, value: Any) -> None:
    x._rebind(changed(x, key, value))


install("__getitem__", get)
install("__setitem__", _replace)
