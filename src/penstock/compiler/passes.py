"""The passes from a graph to kernels in order."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from penstock.compiler.compilation import Compilation
from penstock.compiler.target import Target
from penstock.drivers.driver import Capabilities
from penstock.fusion.bounding import bounded
from penstock.fusion.column_reductions import column_units
from penstock.fusion.groups import Group, partition
from penstock.fusion.panels import lay_out_panels
from penstock.fusion.products import by_library, read_as_stored
from penstock.fusion.splitting import split
from penstock.fusion.views import base
from penstock.graph.channels_last import channels_last
from penstock.graph.joined import join_products
from penstock.graph.linear import few_rows
from penstock.graph.node import Node
from penstock.graph.quantization import computes_row
from penstock.graph.sums import join_sums
from penstock.graph.unstack import unstack
from penstock.graph.vectors import vectors_as_sums
from penstock.kernels.horizontal_fusion import MOST_CALLS, kind
from penstock.kernels.lower import Lowering, fusible
from penstock.plan.order import Work, ordered
from penstock.plan.overlap import in_time, overlapped
from penstock.plan.turns import Memory, in_turns


def order_channels(state: Compilation, target: Target) -> Compilation:
    """Where a library multiplies matrices, or convolutions have kernels: the channels of images last."""
    if not (target.capabilities.matmul_library or target.capabilities.tensor_cores):
        return state
    return replace(state, wanted=channels_last(state.wanted))


def rewrite_products(state: Compilation, target: Target) -> Compilation:
    """On a CPU, unstack products, join the terms of sums, and lay out what many products read.

    On a GPU, turn products with vectors into sums, read the others as they are stored, and join those of many
    same rows. A CPU runs separate small products in a single launch, so stacking their matrices would only
    cost copies.
    """
    can = target.capabilities
    if not can.compiles:
        return state
    if target.gpu:
        wanted = read_as_stored(few_rows(vectors_as_sums(state.wanted), can), can)
        return replace(state, wanted=join_products(wanted, state.inputs, can) if target.fuses else wanted)
    wanted = join_sums(unstack(state.wanted))
    # Kernels of single operations are few, and read matrices as they are.
    return replace(state, wanted=lay_out_panels(wanted, can) if target.fuses else wanted)


def split_long(state: Compilation, target: Target) -> Compilation:
    """Split long reductions and products."""
    return replace(state, wanted=split(state.wanted, target.capabilities))


def fuse(state: Compilation, target: Target) -> Compilation:
    """Partition the nodes into groups, one for each fused kernel."""
    columns = column_units(target.capabilities) if target.fuses else 0
    return replace(state, groups=fused(state.wanted, target.capabilities, columns))


def fused_groups(state: Compilation, target: Target) -> Sequence[Group]:
    """The groups that nodes would have if operations shared kernels."""
    fusing = replace(target, apart=None)
    return limit_buffers(fuse(state, fusing), fusing).groups


def fused(wanted: Sequence[Node], capabilities: Capabilities, column_units: int = 0) -> list[Group]:
    """The groups of a graph on a device; `column_units`: see `partition`."""
    return partition(
        wanted,
        cache(lambda node: fusible(node, capabilities)),
        lambda product: by_library(product, capabilities),
        column_units,
        beside=capabilities.vector_width > 1,
        computes_row=lambda product: computes_row(product, capabilities),
    )


def limit_buffers(state: Compilation, target: Target) -> Compilation:
    """Split groups that need more buffers than a kernel may have."""
    can = target.capabilities
    return replace(
        state, groups=bounded(state.groups, can.max_buffers, lambda node: can.bindings(node.nbytes))
    )


def lower(state: Compilation, target: Target) -> Compilation:
    """Lower each group to kernels; those of repeated layers are alike."""
    lower, known = target.apart or target.lower, dict[Hashable, Lowering | None]()
    for group in state.groups:
        if group.structure not in known:
            known[group.structure] = lower(group)
    return replace(state, lowered=[known[group.structure] for group in state.groups])


def order(state: Compilation, target: Target) -> Compilation:
    """Order the groups to keep few bytes live; on a GPU, put kernels of the same kind into turns."""
    works = works_of(state)
    sequence = ordered(works.steps, works.nbytes, works.kept)
    starts, fetches, waits = (_collectives(state, what) for what in ("start", "fetch", "wait"))
    if waits:
        sequence = overlapped(sequence, works.steps, works.kept, starts, fetches, waits)
    return replace(state, turns=turns_of(state, target, works, sequence))


def fetched_in_time(state: Compilation, works: Works, sequence: Sequence[int]) -> list[int]:
    """A sequence of groups, and of moves, in which what is fetched from other ranks comes in time."""
    return in_time(sequence, works.steps, _collectives(state, "fetch"), _collectives(state, "wait"))


def _collectives(state: Compilation, what: str) -> set[int]:
    """The groups that start exchanges between ranks, or that wait for them."""
    return {at for at, group in enumerate(state.groups) if group.nodes[0].primitive.collective == what}


class Works(NamedTuple):
    """The groups for the planner: steps that read and write values by index."""

    steps: Sequence[Work]
    nbytes: Sequence[int]
    kept: frozenset[int]  # inputs and outputs: the order does not change their memory
    nodes: Sequence[Node]  # by index


def works_of(state: Compilation) -> Works:
    """The groups of a compilation for the planner."""
    indices: dict[Node, int] = {}
    for group in state.groups:
        for node in (*map(base, group.inputs), *group.outputs):
            indices.setdefault(node, len(indices))
    for move in state.moves:
        indices.setdefault(move.value, len(indices))
        indices.setdefault(move.hosted, len(indices))
    replaces = {base(state.wanted[at]): state.inputs[given] for at, given in state.aliases.items()}
    steps = [
        Work(
            tuple(indices[base(node)] for node in group.inputs),
            tuple(indices[node] for node in group.outputs),
            tuple(indices[replaces[node]] for node in group.outputs if replaces.get(node) in indices),
        )
        for group in state.groups
    ]
    steps += [
        Work((indices[move.reads],), tuple(indices[node] for node in move.writes)) for move in state.moves
    ]
    kept = frozenset(indices[node] for node in indices if node.value is not None)
    kept |= {indices[move.hosted] for move in state.moves}  # it takes no memory of the device
    kept |= {indices[base(node)] for node in state.wanted if base(node) in indices}
    return Works(steps, [node.nbytes for node in indices], kept, list(indices))


def turns_of(
    state: Compilation, target: Target, works: Works, sequence: Sequence[int], spare: bool = True
) -> list[list[int]]:
    """The groups of a sequence in turns; `spare`: the peak may grow a little if that saves launches."""
    lowered = [*state.lowered, *(None for _ in state.moves)]
    memory = [Memory(each.may_alias, sum(each.scratch)) if each else Memory() for each in lowered]
    kinds = [
        kind(state.groups[number], state.lowered[number], target.capabilities)
        if target.gpu and target.fuses and number < len(state.groups)
        else None
        for number in sequence
    ]
    steps = [works.steps[number] for number in sequence]
    needed = None if spare else [memory[number] for number in sequence]
    turns = in_turns(steps, kinds, works.nbytes, works.kept, MOST_CALLS, needed)
    return [[sequence[at] for at in turn] for turn in turns]
