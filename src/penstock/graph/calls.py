"""Calls of subgraphs that were recorded before: a single node stands for all nodes of the subgraph.

A training step records the same gradients and the same update every time. A call names the subgraph and its
inputs, so a repeated step is only a few nodes. Calls are inlined when a program is built.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence

from penstock.graph.bounds import BOUNDED
from penstock.graph.dtypes import bool_
from penstock.graph.node import Array, DType, Kind, Node, Primitive, Shape, placeholder, topological
from penstock.graph.reference import Constant, constant_key


class Subgraph:
    """The nodes between inputs, which are placeholders, and outputs. Equal only to itself."""

    __slots__ = ("constants", "depth", "inputs", "only", "outputs", "results")

    def __init__(self, inputs: Sequence[Node], outputs: Sequence[Node]) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        # The shape and the dtype of its output, if it has only one.
        self.only = (outputs[0].shape, outputs[0].dtype) if len(outputs) == 1 else None
        # Results of a call like those that will be made, if it has several.
        self.results = (
            []
            if self.only
            else [Node(RESULT, (), {"number": at}, like=output) for at, output in enumerate(outputs)]
        )
        self.depth = max((node.depth for node in outputs if node.value is None), default=0)
        pending = [node for node in topological(outputs) if node.value is None]
        self.constants: tuple[Constant, ...] = tuple(
            dict.fromkeys(constant_key(node, name) for node in pending for name in node.primitive.constants)
        )


def _call_shape(*_: Node, subgraph: Subgraph) -> tuple[Shape, DType]:
    return subgraph.only or ((), bool_)  # the shape of several results is not used: each has its own


def _result_shape(call: Node, number: int) -> tuple[Shape, DType]:
    output: Node = call.attributes["subgraph"].outputs[number]
    return output.shape, output.dtype


def _inlined_only(*_: Array, **__: object) -> Array:
    raise AssertionError("calls are inlined before anything is computed")


def _operations(output: Node) -> int:
    nodes = topological([output])
    return sum(node.primitive.operations_of(node) for node in nodes if node.value is None)


def _call_operations(call: Node) -> int:
    outputs = call.attributes["subgraph"].outputs
    return _operations(outputs[0]) if len(outputs) == 1 else 0


def _result_operations(result: Node) -> int:
    return _operations(result.inputs[0].attributes["subgraph"].outputs[result.attributes["number"]])


# A call of a subgraph with one output is that output; of several, each is a result of the call.
CALL = Primitive(
    "call", Kind.CALL, _call_shape, _inlined_only, stop_gradient=True, operations=_call_operations
)
RESULT = Primitive(
    "result", Kind.CALL, _result_shape, _inlined_only, stop_gradient=True, operations=_result_operations
)


def call(subgraph: Subgraph, inputs: Sequence[Node]) -> list[Node]:
    """The outputs of a subgraph for these inputs. No gradient passes."""
    node = Node(CALL, tuple(inputs), {"subgraph": subgraph})
    node.depth += subgraph.depth  # the depth limits how much may be pending
    if subgraph.only is not None:
        return [node]
    results = [result.alike((node,)) for result in subgraph.results]
    for result in results:
        result.depth = node.depth + 1
        result.pending_bytes += node.pending_bytes
    return results


def subgraph_between(inputs: Collection[Node], outputs: Sequence[Node]) -> tuple[Subgraph, list[Node]] | None:
    """The subgraph that computes the outputs from the inputs, and those inputs that it needs, in order.

    None if it cannot be reused: it reads a value that is not among the inputs, or checks an index.
    """
    new: dict[Node, Node] = {}
    taken: list[Node] = []
    outputs = inline(outputs, inputs)
    for node in topological(outputs, until=inputs):
        if node in inputs:
            new[node] = placeholder(node.shape, node.dtype)
            taken.append(node)
        elif node.value is not None or node.primitive is BOUNDED:
            return None
        else:
            new[node] = Node(node.primitive, tuple(new[parent] for parent in node.inputs), node.attributes)
    return Subgraph([new[node] for node in taken], [new[node] for node in outputs]), taken


def detached(inputs: Sequence[Node], outputs: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """Placeholders for the inputs, and a copy of the outputs that is computed from these."""
    leaves = {node: placeholder(node.shape, node.dtype) for node in inputs}
    return list(leaves.values()), _copied(outputs, leaves)


def inline(outputs: Sequence[Node], until: Container[Node] = ()) -> list[Node]:
    """The same outputs with every call replaced by the nodes of its subgraph; nodes in `until` stay."""
    new: dict[Node, Node] = {}
    results: dict[Node, list[Node]] = {}  # of each call
    for node in topological(outputs, until=until):
        if node.value is not None or node in until:
            new[node] = node
        elif node.primitive is CALL:
            subgraph: Subgraph = node.attributes["subgraph"]
            given = [new[parent] for parent in node.inputs]
            results[node] = _copied(subgraph.outputs, dict(zip(subgraph.inputs, given, strict=True)))
            if subgraph.only is not None:
                (new[node],) = results[node]
        elif node.primitive is RESULT:
            new[node] = results[node.inputs[0]][node.attributes["number"]]
        else:
            new[node] = node.on(tuple(new[parent] for parent in node.inputs))
    return [new[node] for node in outputs]


def _copied(outputs: Sequence[Node], given: Mapping[Node, Node]) -> list[Node]:
    new = dict(given)
    for node in topological(outputs, until=given):
        if node not in new:
            new[node] = Node(node.primitive, tuple(new[parent] for parent in node.inputs), node.attributes)
    return [new[node] for node in outputs]
