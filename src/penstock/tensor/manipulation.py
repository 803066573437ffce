"""Shapes, axes, concatenation, repetition and conversion."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from penstock.graph import elementwise, reducing, shaping
from penstock.graph.node import DType
from penstock.tensor import dtypes
from penstock.tensor.arguments import integer, integers, of_tensor, shape_of
from penstock.tensor.broadcasting import axes_of, broadcast, common_shape
from penstock.tensor.composite import composite
from penstock.tensor.core import Tensor, install, record
from penstock.tensor.creation import Where, arange
from penstock.tensor.indexing import along, assume_known, get, least_known
from penstock.tensor.operands import Array, as_tensors
from penstock.tensor.repeated import again, is_computed, viewed

Axis = int | Sequence[int] | None


@of_tensor
def astype(x: Tensor, dtype: DType, /, *, copy: bool = True, device: Where = None) -> Tensor:
    """The values in another dtype; without `copy`, the tensor itself if it has that dtype.

    >>> ps.astype(ps.asarray([1.7]), ps.int32).tolist()
    [1]
    """
    moved, wanted = x if device is None else x.to_device(device), dtypes.checked(dtype)
    if is_computed(moved) and moved._actual_node.dtype is not wanted:
        return _converted(moved, wanted.name)
    node = elementwise.cast(moved._node, wanted)
    return moved if node is moved._node and not copy else record(node, moved)


@composite
def _converted(x: Tensor, dtype: str) -> Tensor:
    return record(elementwise.cast(x._node, dtypes.checked(dtype)), x)


@of_tensor
def reshape(x: Tensor, /, shape: int | Sequence[int], *, copy: bool | None = None) -> Tensor:
    """The items in another shape; one length may be -1, and is then inferred.

    >>> ps.reshape(ps.arange(6), (2, -1)).shape
    (2, 3)
    """
    return viewed(_reshaped, x, shape)


def _reshaped(x: Tensor, shape: int | Sequence[int]) -> Tensor:
    wanted = list(integers(shape, "reshape", "a shape"))
    node = x._node
    size = math.prod(node.shape)
    if wanted.count(-1) == 1:
        known = math.prod([length for length in wanted if length != -1])
        if known and size % known == 0:
            wanted[wanted.index(-1)] = size // known
    if math.prod(wanted) != size or (wanted and builtins.min(wanted) < 0):
        raise ValueError(f"{size} items of shape {node.shape} cannot take the shape {shape}")
    return record(shaping.reshape(node, tuple(wanted)), x)


@of_tensor
def permute_dims(x: Tensor, /, axes: Sequence[int]) -> Tensor:
    """Axis `axes[i]` becomes axis `i`.

    >>> ps.permute_dims(ps.zeros((2, 3, 4)), (2, 0, 1)).shape
    (4, 2, 3)
    """
    return viewed(_permuted, x, axes)


def _permuted(x: Tensor, axes: Sequence[int]) -> Tensor:
    axes = integers(axes, "permute_dims", "an order of axes")
    node = x._node
    count = len(node.shape)
    for axis in axes:
        if not -count <= axis < count:
            raise IndexError(f"axes {tuple(axes)} are not those of shape {node.shape}")
    order = tuple([axis % count for axis in axes])
    if sorted(order) != list(range(count)):
        raise ValueError(f"axes {tuple(axes)} are not an order of the axes of shape {node.shape}")
    return record(shaping.permute(node, order), x)


@of_tensor
def matrix_transpose(x: Tensor, /) -> Tensor:
    """The transposes of the matrices in the last two axes.

    >>> ps.matrix_transpose(ps.zeros((5, 2, 3))).shape
    (5, 3, 2)
    """
    return x.mT


@of_tensor
def moveaxis(x: Tensor, source: int | Sequence[int], destination: int | Sequence[int], /) -> Tensor:
    """Move axes to other positions; the remaining axes keep their order.

    >>> ps.moveaxis(ps.zeros((2, 3, 4)), 0, -1).shape
    (3, 4, 2)
    """
    from_ = list(integers(source, "moveaxis", "an axis"))
    to = list(integers(destination, "moveaxis", "an axis"))
    if len(from_) != len(to):
        raise ValueError(f"moveaxis needs as many positions {to} as axes {from_}")
    axes_of(x, from_, "moveaxis")
    axes_of(x, to, "moveaxis")
    from_, to = [axis % x.ndim for axis in from_], [axis % x.ndim for axis in to]
    order = [axis for axis in range(x.ndim) if axis not in from_]
    for position, axis in sorted(zip(to, from_, strict=True)):
        order.insert(position, axis)
    return permute_dims(x, order)


@of_tensor
def expand_dims(x: Tensor, /, axis: int | Sequence[int] = 0) -> Tensor:
    """Insert axes of length 1 at these positions of the result.

    >>> ps.expand_dims(ps.zeros((2, 3)), axis=1).shape
    (2, 1, 3)
    """
    axes = integers(axis, "expand_dims", "an axis")
    ndim = x.ndim + len(axes)
    if builtins.any(not -ndim <= position < ndim for position in axes):
        raise IndexError(f"expand_dims: axis {axis} is out of range for {ndim} axes")
    inserted = {position % ndim for position in axes}
    if len(inserted) != len(axes):
        raise ValueError(f"expand_dims: axes {axes} have a position twice")
    lengths = iter(x.shape)
    return reshape(x, [1 if position in inserted else next(lengths) for position in range(ndim)])


@of_tensor
def squeeze(x: Tensor, /, axis: int | Sequence[int]) -> Tensor:
    """Remove these axes, which have length 1."""
    removed = axes_of(x, axis, "squeeze")
    if builtins.any(x.shape[position] != 1 for position in removed):
        raise ValueError(f"squeeze: axis {axis} of shape {x.shape} is not of length 1")
    return reshape(x, [length for position, length in enumerate(x.shape) if position not in removed])


@of_tensor
def flip(x: Tensor, /, axis: Axis = None) -> Tensor:
    """Reverse the order of items along axes, by default along all.

    >>> ps.flip(ps.asarray([1, 2, 3])).tolist()
    [3, 2, 1]
    """
    node = x._node
    for position in axes_of(x, axis, "flip"):
        node = reducing.reverse(node, position)
    return record(node, x)


@of_tensor
@composite
def roll(x: Tensor, /, shift: int | Sequence[int], axis: Axis = None) -> Tensor:
    """Shift items along axes, and wrap around; without axes, in the flattened tensor.

    >>> ps.roll(ps.asarray([1, 2, 3]), 1).tolist()
    [3, 1, 2]
    """
    if axis is None:
        return reshape(roll(reshape(x, -1), shift, axis=0), x.shape)
    axes, shifts = integers(axis, "roll", "an axis"), integers(shift, "roll", "a shift")
    shifts = shifts * len(axes) if len(shifts) == 1 else shifts
    if len(shifts) != len(axes):
        raise ValueError(f"roll needs as many shifts {shifts} as axes {axes}")
    node = x._node
    for given, by in zip(axes, shifts, strict=True):
        (position,) = axes_of(x, given, "roll")
        length = x.shape[position]
        if length and (start := -by % length):
            slices = [(0, n, 1) for n in x.shape]
            parts = []
            for first, count in ((start, length - start), (0, start)):
                slices[position] = (first, count, 1)
                parts.append(shaping.slice_(node, tuple(slices)))
            node = shaping.concat(parts, position)
    return record(node, x)


def concat(arrays: Sequence[Array], /, axis: int | None = 0) -> Tensor:
    """Concatenate arrays along an axis; with None, all items in a single axis. Dtypes promote.

    >>> ps.concat([ps.asarray([1, 2]), ps.asarray([3])]).tolist()
    [1, 2, 3]
    """
    if not arrays:
        raise ValueError("concat needs an array")
    arrays = as_tensors("concat", *arrays)
    if axis is None:
        return concat([reshape(array, -1) for array in arrays], axis=0)
    return _concat_along(axis if type(axis) is int else integer(axis, "concat", "an axis"))(*arrays)


@cache
def _concat_along(axis: int) -> Callable[..., Tensor]:
    @composite
    def concat_arrays(*arrays: Tensor) -> Tensor:
        (position,) = axes_of(arrays[0], axis, "concat")
        nodes = [array._node for array in arrays]
        first = nodes[0].shape
        others = first[:position] + first[position + 1 :]
        for node in nodes:
            shape = node.shape
            if len(shape) != len(first) or shape[:position] + shape[position + 1 :] != others:
                raise ValueError(f"concat: shapes {first} and {shape} differ outside axis {axis}")
        dtype = dtypes.promote(*[node.dtype for node in nodes])
        return record(shaping.concat([elementwise.cast(node, dtype) for node in nodes], position), *arrays)

    return concat_arrays


def stack(arrays: Sequence[Array], /, axis: int = 0) -> Tensor:
    """Stack arrays of the same shape along a new axis.

    >>> ps.stack([ps.zeros(3), ps.zeros(3)]).shape
    (2, 3)
    """
    if not arrays:
        raise ValueError("stack needs an array")
    arrays = as_tensors("stack", *arrays)
    return _stack_along(axis if type(axis) is int else integer(axis, "stack", "an axis"))(*arrays)


@cache
def _stack_along(axis: int) -> Callable[..., Tensor]:
    @composite
    def stack_arrays(*arrays: Tensor) -> Tensor:
        return concat([expand_dims(array, axis=axis) for array in arrays], axis=axis)

    return stack_arrays


@of_tensor
def unstack(x: Tensor, /, axis: int = 0) -> tuple[Tensor, ...]:
    """The slices along an axis, without that axis.

    >>> [row.tolist() for row in ps.unstack(ps.asarray([[1, 2], [3, 4]]))]
    [[1, 2], [3, 4]]
    """
    (position,) = axes_of(x, axis, "unstack")
    front = moveaxis(x, position, 0) if position else x
    return tuple([front[i] for i in range(front.shape[0])])


@of_tensor
@composite
def tile(x: Tensor, repetitions: Sequence[int], /) -> Tensor:
    """Repeat the whole tensor along each axis.

    >>> ps.tile(ps.asarray([1, 2]), (2,)).tolist()
    [1, 2, 1, 2]
    """
    counts = shape_of(repetitions, "tile")
    ndim = builtins.max(x.ndim, len(counts))
    counts = (1,) * (ndim - len(counts)) + counts
    shape = (1,) * (ndim - x.ndim) + x.shape
    pairs = [length for count, n in zip(counts, shape, strict=True) for length in (count, n)]
    single = [length for n in shape for length in (1, n)]
    spread = broadcast(reshape(x, single), tuple(pairs))
    return reshape(spread, [count * n for count, n in zip(counts, shape, strict=True)])


@of_tensor
def repeat(x: Tensor, repeats: int | Array, /, axis: int | None = None) -> Tensor:
    """Repeat each item along an axis, or of the flattened tensor; the counts of items may differ.

    >>> ps.repeat(ps.asarray([1, 2]), 2).tolist()
    [1, 1, 2, 2]
    """
    if axis is None:
        return repeat(reshape(x, -1), repeats, axis=0)
    (position,) = axes_of(x, axis, "repeat")
    if type(repeats) is int and repeats > 0:
        return _repeated(x, repeats, position)
    counts = repeats.numpy() if isinstance(repeats, Tensor) else np.asarray(repeats)
    index = np.repeat(np.arange(x.shape[position]), counts)
    return get(x, (*[slice(None)] * position, index), "repeat")


@composite
def _repeated(x: Tensor, count: int, position: int) -> Tensor:
    shape = x.shape
    wide = broadcast(
        expand_dims(x, axis=position + 1), (*shape[: position + 1], count, *shape[position + 1 :])
    )
    return reshape(wide, (*shape[:position], shape[position] * count, *shape[position + 1 :]))


@of_tensor
def broadcast_to(x: Tensor, /, shape: Sequence[int]) -> Tensor:
    """Broadcast to a shape.

    >>> ps.broadcast_to(ps.asarray([1, 2]), (2, 2)).tolist()
    [[1, 2], [1, 2]]
    """
    return broadcast(x, shape_of(shape, "broadcast_to"))


def broadcast_arrays(*arrays: Array) -> list[Tensor]:
    """Broadcast arrays to their common shape.

    >>> [array.shape for array in ps.broadcast_arrays(ps.zeros((2, 1)), ps.zeros(3))]
    [(2, 3), (2, 3)]
    """
    tensors = as_tensors("broadcast_arrays", *arrays)
    shape = common_shape(*(tensor.shape for tensor in tensors))
    return [broadcast(tensor, shape) for tensor in tensors]


@of_tensor
def take(x: Tensor, indices: Array, /, axis: int | None = None) -> Tensor:
    """The slices at `indices` along an axis.

    >>> ps.take(ps.asarray([5, 6, 7]), ps.asarray([2, 0])).tolist()
    [7, 5]
    """
    if axis is None and x.ndim != 1:
        raise ValueError(f"take needs an axis for shape {x.shape}")
    (position,) = axes_of(x, axis or 0, "take")
    if isinstance(indices, Tensor) and indices.dtype.kind in "iu":
        return along(x, indices, position, "take")
    key: list[Any] = [slice(None)] * x.ndim
    key[position] = indices
    return get(x, tuple(key), "take")


def take_along_axis(x: Array, indices: Array, /, axis: int = -1) -> Tensor:
    """The items at `indices` along an axis; the other axes of both broadcast together.

    >>> ps.take_along_axis(ps.asarray([[5, 6], [7, 8]]), ps.asarray([[1], [0]])).tolist()
    [[6], [7]]
    """
    x, indices = as_tensors("take_along_axis", x, indices)
    (position,) = axes_of(x, axis, "take_along_axis")
    is_index = indices.dtype.kind in "iu" and indices.ndim == x.ndim
    least = least_known(indices, x.shape[position]) if is_index else None
    if least is not None:
        return _taken_along(position, least < 0)(x, indices)
    return _take_along(x, indices, position)


@cache
def _taken_along(position: int, from_end: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """`_take_along` for indices that are known to be in range; `from_end`: some may be negative."""

    @composite
    def taken_along_axis(x: Tensor, indices: Tensor) -> Tensor:
        assume_known(indices, x.shape[position], from_end)
        return _take_along(x, indices, position)

    return taken_along_axis


def _take_along(x: Tensor, indices: Tensor, position: int) -> Tensor:
    others = [(*t.shape[:position], 1, *t.shape[position + 1 :]) for t in (x, indices)]
    shape = list(common_shape(*others))
    shape[position] = indices.shape[position]
    full_x = list(shape)
    full_x[position] = x.shape[position]
    wide = broadcast(x, tuple(full_x))
    key: list[Any] = []
    for other_axis, length in enumerate(shape):
        if other_axis == position:
            key.append(broadcast(indices, tuple(shape)))
        else:
            lengths = [length if other_axis == at else 1 for at in range(len(shape))]
            key.append(reshape(arange(length, device=x.device), lengths))
    return get(wide, tuple(key), "take_along_axis")


def _swapped(x: Tensor) -> Tensor:
    if x.ndim != 2:
        raise ValueError(f"T is for matrices, and the shape is {x.shape}; use permute_dims or mT")
    return record(shaping.permute(x._node, (1, 0)), x)


_swapped_values = composite(_swapped)


def _transposed(x: Tensor) -> Tensor:
    """The transpose of a matrix."""
    repeated = again(_swapped, x)
    if repeated is not None:
        return repeated
    return _swapped_values(x) if is_computed(x) else _swapped(x)


for _name, _method in (("reshape", reshape), ("astype", astype), ("T", property(_transposed))):
    install(_name, _method)
