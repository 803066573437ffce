"""The pass that lays out matrices for the many products that read them, for CPUs.

The weights of a recurrent layer are multiplied by few rows at every step. Each product would copy them, or
read them in an order in which they do not stay in the cache. Here they are copied once, to panels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil

from penstock.drivers.driver import Capabilities
from penstock.fusion.views import below_views, operand_index
from penstock.graph.contraction import MATMUL
from penstock.graph.dtypes import float32
from penstock.graph.node import Kind, Node, topological
from penstock.graph.panels import in_panels

_FEWEST = 4  # products that read a matrix; fewer are not worth the copy
_ROWS = range(4, 65)  # of a product: with fewer it adds in another order, and more are worth a copy each
_LONGEST = 1024  # steps along K that are added up one after another, wherever they are read
_LEAST = 1 << 14  # items of a matrix that each product would transpose,
_LEAST_ROWS = 1 << 17  # and of one that is read as it is: it should not stay in a cache
_LOCAL_BYTES = 1 << 18  # of a device; with less, the order of sums depends on how products are tiled
_MICRO_TILES = ((4, 24), (6, 16))  # rows and columns of sums that fit into registers,
_WIDE_MICRO_TILES = ((8, 48), (12, 32))  # and into those of 16 items


def lay_out_panels(outputs: Sequence[Node], capabilities: Capabilities) -> list[Node]:
    """The same values, with products that read panels. The order of their sums does not change."""
    if capabilities.local_bytes < _LOCAL_BYTES:
        return list(outputs)
    order = topological(outputs)
    readers = Counter(node.inputs[1] for node in order if _may_read_panels(node))
    if max(readers.values(), default=0) < _FEWEST:
        return list(outputs)
    new: dict[Node, Node] = {}
    laid_out: dict[Node, Node] = {}
    for node in order:
        if node.value is not None:
            new[node] = node
            continue
        inputs = [new[parent] for parent in node.inputs]
        if _may_read_panels(node) and readers[right := node.inputs[1]] >= _FEWEST:
            if right not in laid_out:
                laid_out[right] = in_panels(inputs[1], _width(node.shape[0], capabilities))
            inputs[1] = laid_out[right]
        new[node] = node.on(tuple(inputs))
    return [new[node] for node in outputs]


def _may_read_panels(node: Node) -> bool:
    """Whether panels make a product faster, if enough others read the same."""
    if node.primitive is not MATMUL or node.value is not None or node.ndim != 2 or node.dtype != float32:
        return False
    left, right = node.inputs
    few = node.shape[0] in _ROWS and right.shape[0] <= _LONGEST and right.size >= _LEAST
    if not few or any(operand.dtype != float32 for operand in node.inputs):
        return False
    if right.size < _LEAST_ROWS and _in_rows(right):
        return False
    if below_views(left).primitive.kind is Kind.CREATION:
        return True  # such as a first state of zeros, which is stored for it
    return _in_rows(left)  # or it would be packed, in blocks of its own


def _in_rows(operand: Node) -> bool:
    """Whether the items of a row are neighbours in memory, and rows are evenly apart."""
    in_place = operand_index(operand, ())
    return in_place is not None and in_place[1].factor("j") == 1


def _width(rows: int, capabilities: Capabilities) -> int:
    """The columns of the panels that suit products of so many rows."""
    micro_tiles = _WIDE_MICRO_TILES if capabilities.vector_width >= 16 else _MICRO_TILES
    return min(micro_tiles, key=lambda tile: ceil(rows / tile[0]) * tile[0])[1]
