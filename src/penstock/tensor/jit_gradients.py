"""Gradients of what jitted functions return.

A result knows the values that its call read. Its gradient is a program of its own, which computes the
function again, and is built when it is first asked for. Its own gradients are recorded as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.execution.realize import executables, realize
from penstock.execution.structure import Structure
from penstock.graph import elementwise
from penstock.graph.checkpoint import copied
from penstock.graph.custom_vjp import custom_vjp
from penstock.graph.gradient import gradients
from penstock.graph.node import Node, leaf, topological
from penstock.memory.buffer import Buffer
from penstock.runtime import Device
from penstock.tensor.capture import capture
from penstock.tensor.core import Tensor, captured_by
from penstock.tensor.tracing import UNKNOWN, Origin, Tracing


@dataclass(frozen=True)
class _Program:
    """The gradient of one result: a program, what it reads, and where each part of it is."""

    program: Any
    numbers: Sequence[Any]
    inputs: list[int | Origin | Node]  # the number of a value that the call read, or -1 for the seed
    parts: list[int | Node | None]  # of each value: an output, what is there already, or none


class Differentiable:
    """What a capture's results were computed from, as a graph, and their gradients by that."""

    def __init__(self, device: Device, tracing: Tracing, outputs: Sequence[Node | None]) -> None:
        """`outputs`: the results, without those that require no gradient."""
        self._device = device
        nodes = topological([node for node in outputs if node is not None], through_values=True)
        read = {node: found for node in nodes if (found := tracing.of_node(node)) is not None}
        # Leaves of their own, so that nothing behind a tensor from outside is kept.
        self._leaves = {node: leaf(UNKNOWN, node.shape, node.dtype) for node in read}
        for node, fresh in self._leaves.items():
            fresh.tracked = node.tracked
        self._outputs = [None if node is None else copied(node, self._leaves) for node in outputs]
        self._inputs = list(self._leaves.values())
        self._origins = [found.origin for found in read.values()]
        self._primitives = [
            custom_vjp("jitted", self._rule(at), transient=True) for at in range(len(outputs))
        ]
        self._programs: dict[int, _Program] = {}
        self._seeds: dict[int, Node] = {}

    def read(self, arguments: Sequence[Tensor]) -> tuple[Node, ...]:
        """The nodes that hold what a call with these arguments reads."""
        found = [origin.tensor(arguments) for origin in self._origins]
        for tensor in found:
            if tensor._actual_node.value is None:
                realize([tensor._actual_node], tensor.device)
        return tuple(tensor._actual_node for tensor in found)

    def node(self, at: int, value: Node, read: tuple[Node, ...]) -> Node:
        """A result with the gradient by what its call read."""
        return Node(self._primitives[at], (value, *read), {}, value.value)

    # The gradient of a result

    def _rule(self, at: int) -> Any:
        def rule(g: Node, n: Node) -> list[Node | None]:
            read = n.inputs[1:]
            if capture.get() is not None:
                return self._recorded(at, g, read)
            return self._computed(at, g, read)

        return rule

    def _recorded(self, at: int, g: Node, read: Sequence[Node]) -> list[Node | None]:
        """The gradient as more graph, for a function that is being captured itself."""
        own = [_own(node) for node in read]
        output = self._outputs[at]
        assert output is not None
        return gradients(copied(output, dict(zip(self._inputs, own, strict=True))), g, own)

    def _computed(self, at: int, g: Node, read: Sequence[Node]) -> list[Node | None]:
        """The gradient by its program."""
        device = self._device
        with device.running:
            found = self._programs.get(at)
            if found is None:
                found = self._programs[at] = self._built(at)
            realize([g, *read], device)
            nodes = [self._value(source, g, read) for source in found.inputs]
            buffers: list[Buffer] = []
            if found.program is not None:
                buffers = _run(found.program, nodes, found.numbers, device)
        parts: list[Node | None] = []
        for number, (part, node) in enumerate(zip(found.parts, read, strict=True)):
            if part is None:
                parts.append(None)
                continue
            held = leaf(buffers[part], node.shape, node.dtype) if isinstance(part, int) else part
            held = g if part is self._seeds[at] else held
            rule = custom_vjp("jitted gradient", self._second_rule(at, number), transient=True)
            parts.append(Node(rule, (held, g, *read), {}, held.value))
        return parts

    @staticmethod
    def _value(source: int | Origin | Node, g: Node, read: Sequence[Node]) -> Node:
        if isinstance(source, int):
            return g if source < 0 else read[source]
        if isinstance(source, Node):
            return source
        tensor = source.tensor(())
        realize([tensor._actual_node], tensor.device)
        return tensor._actual_node

    def _built(self, at: int) -> _Program:
        tracing = Tracing()
        with captured_by(tracing):  # rules make tensors, which must not be computed
            found = self._parts(at)
        pending = [node for node in dict.fromkeys(found) if node is not None and node.value is None]
        # Without checks: the call has checked what it read.
        structure = Structure(pending, self._device.capabilities, checked=False)
        number = {node: at for at, node in enumerate(self._inputs)} | {self._seeds[at]: -1}
        inputs: list[int | Origin | Node] = []
        for node in structure.inputs:
            outside = tracing.of_node(node)
            inputs.append(number.get(node, node) if outside is None else outside.origin)
        places = {node: place for place, node in enumerate(pending)}
        program = executables(self._device).build(structure) if pending else None
        parts = [None if node is None else places.get(node, node) for node in found]
        return _Program(program, structure.constants(), inputs, parts)

    def _parts(self, at: int) -> list[Node | None]:
        """The gradient of a result by each value that it was computed from, as a graph."""
        output = self._outputs[at]
        assert output is not None
        seed = self._seeds.setdefault(at, leaf(UNKNOWN, output.shape, output.dtype))
        wanted = [node for node in self._inputs if node.tracked]
        found = dict(zip(wanted, gradients(output, seed, wanted), strict=True))
        return [found.get(node) for node in self._inputs]

    def _second_rule(self, at: int, number: int) -> Any:
        """The gradient of a part of the gradient, by the seed and by what the call read."""

        def rule(g: Node, n: Node) -> list[Node | None]:
            own = [_own(node) for node in n.inputs[1:]]
            with captured_by(Tracing()):
                part = self._parts(at)[number]
                assert part is not None
                leaves = dict(zip([self._seeds[at], *self._inputs], own, strict=True))
                return gradients(copied(part, leaves), g, own)

        return rule


def _own(node: Node) -> Node:
    """The same value as a node of its own: two tensors with one node have a gradient each."""
    made = elementwise.positive(node)
    made.tracked = True
    return made


def _run(program: Any, nodes: Sequence[Node], numbers: Sequence[Any], device: Device) -> list[Buffer]:
    inputs = [node.value for node in nodes]
    if device.dispatcher is not None:
        program, inputs = program.chosen(inputs, lambda: nodes, numbers)
    found: list[Buffer] = program.run(inputs, numbers)
    return found
