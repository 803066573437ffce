"""The loops of a row group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.fusion.column_reductions import is_column_part
from penstock.fusion.index import Coords, Index, variable
from penstock.graph.contraction import GATHER
from penstock.graph.dtypes import HALF_PRECISION
from penstock.graph.elementwise import CAST, PRIMITIVES
from penstock.graph.node import Kind, Node, Primitive
from penstock.kernels import ir
from penstock.kernels.lowering.blocks import LANES, depends_on_order
from penstock.kernels.lowering.loop_nest import Lowered
from penstock.kernels.lowering.partials import Partials
from penstock.kernels.lowering.streaming import hinted, read_once
from penstock.kernels.lowering.values import LanesImpossible, Value, computed_dtype
from penstock.kernels.lowering.vectors_of_rows import READ_WORDS, VectorsOfRows
from penstock.kernels.rewriting import divided
from penstock.kernels.source import WORD, item_size

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
# A workgroup that computes a vector before its rows takes rows up to so many times, as long as there are so
# many workgroups for each compute unit.
_MOST_TURNS = 4
_VECTOR_GROUPS = 6
_NOWHERE = Index((), -1)  # the index of column sums, which no load has, so that they overwrite no input
_ENOUGH = 0.9  # share of a row's threads that should have an item at every step


class RowLoops(VectorsOfRows):
    """A loop over rows, each in as many passes as its reductions need.

    On a GPU, a workgroup may also accumulate column sums over its rows.
    """

    def space(self) -> None:
        self._column_sums = {at: node for at, node in enumerate(self.group.outputs) if is_column_part(node)}
        reductions = [node for node in self.group.nodes if self._reduces_row(node)]
        whole = max((node.inputs[0].size for node in reductions), default=0)
        # Reductions of a vector that all rows read, which are computed before the rows.
        self._of_vector = {node for node in reductions if node.inputs[0].size < whole}
        first = next((node for node in reductions if node not in self._of_vector), None)
        first = first or next(iter(self._column_sums.values()))
        source, axes = first.inputs[0], first.attributes["axes"]
        if not self._reduces_row(first):
            axes = tuple(range(2, source.ndim))
        self._rows, self._columns, self._row, self._column, _ = self.reduction_axes(source.shape, axes)
        self._number = self._row * self.group.columns + self._column
        self._levels = self._levels_after(0)  # of each node: how many passes must end before it is computed
        self._first_pass = max((self._levels[node] for node in self._of_vector), default=0)  # over rows
        if self._of_vector:
            self._levels = self._levels_after(self._first_pass)

    def _levels_after(self, first: int) -> dict[Node, int]:
        """How many passes must end before each node is computed, if passes over rows start with `first`."""
        levels: dict[Node, int] = {}
        for node in self.group.nodes:
            before = max((levels.get(parent, 0) for parent in node.inputs), default=0)
            if self._reduces_row(node) and node not in self._of_vector:
                before = max(before, first)
            levels[node] = before + self._reduces_row(node)
        return levels

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
            self.order = self._threads, self.lanes, together
            part_rows = self._part_rows() or together * self._turns(-(-rows // together))  # of a workgroup
            kernel.grid, kernel.group = (-(-rows // part_rows),), (self._threads * together,)
            # Some workgroups would have rows beyond the last.
            self._uneven = rows % part_rows > 0 or self.shared
            kernel.block = part_rows if all(node.size == rows for node in self.group.outputs) else 0
            if self._threads > _FEW_THREADS:
                kernel.resident = max(1, _RESIDENT // self._threads)
            first = ir.WORKGROUP * part_rows
            first = first + ir.Var("again") if part_rows > together else first
            before_rows = self._vector_passes()
            emitter.bodies[0], self._reads = self._row_of_thread(first), None
            self._sum_names = {at: emitter.name("tally") for at in self._column_sums}
        emitter.bodies[0] += self.unpack("row", self.joined(self._rows), 0)
        passes = 1 + max(level - self._reduces_row(node) for node, level in self._levels.items())
        needed = [self._needed(stage) for stage in range(passes)]
        start = len(emitter.bodies[0])
        for stage in range(self._first_pass, passes):
            emitter.stage = stage
            self._pass(stage, self._kept(needed, stage))
        end = len(emitter.bodies[0])
        reduced = [
            (at, emitter.at_number(node, self._row), self._row)
            for at, node in enumerate(self.group.outputs)
            if not self._is_whole(node) and at not in self._column_sums
        ]
        if self.gpu:
            self._read_first(start, end)
        before = len(emitter.bodies[0])
        self.store(reduced)
        if self.gpu:
            kernel.body = emitter.bodies[0]
            if reduced:
                outputs = [at for at, _, _ in reduced]
                kernel.body[before:] = self._by_first_thread(kernel.body[before:], outputs)
            if self._column_sums:
                kernel.body = self._with_column_sums(kernel.body, part_rows, together)
            elif part_rows > together:
                kernel.body = [self._over_rows(kernel.body, part_rows, together)]
            single = sum(any(self._results_of(stage)) for stage in range(self._first_pass, passes)) == 1
            once = read_once(self.group, rows * columns) if single and not self.shared else []
            if part_rows == together:
                kernel.body = self._around(before_rows, kernel.body, bool(once))
            else:
                kernel.body = [*before_rows, *kernel.body]
            kernel.body = hinted([ir.Let("rank", ir.THREAD % self._threads), *kernel.body], self.group, once)
        else:
            part = self.chunk(rows, self.tasks(rows, rows * columns))
            kernel.body = [*part, ir.loop("row", ir.Var("begin"), ir.Var("end"), emitter.bodies[0])]
        return self.lowered()

    def _read_first(self, start: int, end: int) -> None:
        """Move what follows the passes of a row before them, if it depends on none: biases, for instance.

        Else a row would wait for them once more. The passes are the statements from `start` to `end`.
        """
        body = self.emitter.bodies[0]
        ready, later = divided(body[end:], {getattr(part, "name", "") for part in body[start:end]})
        body[start:] = [*ready, *body[start:end], *later]

    def _row_of_thread(self, first: ir.Expr) -> list[ir.Statement]:
        """The row of a thread, from `first` on; the last row for those beyond, which store nothing."""
        own = first + ir.THREAD // self._threads
        if not self._uneven:
            return [ir.Let("row", own)]
        return [ir.Let("own_row", own), ir.Let("row", self._clamped(ir.Var("own_row")))]

    def _clamped(self, row: ir.Expr) -> ir.Expr:
        last = self.count(self._rows) - 1
        return ir.Select(ir.INT, row < last, row, ir.Const(last))

    def _may_be_uneven(self) -> bool:
        """Whether the first threads of rows make all stores, so that they can leave some out."""
        return bool(self._of_vector) and not any(map(self._is_whole, self.group.outputs))

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
            body = [self._over_rows(body, part_rows, together)]
        return [*result, *body, *(self._store_sums() if together == 1 else self._join_sums(together))]

    def _over_rows(self, body: list[ir.Statement], part_rows: int, together: int) -> ir.Statement:
        """The body of a row for all rows of a workgroup, of which it processes some at a time."""
        # Threads that share a row exchange values in local memory, which the next row reuses.
        barrier = [ir.Barrier()] if any(map(self._reduces_row, self.group.nodes)) else []
        return ir.loop("again", 0, part_rows, [*body, *barrier], step=together, unrolled=1)

    def _turns(self, times: int) -> int:
        """How often a workgroup takes rows, of so many times in all, so that it computes a vector rarely."""
        turns = 1
        while (
            self._of_vector
            and turns < _MOST_TURNS
            and (times % (2 * turns) == 0 or self._may_be_uneven())
            and times // (2 * turns) >= _VECTOR_GROUPS * self.units
        ):
            turns *= 2
        return turns

    def _divide(self, rows: int) -> tuple[int, int]:
        """How many threads share a row, and how many rows a workgroup processes at a time."""
        most = min(_MOST_THREADS, self.max_threads)
        if self.shared:
            usual = _WARP if self.group.columns <= _ITEMS * _WARP else min(_LONG_THREADS, most)
            threads = self.order[0] if self.order else usual
            return threads, max(1, min(_FEW_THREADS, most) // threads)
        vectors = self.group.columns // self.lanes
        if not any(self._levels.values()):  # no rows are reduced
            return min(most, _LONG_THREADS, 1 << (vectors - 1).bit_length()), 1
        threads = min(most, _LONG_THREADS, 1 << (-(-self.group.columns // _ITEMS) - 1).bit_length())
        if threads <= _WARP:
            threads = self._busiest_threads(vectors)
        while self._column_sums and -(-vectors // threads) * self.lanes > _ITEMS:
            threads *= 2  # they are in registers
        enough = self._reads_at_once(rows, threads)
        while 2 * threads <= min(most, vectors) and rows * threads < _BUSY * self.units and not enough:
            threads *= 2
        together = max(1, min(_FEW_THREADS, most) // threads)
        while (self._part_rows() or rows) % together and not self._may_be_uneven():
            together //= 2
        if threads * together < _WARP:  # a warp exchanges values among all its threads
            threads, together = _WARP, 1
        return threads, together

    def _reads_at_once(self, rows: int, threads: int) -> bool:
        """Whether a single row is only reduced, by threads that have all their items on the way at once.

        More of them would not save time, and the last workgroup of another kernel may have no more.
        """
        stored = self._column_sums or any(map(self._is_whole, self.group.outputs))
        return (
            rows == 1
            and max(self._levels.values()) == 1
            and not stored
            and self.group.columns <= _ITEMS * threads
        )

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
        first = ir.Var("rank").eq(0)
        if self._uneven:
            first = first & (ir.Var("own_row") < self.count(self._rows))
        may_alias, store = self.may_alias(), ir.If(first, stores)
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
        """The dtype of a kept value: half precision if it was read or rounded so, where two share a word."""
        narrow = self.gpu and self.lanes > 1 and (node in self.group.inputs or node.primitive is CAST)
        return str(node.dtype) if narrow and node.dtype in HALF_PRECISION else computed_dtype(node)

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
        return self._own_items() <= _ITEMS and not self.shared

    def _pass(self, stage: int, keep: list[Node], whole: bool = True) -> None:
        """A pass over a row; with `whole` False, over the vector that is kept for all rows."""
        emitter = self.emitter
        reductions, outputs, column_sums = self._results_of(stage) if whole else ([], [], [])
        if not reductions and not outputs and not column_sums and whole:
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
            for node in keep if not whole else ():
                self._item(node)
            for key, value in emitter.computed(keep):
                array, stored = arrays[key[0]], self._kept_dtype(key[0])
                emitter.store(array, stored, place, emitter.widened(value, emitter.lanes), emitter.lanes)
                kept[key] = (array, place, stored)
            self.store(results)

        loops = self._loops(body, partials, reductions, bool(keep))
        emitter.bodies[0] += [*partials.start(), *loops]
        for node in reductions:
            result = partials.reduce(node)
            emitter.given[node] = Value(ir.Var(result, ir.Type(computed_dtype(node))), 0)
        emitter.kept.update(kept)

    def _loops(
        self, body: Callable[[], None], partials: Partials, reductions: Sequence[Node], kept: bool
    ) -> list[ir.Statement]:
        emitter, sums = self.emitter, partials.sums
        if self.gpu:
            return [
                sums.blocked(part, _READS if part.name == "start" else 1)[0]
                if isinstance(part, ir.For)
                else part
                for part in self._loops_of_threads(body, kept)
            ]
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
            parts = partials.loops(last, length, self.lanes, body, any_length=self.any_length)
        else:
            self.check_lanes(length)
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
        if self.lanes > LANES:
            raise LanesImpossible  # what remains after the last whole strip needs other steps between lanes
        self.emitter.variables.lengths["column"] = columns
        lanes = self.lanes if together else 1
        inside = self.unpack("column", self._inner, 1)
        loops = partials.loops("column", columns, lanes, body, inside, self.lane_steps(together))
        return [partials.sums.blocked(loop)[0] for loop in loops]

    def _loops_of_threads(self, body: Callable[[], None], kept: bool) -> list[ir.Statement]:
        """The steps of a thread along its row; `kept`: some of what it reads stays in registers anyway.

        Loads come first where there is a store, which might alias them, so that no compiler moves them before
        it, and where a compiler would save registers by waiting for some before it issues the others.
        """
        emitter, columns, lanes = self.emitter, self.group.columns, self.lanes
        inside = self.unpack("column", self._inner, 1)
        emitter.depth_of["slot"], emitter.variables.lengths["slot"] = 1, columns
        emitter.lane_steps["slot"] = 1
        body()
        step = self._threads * lanes
        inputs = [node for node in self.group.inputs if node.size >= columns]
        # What is read where other values say, or within bounds, comes after these.
        read = [pair for pair in emitter.computed(inputs) if all(map(emitter.is_of_loops, pair[0][1]))]
        statements, start = [*inside, *emitter.leave()], ir.Var("rank") * lanes
        if self._fits_registers():
            nodes = [node for (node, _), _ in read]
            if kept or self._steps() == 1 or not nodes or self._words(nodes) > READ_WORDS:
                return [self._step_loop(start, self._steps(), statements)]
            return self._loads_first(start, self._steps(), inside, read, body)
        if not any(isinstance(statement, ir.Store) for statement in statements):
            trips = self._steps()
            return [ir.loop("column", start, columns, statements, step=step, unrolled=_READS, trips=trips)]
        parts = self._loads_first(ir.Var("start"), _READS, inside, read, body)
        trips = -(-self._steps() // _READS)
        return [ir.loop("start", start, columns, parts, step=step * _READS, unrolled=1, trips=trips)]

    def _words(self, nodes: Sequence[Node]) -> int:
        """How many registers a thread's items of some nodes take."""
        return sum(self._own_items() * item_size(self._kept_dtype(node)) // WORD for node in nodes)

    def _loads_first(
        self,
        start: ir.Expr,
        turns: int,
        inside: list[ir.Statement],
        read: Sequence[tuple[tuple[Node, Coords], Value]],
        body: Callable[[], None],
    ) -> list[ir.Statement]:
        """Steps of a thread along its row: all of what it reads, and then what is computed from it."""
        emitter, lanes = self.emitter, self.lanes
        slot = variable("slot")
        arrays = {key: (emitter.name("read"), slot, self._kept_dtype(key[0])) for key, _ in read}
        registers = [ir.RegisterArray(name, dtype, turns * lanes) for name, _, dtype in arrays.values()]
        for key, (name, _, dtype) in arrays.items():
            emitter.store(name, dtype, slot, emitter.value(*key), lanes)
        reads = self._step_loop(start, turns, [*inside, *emitter.leave()])
        self._reads = self._reads or reads
        emitter.kept.update(arrays)
        body()
        rest = self._step_loop(start, turns, [*inside, *emitter.leave()])
        for key in arrays:
            del emitter.kept[key]
        return [*registers, reads, rest]

    def _step_loop(self, start: ir.Expr, turns: int, statements: list[ir.Statement]) -> ir.For:
        """`turns` steps of a thread along its row, unrolled."""
        columns, step = self.group.columns, self._threads * self.lanes
        if columns % (turns * step):
            statements = [ir.If(ir.Var("column") < columns, statements)]
        turn = ir.Var("turn")
        counts = [ir.Let("column", start + turn * step), ir.Let("slot", turn * self.lanes)]
        return ir.loop("turn", 0, turns, [*counts, *statements], unrolled=turns)
