"""A graph of ONNX as steps in order, and how they are run."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import penstock as ps
from penstock.onnx.registry import Call, Node, Operator, Value, on_device, on_host


@dataclass(frozen=True)
class Step:
    """A node, and the values that nobody needs after it."""

    node: Node
    released: tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """Nodes in an order in which they can run."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steps: tuple[Step, ...]
    constants: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def run(self, values: MutableMapping[str, Value], device: ps.Device, stored: Stored) -> list[Value]:
        """The outputs; `values` has the inputs, and gets what is computed on the way."""
        values.update(self.constants)

        def inner(graph: Graph, inputs: Sequence[Value]) -> list[Value]:
            own = dict(zip(graph.inputs, inputs, strict=True))
            return graph.run(ChainMap[str, Value](own, *_maps(values)), device, stored)

        for step in self.steps:
            results = computed(step.node, values, device, stored, inner)
            values.update(named(step.node, results))
            for name in step.released:
                del values[name]
        return [values[name] for name in self.outputs]


Stored = Mapping[str, ps.Tensor]  # constants that are on the device already


def _maps(values: MutableMapping[str, Value]) -> Sequence[MutableMapping[str, Value]]:
    return values.maps if isinstance(values, ChainMap) else [values]


def computed(
    node: Node, values: Mapping[str, Value], device: ps.Device, stored: Stored, run: Any
) -> Sequence[Value]:
    """The outputs of a node; `run` is called with a graph of its attributes, and that graph's inputs."""
    how = node.operator
    given = [values[name] if name else None for name in node.inputs]
    folded = folds(how, [value is None or isinstance(value, np.ndarray) for value in given])
    args: list[Value | None] = []
    for position, (name, value) in enumerate(zip(node.inputs, given, strict=True)):
        if value is None:
            args.append(None)
        elif position in how.host:
            args.append(on_host(value, node, position))
        elif folded or not isinstance(value, np.ndarray):
            args.append(value)
        else:
            args.append(stored[name] if name in stored else on_device(value, device))
    call = Call(node, device, np if folded else ps, run)
    try:
        with np.errstate(all="ignore"):  # overflow is silent on devices, too
            result = how.function(call, *args)
    except Exception as error:
        error.add_note(f"This was raised by {node} of the ONNX model.")
        raise
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [np.asarray(value) if isinstance(value, np.generic) else value for value in results]


def named(node: Node, results: Sequence[Value]) -> Iterator[tuple[str, Value]]:
    """The outputs that have names, with these."""
    return ((name, value) for name, value in zip(node.outputs, results, strict=False) if name)


def folds(how: Operator, known: Sequence[bool]) -> bool:
    """Whether NumPy computes a node, given which inputs the host knows."""
    return how.folds and (
        how.lengths or all(there or position in how.host for position, there in enumerate(known))
    )


def free_names(graph: Graph) -> Iterator[str]:
    """What a graph reads of those around it."""
    own = {*graph.inputs, *graph.constants}
    for step in graph.steps:
        yield from (name for name in used_names(step.node) if name not in own)
        own.update(step.node.outputs)
    yield from (name for name in graph.outputs if name not in own)


def used_names(node: Node) -> Iterator[str]:
    """What a node reads, also in its graphs."""
    yield from filter(None, node.inputs)
    yield from inner_names(node)


def inner_names(node: Node) -> Iterator[str]:
    """What the graphs of a node read of those around them."""
    for value in node.attributes.values():
        if isinstance(value, Graph):
            yield from free_names(value)
