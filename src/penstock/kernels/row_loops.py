"""The loops of a row group."""

from __future__ import annotations

from collections.abc import Callable

from penstock.fusion.costs import COSTLY
from penstock.fusion.index import Index, Place, flat, unflatten
from penstock.graph.node import Node
from penstock.graph.reducing import REDUCTIONS
from penstock.kernels.loop_nest import GROUP_THREADS, LoopNest, Lowered
from penstock.kernels.loops import Array, Fold, Loop, Statement, Store, Type, Update, Variable
from penstock.kernels.scopes import Merge, Value, computed_dtype


class RowLoops(LoopNest):
    """Row after row, each in as many passes as its reductions need."""

    def space(self) -> None:
        first = next(node for node in self.group.nodes if node.primitive in REDUCTIONS)
        source, axes = first.inputs[0], first.attributes["axes"]
        kept = [1 if axis in axes else n for axis, n in enumerate(source.shape)]
        reduced = [n if axis in axes else 1 for axis, n in enumerate(source.shape)]
        self._rows, row_indices = self.axes("r", kept)
        self._columns, column_indices = self.axes("c", reduced)
        self._row = flat(tuple(row_indices), tuple(kept))
        self._column = flat(tuple(column_indices), tuple(reduced))
        self._number = self._row * self.group.columns + self._column
        self._levels = self._stages()

    def merges(self) -> list[Merge]:
        return self.found_merges(self._rows, self._columns)

    def _stages(self) -> dict[Node, int]:
        """How many passes must be over before a node can be computed."""
        level: dict[Node, int] = {}
        for node in self.group.nodes:
            before = max((level.get(parent, 0) for parent in node.inputs), default=0)
            level[node] = before + (node.primitive in REDUCTIONS)
        return level

    def _whole(self, node: Node) -> bool:
        return node.size == self.count(self._rows) * self.group.columns

    def write(self) -> Lowered:
        scopes, form = self.scopes, self.scopes.form
        rows, columns = self.count(self._rows), self.group.columns
        self._inner = self.joined(self._columns)
        outer = self.joined(self._rows)
        if self.gpu:
            threads = min(GROUP_THREADS, 1 << max(5, (columns - 1).bit_length()))
            form.grid, form.group = (rows,), (threads,)
            scopes.bodies[0] = self.unpack("GROUP(0)", outer, 0)
        else:
            scopes.bodies[0] = self.unpack("row", outer, 0)
        passes = 1 + max(level - (node.primitive in REDUCTIONS) for node, level in self._levels.items())
        needed = [self._needed(stage) for stage in range(passes)]
        for stage in range(passes):
            scopes.stage = stage
            keep = self._kept(needed, stage)
            self._pass(stage, keep)
        self.store(
            [
                (at, self._reduced_value(node), self._row)
                for at, node in enumerate(self.group.outputs)
                if not self._whole(node)
            ]
        )
        if self.gpu:
            form.body = scopes.bodies[0]
        else:
            part = self.chunk(rows, self.tasks(rows, rows * columns))
            form.body = [*part, Loop("row", "begin", "end", "1", scopes.bodies[0])]
        return self.lowered()

    def _reduced_value(self, node: Node) -> Value:
        return self.scopes.value(node, unflatten(self._row, node.shape, self.scopes.variables))

    def _roots(self, stage: int) -> tuple[list[Node], list[tuple[int, Node]]]:
        """The reductions that a pass computes, and the outputs that it writes."""
        reductions = [
            node
            for node in self.group.nodes
            if node.primitive in REDUCTIONS and self._levels[node] == stage + 1
        ]
        outputs = [
            (at, node)
            for at, node in enumerate(self.group.outputs)
            if self._whole(node) and self._levels[node] == stage
        ]
        return reductions, outputs

    def _needed(self, stage: int) -> set[Node]:
        """The nodes before any reduction that a pass computes."""
        reductions, outputs = self._roots(stage)
        stack = [node.inputs[0] for node in reductions] + [node for _, node in outputs]
        found: set[Node] = set()
        inside = set(self.group.nodes)
        while stack:
            node = stack.pop()
            if node in inside and node not in found and node.primitive not in REDUCTIONS:
                found.add(node)
                stack += node.inputs
        return found

    def _kept(self, needed: list[set[Node]], stage: int) -> list[Node]:
        """What takes long to compute and a later pass needs again: it stays in memory of the group."""
        later = set().union(*needed[stage + 1 :])
        room = self.local_bytes // (4 * self.group.columns)
        known = {node for node, _ in self.scopes.kept}
        found = [
            node
            for node in self.group.nodes
            if node in needed[stage] & later
            and node.primitive in COSTLY
            and node not in known
            and self._whole(node)
            and computed_dtype(node) == "float32"
        ]
        return found[: max(0, room - len(known))]

    def _pass(self, stage: int, keep: list[Node]) -> None:
        scopes = self.scopes
        reductions, outputs = self._roots(stage)
        if not reductions and not outputs:
            return
        lanes_of: dict[Node, list[tuple[str, int]]] = {node: [] for node in reductions}
        kept: dict[tuple[Node, Place], tuple[str, Index]] = {}
        arrays = {node: scopes.name("kept") for node in keep}
        for node, name in arrays.items():
            scopes.form.arrays.append(Array(name, computed_dtype(node), self.group.columns))

        def body() -> None:
            results = []
            for node in reductions:
                source = node.inputs[0]
                value = scopes.value(source, unflatten(self._number, source.shape, scopes.variables))
                wide = scopes.widened(value, scopes.lanes)
                known = {lanes: name for name, lanes in lanes_of[node]}
                name = known.get(scopes.lanes) or scopes.name("sum")
                if scopes.lanes not in known:
                    lanes_of[node].append((name, scopes.lanes))
                scopes.bodies[1].append(Update(name, wide.type, node.primitive.name, wide.name))
            for at, node in outputs:
                place = unflatten(self._number, node.shape, scopes.variables)
                results.append((at, scopes.value(node, place), self._number))
            for key, value in scopes.computed(keep):
                wide = scopes.widened(value, scopes.lanes)
                text, _, _ = scopes.text(self._column)
                scopes.bodies[1].append(Store(wide.name, wide.type, arrays[key[0]], wide.type.dtype, text))
                kept[key] = (arrays[key[0]], self._column)
            self.store(results)

        loops = self._loops(body)
        for node in reductions:
            for name, lanes in lanes_of[node]:
                kind = Type(computed_dtype(node), lanes)
                scopes.bodies[0].append(Variable(name, kind, node.primitive.name))
        scopes.bodies[0] += loops
        for node in reductions:
            self._fold(node, lanes_of[node])
        scopes.kept.update(kept)

    def _fold(self, node: Node, parts: list[tuple[str, int]]) -> None:
        """One value from the sums of all lanes and threads."""
        scopes, operation, dtype = self.scopes, node.primitive.name, computed_dtype(node)
        *vectors, (name, lanes) = parts
        for other, wide in vectors:
            part = scopes.name()
            scopes.bodies[0].append(Fold(part, Type(dtype, wide), operation, other, None))
            scopes.bodies[0].append(Update(name, Type(dtype), operation, part))
        result, array = scopes.name(), None
        if self.gpu:
            array = scopes.name("threads")
            stored = "int32" if dtype == "bool" else dtype
            scopes.form.arrays.append(Array(array, stored, scopes.form.group[0]))
        scopes.bodies[0].append(Fold(result, Type(dtype, lanes), operation, name, array))
        scopes.given[node] = Value(result, Type(dtype), 0)

    def _loops(self, body: Callable[[], None]) -> list[Statement]:
        scopes = self.scopes
        if self.gpu:
            inside = self.unpack("column", self._inner, 1)
            body()
            threads = scopes.form.group[0]
            return [
                Loop("column", "THREAD", str(self.group.columns), str(threads), [*inside, *scopes.leave()])
            ]
        if not self._inner:
            scopes.lanes, scopes.lane_steps = 1, {}
            body()
            return scopes.leave()
        *around, last = self._inner
        for name in around:
            scopes.depth_of[name] = 1
        length = self.count([last])
        loops = self.vector_loops(last, "0", str(length), length % self.lanes == 0, body)
        for name in reversed(around):
            loops = [Loop(name, "0", str(self.count([name])), "1", loops)]
        return loops
