"""Matrices that a kernel of rows reads once, such as the weights of a product with a vector."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from penstock.fusion.groups import Group
from penstock.graph.contraction import GATHER
from penstock.graph.node import Node
from penstock.kernels import ir
from penstock.kernels.rewriting import rewritten

_LARGE = 1 << 18  # bytes of a matrix that no cache of a compute unit holds


def read_once(group: Group, whole: int) -> list[Node]:
    """The large inputs of which each of `whole` items is read by a single thread, and none is written."""
    if any(node.size == whole for node in group.outputs):  # which may lie over an input
        return []
    tables = {node.inputs[0] for node in group.nodes if node.primitive is GATHER}
    return [
        node for node in group.inputs if node.size == whole and node.nbytes >= _LARGE and node not in tables
    ]


def hinted(body: list[ir.Statement], group: Group, once: Collection[Node]) -> list[ir.Statement]:
    """Statements whose reads of some inputs leave the caches to what is read again."""
    names = {f"in{at}" for at, node in enumerate(group.inputs) if node in once}
    if not names:
        return body

    def change(tree: Any) -> Any:
        return replace(tree, once=True) if isinstance(tree, ir.Load) and tree.buffer in names else None

    result: list[ir.Statement] = rewritten(body, change)
    return result
