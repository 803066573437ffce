"""The list of passes. `realize`, `jit` and `auto` all compile through it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, wraps
from typing import ParamSpec, TypeVar

from penstock.compiler.apart import check_apart, keep_apart
from penstock.compiler.budget import Ways, fit
from penstock.compiler.compilation import Compilation
from penstock.compiler.emit import emit
from penstock.compiler.launches import timeline
from penstock.compiler.layout import lay_out, plan
from penstock.compiler.passes import (
    fuse,
    limit_buffers,
    lower,
    order,
    order_channels,
    rewrite_products,
    split_long,
)
from penstock.compiler.schedule import Schedule
from penstock.compiler.taking import Level, Levels, level
from penstock.compiler.target import Target
from penstock.graph.node import Node, placeholder
from penstock.graph.reference import Constant
from penstock.graph.simplify import simplify

P = ParamSpec("P")
R = TypeVar("R")
GraphPass = Callable[[Sequence[Node], Mapping[Node, Node]], list[Node]]
Pass = Callable[[Compilation, Target], Compilation]

# The same for every target, so that `auto` runs them once and then places the result.
GRAPH_PASSES: tuple[GraphPass, ...] = (simplify,)

TARGET_PASSES: tuple[Pass, ...] = (
    order_channels,
    rewrite_products,
    split_long,
    keep_apart,
    # Sharding belongs here, where a value is still a node.
    fuse,
    limit_buffers,
    lower,  # before `order`, which runs kernels of one kind together, and `plan`, which needs their scratch
    check_apart,
    order,
    lay_out,
    plan,
    fit,  # once kernels are known, so that what runs again gives the same bits; it orders and plans anew
    emit,
)


def _without_collector(function: Callable[P, R]) -> Callable[P, R]:
    """Pause Python's garbage collector in a function whose many objects live until its end.

    It would walk all of them again and again, for a quarter of the time that a large graph takes.
    """

    @wraps(function)
    def paused(*args: P.args, **kwargs: P.kwargs) -> R:
        if not gc.isenabled():
            return function(*args, **kwargs)
        try:
            gc.disable()
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return paused


@_without_collector
def prepare(wanted: Sequence[Node], inputs: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """The graph after the passes that need no target, and placeholders that stand for the inputs in it."""
    leaves = {node: placeholder(node.shape, node.dtype) for node in inputs}
    nodes = list(wanted)
    for transform in GRAPH_PASSES:
        nodes, leaves = transform(nodes, leaves), {leaf: leaf for leaf in leaves.values()}
    return nodes, list(leaves)


@_without_collector
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


@_without_collector
def budget_levels(
    wanted: Sequence[Node],
    inputs: Sequence[Node],
    constants: Mapping[Constant, int],
    target: Target,
    aliases: Mapping[int, int] | None = None,
) -> Levels:
    """What the same graph takes under budgets down to the smallest; see `compile_graph`."""
    state = Compilation(wanted, inputs, constants, aliases or {})
    for transform in TARGET_PASSES[: TARGET_PASSES.index(fit)]:
        state = transform(state, target)

    def level_of(planned: Compilation) -> Level:
        schedule = emit(planned, target).schedule
        assert schedule is not None
        return level(planned, target, *timeline(schedule, target.capabilities))

    ways = cache(lambda: Ways(state, target))

    @_without_collector
    def less() -> list[Level]:
        return [level_of(planned) for planned in ways().frontier()[1:]]

    @_without_collector
    def inside(nbytes: int) -> Level | None:
        planned = ways().inside(nbytes)
        return None if planned is None else level_of(planned)

    fits = _without_collector(lambda nbytes: ways().fits(nbytes))
    least = _without_collector(lambda: ways().least())
    largest = max((node.size for group in state.groups for node in group.nodes), default=0)
    return Levels(partial(level_of, state), less, inside, fits, least, largest)
