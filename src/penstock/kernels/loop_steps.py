"""How long the loops of a thread may be. What takes more steps is computed by NumPy."""

from __future__ import annotations

from penstock.drivers.driver import Capabilities
from penstock.fusion.views import trailing
from penstock.graph.contraction import MATMUL
from penstock.graph.node import Kind, Node
from penstock.kernels.dialects import dialect_of
from penstock.kernels.dialects.dialect import MANY_STEPS

UNROLLED = 4  # steps that loops along an axis take at a time
# Of a group's threads, those that share a row or a column at the least, times a few passes.
_ROW_ITEMS = 1 << 22
_COLUMN_ITEMS = 12  # for each step
_PRODUCT_STEPS = 2  # for the items of both sides that are multiplied one by one


def most_steps(capabilities: Capabilities) -> int:
    """How many steps the loops of one thread may take."""
    return dialect_of(capabilities).most_steps(capabilities)


def has_short_loops(node: Node, capabilities: Capabilities) -> bool:
    """Whether a thread of a kernel that holds the node takes no more steps than it may."""
    steps = most_steps(capabilities)
    if steps >= MANY_STEPS:
        return True
    if node.primitive.kind is Kind.REDUCTION:
        source = node.inputs[0]
        items = source.size // node.size
        return items <= (
            _ROW_ITEMS if trailing(source.shape, node.attributes["axes"]) else _COLUMN_ITEMS * steps
        )
    if node.primitive is MATMUL:
        return node.inputs[0].shape[-1] <= _PRODUCT_STEPS * steps
    return True
