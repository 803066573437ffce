"""The partial results of row reductions, and the order in which a CPU combines them.

That order depends on the length of a row and on nothing else, so a reduction gives the same bits whatever it
is fused with, and whether its values come in vectors or one by one. A single variable would wait for every
addition before the next. So long rows have `_STRIP` partial results side by side, of which number i takes in
items i, `_STRIP` + i and so on; what is left goes into `LANES` others, and less than that into one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.graph.node import Node
from penstock.kernels.ir.expressions import Combine, Const, Expr, Load, Type, Var
from penstock.kernels.ir.statements import Accumulate, BlockReduce, For, Let, LocalArray, Statement, Store
from penstock.kernels.lowering.blocks import LANES, Sums
from penstock.kernels.lowering.emitter import Emitter, Value, computed_dtype

_STRIP = 32
_LONG = 64  # items of a row that has as many partial results


@dataclass(frozen=True)
class _Loop:
    """How one loop over a row takes in values."""

    name: str = ""
    length: int = 0  # of an array of partial results; 0: a variable
    first: Expr | None = None  # the item of the array that takes in the next one


@dataclass(frozen=True)
class _Part:
    """A variable of a reduction."""

    name: str
    kind: Type
    loop: _Loop


class Partials:
    """The partial results of the reductions in one pass over a row."""

    def __init__(self, emitter: Emitter, threads: int = 0) -> None:
        """`threads`: those of a GPU that share a row."""
        self.sums = Sums(emitter.name)
        self._emitter = emitter
        self._threads = threads
        self._parts: dict[Node, list[_Part]] = {}
        self._loop = _Loop()

    def take_in(self, node: Node, value: Value) -> None:
        """Let a reduction take in a value, in the loop that is built at present."""
        emitter, operation = self._emitter, node.primitive.name
        kind = Type(value.type.dtype, emitter.lanes)
        # Only floats depend on the order.
        loop = self._loop if kind.dtype.startswith("float") else _Loop()
        parts = self._parts.setdefault(node, [])
        part = next((part for part in parts if part.loop == loop and part.kind == kind), None)
        if part is None:
            part = _Part(emitter.name("sum"), kind, loop)
            parts.append(part)
            self.sums.add(part.name, kind, operation, loop.length)
        target = Var(part.name, kind)
        emitter.bodies[1].append(Accumulate(target, operation, value.var, kind, loop.first))

    def start(self) -> list[Statement]:
        """What starts all variables."""
        parts = (part for parts in self._parts.values() for part in parts)
        return [statement for part in parts for statement in self.sums.start(part.name)]

    def loops(
        self,
        name: str,
        length: int,
        lanes: int,
        body: Callable[[], None],
        before: Sequence[Statement] = (),
        along: str = "",
    ) -> list[For]:
        """The loops of a CPU over a row, of which `name` is the variable.

        `before` computes others from it, of which vectors go along `along`.
        """
        self._emitter.depth_of[name] = 1

        def inside(loop: _Loop, lanes: int) -> list[Statement]:
            return [*before, *self._body(loop, along or name, lanes, body)]

        strip = _STRIP if length >= _LONG else LANES
        strips, vectors = length // strip * strip, length // LANES * LANES
        result: list[For] = []
        start = 0
        if strip > lanes and strips:
            chain, turns = Var("chain"), strip // lanes
            statements = inside(_Loop("strips", strip, chain * lanes), lanes)
            place = Let(name, Var("strip") + chain * lanes)
            # Laid out, so that the partial results are in registers.
            inner = For(
                "chain", Const(0), Const(turns), Const(1), [place, *statements], turns if lanes > 1 else 0
            )
            result.append(For("strip", Const(0), Const(strips), Const(strip), [inner], trips=length // strip))
            start = strips
        # Even if it has no turn, so that many lengths have few kernels.
        if start < vectors or (strip == _STRIP and length % strip):
            loop = _Loop("vectors") if lanes > 1 else _Loop("vectors", LANES, Var(name) % LANES)
            statements = inside(loop, lanes)
            turns = (vectors - start) // LANES
            result.append(For(name, Const(start), Const(vectors), Const(lanes), statements, trips=turns))
        if length % LANES:
            statements = inside(_Loop("items"), 1)
            stop = Const(length)
            result.append(For(name, Const(vectors), stop, Const(1), statements, trips=length % LANES))
        self._loop = _Loop()
        return result

    def _body(self, loop: _Loop, name: str, lanes: int, body: Callable[[], None]) -> list[Statement]:
        emitter, self._loop = self._emitter, loop
        emitter.lanes, emitter.lane_steps = lanes, {name: 1} if lanes > 1 else {}
        body()
        return emitter.leave()

    def reduce(self, node: Node) -> str:
        """The name of one value from all partial results."""
        emitter, operation, kind = self._emitter, node.primitive.name, Type(computed_dtype(node))
        parts = self._parts[node]
        if self._threads:
            return self._over_threads(parts[0], operation)
        wide = [part for part in parts if part.kind.width > 1 or part.loop.length]
        single = [self.sums.last(part.name) for part in parts if part not in wide]
        if not wide:
            return single[0]
        result = self._over_lanes(wide, operation)
        if single:
            taken = Accumulate(Var(single[0], kind), operation, Var(result, kind), kind)
            emitter.bodies[0].append(taken)
        return single[0] if single else result

    def _over_lanes(self, parts: list[_Part], operation: str) -> str:
        """One value from parts that have `LANES` partial results in the end, or more."""
        emitter, kind = self._emitter, parts[0].kind
        result = emitter.name()
        lane: Expr = Const(0) if kind.width > 1 else Var("lane")
        statements: list[Statement] = []
        values: list[Expr] = []
        for part in parts:
            computed, value = self.sums.folded(part.name, lane)
            statements += computed
            values.append(value)
        total = emitter.name("sum")
        whole = values[0] if len(values) == 1 else Combine(kind, operation, values[0], values[1])
        statements.append(Let(total, whole))
        if kind.width > 1:
            emitter.bodies[0] += [*statements, BlockReduce(result, operation, Var(total, kind), None)]
            return result
        array = self.sums.last(parts[0].name)
        statements.append(Store(Var(total, kind), array, kind.dtype, lane))
        emitter.bodies[0].append(For("lane", Const(0), Const(LANES), Const(1), statements))
        half = LANES // 2
        while half:
            other = Load(kind, array, kind.dtype, lane + half)
            added = Accumulate(Var(array, kind), operation, other, kind, lane)
            emitter.bodies[0].append(For("lane", Const(0), Const(half), Const(1), [added]))
            half //= 2
        emitter.bodies[0].append(Let(result, Load(kind, array, kind.dtype, Const(0))))
        return result

    def _over_threads(self, part: _Part, operation: str) -> str:
        """One value from those of all threads that share a row."""
        emitter, dtype = self._emitter, part.kind.dtype
        result, array = emitter.name(), emitter.name("threads")
        stored = "int32" if dtype == "bool" else dtype
        emitter.kernel.arrays.append(LocalArray(array, stored, emitter.kernel.group[0]))
        total = Var(self.sums.last(part.name), part.kind)
        emitter.bodies[0].append(BlockReduce(result, operation, total, array, Const(self._threads)))
        return result
