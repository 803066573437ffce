"""Cuts a graph in two, the first part for a device and the rest for another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.dispatch.pricing import Price
from penstock.graph.node import Node, placeholder, topological


@dataclass(frozen=True)
class Parts:
    """A graph in two parts: `heads` are computed first, and `crossing` are passed to the second part."""

    heads: list[Node]  # the outputs of the first part
    crossing: list[Node]  # the heads that the second part needs
    leaves: list[Node]  # their placeholders in the second part
    tails: list[Node]  # the outputs of the second part


def operations(nodes: Sequence[Node]) -> list[Node]:
    """The pending nodes of a graph in topological order."""
    return [node for node in topological(nodes) if node.value is None]


def cut(nodes: Sequence[Node], count: int) -> Parts | None:
    """The graph of `nodes`, cut after its first `count` operations; None if a part would be empty."""
    order = operations(nodes)
    first, second = set(order[:count]), order[count:]
    crossing: dict[Node, None] = {}
    stack = [parent for node in second for parent in node.inputs]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in first and node not in seen:
            seen.add(node)
            if node.primitive.is_free:  # recomputing it costs less than moving it
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
        if node not in new:
            pending = node.value is None
            new[node] = node.on(tuple(new[parent] for parent in node.inputs)) if pending else node
    return [new[node] for node in outputs]


def best_cut(
    nodes: Sequence[Node], first: Price, second: Price, move_seconds: Callable[[int], float]
) -> tuple[int, float]:
    """After how many operations to cut, and about how long both parts take.

    The prices are those of the whole graph on each of the two devices; `move_seconds` gives the time to move
    so many bytes from the first device to the second.
    """
    order = operations(nodes)
    number = {node: at for at, node in enumerate(order)}
    before = list(accumulate(_by_operation(first, number), initial=0.0))
    after = list(accumulate(_by_operation(second, number), initial=0.0))
    last = _last_uses(order, number)
    ends: dict[int, int] = {}
    live, best = 0, (0, float("inf"))
    programs = first.seconds - before[-1] + second.seconds - after[-1]
    for count in range(1, len(order)):
        node = order[count - 1]
        if not node.primitive.is_free and last.get(node, -1) >= count:
            live += node.nbytes
            ends[last[node]] = ends.get(last[node], 0) + node.nbytes
        live -= ends.pop(count - 1, 0)
        seconds = programs + before[count] + after[-1] - after[count] + move_seconds(live)
        if seconds < best[1]:
            best = count, seconds
    return best


def _by_operation(price: Price, number: Mapping[Node, int]) -> list[float]:
    """The time of each operation; that of a group is attributed to its last operation."""
    times = [0.0] * len(number)
    for group, seconds in price.groups:
        positions = [number[node] for node in group.nodes if node in number]
        times[max(positions, default=0)] += seconds
    return times


def _last_uses(order: Sequence[Node], number: Mapping[Node, int]) -> dict[Node, int]:
    """The last operation that reads each value, directly or through views."""
    last: dict[Node, int] = {}
    for node in reversed(order):
        use = last.get(node, -1) if node.primitive.is_free else number[node]
        for parent in node.inputs:
            if parent in number:
                last[parent] = max(last.get(parent, -1), use)
    return last
