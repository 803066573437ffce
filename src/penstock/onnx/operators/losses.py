"""Losses."""

from __future__ import annotations

from typing import Any

import penstock as ps
from penstock.onnx.registry import Call, operator

F = ps.nn.functional


@operator("NegativeLogLikelihoodLoss", since=12)
def nll_loss(call: Call, x: ps.Tensor, target: ps.Tensor, weight: ps.Tensor | None = None) -> ps.Tensor:
    """Minus the log-probability of each target."""
    ignored = call.get("ignore_index", -100)
    return F.nll_loss(x, target, weight, ignore_index=ignored, reduction=call.get("reduction", "mean"))


@operator("SoftmaxCrossEntropyLoss", since=12)
def cross_entropy(call: Call, x: ps.Tensor, target: ps.Tensor, weight: ps.Tensor | None = None) -> Any:
    """Minus the logarithm of softmax at each target, and the logarithms."""
    ignored = call.get("ignore_index", -100)
    loss = F.cross_entropy(x, target, weight, ignore_index=ignored, reduction=call.get("reduction", "mean"))
    return (loss, F.log_softmax(x, 1)) if call.wants(1) else loss
