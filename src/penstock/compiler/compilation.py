"""What the passes hand on from one to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.compiler.schedule import InputUse, OutputWrite, Schedule
from penstock.fusion.groups import Group
from penstock.graph.node import Node
from penstock.graph.reference import Constant
from penstock.kernels.lower import Lowering
from penstock.plan.arena import Value
from penstock.plan.arenas import ArenaPlan


@dataclass(frozen=True)
class Layout:
    """Where values lie: in buffers of their own, or as temporaries in the arenas."""

    buffers: Mapping[Node, int]  # inputs and outputs
    outputs: Sequence[Node]
    temporaries: Mapping[Node, int]  # numbers in `lifetimes`
    scratch: Sequence[tuple[int, ...]]  # for each group, its scratch: numbers in `lifetimes`
    lifetimes: Sequence[Value]
    input_uses: Mapping[int, InputUse]
    output_writes: Mapping[int, OutputWrite]


@dataclass(frozen=True)
class Compilation:
    """A graph on its way to a schedule; each pass fills in more."""

    wanted: Sequence[Node]
    inputs: Sequence[Node]
    constants: Mapping[Constant, int]  # the number of each among the arguments of a run
    aliases: Mapping[int, int] = field(default_factory=dict)  # wanted values that should replace inputs
    groups: Sequence[Group] = ()
    lowered: Sequence[Lowering | None] = ()  # for each group
    turns: Sequence[Sequence[int]] = ()  # numbers of groups, in the order in which they run
    layout: Layout | None = None
    plan: ArenaPlan | None = None
    schedule: Schedule | None = None
