"""Splits groups that need more buffers than a kernel of the device may have.

Each part computes some of the outputs, and recomputes what it needs for them. If a single output still needs
too many buffers, an intermediate value is stored. A value may count as several buffers. A node that needs too
many by itself becomes a group of its own, for which the device has no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from penstock.fusion.groups import Group
from penstock.fusion.kinds import GroupKind
from penstock.fusion.views import base
from penstock.graph.node import Kind, Node


def bounded(groups: Iterable[Group], most: int, weigh: Callable[[Node], int] = lambda node: 1) -> list[Group]:
    """The groups in order; those with more than `most` inputs and outputs are split.

    `weigh` says how many buffers a value takes.
    """
    result: list[Group] = []
    stored: set[Node] = set()  # by all groups of the result
    for group in groups:
        # A value that several groups compute for themselves may have been stored by an earlier group.
        outputs = [node for node in group.outputs if node not in stored]
        if len(outputs) < len(group.outputs):
            group = _part(group, outputs, set(group.inputs))
        if sum(map(weigh, (*group.inputs, *group.outputs))) <= most or not group.kind.fuses:
            parts = [group] if outputs else []
        else:
            parts = _Parts(group, most, weigh, stored).groups
        stored.update(node for part in parts for node in part.outputs)
        result += parts
    return result


def _part(group: Group, outputs: Sequence[Node], known: Container[Node]) -> Group:
    """The part of a group that computes `outputs` and reads the nodes in `known` from memory."""
    inside: set[Node] = set()
    read: set[Node] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node in known:
            read.add(node)
        elif node not in inside:
            inside.add(node)
            stack += node.inputs
    nodes = tuple(node for node in group.nodes if node in inside)
    inputs = tuple(node for node in (*group.inputs, *group.nodes) if node in read)
    computes = any(node.primitive.kind in (Kind.CONTRACTION, Kind.REDUCTION) for node in nodes)
    return Group(group.kind if computes else GroupKind.MAP, tuple(outputs), inputs, nodes, group.columns)


class _Parts:
    """Splits a group."""

    def __init__(self, group: Group, most: int, weigh: Callable[[Node], int], stored: set[Node]) -> None:
        """`stored`: values that earlier groups have stored."""
        self._group = group
        self._most = most
        self._weigh = weigh
        self._elsewhere = stored
        self._stored: set[Node] = set()  # by parts that are complete, or by earlier groups
        self.groups: list[Group] = []
        together: list[Node] = []
        for output in sorted(group.outputs, key=group.nodes.index):
            if self._fits(self._part([*together, output])):
                together.append(output)
                continue
            if together:
                self._complete(together)
            together = [output] if self._prepared(output) else []
        if together:
            self._complete(together)

    def _prepared(self, output: Node) -> bool:
        """Store intermediate values until a part can compute an output; False if it became its own group."""
        while not self._fits(self._part([output])):
            if between := self._between(output):
                self._complete([between])
                continue
            nodes = self._part([output]).nodes
            large = (
                node for node in nodes if not node.primitive.is_free and not self._fits(self._part([node]))
            )
            blocked = next(large, output)
            self._alone(blocked)
            if blocked is output:
                return False
        return True

    def _alone(self, node: Node) -> None:
        """Make a group of a single node, which reads all its inputs from memory."""
        for parent in map(base, node.inputs):
            known = self._stored.union(map(base, self._group.inputs))
            if parent not in known and self._prepared(parent):
                self._complete([parent])
        self._add(Group(GroupKind.SINGLE, (node,), node.inputs, (node,)))

    def _complete(self, outputs: Sequence[Node]) -> None:
        self._add(self._part(outputs))

    def _add(self, part: Group) -> None:
        if not self._elsewhere.issuperset(part.outputs):
            self.groups.append(part)
        self._stored.update(part.outputs)

    def _part(self, outputs: Sequence[Node]) -> Group:
        """The part that computes `outputs`, and may read what was stored before."""
        return _part(self._group, outputs, self._stored.union(self._group.inputs))

    def _fits(self, part: Group) -> bool:
        alike = not part.kind.is_map or len({node.size for node in part.outputs}) == 1
        return alike and self._weight(part.inputs) + self._weight(part.outputs) <= self._most

    def _weight(self, nodes: Iterable[Node]) -> int:
        return sum(map(self._weigh, nodes))

    def _between(self, output: Node) -> Node | None:
        """The intermediate value of an output whose storing saves most inputs, if a part can compute it."""
        best, most_saved = None, 0
        for node in self._part([output]).nodes:
            if node is not output and base(node) is node:  # a reshape has no memory of its own
                part = self._part([node])
                saved = self._weight(part.inputs) - self._weigh(node)
                if self._fits(part) and saved > most_saved:
                    best, most_saved = node, saved
        return best
