"""The last pass: steps whose arguments are locations, and the schedule of all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Literal

from penstock.compiler.compilation import Compilation
from penstock.compiler.schedule import BufferSpec, Copy, Location, Schedule, Step
from penstock.compiler.taking import described, result_bytes
from penstock.compiler.target import Target
from penstock.fusion.groups import Group
from penstock.fusion.views import base
from penstock.graph.node import Kind, Node
from penstock.graph.reference import constant_key
from penstock.kernels.concatenation import Call
from penstock.kernels.costing import costs
from penstock.kernels.hazards import Range, Touched
from penstock.kernels.library.cublaslt import LibraryLaunch
from penstock.kernels.lower import Lowering, constants
from penstock.kernels.source import ALIGNMENT
from penstock.kernels.templates.launches import Launch, Partials


def emit(state: Compilation, target: Target) -> Compilation:
    """The schedule."""
    layout, plan = state.layout, state.plan
    assert layout is not None
    assert plan is not None
    steps = _Steps(state)
    wanted = [base(node) for node in state.wanted]
    counts = Counter(wanted)
    arenas = [BufferSpec("arena", max(arena.arena_bytes, 1)) for arena in plan.plans]
    moved = {move.hosted for move in state.moves}
    inputs = [BufferSpec("input", node.nbytes, node in moved) for node in state.inputs]
    outputs = [BufferSpec("output", node.nbytes, node in moved) for node in layout.outputs]
    host = [BufferSpec("host", state.host_plan.arena_bytes)] if layout.hosted and state.host_plan else []
    schedule = Schedule(
        steps=tuple(
            step
            for turn, numbers in enumerate(state.turns)
            for number in numbers
            if (step := steps.step(number, turn)) is not None
        ),
        buffers=(*arenas[:1], *inputs, *outputs, *arenas[1:], *host),
        results=tuple(layout.buffers[node] for node in wanted),
        shared=tuple(node.value is not None or counts[node] > 1 for node in wanted),
        lifetimes=tuple(layout.lifetimes),
        plan=plan,
        input_uses=layout.input_uses,
        output_writes=layout.output_writes,
        result_bytes=result_bytes(state),
    )
    return replace(state, schedule=schedule)


class _Steps:
    """Makes steps of groups."""

    def __init__(self, state: Compilation) -> None:
        assert state.layout is not None
        assert state.plan is not None
        self._state, self._layout, self._plan = state, state.layout, state.plan
        self._first_of_more = 1 + len(state.inputs) + len(state.layout.outputs)  # arenas after the first

    def step(self, number: int, turn: int) -> Step | Copy | None:
        """The step of a group or a move; None of a mark."""
        if number < len(self._state.groups):
            return self._group(number, turn)
        move = self._state.moves[number - len(self._state.groups)]
        if move.kind == "hold":
            return None
        there = self._at_the_host(move.hosted)
        here, node = self._location(move.value), move.value
        target, source = (there, here) if move.kind == "out" else (here, there)
        return Copy(turn, target, source, node.nbytes, move.kind, described(node))

    def _at_the_host(self, node: Node) -> Location:
        if node in self._layout.buffers:
            return self._layout.buffers[node], 0
        assert self._state.host_plan is not None
        host = self._first_of_more + len(self._plan.plans) - 1
        return host, self._state.host_plan.offsets[self._layout.hosted[node]] // ALIGNMENT

    def _group(self, number: int, turn: int) -> Step:
        group, written = self._state.groups[number], self._state.lowered[number]
        scratch = self._layout.scratch[number]
        locations = [self._location(base(node)) for node in (*group.outputs, *group.inputs)]
        locations += [self._temporary(value) for value in scratch]
        reads = tuple(self._range(node) for node in dict.fromkeys(map(base, group.inputs)))
        writes = tuple(self._range(node) for node in group.outputs)
        restored = (
            () if written is None else tuple(self._range(base(group.inputs[at])) for at in written.restores)
        )
        scalars = tuple(self._number(node, name) for node, name in constants(group))
        calls: tuple[Call, ...] = ()
        if written is not None:
            calls = tuple(
                Call(
                    source=launch.source,
                    locations=tuple(locations[at] for at in launch.buffers),
                    scalars=launch.scalars,
                    constants=scalars,
                    work=group.work,
                    touched=Touched(
                        reads, self._written(group, launch) + restored, self._ahead(group, launch)
                    ),
                    scratch=tuple(self._span(value) for value in scratch),
                    cost=cost,
                    reduces=_reduces(group),
                    reads_own=launch.reads_own or _partials(group),
                )
                for launch, cost in zip(written.launches, costs(group, written), strict=True)
            )
        return Step(
            kind=_kind(written),
            turn=turn,
            locations=tuple(locations),
            reads=reads,
            writes=writes,
            constants=scalars,
            calls=calls,
            structure=group.structure,
            again=number in self._state.again,
            group=group,
            lowering=written,
        )

    def _number(self, node: Node, name: str) -> int:
        """The number of a constant among the arguments of a run."""
        return self._state.constants[constant_key(self._state.stands_for.get(node, node), name)]

    def _location(self, node: Node) -> Location:
        if node in self._layout.temporaries:
            return self._temporary(self._layout.temporaries[node])
        return self._layout.buffers[node], 0

    def _temporary(self, value: int) -> Location:
        return self._arena(value), self._plan.offsets[value] // ALIGNMENT

    def _arena(self, value: int) -> int:
        """The buffer that a temporary lies in."""
        arena = self._plan.arena_of[value]
        return self._first_of_more + arena - 1 if arena else 0

    def _written(self, group: Group, launch: Launch) -> tuple[Range, ...]:
        """The bytes of outputs that a launch writes."""
        return tuple(self._range(node) for at, node in enumerate(group.outputs) if at in launch.buffers)

    def _ahead(self, group: Group, launch: Launch) -> tuple[Range, ...]:
        """The bytes that a launch reads before it waits for others."""
        nodes = (*group.outputs, *group.inputs)
        return tuple(self._range(base(nodes[launch.buffers[at]])) for at in launch.source.ahead)

    def _range(self, node: Node) -> Range:
        """The bytes that hold a value."""
        if node in self._layout.temporaries:
            return self._span(self._layout.temporaries[node])
        return self._layout.buffers[node], 0, node.nbytes

    def _span(self, value: int) -> Range:
        """The bytes of a temporary."""
        start = self._plan.offsets[value]
        return self._arena(value), start, start + self._layout.lifetimes[value].nbytes


def _reduces(group: Group) -> bool:
    """Whether it may be two reductions, or one of two."""
    loops = group.kind.has_loops and not group.kind.is_map
    return loops or group.nodes[0].primitive.kind is Kind.ARG_REDUCTION


def _partials(group: Group) -> Partials | None:
    """The partial results that a group reduces, if it reads nothing else that is larger than its results."""
    reductions = [node for node in group.nodes if node.primitive.kind is Kind.REDUCTION]
    if not reductions:
        return None
    results = max(node.size for node in reductions)
    large = {node for node in group.inputs if base(node).size > results}
    users = [node for node in group.nodes if not large.isdisjoint(node.inputs)]
    known = {(node.inputs[0].shape, node.attributes.get("axes"), node.size) for node in users}
    if not {*users} <= {*reductions} or len(known) != 1 or any(base(node) is not node for node in large):
        return None
    ((shape, axes, size),) = known
    if size != results or axes not in ((0,), (len(shape) - 1,)):
        return None
    return Partials(results, shape[axes[0]], axes == (0,))


def _kind(written: Lowering | None) -> Literal["kernel", "library", "host"]:
    if written is None:
        return "host"
    return "library" if isinstance(written.function, LibraryLaunch) else "kernel"
