"""Which graphs give the same bits however they are computed: by NumPy, in one kernel or in several."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.graph.dtypes import HALF_PRECISION
from penstock.graph.node import Node, Rounding


def is_exact(nodes: Iterable[Node], contracts: bool = True) -> bool:
    """Whether every way of computing the nodes that have no value gives the same bits.

    A sum or a product of two numbers is rounded to the nearest everywhere. But a kernel of a device that
    `contracts` may round a product and a sum after it once, and reductions and functions have errors of
    their own. A fused kernel does not round float16 and bfloat16 between two operations.
    """
    pending = [node for node in nodes if node.value is None]
    if any(_is_rounded_half(parent) for node in pending for parent in node.inputs):
        return False
    floating = {node.primitive for node in pending if node.dtype.kind in "fc"}
    inexact = {primitive.error for primitive in floating} - {Rounding.EXACT}
    if not contracts:
        return inexact <= {Rounding.PRODUCT, Rounding.SUM}
    return inexact <= {Rounding.PRODUCT} or inexact <= {Rounding.SUM}


def _is_rounded_half(node: Node) -> bool:
    """Whether a node is to be computed, in float32, and then rounded to 16 bits."""
    return node.value is None and node.dtype in HALF_PRECISION and node.primitive.error is not Rounding.EXACT
