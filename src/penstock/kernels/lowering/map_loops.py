"""The loops of a map group."""

from __future__ import annotations

from penstock.fusion.index import flat
from penstock.kernels.ir.expressions import THREAD, WORKGROUP, Const, Expr, Type, Var
from penstock.kernels.ir.statements import For, If, Let, Statement
from penstock.kernels.lowering.emitter import merged
from penstock.kernels.lowering.loop_nest import GROUP_THREADS, LoopNest, Lowered

_SECTOR = 32  # bytes that a GPU reads or writes, even of one item
_NEIGHBOURS = 32  # threads that read and write together


class MapLoops(LoopNest):
    """Every item by itself: a thread of a GPU computes a few, a thread of a CPU a part of an axis."""

    def space(self) -> None:
        self._shape = max((node.shape for node in self.group.outputs), key=len)
        self._names, self._place = self.axes("a", self._shape)
        self._number = flat(self._place, self._shape)

    def _body(self) -> None:
        results = []
        for at, node in enumerate(self.group.outputs):
            if node.shape == self._shape:
                value = self.emitter.value(node, self._place)
            else:
                value = self.emitter.at_number(node, self._number)
            results.append((at, value, self._number))
        self.store(results)

    def build(self) -> Lowered:
        emitter, kernel = self.emitter, self.emitter.kernel
        names = self.joined(self._names)
        size = self.count(names)
        if self.gpu:
            return self._by_threads(names)
        outer, inner = names[:-1], names[-1:]
        rows, length = self.count(outer), self.count(inner)
        if not inner:
            self._body()
            kernel.body = [*emitter.bodies[0], *emitter.leave()]
            return self.lowered()
        if rows == 1:
            kernel.body = self.chunk(length, self.tasks(length, size), 8)
            loops = self.vector_loops(
                inner[0], Var("begin"), Var("end"), length % self.lanes == 0, self._body
            )
            kernel.body += [*emitter.bodies[0], *loops]
            return self.lowered()
        kernel.body = self.chunk(rows, self.tasks(rows, size))
        inside = self.unpack("row", outer, 0)
        loops = self.vector_loops(inner[0], 0, length, length % self.lanes == 0, self._body)
        body = [*inside, *emitter.bodies[0], *loops]
        kernel.body.append(For("row", Var("begin"), Var("end"), Const(1), body))
        return self.lowered()

    def _by_threads(self, names: list[str]) -> Lowered:
        emitter, kernel = self.emitter, self.emitter.kernel
        size = self.count(names) // self.lanes
        self.take_lanes(names)
        kernel.grid, kernel.group = (-(-size // GROUP_THREADS),), (GROUP_THREADS,)
        kernel.body = [Let("item", WORKGROUP * GROUP_THREADS + THREAD)]
        emitter.depth_of.update(dict.fromkeys(names, 1))
        self._body()
        body = [*self._places(self._order(names)), *emitter.bodies[0], *emitter.leave()]
        # Without a sign, because the last group may reach beyond what an int can hold.
        inside = Var("item").cast("uint32") < Const(size, Type("uint32"))
        kernel.body += [If(inside, body)] if size % GROUP_THREADS else body
        return self.lowered()

    def _places(self, order: list[str]) -> list[Statement]:
        """The variables of a thread; the last in order differs between neighbouring threads."""
        result: list[Statement] = []
        stride = 1
        for name in reversed(order):
            wide = self.emitter.lane_steps.get(name, 0) * self.lanes or 1
            length = self.count([name]) // wide
            value: Expr = Var("item") if stride == 1 else Var("item") // stride
            value = value if name == order[0] else value % length
            result.append(Let(name, value if wide == 1 else value * wide))
            stride *= length
        return result

    def _order(self, names: list[str]) -> list[str]:
        """The variables, so that neighbouring threads read and write neighbours as far as they can.

        A thread by itself has neighbours along the last one anyway.
        """
        accesses = [(self._number, node) for node in self.group.outputs]
        for number, places in self.emitter.loads.items():
            accesses += [(index, self.group.inputs[number]) for _, index in places]
        factors = [(merged(index, self.emitter.merges), node.dtype.itemsize) for index, node in accesses]

        def traffic(name: str) -> float:
            """Bytes for an item, if neighbouring threads differ in this variable."""
            total = 0.0
            for index, itemsize in factors:
                here, last = index.factor(name), index.factor(names[-1])
                if here not in (0, 1):
                    total += max(itemsize, _SECTOR / self.lanes) if last == 1 else _SECTOR
                elif here or last:
                    total += itemsize if here or last == 1 else _SECTOR
            return total

        best = min(reversed(names), key=traffic, default="")
        if not best or self.count([best]) < _NEIGHBOURS:
            return names
        return [*(name for name in names if name != best), best]
