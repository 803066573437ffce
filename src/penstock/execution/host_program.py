"""A graph that NumPy computes, node by node, where building kernels would take longer than it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import numpy as np

from penstock.execution.structure import Structure
from penstock.graph.bounds import BOUNDED, Bound
from penstock.graph.calls import detached
from penstock.graph.node import Array, Node, topological
from penstock.graph.reference import Evaluator, constant_key, evaluator
from penstock.memory.buffer import Buffer
from penstock.runtime import Device
from penstock.stream.hostview import HostView

_FEW_ITEMS = 256  # of a value that is kept for the next run


class HostProgram:
    """The values of some nodes from the values of others, as an `Executable`; it holds no values."""

    def __init__(self, structure: Structure, device: Device) -> None:
        self._device = device
        self.small = structure.small(seen=True)  # so it stays with NumPy
        inputs, wanted = detached(structure.inputs, structure.nodes)
        self.runs = 0
        self._kinds = [(node, np.dtype(node.dtype), node.shape) for node in inputs]
        nodes = topological(wanted)
        self._wanted = wanted
        self._numbers: Sequence[Any] = ()  # the constants of the last run
        self._last: dict[Node, Array] = {}  # the small values that these gave
        self.nodes = [node for node in nodes if node.value is None]
        self.operations = sum(not node.primitive.is_free for node in self.nodes)
        last = {parent: node for node in self.nodes for parent in node.inputs}
        kept = {*wanted, *inputs}
        ended: dict[Node, list[Node]] = {}  # the values that each node is the last to need
        for parent, node in last.items():
            if parent not in kept:
                ended.setdefault(node, []).append(parent)
        bounds = structure.bounds
        self._bounds = {
            node: bounds.index(node.attributes["bound"]) for node in nodes if node.primitive is BOUNDED
        }
        self._steps = [
            (
                node,
                evaluator(node),
                [(name, structure.numbers[constant_key(node, name)]) for name in node.primitive.constants],
                ended.get(node, ()),
            )
            for node in self.nodes
        ]

    @property
    def runner(self) -> Callable[[Sequence[Buffer], Sequence[Any]], list[Buffer]]:
        """What runs it where no index is checked."""
        return self.run

    def run(
        self, inputs: Sequence[Buffer], numbers: Sequence[Any], bounds: Sequence[Bound] = ()
    ) -> list[Buffer]:
        """The values of the wanted nodes, from buffers of the inputs, constants, and what indices are for."""
        device = self._device
        at_hand = device.layers().transfers.at_hand
        start = perf_counter()
        self.runs += 1
        if numbers is not self._numbers:
            self._numbers, self._last = numbers, {}
        values: dict[Node, Array] = {}
        pending: list[tuple[Node, HostView]] = []
        for (node, dtype, shape), buffer in zip(self._kinds, inputs, strict=True):
            # The device's own memory, since values never change.
            array = at_hand(buffer, dtype, shape)
            if array is None:
                pending.append((node, device.view(buffer, dtype, shape)))
            else:
                values[node] = array
        if not pending:
            return self._computed(values, numbers, bounds, start)
        with ExitStack() as views:
            for node, view in pending:
                values[node] = views.enter_context(view)
            return self._computed(values, numbers, bounds, start)

    @np.errstate(all="ignore")
    def _computed(
        self, values: dict[Node, Array], numbers: Sequence[Any], bounds: Sequence[Bound], start: float
    ) -> list[Buffer]:
        """The same from the values of the inputs; `start` is when the run began."""
        for node, evaluate, constants, ended in self._steps:
            given = [values[parent] for parent in node.inputs]
            if constants:
                values[node] = self._with_constants(node, evaluate, constants, given, numbers)
            elif node in self._bounds:  # an error names the line that recorded it this time
                values[node] = evaluate(given, {"bound": bounds[self._bounds[node]]})
            else:
                values[node] = evaluate(given, node.attributes)
            for parent in ended:
                del values[parent]
        for recorder in self._device.stream.recorders:
            recorder.computed_by_host(" ".join(names(self.nodes)), start, perf_counter())
        return [self._device.upload(values[node]) for node in self._wanted]

    def _with_constants(
        self,
        node: Node,
        evaluate: Evaluator,
        constants: list[tuple[str, int]],
        inputs: list[Array],
        numbers: Sequence[Any],
    ) -> Array:
        """The value of a node with these constants. Of a few items, that of the last run serves again."""
        value = self._last.get(node)
        if value is None:
            given = {name: numbers[number] for name, number in constants}
            value = evaluate(inputs, node.attributes | given)
            if not inputs and node.size <= _FEW_ITEMS:
                self._last[node] = value
        return value


def names(nodes: Sequence[Node]) -> list[str]:
    """What some nodes do, each once."""
    pending = [node for node in nodes if node.value is None and not node.primitive.is_free]
    return list(dict.fromkeys(node.primitive.name for node in pending))
