"""What a planned compilation takes: memory of the device and of the host, and work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.compiler.compilation import Compilation
from penstock.compiler.target import Budget, Target
from penstock.drivers.driver import Cost
from penstock.drivers.rates import Crossing
from penstock.fusion.costs import MOST_ITEMS
from penstock.fusion.groups import Group
from penstock.fusion.views import base
from penstock.graph.node import Kind, Node
from penstock.kernels.costing import costs
from penstock.kernels.lower import Lowering
from penstock.memory.pool import size_class

_SHOWN = 4  # operations of a group, in its description
_LARGEST = 2  # of what is too large, in a message


@dataclass(frozen=True)
class Level:
    """What a program takes under one budget."""

    taken_bytes: int  # from the device, beside its inputs
    arena_bytes: int  # the part of them that is for temporaries
    extra_work: float  # of computing again and of waiting for copies, as a share of the work without a budget
    recomputed: tuple[tuple[str, int], ...]  # what is, and how often, what takes longest first
    launches: tuple[Cost, ...]  # what each computes and moves
    copies: tuple[Crossing, ...] = ()  # to the host and from there, beside the launches
    moved: tuple[tuple[str, int], ...] = ()  # to the host and back: what is, and how often, the largest first
    host_bytes: int = 0  # of the host's memory, for what is moved
    too_large: tuple[str, ...] = ()  # what NumPy computes, as no kernel takes values of so many items


@dataclass(frozen=True)
class Levels:
    """What a program takes without a budget, and what answers for less memory when it is asked."""

    first: Callable[[], Level]  # a function, because candidates that only might fit are not asked
    less: Callable[[], Sequence[Level]]  # plans for budgets down to the smallest
    inside: Callable[[int], Level | None]  # the plan for so many bytes
    fits: Callable[[int], bool]  # whether so many bytes will do: sooner known than the smallest
    least: Callable[[], int]  # bytes from the device that will do, and mostly the fewest: as soon known
    largest: int  # items of a value


def level(
    state: Compilation, target: Target, launches: tuple[Cost, ...], copies: tuple[Crossing, ...]
) -> Level:
    """What a planned compilation takes."""
    assert state.plan is not None
    once, again = 0.0, dict[str, list[float]]()
    for number, (group, written) in enumerate(zip(state.groups, state.lowered, strict=True)):
        work = price(group, written, target) or 0.0
        if number in state.again:
            again.setdefault(_described(group), []).append(work)
        else:
            once += work
    ranked = sorted(again.items(), key=lambda item: -sum(item[1]))
    return Level(
        taken_bytes(state, target),
        state.plan.arena_bytes,
        state.extra / once if once else 0.0,
        tuple((name, len(works)) for name, works in ranked),
        launches,
        copies,
        tuple(Counter(described(node) for node in _moved_nodes(state)).items()),
        host_bytes(state),
        too_large(state),
    )


def too_large(state: Compilation) -> tuple[str, ...]:
    """What NumPy computes on the host, as its values have too many items for kernels; the largest first."""
    found: list[tuple[int, str]] = []
    for group, written in zip(state.groups, state.lowered, strict=True):
        items = max(node.size for node in (*group.nodes, *group.inputs))
        if written is None and items >= MOST_ITEMS:
            found.append((items, _described(group)))
    return tuple(name for _, name in sorted(found, key=lambda each: -each[0]))


def too_large_text(names: Sequence[str]) -> str:
    """The same for people."""
    listed = ", ".join(list(dict.fromkeys(names))[:_LARGEST])
    return (
        f"NumPy computes {len(names)} steps on the host, as kernels take values of fewer than {MOST_ITEMS} "
        f"items: {listed}. With a smaller batch or context, kernels compute all of it"
    )


def _moved_nodes(state: Compilation) -> list[Node]:
    """What is moved to the host or lies there, the largest first."""
    assert state.layout is not None
    moved = [state.inputs[at] for at in state.hosted_state]
    moved += [move.value for move in state.moves if move.kind == "out" and move.hosted in state.layout.hosted]
    return sorted(moved, key=lambda node: -node.nbytes)


def host_bytes(state: Compilation) -> int:
    """What a planned compilation takes of the host's memory."""
    own = sum(state.inputs[at].nbytes for at in state.hosted_state)
    return own + (state.host_plan.arena_bytes if state.host_plan else 0)


def described(node: Node) -> str:
    """A value, for people."""
    made = f" of {node.primitive.name}" if node.primitive.kind is not Kind.LEAF else ", kept between steps"
    return f"{node.dtype}{list(node.shape)}{made}"


def _described(group: Group) -> str:
    """What a group computes, for people."""
    named = [node.primitive.name for node in group.nodes if not node.primitive.is_free]
    largest = max(group.outputs, key=lambda node: node.nbytes)
    first = " ".join(list(dict.fromkeys(named))[:_SHOWN]) or "copy"
    return f"{first} {largest.dtype}{list(largest.shape)}"


def taken_bytes(state: Compilation, target: Target) -> int:
    """The device memory of a run: arenas, and results that overwrite no input.

    Less what inputs do not take that lie at the host.
    """
    return arena_bytes(state) + bytes_beside_arenas(state, target)


def arena_bytes(state: Compilation) -> int:
    """The part of it that is for arenas."""
    assert state.plan is not None
    return sum(size_class(max(arena.arena_bytes, 1)) for arena in state.plan.plans)


def bytes_beside_arenas(state: Compilation, target: Target) -> int:
    """The rest of it, which is known before anything is packed."""
    freed = target.budget.freed(state.hosted_state) if target.budget else 0
    return results_beside(state, target) - freed


def counted_results(state: Compilation, target: Target) -> dict[Node, int]:
    """What results take, with those of the last call.

    State that is not written over its old value has both, from the second run on where that leaves a gap.
    """
    budget = target.budget or Budget(0)
    times = {
        base(state.wanted[at]): 2 if state.aliases.get(at) in budget.parts else 1
        for at in budget.state_results
    }
    return {node: size_class(node.nbytes) * times.get(node, budget.results) for node in fresh_results(state)}


def results_beside(state: Compilation, target: Target) -> int:
    """What they take beside those of the last call that are there already."""
    budget = target.budget or Budget(0)
    once = {base(state.wanted[at]) for at in budget.state_results}
    counted = counted_results(state, target)
    last = sum(nbytes - size_class(node.nbytes) for node, nbytes in counted.items() if node not in once)
    return sum(counted.values()) - min(budget.last, last)


def result_bytes(state: Compilation) -> int:
    """What results take that take over no input."""
    return sum(size_class(node.nbytes) for node in fresh_results(state))


def fresh_results(state: Compilation) -> list[Node]:
    """Results that get memory of their own on the device."""
    layout = state.layout
    assert layout is not None
    written = {at: layout.buffers[base(state.wanted[at])] for at in state.aliases}
    over = {written[at] for at, given in state.aliases.items() if layout.may_alias(written[at], 1 + given)}
    over |= {layout.buffers[move.hosted] for move in state.moves if move.hosted in layout.buffers}
    return [node for node in layout.outputs if layout.buffers[node] not in over]


def price(group: Group, written: Lowering | None, target: Target) -> float | None:
    """About how long a group takes; None: it may not run twice."""
    if written is None or any(node.primitive.kind is Kind.OPAQUE for node in group.nodes):
        return None  # NumPy waits for the device, and nothing is known of a user's own kernel
    return sum(map(target.rates.launch_seconds, costs(group, written)))
