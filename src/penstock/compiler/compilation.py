"""The data that the passes transform."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.compiler.schedule import InputUse, OutputWrite, Schedule, may_alias
from penstock.fusion.groups import Group
from penstock.graph.node import Node
from penstock.graph.reference import Constant
from penstock.kernels.lower import Lowering
from penstock.plan.arena import Plan, Value
from penstock.plan.arenas import ArenaPlan


@dataclass(frozen=True)
class Layout:
    """The memory of values: buffers of their own, or temporaries in the arenas."""

    buffers: Mapping[Node, int]  # inputs and outputs
    outputs: Sequence[Node]
    temporaries: Mapping[Node, int]  # indices in `lifetimes`
    scratch: Sequence[tuple[int, ...]]  # for each group, its scratch: indices in `lifetimes`
    lifetimes: Sequence[Value]
    hosted: Mapping[Node, int]  # what the host has for a while: indices in `host_lifetimes`
    host_lifetimes: Sequence[Value]
    input_uses: Mapping[int, InputUse]
    output_writes: Mapping[int, OutputWrite]

    def may_alias(self, output: int, given: int) -> bool:
        """Whether an output may overwrite an input buffer: no later step reads the input."""
        return may_alias(self.output_writes.get(output), self.input_uses.get(given), given)


@dataclass(frozen=True)
class Move:
    """A copy of a value to the memory of the host or back, or the mark until which what is sent stays."""

    kind: Literal["out", "in", "hold"]
    value: Node  # on the device
    hosted: Node  # the same at the host; where it is an input or a result, it stays there between runs

    @property
    def reads(self) -> Node:
        """Where it comes from."""
        return self.hosted if self.kind == "in" else self.value

    @property
    def writes(self) -> tuple[Node, ...]:
        """Where it goes."""
        return () if self.kind == "hold" else (self.value if self.kind == "in" else self.hosted,)


@dataclass(frozen=True)
class Compilation:
    """A graph on its way to a schedule; each pass fills in more."""

    wanted: Sequence[Node]
    inputs: Sequence[Node]
    constants: Mapping[Constant, int]  # the number of each among the arguments of a run
    aliases: Mapping[int, int] = field(default_factory=dict)  # wanted values that should replace inputs
    # Constants in float32 that stand for others, whose numbers they have.
    stands_for: Mapping[Node, Node] = field(default_factory=dict)
    # Those that a library computes for a fused program, and how many of each.
    products: Mapping[Any, int] = field(default_factory=dict)
    groups: Sequence[Group] = ()
    lowered: Sequence[Lowering | None] = ()  # for each group
    again: frozenset[int] = frozenset()  # groups that compute once more what was dropped
    moves: Sequence[Move] = ()
    extra: float = 0.0  # what it adds to the work that values are computed again, or moved
    turns: Sequence[Sequence[int]] = ()  # indices of groups, then of moves, in the order in which they run
    layout: Layout | None = None
    plan: ArenaPlan | None = None
    host_plan: Plan | None = None  # of what the host has
    schedule: Schedule | None = None

    @property
    def hosted_state(self) -> list[int]:
        """The inputs that lie at the host between runs, by number."""
        moved = {move.hosted for move in self.moves}
        return [at for at, node in enumerate(self.inputs) if node in moved]
