"""Which values of a graph are parameters, which stay on the host, and what is computed once for all calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import penstock as ps
from penstock.onnx.graph import Graph, computed, folds, inner_names, named, used_names
from penstock.onnx.reading import Arrays, Input
from penstock.onnx.registry import Value


@dataclass(frozen=True)
class Sorted:
    """A graph, whose constants are those that the host needs, and where the other values belong."""

    graph: Graph
    parameters: Arrays
    buffers: Arrays
    constants: Arrays  # those of the graph that nodes need on the device, too
    on_host: frozenset[str]  # inputs that stay on the host where they are given as arrays or numbers


def sort_constants(graph: Graph, inputs: Iterable[Input], initializers: Arrays, device: ps.Device) -> Sorted:
    """Floating-point initializers are parameters, unless only the host needs them, as the scales of Resize.

    Others are buffers, unless NumPy may compute with them. The statistics of a batch norm are buffers, too.
    """
    only_host = _only_on_host(graph)
    fixed = {name for name, array in initializers.items() if name in only_host or not floating(array.dtype)}
    on_host = frozenset(
        entry.name for entry in inputs if entry.name in only_host or not floating(entry.dtype)
    )
    uses = _Uses(graph, {*graph.constants, *fixed, *on_host})
    folded = {name: initializers[name] for name in fixed if name in uses.on_host}
    graph = _folded(replace(graph, constants={**graph.constants, **folded}), device)
    rest = {name: array for name, array in initializers.items() if name not in folded}
    trained = {name for name in rest if name not in fixed and name not in uses.statistics}
    return Sorted(
        graph,
        {name: array for name, array in rest.items() if name in trained},
        {name: array for name, array in rest.items() if name not in trained},
        {
            name: array
            for name, array in graph.constants.items()
            if name in uses.on_device and _several(array)
        },
        on_host,
    )


def floating(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is one that gradients pass."""
    return dtype.kind == "f" or dtype.name == "bfloat16"  # of which NumPy knows no kind


def _several(array: Value) -> bool:
    return array.size > 1 and isinstance(array, np.ndarray) and any(array.strides)


def _only_on_host(graph: Graph) -> set[str]:
    """Values that nodes need only on the host: shapes, and what only shapes are computed from."""
    uses: dict[str, list[bool]] = defaultdict(list)
    for name in graph.outputs:
        uses[name].append(False)
    for step in reversed(graph.steps):
        node, how = step.node, step.node.operator
        for_host = how.folds and all(all(uses.get(name, [False])) for name in node.outputs if name)
        for position, name in enumerate(node.inputs):
            uses[name].append(for_host or position in how.host)
        for name in inner_names(node):
            uses[name].append(False)
    return {name for name, use in uses.items() if all(use)}


class _Uses:
    """Where nodes need each value, given those that the host may know."""

    def __init__(self, graph: Graph, known: set[str]) -> None:
        self.on_host: set[str] = set()
        self.on_device: set[str] = {*graph.outputs}
        self.statistics: set[str] = set()
        known = set(known)
        for step in graph.steps:
            node, how = step.node, step.node.operator
            if folds(how, [not name or name in known for name in node.inputs]):
                known.update(node.outputs)
                self.on_host.update(node.inputs)
            else:
                self.on_host.update(
                    node.inputs[position] for position in how.host if position < len(node.inputs)
                )
                self.on_device.update(
                    name for position, name in enumerate(node.inputs) if position not in how.host
                )
            self.statistics.update(node.inputs[p] for p in how.statistics if p < len(node.inputs))
            inner = {*inner_names(node)}
            self.on_host |= inner
            self.on_device |= inner


def _folded(graph: Graph, device: ps.Device) -> Graph:
    """Without the nodes whose inputs are all constants: what they give is constant, too."""
    constants: dict[str, Any] = dict(graph.constants)
    steps = []
    for step in graph.steps:
        node = step.node
        if node.operator.folds and all(name in constants for name in node.inputs if name):
            results = computed(node, constants, device, {}, None)
            constants.update(named(node, results))
        else:
            steps.append(
                replace(step, released=tuple(name for name in step.released if name not in constants))
            )
    used = {name for step in steps for name in used_names(step.node)} | {*graph.outputs}
    kept = {name: value for name, value in constants.items() if name in used}
    return replace(graph, steps=tuple(steps), constants=kept)
