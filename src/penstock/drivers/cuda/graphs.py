"""CUDA graphs of launches, whose arguments can be changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver as cu

from penstock.drivers.cuda.calls import FATAL, CudaError, checked
from penstock.drivers.cuda.launches import Bound, Launch
from penstock.drivers.driver import Handles, Queue


class Graph:
    """A graph of launches. Nodes with changed arguments are updated before the next launch of the graph."""

    def __init__(
        self, bound: Sequence[Bound], after: Sequence[Sequence[int]], queue: Queue, handles: Handles
    ) -> None:
        self._bound = bound
        self._after = after
        self._queue = queue  # for capturing the launches of libraries
        self._handles = handles
        self._changes: list[Bound] = []
        self._build()
        handles.open.add(id(self))
        for launch in bound:
            launch.changes = self._changes

    def _build(self) -> None:
        graph = checked(cu.cuGraphCreate(0))
        nodes: dict[Bound, list[Any]] = {}  # of each launch, which follow one another
        try:
            dependents = Counter(earlier for before in self._after for earlier in before)
            for number in _soonest(self._after):
                launch, before = self._bound[number], self._after[number]
                own = nodes[launch] = launch.add_to(graph, self._queue)
                alone = len(before) == 1 and dependents[before[0]] == 1
                edges = [_edge(self._bound[earlier], launch, alone) for earlier in before]
                sources = [nodes[self._bound[earlier]][-1] for earlier in before]
                checked(cu.cuGraphAddDependencies(graph, sources, own[:1] * len(before), edges, len(before)))
            native = checked(cu.cuGraphInstantiate(graph, 0))
        except BaseException:
            cu.cuGraphDestroy(graph)
            raise
        self._graph, self._native, self._nodes = graph, native, nodes  # nodes live as long as their graph

    def record(self, queue: Queue) -> None:
        """Launch the graph."""
        if self._changes:
            self._update()
        checked(cu.cuGraphLaunch(self._native, queue))

    def _update(self) -> None:
        try:
            for launch in dict.fromkeys(self._changes):
                launch.update(self._native, self._nodes[launch], self._queue)
        except CudaError as error:
            if error.code in FATAL:
                raise
            # For other arguments a library may launch other kernels, which requires a new graph.
            graph, native = self._graph, self._native
            self._build()
            cu.cuGraphExecDestroy(native)
            cu.cuGraphDestroy(graph)
        self._changes.clear()

    def __del__(self) -> None:
        if not hasattr(self, "_graph") or self._handles.abandoned:
            return
        cu.cuGraphExecDestroy(self._native)
        cu.cuGraphDestroy(self._graph)
        self._handles.open.discard(id(self))
        for launch in self._bound:
            if launch.changes is self._changes:
                launch.changes = None


def _edge(earlier: Bound, later: Bound, alone: bool) -> Any:
    """How a launch depends on another; `alone`: on no other, and nothing else depends on that.

    A kernel that waits by itself may then be launched before the other has ended: that hides how long
    launching takes. Libraries' kernels, and copies, start when all before them is done.
    """
    edge = cu.CUgraphEdgeData()
    if alone and isinstance(earlier, Launch) and isinstance(later, Launch) and later.early:
        edge.from_port = cu.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
        edge.type = cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC.value
    return edge


def _soonest(after: Sequence[Sequence[int]]) -> list[int]:
    """The order in which launches are added as nodes: by earliest start, then by the longest path after them.

    CUDA assigns nodes to its streams in the order in which they are added.
    """
    start, rest = [0] * len(after), [0] * len(after)
    for number, before in enumerate(after):
        start[number] = max((1 + start[earlier] for earlier in before), default=0)
    for number in range(len(after) - 1, -1, -1):
        for earlier in after[number]:
            rest[earlier] = max(rest[earlier], 1 + rest[number])
    return sorted(range(len(after)), key=lambda number: (start[number], -rest[number]))
