"""Sequences: primitives without inputs, like `elementwise.full`."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.graph.node import DType, Kind, Node, Primitive, Shape


def _sequence_shape(*, count: int, dtype: DType, **_: Any) -> tuple[Shape, DType]:
    return (count,), dtype


def sequence(start: Any, step: Any, count: int, dtype: DType) -> Node:
    """`count` items: `start`, `start + step`, and so on."""
    if (start, step) == (0, 1) and dtype.kind in "iu":
        return Node(POSITIONS, (), {"count": count, "dtype": dtype})
    return Node(SEQUENCE, (), {"start": start, "step": step, "count": count, "dtype": dtype})


def _sequence_reference(start: Any, step: Any, count: int, dtype: DType) -> Any:
    positions = np.arange(count)
    if dtype.kind in "iu":
        return (start + positions * step).astype(dtype)
    return (start + positions.astype(np.float64) * step).astype(dtype)


SEQUENCE = Primitive(
    "sequence", Kind.CREATION, _sequence_shape, _sequence_reference, constants=("start", "step")
)
# 0, 1, 2, ...: a primitive of its own, so that kernels contain no arithmetic for it.
POSITIONS = Primitive(
    "positions", Kind.CREATION, _sequence_shape, lambda count, dtype: np.arange(count, dtype=dtype)
)
