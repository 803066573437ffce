"""Random values, which come from `ps.random`; attributes called `seed` are not used."""

from __future__ import annotations

from typing import Any

import penstock as ps
from penstock.onnx.dtypes import dtype_of
from penstock.onnx.registry import Call, operator


@operator("RandomUniform", "RandomUniformLike")
def uniform(call: Call, like: Any = None) -> ps.Tensor:
    """Values of one density between two bounds."""
    drawn = ps.random.uniform(_shape(call, like), device=call.device)
    low, high = call.get("low", 0.0), call.get("high", 1.0)
    return ps.astype(low + (high - low) * drawn, _dtype(call, like))


@operator("RandomNormal", "RandomNormalLike")
def normal(call: Call, like: Any = None) -> ps.Tensor:
    """Normal values."""
    drawn = ps.random.normal(_shape(call, like), device=call.device)
    return ps.astype(call.get("mean", 0.0) + call.get("scale", 1.0) * drawn, _dtype(call, like))


def _shape(call: Call, like: Any) -> tuple[int, ...]:
    return tuple(call.get("shape") if like is None else like.shape)


def _dtype(call: Call, like: Any) -> Any:
    given = call.get("dtype")
    if given is None:
        return ps.float32 if like is None else like.dtype
    return getattr(ps, dtype_of(given, f"the result of {call.node}").name)
