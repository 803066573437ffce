"""The stores of column sums that the workgroups of a row kernel hold in registers."""

from __future__ import annotations

from abc import abstractmethod

from penstock.graph.node import Node
from penstock.kernels import ir
from penstock.kernels.lowering.loop_nest import LoopNest


class SumsOfRows(LoopNest):
    """The part of a GPU's row loops that stores column sums over the rows of a workgroup."""

    _column_sums: dict[int, Node]  # by their number among the outputs
    _sum_names: dict[int, str]
    _threads: int  # that share a row

    @abstractmethod
    def _steps(self) -> int:
        """How many steps along its row a thread takes in a pass."""

    @abstractmethod
    def _own_items(self) -> int:
        """The items of a row that a thread has, including those past its end."""

    @abstractmethod
    def _step_loop(self, start: ir.Expr, turns: int, statements: list[ir.Statement]) -> ir.For:
        """`turns` steps of a thread along its row, unrolled."""

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
