"""The pass that gives each operation a kernel of its own, with the bits of the fused program.

On a GPU, a kernel that reduces divides its items among threads as suits what it is fused with. So the fused
program is looked at first, for the orders of its sums, in which single operations then add up, too.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.compiler.compilation import Compilation
from penstock.compiler.passes import fused_groups
from penstock.compiler.target import Target
from penstock.fusion.column_reductions import is_column_part
from penstock.fusion.groups import Group
from penstock.fusion.products import by_library
from penstock.graph.node import Kind, Node
from penstock.graph.reducing import BLOCK
from penstock.graph.separate import NotSeparable, separate
from penstock.kernels.lowering.blocks import depends_on_order
from penstock.kernels.lowering.values import computed_dtype
from penstock.kernels.templates.launches import Lowering

Order = tuple[int, ...]  # see `Lowered`


def keep_apart(state: Compilation, target: Target) -> Compilation:
    """Prevent fusion where the target asks for it. Raises NotSeparable where the bits would differ."""
    if target.fuses:
        return state
    orders, biased = _fused_sums(state, target) if target.gpu else ({}, set())
    return replace(state, wanted=separate(state.wanted, orders, biased))


def check_orders(state: Compilation, target: Target) -> Compilation:
    """Raise NotSeparable if the kernel of a single operation adds up in another order than it should."""
    for group, lowering in zip(state.groups, state.lowered, strict=True):
        orders = [node.attributes["order"] for node in group.nodes if "order" in node.attributes]
        for order in orders if not target.fuses else ():
            if len(orders) > 1 or (order and (lowering is None or lowering.order[: len(order)] != order)):
                raise NotSeparable(f"{group.outputs[0]} has no kernel of its own")
    return state


def _fused_sums(state: Compilation, target: Target) -> tuple[dict[Node, Order], set[Node]]:
    """The order of each reduction in a fused program, and the additions that are part of a library's product.

    Empty where the bits do not depend on it.
    """
    orders: dict[Node, Order] = {}
    biased: set[Node] = set()
    for group in fused_groups(state, target):
        if any(_is_by_library(node, target) for node in group.nodes):
            biased.update(node for node in group.outputs if not node.primitive.multiplies_matrices)
        reductions = [node for node in group.nodes if _is_given_none(node)]
        lowering = target.lower(group) if any(map(_depends_on_order, reductions)) else None
        for node in reductions:
            order = _order(node, group, lowering) if _depends_on_order(node) else ()
            if orders.setdefault(node, order) != order:
                raise NotSeparable(f"{node} is added up in two ways")
    return orders, biased


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
