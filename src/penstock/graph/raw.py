"""Primitives that are kernels written by the user: only a device's compiler knows what they compute.

The outputs of a launch are nodes that differ in the attribute `part` only, the index of the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.graph.node import Array, DType, Kind, Node, Primitive, Shape


@dataclass(frozen=True)
class RawText:
    """A kernel's name and parameters, and its header and body in each language."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    scalars: tuple[tuple[str, DType], ...]
    languages: tuple[tuple[str, str, str], ...]  # language, header, body

    def of(self, language: str) -> tuple[str, str]:
        """Header and body in a language."""
        return next((header, body) for name, header, body in self.languages if name == language)


@dataclass(frozen=True)
class RawLaunch:
    """A use of a kernel: its outputs, and how many threads run it."""

    text: RawText
    shapes: tuple[Shape, ...]
    dtypes: tuple[DType, ...]
    grid: tuple[int, ...]
    group: tuple[int, ...]
    threads: int | None  # threads that work independently; the rest of the last group is idle


def _reference(*arrays: Array, launch: RawLaunch, **_: Any) -> Array:
    raise AssertionError(f"the user's kernel {launch.text.name} has no NumPy reference")


def raw_primitive(text: RawText) -> Primitive:
    """The primitive of a user's kernel."""

    def no_gradient(g: Node, n: Node) -> list[None]:
        raise TypeError(
            f"kernel {text.name!r} has no gradient; pass gradient= to raw_kernel, or use detach() or "
            f"no_grad() before it"
        )

    dtypes = {scalar_attribute(name): dtype for name, dtype in text.scalars}
    return Primitive(
        text.name,
        Kind.OPAQUE,
        lambda *_, launch, part, **__: (launch.shapes[part], launch.dtypes[part]),
        _reference,
        no_gradient,
        constants=tuple(dtypes),
        dtypes=dtypes,
    )


def scalar_attribute(name: str) -> str:
    """The attribute of a node that holds a scalar; the space keeps it distinct from all others."""
    return f"scalar {name}"


def raw(
    primitive: Primitive, inputs: tuple[Node, ...], launch: RawLaunch, scalars: Mapping[str, Any]
) -> list[Node]:
    """The outputs of a launch."""
    values = {scalar_attribute(name): value for name, value in scalars.items()}
    return [
        Node(primitive, inputs, {"launch": launch, "part": part, **values})
        for part in range(len(launch.shapes))
    ]


def all_parts(nodes: list[Node]) -> tuple[Node, ...]:
    """All outputs of a launch, given some of them: a kernel also writes outputs that nobody reads."""
    by_part = {node.attributes["part"]: node for node in nodes}
    first = nodes[0]
    return tuple(
        by_part.get(part) or Node(first.primitive, first.inputs, {**first.attributes, "part": part})
        for part in range(len(first.attributes["launch"].shapes))
    )
