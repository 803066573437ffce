"""The list of passes. `realize`, `jit` and `auto` all compile through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.compiler.compilation import Compilation
from penstock.compiler.emit import emit
from penstock.compiler.layout import lay_out, plan
from penstock.compiler.passes import (
    fuse,
    keep_apart,
    limit_buffers,
    lower,
    order,
    split_long,
    unstack_products,
)
from penstock.compiler.schedule import Schedule
from penstock.compiler.target import Target
from penstock.graph.node import Node, placeholder
from penstock.graph.reference import Constant
from penstock.graph.simplify import simplify

GraphPass = Callable[[Sequence[Node], Mapping[Node, Node]], list[Node]]
Pass = Callable[[Compilation, Target], Compilation]

# The same for every target, so that `auto` runs them once and then places the result.
GRAPH_PASSES: tuple[GraphPass, ...] = (simplify,)

TARGET_PASSES: tuple[Pass, ...] = (
    unstack_products,
    split_long,
    keep_apart,
    # Sharding, rematerialisation and offloading belong here, where a value is still a node.
    fuse,
    limit_buffers,
    lower,  # before `order`, which runs kernels of one kind together, and `plan`, which needs their scratch
    order,
    lay_out,
    plan,
    emit,
)


def prepare(wanted: Sequence[Node], inputs: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """The graph after the passes that need no target, and placeholders that stand for the inputs in it."""
    leaves = {node: placeholder(node.shape, node.dtype) for node in inputs}
    nodes = list(wanted)
    for transform in GRAPH_PASSES:
        nodes, leaves = transform(nodes, leaves), {leaf: leaf for leaf in leaves.values()}
    return nodes, list(leaves)


def compile_graph(
    wanted: Sequence[Node],
    inputs: Sequence[Node],
    constants: Mapping[Constant, int],
    target: Target,
    aliases: Mapping[int, int] | None = None,
) -> Schedule:
    """The schedule of a prepared graph, whose leaves are `inputs`.

    `constants` numbers the scalar arguments of a run. `aliases` names wanted values, by number, that should
    be written over inputs: those that replace the old values of parameters.
    """
    state = Compilation(wanted, inputs, constants, aliases or {})
    for transform in TARGET_PASSES:
        state = transform(state, target)
    assert state.schedule is not None
    return state.schedule
