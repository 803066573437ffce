"""Which graphs give the same bits however they are computed: by NumPy, in one kernel or in several."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.graph.checkpoint import AGAIN
from penstock.graph.contraction import GATHER
from penstock.graph.elementwise import PRIMITIVES
from penstock.graph.node import Node
from penstock.graph.reducing import EXPAND, REDUCTIONS
from penstock.graph.shaping import CONCAT, PAD, PERMUTE, RESHAPE, SLICE

_EXACT_NAMES = """cast full stop positive negative abs sign floor ceil trunc round copysign nextafter maximum
minimum where conj real imag"""
_EXACT = frozenset(PRIMITIVES[name] for name in _EXACT_NAMES.split())
_EXACT |= {RESHAPE, PERMUTE, EXPAND, SLICE, AGAIN, PAD, CONCAT, GATHER}
_EXACT |= {primitive for primitive in REDUCTIONS if primitive.name in ("max", "min")}
_PRODUCT = PRIMITIVES["multiply"]
_SUMS = frozenset((PRIMITIVES["add"], PRIMITIVES["subtract"]))


def is_exact(nodes: Iterable[Node]) -> bool:
    """Whether every way of computing the nodes that have no value gives the same bits.

    A sum or a product of two numbers is rounded to the nearest everywhere. But a kernel may round a product
    and a sum after it once, and reductions and functions have errors of their own.
    """
    floating = {node.primitive for node in nodes if node.value is None and node.dtype.kind in "fc"}
    inexact = floating - _EXACT
    return inexact <= {_PRODUCT} or inexact <= _SUMS
