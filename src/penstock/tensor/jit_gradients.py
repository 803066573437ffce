"""Gradients of the results of jitted functions.

A result keeps the values that its call read. Its gradient is another program, which recomputes the function
and is built at the first backward pass. Second derivatives are recorded as graphs.
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
    """The program of a result's gradient, its inputs, and where the gradient of each read value is."""

    program: Any
    numbers: Sequence[Any]
    inputs: list[
        int | Origin | Node
    ]  # the position of a value that the call read; -1 is the gradient of the result
    parts: list[int | Node | None]  # for each read value: a position of an output, a computed node, or None


class Differentiable:
    """The graph of a capture's results, and their gradients with respect to the values that a call read."""

    def __init__(self, device: Device, tracing: Tracing, outputs: Sequence[Node | None]) -> None:
        """`outputs`: the results; None for those that require no gradient."""
        self._device = device
        nodes = topological([node for node in outputs if node is not None], through_values=True)
        read = {node: source for node in nodes if (source := tracing.of_node(node)) is not None}
        # New leaves, so that the history of tensors from outside is not kept alive.
        self._leaves = {node: leaf(UNKNOWN, node.shape, node.dtype) for node in read}
        for node, fresh in self._leaves.items():
            fresh.tracked = node.tracked
        self._outputs = [None if node is None else copied(node, self._leaves) for node in outputs]
        self._inputs = list(self._leaves.values())
        self._origins = [source.origin for source in read.values()]
        self._primitives = [
            custom_vjp("jitted", self._rule(at), transient=True) for at in range(len(outputs))
        ]
        self._programs: dict[int, _Program] = {}
        self._seeds: dict[int, Node] = {}

    def read(self, arguments: Sequence[Tensor]) -> tuple[Node, ...]:
        """The nodes of the values that a call with these arguments reads."""
        tensors = [origin.tensor(arguments) for origin in self._origins]
        for tensor in tensors:
            if tensor._actual_node.value is None:
                realize([tensor._actual_node], tensor.device)
        return tuple(tensor._actual_node for tensor in tensors)

    def node(self, at: int, value: Node, read: tuple[Node, ...]) -> Node:
        """A node of a result with its gradient with respect to the read values."""
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
        """The gradient as a graph, inside another function that is being captured."""
        separate = [_separate(node) for node in read]
        output = self._outputs[at]
        assert output is not None
        return gradients(copied(output, dict(zip(self._inputs, separate, strict=True))), g, separate)

    def _computed(self, at: int, g: Node, read: Sequence[Node]) -> list[Node | None]:
        """The gradient, computed by its program."""
        device = self._device
        with device.running:
            built = self._programs.get(at)
            if built is None:
                built = self._programs[at] = self._built(at)
            realize([g, *read], device)
            nodes = [self._value(source, g, read) for source in built.inputs]
            buffers: list[Buffer] = []
            if built.program is not None:
                buffers = _run(built.program, nodes, built.numbers, device)
        parts: list[Node | None] = []
        for position, (part, node) in enumerate(zip(built.parts, read, strict=True)):
            if part is None:
                parts.append(None)
                continue
            held = leaf(buffers[part], node.shape, node.dtype) if isinstance(part, int) else part
            held = g if part is self._seeds[at] else held
            rule = custom_vjp("jitted gradient", self._second_rule(at, position), transient=True)
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
        with captured_by(tracing):  # gradient rules create tensors, which must not be computed here
            wanted = self._parts(at)
        pending = [node for node in dict.fromkeys(wanted) if node is not None and node.value is None]
        # Indices are not checked: the call has checked them.
        structure = Structure(pending, self._device.capabilities, checked=False)
        read = {node: at for at, node in enumerate(self._inputs)} | {self._seeds[at]: -1}
        inputs: list[int | Origin | Node] = []
        for node in structure.inputs:
            outside = tracing.of_node(node)
            inputs.append(read.get(node, node) if outside is None else outside.origin)
        outputs = {node: number for number, node in enumerate(pending)}
        program = executables(self._device).build(structure) if pending else None
        parts = [None if node is None else outputs.get(node, node) for node in wanted]
        return _Program(program, structure.constants(), inputs, parts)

    def _parts(self, at: int) -> list[Node | None]:
        """The gradient of a result with respect to each read value, as a graph."""
        output = self._outputs[at]
        assert output is not None
        seed = self._seeds.setdefault(at, leaf(UNKNOWN, output.shape, output.dtype))
        wanted = [node for node in self._inputs if node.tracked]
        computed = dict(zip(wanted, gradients(output, seed, wanted), strict=True))
        return [computed.get(node) for node in self._inputs]

    def _second_rule(self, at: int, position: int) -> Any:
        """The gradient rule of a part of the gradient, by the result's gradient and the read values."""

        def rule(g: Node, n: Node) -> list[Node | None]:
            separate = [_separate(node) for node in n.inputs[1:]]
            with captured_by(Tracing()):
                part = self._parts(at)[position]
                assert part is not None
                leaves = dict(zip([self._seeds[at], *self._inputs], separate, strict=True))
                return gradients(copied(part, leaves), g, separate)

        return rule


def _separate(node: Node) -> Node:
    """A new node of the same value: two tensors that share a node get separate gradients."""
    copy = elementwise.positive(node)
    copy.tracked = True
    return copy


def _run(program: Any, nodes: Sequence[Node], numbers: Sequence[Any], device: Device) -> list[Buffer]:
    inputs = [node.value for node in nodes]
    if device.dispatcher is not None:
        program, inputs = program.chosen(inputs, lambda: nodes, numbers)
    outputs: list[Buffer] = program.run(inputs, numbers)
    return outputs
