"""The loops of a row group."""

from __future__ import annotations

from collections.abc import Callable

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
    BlockReduce,
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
from penstock.kernels.lowering.blocks import Sums
from penstock.kernels.lowering.loop_nest import LoopNest, Lowered
from penstock.kernels.lowering.scopes import Value, computed_dtype

# Of a GPU. A thread has so many items of a row, if there are enough threads, and can keep them in registers.
_ITEMS = 32
_KEPT_ITEMS = 96  # that a thread keeps in registers in all
_EXP = PRIMITIVES["exp"]
_WARP = 32  # threads that run in step: those of a short row are of one
_FEW_THREADS = 128  # of a group, if its rows are short
_MOST_THREADS = 1024  # that share a row
_LONG_THREADS = 512  # the same where there are many rows
_RESIDENT = 1024  # threads that a unit should have room for: with more, they have too few registers
_READS = 4  # turns of which a thread reads all items at once, where it writes none
_BUSY = 256  # threads for each unit; with fewer, more of them share a row
_NOWHERE = Index((), -1)  # where tallies are written, which are over no input
_ENOUGH = 0.9  # of the threads of a row have an item each time


class RowLoops(LoopNest):
    """Row after row, each in as many passes as its reductions need."""

    def space(self) -> None:
        self._tallies = {at: node for at, node in enumerate(self.group.outputs) if is_column_part(node)}
        folds = (node for node in self.group.nodes if self._folds(node))
        first = next(folds, None) or next(iter(self._tallies.values()))
        source, axes = first.inputs[0], first.attributes["axes"]
        if not self._folds(first):
            axes = tuple(range(2, source.ndim))
        self._rows, self._columns, self._row, self._column, _ = self.reduction_axes(source.shape, axes)
        self._number = self._row * self.group.columns + self._column
        self._levels = self._stages()

    def _stages(self) -> dict[Node, int]:
        """How many passes must be over before a node can be computed."""
        level: dict[Node, int] = {}
        for node in self.group.nodes:
            before = max((level.get(parent, 0) for parent in node.inputs), default=0)
            level[node] = before + self._folds(node)
        return level

    def _folds(self, node: Node) -> bool:
        """Whether a node is a reduction of rows."""
        return node.primitive.kind is Kind.REDUCTION and node not in self._tallies.values()

    def _whole(self, node: Node) -> bool:
        return node.size == self.count(self._rows) * self.group.columns

    def write(self) -> Lowered:
        scopes, form = self.scopes, self.scopes.form
        rows, columns = self.count(self._rows), self.group.columns
        self._inner = self.joined(self._columns)
        outer = self.joined(self._rows)
        if self.gpu:
            self.take_lanes(self._inner)
            self._threads, together = self._share(rows)
            stretch = self._stretch() or together  # the rows of a group
            form.grid, form.group = (rows // stretch,), (self._threads * together,)
            if self._threads > _FEW_THREADS:
                form.resident = max(1, _RESIDENT // self._threads)
            ahead = WORKGROUP * stretch + Var("again") if stretch > together else WORKGROUP * together
            scopes.bodies[0] = [Let("row", ahead + THREAD // self._threads)]
            self._sums = {at: scopes.name("tally") for at in self._tallies}
        scopes.bodies[0] += self.unpack("row", outer, 0)
        passes = 1 + max(level - self._folds(node) for node, level in self._levels.items())
        needed = [self._needed(stage) for stage in range(passes)]
        for stage in range(passes):
            scopes.stage = stage
            keep = self._kept(needed, stage)
            self._pass(stage, keep)
        reduced = [
            (at, self.scopes.at_number(node, self._row), self._row)
            for at, node in enumerate(self.group.outputs)
            if not self._whole(node) and at not in self._tallies
        ]
        before = len(scopes.bodies[0])
        self.store(reduced)
        if self.gpu:
            form.body = scopes.bodies[0]
            if reduced:
                form.body[before:] = self._by_one(form.body[before:], [at for at, _, _ in reduced])
            if self._tallies:
                form.body = self._with_tallies(form.body, stretch, together)
            form.body.insert(0, Let("rank", THREAD % self._threads))
        else:
            part = self.chunk(rows, self.tasks(rows, rows * columns))
            form.body = [*part, For("row", Var("begin"), Var("end"), Const(1), scopes.bodies[0])]
        return self.lowered()

    def _levels_in_all(self) -> int:
        """How many reductions of rows need one another."""
        return max(self._levels.values())

    def _stretch(self) -> int:
        """The rows that tallies have in each part; 0 if there are none."""
        return next((node.inputs[0].shape[1] for node in self._tallies.values()), 0)

    def _with_tallies(self, body: list[Statement], stretch: int, together: int) -> list[Statement]:
        """What is done to rows, for all rows of a stretch, then what was added up on the way."""
        length = max(2, self._turns() * self.lanes)
        result: list[Statement] = []
        for at, node in self._tallies.items():
            kind = Type(computed_dtype(node), length)
            result.append(Declare(self._sums[at], Identity(kind, node.primitive.name)))
        if stretch > together:
            # Threads that share a row speak to each other in memory that the next row uses again.
            waiting = [Barrier()] if any(map(self._folds, self.group.nodes)) else []
            body = [For("again", Const(0), Const(stretch), Const(together), [*body, *waiting], 1)]
        result += body
        return result + (self._alone() if together == 1 else self._across(together))

    def _alone(self) -> list[Statement]:
        """Tallies of a group that goes over one row after another."""
        stores: list[Statement] = []
        for at, name in self._sums.items():
            part, kind = self.scopes.name(), Type("float32", self.lanes)
            place = WORKGROUP * self.group.columns + Var("column")
            stores += [
                Let(part, Load(kind, name, kind.dtype, Var("slot"), int(self.lanes > 1))),
                Store(Var(part, kind), f"out{at}", kind.dtype, place, self.lanes),
            ]
        return [self._turns_loop(Var("rank") * self.lanes, self._turns(), stores)]

    def _across(self, together: int) -> list[Statement]:
        """Tallies of a group that has several rows at a time: those of all rows, through its memory."""
        scopes, lanes, threads, columns = self.scopes, self.lanes, self._threads, self.group.columns
        length, group = self._turns() * lanes, threads * together
        result: list[Statement] = []
        sums: list[Statement] = []
        # Item `slot` of thread THREAD is number `slot * group + THREAD`, so that neighbours write neighbours.
        number, column, slot = Var("spot"), Var("column"), Var("slot")
        spot = number // threads * group + number % threads
        first = number % threads * lanes + number // (threads * lanes) * (threads * lanes)
        for at, name in self._sums.items():
            array, item, total, part = (scopes.name(kind) for kind in ("across", "item", "sum", "part"))
            operation, kind = self._tallies[at].primitive.name, Type("float32")
            scopes.form.arrays.append(LocalArray(array, "float32", length * group))
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

    def _share(self, rows: int) -> tuple[int, int]:
        """How many threads share a row, and how many rows a group has."""
        most = min(_MOST_THREADS, self.max_threads)
        vectors = self.group.columns // self.lanes
        if not self._levels_in_all():
            return min(most, _LONG_THREADS, 1 << (vectors - 1).bit_length()), 1
        threads = min(most, _LONG_THREADS, 1 << (-(-self.group.columns // _ITEMS) - 1).bit_length())
        if threads <= _WARP:
            threads = self._fitting(vectors)
        while self._tallies and -(-vectors // threads) * self.lanes > _ITEMS:
            threads *= 2  # they are in registers
        while 2 * threads <= min(most, vectors) and rows * threads < _BUSY * self.units:
            threads *= 2
        together = max(1, min(_FEW_THREADS, most) // threads)
        while (self._stretch() or rows) % together:
            together //= 2
        if threads * together < _WARP:  # threads of a warp speak to each other, so all must be there
            threads, together = _WARP, 1
        return threads, together

    @staticmethod
    def _fitting(vectors: int) -> int:
        """The most threads of a warp that a row keeps busy."""

        def busy(threads: int) -> float:
            return vectors / (-(-vectors // threads) * threads)

        enough = (threads for threads in (32, 16, 8) if busy(threads) >= _ENOUGH)
        return next(enough, max((32, 16, 8), key=busy))

    def _by_one(self, stores: list[Statement], outputs: list[int]) -> list[Statement]:
        """Stores of what a row has one of, by its first thread."""
        over = self.may_alias()
        # Where such a value is written over another, all threads must have read that.
        waiting: list[Statement] = [Barrier(device_memory=True)] if any(over[at] for at in outputs) else []
        return [*waiting, If(Var("rank").eq(0), stores)]

    def _item(self, node: Node) -> Value:
        """A value before any reduction, at the item that the loops are at."""
        return self.scopes.at_number(node, self._number)

    def _roots(self, stage: int) -> tuple[list[Node], list[tuple[int, Node]], list[tuple[int, Node]]]:
        """The reductions that a pass computes, the outputs that it writes, and what it adds to tallies."""
        reductions = [
            node for node in self.group.nodes if self._folds(node) and self._levels[node] == stage + 1
        ]
        outputs = [
            (at, node)
            for at, node in enumerate(self.group.outputs)
            if self._whole(node) and self._levels[node] == stage
        ]
        tallies = [(at, node) for at, node in self._tallies.items() if self._levels[node] == stage]
        return reductions, outputs, tallies

    def _needed(self, stage: int) -> set[Node]:
        """The nodes before any reduction that a pass computes, and the inputs that it reads."""
        reductions, outputs, tallies = self._roots(stage)
        stack = [node.inputs[0] for node in (*reductions, *(node for _, node in tallies))]
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
        later = set().union(*needed[stage + 1 :])
        if self.gpu:
            return self._kept_by_threads(needed[stage] & later)
        room = self.local_bytes // (4 * self.group.columns)
        known = {node for node, _ in self.scopes.kept}
        costly = [
            node
            for node in self.group.nodes
            if node in needed[stage] & later
            and node.primitive.costly
            and node not in known
            and self._whole(node)
            and computed_dtype(node) == "float32"
        ]
        return costly[: max(0, room - len(known))]

    def _kept_by_threads(self, again: set[Node]) -> list[Node]:
        """What stays in registers: what would be read from memory or computed at length again."""
        if not self._in_registers():
            return []
        known = {node for node, _ in self.scopes.kept}
        tables = {node.inputs[0] for node in self.group.nodes if node.primitive is GATHER}
        inputs = [node for node in self.group.inputs if node in again and node not in tables]
        inside = [
            node
            for node in self.group.nodes
            if node in again and (self._costly(node.primitive) or node.primitive is GATHER)
        ]
        whole = self.count(self._rows) * self.group.columns
        kept = [node for node in (*inputs, *inside) if node.size >= whole and node not in known]
        room = _KEPT_ITEMS // (self._turns() * self.lanes)
        return kept[: max(0, room - len(known))]

    def _kept_dtype(self, node: Node) -> str:
        """How a value is kept: float16 and bfloat16 as they were read, where two make a word."""
        as_read = self.gpu and self.lanes > 1 and node in self.group.inputs
        return str(node.dtype) if as_read and node.dtype in HALF_PRECISION else computed_dtype(node)

    def _costly(self, primitive: Primitive) -> bool:
        """Whether computing again takes longer than registers for the value are worth."""
        return primitive.costly and not (primitive is _EXP and self.scopes.form.quick)

    def _turns(self) -> int:
        """How often a thread comes to a part of its row, in one pass."""
        return -(-self.group.columns // (self._threads * self.lanes))

    def _in_registers(self) -> bool:
        """Whether a thread's part of a row is so short that loops over it are laid out."""
        return self._turns() * self.lanes <= _ITEMS

    def _pass(self, stage: int, keep: list[Node]) -> None:
        scopes = self.scopes
        reductions, outputs, tallies = self._roots(stage)
        if not reductions and not outputs and not tallies:
            return
        if self.gpu:
            known = dict.fromkeys(array for array, _, _ in scopes.kept.values())
            scopes.bodies[0] += [Forget(array, self._turns() * self.lanes) for array in known]
        lanes_of: dict[Node, list[tuple[str, int]]] = {node: [] for node in reductions}
        sums = Sums(scopes.name)
        kept: dict[tuple[Node, Place], tuple[str, Index, str]] = {}
        arrays = {node: scopes.name("kept") for node in keep}
        place = variable("slot") if self.gpu else self._column
        for node, name in arrays.items():
            if self.gpu:
                length = self._turns() * self.lanes
                scopes.bodies[0].append(RegisterArray(name, self._kept_dtype(node), length))
            else:
                scopes.form.arrays.append(LocalArray(name, computed_dtype(node), self.group.columns))

        def body() -> None:
            for node in reductions:
                wide = scopes.widened(self._item(node.inputs[0]), scopes.lanes)
                known = {lanes: name for name, lanes in lanes_of[node]}
                name = known.get(scopes.lanes) or scopes.name("sum")
                if scopes.lanes not in known:
                    lanes_of[node].append((name, scopes.lanes))
                    sums.add(name, Type(computed_dtype(node), scopes.lanes), node.primitive.name)
                kind = Type(wide.type.dtype, scopes.lanes)
                scopes.bodies[1].append(Accumulate(Var(name, kind), node.primitive.name, wide.var, kind))
            for at, node in tallies:
                value = self._item(node.inputs[0])
                kind = Type(value.type.dtype, scopes.lanes)
                target, operation = Var(self._sums[at], kind), node.primitive.name
                scopes.bodies[1].append(Accumulate(target, operation, value.var, kind, Var("slot")))
                self.note_store(at, _NOWHERE)
            results = [(at, self._item(node), self._number) for at, node in outputs]
            for key, value in scopes.computed(keep):
                wide = scopes.widened(value, scopes.lanes)
                spot, _, _ = scopes.index(place)
                stored = self._kept_dtype(key[0])
                scopes.bodies[1].append(Store(wide.var, arrays[key[0]], stored, spot, width=scopes.lanes))
                kept[key] = (arrays[key[0]], place, stored)
            self.store(results)

        loops = self._loops(body, sums)
        scopes.bodies[0] += [sums.variable(name) for node in reductions for name, _ in lanes_of[node]]
        scopes.bodies[0] += loops
        for node in reductions:
            self._fold(node, [(sums.last(name), lanes) for name, lanes in lanes_of[node]])
        scopes.kept.update(kept)

    def _fold(self, node: Node, parts: list[tuple[str, int]]) -> None:
        """One value from the sums of all lanes and threads."""
        scopes, operation, dtype = self.scopes, node.primitive.name, computed_dtype(node)
        *vectors, (name, lanes) = parts
        for other, wide in vectors:
            part = scopes.name()
            scopes.bodies[0] += [
                BlockReduce(part, operation, Var(other, Type(dtype, wide)), None),
                Accumulate(Var(name, Type(dtype)), operation, Var(part, Type(dtype)), Type(dtype)),
            ]
        result, array = scopes.name(), None
        if self.gpu:
            array = scopes.name("threads")
            stored = "int32" if dtype == "bool" else dtype
            scopes.form.arrays.append(LocalArray(array, stored, scopes.form.group[0]))
        threads = Const(self._threads if self.gpu else 1)
        total = Var(name, Type(dtype, lanes))
        scopes.bodies[0].append(BlockReduce(result, operation, total, array, threads))
        scopes.given[node] = Value(Var(result, Type(dtype)), 0)

    def _loops(self, body: Callable[[], None], sums: Sums) -> list[Statement]:
        scopes = self.scopes
        if self.gpu:
            loops = self._loops_of_threads(body)
            return [sums.blocked(loop, _READS if loop.name == "start" else 1)[0] for loop in loops]
        if not self._inner:
            scopes.lanes, scopes.lane_steps = 1, {}
            body()
            return scopes.leave()
        *around, last = self._inner
        for name in around:
            scopes.depth_of[name] = 1
        length = self.count([last])
        parts = self.vector_loops(last, 0, length, length % self.lanes == 0, body)
        blocked = [sums.blocked(part) for part in parts]
        for name in reversed(around):
            turns = self.count([name])
            loop = For(name, Const(0), Const(turns), Const(1), [part for part, _ in blocked], trips=turns)
            blocked = [sums.blocked(loop, max(each for _, each in blocked))]
        return [loop for loop, _ in blocked]

    def _loops_of_threads(self, body: Callable[[], None]) -> list[For]:
        scopes, columns, lanes = self.scopes, self.group.columns, self.lanes
        inside = self.unpack("column", self._inner, 1)
        scopes.depth_of["slot"], scopes.variables.lengths["slot"] = 1, columns
        scopes.lane_steps["slot"] = 1
        body()
        step = self._threads * lanes
        if self._in_registers():
            return [self._turns_loop(Var("rank") * lanes, self._turns(), [*inside, *scopes.leave()])]
        read = scopes.computed([node for node in self.group.inputs if node.size >= columns])
        statements = [*inside, *scopes.leave()]
        start = Var("rank") * lanes
        if not any(isinstance(statement, Store) for statement in statements):
            trips = self._turns()
            return [For("column", start, Const(columns), Const(step), statements, _READS, trips)]
        # No compiler reads before a write that might be to the same place, so what is written comes last.
        arrays = {key: (scopes.name("read"), variable("slot"), self._kept_dtype(key[0])) for key, _ in read}
        registers = [RegisterArray(name, dtype, _READS * lanes) for name, _, dtype in arrays.values()]
        for key, (name, _, dtype) in arrays.items():
            value = scopes.value(*key)
            place, _, _ = scopes.index(variable("slot"))
            scopes.bodies[1].append(Store(value.var, name, dtype, place, width=lanes))
        reads = self._turns_loop(Var("start"), _READS, [*inside, *scopes.leave()])
        scopes.kept.update(arrays)
        body()
        rest = self._turns_loop(Var("start"), _READS, [*inside, *scopes.leave()])
        for key in arrays:
            del scopes.kept[key]
        parts: list[Statement] = [*registers, reads, rest]
        turns = -(-self._turns() // _READS)
        return [For("start", start, Const(columns), Const(step * _READS), parts, 1, turns)]

    def _turns_loop(self, start: Expr, turns: int, statements: list[Statement]) -> For:
        """So many parts of a row one after the other, laid out."""
        columns, step = self.group.columns, self._threads * self.lanes
        if columns % (turns * step):
            statements = [If(Var("column") < columns, statements)]
        turn = Var("turn")
        counts = [Let("column", start + turn * step), Let("slot", turn * self.lanes)]
        return For("turn", Const(0), Const(turns), Const(1), [*counts, *statements], turns)
