"""The loops of a column group."""

from __future__ import annotations

from collections.abc import Callable

from penstock.fusion.index import variable
from penstock.graph.node import Kind, Node
from penstock.kernels import ir
from penstock.kernels.lowering.blocks import Sums, in_blocks, is_inexact
from penstock.kernels.lowering.loop_nest import GROUP_THREADS, LoopNest, Lowered, at_most
from penstock.kernels.lowering.values import Value, computed_dtype

# Of a CPU.
_BLOCK = 512  # columns that a thread reduces at a time
_TOGETHER = 4  # rows that it adds to each of them in one turn: memory is read in as many streams
# Of a GPU.
_ABREAST = 16  # threads that read neighbouring columns of a row; the others of a workgroup read other rows
_READS = 4  # rows that a thread reads at once


class ColumnLoops(LoopNest):
    """Reductions over axes that are not the last: neighbouring results are computed side by side."""

    def space(self) -> None:
        self._reductions = [node for node in self.group.nodes if node.primitive.kind is Kind.REDUCTION]
        source, axes = self._reductions[0].inputs[0], self._reductions[0].attributes["axes"]
        self._kept, self._reduced, self._row, _, self._place = self.reduction_axes(source.shape, axes)

    def _results(self) -> None:
        """Compute and store the outputs from the reductions."""
        outputs = enumerate(self.group.outputs)
        self.store([(at, self.emitter.at_number(node, self._row), self._row) for at, node in outputs])

    def build(self) -> Lowered:
        kept = self.joined(self._kept)
        return self._by_threads(kept) if self.gpu else self._by_blocks(kept)

    def _by_threads(self, kept: list[str]) -> Lowered:
        """Some threads of a workgroup have neighbouring columns, others the same columns of other rows."""
        emitter, kernel, lanes = self.emitter, self.emitter.kernel, self.lanes
        size, reduced = self.count(kept), self.joined(self._reduced)
        self.take_lanes(kept)
        threads = min(GROUP_THREADS, 1 << self.max_threads.bit_length() - 1)
        rows = self.count(reduced)
        abreast = threads // self.order[0] if self.order else self._abreast(threads, rows, size // lanes)
        parts = threads // abreast
        in_turn = len(self.order) > 1
        self.order = (parts, 1) if in_turn else (parts,)
        block = abreast * lanes
        kernel.grid, kernel.group = (-(-size // block),), (threads,)
        kernel.block = block if all(node.size == size for node in self.group.outputs) else 0
        last = size - lanes
        kernel.body = [
            ir.Let("begin", (ir.WORKGROUP * abreast + ir.THREAD % abreast) * lanes),
            # Threads past the end take the last item, since all have to reach the barriers.
            ir.Let("item", ir.Select(ir.INT, ir.Var("begin") < last, ir.Var("begin"), ir.Const(last))),
        ]
        inside = self.unpack("item", kept, 0)
        names = {node: emitter.name("sum") for node in self._reductions}
        around = self.unpack("part", reduced, 1)
        sums = Sums(emitter.name)
        for node, name in names.items():
            kind = ir.Type(computed_dtype(node), lanes)
            value = emitter.value(node.inputs[0], self._place)
            emitter.bodies[1].append(ir.Accumulate(ir.Var(name, kind), node.primitive.name, value.var, kind))
            sums.add(name, kind, node.primitive.name)
        before, emitter.bodies[0] = emitter.bodies[0], []
        first, trips, statements = ir.THREAD // abreast, -(-rows // parts), [*around, *emitter.leave()]
        loop = ir.loop("part", first, rows, statements, step=parts, unrolled=_READS, trips=trips)
        loop, _ = sums.blocked(loop)
        starts = [start for name in names.values() for start in sums.start(name)]
        kernel.body += [*inside, *before, *starts, loop]
        names = {node: sums.last(name) for node, name in names.items()}
        if parts > 1 and in_turn:
            kernel.body += self._one_by_one(names, abreast, threads)
        elif parts > 1:
            kernel.body += self._across(names, abreast, threads)
        emitter.stage = 1
        for node, name in names.items():
            emitter.given[node] = Value(ir.Var(name, ir.Type(computed_dtype(node), lanes)), 0)
        self._results()
        results = [*emitter.bodies[0], *emitter.leave()]
        kernel.body.append(ir.If((abreast > ir.THREAD) & (ir.Var("begin") < size), results))
        return self.lowered()

    @staticmethod
    def _abreast(threads: int, rows: int, vectors: int) -> int:
        """How many threads of a workgroup have neighbouring columns: a power of two."""
        least = threads // (1 << max(rows // _READS, 1).bit_length() - 1)  # so that each has rows to read
        return min(max(_ABREAST, least), 1 << (vectors - 1).bit_length(), threads)

    def _across(self, names: dict[Node, str], abreast: int, threads: int) -> list[ir.Statement]:
        """The sums over all threads that have the same columns."""
        result: list[ir.Statement] = []
        arrays: dict[str, str] = {}  # by dtype; the sums of a dtype share an array
        for node, name in names.items():
            dtype = computed_dtype(node)
            if dtype in arrays:
                result.append(ir.Barrier())
            else:
                arrays[dtype] = self.emitter.local_array("across", dtype, threads * self.lanes)
            target, counts = ir.Var(name, ir.Type(dtype, self.lanes)), (ir.Const(abreast), ir.Const(threads))
            result.append(ir.StridedReduce(target, node.primitive.name, arrays[dtype], *counts))
        return result

    def _one_by_one(self, names: dict[Node, str], abreast: int, threads: int) -> list[ir.Statement]:
        """The same sums as a kernel of rows makes of those that it processes at a time, by their threads."""
        result: list[ir.Statement] = []
        for node, name in names.items():
            kind, part = ir.Type(computed_dtype(node), self.lanes), ir.Var(self.emitter.name("part"))
            array = self.emitter.local_array("across", kind.dtype, threads)
            place = ir.THREAD + ir.Var("other") * abreast
            added = [
                ir.Let(part.name, ir.Load(kind, array, kind.dtype, place)),
                ir.Accumulate(ir.Var(name, kind), node.primitive.name, ir.Var(part.name, kind), kind),
            ]
            more = ir.loop("other", 1, threads // abreast, added)
            result += [
                ir.Store(ir.Var(name, kind), array, kind.dtype, ir.THREAD),
                ir.Barrier(),
                ir.If(abreast > ir.THREAD, [more]),
            ]
        return result

    def _by_blocks(self, kept: list[str]) -> Lowered:
        """A block of neighbouring results per task, which adds up the block's rows."""
        emitter, kernel = self.emitter, self.emitter.kernel
        *outer, self._last = kept
        rows, length = self.count(outer), self.count([self._last])
        self.check_lanes(length)
        self._width = min(_BLOCK, -(-length // (16 * max(1, self.units * 2 // rows))) * 16)
        blocks = -(-length // self._width)
        self._new_arrays()
        kernel.grid = (rows * blocks,)
        kernel.body = [
            ir.Let("begin", ir.WORKGROUP % blocks * self._width),
            ir.Let("end", at_most(ir.Var("begin"), self._width, ir.Const(length))),
            ir.Let("row", ir.WORKGROUP // blocks),
        ]
        kernel.body += self.unpack("row", outer, 0)
        emitter.depth_of["begin"], emitter.variables.lengths["begin"] = 0, length
        self._at = variable(self._last) + variable("begin") * -1  # the index of a result in its block
        self._start = self._each_column(self._put_identity)
        # A single loop over all reduced variables, so that the order of sums depends on their length only.
        around = self.joined(self._reduced)
        trips, place = self.count(around), self.unpack("part", around, 1)
        together = 1 if trips % _TOGETHER or self.any_length else _TOGETHER
        body = self._each_column(lambda: self._add(place, together))
        loop = ir.loop("parts", 0, trips, body, step=together, trips=trips // together)
        if any(is_inexact(node.primitive.name, computed_dtype(node)) for node in self._reductions):
            loop, _ = in_blocks(loop, together, self._next_level)
        emitter.stage = 1
        final = self._each_column(self._finish)
        kernel.body += [*emitter.bodies[0], *self._start, loop, *final]
        return self.lowered()

    def _new_arrays(self) -> None:
        """Local memory for the largest block of each reduction's results: so kernels differ in sizes only."""
        self._arrays = {node: self.emitter.name("sums") for node in self._reductions}
        self.emitter.kernel.arrays += [
            ir.LocalArray(name, computed_dtype(node), _BLOCK) for node, name in self._arrays.items()
        ]

    def _each_column(self, body: Callable[[], None]) -> list[ir.Statement]:
        exact = self.count([self._last]) % self.lanes == 0
        return [*self.vector_loops(self._last, ir.Var("begin"), ir.Var("end"), exact, body)]

    def _next_level(self) -> tuple[list[ir.Statement], list[ir.Statement]]:
        """What starts the arrays of this level, and what adds them to those of the next."""
        parts, start = self._arrays, self._start
        self._new_arrays()

        def add_parts() -> None:
            for node, name in self._arrays.items():
                old, part = self._item(name, node), self._item(parts[node], node)
                self._put(name, node, self.emitter.combined(node, old, part))

        added = self._each_column(add_parts)
        self._start = self._each_column(self._put_identity)
        return start, added

    def _put_identity(self) -> None:
        for node, name in self._arrays.items():
            kind, zero = ir.Type(computed_dtype(node), self.emitter.lanes), self.emitter.name()
            self.emitter.bodies[1].append(ir.Declare(zero, ir.Identity(kind, node.primitive.name)))
            self._put(name, node, Value(ir.Var(zero, kind), 1))

    def _add(self, place: list[ir.Statement], together: int) -> None:
        """Add `together` rows to each column; `place` unpacks the index `part` of a row."""
        emitter = self.emitter
        sums: dict[Node, ir.Var] = {}
        for node, array in self._arrays.items():
            old = self._item(array, node)
            sums[node] = ir.Var(emitter.name("sum"), old.type)
            emitter.bodies[1].append(ir.Declare(sums[node].name, old.var))
        before, emitter.bodies[1] = emitter.bodies[1], []
        for node, total in sums.items():
            value = emitter.widened(emitter.value(node.inputs[0], self._place), emitter.lanes)
            added = emitter.combined(node, Value(total, 1), value)
            emitter.bodies[1].append(ir.Assign(total.name, added.var))
        rows, first = [*place, *emitter.bodies[1]], ir.Var("parts")
        emitter.bodies[1] = [*before, ir.loop("part", first, first + together, rows, unrolled=together)]
        for node, array in self._arrays.items():
            self._put(array, node, Value(sums[node], 1))

    def _finish(self) -> None:
        for node, name in self._arrays.items():
            self.emitter.given[node] = self._item(name, node)
        self._results()

    def _item(self, array: str, node: Node) -> Value:
        return self.emitter.item(array, node, self._at)

    def _put(self, array: str, node: Node, value: Value) -> None:
        self.emitter.store(array, computed_dtype(node), self._at, value)
