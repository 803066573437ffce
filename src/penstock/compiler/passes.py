"""The passes from a graph to kernels in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from penstock.compiler.compilation import Compilation
from penstock.compiler.target import Target
from penstock.drivers.driver import Capabilities
from penstock.fusion.bounding import bounded
from penstock.fusion.column_reductions import column_units
from penstock.fusion.groups import Group, partition
from penstock.fusion.products import by_library
from penstock.fusion.splitting import split
from penstock.fusion.views import base
from penstock.graph.channels_last import channels_last
from penstock.graph.node import Node
from penstock.graph.separate import separate
from penstock.graph.sums import join_sums
from penstock.graph.unstack import unstack
from penstock.graph.vectors import vectors_as_sums
from penstock.kernels.horizontal_fusion import MOST_CALLS, kind
from penstock.kernels.lower import fusible
from penstock.plan.order import Work, ordered
from penstock.plan.turns import in_turns


def order_channels(state: Compilation, target: Target) -> Compilation:
    """Where a library multiplies matrices: the channels of images last."""
    if not target.capabilities.matmul_library:
        return state
    return replace(state, wanted=channels_last(state.wanted))


def rewrite_products(state: Compilation, target: Target) -> Compilation:
    """On a CPU, where small products are one launch in any case: no copies of their matrices into stacks,
    and terms of sums joined.

    On a GPU, products with vectors as sums.
    """
    if not target.capabilities.compiles:
        return state
    wanted = vectors_as_sums(state.wanted) if target.gpu else join_sums(unstack(state.wanted))
    return replace(state, wanted=wanted)


def split_long(state: Compilation, target: Target) -> Compilation:
    """Long reductions and products in parts."""
    return replace(state, wanted=split(state.wanted, target.capabilities))


def keep_apart(state: Compilation, target: Target) -> Compilation:
    """Where a target does not fuse: a kernel of its own for each operation."""
    return state if target.fuses else replace(state, wanted=separate(state.wanted))


def fuse(state: Compilation, target: Target) -> Compilation:
    """Nodes into groups, each of which one kernel computes."""
    columns = column_units(target.capabilities)
    return replace(state, groups=fused(state.wanted, target.capabilities, columns))


def fused(wanted: Sequence[Node], capabilities: Capabilities, column_units: int = 0) -> list[Group]:
    """The groups of a graph on a device; `column_units`: see `partition`."""
    return partition(
        wanted,
        cache(lambda node: fusible(node, capabilities)),
        lambda product: by_library(product, capabilities),
        column_units,
    )


def limit_buffers(state: Compilation, target: Target) -> Compilation:
    """Divide groups that take more buffers than a kernel may."""
    can = target.capabilities
    return replace(
        state, groups=bounded(state.groups, can.max_buffers, lambda node: can.bindings(node.nbytes))
    )


def lower(state: Compilation, target: Target) -> Compilation:
    """Write the kernels of each group."""
    return replace(state, lowered=[target.lower(group) for group in state.groups])


def order(state: Compilation, target: Target) -> Compilation:
    """Order the groups so that little memory is live; on a GPU, run kernels of one kind in one turn."""
    works = works_of(state)
    sequence = ordered(works.steps, works.nbytes, works.kept)
    return replace(state, turns=turns_of(state, target, works, sequence))


class Works(NamedTuple):
    """The groups as steps that read and write values by number, as the planner sees them."""

    steps: Sequence[Work]
    nbytes: Sequence[int]
    kept: frozenset[int]  # what the caller gives and gets is there whatever the order
    nodes: Sequence[Node]  # by number


def works_of(state: Compilation) -> Works:
    """The groups of a compilation for the planner."""
    numbers: dict[Node, int] = {}
    for group in state.groups:
        for node in (*map(base, group.inputs), *group.outputs):
            numbers.setdefault(node, len(numbers))
    for move in state.moves:
        numbers.setdefault(move.value, len(numbers))
        numbers.setdefault(move.hosted, len(numbers))
    replaces = {base(state.wanted[at]): state.inputs[given] for at, given in state.aliases.items()}
    steps = [
        Work(
            tuple(numbers[base(node)] for node in group.inputs),
            tuple(numbers[node] for node in group.outputs),
            tuple(numbers[replaces[node]] for node in group.outputs if replaces.get(node) in numbers),
        )
        for group in state.groups
    ]
    steps += [
        Work((numbers[move.reads],), tuple(numbers[node] for node in move.writes)) for move in state.moves
    ]
    kept = frozenset(numbers[node] for node in numbers if node.value is not None)
    kept |= {numbers[move.hosted] for move in state.moves}  # which takes no memory of the device
    kept |= {numbers[base(node)] for node in state.wanted if base(node) in numbers}
    return Works(steps, [node.nbytes for node in numbers], kept, list(numbers))


def turns_of(
    state: Compilation, target: Target, works: Works, sequence: Sequence[int], spare: bool = True
) -> list[list[int]]:
    """The groups of a sequence in turns; `spare`: where that saves launches, a little more may be live."""
    kinds = [
        kind(state.groups[number], state.lowered[number], target.capabilities)
        if target.gpu and number < len(state.groups)
        else None
        for number in sequence
    ]
    steps = [works.steps[number] for number in sequence]
    turns = in_turns(steps, kinds, works.nbytes, works.kept, MOST_CALLS, spare)
    return [[sequence[at] for at in turn] for turn in turns]
