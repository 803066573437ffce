"""The loops of a row group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.fusion.column_reductions import is_column_part
from penstock.fusion.index import Coords, Index, variable
from penstock.graph.contraction import GATHER
from penstock.graph.dtypes import HALF_PRECISION
from penstock.graph.elementwise import PRIMITIVES
from penstock.graph.node import Kind, Node, Primitive
from penstock.kernels import ir
from penstock.kernels.lowering.blocks import depends_on_order
from penstock.kernels.lowering.loop_nest import LoopNest, Lowered
from penstock.kernels.lowering.partials import Partials
from penstock.kernels.lowering.values import Value, computed_dtype

# Of a GPU.
_ITEMS = 32  # of a row that a thread has, if there are enough threads, and can keep in registers
_KEPT_ITEMS = 96  # that a thread keeps in registers in total
_EXP = PRIMITIVES["exp"]
_WARP = 32  # threads that run in lockstep; all threads of a short row are in one warp
_FEW_THREADS = 128  # of a workgroup with short rows
_MOST_THREADS = 1024  # that share a row
_LONG_THREADS = 512  # the same where there are many rows
_RESIDENT = 1024  # threads that a compute unit should hold; with more, each has too few registers
_READS = 4  # steps along a row whose items a thread reads before it stores any result
_BUSY = 256  # threads for each compute unit; where there are fewer, more threads share a row
_NOWHERE = Index((), -1)  # the index of column sums, which no load has, so that they overwrite no input
_ENOUGH = 0.9  # share of a row's threads that should have an item at every step


class RowLoops(LoopNest):
    """A loop over rows, each in as many passes as its reductions need.

    On a GPU, a workgroup may also accumulate column sums over its rows.
    """

    def space(self) -> None:
        self._column_sums = {at: node for at, node in enumerate(self.group.outputs) if is_column_part(node)}
        reductions = (node for node in self.group.nodes if self._reduces_row(node))
        first = next(reductions, None) or next(iter(self._column_sums.values()))
        source, axes = first.inputs[0], first.attributes["axes"]
        if not self._reduces_row(first):
            axes = tuple(range(2, source.ndim))
        self._rows, self._columns, self._row, self._column, _ = self.reduction_axes(source.shape, axes)
        self._number = self._row * self.group.columns + self._column
        self._levels: dict[Node, int] = {}  # of each node: how many passes must end before it is computed
        for node in self.group.nodes:
            before = max((self._levels.get(parent, 0) for parent in node.inputs), default=0)
            self._levels[node] = before + self._reduces_row(node)

    def _reduces_row(self, node: Node) -> bool:
        """Whether a node is a reduction of rows."""
        return node.primitive.kind is Kind.REDUCTION and node not in self._column_sums.values()

    def _is_whole(self, node: Node) -> bool:
        return node.size == self.count(self._rows) * self.group.columns

    def build(self) -> Lowered:
        emitter, kernel = self.emitter, self.emitter.kernel
        rows, columns = self.count(self._rows), self.group.columns
        self._inner = self.joined(self._columns)
        if self.gpu:
            self.take_lanes(self._inner)
            self._threads, together = self._divide(rows)
            part_rows = self._part_rows() or together  # the rows of a workgroup
            kernel.grid, kernel.group = (rows // part_rows,), (self._threads * together,)
            if self._threads > _FEW_THREADS:
                kernel.resident = max(1, _RESIDENT // self._threads)
            first = ir.WORKGROUP * part_rows
            first = first + ir.Var("again") if part_rows > together else first
            emitter.bodies[0] = [ir.Let("row", first + ir.THREAD // self._threads)]
            self._sum_names = {at: emitter.name("tally") for at in self._column_sums}
        emitter.bodies[0] += self.unpack("row", self.joined(self._rows), 0)
        passes = 1 + max(level - self._reduces_row(node) for node, level in self._levels.items())
        needed = [self._needed(stage) for stage in range(passes)]
        for stage in range(passes):
            emitter.stage = stage
            self._pass(stage, self._kept(needed, stage))
        reduced = [
            (at, emitter.at_number(node, self._row), self._row)
            for at, node in enumerate(self.group.outputs)
            if not self._is_whole(node) and at not in self._column_sums
        ]
        before = len(emitter.bodies[0])
        self.store(reduced)
        if self.gpu:
            kernel.body = emitter.bodies[0]
            if reduced:
                outputs = [at for at, _, _ in reduced]
                kernel.body[before:] = self._by_first_thread(kernel.body[before:], outputs)
            if self._column_sums:
                kernel.body = self._with_column_sums(kernel.body, part_rows, together)
            kernel.body.insert(0, ir.Let("rank", ir.THREAD % self._threads))
        else:
            part = self.chunk(rows, self.tasks(rows, rows * columns))
            kernel.body = [*part, ir.loop("row", ir.Var("begin"), ir.Var("end"), emitter.bodies[0])]
        return self.lowered()

    def _part_rows(self) -> int:
        """The rows of each part of a column sum; 0 if there is none."""
        return next((node.inputs[0].shape[1] for node in self._column_sums.values()), 0)

    def _with_column_sums(
        self, body: list[ir.Statement], part_rows: int, together: int
    ) -> list[ir.Statement]:
        """The body of a row in a loop over all rows of a part, and the stores of its column sums."""
        length = max(2, self._own_items())
        result: list[ir.Statement] = []
        for at, node in self._column_sums.items():
            kind = ir.Type(computed_dtype(node), length)
            result.append(ir.Declare(self._sum_names[at], ir.Identity(kind, node.primitive.name)))
        if part_rows > together:
            # Threads that share a row exchange values in local memory, which the next row reuses.
            barrier = [ir.Barrier()] if any(map(self._reduces_row, self.group.nodes)) else []
            body = [ir.loop("again", 0, part_rows, [*body, *barrier], step=together, unrolled=1)]
        return [*result, *body, *(self._store_sums() if together == 1 else self._join_sums(together))]

    def _store_sums(self) -> list[ir.Statement]:
        """Store the column sums of a workgroup that processes a row at a time."""
        stores: list[ir.Statement] = []
        for at, name in self._sum_names.items():
            part, kind = self.emitter.name(), ir.Type("float32", self.lanes)
            place = ir.WORKGROUP * self.group.columns + ir.Var("column")
            stores += [
                ir.Let(part, ir.Load(kind, name, kind.dtype, ir.Var("slot"), int(self.lanes > 1))),
                ir.Store(ir.Var(part, kind), f"out{at}", kind.dtype, place, self.lanes),
            ]
        return [self._step_loop(ir.Var("rank") * self.lanes, self._steps(), stores)]

    def _join_sums(self, together: int) -> list[ir.Statement]:
        """Add up, in local memory, the column sums of a workgroup that processes several rows at a time."""
        emitter, lanes, threads, columns = self.emitter, self.lanes, self._threads, self.group.columns
        length, group = self._own_items(), threads * together
        result: list[ir.Statement] = []
        sums: list[ir.Statement] = []
        # Item `slot` of thread THREAD is at `slot * group + THREAD`, so that neighbours write neighbours.
        number, column, slot, kind = ir.Var("spot"), ir.Var("column"), ir.Var("slot"), ir.Type("float32")
        spot = number // threads * group + number % threads
        first = number % threads * lanes + number // (threads * lanes) * (threads * lanes)
        for at, name in self._sum_names.items():
            array = emitter.local_array("across", "float32", length * group)
            item, total, part = (ir.Var(emitter.name(word), kind) for word in ("item", "sum", "part"))
            operation = self._column_sums[at].primitive.name
            shared: list[ir.Statement] = [
                ir.Let(item.name, ir.Load(kind, name, "float32", slot)),
                ir.Store(item, array, "float32", slot * group + ir.THREAD),
            ]
            result.append(ir.loop("slot", 0, length, shared, unrolled=length))
            added: list[ir.Statement] = [
                ir.Let(part.name, ir.Load(kind, array, "float32", spot + ir.Var("other") * threads)),
                ir.Accumulate(total, operation, part, kind),
            ]
            store = ir.Store(total, f"out{at}", "float32", ir.WORKGROUP * columns + column)
            sums += [
                ir.Declare(total.name, ir.Identity(kind, operation)),
                ir.loop("other", 0, together, added, unrolled=together),
                ir.If(column < columns, [store]) if columns % (threads * length) else store,
            ]
        whole = [ir.Let("column", first + number // threads % lanes), *sums]
        return [*result, ir.Barrier(), ir.loop("spot", ir.THREAD, length * threads, whole, step=group)]

    def _divide(self, rows: int) -> tuple[int, int]:
        """How many threads share a row, and how many rows a workgroup processes at a time."""
        most = min(_MOST_THREADS, self.max_threads)
        vectors = self.group.columns // self.lanes
        if not any(self._levels.values()):  # no rows are reduced
            return min(most, _LONG_THREADS, 1 << (vectors - 1).bit_length()), 1
        threads = min(most, _LONG_THREADS, 1 << (-(-self.group.columns // _ITEMS) - 1).bit_length())
        if threads <= _WARP:
            threads = self._busiest_threads(vectors)
        while self._column_sums and -(-vectors // threads) * self.lanes > _ITEMS:
            threads *= 2  # they are in registers
        while 2 * threads <= min(most, vectors) and rows * threads < _BUSY * self.units:
            threads *= 2
        together = max(1, min(_FEW_THREADS, most) // threads)
        while (self._part_rows() or rows) % together:
            together //= 2
        if threads * together < _WARP:  # a warp exchanges values among all its threads
            threads, together = _WARP, 1
        return threads, together

    @staticmethod
    def _busiest_threads(vectors: int) -> int:
        """The most threads of a warp that a row keeps busy."""

        def busy(threads: int) -> float:
            return vectors / (-(-vectors // threads) * threads)

        # Few threads read apart from each other, which only pays where a row has little for more of them.
        choices = (32, 16, 8) if vectors >= 8 else (32, 16, 8, 4, 2, 1)
        enough = (threads for threads in choices if busy(threads) >= _ENOUGH)
        return next(enough, max(choices, key=busy))

    def _by_first_thread(self, stores: list[ir.Statement], outputs: list[int]) -> list[ir.Statement]:
        """Stores of the reduced values of a row, by its first thread."""
        may_alias, store = self.may_alias(), ir.If(ir.Var("rank").eq(0), stores)
        # All threads must have read a value before another overwrites it.
        overwrites = any(may_alias[at] for at in outputs)
        return [ir.Barrier(device_memory=True), store] if overwrites else [store]

    def _item(self, node: Node) -> Value:
        """A value before any reduction, at the current item of the loops."""
        return self.emitter.at_number(node, self._number)

    def _results_of(self, stage: int) -> tuple[list[Node], list[tuple[int, Node]], list[tuple[int, Node]]]:
        """The reductions that a pass computes, the outputs that it writes, and the column sums it adds to."""
        reductions = [
            node for node in self.group.nodes if self._reduces_row(node) and self._levels[node] == stage + 1
        ]
        outputs = [
            (at, node)
            for at, node in enumerate(self.group.outputs)
            if self._is_whole(node) and self._levels[node] == stage
        ]
        column_sums = [(at, node) for at, node in self._column_sums.items() if self._levels[node] == stage]
        return reductions, outputs, column_sums

    def _needed(self, stage: int) -> set[Node]:
        """The nodes before any reduction that a pass computes, and the inputs that it reads."""
        reductions, outputs, column_sums = self._results_of(stage)
        stack = [node.inputs[0] for node in (*reductions, *(node for _, node in column_sums))]
        stack += [node for _, node in outputs]
        needed: set[Node] = set()
        inside = {*self.group.nodes, *self.group.inputs}
        while stack:
            node = stack.pop()
            if node in inside and node not in needed and node.primitive.kind is not Kind.REDUCTION:
                needed.add(node)
                stack += () if node in self.group.inputs else node.inputs
        return needed

    def _kept(self, needed: list[set[Node]], stage: int) -> list[Node]:
        """Costly values that a later pass reuses: they stay in local memory, or in registers."""
        known = {node for node, _ in self.emitter.kept}
        reused = needed[stage].intersection(set().union(*needed[stage + 1 :])) - known
        if not self.gpu:
            room = self.local_bytes // (4 * self.group.columns)
            costly = (node for node in self.group.nodes if node in reused and node.primitive.costly)
            kept = [node for node in costly if self._is_whole(node) and computed_dtype(node) == "float32"]
        elif self._fits_registers():
            room, kept = _KEPT_ITEMS // self._own_items(), self._worth_registers(reused)
        else:
            return []
        return kept[: max(0, room - len(known))]

    def _worth_registers(self, reused: set[Node]) -> list[Node]:
        """The values that are worth registers, rather than a second load or computation."""
        tables = {node.inputs[0] for node in self.group.nodes if node.primitive is GATHER}
        nodes = [node for node in self.group.inputs if node not in tables]
        nodes += [node for node in self.group.nodes if self._is_costly(node.primitive)]
        whole = self.count(self._rows) * self.group.columns
        return [node for node in nodes if node in reused and node.size >= whole]

    def _kept_dtype(self, node: Node) -> str:
        """The dtype of a kept value: float16 and bfloat16 as they were read, where two share a word."""
        as_read = self.gpu and self.lanes > 1 and node in self.group.inputs
        return str(node.dtype) if as_read and node.dtype in HALF_PRECISION else computed_dtype(node)

    def _is_costly(self, primitive: Primitive) -> bool:
        """Whether a value is worth registers rather than computing it a second time."""
        quick = primitive is _EXP and self.emitter.kernel.quick
        return primitive is GATHER or (primitive.costly and not quick)

    def _steps(self) -> int:
        """How many steps along its row a thread takes in a pass."""
        return -(-self.group.columns // (self._threads * self.lanes))

    def _own_items(self) -> int:
        """The items of a row that a thread has, including those past its end."""
        return self._steps() * self.lanes

    def _fits_registers(self) -> bool:
        """Whether a thread's part of a row is so short that loops over it are unrolled."""
        return self._own_items() <= _ITEMS

    def _pass(self, stage: int, keep: list[Node]) -> None:
        emitter = self.emitter
        reductions, outputs, column_sums = self._results_of(stage)
        if not reductions and not outputs and not column_sums:
            return
        if self.gpu:
            known = dict.fromkeys(array for array, _, _ in emitter.kept.values())
            emitter.bodies[0] += [ir.Forget(array, self._own_items()) for array in known]
        partials = Partials(emitter, self._threads if self.gpu else 0)
        kept: dict[tuple[Node, Coords], tuple[str, Index, str]] = {}
        arrays = {node: emitter.name("kept") for node in keep}
        place = variable("slot") if self.gpu else self._column
        for node, name in arrays.items():
            if self.gpu:
                emitter.bodies[0].append(ir.RegisterArray(name, self._kept_dtype(node), self._own_items()))
            else:
                emitter.kernel.arrays.append(ir.LocalArray(name, computed_dtype(node), self.group.columns))

        def body() -> None:
            for node in reductions:
                partials.accumulate(node, emitter.widened(self._item(node.inputs[0]), emitter.lanes))
            for at, node in column_sums:
                value = self._item(node.inputs[0])
                kind = ir.Type(value.type.dtype, emitter.lanes)
                target, operation = ir.Var(self._sum_names[at], kind), node.primitive.name
                emitter.bodies[1].append(ir.Accumulate(target, operation, value.var, kind, ir.Var("slot")))
                self.note_store(at, _NOWHERE)
            results = [(at, self._item(node), self._number) for at, node in outputs]
            for key, value in emitter.computed(keep):
                array, stored = arrays[key[0]], self._kept_dtype(key[0])
                emitter.store(array, stored, place, emitter.widened(value, emitter.lanes), emitter.lanes)
                kept[key] = (array, place, stored)
            self.store(results)

        loops = self._loops(body, partials, reductions)
        emitter.bodies[0] += [*partials.start(), *loops]
        for node in reductions:
            result = partials.reduce(node)
            emitter.given[node] = Value(ir.Var(result, ir.Type(computed_dtype(node))), 0)
        emitter.kept.update(kept)

    def _loops(
        self, body: Callable[[], None], partials: Partials, reductions: Sequence[Node]
    ) -> list[ir.Statement]:
        emitter, sums = self.emitter, partials.sums
        if self.gpu:
            loops = self._loops_of_threads(body)
            return [sums.blocked(loop, _READS if loop.name == "start" else 1)[0] for loop in loops]
        if not self._inner:
            emitter.lanes, emitter.lane_steps = 1, {}
            body()
            return emitter.leave()
        *around, last = self._inner
        for name in around:
            emitter.depth_of[name] = 1
        length = self.count([last])
        if around and any(depends_on_order(node.primitive.name, computed_dtype(node)) for node in reductions):
            return self._flat_loops(body, partials)
        if reductions:
            parts = partials.loops(last, length, self.lanes, body)
        else:
            parts = self.vector_loops(last, 0, length, length % self.lanes == 0, body)
        blocked = [sums.blocked(part) for part in parts]
        for name in reversed(around):
            turns = self.count([name])
            loop = ir.loop(name, 0, turns, [part for part, _ in blocked], trips=turns)
            blocked = [sums.blocked(loop, max(each for _, each in blocked))]
        return [loop for loop, _ in blocked]

    def _flat_loops(self, body: Callable[[], None], partials: Partials) -> list[ir.Statement]:
        """Loops of a CPU over the flat index of a row's items, from which its variables are computed.

        So they are added in the same order as any row of that length. Vectors are along the last variables.
        """
        columns, together = self.group.columns, self.together(self._inner)
        self.emitter.variables.lengths["column"] = columns
        lanes = self.lanes if together else 1
        inside = self.unpack("column", self._inner, 1)
        loops = partials.loops("column", columns, lanes, body, inside, self.lane_steps(together))
        return [partials.sums.blocked(loop)[0] for loop in loops]

    def _loops_of_threads(self, body: Callable[[], None]) -> list[ir.For]:
        emitter, columns, lanes = self.emitter, self.group.columns, self.lanes
        inside = self.unpack("column", self._inner, 1)
        emitter.depth_of["slot"], emitter.variables.lengths["slot"] = 1, columns
        emitter.lane_steps["slot"] = 1
        body()
        step = self._threads * lanes
        if self._fits_registers():
            return [self._step_loop(ir.Var("rank") * lanes, self._steps(), [*inside, *emitter.leave()])]
        read = emitter.computed([node for node in self.group.inputs if node.size >= columns])
        statements = [*inside, *emitter.leave()]
        start = ir.Var("rank") * lanes
        if not any(isinstance(statement, ir.Store) for statement in statements):
            trips = self._steps()
            return [ir.loop("column", start, columns, statements, step=step, unrolled=_READS, trips=trips)]
        # No compiler moves a load before a store that might alias it, so all loads come first.
        slot = variable("slot")
        arrays = {key: (emitter.name("read"), slot, self._kept_dtype(key[0])) for key, _ in read}
        registers = [ir.RegisterArray(name, dtype, _READS * lanes) for name, _, dtype in arrays.values()]
        for key, (name, _, dtype) in arrays.items():
            emitter.store(name, dtype, slot, emitter.value(*key), lanes)
        reads = self._step_loop(ir.Var("start"), _READS, [*inside, *emitter.leave()])
        emitter.kept.update(arrays)
        body()
        rest = self._step_loop(ir.Var("start"), _READS, [*inside, *emitter.leave()])
        for key in arrays:
            del emitter.kept[key]
        parts: list[ir.Statement] = [*registers, reads, rest]
        trips = -(-self._steps() // _READS)
        return [ir.loop("start", start, columns, parts, step=step * _READS, unrolled=1, trips=trips)]

    def _step_loop(self, start: ir.Expr, turns: int, statements: list[ir.Statement]) -> ir.For:
        """`turns` steps of a thread along its row, unrolled."""
        columns, step = self.group.columns, self._threads * self.lanes
        if columns % (turns * step):
            statements = [ir.If(ir.Var("column") < columns, statements)]
        turn = ir.Var("turn")
        counts = [ir.Let("column", start + turn * step), ir.Let("slot", turn * self.lanes)]
        return ir.loop("turn", 0, turns, [*counts, *statements], unrolled=turns)
