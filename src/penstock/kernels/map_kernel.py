"""A map group as C: one thread computes one item of the output, wherever its inputs' items lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.fusion.groups import Group
from penstock.graph.creating import SEQUENCE
from penstock.graph.elementwise import CAST, FULL
from penstock.graph.node import Node, Shape
from penstock.graph.reducing import EXPAND
from penstock.graph.shaping import PERMUTE, RESHAPE, SLICE
from penstock.kernels.c_expressions import C_TYPES, template, vector_template


@dataclass(frozen=True)
class Place:
    """Which item of a node is meant: its number in row-major order, its number along each axis, or both."""

    shape: Shape
    flat: str | None = None
    along: tuple[str, ...] | None = None


def structure(group: Group) -> tuple[Any, ...]:
    """What the source depends on: equal for groups that differ in their values and constants only."""
    number = {node: position for position, node in enumerate((*group.inputs, *group.nodes))}
    leaves = tuple((node.shape, str(node.dtype)) for node in group.inputs)
    inside = tuple(
        (
            node.primitive.name,
            tuple(number[parent] for parent in node.inputs),
            node.shape,
            str(node.dtype),
            node.attributes.get("axes") or node.attributes.get("slices"),
        )
        for node in group.nodes
    )
    return leaves, inside


def constants(group: Group) -> list[Any]:
    """The scalar arguments of the kernel, in the order of its parameters."""
    numbers: list[Any] = []
    for node in group.nodes:
        if node.primitive is FULL:
            numbers.append(np.asarray(node.attributes["number"]).astype(node.dtype).item())
        elif node.primitive is SEQUENCE:
            numbers += [node.attributes["start"], node.attributes["step"]]
    return numbers


def vector_width(group: Group, widest: int) -> int:
    """How many items one thread computes: a vector of them where all is float32 and in order, else one."""
    in_order = all(
        node.primitive in (FULL, RESHAPE) or vector_template(node) is not None for node in group.nodes
    )
    floats = all(node.dtype == np.float32 for node in (*group.inputs, *group.nodes))
    # PoCL names 16 as the width of CPUs with registers for 8, and its functions of 16 crash its compiler.
    return min(widest, 8) if in_order and floats else 1


def map_kernel(group: Group, name: str, width: int) -> tuple[str, tuple[str, ...]]:
    """Source in OpenCL C, and the signature: output, inputs, constants, number of threads.

    A thread computes `width` items. The last one may pass the end, so buffers are padded to whole vectors.
    """
    return _Writer(group, width).kernel(name)


class _Writer:
    """Writes the body line by line; every value and every place is computed once."""

    def __init__(self, group: Group, width: int) -> None:
        self._group = group
        self._width = width
        self._lines: list[str] = []
        self._names: dict[Any, str] = {}
        self._scalars: dict[Node, list[str]] = {}
        self._scalar_types: list[str] = []
        for node in group.nodes:
            count = {FULL: 1, SEQUENCE: 2}.get(node.primitive, 0)
            if count:
                first = len(self._scalar_types)
                self._scalars[node] = [f"c{first + i}" for i in range(count)]
                self._scalar_types += [_storage(node)] * count

    def kernel(self, name: str) -> tuple[str, tuple[str, ...]]:
        group = self._group
        result = self._value(group.output, Place(group.output.shape, flat="i"))
        inputs = [f"__global const {_c_type(node)} *in{k}" for k, node in enumerate(group.inputs)]
        scalars = [f"{C_TYPES.get(t, 'uchar')} c{k}" for k, t in enumerate(self._scalar_types)]
        parameters = ", ".join([f"__global {_c_type(group.output)} *out", *inputs, *scalars, "int n"])
        store = f"out[i] = {result};" if self._width == 1 else f"vstore{self._width}({result}, i, out);"
        body = "\n    ".join(["int i = get_global_id(0);", "if (i >= n) return;", *self._lines, store])
        source = f"__kernel void {name}({parameters}) {{\n    {body}\n}}\n"
        pointers = [f"{_storage(node)}*" for node in (group.output, *group.inputs)]
        return source, (*pointers, *self._scalar_types, "int32")

    def _value(self, node: Node, place: Place) -> str:
        if node is not self._group.output and node in self._group.inputs:
            position, flat = self._group.inputs.index(node), self._flat(place)
            if self._width > 1:
                return self._let(self._type(node), f"vload{self._width}({flat}, in{position})")
            return self._let(_c_type(node), f"in{position}[{flat}]")
        primitive = node.primitive
        if primitive is FULL:
            name = self._scalars[node][0]
            return name if self._width == 1 else self._let(self._type(node), f"({self._type(node)})({name})")
        if primitive is SEQUENCE:
            start, step = self._scalars[node]
            return self._let(_c_type(node), f"({start} + ({_c_type(node)}){self._flat(place)} * {step})")
        if primitive in (RESHAPE, PERMUTE, EXPAND, SLICE):
            return self._value(node.inputs[0], self._moved(node, place))
        values = [self._value(parent, place) for parent in node.inputs]
        if primitive is CAST:
            changed = f"({values[0]} != 0)" if node.dtype.kind == "b" else f"({_c_type(node)}){values[0]}"
            return self._let(_c_type(node), changed)
        expression = template(node) if self._width == 1 else vector_template(node)
        assert expression is not None
        return self._let(self._type(node), expression.format(*values, type=self._type(node)))

    def _type(self, node: Node) -> str:
        return _c_type(node) if self._width == 1 else f"{_c_type(node)}{self._width}"

    def _moved(self, node: Node, place: Place) -> Place:
        """The place in a view's source."""
        source = node.inputs[0]
        if node.primitive is RESHAPE:
            return Place(source.shape, flat=self._flat(place))
        along = self._along(place)
        if node.primitive is PERMUTE:
            axes = node.attributes["axes"]
            return Place(source.shape, along=tuple(along[axes.index(axis)] for axis in range(source.ndim)))
        if node.primitive is EXPAND:
            lengths = zip(along, source.shape, strict=True)
            return Place(source.shape, along=tuple("0" if length == 1 else one for one, length in lengths))
        parts = zip(along, node.attributes["slices"], strict=True)
        return Place(source.shape, along=tuple(self._step(one, *part) for one, part in parts))

    def _step(self, along: str, start: int, count: int, step: int) -> str:
        scaled = along if step == 1 else f"{along} * {step}"
        return along if (start, step) == (0, 1) else self._let("int", f"({start} + {scaled})")

    def _flat(self, place: Place) -> str:
        """The number of an item in row-major order."""
        if place.flat is not None:
            return place.flat
        assert place.along is not None
        terms, stride = [], 1
        for one, length in reversed(list(zip(place.along, place.shape, strict=True))):
            if one != "0" and length != 1:
                terms.append(one if stride == 1 else f"{one} * {stride}")
            stride *= length
        return self._let("int", f"({' + '.join(reversed(terms))})") if terms else "0"

    def _along(self, place: Place) -> tuple[str, ...]:
        """The number of an item along each axis."""
        if place.along is not None:
            return place.along
        result, stride = [], 1
        for axis in range(len(place.shape) - 1, -1, -1):
            length = place.shape[axis]
            whole = place.flat if stride == 1 else f"{place.flat} / {stride}"
            outermost = stride * length == int(np.prod(place.shape))
            result.append(
                "0"
                if length == 1
                else self._let("int", f"({whole})" if outermost else f"({whole} % {length})")
            )
            stride *= length
        return tuple(reversed(result))

    def _let(self, c_type: str, expression: str) -> str:
        """A name for an expression; the same one for the same expression."""
        key = (c_type, expression)
        if key not in self._names:
            self._names[key] = f"v{len(self._names)}"
            self._lines.append(f"{c_type} {self._names[key]} = {expression};")
        return self._names[key]


def _c_type(node: Node) -> str:
    return C_TYPES[str(node.dtype)]


def _storage(node: Node) -> str:
    return "uint8" if node.dtype.kind == "b" else str(node.dtype)
