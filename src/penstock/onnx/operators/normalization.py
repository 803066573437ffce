"""Norms."""

from __future__ import annotations

from typing import Any

import numpy as np

import penstock as ps
from penstock.onnx.registry import Call, operator

F = ps.nn.functional


@operator("BatchNormalization", since=7, statistics=(3, 4))
def batch_normalization(
    call: Call, x: ps.Tensor, scale: ps.Tensor, bias: ps.Tensor, mean: ps.Tensor, variance: ps.Tensor
) -> Any:
    """Each channel with the statistics that are given, or with its own and new running statistics."""
    eps = call.get("epsilon", 1e-5)
    if not call.get("spatial", 1):
        raise call.refuse("spatial=0", "export with opset 9 or later")
    if not call.get("training_mode", 0):
        if call.opset < 14 and call.wants(1):
            raise call.refuse("training before opset 14", "export with opset 15 or later")
        return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, eps)
    axes = (0, *range(2, x.ndim))
    momentum = call.get("momentum", 0.9)
    own_mean, own_variance = ps.mean(x, axis=axes), ps.var(x, axis=axes)
    y = F.batch_norm(x, own_mean, own_variance, scale, bias, False, 0.0, eps)
    return (
        y,
        mean * momentum + own_mean * (1 - momentum),
        variance * momentum + own_variance * (1 - momentum),
    )


@operator("InstanceNormalization")
def instance_normalization(call: Call, x: ps.Tensor, scale: ps.Tensor, bias: ps.Tensor) -> ps.Tensor:
    """Each channel of each image with its own statistics."""
    return F.instance_norm(x, weight=scale, bias=bias, eps=call.get("epsilon", 1e-5))


@operator("GroupNormalization", since=18)
def group_normalization(call: Call, x: ps.Tensor, scale: ps.Tensor, bias: ps.Tensor) -> ps.Tensor:
    """Each group of channels with its own statistics."""
    groups, eps = call.get("num_groups"), call.get("epsilon", 1e-5)
    if call.opset < 21:  # a scale and a bias for each group
        each = x.shape[1] // groups
        scale, bias = ps.repeat(scale, each), ps.repeat(bias, each)
    return F.group_norm(x, groups, scale, bias, eps)


@operator("LayerNormalization", since=17)
def layer_normalization(call: Call, x: ps.Tensor, scale: ps.Tensor, bias: ps.Tensor | None = None) -> Any:
    """The axes from one on with their own statistics, and these."""
    axis, eps = call.get("axis", -1) % x.ndim, call.get("epsilon", 1e-5)
    shape = x.shape[axis:]
    fits = scale.shape == shape and (bias is None or bias.shape == shape)
    y = F.layer_norm(x, shape, scale if fits else None, bias if fits else None, eps)
    if not fits:
        y = y * scale if bias is None else y * scale + bias
    if not call.wants(1) and not call.wants(2):
        return y
    axes = tuple(range(axis, x.ndim))
    stashed = ps.astype(x, ps.float32) if x.dtype in (ps.float16, ps.bfloat16) else x
    mean = ps.mean(stashed, axis=axes, keepdims=True)
    return y, mean, 1 / ps.sqrt(ps.var(stashed, axis=axes, keepdims=True) + eps)


@operator("RMSNormalization", since=23)
def rms_normalization(call: Call, x: ps.Tensor, scale: ps.Tensor) -> ps.Tensor:
    """The axes from one on, divided by the root of their mean square."""
    axis, eps = call.get("axis", -1) % x.ndim, call.get("epsilon", 1e-5)
    shape = x.shape[axis:]
    if scale.shape == shape:
        return F.rms_norm(x, shape, scale, eps)
    return F.rms_norm(x, shape, None, eps) * scale


@operator("LpNormalization", since=1)
def lp_normalization(call: Call, x: ps.Tensor) -> ps.Tensor:
    """Divided by the norm along an axis; where that is 0, so is the result."""
    axis, p = call.get("axis", -1), call.get("p", 2)
    norm = ps.linalg.vector_norm(x, axis=axis, keepdims=True, ord=p)
    return ps.where(norm == 0, ps.zeros_like(x), x / ps.where(norm == 0, ps.ones_like(norm), norm))


@operator("LRN")
def local_response(call: Call, x: ps.Tensor) -> Any:
    """Divided by a power of the mean square of neighbouring channels."""
    size, channels = call.get("size"), x.shape[1]
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    near = np.arange(channels)[:, None] - np.arange(channels)
    band = call.tensor(((near <= before) & (near >= -after)).astype(np.float32))
    flat = ps.reshape(x * x, (*x.shape[:2], -1))
    total = ps.reshape(ps.astype(band, x.dtype) @ flat, x.shape)
    return x / (call.get("bias", 1.0) + call.get("alpha", 1e-4) / size * total) ** call.get("beta", 0.75)
