"""The statements of a fused kernel: each value is computed once, in the outermost loop where it can be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.fusion.groups import Group
from penstock.fusion.index import ZERO, Index, Place, Variables, flat, source_place, unflatten, variable
from penstock.graph.contraction import GATHER
from penstock.graph.creating import POSITIONS, SEQUENCE
from penstock.graph.dtypes import HALF_PRECISION
from penstock.graph.elementwise import CAST, FULL
from penstock.graph.node import Kind, Node, Primitive
from penstock.graph.random import RANDOM_BITS
from penstock.graph.shaping import CONCAT, PAD
from penstock.kernels.dialects.c_expressions import expression
from penstock.kernels.dialects.patterns import COMBINE
from penstock.kernels.ir.expressions import (
    BOOL,
    INT,
    TRUE,
    Affine,
    Broadcast,
    Call,
    Clamp,
    Const,
    Expr,
    Load,
    Random,
    Select,
    Type,
    Var,
    all_of,
)
from penstock.kernels.ir.statements import KernelIR, Let, Statement


def affine(index: Index) -> Expr:
    """An index as an expression."""
    if not index.terms:
        return Const(index.constant)
    if len(index.terms) == 1 and index.terms[0][1] == 1 and not index.constant:
        return Var(index.terms[0][0])
    terms = tuple((Var(name), None if factor == 1 else Const(factor)) for name, factor in index.terms)
    return Affine(terms, Const(index.constant) if index.constant else None)


class LanesImpossible(Exception):
    """Neighbouring items lie at places that no vector can be read from."""


@dataclass(frozen=True)
class Value:
    """A value in a kernel: its name with its type, and the body that it is computed in."""

    var: Expr
    depth: int

    @property
    def type(self) -> Type:
        """That of the value."""
        return self.var.type


def computed_dtype(node: Node) -> str:
    """The dtype in which a kernel computes a node's values: float16 and bfloat16 are widened."""
    return "float32" if node.dtype in HALF_PRECISION else str(node.dtype)


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


def merged(index: Index, merges: Sequence[Merge]) -> Index:
    """An index after merging."""
    for merge in merges:
        index = merge.applied(index)
    return index


class Emitter:
    """Emits the statements that compute the values of a group's nodes, into one of two bodies.

    Body 0 is before the innermost loop, body 1 inside it; the `depth` of a value is the number of its body.
    """

    def __init__(self, group: Group, variables: Variables, vectors: bool = True) -> None:
        self.group = group
        self.variables = variables
        self.kernel = KernelIR(
            outputs=[str(node.dtype) for node in group.outputs],
            inputs=[str(node.dtype) for node in group.inputs],
            vectors=vectors,
        )
        self.bodies: list[list[Statement]] = [[], []]
        self.lanes = 1
        self.lane_steps: dict[str, int] = {}  # how variables differ from lane to lane; absent: not at all
        self.depth_of: dict[str, int] = {}  # the body of each variable
        self.given: dict[Node, Value] = {}  # values that are at hand whatever the place
        self.kept: dict[tuple[Node, Place], tuple[str, Index, str]] = {}  # values in arrays, with dtypes
        # For what is read from an input there: the array with a copy of it, and where in that.
        self.copies: dict[tuple[int, Index], tuple[str, Index]] = {}
        self.used: set[Index] = set()
        self.merges: list[Merge] = []
        self.loads: dict[int, set[tuple[int, Index]]] = {}  # of each input: the stages, and where
        self.stage = 0
        self._vectors = vectors
        self._conditions: dict[Expr, int] = {}  # under which what is read now is needed; their emitter
        self._values: dict[tuple[Node, Place], Value] = {}
        self._names: dict[Expr, Value] = {}
        self._count = 0
        self._scalars: dict[Node, list[str]] = {}
        for node in group.nodes:
            number = len(node.primitive.constants)
            first = len(self.kernel.scalars)
            self._scalars[node] = [f"c{first + k}" for k in range(number)]
            self.kernel.scalars += [computed_dtype(node)] * number

    def leave(self) -> list[Statement]:
        """End the inner body: gives its statements, after which nothing in it is known any more."""
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

    def index(self, index: Index) -> tuple[Expr, int, int]:
        """An index as an expression, the body in which it is known, and its step from lane to lane."""
        depth = step = 0
        self.used.add(index)
        index = merged(index, self.merges)
        for name, factor in index.terms:
            self._define(name)
            depth = max(depth, self.depth_of[name])
            step += factor * self.lane_steps.get(name, 0)
        return affine(index), depth, step

    def _define(self, name: str) -> None:
        """Compute a quotient or remainder before its first use."""
        if name in self.depth_of:
            return
        whole, operation, divisor = self.variables.computed[name]
        number, depth, step = self.index(whole)
        if step:
            # Items that begin at a multiple of the width have the same quotient.
            if self._vectors or step != 1 or divisor % self.lanes or self.aligned(whole) != self.lanes:
                raise LanesImpossible
            if operation == "%":
                self.lane_steps[name] = 1
        quotient = number // divisor if operation == "/" else number % divisor
        self.bodies[depth].append(Let(name, quotient))
        self.depth_of[name] = depth

    def aligned(self, index: Index) -> int:
        """Of how many items the index of the first lane is a multiple, at least; no more than the lanes."""
        index = merged(index, self.merges)
        others = (factor for name, factor in index.terms if not self.lane_steps.get(name))
        return math.gcd(self.lanes, index.constant, *others)

    def integer(self, value: Expr, depth: int, length: int, step: int = 0) -> Index:
        """A new variable for an integer, which is named by it."""
        name = self.name("k")
        self.bodies[depth].append(Let(name, value))
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

    def at_number(self, node: Node, number: Index) -> Value:
        """A node's value at a place that is given by its number in row-major order."""
        return self.value(node, unflatten(number, node.shape, self.variables))

    def _value(self, node: Node, place: Place) -> Value:
        if node in self.group.inputs:
            number = self.group.inputs.index(node)
            index = self.variables.recombined(flat(place, node.shape))
            self.loads.setdefault(number, set()).add((self.stage, index))
            if (number, index) in self.copies:
                array, spot = self.copies[number, index]
                return self._load(array, computed_dtype(node), computed_dtype(node), spot)
            return self._load(f"in{number}", computed_dtype(node), str(node.dtype), index)
        primitive = node.primitive
        if primitive in _LOWERINGS:
            return _LOWERINGS[primitive](self, node, place)
        assert primitive.kind is Kind.ELEMENTWISE, node
        return self.apply(node, [self.value(parent, place) for parent in node.inputs])

    def _full(self, node: Node, place: Place) -> Value:
        return Value(Var(self._scalars[node][0], Type(computed_dtype(node))), 0)

    def _positions(self, node: Node, place: Place) -> Value:
        return self.number(place[0], computed_dtype(node))

    def apply(self, node: Node, values: Sequence[Value]) -> Value:
        """A primitive on values."""
        lanes = max((value.type.width for value in values), default=1)
        wide = [self.widened(value, lanes) for value in values]
        depth = max(value.depth for value in wide)
        result, of = Type(computed_dtype(node), lanes), wide[-1].type
        operation = node.primitive.name
        inputs = tuple(value.var for value in wide)
        names = tuple("x" for _ in inputs)
        if lanes > 1 and self._vectors and expression(operation, result, of, names) is None:
            raise LanesImpossible
        if node.primitive is CAST and result.dtype == of.dtype:
            value = wide[0]  # between half precision and float32, which are the same inside a kernel
        else:
            value = self.let(Call(result, operation, inputs, of), depth)
        if node.primitive is CAST and node.dtype in HALF_PRECISION:  # who asks for it wants it rounded
            value = self.let(Call(result, f"round_{node.dtype}", (value.var,), result), depth)
        return value

    def let(self, value: Expr, depth: int) -> Value:
        """Name a value, unless an equal one has a name."""
        known = self._names.get(value)
        if known is None:
            known = self._names[value] = self._new(value, depth)
        return known

    def _new(self, value: Expr, depth: int) -> Value:
        """Name a value."""
        name = self.name()
        self.bodies[depth].append(Let(name, value))
        return Value(Var(name, value.type), depth)

    def widened(self, value: Value, lanes: int) -> Value:
        """The same in every lane of a vector."""
        if value.type.width == lanes or not self._vectors:
            return value
        return self.let(Broadcast(Type(value.type.dtype, lanes), value.var), value.depth)

    def _load(self, buffer: str, dtype: str, stored: str, index: Index) -> Value:
        place, depth, step = self.index(index)
        if self._vectors:
            lanes = self.lanes if step else 1
            return self.let(Load(Type(dtype, lanes), buffer, stored, place, step), depth)
        kind = Type(dtype, self.lanes if step else 1)
        aligned = self.aligned(index) if step == 1 else 1
        mask = all_of([*self._conditions]) if self._conditions else None
        depth = max(depth, *self._conditions.values(), 0)
        return self.let(Load(kind, buffer, stored, place, step, aligned, mask), depth)

    def item(self, array: str, node: Node, index: Index) -> Value:
        """An item of memory of the group, which changes: it is read anew each time."""
        place, depth, step = self.index(index)
        dtype = computed_dtype(node)
        kind = Type(dtype, self.lanes if step else 1)
        return self._new(Load(kind, array, dtype, place, step), depth)

    def combined(self, reduction: Node, left: Value, right: Value) -> Value:
        """A reduction of two values."""
        return self._call(COMBINE[reduction.primitive.name], left, right)

    def _call(self, operation: str, left: Value, right: Value) -> Value:
        """An elementwise primitive on two values of one dtype, by its name."""
        lanes = max(left.type.width, right.type.width)
        left, right = self.widened(left, lanes), self.widened(right, lanes)
        kind = Type(left.type.dtype, lanes)
        return self.let(Call(kind, operation, (left.var, right.var), kind), max(left.depth, right.depth))

    def computed(self, nodes: Sequence[Node]) -> list[tuple[tuple[Node, Place], Value]]:
        """The values of nodes that the inner body has computed, each at its one place."""
        wanted = set(nodes)
        inner = [(key, value) for key, value in self._values.items() if key[0] in wanted and value.depth == 1]
        places = Counter(node for (node, _), _ in inner)
        return [(key, value) for key, value in inner if places[key[0]] == 1]

    def _sequence(self, node: Node, place: Place) -> Value:
        start, step = (Value(Var(name, Type(computed_dtype(node))), 0) for name in self._scalars[node])
        position = self.number(place[0] if node.ndim else ZERO, start.type.dtype)
        return self._call("add", start, self._call("multiply", position, step))

    def number(self, index: Index, dtype: str) -> Value:
        """An index as a value."""
        number, depth, step = self.index(index)
        lanes = self.lanes if step else 1
        return self.let(Broadcast(Type(dtype, lanes), number, step), depth)

    def _random(self, node: Node, place: Place) -> Value:
        number, depth, step = self.index(flat(place, node.shape))
        if step and self._vectors:
            raise LanesImpossible
        words = [self.value(node.inputs[0], (Index((), word),)) for word in range(4)]
        kind, state = Type("uint32", self.lanes if step else 1), tuple(word.var for word in words)
        return self.let(Random(kind, state, number, step), max(depth, *(word.depth for word in words)))

    def _inside(self, index: Index, start: int, count: int) -> tuple[Expr, Index, int]:
        """Whether an index lies in a range of an axis, its number there, and the body; 0 if it does not."""
        moved = index + Index((), -start)
        low, high = self.variables.bounds(moved)
        if low >= 0 and high < count:
            return TRUE, moved, 0
        number, depth, step = self.index(moved)
        if step:
            others = [factor for name, factor in index.terms if not self.lane_steps.get(name)]
            whole = step == 1 and all(n % self.lanes == 0 for n in (start, count, index.constant, *others))
            if not whole:
                raise LanesImpossible  # a vector could be half inside
        inside = self.integer((number >= 0) & (number < count), depth, 2)
        condition = Var(inside.terms[0][0], BOOL)
        return condition, self.integer(Select(INT, condition, number, Const(0)), depth, count, step), depth

    @contextmanager
    def _under(self, *conditions: tuple[Expr, int]) -> Iterator[None]:
        """Let a GPU read memory only where conditions hold. (A vector is read sooner than one is asked.)"""
        real = {condition: depth for condition, depth in conditions if condition != TRUE}
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
        conditions: list[tuple[Expr, int]] = []
        for index, (start, count, step) in zip(place, node.attributes["slices"], strict=True):
            first = start if step > 0 else start + (count - 1) * step
            extent = (count - 1) * abs(step) + 1
            condition, moved, own_depth = self._inside(index, first, extent)
            if abs(step) > 1:
                on, moved = self._on_step(moved, abs(step))
                own_depth = max(own_depth, self.index(moved)[1])
                conditions.append((on, own_depth))
            conditions.append((condition, own_depth))
            depth = max(depth, own_depth)
            inside.append(moved if step > 0 else moved * -1 + Index((), count - 1))
        with self._under(*conditions):
            value = self.value(source, tuple(inside))
        real = [condition for condition, _ in conditions if condition != TRUE]
        if not real:
            return value
        zero = self.let(Broadcast(value.type, Const(0)), 0)
        return self._select(all_of(real), depth, value, zero)

    def _on_step(self, index: Index, step: int) -> tuple[Expr, Index]:
        """Whether a number is a multiple of a step, and its part."""
        number, depth, lane_step = self.index(index)
        if lane_step:
            raise LanesImpossible
        length = self.variables.bounds(index)[1] // step + 1
        return (number % step).eq(0), self.integer(number // step, depth, length)

    def _concat(self, node: Node, place: Place) -> Value:
        axis, start, result = node.attributes["axis"], 0, None
        for part in node.inputs:
            length = part.shape[axis]
            if not length:
                continue
            condition, moved, depth = self._inside(place[axis], start, length)
            with self._under((condition, depth)):
                value = self.value(part, (*place[:axis], moved, *place[axis + 1 :]))
            if result is None or condition == TRUE:
                result = value
            else:
                result = self._select(condition, depth, value, result)
            start += length
        assert result is not None
        return result

    def _select(self, condition: Expr, depth: int, yes: Value, no: Value) -> Value:
        lanes = max(yes.type.width, no.type.width)
        yes, no = self.widened(yes, lanes), self.widened(no, lanes)
        kind = Type(yes.type.dtype, lanes)
        return self._new(Select(kind, condition, yes.var, no.var), max(depth, yes.depth, no.depth))

    def _gather(self, node: Node, place: Place) -> Value:
        source, index = node.inputs
        number = self.value(index, place[: index.ndim])
        if number.type.width > 1:
            raise LanesImpossible
        length = source.shape[0]
        # An index out of range must not read what is not there.
        row = self.integer(Clamp(number.var, Const(length), Const(length - 1)), number.depth, length)
        return self.value(source, (row, *place[index.ndim :]))


# Primitives that are not elementwise: what computes one item.
_LOWERINGS: dict[Primitive, Callable[[Emitter, Node, Place], Value]] = {
    FULL: Emitter._full,
    POSITIONS: Emitter._positions,
    SEQUENCE: Emitter._sequence,
    RANDOM_BITS: Emitter._random,
    PAD: Emitter._pad,
    CONCAT: Emitter._concat,
    GATHER: Emitter._gather,
}
