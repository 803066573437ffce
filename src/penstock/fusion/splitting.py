"""The pass that splits nodes: reductions that would leave most of the device idle or have no vectors,
concatenations of too many values, and long sums of matrix products."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import reduce

from penstock.drivers.driver import Capabilities
from penstock.fusion import costs
from penstock.fusion.column_reductions import column_parts
from penstock.fusion.views import trailing
from penstock.graph.checkpoint import BARRIER
from penstock.graph.contraction import MATMUL, matmul
from penstock.graph.dtypes import HALF_PRECISION, float32
from penstock.graph.elementwise import CAST, PRIMITIVES, add, cast
from penstock.graph.node import Kind, Node, Rounding, rewrite
from penstock.graph.reducing import WIDE_SUM, sum_
from penstock.graph.shaping import CONCAT, permute, reshape, slice_axis

_MIN_PART = 64  # items of a part; smaller parts do not pay
_MIN_ROW = 1 << 13  # the same of a row on a GPU: a workgroup takes less time for it than a second kernel
_LARGE = 1 << 15  # items from which on a second kernel pays
_GROUPS = 8  # workgroups per compute unit of a GPU,
_ROW_GROUPS = 16  # and of those that take a row, which have their items on the way at once, and end
_GROUP_COLUMNS = 128  # that a workgroup of a GPU reduces
_MANY_PARTS = 1024  # so many partial results are reduced in parts themselves
# Products that a kernel adds up in a single accumulator; longer sums are split for accuracy.
_MOST_PRODUCTS = 1 << 13
_LONGEST_PRODUCTS = 1 << 17  # the same if splitting would cost much, or the kernel itself adds in blocks
_FEW = 64  # with so few rows or columns, splitting a product costs almost nothing
_SHORT = 4  # items of a reduction that a CPU computes by elementwise operations, so with vectors,
_MANY_RESULTS = 4096  # if there are so many results


def split(outputs: Sequence[Node], capabilities: Capabilities) -> list[Node]:
    """For each output a node with the same value, up to the order of sums; computed nodes stay."""

    def rule(node: Node) -> Node:
        if node.primitive.kind is Kind.REDUCTION:
            whole = _wide_sum(node, capabilities) or _item_by_item(node, capabilities)
            whole = whole or _rows_first(node, capabilities)
            return whole or _in_parts(node, capabilities)
        if node.primitive is MATMUL:
            return _product_in_parts(node, capabilities)
        return _concat_in_parts(node, capabilities) if node.primitive is CONCAT else node

    return rewrite(outputs, rule)


def _concat_in_parts(node: Node, capabilities: Capabilities) -> Node:
    """A concatenation of concatenations, so that a kernel has a buffer for all that it reads and writes."""
    inputs = node.inputs
    while not _fits(inputs, capabilities):
        parts: list[list[Node]] = []
        for node_input in inputs:
            if parts and _fits([*parts[-1], node_input], capabilities):
                parts[-1].append(node_input)
            else:
                parts.append([node_input])
        if len(parts) == len(inputs):
            return node  # no kernel can concatenate any two of them
        inputs = tuple(
            part[0] if len(part) == 1 else Node(CONCAT, tuple(part), node.attributes) for part in parts
        )
    return node if inputs is node.inputs else Node(CONCAT, inputs, node.attributes)


def _fits(inputs: Sequence[Node], capabilities: Capabilities) -> bool:
    """Whether a kernel can concatenate values."""
    sizes = [node.nbytes for node in inputs]
    return sum(map(capabilities.bindings, [sum(sizes), *sizes])) <= capabilities.max_buffers


def _wide_sum(node: Node, capabilities: Capabilities) -> Node | None:
    """A sum of integers in a wider dtype by NumPy, if no kernel computes it, without a wide copy of them."""
    wide = node.inputs[0]
    if node.primitive.name != "sum" or wide.primitive is not CAST or wide.dtype.kind not in "iu":
        return None
    narrow = wide.inputs[0]
    by_kernel = capabilities.compiles and wide.size < costs.MOST_ITEMS
    by_kernel = by_kernel and (capabilities.int64 or wide.dtype.itemsize < 8)
    if wide.value is not None or by_kernel or narrow.dtype.kind not in "biu":
        return None
    return Node(WIDE_SUM, (narrow,), {"axes": node.attributes["axes"], "dtype": node.dtype})


def _item_by_item(node: Node, capabilities: Capabilities) -> Node | None:
    """On a CPU, a reduction of few items, as in pooling: elementwise, of each item's slice.

    Like that of any reduction, the result is stored, rather than computed again for each of its uses.
    """
    source, axes = node.inputs[0], node.attributes["axes"]
    length = math.prod(source.shape[axis] for axis in axes)
    rounds = node.dtype in HALF_PRECISION and node.primitive.rounding is not Rounding.EXACT
    few = 0 < length <= _SHORT and node.size >= _MANY_RESULTS
    if not capabilities.compiles or capabilities.vector_width == 1 or not few or rounds:
        return None
    combine, slices = PRIMITIVES[node.primitive.combine], []
    for places in itertools.product(*(range(source.shape[axis]) for axis in axes)):
        part = source
        for axis, place in zip(axes, places, strict=True):
            part = slice_axis(part, axis, place, 1)
        slices.append(reshape(part, node.shape))
    return Node(BARRIER, (reduce(lambda left, right: Node(combine, (left, right), {}), slices),), {})


def _rows_first(node: Node, capabilities: Capabilities) -> Node | None:
    """A reduction of the last axes and of others apart from them: first of the last.

    The sums of a batch norm are such. By columns, neighbouring results would be read from far apart, and on a
    GPU a few workgroups would do all of it.
    """
    source, axes = node.inputs[0], node.attributes["axes"]
    first = source.ndim
    while first and (first - 1 in axes or source.shape[first - 1] == 1):
        first -= 1
    last = tuple(axis for axis in axes if axis >= first)
    apart = tuple(axis for axis in axes if axis < first)
    long = (
        math.prod(source.shape[first:]) >= _MIN_PART and math.prod(source.shape[axis] for axis in apart) > 1
    )
    if not capabilities.compiles or not long or node.size == 0:
        return None
    wide = cast(source, float32) if node.dtype in HALF_PRECISION else source
    rows = Node(node.primitive, (wide,), {"axes": last})
    return cast(_in_parts(Node(node.primitive, (rows,), {"axes": apart}), capabilities), node.dtype)


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
    divided = reshape(wide, (*source.shape[:first], parts, length // parts, *source.shape[last + 1 :]))
    part = Node(node.primitive, (divided,), {"axes": (first + 1,)})
    whole = Node(node.primitive, (part,), {"axes": (first,)})
    return cast(_in_parts(whole, capabilities) if parts >= _MANY_PARTS else whole, node.dtype)


def _product_in_parts(node: Node, capabilities: Capabilities) -> Node:
    """A matrix product with a long contracted axis as a sum of products over parts of it."""
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
    divided = parts * length
    lefts = reshape(slice_axis(left, -1, 0, divided), (*batch, rows, parts, length))
    rights = reshape(slice_axis(right, -2, 0, divided), (*batch, parts, length, columns))
    axis = len(batch)
    lefts = permute(lefts, (*range(axis), axis + 1, axis, axis + 2))
    whole = sum_(matmul(lefts, rights), (axis,))
    if divided == inner:
        return whole
    left, right = (slice_axis(x, at, divided, inner - divided) for x, at in ((left, -1), (right, -2)))
    return add(whole, matmul(left, right))


def _most_products(node: Node, capabilities: Capabilities) -> int:
    """How long the contracted axis of a product may be."""
    if node.dtype in HALF_PRECISION and capabilities.matmul_library:
        return node.inputs[0].shape[-1]  # a library divides long sums itself, and rounds them once
    by_itself = capabilities.vector_width > 1 or node.dtype in HALF_PRECISION
    return _LONGEST_PRODUCTS if by_itself or min(node.shape[-2:]) > _FEW else _MOST_PRODUCTS


def _parts(length: int, results: int, rows: bool, capabilities: Capabilities) -> int:
    """Into how many parts a reduction of `length` items is divided, given how many results it has."""
    if capabilities.vector_width > 1:
        # A thread of a CPU takes a row, or at least 16 columns.
        busy, wanted = results if rows else results // 16, 4 * capabilities.compute_units
    else:
        # A workgroup of a GPU takes a row, or some columns.
        busy = results if rows else results // _GROUP_COLUMNS
        wanted = (_ROW_GROUPS if rows else _GROUPS) * capabilities.compute_units
    least = _MIN_ROW if rows and capabilities.vector_width == 1 else _MIN_PART
    most = min(-(-wanted // max(busy, 1)), length // least)
    return next((parts for parts in range(most, 1, -1) if length % parts == 0), 1)
