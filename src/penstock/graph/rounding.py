"""Which graphs give the same bits however they are computed: by NumPy, in one kernel or in several."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.graph.node import Node, Rounding


def is_exact(nodes: Iterable[Node], contracts: bool = True) -> bool:
    """Whether every way of computing the nodes that have no value gives the same bits.

    A sum or a product of two numbers is rounded to the nearest everywhere. But a kernel of a device that
    `contracts` may round a product and a sum after it once, and reductions and functions have errors of
    their own.
    """
    floating = {node.primitive for node in nodes if node.value is None and node.dtype.kind in "fc"}
    inexact = {primitive.error for primitive in floating} - {Rounding.EXACT}
    if not contracts:
        return inexact <= {Rounding.PRODUCT, Rounding.SUM}
    return inexact <= {Rounding.PRODUCT} or inexact <= {Rounding.SUM}
