"""Which graphs give the same bits whether they are computed by NumPy, by a fused kernel or by several."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.graph.dtypes import HALF_PRECISION
from penstock.graph.node import Node, Rounding


def is_exact(nodes: Iterable[Node], contracts: bool = True, rounds_quotients: bool = False) -> bool:
    """Whether every way of computing the pending nodes gives the same bits.

    A single addition or multiplication is rounded to nearest everywhere. But a device that `contracts` may
    turn a product and a sum after it into a fused multiply-add, reductions add up in different orders, and
    functions have errors of their own. A fused kernel does not round float16 and bfloat16 between operations.
    """
    pending = [node for node in nodes if node.value is None]
    if any(_is_rounded_half(parent) for node in pending for parent in node.inputs):
        return False
    floating = {(node.primitive, node.dtype.kind) for node in pending if node.dtype.kind in "fc"}
    inexact = {
        primitive.error
        for primitive, kind in floating
        if not (primitive.error is Rounding.QUOTIENT and rounds_quotients and kind == "f")
    } - {Rounding.EXACT}
    if not contracts:
        return inexact <= {Rounding.PRODUCT, Rounding.SUM}
    return inexact <= {Rounding.PRODUCT} or inexact <= {Rounding.SUM}


def _is_rounded_half(node: Node) -> bool:
    """Whether a pending node is computed in float32 and then rounded to 16 bits."""
    return node.value is None and node.dtype in HALF_PRECISION and node.primitive.error is not Rounding.EXACT
