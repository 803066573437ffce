"""Single operations on values that are there: what is computed most, and has the shortest way to a launch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from penstock.execution.structure import Structure
from penstock.graph.calls import RESULT
from penstock.graph.elementwise import FULL
from penstock.graph.node import Node
from penstock.graph.reference import number, number_key
from penstock.graph.shaping import RESHAPE
from penstock.memory.buffer import Buffer


class Single(NamedTuple):
    """An operation, or a function of several, and what it is computed from."""

    key: Hashable  # what it is, whatever the values are
    inputs: list[Buffer]
    numbers: list[Any]

    def is_all_of(self, structure: Structure) -> bool:
        """Whether the program of a structure takes these inputs and numbers, and tells of no index."""
        inputs = [node.value for node in structure.inputs]
        return inputs == self.inputs and structure.constants() == self.numbers and not structure.unchecked


def single(node: Node) -> Single | None:
    """A node that is one operation on values and at most one number; None if it is anything else.

    Its result may be reshaped, as that of `x[3]` is.
    """
    if node.value is not None:
        return None
    shape = node.shape
    while node.primitive is RESHAPE and node.inputs[0].value is None:
        node = node.inputs[0]
    primitive, parents, numbers = node.primitive, node.inputs, []
    if primitive.constants or primitive.is_identity:
        return None
    if primitive is RESULT:
        (call,) = parents
        subgraph, parents = call.attributes["subgraph"], call.inputs
        if len(subgraph.outputs) > 1:
            return None
        key: list[Any] = [shape, subgraph]
        numbers = [number(constant) for constant in subgraph.constants]
    else:
        key = [shape, primitive, *node.attributes.values()]
    inputs: list[Buffer] = []
    for parent in parents:
        if parent.value is not None:
            if parent.value in inputs:  # it is an argument of the program once
                return None
            inputs.append(parent.value)
        elif parent.primitive is FULL and not numbers:
            numbers.append(number(number_key(parent, "number")))
            key.append(FULL)
        else:
            return None
        key += (parent.shape, parent.dtype)
    return Single(tuple(key), inputs, numbers)
