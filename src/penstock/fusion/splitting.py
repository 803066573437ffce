"""Nodes in parts: reductions that would leave most of the device idle, and values joined from too many."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.drivers.driver import Capabilities
from penstock.fusion import costs
from penstock.fusion.column_reductions import column_parts
from penstock.fusion.views import trailing
from penstock.graph.contraction import MATMUL, matmul
from penstock.graph.dtypes import HALF_PRECISION, float32
from penstock.graph.elementwise import CAST, add, cast
from penstock.graph.node import Kind, Node, Shape, topological
from penstock.graph.reducing import WIDE_SUM, sum_
from penstock.graph.shaping import CONCAT, RESHAPE, permute, reshape, slice_

_MIN_PART = 64  # items of a part; smaller ones cost more than they gain
_LARGE = 1 << 15  # items, from which on a second kernel pays
_GROUPS = 8  # for each unit of a GPU
_GROUP_COLUMNS = 128  # that a group of a GPU reduces
_MANY_PARTS = 1024  # which are reduced in parts themselves
# Products that are added up by one accumulator of a kernel, so that their sum has a small error.
_MOST_PRODUCTS = 1 << 13
_LONGEST_PRODUCTS = 1 << 17  # the same where parts would cost much, or a kernel adds in blocks by itself
_FEW = 64  # rows or columns of a product, of which parts cost next to nothing


def split(outputs: Sequence[Node], capabilities: Capabilities) -> list[Node]:
    """For each output a node with the same value, up to the order of sums; computed nodes stay."""
    new: dict[Node, Node] = {}
    for node in topological(outputs):
        if node.value is not None:
            new[node] = node
            continue
        inputs = tuple(new[parent] for parent in node.inputs)
        same = node if inputs == node.inputs else Node(node.primitive, inputs, node.attributes)
        if node.primitive.kind is Kind.REDUCTION:
            same = _wide_sum(same, capabilities) or _in_parts(same, capabilities)
        elif node.primitive is MATMUL:
            same = _product_in_parts(same, capabilities)
        elif node.primitive is CONCAT:
            same = _joined(same, capabilities)
        new[node] = same
    return [new[node] for node in outputs]


def _joined(node: Node, capabilities: Capabilities) -> Node:
    """A concatenation of few values at a time, so that a kernel can take all that it reads and writes."""
    inputs = node.inputs
    while not _fits(inputs, capabilities):
        parts: list[list[Node]] = []
        for node_input in inputs:
            if parts and _fits([*parts[-1], node_input], capabilities):
                parts[-1].append(node_input)
            else:
                parts.append([node_input])
        if len(parts) == len(inputs):
            return node  # they are too large for a kernel
        inputs = tuple(
            part[0] if len(part) == 1 else Node(CONCAT, tuple(part), node.attributes) for part in parts
        )
    return node if inputs is node.inputs else Node(CONCAT, inputs, node.attributes)


def _fits(inputs: Sequence[Node], capabilities: Capabilities) -> bool:
    """Whether a kernel can join values."""
    sizes = [node.nbytes for node in inputs]
    return sum(map(capabilities.bindings, [sum(sizes), *sizes])) <= capabilities.max_buffers


def _wide_sum(node: Node, capabilities: Capabilities) -> Node | None:
    """A sum of integers as wider ones, where no kernel computes it: then the wide ones are not stored."""
    wide = node.inputs[0]
    if node.primitive.name != "sum" or wide.primitive is not CAST or wide.dtype.kind not in "iu":
        return None
    narrow = wide.inputs[0]
    by_kernel = capabilities.compiles and wide.size < costs.MOST_ITEMS
    by_kernel = by_kernel and (capabilities.int64 or wide.dtype.itemsize < 8)
    if wide.value is not None or by_kernel or narrow.dtype.kind not in "biu":
        return None
    return Node(WIDE_SUM, (narrow,), {"axes": node.attributes["axes"], "dtype": node.dtype})


def _in_parts(node: Node, capabilities: Capabilities) -> Node:
    source, axes = node.inputs[0], node.attributes["axes"]
    first, last = min(axes), max(axes)
    if source.size < _LARGE or node.size == 0 or axes != tuple(range(first, last + 1)):
        return node
    length = math.prod(source.shape[first : last + 1])
    parts = column_parts(node, capabilities) if first == 0 else 1
    if parts == 1:
        parts = _parts(length, node.size, trailing(source.shape, axes), capabilities)
    if parts == 1:
        return node
    wide = cast(source, float32) if node.dtype in HALF_PRECISION else source  # parts of a sum are not rounded
    cut = _reshaped(wide, (*source.shape[:first], parts, length // parts, *source.shape[last + 1 :]))
    part = Node(node.primitive, (cut,), {"axes": (first + 1,)})
    whole = Node(node.primitive, (part,), {"axes": (first,)})
    return cast(_in_parts(whole, capabilities) if parts >= _MANY_PARTS else whole, node.dtype)


def _product_in_parts(node: Node, capabilities: Capabilities) -> Node:
    """A matrix product with a long inner axis: the sum of products of parts of it."""
    left, right = node.inputs
    inner, most = left.shape[-1], _most_products(node, capabilities)
    if inner <= most or node.size == 0 or node.dtype.kind != "f" or not capabilities.compiles:
        return node
    if node.dtype in HALF_PRECISION:  # parts of a sum are not rounded
        wide = Node(MATMUL, (cast(left, float32), cast(right, float32)), {})
        return cast(_product_in_parts(wide, capabilities), node.dtype)
    fewest = -(-inner // most)
    parts = next((parts for parts in range(fewest, 2 * fewest) if inner % parts == 0), fewest)
    length = inner // parts
    batch, rows, columns = left.shape[:-2], left.shape[-2], right.shape[-1]
    lefts = reshape(_between(left, -1, 0, parts * length), (*batch, rows, parts, length))
    rights = reshape(_between(right, -2, 0, parts * length), (*batch, parts, length, columns))
    axis = len(batch)
    lefts = permute(lefts, (*range(axis), axis + 1, axis, axis + 2))
    whole = sum_(matmul(lefts, rights), (axis,))
    if parts * length == inner:
        return whole
    rest = matmul(_between(left, -1, parts * length, inner), _between(right, -2, parts * length, inner))
    return add(whole, rest)


def _most_products(node: Node, capabilities: Capabilities) -> int:
    """How long the inner axis of a product may be."""
    by_itself = capabilities.vector_width > 1 or node.dtype in HALF_PRECISION
    return _LONGEST_PRODUCTS if by_itself or min(node.shape[-2:]) > _FEW else _MOST_PRODUCTS


def _between(node: Node, axis: int, start: int, stop: int) -> Node:
    """The items of an axis from one to before another."""
    slices = [(0, length, 1) for length in node.shape]
    slices[axis] = (start, stop - start, 1)
    return slice_(node, tuple(slices))


def _parts(length: int, results: int, rows: bool, capabilities: Capabilities) -> int:
    """Into how many parts a reduction of `length` items is cut, with so many results side by side."""
    if capabilities.vector_width > 1:
        # A thread of a CPU takes a row, or 16 columns at the least.
        busy, wanted = results if rows else results // 16, 4 * capabilities.compute_units
    else:
        # A GPU gives a long row to a group.
        busy = results if rows else results // _GROUP_COLUMNS
        wanted = _GROUPS * capabilities.compute_units
    most = min(-(-wanted // max(busy, 1)), length // _MIN_PART)
    return next((parts for parts in range(most, 1, -1) if length % parts == 0), 1)


def _reshaped(node: Node, shape: Shape) -> Node:
    return Node(RESHAPE, (node,), {"shape": shape})
