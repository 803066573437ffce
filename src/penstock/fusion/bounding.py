"""Groups that would take more buffers than a kernel of the device may, as several that each take fewer.

A part computes some of the outputs, and again for itself what it needs for them. Where a single output needs
too much, something on the way to it is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.fusion.groups import Group
from penstock.fusion.views import FREE
from penstock.graph.contraction import MATMUL
from penstock.graph.node import Node
from penstock.graph.reducing import REDUCTIONS

_KINDS = ("map", "row", "column", "matmul")  # which any nodes of theirs can be taken from


def bounded(groups: Iterable[Group], most: int) -> list[Group]:
    """The groups in order, those of more than `most` inputs and outputs in parts.

    A node that reads more values than that by itself stays as it is.
    """
    result: list[Group] = []
    for group in groups:
        fits = len(group.inputs) + len(group.outputs) <= most
        result += [group] if fits or group.kind not in _KINDS else _Parts(group, most).groups
    return result


class _Parts:
    """Divides one group."""

    def __init__(self, group: Group, most: int) -> None:
        self._group = group
        self._most = most
        self._stored: set[Node] = set()  # by parts that are complete
        self.groups: list[Group] = []
        together: list[Node] = []
        for output in sorted(group.outputs, key=group.nodes.index):
            if self._fits(self._part([*together, output])):
                together.append(output)
                continue
            if together:
                self._complete(together)
            while not self._fits(self._part([output])):
                between = self._between(output)
                if between is None:
                    break
                self._complete([between])
            together = [output]
        self._complete(together)

    def _complete(self, outputs: Sequence[Node]) -> None:
        self.groups.append(self._part(outputs))
        self._stored.update(outputs)

    def _part(self, outputs: Sequence[Node]) -> Group:
        """A group of its own for some nodes, which may read what was stored before."""
        known = self._stored.union(self._group.inputs)
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
        nodes = tuple(node for node in self._group.nodes if node in inside)
        inputs = tuple(node for node in (*self._group.inputs, *self._group.nodes) if node in read)
        kind = self._group.kind
        if not any(node.primitive is MATMUL or node.primitive in REDUCTIONS for node in nodes):
            kind = "map"
        return Group(kind, tuple(outputs), inputs, nodes, self._group.columns)

    def _fits(self, part: Group) -> bool:
        alike = part.kind != "map" or len({node.size for node in part.outputs}) == 1
        return alike and len(part.inputs) + len(part.outputs) <= self._most

    def _between(self, output: Node) -> Node | None:
        """What to store on the way to an output: what needs most values, of all that can be a part."""
        best, reads = None, 1
        for node in self._part([output]).nodes:
            if node is not output and node.primitive not in FREE:
                part = self._part([node])
                if self._fits(part) and len(part.inputs) > reads:
                    best, reads = node, len(part.inputs)
        return best
