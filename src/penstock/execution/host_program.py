"""A graph that NumPy computes, node by node, where building kernels would take longer than it does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import numpy as np

from penstock.execution.structure import Structure
from penstock.graph.calls import detached
from penstock.graph.node import Array, Node, topological
from penstock.graph.reference import computed, number_key
from penstock.memory.buffer import Buffer
from penstock.runtime import Device


class HostProgram:
    """The values of some nodes from the values of others, as an `Executable`; it holds no values."""

    def __init__(self, structure: Structure) -> None:
        self.small = structure.small(seen=True)  # so it stays with NumPy
        self._inputs, wanted = detached(structure.inputs, structure.nodes)
        nodes = topological(wanted)
        self._wanted = wanted
        self.nodes = [node for node in nodes if node.value is None]
        last = {parent: node for node in self.nodes for parent in node.inputs}
        self._constants = [
            [(name, structure.numbers[number_key(node, name)]) for name in node.primitive.constants]
            for node in self.nodes
        ]
        kept = {*wanted, *self._inputs}
        self._ended: dict[Node, list[Node]] = {}  # the values that each node is the last to need
        for parent, node in last.items():
            if parent not in kept:
                self._ended.setdefault(node, []).append(parent)

    def run(self, inputs: Sequence[Buffer], numbers: Sequence[Any], device: Device) -> list[Buffer]:
        """The values of the wanted nodes, from buffers of the inputs and the constants."""
        recorders = device.stream.recorders
        start = perf_counter() if recorders else 0.0
        values: dict[Node, Array] = {}
        with ExitStack() as views:
            for node, buffer in zip(self._inputs, inputs, strict=True):
                # The device's own memory, since values never change.
                values[node] = views.enter_context(device.view(buffer, node.dtype, node.shape))
            for node, constants in zip(self.nodes, self._constants, strict=True):
                attributes = node.attributes
                if constants:
                    attributes = attributes | {name: numbers[number] for name, number in constants}
                values[node] = computed(node, [values[parent] for parent in node.inputs], attributes)
                for parent in self._ended.get(node, ()):
                    del values[parent]
            for recorder in recorders:
                recorder.computed_by_host(" ".join(names(self.nodes)), start, perf_counter())
            return [device.upload(np.ascontiguousarray(values[node])) for node in self._wanted]


def names(nodes: Sequence[Node]) -> list[str]:
    """What some nodes do, each once."""
    pending = [node for node in nodes if node.value is None and not node.primitive.is_free]
    return list(dict.fromkeys(node.primitive.name for node in pending))
