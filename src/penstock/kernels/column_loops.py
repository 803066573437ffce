"""The loops of a column group."""

from __future__ import annotations

from penstock.fusion.index import Index, flat, unflatten, variable
from penstock.graph.node import Node
from penstock.graph.reducing import REDUCTIONS
from penstock.kernels.loop_nest import GROUP_THREADS, LoopNest, Lowered
from penstock.kernels.loops import (
    Across,
    Array,
    Barrier,
    Count,
    Loop,
    Pick,
    Statement,
    Store,
    Type,
    Update,
    Variable,
    When,
)
from penstock.kernels.scopes import Merge, Value, computed_dtype

_BLOCK = 256  # columns that a thread of a CPU reduces at a time
# Of a GPU.
_ABREAST = 16  # threads that read neighbouring columns of one row; the others of a group read other rows
_READS = 4  # rows that a thread reads at once


class ColumnLoops(LoopNest):
    """Reductions over axes that are not the last: neighbouring results are computed side by side."""

    def space(self) -> None:
        first = next(node for node in self.group.nodes if node.primitive in REDUCTIONS)
        self._source, axes = first.inputs[0], first.attributes["axes"]
        shape = self._source.shape
        self._kept, kept = self.axes("r", [1 if axis in axes else n for axis, n in enumerate(shape)])
        self._reduced, reduced = self.axes("c", [n if axis in axes else 1 for axis, n in enumerate(shape)])
        self._place = tuple(reduced[axis] if axis in axes else kept[axis] for axis in range(len(shape)))
        self._row = flat(tuple(kept), tuple(1 if axis in axes else n for axis, n in enumerate(shape)))
        self._reductions = [node for node in self.group.nodes if node.primitive in REDUCTIONS]

    def merges(self) -> list[Merge]:
        return self.found_merges(self._kept, self._reduced)

    def _results(self) -> None:
        """What is done to each result, and its store."""
        scopes = self.scopes
        results = []
        for at, node in enumerate(self.group.outputs):
            place = unflatten(self._row, node.shape, scopes.variables)
            results.append((at, scopes.value(node, place), self._row))
        self.store(results)

    def write(self) -> Lowered:
        kept = self.joined(self._kept)
        if self.gpu:
            return self._by_threads(kept)
        return self._by_blocks(kept) if kept else self._by_one(kept)

    def _by_one(self, kept: list[str]) -> Lowered:
        scopes, form = self.scopes, self.scopes.form
        size = self.count(kept)
        form.grid, form.group = (size,), (1,)
        form.body = [Count("item", "GROUP(0) * 1 + THREAD")]
        inside = self.unpack("item", kept, 0)
        variables = []
        names = {node: scopes.name("sum") for node in self._reductions}
        around = self.joined(self._reduced)
        for name in around:
            scopes.depth_of[name] = 1
        for node, name in names.items():
            value = scopes.value(node.inputs[0], self._place)
            scopes.bodies[1].append(Update(name, value.type, node.primitive.name, value.name))
            variables.append(Variable(name, Type(computed_dtype(node)), node.primitive.name))
        before, scopes.bodies[0] = scopes.bodies[0], []
        loops = scopes.leave()
        for name in reversed(around):
            loops = [Loop(name, "0", str(self.count([name])), "1", loops)]
        scopes.stage = 1
        for node, name in names.items():
            scopes.given[node] = Value(name, Type(computed_dtype(node)), 0)
        self._results()
        whole = [*inside, *before, *variables, *loops, *scopes.bodies[0], *scopes.leave()]
        form.body.append(Loop("once", "item", str(size), str(size), whole))
        return self.lowered()

    def _by_threads(self, kept: list[str]) -> Lowered:
        """Some threads of a group have neighbouring columns, others the same columns of other rows."""
        scopes, form, lanes = self.scopes, self.scopes.form, self.lanes
        size, reduced = self.count(kept), self.joined(self._reduced)
        self.take_lanes(kept)
        threads = min(GROUP_THREADS, 1 << self.max_threads.bit_length() - 1)
        rows = self.count(reduced)
        abreast = self._abreast(threads, rows, size // lanes)
        parts = threads // abreast
        form.grid, form.group = (-(-size // (abreast * lanes)),), (threads,)
        last = size - lanes
        form.body = [
            Count("begin", f"(GROUP(0) * {abreast} + THREAD % {abreast}) * {lanes}"),
            Pick("item", f"begin < {last}", "begin", str(last)),  # all threads of a group work together
        ]
        inside = self.unpack("item", kept, 0)
        names = {node: scopes.name("sum") for node in self._reductions}
        around = self.unpack("part", reduced, 1)
        variables: list[Statement] = []
        for node, name in names.items():
            kind = Type(computed_dtype(node), lanes)
            value = scopes.value(node.inputs[0], self._place)
            scopes.bodies[1].append(Update(name, kind, node.primitive.name, value.name))
            variables.append(Variable(name, kind, node.primitive.name))
        before, scopes.bodies[0] = scopes.bodies[0], []
        start = f"THREAD / {abreast}"
        loop = Loop("part", start, str(rows), str(parts), [*around, *scopes.leave()], _READS)
        form.body += [*inside, *before, *variables, loop]
        if parts > 1:
            form.body += self._across(names, abreast, threads)
        scopes.stage = 1
        for node, name in names.items():
            scopes.given[node] = Value(name, Type(computed_dtype(node), lanes), 0)
        self._results()
        results = [*scopes.bodies[0], *scopes.leave()]
        form.body.append(When(f"THREAD < {abreast} && begin < {size}", results))
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
                arrays[stored] = self.scopes.name("across")
                self.scopes.form.arrays.append(Array(arrays[stored], stored, threads * self.lanes))
            kind = Type(dtype, self.lanes)
            result.append(Across(name, kind, node.primitive.name, arrays[stored], abreast, threads))
        return result

    def _by_blocks(self, kept: list[str]) -> Lowered:
        """A block of neighbouring results at a time, each row of the block from start to end."""
        scopes, form = self.scopes, self.scopes.form
        *outer, last = kept
        rows, length = self.count(outer), self.count([last])
        block = min(_BLOCK, -(-length // (16 * max(1, self.units * 2 // rows))) * 16)
        blocks = -(-length // block)
        arrays = {node: scopes.name("sums") for node in self._reductions}
        form.grid = (rows * blocks,)
        form.arrays = [Array(name, computed_dtype(node), block) for node, name in arrays.items()]
        form.body = [
            Count("begin", f"GROUP(0) % {blocks} * {block}"),
            Pick("end", f"{length} - begin < {block}", str(length), f"begin + {block}"),
            Count("row", f"GROUP(0) / {blocks}"),
        ]
        form.body += self.unpack("row", outer, 0)
        exact = length % self.lanes == 0
        scopes.depth_of["begin"], scopes.variables.lengths["begin"] = 0, length
        at = variable(last) + variable("begin") * -1

        def start() -> None:
            for node, name in arrays.items():
                kind = Type(computed_dtype(node), scopes.lanes)
                zero = scopes.name()
                scopes.bodies[1].append(Variable(zero, kind, node.primitive.name))
                self._put(name, node, Value(zero, kind, 1), at)

        def add() -> None:
            for node, name in arrays.items():
                value = scopes.widened(scopes.value(node.inputs[0], self._place), scopes.lanes)
                old = scopes.item(name, node, at)
                self._put(name, node, scopes.combined(node, old, value), at)

        def finish() -> None:
            for node, name in arrays.items():
                scopes.given[node] = scopes.item(name, node, at)
            self._results()

        first = self.vector_loops(last, "begin", "end", exact, start)
        around = self.joined(self._reduced)
        for name in around:
            scopes.depth_of[name] = 1
        loops = self.vector_loops(last, "begin", "end", exact, add)
        for name in reversed(around):
            loops = [Loop(name, "0", str(self.count([name])), "1", loops)]
        scopes.stage = 1
        final = self.vector_loops(last, "begin", "end", exact, finish)
        form.body += [*scopes.bodies[0], *first, *loops, *final]
        return self.lowered()

    def _put(self, array: str, node: Node, value: Value, index: Index) -> None:
        text, _, _ = self.scopes.text(index)
        self.scopes.bodies[1].append(Store(value.name, value.type, array, computed_dtype(node), text))
