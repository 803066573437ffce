"""Integers that stand for values: a scale times their distance from a zero point."""

from __future__ import annotations

from typing import Any

import penstock as ps
from penstock.onnx.dtypes import dtype_of
from penstock.onnx.operators.convolution import convolved
from penstock.onnx.operators.windows import windows_of
from penstock.onnx.registry import Call, operator


def _fitted(call: Call, given: ps.Tensor, x: ps.Tensor) -> ps.Tensor:
    """A scale or a zero point for all of `x`, for each part along an axis, or for blocks of it."""
    axis, block = call.get("axis", 1), call.get("block_size", 0)
    if given.ndim == 0 or given.size == 1:
        return ps.reshape(given, ())
    axis %= x.ndim
    if given.ndim == 1 and not block:
        return ps.reshape(given, [-1 if other == axis else 1 for other in range(x.ndim)])
    block = block or -(-x.shape[axis] // given.shape[axis])
    repeated = ps.repeat(given, block, axis=axis)
    return repeated[(*(slice(None),) * axis, slice(0, x.shape[axis]))]


def _rounded(value: ps.Tensor, zero: ps.Tensor | None, dtype: Any) -> ps.Tensor:
    """Rounded, moved to the zero point, and kept within what the dtype holds."""
    limits = ps.iinfo(dtype)
    moved = ps.round(value) if zero is None else ps.round(value) + ps.astype(zero, value.dtype)
    return ps.astype(ps.clip(moved, limits.min, limits.max), dtype)


@operator("QuantizeLinear", since=10)
def quantize(call: Call, x: ps.Tensor, scale: ps.Tensor, zero: ps.Tensor | None = None) -> ps.Tensor:
    """The integers that stand for values."""
    dtype: Any = ps.uint8 if zero is None else zero.dtype
    if zero is None and call.get("output_dtype"):
        dtype = getattr(ps, dtype_of(call.get("output_dtype"), f"the result of {call.node}").name)
    wide = ps.float64 if x.dtype in (ps.float64, ps.int32) else ps.float32
    values = ps.astype(x, wide) / ps.astype(_fitted(call, scale, x), wide)
    return _rounded(values, None if zero is None else _fitted(call, zero, x), dtype)


@operator("DequantizeLinear", since=10)
def dequantize(call: Call, x: ps.Tensor, scale: ps.Tensor, zero: ps.Tensor | None = None) -> ps.Tensor:
    """The values that integers stand for."""
    given = call.get("output_dtype")
    dtype = getattr(ps, dtype_of(given, str(call.node)).name) if given else scale.dtype
    wide = ps.float64 if dtype == ps.float64 else ps.float32
    whole = ps.astype(x, ps.int32)
    if zero is not None:
        whole = whole - ps.astype(_fitted(call, zero, x), ps.int32)
    return ps.astype(ps.astype(whole, wide) * ps.astype(_fitted(call, scale, x), wide), dtype)


@operator("MatMulInteger", since=10)
def matmul_integer(
    call: Call, a: ps.Tensor, b: ps.Tensor, a_zero: ps.Tensor | None = None, b_zero: ps.Tensor | None = None
) -> ps.Tensor:
    """The product of matrices of integers."""
    return _distance(a, a_zero, column=True) @ _distance(b, b_zero)


def _distance(x: ps.Tensor, zero: ps.Tensor | None, column: bool = False) -> ps.Tensor:
    """How far integers are from their zero point; that of each row is a column."""
    if zero is None:
        return ps.astype(x, ps.int32)
    point = ps.astype(zero, ps.int32)
    return ps.astype(x, ps.int32) - (
        point[:, None] if column and point.ndim == 1 and point.size > 1 else point
    )


@operator("QLinearMatMul", since=10)
def quantized_matmul(
    call: Call,
    a: ps.Tensor,
    a_scale: ps.Tensor,
    a_zero: ps.Tensor,
    b: ps.Tensor,
    b_scale: ps.Tensor,
    b_zero: ps.Tensor,
    scale: ps.Tensor,
    zero: ps.Tensor,
) -> ps.Tensor:
    """The product of matrices that integers stand for, as integers."""
    product = ps.astype(_distance(a, a_zero, column=True) @ _distance(b, b_zero), ps.float32)
    rows = a_scale[:, None] if a_scale.ndim == 1 and a_scale.size > 1 else a_scale
    factor = ps.astype(rows, ps.float32) * ps.astype(b_scale, ps.float32) / ps.astype(scale, ps.float32)
    return _rounded(product * factor, zero, zero.dtype)


@operator("QLinearConv", since=10)
def quantized_conv(
    call: Call,
    x: ps.Tensor,
    x_scale: ps.Tensor,
    x_zero: ps.Tensor,
    weight: ps.Tensor,
    w_scale: ps.Tensor,
    w_zero: ps.Tensor,
    scale: ps.Tensor,
    zero: ps.Tensor,
    bias: ps.Tensor | None = None,
) -> ps.Tensor:
    """A convolution of what integers stand for, as integers; float64 adds up without rounding."""
    channels = (-1, *[1] * (weight.ndim - 1))
    image = ps.astype(x, ps.float64) - ps.astype(x_zero, ps.float64)
    kernel = ps.astype(weight, ps.float64) - ps.reshape(ps.astype(w_zero, ps.float64), channels)
    windows = windows_of(call, x.shape[2:], call.get("kernel_shape", weight.shape[2:]))
    added = None if bias is None else ps.astype(bias, ps.float64)
    total = convolved(call, image, kernel, added, windows)
    factor = ps.astype(x_scale, ps.float64) * ps.astype(w_scale, ps.float64) / ps.astype(scale, ps.float64)
    return _rounded(total * ps.reshape(factor, (-1, *[1] * (x.ndim - 2))), zero, zero.dtype)
