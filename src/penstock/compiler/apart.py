"""The pass that gives each operation a kernel of its own, with the bits of the fused program.

On a GPU, a kernel that reduces divides its items among threads as suits what it is fused with. So the fused
program is looked at first, for the orders of its sums, in which single operations then add up, too. What it
computes of 16-bit floats is written out in float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from penstock.compiler.as_fused import AsFused, depends_on_fusion, has_half_precision, scattered_operands
from penstock.compiler.compilation import Compilation
from penstock.compiler.passes import fused_groups
from penstock.compiler.target import Target
from penstock.fusion.column_reductions import is_column_part
from penstock.fusion.groups import Group
from penstock.fusion.panels import lay_out_panels
from penstock.fusion.products import by_library
from penstock.graph.node import Kind, Node, topological
from penstock.graph.reducing import BLOCK
from penstock.graph.separate import NotSeparable, separate
from penstock.kernels.lowering.blocks import depends_on_order
from penstock.kernels.lowering.values import computed_dtype
from penstock.kernels.templates.launches import Lowering

Order = tuple[int, ...]  # see `Lowered`

_MOST_COPIED = 1 << 25  # items of the windows of images


def keep_apart(state: Compilation, target: Target) -> Compilation:
    """Prevent fusion where the target asks for it. Raises NotSeparable where the bits would differ."""
    if target.fuses:
        return state
    if not target.gpu:
        return _apart_on_cpu(state, target)
    groups = fused_groups(state, target)
    by_library = [group for group in groups if any(_is_by_library(node, target) for node in group.nodes)]
    # The additions that are part of a library's product.
    biased = {
        node for group in by_library for node in group.outputs if not node.primitive.multiplies_matrices
    }
    wanted, orders, constants = state.wanted, _fused_sums(groups, target), dict[Node, Node]()
    if has_half_precision(topological(wanted)):
        values = AsFused(groups, target.capabilities)
        wanted, biased = [*map(values.stored, wanted)], {*map(values.stored, biased)}
        orders = {made: orders[node] for made, node in values.reductions.items() if node in orders}
        constants = values.constants
    wanted, products = separate(wanted, orders, biased), _products(map(target.lower, by_library))
    return replace(state, wanted=wanted, products=products, stands_for=constants)


def _apart_on_cpu(state: Compilation, target: Target) -> Compilation:
    """On a CPU, only products that read windows, and what is rounded to 16 bits, depend on what is fused."""
    if not depends_on_fusion(state.wanted):
        return replace(state, wanted=separate(state.wanted, {}, ()))
    if lay_out_panels(state.wanted, target.capabilities) != [*state.wanted]:
        raise NotSeparable("the fused program lays out matrices")
    values = AsFused(fused_groups(state, target), target.capabilities)
    wanted = [*map(values.stored, state.wanted)]
    copied = scattered_operands(topological(wanted))
    if sum(operand.size for operand in copied) > _MOST_COPIED:
        raise NotSeparable("copies of all windows would take as long as a compiler")
    return replace(state, wanted=separate(wanted, {}, (), copied), stands_for=values.constants)


def check_apart(state: Compilation, target: Target) -> Compilation:
    """Raise NotSeparable if the kernel of a single operation computes in another way than it should."""
    if target.fuses:
        return state
    for group, lowering in zip(state.groups, state.lowered, strict=True):
        orders = [node.attributes["order"] for node in group.nodes if "order" in node.attributes]
        for order in orders:
            if len(orders) > 1 or (order and (lowering is None or lowering.order[: len(order)] != order)):
                raise NotSeparable(f"{group.outputs[0]} has no kernel of its own")
    if _products(state.lowered) != state.products:
        raise NotSeparable("a library may have other algorithms for other products")
    return state


def _products(lowered: Iterable[Lowering | None]) -> Counter[Any]:
    """The products that a library computes."""
    functions: list[Any] = [lowering.function for lowering in lowered if lowering is not None]
    return Counter(function.product for function in functions if hasattr(function, "product"))


def _fused_sums(groups: Sequence[Group], target: Target) -> dict[Node, Order]:
    """The order of each reduction in fused groups; empty where the bits do not depend on it."""
    orders: dict[Node, Order] = {}
    for group in groups:
        reductions = [node for node in group.nodes if _is_given_none(node)]
        lowering = target.lower(group) if any(map(_depends_on_order, reductions)) else None
        for node in reductions:
            order = _order(node, group, lowering) if _depends_on_order(node) else ()
            if orders.setdefault(node, order) != order:
                raise NotSeparable(f"{node} is added up in two ways")
    return orders


def _order(node: Node, group: Group, lowering: Lowering | None) -> Order:
    """The order in which a fused kernel adds up the items of a node."""
    order = () if lowering is None else lowering.order
    if order and not group.kind.has_columns:
        threads, lanes, together = order
        order = threads, lanes
        if is_column_part(node):  # row by row: some at a time, and then the sums of these
            order = (together, 1) if node.inputs[0].shape[1] <= BLOCK * together else ()
    if not order:
        raise NotSeparable(f"{node} is added up as only a fused kernel does")
    return order


def _is_by_library(node: Node, target: Target) -> bool:
    return node.primitive.multiplies_matrices and by_library(node, target.capabilities)


def _is_given_none(node: Node) -> bool:
    return node.primitive.kind is Kind.REDUCTION and "order" not in node.attributes


def _depends_on_order(node: Node) -> bool:
    return depends_on_order(node.primitive.name, computed_dtype(node))
