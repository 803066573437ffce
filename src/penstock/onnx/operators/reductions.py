"""Reductions along axes, scans, and orders."""

from __future__ import annotations

from typing import Any

import numpy as np

import penstock as ps
from penstock.onnx.operators.elementwise import integral
from penstock.onnx.registry import Call, operator


def _sum(xp: Any, x: Any, axes: Any, keep: bool) -> Any:
    return xp.sum(x, axis=axes, keepdims=keep, dtype=x.dtype)


def _log_sum_exp(xp: Any, x: Any, axes: Any, keep: bool) -> Any:
    if xp is ps:
        return ps.logsumexp(x, axes, keep)
    return np.log(np.sum(np.exp(x), axis=axes, keepdims=keep))


def _extreme(xp: Any, function: Any, x: Any, axes: Any, keep: bool) -> Any:
    """Of nothing, the value that loses against every other."""
    if x.size:
        return function(x, axis=axes, keepdims=keep)
    dtype = np.dtype(x.dtype)
    greatest = function is xp.max
    if dtype.kind in "iu":
        worst: Any = np.iinfo(dtype).min if greatest else np.iinfo(dtype).max
    else:
        worst = (not greatest) if dtype.kind == "b" else -np.inf if greatest else np.inf
    shape = xp.sum(x, axis=axes, keepdims=keep, dtype=xp.int32).shape
    return xp.full(shape, worst, dtype=x.dtype, device=x.device)


_REDUCTIONS: dict[str, Any] = {
    "ReduceL1": lambda xp, x, axes, keep: _sum(xp, xp.abs(x), axes, keep),
    "ReduceL2": lambda xp, x, axes, keep: xp.sqrt(_sum(xp, x * x, axes, keep)),
    "ReduceLogSum": lambda xp, x, axes, keep: xp.log(_sum(xp, x, axes, keep)),
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceMax": lambda xp, x, axes, keep: _extreme(xp, xp.max, x, axes, keep),
    "ReduceMean": lambda xp, x, axes, keep: xp.mean(x, axis=axes, keepdims=keep),
    "ReduceMin": lambda xp, x, axes, keep: _extreme(xp, xp.min, x, axes, keep),
    "ReduceProd": lambda xp, x, axes, keep: xp.prod(x, axis=axes, keepdims=keep, dtype=x.dtype),
    "ReduceSum": _sum,
    "ReduceSumSquare": lambda xp, x, axes, keep: _sum(xp, x * x, axes, keep),
}


_FRACTIONS = ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean")  # of integers they are none


@operator(*_REDUCTIONS, folds=True, host=(1,))
def reduced(call: Call, x: Any, axes: Any = None) -> Any:
    """A reduction; its axes are an attribute, or since opset 13 or 18 an input."""
    given = call.get("axes") if axes is None else axes.tolist()
    if not given and call.get("noop_with_empty_axes", 0):
        given = ()
    elif not given:
        given = None
    keep = bool(call.get("keepdims", 1))
    if call.node.op_type in _FRACTIONS and integral(x):
        raise call.refuse(f"{call.node.op_type} of {x.dtype}", "cast to float32 before it")
    return _REDUCTIONS[call.node.op_type](call.xp, x, None if given is None else tuple(given), keep)


@operator("ArgMax", "ArgMin")
def extreme(call: Call, x: ps.Tensor) -> Any:
    """Where the greatest or the least item is along an axis."""
    axis, keep = call.get("axis", 0) % x.ndim, bool(call.get("keepdims", 1))
    function = ps.argmax if call.node.op_type == "ArgMax" else ps.argmin
    if not call.get("select_last_index", 0):
        return ps.astype(function(x, axis=axis, keepdims=keep), ps.int64)
    return x.shape[axis] - 1 - ps.astype(function(ps.flip(x, axis=axis), axis=axis, keepdims=keep), ps.int64)


@operator("CumSum", "CumProd", since=11, host=(1,), folds=True)
def scan(call: Call, x: Any, axis: Any) -> Any:
    """The sums or products up to each item, with or without it, from either end."""
    xp, along = call.xp, int(axis) % x.ndim
    backward = call.get("reverse", 0)
    adds = call.node.op_type == "CumSum"
    items = xp.flip(x, axis=along) if backward else x
    done = (xp.cumulative_sum if adds else xp.cumulative_prod)(items, axis=along, dtype=x.dtype)
    if call.get("exclusive", 0):
        shape = tuple(1 if a == along else n for a, n in enumerate(x.shape))
        first = xp.full(shape, 0 if adds else 1, dtype=x.dtype, device=x.device)
        rest = done[tuple(slice(0, n - 1) if a == along else slice(None) for a, n in enumerate(x.shape))]
        done = xp.concat([first, rest], axis=along)
    return xp.flip(done, axis=along) if backward else done


@operator("TopK", since=10, host=(1,))
def top_k(call: Call, x: ps.Tensor, k: Any) -> tuple[ps.Tensor, ps.Tensor]:
    """The greatest or the least items along an axis, in order, and where they stood."""
    values, indices = ps.topk(x, int(k.item()), call.get("axis", -1), bool(call.get("largest", 1)))
    return values, ps.astype(indices, ps.int64)
