"""The values of nodes, and of their constants, by NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.graph.dtypes import HALVES
from penstock.graph.node import Array, Node

Constant = tuple[str, Any]  # dtype, and the bits of a number
_HALVES = frozenset(dtype.numpy.type for dtype in HALVES)


def computed(node: Node, inputs: list[Array], attributes: dict[str, Any] | None = None) -> Array:
    """A node's value by its reference. As in kernels, float16 and bfloat16 are computed in float32."""
    if node.primitive.widens:
        inputs = [x.astype(np.float32) if x.dtype.type in _HALVES else x for x in inputs]
    with np.errstate(all="ignore"):
        result = node.primitive.reference(*inputs, **(node.attributes if attributes is None else attributes))
        return np.asarray(result).astype(node.dtype, copy=False)


def number_key(node: Node, name: str) -> Constant:
    """A constant by its dtype and bits, so that 0 and -0 or 1 and True differ."""
    dtype = node.primitive.dtypes.get(name, node.dtype)
    with np.errstate(over="ignore"):  # a number that is too large for the dtype is infinite in it
        return str(dtype), np.asarray(node.attributes[name]).astype(dtype).tobytes()
