"""Activations."""

from __future__ import annotations

from typing import Any

import penstock as ps
from penstock.onnx.registry import Call, operator

F = ps.nn.functional


@operator("Relu")
def relu(call: Call, x: ps.Tensor) -> ps.Tensor:
    """`x` where it is positive, else 0."""
    return ps.maximum(x, ps.zeros_like(x)) if not _floating(x) else F.relu(x)


def _floating(x: ps.Tensor) -> bool:
    return ps.isdtype(x.dtype, "real floating")


@operator("Sigmoid")
def sigmoid(call: Call, x: ps.Tensor) -> ps.Tensor:
    """1 / (1 + exp(-x))."""
    return F.sigmoid(x)


@operator("LeakyRelu")
def leaky_relu(call: Call, x: ps.Tensor) -> ps.Tensor:
    """`x`, or `alpha` times it below 0."""
    return F.leaky_relu(x, call.get("alpha", 0.01))


@operator("PRelu")
def prelu(call: Call, x: ps.Tensor, slope: ps.Tensor) -> ps.Tensor:
    """`x`, or `slope` times it below 0; the slope is broadcast."""
    return ps.where(x < 0, x * slope, x)


@operator("Elu")
def elu(call: Call, x: ps.Tensor) -> ps.Tensor:
    """`x`, or `alpha` times exp(x) - 1 below 0."""
    return F.elu(x, call.get("alpha", 1.0))


@operator("Celu", since=12)
def celu(call: Call, x: ps.Tensor) -> ps.Tensor:
    """`x`, or `alpha` times exp(x / alpha) - 1 below 0."""
    return F.celu(x, call.get("alpha", 1.0))


@operator("Selu")
def selu(call: Call, x: ps.Tensor) -> Any:
    """`gamma` times what Elu gives."""
    return call.get("gamma", 1.0507009873554805) * F.elu(x, call.get("alpha", 1.6732632423543772))


@operator("Gelu", since=20)
def gelu(call: Call, x: ps.Tensor) -> ps.Tensor:
    """`x` times the chance that a normal value is below it."""
    return F.gelu(x, call.get("approximate", "none"))


@operator("Swish", since=24)
def swish(call: Call, x: ps.Tensor) -> ps.Tensor:
    """`x` times the sigmoid of `alpha` times it."""
    return x * F.sigmoid(call.get("alpha", 1.0) * x)


@operator("HardSigmoid")
def hard_sigmoid(call: Call, x: ps.Tensor) -> ps.Tensor:
    """A line, bounded by 0 and 1."""
    return ps.clip(call.get("alpha", 0.2) * x + call.get("beta", 0.5), 0, 1)


@operator("HardSwish", since=14)
def hard_swish(call: Call, x: ps.Tensor) -> ps.Tensor:
    """`x` times a line that is bounded by 0 and 1."""
    return F.hardswish(x)


@operator("Mish", since=18)
def mish(call: Call, x: ps.Tensor) -> ps.Tensor:
    """`x` times the tanh of its softplus."""
    return F.mish(x)


@operator("Softplus")
def softplus(call: Call, x: ps.Tensor) -> ps.Tensor:
    """log(1 + exp(x))."""
    return F.softplus(x)


@operator("Softsign")
def softsign(call: Call, x: ps.Tensor) -> ps.Tensor:
    """x / (1 + abs(x))."""
    return F.softsign(x)


@operator("ThresholdedRelu", since=10)
def thresholded_relu(call: Call, x: ps.Tensor) -> ps.Tensor:
    """`x` where it is greater than `alpha`, else 0."""
    return F.threshold(x, call.get("alpha", 1.0), 0.0)


@operator("Shrink", since=9)
def shrink(call: Call, x: ps.Tensor) -> ps.Tensor:
    """`x` moved towards 0 by `bias`, and 0 where it is nearer to it than `lambd`."""
    bias, least = call.get("bias", 0.0), call.get("lambd", 0.5)
    kept = ps.where(x > least, x - bias, ps.zeros_like(x))
    return ps.astype(ps.where(x < -least, x + bias, kept), x.dtype)


@operator("Softmax", since=13)
def softmax(call: Call, x: ps.Tensor) -> ps.Tensor:
    """exp(x), made to sum to 1 along an axis."""
    return ps.softmax(x, call.get("axis", -1))


@operator("LogSoftmax", since=13)
def log_softmax(call: Call, x: ps.Tensor) -> ps.Tensor:
    """The logarithm of softmax."""
    return ps.log_softmax(x, call.get("axis", -1))


@operator("Softmax", "LogSoftmax", since=7)
def flat_softmax(call: Call, x: ps.Tensor) -> ps.Tensor:
    """Before opset 13: over all axes from one on."""
    axis = call.get("axis", 1) % max(x.ndim, 1)
    rows = ps.reshape(x, (*x.shape[:axis], -1))
    function = ps.softmax if call.node.op_type == "Softmax" else ps.log_softmax
    return ps.reshape(function(rows, -1), x.shape)


@operator("Hardmax", since=13)
def hardmax(call: Call, x: ps.Tensor) -> ps.Tensor:
    """1 at the first of the greatest items along an axis, 0 elsewhere."""
    axis = call.get("axis", -1) % x.ndim
    best = ps.argmax(x, axis=axis, keepdims=True)
    places = ps.reshape(
        ps.arange(x.shape[axis], device=x.device, dtype=best.dtype),
        [-1 if a == axis else 1 for a in range(x.ndim)],
    )
    return ps.astype(places == best, x.dtype)


@operator("Dropout", since=12, host=(1, 2))
def dropout(call: Call, x: ps.Tensor, ratio: object = None, training: object = None) -> tuple[ps.Tensor, ...]:
    """Some items set to 0 and the others made larger, where the graph says that it is training."""
    share = 0.5 if ratio is None else float(ratio)  # type: ignore[arg-type]
    if not training or share == 0:
        return x, ps.ones_like(x, dtype=ps.bool)
    if share >= 1:
        return ps.zeros_like(x), ps.zeros_like(x, dtype=ps.bool)
    kept = ps.random.uniform(x.shape, device=x.device) >= share
    return ps.where(kept, x / (1 - share), ps.zeros_like(x)), kept


@operator("Dropout", since=7)
def dropout_in_use(call: Call, x: ps.Tensor) -> tuple[ps.Tensor, ...]:
    """Before opset 12: the values themselves."""
    return x, ps.ones_like(x, dtype=ps.bool if call.opset >= 10 else x.dtype)
