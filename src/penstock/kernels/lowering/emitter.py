"""The statements of a fused kernel: each value is computed once, in the outermost loop where it can be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from penstock.fusion.groups import Group
from penstock.fusion.index import ZERO, Coords, Index, Variables, flat, source_coords, unflatten, variable
from penstock.graph.contraction import GATHER
from penstock.graph.creating import POSITIONS, SEQUENCE
from penstock.graph.dtypes import HALF_PRECISION
from penstock.graph.elementwise import CAST, FULL
from penstock.graph.node import Kind, Node, Primitive
from penstock.graph.random import RANDOM_BITS
from penstock.graph.shaping import CONCAT, PAD, PAD_AT, SLICE_AT
from penstock.kernels import ir
from penstock.kernels.dialects.c_expressions import expression
from penstock.kernels.dialects.patterns import COMBINE
from penstock.kernels.lowering import moves
from penstock.kernels.lowering.values import (
    LanesImpossible,
    Merge,
    Value,
    affine,
    computed_dtype,
    merged,
)


class Emitter:
    """Emits the statements that compute the values of a group's nodes, into two bodies.

    Body 0 is before the innermost loop, body 1 inside it; the `depth` of a value is the index of its body.
    """

    def __init__(self, group: Group, variables: Variables, vectors: bool = True) -> None:
        self.group = group
        self.variables = variables
        self.kernel = ir.KernelIR(
            outputs=[str(node.dtype) for node in group.outputs],
            inputs=[str(node.dtype) for node in group.inputs],
            vectors=vectors,
        )
        self.bodies: list[list[ir.Statement]] = [[], []]
        self.lanes = 1
        self.lane_steps: dict[str, ir.Steps] = {}  # how variables differ between lanes; absent: not at all
        self.depth_of: dict[str, int] = {}  # the body of each variable
        self.given: dict[Node, Value] = {}  # values that do not depend on the coordinates
        self.kept: dict[
            tuple[Node, Coords], tuple[str, Index, str]
        ] = {}  # values in arrays: name, index, dtype
        # For (input, index): the array with a copy of the item, and the index there.
        self.copies: dict[tuple[int, Index], tuple[str, Index]] = {}
        self.used: set[Index] = set()
        self.merges: list[Merge] = []
        self.loads: dict[int, set[tuple[int, Index]]] = {}  # of each input: (stage, index)
        self.stage = 0
        self.prefix = "v"  # of the names of values
        self.vectors = vectors
        self._conditions: dict[ir.Expr, int] = {}  # the masks of loads at present, with their depths
        self._values: dict[tuple[Node, Coords], Value] = {}
        self._names: dict[ir.Expr, Value] = {}
        self._count = 0
        self._scalars: dict[Node, list[str]] = {}
        for node in group.nodes:
            first, count = len(self.kernel.scalars), len(node.primitive.constants)
            self._scalars[node] = [f"c{first + k}" for k in range(count)]
            self.kernel.scalars += [computed_dtype(node)] * count

    def leave(self) -> list[ir.Statement]:
        """End the inner body and return its statements; the values in it are forgotten."""
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

    def local_array(self, prefix: str, dtype: str, length: int) -> str:
        """A new array in local memory; returns its name."""
        array = ir.LocalArray(self.name(prefix), "int32" if dtype == "bool" else dtype, length)
        self.kernel.arrays.append(array)
        return array.name

    # Indices

    def index(self, index: Index) -> tuple[ir.Expr, int, ir.Steps]:
        """An index as an expression, its depth, and its step from lane to lane."""
        depth = 0
        self.used.add(index)
        index = merged(index, self.merges)
        steps: list[tuple[int, ir.Steps]] = []
        for name, factor in index.terms:
            self._define(name)
            depth = max(depth, self.depth_of[name])
            if name in self.lane_steps:
                steps.append((factor, self.lane_steps[name]))
        return affine(index), depth, self._added(steps)

    def is_of_loops(self, index: Index) -> bool:
        """Whether an index depends on the variables of loops only: on no value, and on no bound."""
        computed = self.variables.computed
        return all(
            self.is_of_loops(computed[name][0]) if name in computed else not name.startswith("k")
            for name, _ in index.terms
        )

    def _added(self, steps: Sequence[tuple[int, ir.Steps]]) -> ir.Steps:
        """The sum of steps that have factors: the same from each lane to the next, if it is."""
        alike = [factor * step for factor, step in steps if isinstance(step, int)]
        if len(alike) == len(steps):
            return sum(alike)
        offsets = [0] * self.lanes
        for factor, step in steps:
            for lane, far in enumerate(ir.lane_offsets(step, self.lanes)):
                offsets[lane] += factor * far
        even = all(far == lane * offsets[1] for lane, far in enumerate(offsets) if lane)
        return offsets[1] if even else tuple(offsets)

    def _define(self, name: str) -> None:
        """Compute a quotient or remainder before its first use."""
        if name in self.depth_of:
            return
        whole, operation, divisor = self.variables.computed[name]
        number, depth, step = self.index(whole)
        if step:
            # Lanes that begin at a multiple of the width have the same quotient.
            if step != 1 or divisor % self.lanes or self.aligned(whole) != self.lanes:
                raise LanesImpossible
            if operation == "%":
                self.lane_steps[name] = 1
        quotient = number // divisor if operation == "/" else number % divisor
        self.bodies[depth].append(ir.Let(name, quotient))
        self.depth_of[name] = depth

    def aligned(self, index: Index) -> int:
        """The alignment of the first lane's index, in items; at most the number of lanes."""
        index = merged(index, self.merges)
        others = (factor for name, factor in index.terms if not self.lane_steps.get(name))
        return math.gcd(self.lanes, index.constant, *others)

    def integer(self, value: ir.Expr, depth: int, length: int, step: ir.Steps = 0) -> Index:
        """A new variable with an integer's value."""
        name = self.name("k")
        self.bodies[depth].append(ir.Let(name, value))
        self.variables.lengths[name] = length
        self.depth_of[name] = depth
        if step:
            self.lane_steps[name] = step
        return variable(name)

    # Values

    def value(self, node: Node, coords: Coords) -> Value:
        """A node's value at coordinates."""
        # A loop, because chains of views may be long.
        while node.primitive.kind is Kind.VIEW and node not in self.group.inputs:
            coords, node = source_coords(node, coords, self.variables), node.inputs[0]
        if node in self.given:
            return self.given[node]
        key = (node, coords)
        if key in self.kept:
            array, index, stored = self.kept[key]
            return self.load(array, computed_dtype(node), stored, index)
        if key not in self._values:
            self._values[key] = self._value(node, coords)
        return self._values[key]

    def at_number(self, node: Node, number: Index) -> Value:
        """A node's value at a flat index in row-major order."""
        return self.value(node, unflatten(number, node.shape, self.variables))

    def _value(self, node: Node, coords: Coords) -> Value:
        if node in self.group.inputs:
            number = self.group.inputs.index(node)
            index = self.variables.recombined(flat(coords, node.shape))
            self.loads.setdefault(number, set()).add((self.stage, index))
            if (number, index) in self.copies:
                array, spot = self.copies[number, index]
                return self.load(array, computed_dtype(node), computed_dtype(node), spot)
            return self.load(f"in{number}", computed_dtype(node), str(node.dtype), index)
        primitive = node.primitive
        if primitive in _LOWERINGS:
            return _LOWERINGS[primitive](self, node, coords)
        assert primitive.kind is Kind.ELEMENTWISE, node
        return self.apply(node, [self.value(parent, coords) for parent in node.inputs])

    def _full(self, node: Node, coords: Coords) -> Value:
        return Value(ir.Var(self._scalars[node][0], ir.Type(computed_dtype(node))), 0)

    def _positions(self, node: Node, coords: Coords) -> Value:
        return self.number(coords[0], computed_dtype(node))

    def apply(self, node: Node, values: Sequence[Value]) -> Value:
        """A primitive on values."""
        lanes = max((value.type.width for value in values), default=1)
        wide = [self.widened(value, lanes) for value in values]
        depth = max(value.depth for value in wide)
        result, of = ir.Type(computed_dtype(node), lanes), wide[-1].type
        operation = node.primitive.name
        inputs = tuple(value.var for value in wide)
        names = tuple("x" for _ in inputs)
        if lanes > 1 and self.vectors and expression(operation, result, of, names) is None:
            raise LanesImpossible
        if node.primitive is CAST and result.dtype == of.dtype:
            value = wide[0]  # between half precision and float32, which are the same inside a kernel
        else:
            value = self.let(ir.Call(result, operation, inputs, of), depth)
        if node.primitive is CAST and node.dtype in HALF_PRECISION:  # an explicit cast rounds
            value = self.let(ir.Call(result, f"round_{node.dtype}", (value.var,), result), depth)
        return value

    def let(self, value: ir.Expr, depth: int) -> Value:
        """Name a value, unless an equal expression has a name."""
        if value not in self._names:
            self._names[value] = self._new(value, depth)
        return self._names[value]

    def _new(self, value: ir.Expr, depth: int) -> Value:
        """Name a value."""
        name = self.name(self.prefix)
        self.bodies[depth].append(ir.Let(name, value))
        return Value(ir.Var(name, value.type), depth)

    def widened(self, value: Value, lanes: int) -> Value:
        """A value broadcast to the lanes of a vector."""
        if value.type.width == lanes or not self.vectors:
            return value
        return self.let(ir.Broadcast(ir.Type(value.type.dtype, lanes), value.var), value.depth)

    def load(self, buffer: str, dtype: str, stored: str, index: Index) -> Value:
        """An item of a buffer, under the masks of the moment."""
        at, depth, step = self.index(index)
        kind = ir.Type(dtype, self.lanes if step else 1)
        if self.vectors:
            return self.let(ir.Load(kind, buffer, stored, at, step), depth)
        aligned = self.aligned(index) if step == 1 else 1
        mask = ir.all_of([*self._conditions]) if self._conditions else None
        depth = max(depth, *self._conditions.values(), 0)
        return self.let(ir.Load(kind, buffer, stored, at, step, aligned, mask), depth)

    def item(self, array: str, node: Node, index: Index) -> Value:
        """An item of local memory, which may change, so every use loads it."""
        at, depth, step = self.index(index)
        kind = ir.Type(computed_dtype(node), self.lanes if step else 1)
        return self._new(ir.Load(kind, array, kind.dtype, at, step), depth)

    def store(self, array: str, stored: str, index: Index, value: Value, width: int = 0) -> None:
        """Write a value to an array, in the inner body."""
        self.bodies[1].append(ir.Store(value.var, array, stored, self.index(index)[0], width=width))

    def combined(self, reduction: Node, left: Value, right: Value) -> Value:
        """Two values combined by a reduction."""
        return self._call(COMBINE[reduction.primitive.name], left, right)

    def _call(self, operation: str, left: Value, right: Value) -> Value:
        """An elementwise primitive on two values of the same dtype, by its name."""
        lanes = max(left.type.width, right.type.width)
        left, right = self.widened(left, lanes), self.widened(right, lanes)
        kind = ir.Type(left.type.dtype, lanes)
        return self.let(ir.Call(kind, operation, (left.var, right.var), kind), max(left.depth, right.depth))

    def computed(self, nodes: Sequence[Node]) -> list[tuple[tuple[Node, Coords], Value]]:
        """The values of nodes that the inner body computes at a single position."""
        wanted = set(nodes)
        inner = [(key, value) for key, value in self._values.items() if key[0] in wanted and value.depth == 1]
        counts = Counter(node for (node, _), _ in inner)
        return [(key, value) for key, value in inner if counts[key[0]] == 1]

    def _sequence(self, node: Node, coords: Coords) -> Value:
        start, step = (Value(ir.Var(name, ir.Type(computed_dtype(node))), 0) for name in self._scalars[node])
        position = self.number(coords[0] if node.ndim else ZERO, start.type.dtype)
        return self._call("add", start, self._call("multiply", position, step))

    def number(self, index: Index, dtype: str) -> Value:
        """An index as a value."""
        number, depth, step = self.index(index)
        lanes = self.lanes if step else 1
        return self.let(ir.Broadcast(ir.Type(dtype, lanes), number, step), depth)

    def _random(self, node: Node, coords: Coords) -> Value:
        number, depth, step = self.index(flat(coords, node.shape))
        if not isinstance(step, int):
            raise LanesImpossible
        words = [self.value(node.inputs[0], (Index((), word),)) for word in range(4)]
        kind, state = ir.Type("uint32", self.lanes if step else 1), tuple(word.var for word in words)
        return self.let(ir.Random(kind, state, number, step), max(depth, *(word.depth for word in words)))

    @contextmanager
    def masked(self, *conditions: tuple[ir.Expr, int]) -> Iterator[None]:
        """Mask the loads of a GPU by conditions. A CPU's vectors are loaded unconditionally."""
        real = {condition: depth for condition, depth in conditions if condition != ir.TRUE}
        if self.vectors or not real:
            yield
            return
        before = self._values, self._conditions
        # A masked load is no value outside of the mask.
        self._values, self._conditions = dict(self._values), self._conditions | real
        yield
        self._values, self._conditions = before

    def select(self, condition: ir.Expr, depth: int, yes: Value, no: Value) -> Value:
        """One of two values."""
        lanes = max(yes.type.width, no.type.width, condition.type.width)
        yes, no = self.widened(yes, lanes), self.widened(no, lanes)
        kind = ir.Type(yes.type.dtype, lanes)
        return self._new(ir.Select(kind, condition, yes.var, no.var), max(depth, yes.depth, no.depth))


# Primitives that are not elementwise: how an item of each is computed.
_LOWERINGS: dict[Primitive, Callable[[Emitter, Node, Coords], Value]] = {
    FULL: Emitter._full,
    POSITIONS: Emitter._positions,
    SEQUENCE: Emitter._sequence,
    RANDOM_BITS: Emitter._random,
    PAD: moves.pad,
    CONCAT: moves.concat,
    GATHER: moves.gather,
    SLICE_AT: moves.slice_at,
    PAD_AT: moves.pad_at,
}
