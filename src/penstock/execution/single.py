"""Small expressions of computed values: the most frequent case, with the shortest path to a launch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from penstock.execution.structure import Structure
from penstock.graph.bounds import BOUNDED
from penstock.graph.calls import RESULT
from penstock.graph.elementwise import FULL
from penstock.graph.node import Node
from penstock.graph.reference import Constant, constant_key, constant_values
from penstock.graph.shaping import RESHAPE
from penstock.memory.buffer import Buffer

_MOST_PARTS = 64  # of a key: some ten operations
_MOST_DEPTH = 64  # of nodes, with those of subgraphs


class Single:
    """A small expression, and what it is computed from."""

    __slots__ = ("_keys", "_nodes", "constants", "inputs", "key")

    def __init__(self, key: Hashable, nodes: list[Node], constants: tuple[Constant, ...]) -> None:
        self.key = key  # what it is, whatever the values are
        self.inputs: list[Buffer] = [node.value for node in nodes]  # which its program takes, with
        self.constants: tuple[Any, ...] = constant_values(constants) if constants else ()
        self._nodes = nodes
        self._keys = constants

    def is_all_of(self, structure: Structure) -> bool:
        """Whether the program of a structure takes these inputs and numbers, and tells of no index."""
        if structure.unchecked or structure.inputs != self._nodes:
            return False
        return tuple(structure.numbers) == self._keys


def single(node: Node) -> Single | None:
    """A node that is a few operations on values and numbers; None if it is anything else."""
    primitive = node.primitive
    if node.value is not None or node.depth > _MOST_DEPTH or primitive.is_identity:
        return None
    if primitive is RESHAPE and node.inputs[0].value is not None:
        return None  # the same value
    key: list[Any] = []
    inputs: list[Node] = []
    constants: dict[Constant, int] = {}
    if not _describe(node, key, inputs, constants):
        return None
    return Single(tuple(key), inputs, tuple(constants))


def _describe(node: Node, key: list[Any], inputs: list[Node], constants: dict[Constant, int]) -> bool:
    """Add what a node is to a key, and what it needs to the others, in the order of a `Structure`.

    False: it is no small expression. What is used twice is there twice.
    """
    if len(key) > _MOST_PARTS:
        return False
    if node.value is not None:
        if node in inputs:
            key.append(inputs.index(node))
        else:
            inputs.append(node)
            key += (node.shape, node.dtype.name)
        return True
    primitive = node.primitive
    while primitive.is_identity and primitive is not BOUNDED:
        node = node.inputs[0]
        if node.value is not None:
            return _describe(node, key, inputs, constants)
        primitive = node.primitive
    if primitive is FULL:
        constant = constant_key(node, "number")
        key += (FULL, node.shape, node.dtype.name, constants.setdefault(constant, len(constants)))
        return True
    parents = node.inputs
    if not parents or primitive.constants or primitive is BOUNDED:
        return False
    if primitive is RESULT:
        (called,) = parents
        parents, subgraph = called.inputs, called.attributes["subgraph"]
        if len(subgraph.outputs) > 1:
            return False
        key.append(subgraph)
    else:
        key += (primitive, len(parents), *node.attributes.values())
        subgraph = None
    for parent in parents:
        if not _describe(parent, key, inputs, constants):
            return False
    if subgraph is not None:
        key += [constants.setdefault(constant, len(constants)) for constant in subgraph.constants]
    return True
