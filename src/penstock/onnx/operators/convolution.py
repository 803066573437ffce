"""Convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np

import penstock as ps
from penstock.onnx.operators.windows import Windows, covering, keys, windows_of
from penstock.onnx.registry import Call, operator

F = ps.nn.functional
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@operator("Conv")
def conv(call: Call, x: ps.Tensor, weight: ps.Tensor, bias: ps.Tensor | None = None) -> ps.Tensor:
    """A convolution."""
    windows = windows_of(call, _image(call, x), call.get("kernel_shape", weight.shape[2:]))
    return convolved(call, x, weight, bias, windows)


def _image(call: Call, x: ps.Tensor) -> tuple[int, ...]:
    image = x.shape[2:]
    if len(image) not in _CONV:
        raise call.refuse(f"an image of {len(image)} axes", "one of 1, 2 or 3 axes is")
    return tuple(image)


def convolved(
    call: Call, x: ps.Tensor, weight: ps.Tensor, bias: ps.Tensor | None, windows: Windows
) -> ps.Tensor:
    """A convolution over the windows of an image."""
    if not windows.even:
        x = covering(x, windows, 0)
    padding = windows.before if windows.even else 0
    function = _CONV[len(windows.kernel)]
    return function(x, weight, bias, windows.strides, padding, windows.dilations, groups=call.get("group", 1))


@operator("ConvTranspose")
def conv_transpose(call: Call, x: ps.Tensor, weight: ps.Tensor, bias: ps.Tensor | None = None) -> ps.Tensor:
    """The transpose of a convolution, cut to the size that the attributes ask for."""
    image, kernel = _image(call, x), weight.shape[2:]
    count = len(image)
    strides = call.get("strides", [1] * count)
    dilations = call.get("dilations", [1] * count)
    extra = call.get("output_padding", [0] * count)
    full = [
        (n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(image, strides, kernel, dilations, strict=True)
    ]
    before, lengths = _cut(call, image, strides, [n + e for n, e in zip(full, extra, strict=True)])
    after = [b + length - n for b, length, n in zip(before, lengths, full, strict=True)]  # past the end
    function, groups = _TRANSPOSED[count], call.get("group", 1)
    y = function(x, weight, None, tuple(strides), 0, 0, groups, tuple(dilations))
    pad = [n for axis in reversed(range(count)) for n in (0, max(after[axis], 0))]
    y = ps.pad(y, pad) if any(pad) else y
    key = tuple(slice(b, b + n) for b, n in zip(before, lengths, strict=True))
    y = y[(slice(None), slice(None), *key)]
    return y if bias is None else y + ps.reshape(bias, (-1, *[1] * count))


def _cut(call: Call, image: Any, strides: Any, full: list[int]) -> tuple[list[int], list[int]]:
    """Where the result begins in all that a transposed convolution gives, and its lengths."""
    count = len(image)
    automatic = call.get("auto_pad", "NOTSET")
    wanted = call.get("output_shape")
    if wanted is None and automatic.startswith("SAME"):
        wanted = [n * s for n, s in zip(image, strides, strict=True)]
    if wanted is None:
        pads = [0] * 2 * count if automatic == "VALID" else call.get("pads", [0] * 2 * count)
        lengths = [n - a - b for n, a, b in zip(full, pads[:count], pads[count:], strict=True)]
        return list(pads[:count]), lengths
    wanted = wanted[-count:]
    totals = [max(n - w, 0) for n, w in zip(full, wanted, strict=True)]
    before = [n // 2 if automatic == "SAME_UPPER" else n - n // 2 for n in totals]
    return before, list(wanted)


@operator("ConvInteger", since=10)
def conv_integer(
    call: Call,
    x: ps.Tensor,
    weight: ps.Tensor,
    x_zero: ps.Tensor | None = None,
    w_zero: ps.Tensor | None = None,
) -> ps.Tensor:
    """A convolution of integers, which float64 computes without rounding."""
    image = ps.astype(x, ps.float64) - (0 if x_zero is None else ps.astype(x_zero, ps.float64))
    kernel = ps.astype(weight, ps.float64)
    if w_zero is not None:
        kernel = kernel - ps.reshape(ps.astype(w_zero, ps.float64), (-1, *[1] * (weight.ndim - 1)))
    windows = windows_of(call, _image(call, x), call.get("kernel_shape", weight.shape[2:]))
    return ps.astype(convolved(call, image, kernel, None, windows), ps.int32)


@operator("Col2Im", since=18, host=(1, 2))
def col2im(call: Call, x: ps.Tensor, image: Any, block: Any) -> ps.Tensor:
    """The sum of blocks at the positions in an image that they were taken from."""
    lengths, kernel = image.tolist(), block.tolist()
    windows = windows_of(call, lengths, kernel)
    channels = x.shape[1] // int(np.prod(kernel))
    cols = ps.reshape(x, (x.shape[0], channels, int(np.prod(kernel)), *windows.lengths))
    full = [n + b + a for n, b, a in zip(lengths, windows.before, windows.after, strict=True)]
    y = ps.zeros((x.shape[0], channels, *full), dtype=x.dtype, device=x.device)
    for position, key in enumerate(keys(windows)):
        y[key] = y[key] + cols[:, :, position]
    inside = tuple(slice(b, b + n) for b, n in zip(windows.before, lengths, strict=True))
    return y[(slice(None), slice(None), *inside)]
