"""PyTorch's functions of shapes: flatten, split, transpose, expand."""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

from penstock.graph.node import DType
from penstock.tensor.arguments import integer, integers, of_tensor, shape_of
from penstock.tensor.broadcasting import axes_of, broadcast
from penstock.tensor.core import Tensor
from penstock.tensor.indexing import get
from penstock.tensor.manipulation import concat, expand_dims, permute_dims, repeat, reshape, squeeze, unstack
from penstock.tensor.operands import Array


@of_tensor
def view(x: Tensor, /, shape: int | Sequence[int]) -> Tensor:
    """The same as `reshape`: changes in place of one tensor never reach another."""
    if isinstance(shape, DType):
        raise TypeError("view takes a shape; bits in another dtype are np.asarray(x).view(dtype)")
    return reshape(x, shape)


@of_tensor
def flatten(x: Tensor, /, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Merge the axes from `start_dim` to `end_dim`, by default all.

    >>> ps.flatten(ps.zeros((2, 3, 4)), 1).shape
    (2, 12)
    """
    if not x.ndim:
        return reshape(x, 1)
    (first,), (last,) = axes_of(x, start_dim, "flatten"), axes_of(x, end_dim, "flatten")
    if first > last:
        raise ValueError(f"flatten: axis {start_dim} is after axis {end_dim} in shape {x.shape}")
    joined = math.prod(x.shape[first : last + 1])
    return reshape(x, (*x.shape[:first], joined, *x.shape[last + 1 :]))


@of_tensor
def unflatten(x: Tensor, /, axis: int, sizes: Sequence[int]) -> Tensor:
    """Split an axis into several; one length may be -1.

    >>> ps.unflatten(ps.zeros((2, 12)), 1, (3, -1)).shape
    (2, 3, 4)
    """
    (axis,) = axes_of(x, axis, "unflatten")
    lengths = list(integers(sizes, "unflatten", "a shape"))
    if lengths.count(-1) == 1:
        known = math.prod(length for length in lengths if length != -1)
        lengths[lengths.index(-1)] = x.shape[axis] // known if known else 0
    if not lengths or math.prod(lengths) != x.shape[axis] or builtins.min(lengths) < 0:
        raise ValueError(f"unflatten: axis {axis} of shape {x.shape} cannot become {tuple(sizes)}")
    return reshape(x, (*x.shape[:axis], *lengths, *x.shape[axis + 1 :]))


@of_tensor
def transpose(x: Tensor, /, *axes: int | Sequence[int]) -> Tensor:
    """Swap two axes; without axes, reverse all; with another number, permute them.

    >>> ps.transpose(ps.zeros((2, 3, 4)), 0, 1).shape
    (3, 2, 4)
    """
    if len(axes) == 2:
        (first,), (second,) = (_axis(x, axis) for axis in axes)
        order = list(range(x.ndim))
        if order:
            order[first], order[second] = second, first
        return permute_dims(x, order)
    given = axes[0] if len(axes) == 1 else axes
    return permute_dims(x, integers(given, "transpose", "an order of axes") or range(x.ndim)[::-1])


def _axis(x: Tensor, axis: Any) -> tuple[int, ...]:
    if not x.ndim and axis in (0, -1):
        return (0,)
    return axes_of(x, integer(axis, "transpose", "an axis"), "transpose")


@of_tensor
def t(x: Tensor, /) -> Tensor:
    """The transpose of a matrix; a vector is returned unchanged.

    >>> ps.t(ps.zeros((2, 3))).shape
    (3, 2)
    """
    if x.ndim > 2:
        raise ValueError(f"t is for matrices, and the shape is {x.shape}; use transpose(-2, -1) or mT")
    return x.T if x.ndim == 2 else x


@of_tensor
def chunk(x: Tensor, /, chunks: int, axis: int = 0) -> tuple[Tensor, ...]:
    """At most `chunks` parts along an axis, of equal length except for the last.

    >>> [part.tolist() for part in ps.chunk(ps.arange(5), 2)]
    [[0, 1, 2], [3, 4]]
    """
    chunks = integer(chunks, "chunk", "the number of parts")
    if chunks < 1:
        raise ValueError(f"chunk needs at least 1 part, and {chunks} was given")
    (axis,) = axes_of(x, axis, "chunk")
    return split(x, builtins.max(-(-x.shape[axis] // chunks), 1), axis=axis)


@of_tensor
def split(x: Tensor, /, split_size: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
    """Parts along an axis, of a length (the last may be shorter) or of several lengths.

    >>> [part.tolist() for part in ps.split(ps.arange(5), 2)]
    [[0, 1], [2, 3], [4]]
    """
    (axis,) = axes_of(x, axis, "split")
    length = x.shape[axis]
    sizes = integers(split_size, "split", "a length")
    if not isinstance(split_size, (list, tuple)):
        if sizes[0] < 1 and length:
            raise ValueError(f"split: parts have a length of 1 or more, and {sizes[0]} was given")
        count = builtins.max(-(-length // builtins.max(sizes[0], 1)), 1)
        sizes = tuple(builtins.min(sizes[0], length - sizes[0] * part) for part in range(count))
    if builtins.sum(sizes) != length or builtins.min(sizes, default=0) < 0:
        raise ValueError(f"split: lengths {sizes} do not make up axis {axis} of shape {x.shape}")
    parts, start = [], 0
    for size in sizes:
        parts.append(get(x, (*[slice(None)] * axis, slice(start, start + size))))
        start += size
    return tuple(parts)


@of_tensor
def tensor_split(x: Tensor, /, sections: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
    """Parts along an axis: so many, whose lengths differ by at most 1, or split at indices.

    >>> [part.tolist() for part in ps.tensor_split(ps.arange(5), 2)]
    [[0, 1, 2], [3, 4]]
    """
    (axis,) = axes_of(x, axis, "tensor_split")
    length = x.shape[axis]
    if isinstance(sections, (list, tuple)):
        cuts = [slice(None, i).indices(length)[1] for i in integers(sections, "tensor_split", "an index")]
    else:
        count = integer(sections, "tensor_split", "the number of parts")
        if count < 1:
            raise ValueError(f"tensor_split needs at least 1 part, and {count} was given")
        cuts = [part * (length // count) + builtins.min(part, length % count) for part in range(1, count)]
    edges = [0, *cuts, length]
    before = [slice(None)] * axis
    return tuple(get(x, (*before, slice(edges[i], edges[i + 1]))) for i in range(len(edges) - 1))


def cat(tensors: Sequence[Array], /, axis: int = 0) -> Tensor:
    """Concatenate tensors along an axis; empty vectors are ignored.

    >>> ps.cat([ps.asarray([1, 2]), ps.asarray([3])]).tolist()
    [1, 2, 3]
    """
    some = [x for x in tensors if x.shape != (0,)]
    return concat(some or tensors, axis=axis)


@of_tensor
def unbind(x: Tensor, /, axis: int = 0) -> tuple[Tensor, ...]:
    """The slices along an axis, without that axis.

    >>> [row.tolist() for row in ps.unbind(ps.asarray([[1, 2], [3, 4]]))]
    [[1, 2], [3, 4]]
    """
    return unstack(x, axis=axis)


@of_tensor
def expand(x: Tensor, /, shape: int | Sequence[int]) -> Tensor:
    """Broadcast to a shape; -1 keeps the length of an axis."""
    wanted = list(integers(shape, "expand", "a shape"))
    new = len(wanted) - x.ndim
    if new < 0:
        raise ValueError(f"expand: shape {x.shape} has more axes than {tuple(wanted)}")
    for axis, length in enumerate(wanted):
        if length == -1 and axis >= new:
            wanted[axis] = x.shape[axis - new]
    return broadcast(x, shape_of(tuple(wanted), "expand"))


@of_tensor
def expand_as(x: Tensor, /, other: Tensor) -> Tensor:
    """Broadcast to the shape of another tensor."""
    return broadcast(x, other.shape)


@of_tensor
def repeat_interleave(x: Tensor, /, repeats: int | Tensor, axis: int | None = None) -> Tensor:
    """Repeat each item along an axis, or of the flattened tensor.

    >>> ps.repeat_interleave(ps.asarray([1, 2]), 2).tolist()
    [1, 1, 2, 2]
    """
    return repeat(x, repeats, axis=axis)


@of_tensor
def squeezed(x: Tensor, /, axis: int | Sequence[int] | None = None) -> Tensor:
    """Remove axes of length 1, by default all; given axes of another length are kept."""
    if not x.ndim and axis is not None and {*integers(axis, "squeeze", "an axis")} <= {0, -1}:
        return squeeze(x, ())
    axes = axes_of(x, axis, "squeeze")
    return squeeze(x, tuple(axis for axis in axes if x.shape[axis] == 1))


@of_tensor
def swapaxes(x: Tensor, /, axis1: int, axis2: int) -> Tensor:
    """Swap two axes.

    >>> ps.swapaxes(ps.zeros((2, 3, 4)), 0, 2).shape
    (4, 3, 2)
    """
    return transpose(x, axis1, axis2)


@of_tensor
def unsqueeze(x: Tensor, /, axis: int) -> Tensor:
    """Insert an axis of length 1.

    >>> ps.unsqueeze(ps.zeros((2, 3)), 1).shape
    (2, 1, 3)
    """
    return expand_dims(x, axis)
