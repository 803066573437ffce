"""What nodes and their constants are in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.graph.checkpoint import AGAIN
from penstock.graph.contraction import GATHER
from penstock.graph.dtypes import HALVES
from penstock.graph.elementwise import PRIMITIVES
from penstock.graph.node import Array, Node
from penstock.graph.reducing import EXPAND
from penstock.graph.shaping import CONCAT, PAD, PERMUTE, RESHAPE, SLICE

Constant = tuple[str, Any]  # dtype, and the bits of a number
_HALVES = frozenset(dtype.numpy.type for dtype in HALVES)
# What moves items, or asks for their very bits: NumPy does it to halves as they are.
_NAMED_AS_STORED = (PRIMITIVES[name] for name in ("stop", "positive", "where", "nextafter"))
_MOVING = (RESHAPE, PERMUTE, EXPAND, SLICE, AGAIN, PAD, CONCAT, GATHER)
_AS_STORED = frozenset((*_MOVING, *_NAMED_AS_STORED))


def computed(node: Node, inputs: list[Array], attributes: dict[str, Any] | None = None) -> Array:
    """A node's value by its meaning in NumPy. As in kernels, halves are computed in float32."""
    if node.primitive not in _AS_STORED:
        inputs = [x.astype(np.float32) if x.dtype.type in _HALVES else x for x in inputs]
    with np.errstate(all="ignore"):
        result = node.primitive.numpy(*inputs, **(node.attributes if attributes is None else attributes))
        return np.asarray(result).astype(node.dtype, copy=False)


def number_key(node: Node, name: str) -> Constant:
    """A constant by its dtype and bits, so that 0 and -0 or 1 and True differ."""
    dtype = node.primitive.dtypes.get(name, node.dtype)
    with np.errstate(over="ignore"):  # a number that is too large for the dtype is infinite in it
        return str(dtype), np.asarray(node.attributes[name]).astype(dtype).tobytes()
