"""Small expressions of computed values: the most frequent case, with the shortest path to a launch."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any, TypeAlias

from penstock.execution.structure import Structure
from penstock.graph.bounds import BOUNDED
from penstock.graph.calls import CALL
from penstock.graph.elementwise import FULL
from penstock.graph.node import Kind, Node
from penstock.graph.reference import Constant, constant_key
from penstock.memory.buffer import Buffer

_MOST_PARTS = 128  # of a key: some twenty operations
_MOST_DEPTH = 64  # of nodes, with those of subgraphs

# What an expression is, whatever the values are; the buffers that its program takes; their nodes; and its
# constants. A tuple, since it is made for every operation.
Single: TypeAlias = tuple[Hashable, list[Buffer], Sequence[Node], Collection[Constant]]


def single(node: Node) -> Single | None:
    """A pending node that is a few operations on values and numbers; None if it is anything else."""
    primitive, parents = node.primitive, node.inputs
    if primitive is CALL:
        return _called(node) or _expression(node)
    if primitive.constants or primitive.is_identity or not 0 < len(parents) < 3:
        return _expression(node)
    # An operation on a computed value, and perhaps another or a number.
    x, y = parents[0], parents[-1]
    if x.value is None:
        return _expression(node)
    operation = (primitive, *node.attributes.values()) if node.attributes else primitive
    if x is y:
        used = "once" if len(parents) == 1 else "twice"
        return (operation, x.shape, x.dtype.name, used), [x.value], (x,), ()
    if y.value is not None:
        return (operation, x.shape, x.dtype.name, y.shape, y.dtype.name), [x.value, y.value], parents, ()
    if y.primitive is not FULL:
        return _expression(node)
    number = constant_key(y, "number")
    return (operation, x.shape, x.dtype.name, FULL, y.shape, y.dtype.name), [x.value], (x,), (number,)


def _called(node: Node) -> Single | None:
    """The same for a subgraph with one output, called with different computed values: it is the key."""
    subgraph, parents = node.attributes["subgraph"], node.inputs
    values = [parent.value for parent in parents]
    if subgraph.only is None or None in values or (len(parents) > 1 and len({*parents}) < len(parents)):
        return None
    return subgraph, values, parents, subgraph.constants


def _expression(node: Node) -> Single | None:
    """The same for several operations."""
    if node.depth > _MOST_DEPTH or node.primitive.is_identity:
        return None
    key: list[Any] = []
    values: list[Buffer] = []
    nodes: list[Node] = []
    constants: dict[Constant, int] = {}
    if not _describe(node, key, values, nodes, constants):
        return None
    return tuple(key), values, nodes, constants


def is_all_of(single: Single, structure: Structure) -> bool:
    """Whether the program of a structure takes these inputs and numbers, and tells of no index."""
    _, _, nodes, constants = single
    if structure.unchecked or structure.inputs != list(nodes):
        return False
    return tuple(structure.numbers) == tuple(constants)


def _describe(
    node: Node, key: list[Any], values: list[Buffer], inputs: list[Node], constants: dict[Constant, int]
) -> bool:
    """Add what a pending node is to a key, and what it needs to the others, in the order of a `Structure`.

    False: it is no small expression. What is used twice is there twice.
    """
    primitive = node.primitive
    parents = node.inputs
    if primitive is FULL or (not parents and primitive.kind is Kind.CREATION):
        names = primitive.constants
        key += (primitive, node.shape, node.dtype.name)
        key += [value for name, value in node.attributes.items() if name not in names]
        key += [constants.setdefault(constant_key(node, name), len(constants)) for name in names]
        return True
    if not parents or primitive.constants or primitive is BOUNDED or len(key) + len(parents) > _MOST_PARTS:
        return False
    subgraph = None
    if primitive is CALL:
        subgraph = node.attributes["subgraph"]
        if subgraph.only is None:
            return False
        key.append(subgraph)
    elif node.attributes:
        key += (primitive, len(parents), *node.attributes.values())
    else:
        key += (primitive, len(parents))
    for given in parents:
        parent = given
        while parent.value is None and parent.primitive.is_identity and parent.primitive is not BOUNDED:
            parent = parent.inputs[0]
        if parent.value is None:
            if not _describe(parent, key, values, inputs, constants):
                return False
        elif parent in inputs:
            key.append(inputs.index(parent))
        else:
            inputs.append(parent)
            values.append(parent.value)
            key += (parent.shape, parent.dtype.name)
    if subgraph is not None and subgraph.constants:
        key += [constants.setdefault(constant, len(constants)) for constant in subgraph.constants]
    return True
