"""The loops of a row group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.fusion.column_reductions import is_column_part
from penstock.fusion.index import Index, Place, variable
from penstock.graph.contraction import GATHER
from penstock.graph.dtypes import HALF_PRECISION
from penstock.graph.elementwise import PRIMITIVES
from penstock.graph.node import Kind, Node, Primitive
from penstock.kernels.ir.expressions import THREAD, WORKGROUP, Const, Expr, Identity, Load, Type, Var
from penstock.kernels.ir.statements import (
    Accumulate,
    Barrier,
    Declare,
    For,
    Forget,
    If,
    Let,
    LocalArray,
    RegisterArray,
    Statement,
    Store,
)
from penstock.kernels.lowering.blocks import depends_on_order
from penstock.kernels.lowering.emitter import Value, computed_dtype
from penstock.kernels.lowering.loop_nest import LoopNest, Lowered
from penstock.kernels.lowering.partials import Partials

# Of a GPU. A thread has so many items of a row, if there are enough threads, and can keep them in registers.
_ITEMS = 32
_KEPT_ITEMS = 96  # that a thread keeps in registers in all
_EXP = PRIMITIVES["exp"]
_WARP = 32  # threads that run in lockstep; all threads of a short row are in one warp
_FEW_THREADS = 128  # of a group, if its rows are short
_MOST_THREADS = 1024  # that share a row
_LONG_THREADS = 512  # the same where there are many rows
_RESIDENT = 1024  # threads that a compute unit should hold; with more, each has too few registers
_READS = 4  # steps along a row whose items a thread reads before it stores any result
_BUSY = 256  # threads for each compute unit; where there are fewer, more threads share a row
_NOWHERE = Index((), -1)  # where column sums are stored, for which no input is overwritten
_ENOUGH = 0.9  # share of the threads of a row that should have an item at every step


class RowLoops(LoopNest):
    """Row after row, each in as many passes as its reductions need.

    On a GPU, a workgroup may also keep column sums, over a part of the rows that it goes over.
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
        # For each node, how many passes must be over before it can be computed.
        self._levels: dict[Node, int] = {}
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
        outer = self.joined(self._rows)
        if self.gpu:
            self.take_lanes(self._inner)
            self._threads, together = self._divide(rows)
            part_rows = self._part_rows() or together  # the rows of a group
            kernel.grid, kernel.group = (rows // part_rows,), (self._threads * together,)
            if self._threads > _FEW_THREADS:
                kernel.resident = max(1, _RESIDENT // self._threads)
            ahead = WORKGROUP * part_rows + Var("again") if part_rows > together else WORKGROUP * together
            emitter.bodies[0] = [Let("row", ahead + THREAD // self._threads)]
            self._sum_names = {at: emitter.name("tally") for at in self._column_sums}
        emitter.bodies[0] += self.unpack("row", outer, 0)
        passes = 1 + max(level - self._reduces_row(node) for node, level in self._levels.items())
        needed = [self._needed(stage) for stage in range(passes)]
        for stage in range(passes):
            emitter.stage = stage
            keep = self._kept(needed, stage)
            self._pass(stage, keep)
        reduced = [
            (at, self.emitter.at_number(node, self._row), self._row)
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
            kernel.body.insert(0, Let("rank", THREAD % self._threads))
        else:
            part = self.chunk(rows, self.tasks(rows, rows * columns))
            kernel.body = [*part, For("row", Var("begin"), Var("end"), Const(1), emitter.bodies[0])]
        return self.lowered()

    def _part_rows(self) -> int:
        """The rows of each part of a column sum; 0 if there is none."""
        return next((node.inputs[0].shape[1] for node in self._column_sums.values()), 0)

    def _with_column_sums(self, body: list[Statement], part_rows: int, together: int) -> list[Statement]:
        """What is done to a row, for all rows of a part, then what becomes of the column sums."""
        length = max(2, self._own_items())
        result: list[Statement] = []
        for at, node in self._column_sums.items():
            kind = Type(computed_dtype(node), length)
            result.append(Declare(self._sum_names[at], Identity(kind, node.primitive.name)))
        if part_rows > together:
            # Threads that share a row exchange values in local memory, which the next row uses, too.
            waiting = [Barrier()] if any(map(self._reduces_row, self.group.nodes)) else []
            body = [For("again", Const(0), Const(part_rows), Const(together), [*body, *waiting], 1)]
        result += body
        return result + (self._store_sums() if together == 1 else self._join_sums(together))

    def _store_sums(self) -> list[Statement]:
        """Store the column sums of a workgroup that goes over one row after another."""
        stores: list[Statement] = []
        for at, name in self._sum_names.items():
            part, kind = self.emitter.name(), Type("float32", self.lanes)
            place = WORKGROUP * self.group.columns + Var("column")
            stores += [
                Let(part, Load(kind, name, kind.dtype, Var("slot"), int(self.lanes > 1))),
                Store(Var(part, kind), f"out{at}", kind.dtype, place, self.lanes),
            ]
        return [self._step_loop(Var("rank") * self.lanes, self._steps(), stores)]

    def _join_sums(self, together: int) -> list[Statement]:
        """Add up, through local memory, the column sums of a workgroup that has several rows at a time."""
        emitter, lanes, threads, columns = self.emitter, self.lanes, self._threads, self.group.columns
        length, group = self._own_items(), threads * together
        result: list[Statement] = []
        sums: list[Statement] = []
        # Item `slot` of thread THREAD is number `slot * group + THREAD`, so that neighbours write neighbours.
        number, column, slot = Var("spot"), Var("column"), Var("slot")
        spot = number // threads * group + number % threads
        first = number % threads * lanes + number // (threads * lanes) * (threads * lanes)
        for at, name in self._sum_names.items():
            array, item, total, part = (emitter.name(kind) for kind in ("across", "item", "sum", "part"))
            operation, kind = self._column_sums[at].primitive.name, Type("float32")
            emitter.kernel.arrays.append(LocalArray(array, "float32", length * group))
            shared: list[Statement] = [
                Let(item, Load(kind, name, "float32", slot)),
                Store(Var(item, kind), array, "float32", slot * group + THREAD),
            ]
            result.append(For("slot", Const(0), Const(length), Const(1), shared, length))
            added: list[Statement] = [
                Let(part, Load(kind, array, "float32", spot + Var("other") * threads)),
                Accumulate(Var(total, kind), operation, Var(part, kind), kind),
            ]
            store = Store(Var(total, kind), f"out{at}", "float32", WORKGROUP * columns + column)
            sums += [
                Declare(total, Identity(kind, operation)),
                For("other", Const(0), Const(together), Const(1), added, together),
                If(column < columns, [store]) if columns % (threads * length) else store,
            ]
        whole = [Let("column", first + number // threads % lanes), *sums]
        return [*result, Barrier(), For("spot", THREAD, Const(length * threads), Const(group), whole)]

    def _divide(self, rows: int) -> tuple[int, int]:
        """How many threads share a row, and how many rows a group has."""
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

        enough = (threads for threads in (32, 16, 8) if busy(threads) >= _ENOUGH)
        return next(enough, max((32, 16, 8), key=busy))

    def _by_first_thread(self, stores: list[Statement], outputs: list[int]) -> list[Statement]:
        """Stores of what a row has one of, by its first thread."""
        over = self.may_alias()
        # Where such a value is written over another, all threads must have read that.
        waiting: list[Statement] = [Barrier(device_memory=True)] if any(over[at] for at in outputs) else []
        return [*waiting, If(Var("rank").eq(0), stores)]

    def _item(self, node: Node) -> Value:
        """A value before any reduction, at the item that the loops are at."""
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
        """What takes long to compute and a later pass needs again: it stays in memory of the group."""
        known = {node for node, _ in self.emitter.kept}
        again = needed[stage].intersection(set().union(*needed[stage + 1 :])) - known
        if not self.gpu:
            room = self.local_bytes // (4 * self.group.columns)
            costly = (node for node in self.group.nodes if node in again and node.primitive.costly)
            kept = [node for node in costly if self._is_whole(node) and computed_dtype(node) == "float32"]
        elif self._fits_registers():
            room, kept = _KEPT_ITEMS // self._own_items(), self._worth_registers(again)
        else:
            return []
        return kept[: max(0, room - len(known))]

    def _worth_registers(self, again: set[Node]) -> list[Node]:
        """What would be read from memory or computed at length again."""
        tables = {node.inputs[0] for node in self.group.nodes if node.primitive is GATHER}
        inputs = [node for node in self.group.inputs if node in again and node not in tables]
        inside = [
            node
            for node in self.group.nodes
            if node in again and (self._is_costly(node.primitive) or node.primitive is GATHER)
        ]
        whole = self.count(self._rows) * self.group.columns
        return [node for node in (*inputs, *inside) if node.size >= whole]

    def _kept_dtype(self, node: Node) -> str:
        """How a value is kept: float16 and bfloat16 as they were read, where two make a word."""
        as_read = self.gpu and self.lanes > 1 and node in self.group.inputs
        return str(node.dtype) if as_read and node.dtype in HALF_PRECISION else computed_dtype(node)

    def _is_costly(self, primitive: Primitive) -> bool:
        """Whether computing again takes longer than registers for the value are worth."""
        return primitive.costly and not (primitive is _EXP and self.emitter.kernel.quick)

    def _steps(self) -> int:
        """How often a thread comes to a part of its row, in one pass."""
        return -(-self.group.columns // (self._threads * self.lanes))

    def _own_items(self) -> int:
        """The items of a row that a thread has, or would have beyond its end."""
        return self._steps() * self.lanes

    def _fits_registers(self) -> bool:
        """Whether a thread's part of a row is so short that loops over it are laid out."""
        return self._own_items() <= _ITEMS

    def _pass(self, stage: int, keep: list[Node]) -> None:
        emitter = self.emitter
        reductions, outputs, column_sums = self._results_of(stage)
        if not reductions and not outputs and not column_sums:
            return
        if self.gpu:
            known = dict.fromkeys(array for array, _, _ in emitter.kept.values())
            emitter.bodies[0] += [Forget(array, self._own_items()) for array in known]
        partials = Partials(emitter, self._threads if self.gpu else 0)
        kept: dict[tuple[Node, Place], tuple[str, Index, str]] = {}
        arrays = {node: emitter.name("kept") for node in keep}
        place = variable("slot") if self.gpu else self._column
        for node, name in arrays.items():
            if self.gpu:
                length = self._own_items()
                emitter.bodies[0].append(RegisterArray(name, self._kept_dtype(node), length))
            else:
                emitter.kernel.arrays.append(LocalArray(name, computed_dtype(node), self.group.columns))

        def body() -> None:
            for node in reductions:
                partials.take_in(node, emitter.widened(self._item(node.inputs[0]), emitter.lanes))
            for at, node in column_sums:
                value = self._item(node.inputs[0])
                kind = Type(value.type.dtype, emitter.lanes)
                target, operation = Var(self._sum_names[at], kind), node.primitive.name
                emitter.bodies[1].append(Accumulate(target, operation, value.var, kind, Var("slot")))
                self.note_store(at, _NOWHERE)
            results = [(at, self._item(node), self._number) for at, node in outputs]
            for key, value in emitter.computed(keep):
                wide = emitter.widened(value, emitter.lanes)
                spot, _, _ = emitter.index(place)
                stored = self._kept_dtype(key[0])
                emitter.bodies[1].append(Store(wide.var, arrays[key[0]], stored, spot, width=emitter.lanes))
                kept[key] = (arrays[key[0]], place, stored)
            self.store(results)

        loops = self._loops(body, partials, reductions)
        emitter.bodies[0] += [*partials.start(), *loops]
        for node in reductions:
            result = partials.reduce(node)
            emitter.given[node] = Value(Var(result, Type(computed_dtype(node))), 0)
        emitter.kept.update(kept)

    def _loops(
        self, body: Callable[[], None], partials: Partials, reductions: Sequence[Node]
    ) -> list[Statement]:
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
            loop = For(name, Const(0), Const(turns), Const(1), [part for part, _ in blocked], trips=turns)
            blocked = [sums.blocked(loop, max(each for _, each in blocked))]
        return [loop for loop, _ in blocked]

    def _flat_loops(self, body: Callable[[], None], partials: Partials) -> list[Statement]:
        """Loops of a CPU over the numbers of a row's items, which several variables tell the place of.

        So they are added up in the order of any row that is as long. Vectors lie inside the last variable.
        """
        columns, last = self.group.columns, self._inner[-1]
        self.emitter.variables.lengths["column"] = columns
        lanes = self.lanes if self.count([last]) % self.lanes == 0 else 1
        inside = self.unpack("column", self._inner, 1)
        loops = partials.loops("column", columns, lanes, body, inside, last)
        return [partials.sums.blocked(loop)[0] for loop in loops]

    def _loops_of_threads(self, body: Callable[[], None]) -> list[For]:
        emitter, columns, lanes = self.emitter, self.group.columns, self.lanes
        inside = self.unpack("column", self._inner, 1)
        emitter.depth_of["slot"], emitter.variables.lengths["slot"] = 1, columns
        emitter.lane_steps["slot"] = 1
        body()
        step = self._threads * lanes
        if self._fits_registers():
            return [self._step_loop(Var("rank") * lanes, self._steps(), [*inside, *emitter.leave()])]
        read = emitter.computed([node for node in self.group.inputs if node.size >= columns])
        statements = [*inside, *emitter.leave()]
        start = Var("rank") * lanes
        if not any(isinstance(statement, Store) for statement in statements):
            trips = self._steps()
            return [For("column", start, Const(columns), Const(step), statements, _READS, trips)]
        # No compiler reads before a write that might be to the same place, so what is written comes last.
        arrays = {key: (emitter.name("read"), variable("slot"), self._kept_dtype(key[0])) for key, _ in read}
        registers = [RegisterArray(name, dtype, _READS * lanes) for name, _, dtype in arrays.values()]
        for key, (name, _, dtype) in arrays.items():
            value = emitter.value(*key)
            place, _, _ = emitter.index(variable("slot"))
            emitter.bodies[1].append(Store(value.var, name, dtype, place, width=lanes))
        reads = self._step_loop(Var("start"), _READS, [*inside, *emitter.leave()])
        emitter.kept.update(arrays)
        body()
        rest = self._step_loop(Var("start"), _READS, [*inside, *emitter.leave()])
        for key in arrays:
            del emitter.kept[key]
        parts: list[Statement] = [*registers, reads, rest]
        turns = -(-self._steps() // _READS)
        return [For("start", start, Const(columns), Const(step * _READS), parts, 1, turns)]

    def _step_loop(self, start: Expr, turns: int, statements: list[Statement]) -> For:
        """So many parts of a row one after the other, laid out."""
        columns, step = self.group.columns, self._threads * self.lanes
        if columns % (turns * step):
            statements = [If(Var("column") < columns, statements)]
        turn = Var("turn")
        counts = [Let("column", start + turn * step), Let("slot", turn * self.lanes)]
        return For("turn", Const(0), Const(turns), Const(1), [*counts, *statements], turns)
