"""The loops of a column group."""

from __future__ import annotations

from collections.abc import Callable

from penstock.fusion.index import Index, variable
from penstock.graph.node import Kind, Node
from penstock.kernels.ir.expressions import INT, THREAD, WORKGROUP, Const, Identity, Select, Type, Var
from penstock.kernels.ir.statements import (
    Accumulate,
    Barrier,
    Declare,
    For,
    If,
    Let,
    LocalArray,
    Statement,
    Store,
    StridedReduce,
)
from penstock.kernels.lowering.blocks import Sums, in_blocks, is_inexact
from penstock.kernels.lowering.emitter import Value, computed_dtype
from penstock.kernels.lowering.loop_nest import GROUP_THREADS, LoopNest, Lowered, at_most

_BLOCK = 256  # columns that a thread of a CPU reduces at a time
# Of a GPU.
_ABREAST = 16  # threads that read neighbouring columns of one row; the others of a group read other rows
_READS = 4  # rows that a thread reads at once


class ColumnLoops(LoopNest):
    """Reductions over axes that are not the last: neighbouring results are computed side by side."""

    def space(self) -> None:
        self._reductions = [node for node in self.group.nodes if node.primitive.kind is Kind.REDUCTION]
        source, axes = self._reductions[0].inputs[0], self._reductions[0].attributes["axes"]
        self._kept, self._reduced, self._row, _, self._place = self.reduction_axes(source.shape, axes)

    def _results(self) -> None:
        """What is done to each result, and its store."""
        outputs = enumerate(self.group.outputs)
        self.store([(at, self.emitter.at_number(node, self._row), self._row) for at, node in outputs])

    def build(self) -> Lowered:
        kept = self.joined(self._kept)
        return self._by_threads(kept) if self.gpu else self._by_blocks(kept)

    def _by_threads(self, kept: list[str]) -> Lowered:
        """Some threads of a group have neighbouring columns, others the same columns of other rows."""
        emitter, kernel, lanes = self.emitter, self.emitter.kernel, self.lanes
        size, reduced = self.count(kept), self.joined(self._reduced)
        self.take_lanes(kept)
        threads = min(GROUP_THREADS, 1 << self.max_threads.bit_length() - 1)
        rows = self.count(reduced)
        abreast = self._abreast(threads, rows, size // lanes)
        parts = threads // abreast
        kernel.grid, kernel.group = (-(-size // (abreast * lanes)),), (threads,)
        last = size - lanes
        kernel.body = [
            Let("begin", (WORKGROUP * abreast + THREAD % abreast) * lanes),
            # All threads of a group work together.
            Let("item", Select(INT, Var("begin") < last, Var("begin"), Const(last))),
        ]
        inside = self.unpack("item", kept, 0)
        names = {node: emitter.name("sum") for node in self._reductions}
        around = self.unpack("part", reduced, 1)
        sums = Sums(emitter.name)
        for node, name in names.items():
            kind = Type(computed_dtype(node), lanes)
            value = emitter.value(node.inputs[0], self._place)
            emitter.bodies[1].append(Accumulate(Var(name, kind), node.primitive.name, value.var, kind))
            sums.add(name, kind, node.primitive.name)
        before, emitter.bodies[0] = emitter.bodies[0], []
        start, turns, statements = THREAD // abreast, -(-rows // parts), [*around, *emitter.leave()]
        loop = For("part", start, Const(rows), Const(parts), statements, _READS, turns)
        loop, _ = sums.blocked(loop)
        kernel.body += [*inside, *before]
        kernel.body += [*(start for name in names.values() for start in sums.start(name)), loop]
        names = {node: sums.last(name) for node, name in names.items()}
        if parts > 1:
            kernel.body += self._across(names, abreast, threads)
        emitter.stage = 1
        for node, name in names.items():
            emitter.given[node] = Value(Var(name, Type(computed_dtype(node), lanes)), 0)
        self._results()
        results = [*emitter.bodies[0], *emitter.leave()]
        kernel.body.append(If((abreast > THREAD) & (Var("begin") < size), results))
        return self.lowered()

    @staticmethod
    def _abreast(threads: int, rows: int, vectors: int) -> int:
        """How many threads of a group have neighbouring columns: a power of two."""
        least = threads // (1 << max(rows // _READS, 1).bit_length() - 1)  # so that each has rows to read
        return min(max(_ABREAST, least), 1 << (vectors - 1).bit_length(), threads)

    def _across(self, names: dict[Node, str], abreast: int, threads: int) -> list[Statement]:
        """The sums of all threads that have the same columns."""
        result: list[Statement] = []
        arrays: dict[str, str] = {}  # one for all sums of a dtype
        for node, name in names.items():
            dtype = computed_dtype(node)
            stored = "int32" if dtype == "bool" else dtype
            if stored in arrays:
                result.append(Barrier())
            else:
                arrays[stored] = self.emitter.name("across")
                self.emitter.kernel.arrays.append(LocalArray(arrays[stored], stored, threads * self.lanes))
            kind = Type(dtype, self.lanes)
            target = Var(name, kind)
            operation, parts = node.primitive.name, (Const(abreast), Const(threads))
            result.append(StridedReduce(target, operation, arrays[stored], *parts))
        return result

    def _by_blocks(self, kept: list[str]) -> Lowered:
        """A block of neighbouring results at a time, each row of the block from start to end."""
        emitter, kernel = self.emitter, self.emitter.kernel
        *outer, self._last = kept
        rows, length = self.count(outer), self.count([self._last])
        self._width = min(_BLOCK, -(-length // (16 * max(1, self.units * 2 // rows))) * 16)
        blocks = -(-length // self._width)
        self._new_arrays()
        kernel.grid = (rows * blocks,)
        kernel.body = [
            Let("begin", WORKGROUP % blocks * self._width),
            Let("end", at_most(Var("begin"), self._width, Const(length))),
            Let("row", WORKGROUP // blocks),
        ]
        kernel.body += self.unpack("row", outer, 0)
        emitter.depth_of["begin"], emitter.variables.lengths["begin"] = 0, length
        self._start = self._each_column(self._put_neutral)
        # One loop, whatever the variables are, so that columns are added up in an order of their length.
        around = self.joined(self._reduced)
        turns, place = self.count(around), self.unpack("part", around, 1)
        body = [*place, *self._each_column(self._add)]
        loop = For("part", Const(0), Const(turns), Const(1), body, trips=turns)
        if any(is_inexact(node.primitive.name, computed_dtype(node)) for node in self._reductions):
            loop, _ = in_blocks(loop, 1, self._next_level)
        emitter.stage = 1
        final = self._each_column(self._finish)
        kernel.body += [*emitter.bodies[0], *self._start, loop, *final]
        return self.lowered()

    def _new_arrays(self) -> None:
        """Memory for a block of each reduction's results."""
        self._arrays = {node: self.emitter.name("sums") for node in self._reductions}
        self.emitter.kernel.arrays += [
            LocalArray(name, computed_dtype(node), self._width) for node, name in self._arrays.items()
        ]

    def _each_column(self, body: Callable[[], None]) -> list[Statement]:
        exact = self.count([self._last]) % self.lanes == 0
        return [*self.vector_loops(self._last, Var("begin"), Var("end"), exact, body)]

    def _next_level(self) -> tuple[list[Statement], list[Statement]]:
        """What starts the present arrays, and what adds them to new ones."""
        parts, start = self._arrays, self._start
        self._new_arrays()

        def add_parts() -> None:
            for node, name in self._arrays.items():
                old, part = self._item(name, node), self._item(parts[node], node)
                self._put(name, node, self.emitter.combined(node, old, part))

        added = self._each_column(add_parts)
        self._start = self._each_column(self._put_neutral)
        return start, added

    def _put_neutral(self) -> None:
        for node, name in self._arrays.items():
            kind, zero = Type(computed_dtype(node), self.emitter.lanes), self.emitter.name()
            self.emitter.bodies[1].append(Declare(zero, Identity(kind, node.primitive.name)))
            self._put(name, node, Value(Var(zero, kind), 1))

    def _add(self) -> None:
        emitter = self.emitter
        for node, name in self._arrays.items():
            value = emitter.widened(emitter.value(node.inputs[0], self._place), emitter.lanes)
            self._put(name, node, emitter.combined(node, self._item(name, node), value))

    def _finish(self) -> None:
        for node, name in self._arrays.items():
            self.emitter.given[node] = self._item(name, node)
        self._results()

    def _at(self) -> Index:
        """A result's place in its block."""
        return variable(self._last) + variable("begin") * -1

    def _item(self, array: str, node: Node) -> Value:
        return self.emitter.item(array, node, self._at())

    def _put(self, array: str, node: Node, value: Value) -> None:
        place, _, _ = self.emitter.index(self._at())
        self.emitter.bodies[1].append(Store(value.var, array, computed_dtype(node), place))
