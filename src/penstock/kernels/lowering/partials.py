"""The partial results of row reductions, and the order in which a CPU combines them.

The order depends on the length of a row only, so a reduction gives the same bits whatever it is fused with,
and whether it is vectorised or not. With a single accumulator every addition would wait for the previous
addition. So long rows have `_STRIP` partial results, of which number i takes items i, `_STRIP` + i and so on;
the remainder goes into `LANES` others, and the last items, fewer than that, into a scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.graph.node import Node
from penstock.kernels import ir
from penstock.kernels.lowering.blocks import LANES, Sums, folded_type
from penstock.kernels.lowering.emitter import Emitter
from penstock.kernels.lowering.values import Value, computed_dtype

_STRIP = 32
_LONG = 64  # items of the shortest row with `_STRIP` partial results


@dataclass(frozen=True)
class _Loop:
    """How a loop over a row accumulates values."""

    name: str = ""
    length: int = 0  # of an array of partial results; 0: a variable
    first: ir.Expr | None = None  # the item of the array that takes the next value


@dataclass(frozen=True)
class _Part:
    """An accumulator of a reduction."""

    name: str
    kind: ir.Type
    loop: _Loop


class Partials:
    """The partial results of the reductions in one pass over a row."""

    def __init__(self, emitter: Emitter, threads: int = 0) -> None:
        """`threads`: of a GPU, that share a row."""
        self.sums = Sums(emitter.name)
        self._emitter = emitter
        self._threads = threads
        self._parts: dict[Node, list[_Part]] = {}
        self._loop = _Loop()

    def accumulate(self, node: Node, value: Value) -> None:
        """Add a value to a reduction, in the loop that is being built."""
        emitter, operation = self._emitter, node.primitive.name
        kind = ir.Type(value.type.dtype, emitter.lanes)
        loop = self._loop if kind.dtype.startswith("float") else _Loop()  # others do not depend on the order
        parts = self._parts.setdefault(node, [])
        part = next((part for part in parts if part.loop == loop and part.kind == kind), None)
        if part is None:
            part = _Part(emitter.name("sum"), kind, loop)
            parts.append(part)
            self.sums.add(part.name, kind, operation, loop.length)
        target = ir.Var(part.name, kind)
        emitter.bodies[1].append(ir.Accumulate(target, operation, value.var, kind, loop.first))

    def start(self) -> list[ir.Statement]:
        """The statements that start all accumulators."""
        parts = (part for parts in self._parts.values() for part in parts)
        return [statement for part in parts for statement in self.sums.start(part.name)]

    def loops(
        self,
        name: str,
        length: int,
        lanes: int,
        body: Callable[[], None],
        before: Sequence[ir.Statement] = (),
        lane_steps: Mapping[str, ir.Steps] | None = None,
        *,
        any_length: bool = False,
    ) -> list[ir.For]:
        """The loops of a CPU over a row, with the variable `name`.

        `before` computes other variables from it, which then differ between the lanes of a vector.
        `any_length`: all loops that rows have, even those that this row does not need. They add nothing.
        """
        emitter = self._emitter
        emitter.depth_of[name] = 1

        def inside(loop: _Loop, lanes: int) -> list[ir.Statement]:
            self._loop, emitter.lanes = loop, lanes
            emitter.lane_steps = dict(lane_steps or {name: 1}) if lanes > 1 else {}
            body()
            return [*before, *emitter.leave()]

        strip = _STRIP if length >= _LONG or any_length else LANES
        strips, vectors = length // strip * strip, length // LANES * LANES
        if any_length and length < _LONG:
            strips = 0  # such rows have no strips
        result: list[ir.For] = []
        start = 0
        if strip > lanes and (strips or any_length):
            chain, turns = ir.Var("chain"), strip // lanes
            statements = inside(_Loop("strips", strip, chain * lanes), lanes)
            place = ir.Let(name, ir.Var("strip") + chain * lanes)
            # Unrolled, so that the partial results are in registers.
            inner = ir.loop("chain", 0, turns, [place, *statements], unrolled=turns if lanes > 1 else 0)
            result.append(ir.loop("strip", 0, strips, [inner], step=strip, trips=strips // strip))
            start = strips
        # Even if it has no iteration, so that many lengths share few kernels.
        if start < vectors or any_length or (strip == _STRIP and length % strip):
            loop = _Loop("vectors") if lanes > 1 else _Loop("vectors", LANES, ir.Var(name) % LANES)
            lanes, trips = min(lanes, LANES), (vectors - start) // LANES
            result.append(ir.loop(name, start, vectors, inside(loop, lanes), step=lanes, trips=trips))
        if length % LANES or any_length:
            statements = inside(_Loop("items"), 1)
            result.append(ir.loop(name, vectors, length, statements, trips=length % LANES))
        self._loop = _Loop()
        return result

    def reduce(self, node: Node) -> str:
        """Combine all partial results; returns the name of the result."""
        operation, kind, parts = node.primitive.name, ir.Type(computed_dtype(node)), self._parts[node]
        if self._threads:
            return self._over_threads(parts[0], operation)
        wide = [part for part in parts if part.kind.width > 1 or part.loop.length]
        single = [self.sums.last(part.name) for part in parts if part not in wide]
        if not wide:
            return single[0]
        result = self._over_lanes(wide, operation)
        if not single:
            return result
        total = ir.Var(single[0], kind)
        self._emitter.bodies[0].append(ir.Accumulate(total, operation, ir.Var(result, kind), kind))
        return total.name

    def _over_lanes(self, parts: list[_Part], operation: str) -> str:
        """The result of parts that each have at least `LANES` partial results."""
        emitter, kind, body = self._emitter, folded_type(parts[0].kind), self._emitter.bodies[0]
        result = emitter.name()
        lane: ir.Expr = ir.Const(0) if kind.width > 1 else ir.Var("lane")
        statements: list[ir.Statement] = []
        values: list[ir.Expr] = []
        for part in parts:
            computed, value = self.sums.folded(part.name, lane)
            statements += computed
            values.append(value)
        total = ir.Var(emitter.name("sum"), kind)
        whole = values[0] if len(values) == 1 else ir.Combine(kind, operation, values[0], values[1])
        statements.append(ir.Let(total.name, whole))
        if kind.width > 1:
            body += [*statements, ir.BlockReduce(result, operation, total, None)]
            return result
        array = self.sums.last(parts[0].name)
        statements.append(ir.Store(total, array, kind.dtype, lane))
        body.append(ir.loop("lane", 0, LANES, statements))
        half = LANES // 2
        while half:
            other = ir.Load(kind, array, kind.dtype, lane + half)
            added = ir.Accumulate(ir.Var(array, kind), operation, other, kind, lane)
            body.append(ir.loop("lane", 0, half, [added]))
            half //= 2
        body.append(ir.Let(result, ir.Load(kind, array, kind.dtype, ir.Const(0))))
        return result

    def _over_threads(self, part: _Part, operation: str) -> str:
        """The result of all threads that share a row."""
        emitter = self._emitter
        result = emitter.name()
        array = emitter.local_array("threads", part.kind.dtype, emitter.kernel.group[0])
        total = ir.Var(self.sums.last(part.name), part.kind)
        emitter.bodies[0].append(ir.BlockReduce(result, operation, total, array, ir.Const(self._threads)))
        return result
