"""Where a graph is best cut in two: the first part on one device, the rest on another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.dispatch.pricing import Price
from penstock.graph.node import Node, placeholder, topological


@dataclass(frozen=True)
class Parts:
    """A graph in two: `heads` are computed first, and of them `crossing` are leaves of the second part."""

    heads: list[Node]  # what the first part gives
    crossing: list[Node]  # those of the heads that the second part needs
    leaves: list[Node]  # what stands for them there
    tails: list[Node]  # what the second part gives: nodes of its own


def operations(nodes: Sequence[Node]) -> list[Node]:
    """What a graph computes, each node after its inputs."""
    return [node for node in topological(nodes) if node.value is None]


def cut(nodes: Sequence[Node], place: int) -> Parts | None:
    """The graph of `nodes` with its first `place` operations apart; None where one part would be empty."""
    order = operations(nodes)
    first, second = set(order[:place]), order[place:]
    crossing: dict[Node, None] = {}
    stack = [parent for node in second for parent in node.inputs]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in first and node not in seen:
            seen.add(node)
            if node.primitive.is_free:  # costs less to recompute than to move
                stack += node.inputs
            else:
                crossing[node] = None
    heads = list(dict.fromkeys([*crossing, *(node for node in nodes if node in first)]))
    tails = [node for node in dict.fromkeys(nodes) if node not in first]
    if not heads or not any(node.value is None for node in tails):
        return None
    leaves = {node: placeholder(node.shape, node.dtype) for node in crossing}
    return Parts(heads, list(crossing), list(leaves.values()), _rebuilt(tails, leaves))


def _rebuilt(outputs: Sequence[Node], leaves: Mapping[Node, Node]) -> list[Node]:
    """The same graph with leaves in place of some nodes."""
    new = dict(leaves)
    for node in topological(outputs, until=leaves):
        if node in new:
            continue
        inputs = () if node.value is not None else tuple(new[parent] for parent in node.inputs)
        same = node.value is not None or inputs == node.inputs
        new[node] = node if same else Node(node.primitive, inputs, node.attributes)
    return [new[node] for node in outputs]


def best_place(
    nodes: Sequence[Node], first: Price, second: Price, move_seconds: Callable[[int], float]
) -> tuple[int, float]:
    """After how many operations to cut, and about how long both parts take.

    The prices are those of the whole graph on each of the two devices; `move_seconds` tells what it takes to
    bring so many bytes from the one to the other.
    """
    order = operations(nodes)
    number = {node: at for at, node in enumerate(order)}
    before = list(accumulate(_by_operation(first, number), initial=0.0))
    after = list(accumulate(_by_operation(second, number), initial=0.0))
    last = _last_uses(order, number)
    ends: dict[int, int] = {}
    live, best = 0, (0, float("inf"))
    programs = first.seconds - before[-1] + second.seconds - after[-1]
    for place in range(1, len(order)):
        node = order[place - 1]
        if not node.primitive.is_free and last.get(node, -1) >= place:
            live += node.nbytes
            ends[last[node]] = ends.get(last[node], 0) + node.nbytes
        live -= ends.pop(place - 1, 0)
        seconds = programs + before[place] + after[-1] - after[place] + move_seconds(live)
        if seconds < best[1]:
            best = place, seconds
    return best


def _by_operation(price: Price, number: Mapping[Node, int]) -> list[float]:
    """What each operation takes: a group's time is that of its last one."""
    times = [0.0] * len(number)
    for group, seconds in price.groups:
        places = [number[node] for node in group.nodes if node in number]
        times[max(places, default=0)] += seconds
    return times


def _last_uses(order: Sequence[Node], number: Mapping[Node, int]) -> dict[Node, int]:
    """The last operation that needs each value, itself or a view of it."""
    last: dict[Node, int] = {}
    for node in reversed(order):
        use = last.get(node, -1) if node.primitive.is_free else number[node]
        for parent in node.inputs:
            if parent in number:
                last[parent] = max(last.get(parent, -1), use)
    return last
