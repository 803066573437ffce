"""Operators that change shapes, or that move items by them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import penstock as ps
from penstock.onnx.dtypes import dtype_of
from penstock.onnx.registry import Call, operator


@operator("Shape", lengths=True)
def shape(call: Call, x: Any) -> Any:
    """The lengths of the axes."""
    return np.asarray(x.shape[call.get("start", 0) : call.get("end")], np.int64)


@operator("Size", lengths=True)
def size(call: Call, x: Any) -> Any:
    """How many items there are."""
    return np.asarray(math.prod(x.shape), np.int64)


@operator("Reshape", folds=True, host=(1,))
def reshape(call: Call, x: Any, shape: Any) -> Any:
    """The items in another shape; 0 is the length that was there, and -1 follows from the others."""
    lengths = shape.tolist()
    if not call.get("allowzero", 0):
        lengths = [x.shape[axis] if n == 0 else n for axis, n in enumerate(lengths)]
    if -1 in lengths and 0 in lengths:
        raise call.refuse("a length of -1 beside one of 0", "give all lengths")
    return call.xp.reshape(x, tuple(lengths))


@operator("Flatten", folds=True)
def flatten(call: Call, x: Any) -> Any:
    """A matrix: the axes before one are its rows."""
    axis = call.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return call.xp.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@operator("Transpose", folds=True)
def transpose(call: Call, x: Any) -> Any:
    """Axes in another order, by default from the last to the first."""
    return call.xp.permute_dims(x, tuple(call.get("perm", range(x.ndim - 1, -1, -1))))


def _axes(call: Call, axes: Any) -> tuple[int, ...] | None:
    given = call.get("axes") if axes is None else axes.reshape(-1).tolist()
    return None if given is None else tuple(given)


@operator("Squeeze", folds=True, host=(1,))
def squeeze(call: Call, x: Any, axes: Any = None) -> Any:
    """Without axes of length 1; which is an attribute, or since opset 13 an input."""
    given = _axes(call, axes)
    if given is None:
        given = tuple(axis for axis, n in enumerate(x.shape) if n == 1)
    return call.xp.squeeze(x, axis=given)


@operator("Unsqueeze", folds=True, host=(1,))
def unsqueeze(call: Call, x: Any, axes: Any = None) -> Any:
    """With new axes of length 1."""
    given = _axes(call, axes) or ()
    ndim = x.ndim + len(given)
    new = {axis % ndim for axis in given}
    lengths = iter(x.shape)
    return call.xp.reshape(x, tuple(1 if axis in new else next(lengths) for axis in range(ndim)))


@operator("Concat", folds=True)
def concat(call: Call, *inputs: Any) -> Any:
    """The inputs one behind the other along an axis."""
    return call.xp.concat(list(inputs), axis=call.get("axis"))


@operator("Split", folds=True, host=(1,))
def split(call: Call, x: Any, lengths: Any = None) -> Any:
    """Parts along an axis, of lengths that are given, or as equal as they can be."""
    axis = call.get("axis", 0) % x.ndim
    given = call.get("split") if lengths is None else lengths.tolist()
    if given is None:
        parts = call.get("num_outputs", len(call.node.outputs))
        each = -(-x.shape[axis] // parts)
        given = [max(0, min(each, x.shape[axis] - each * part)) for part in range(parts)]
    ends = np.cumsum(given).tolist()
    before = (slice(None),) * axis
    return tuple(x[(*before, slice(end - n, end))] for n, end in zip(given, ends, strict=True))


@operator("Slice", since=10, folds=True, host=(1, 2, 3, 4))
def slice_(call: Call, x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    """Parts of axes."""
    return _sliced(
        x,
        starts.tolist(),
        ends.tolist(),
        range(len(starts)) if axes is None else axes.tolist(),
        [1] * len(starts) if steps is None else steps.tolist(),
    )


@operator("Slice", since=7, folds=True)
def slice_by_attributes(call: Call, x: Any) -> Any:
    """Parts of axes, which are attributes before opset 10."""
    starts = call.get("starts")
    return _sliced(x, starts, call.get("ends"), call.get("axes", range(len(starts))), [1] * len(starts))


def _sliced(
    x: Any, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int], steps: Sequence[int]
) -> Any:
    key = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        length = x.shape[axis]
        if step > 0:
            key[axis] = slice(max(start, -length), max(end, -length), step)
        else:  # an end before the first item is written as a number below -length
            key[axis] = slice(start, None if end < -length else end, step)
    return x[tuple(key)]


@operator("Expand", since=8, folds=True, host=(1,))
def expand(call: Call, x: Any, shape: Any) -> Any:
    """Repeated over a shape, with which it is broadcast."""
    return call.xp.broadcast_to(x, np.broadcast_shapes(tuple(x.shape), tuple(shape.tolist())))


@operator("Tile", folds=True, host=(1,))
def tile(call: Call, x: Any, repeats: Any) -> Any:
    """Copies side by side, so many along each axis."""
    return call.xp.tile(x, tuple(repeats.tolist()))


@operator("Constant", folds=True)
def constant(call: Call) -> Any:
    """A value that is an attribute."""
    for name, dtype in (("value_float", np.float32), ("value_int", np.int64)):
        for given in (name, name + "s"):
            if call.get(given) is not None:
                return np.asarray(call.get(given), dtype)
    if not isinstance(call.get("value"), np.ndarray):
        raise call.refuse(
            f"a constant of {next(iter(call.node.attributes))}", "use a dense tensor of numbers"
        )
    return call.get("value")


@operator("ConstantOfShape", since=9, folds=True, host=(0,))
def constant_of_shape(call: Call, shape: Any) -> Any:
    """One value everywhere."""
    value = call.get("value", np.zeros(1, np.float32))
    return np.broadcast_to(value.reshape(()), tuple(shape.tolist()))


@operator("Range", since=11, folds=True, host=(0, 1, 2))
def range_(call: Call, start: Any, limit: Any, delta: Any) -> Any:
    """Numbers from a start to before a limit, at a distance."""
    count = max(math.ceil((limit.item() - start.item()) / delta.item()), 0)
    return (start + np.arange(count) * delta).astype(start.dtype).reshape(-1)


@operator("EyeLike", since=9, lengths=True)
def eye_like(call: Call, x: Any) -> Any:
    """1 on a diagonal, 0 elsewhere, in the shape of a matrix."""
    given = call.get("dtype")
    dtype = dtype_of(given, f"the result of {call.node}") if given else np.dtype(x.dtype)
    rows, columns = x.shape
    return np.eye(rows, columns, call.get("k", 0)).astype(dtype)


@operator("Trilu", since=14, host=(1,))
def trilu(call: Call, x: ps.Tensor, k: Any = None) -> ps.Tensor:
    """The triangle over or under a diagonal, 0 elsewhere."""
    function = ps.triu if call.get("upper", 1) else ps.tril
    return function(x, k=0 if k is None else int(k.item()))


@operator("DepthToSpace")
def depth_to_space(call: Call, x: ps.Tensor) -> ps.Tensor:
    """Channels become blocks of an image."""
    batch, channels, height, width = x.shape
    block = call.get("blocksize")
    rest = channels // (block * block)
    if call.get("mode", "DCR") == "DCR":
        parts = ps.permute_dims(ps.reshape(x, (batch, block, block, rest, height, width)), (0, 3, 4, 1, 5, 2))
    else:
        parts = ps.permute_dims(ps.reshape(x, (batch, rest, block, block, height, width)), (0, 1, 4, 2, 5, 3))
    return ps.reshape(parts, (batch, rest, height * block, width * block))


@operator("SpaceToDepth")
def space_to_depth(call: Call, x: ps.Tensor) -> ps.Tensor:
    """Blocks of an image become channels."""
    batch, channels, height, width = x.shape
    block = call.get("blocksize")
    parts = ps.reshape(x, (batch, channels, height // block, block, width // block, block))
    lengths = (batch, channels * block * block, height // block, width // block)
    order = (0, 3, 5, 1, 2, 4) if call.get("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    return ps.reshape(ps.permute_dims(parts, order), lengths)


@operator("ReverseSequence", since=10, host=(1,))
def reverse_sequence(call: Call, x: ps.Tensor, lengths: Any) -> ps.Tensor:
    """The first items of each sequence from the last to the first; each has a length of its own."""
    batch, time = call.get("batch_axis", 1), call.get("time_axis", 0)
    places = np.arange(x.shape[time])
    index = np.where(places < lengths[:, None], lengths[:, None] - 1 - places, places)
    along = ps.moveaxis(x, (batch, time), (0, 1))
    index = index.reshape(index.shape + (1,) * (x.ndim - 2))
    taken = ps.take_along_axis(along, call.tensor(np.broadcast_to(index, along.shape)), axis=1)
    return ps.moveaxis(taken, (0, 1), (batch, time))


@operator("Pad", since=11, host=(1, 3))
def pad(call: Call, x: ps.Tensor, pads: Any, value: Any = None, axes: Any = None) -> ps.Tensor:
    """More items around a tensor, or fewer where a number is negative."""
    which = range(x.ndim) if axes is None else [axis % x.ndim for axis in axes.tolist()]
    return padded(call, x, which, pads.tolist(), call.get("mode", "constant"), value)


@operator("Pad", since=7)
def pad_by_attributes(call: Call, x: ps.Tensor) -> ps.Tensor:
    """The same, with attributes, before opset 11."""
    value = call.tensor(np.float32(call.get("value", 0.0)))
    return padded(call, x, range(x.ndim), call.get("pads"), call.get("mode", "constant"), value)


def padded(
    call: Call, x: ps.Tensor, axes: Sequence[int], pads: Sequence[int], mode: str, value: ps.Tensor | None
) -> ps.Tensor:
    """`pads` has what is added before each axis, then what is added after each."""
    count = len(axes)
    for axis, before, after in zip(axes, pads[:count], pads[count:], strict=True):
        cut = slice(max(-before, 0), x.shape[axis] - max(-after, 0))
        if (cut.start, cut.stop) != (0, x.shape[axis]):
            x = x[(*(slice(None),) * axis, cut)]
        before, after = max(before, 0), max(after, 0)
        if not before and not after:
            continue
        if mode != "constant":
            x = ps.take(x, call.tensor(_mirrored(x.shape[axis], before, after, mode)), axis=axis)
            continue
        filled = ps.zeros((), dtype=x.dtype, device=x.device) if value is None else ps.reshape(value, ())
        lengths = [(*x.shape[:axis], n, *x.shape[axis + 1 :]) for n in (before, after)]
        first, last = (ps.broadcast_to(filled, shape) for shape in lengths)
        x = ps.concat([first, x, last], axis=axis)
    return x


def _mirrored(length: int, before: int, after: int, mode: str) -> npt.NDArray[Any]:
    """Which item is at each position."""
    how = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}[mode]
    return np.pad(np.arange(length), (before, after), mode=how)  # type: ignore[no-any-return,call-overload]


@operator("CenterCropPad", since=18, host=(1,))
def center_crop_pad(call: Call, x: ps.Tensor, shape: Any) -> ps.Tensor:
    """The middle of a tensor, or the tensor in the middle of zeros."""
    axes = [axis % x.ndim for axis in call.get("axes", range(x.ndim))]
    pads = []
    for axis, length in zip(axes, shape.tolist(), strict=True):
        missing = length - x.shape[axis]
        before = missing // 2 if missing > 0 else -(-missing // 2)
        pads.append((before, missing - before))
    return padded(call, x, axes, [p[0] for p in pads] + [p[1] for p in pads], "constant", None)
