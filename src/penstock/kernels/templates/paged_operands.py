"""The operands of attention to pages, of few queries and of many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.graph.node import Node

LOWEST = -1e30  # below every score


@dataclass(frozen=True)
class Operands:
    """Their sizes, and the attributes of the node."""

    dtype: str
    rows: int
    length: int
    heads: int
    key_heads: int
    size: int  # of a head
    pages: int
    page: int  # positions of a page
    width: int  # pages of a row of the table
    scale: float
    window: int
    softcap: float

    @property
    def type(self) -> str:
        """The dtype that is computed in."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def groups(self) -> int:
        """Heads of queries that share a head of keys."""
        return self.heads // self.key_heads


def operands_of(query: Node, pages: Node, table: Node, attributes: Mapping[str, Any]) -> Operands:
    """The operands of a node with these inputs and attributes."""
    rows, length, heads, size = query.shape
    _, count, key_heads, page, _ = pages.shape
    shape = (rows, length, heads, key_heads, size, count, page, table.shape[1])
    named = {name: attributes[name] for name in ("scale", "window", "softcap")}
    return Operands(str(query.dtype), *shape, **named)
