"""The statements of a kernel: any node's value at any place, once, in the outermost loop where it can be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from penstock.fusion.groups import Group
from penstock.fusion.index import ZERO, Index, Place, Variables, flat, source_place, variable
from penstock.graph.contraction import GATHER
from penstock.graph.creating import POSITIONS, SEQUENCE
from penstock.graph.dtypes import HALVES
from penstock.graph.elementwise import CAST, FULL
from penstock.graph.node import Kind, Node
from penstock.graph.random import RANDOM_BITS
from penstock.graph.shaping import CONCAT, PAD
from penstock.kernels.c_expressions import COMBINE, expression
from penstock.kernels.loops import (
    Choose,
    Clip,
    Count,
    Let,
    Load,
    LoopForm,
    Pick,
    Random,
    Splat,
    Statement,
    Truth,
    Type,
)


class LanesImpossible(Exception):
    """Neighbouring items lie at places that no vector can be read from."""


@dataclass(frozen=True)
class Value:
    """A value in a kernel: its name, its type, and the scope that it is computed in."""

    name: str
    type: Type
    depth: int


def computed_dtype(node: Node) -> str:
    """The dtype in which a kernel computes a node's values: halves are widened."""
    return "float32" if node.dtype in HALVES else str(node.dtype)


@dataclass(frozen=True)
class Merge:
    """Two neighbouring variables that run as one, because every index uses them as one."""

    name: str
    outer: str
    inner: str
    length: int  # of the inner one

    def applied(self, index: Index) -> Index:
        """The index with the one variable instead of the two."""
        both = variable(self.outer) * self.length + variable(self.inner)
        factor = index.factor(self.inner)
        return index + both * -factor + variable(self.name) * factor


class Scopes:
    """Writes the statements of a kernel. Every value is computed once, in the outermost loop where it can be.

    Scope 0 is before the innermost loop, scope 1 inside it.
    """

    def __init__(self, group: Group, variables: Variables, vectors: bool = True) -> None:
        self.group = group
        self.variables = variables
        self.form = LoopForm(
            outputs=[str(node.dtype) for node in group.outputs],
            inputs=[str(node.dtype) for node in group.inputs],
            vectors=vectors,
        )
        self.bodies: list[list[Statement]] = [[], []]
        self.lanes = 1
        self.lane_steps: dict[str, int] = {}  # how variables differ from lane to lane; absent: not at all
        self.depth_of: dict[str, int] = {}  # the scope of each variable
        self.given: dict[Node, Value] = {}  # values that are at hand whatever the place
        self.kept: dict[tuple[Node, Place], tuple[str, Index, str]] = {}  # values in arrays, with dtypes
        self.used: set[Index] = set()
        self.merged: list[Merge] = []
        self.loads: dict[int, set[tuple[int, Index]]] = {}  # of each input: the stages, and where
        self.stage = 0
        self._vectors = vectors
        self._conditions: dict[str, int] = {}  # under which what is read now is needed; their scopes
        self._values: dict[tuple[Node, Place], Value] = {}
        self._names: dict[Statement, Value] = {}
        self._count = 0
        self._scalars: dict[Node, list[str]] = {}
        for node in group.nodes:
            number = len(node.primitive.constants)
            first = len(self.form.scalars)
            self._scalars[node] = [f"c{first + k}" for k in range(number)]
            self.form.scalars += [computed_dtype(node)] * number

    def leave(self) -> list[Statement]:
        """End the inner scope: what it held is its statements, and nothing in it is known any more."""
        body, self.bodies[1] = self.bodies[1], []
        self._values = {key: value for key, value in self._values.items() if value.depth == 0}
        self._names = {key: value for key, value in self._names.items() if value.depth == 0}
        for name in [name for name, depth in self.depth_of.items() if depth == 1]:
            if name in self.variables.computed or name.startswith("k"):
                del self.depth_of[name]
                self.lane_steps.pop(name, None)
        return body

    def name(self, prefix: str = "v") -> str:
        """A new name."""
        self._count += 1
        return f"{prefix}{self._count}"

    # Whole numbers

    def text(self, index: Index) -> tuple[str, int, int]:
        """An index as text, the scope in which it is known, and its step from lane to lane."""
        depth = step = 0
        self.used.add(index)
        for merge in self.merged:
            index = merge.applied(index)
        for name, factor in index.terms:
            self._define(name)
            depth = max(depth, self.depth_of[name])
            step += factor * self.lane_steps.get(name, 0)
        return str(index), depth, step

    def _define(self, name: str) -> None:
        """Compute a quotient or remainder before its first use."""
        if name in self.depth_of:
            return
        whole, operation, divisor = self.variables.computed[name]
        text, depth, step = self.text(whole)
        if step:
            # Lanes that begin at a multiple of their number stay in one part of as many.
            if self._vectors or step != 1 or divisor % self.lanes or self.aligned(whole) != self.lanes:
                raise LanesImpossible
            if operation == "%":
                self.lane_steps[name] = 1
        self.bodies[depth].append(Count(name, f"{text} {operation} {divisor}"))
        self.depth_of[name] = depth

    def aligned(self, index: Index) -> int:
        """Of how many items the index of the first lane is a multiple, at least; no more than the lanes."""
        for merge in self.merged:
            index = merge.applied(index)
        others = (factor for name, factor in index.terms if not self.lane_steps.get(name))
        return math.gcd(self.lanes, index.constant, *others)

    def count(self, whole: Count | Truth | Pick | Clip, depth: int, length: int, step: int = 0) -> Index:
        """A new variable for a whole number, which is named by it."""
        name = self.name("k")
        self.bodies[depth].append(replace(whole, name=name))
        self.variables.lengths[name] = length
        self.depth_of[name] = depth
        if step:
            self.lane_steps[name] = step
        return variable(name)

    # Values

    def value(self, node: Node, place: Place) -> Value:
        """A node's value at a place."""
        while (
            node.primitive.kind is Kind.VIEW and node not in self.group.inputs
        ):  # a chain of them may be long
            place = source_place(node, place, self.variables)
            node = node.inputs[0]
        if node in self.given:
            return self.given[node]
        key = (node, place)
        if key in self.kept:
            array, index, stored = self.kept[key]
            return self._load(array, computed_dtype(node), stored, index)
        if key not in self._values:
            self._values[key] = self._value(node, place)
        return self._values[key]

    def _value(self, node: Node, place: Place) -> Value:
        if node in self.group.inputs:
            number, index = self.group.inputs.index(node), flat(place, node.shape)
            self.loads.setdefault(number, set()).add((self.stage, index))
            return self._load(f"in{number}", computed_dtype(node), str(node.dtype), index)
        primitive = node.primitive
        if primitive is FULL:
            return Value(self._scalars[node][0], Type(computed_dtype(node)), 0)
        if primitive is POSITIONS:
            return self.number(place[0], computed_dtype(node))
        if primitive is SEQUENCE:
            return self._sequence(node, place)
        if primitive is RANDOM_BITS:
            return self._random(node, place)
        if primitive is PAD:
            return self._pad(node, place)
        if primitive is CONCAT:
            return self._concat(node, place)
        if primitive is GATHER:
            return self._gather(node, place)
        assert primitive.kind is Kind.ELEMENTWISE, node
        values = [self.value(parent, place) for parent in node.inputs]
        return self.apply(node, values)

    def apply(self, node: Node, values: Sequence[Value]) -> Value:
        """A primitive on values."""
        lanes = max((value.type.lanes for value in values), default=1)
        wide = [self.widened(value, lanes) for value in values]
        depth = max(value.depth for value in wide)
        result, of = Type(computed_dtype(node), lanes), wide[-1].type
        operation = node.primitive.name
        inputs = tuple(value.name for value in wide)
        if lanes > 1 and self._vectors and expression(operation, result, of, inputs) is None:
            raise LanesImpossible
        if node.primitive is CAST and result.dtype == of.dtype:
            value = wide[0]  # between halves and floats, which are the same inside a kernel
        else:
            value = self.let(Let("", result, operation, inputs, of), depth)
        if node.primitive is CAST and node.dtype in HALVES:  # whoever asks for a half wants it rounded
            value = self.let(Let("", result, f"round_{node.dtype}", (value.name,), result), depth)
        return value

    def let(self, statement: Let | Load | Splat | Random, depth: int) -> Value:
        """Enter a statement that names a value, unless an equal one is there."""
        if statement not in self._names:
            name = self.name()
            self.bodies[depth].append(replace(statement, name=name))
            self._names[statement] = Value(name, statement.type, depth)
        return self._names[statement]

    def widened(self, value: Value, lanes: int) -> Value:
        """The same in every lane of a vector."""
        if value.type.lanes == lanes or not self._vectors:
            return value
        return self.let(Splat("", Type(value.type.dtype, lanes), value.name), value.depth)

    def _load(self, buffer: str, dtype: str, stored: str, index: Index) -> Value:
        text, depth, step = self.text(index)
        if self._vectors:
            lanes = self.lanes if step else 1
            return self.let(Load("", Type(dtype, lanes), buffer, stored, text, step), depth)
        kind = Type(dtype, self.lanes if step else 1)
        aligned = self.aligned(index) if step == 1 else 1
        condition = " && ".join(self._conditions)
        depth = max(depth, *self._conditions.values(), 0)
        return self.let(Load("", kind, buffer, stored, text, step, aligned, condition), depth)

    def item(self, array: str, node: Node, index: Index) -> Value:
        """An item of memory of the group, which changes: it is read anew each time."""
        text, depth, step = self.text(index)
        dtype = computed_dtype(node)
        name, kind = self.name(), Type(dtype, self.lanes if step else 1)
        self.bodies[depth].append(Load(name, kind, array, dtype, text, step))
        return Value(name, kind, depth)

    def combined(self, reduction: Node, one: Value, other: Value) -> Value:
        """A reduction of two values."""
        operation = COMBINE[reduction.primitive.name]
        depth = max(one.depth, other.depth)
        return self.let(Let("", one.type, operation, (one.name, other.name), one.type), depth)

    def computed(self, nodes: Sequence[Node]) -> list[tuple[tuple[Node, Place], Value]]:
        """The values of nodes that the inner scope has computed, each at its one place."""
        wanted = set(nodes)
        found = [(key, value) for key, value in self._values.items() if key[0] in wanted and value.depth == 1]
        return [one for one in found if sum(other[0][0] is one[0][0] for other in found) == 1]

    def _sequence(self, node: Node, place: Place) -> Value:
        start, step = (Value(name, Type(computed_dtype(node)), 0) for name in self._scalars[node])
        position = self.number(place[0] if node.ndim else ZERO, start.type.dtype)
        lanes = position.type.lanes
        scaled = self.let(
            Let(
                "", position.type, "multiply", (position.name, self.widened(step, lanes).name), position.type
            ),
            position.depth,
        )
        first = self.widened(start, lanes)
        return self.let(
            Let("", position.type, "add", (first.name, scaled.name), position.type), position.depth
        )

    def number(self, index: Index, dtype: str) -> Value:
        """An index as a value."""
        text, depth, step = self.text(index)
        lanes = self.lanes if step else 1
        return self.let(Splat("", Type(dtype, lanes), text, step), depth)

    def _random(self, node: Node, place: Place) -> Value:
        text, depth, step = self.text(flat(place, node.shape))
        if step and self._vectors:
            raise LanesImpossible
        words = [self.value(node.inputs[0], (Index((), word),)) for word in range(4)]
        kind, names = Type("uint32", self.lanes if step else 1), tuple(word.name for word in words)
        return self.let(Random("", kind, names, text, step), max(depth, *(word.depth for word in words)))

    def _inside(self, index: Index, start: int, count: int) -> tuple[str, Index, int]:
        """Whether an index lies in a range of an axis, its number there, and the scope; 0 if it does not."""
        moved = index + Index((), -start)
        low, high = self.variables.bounds(moved)
        if low >= 0 and high < count:
            return "1", moved, 0
        text, depth, step = self.text(moved)
        if step:
            others = [factor for name, factor in index.terms if not self.lane_steps.get(name)]
            whole = step == 1 and all(n % self.lanes == 0 for n in (start, count, index.constant, *others))
            if not whole:
                raise LanesImpossible  # a vector could be half inside
        condition = str(self.count(Truth("", f"({text} >= 0 && {text} < {count})"), depth, 2))
        return condition, self.count(Pick("", condition, text, "0"), depth, count, step), depth

    @contextmanager
    def _under(self, *conditions: tuple[str, int]) -> Iterator[None]:
        """Let a GPU read memory only where conditions hold. (A vector is read sooner than one is asked.)"""
        real = {condition: depth for condition, depth in conditions if condition != "1"}
        if self._vectors or not real:
            yield
            return
        before = self._values, self._conditions
        # What was read under a condition is not known without it.
        self._values, self._conditions = dict(self._values), self._conditions | real
        yield
        self._values, self._conditions = before

    def _pad(self, node: Node, place: Place) -> Value:
        source, inside, depth = node.inputs[0], [], 0
        conditions: list[tuple[str, int]] = []
        for index, (start, count, step) in zip(place, node.attributes["slices"], strict=True):
            first = start if step > 0 else start + (count - 1) * step
            extent = (count - 1) * abs(step) + 1
            condition, moved, scope = self._inside(index, first, extent)
            if abs(step) > 1:
                on, moved = self._on_step(moved, abs(step))
                scope = max(scope, self.text(moved)[1])
                conditions.append((on, scope))
            conditions.append((condition, scope))
            depth = max(depth, scope)
            inside.append(moved if step > 0 else moved * -1 + Index((), count - 1))
        with self._under(*conditions):
            value = self.value(source, tuple(inside))
        real = [condition for condition, _ in conditions if condition != "1"]
        if not real:
            return value
        zero = self.let(Splat("", value.type, "0"), 0)
        return self._choose(" && ".join(real), depth, value, zero)

    def _on_step(self, index: Index, step: int) -> tuple[str, Index]:
        """Whether a number is a multiple of a step, and its part."""
        text, depth, lane_step = self.text(index)
        if lane_step:
            raise LanesImpossible
        length = self.variables.bounds(index)[1] // step + 1
        return f"{text} % {step} == 0", self.count(Count("", f"{text} / {step}"), depth, length)

    def _concat(self, node: Node, place: Place) -> Value:
        axis, start, result = node.attributes["axis"], 0, None
        for part in node.inputs:
            length = part.shape[axis]
            if not length:
                continue
            condition, moved, depth = self._inside(place[axis], start, length)
            with self._under((condition, depth)):
                value = self.value(part, (*place[:axis], moved, *place[axis + 1 :]))
            if result is None or condition == "1":
                result = value
            else:
                result = self._choose(condition, depth, value, result)
            start += length
        assert result is not None
        return result

    def _choose(self, condition: str, depth: int, yes: Value, no: Value) -> Value:
        lanes = max(yes.type.lanes, no.type.lanes)
        yes, no = self.widened(yes, lanes), self.widened(no, lanes)
        depth = max(depth, yes.depth, no.depth)
        name, kind = self.name(), Type(yes.type.dtype, lanes)
        self.bodies[depth].append(Choose(name, kind, condition, yes.name, no.name))
        return Value(name, kind, depth)

    def _gather(self, node: Node, place: Place) -> Value:
        source, index = node.inputs
        found = self.value(index, place[: index.ndim])
        if found.type.lanes > 1:
            raise LanesImpossible
        length = source.shape[0]
        # An index out of range must not read what is not there.
        row = self.count(Clip("", found.name, found.type.dtype, length), found.depth, length)
        return self.value(source, (row, *place[index.ndim :]))
