"""The loops of a map group."""

from __future__ import annotations

from itertools import pairwise

from penstock.fusion.index import Index, flat, variable
from penstock.kernels import ir
from penstock.kernels.lowering.blocks import LANES
from penstock.kernels.lowering.loop_nest import GROUP_THREADS, LoopNest, Lowered, unflattened
from penstock.kernels.lowering.values import LanesImpossible, Value, merged

_SECTOR = 32  # bytes that a GPU reads or writes at least
_NEIGHBOURS = 32  # threads whose accesses are combined


class MapLoops(LoopNest):
    """Elementwise work: a thread of a GPU computes a few items, a task of a CPU a part of an axis."""

    def space(self) -> None:
        self._shape = max((node.shape for node in self.group.outputs), key=len)
        self._names, self._place = self.axes("a", self._shape)
        self._number = flat(self._place, self._shape)

    def axis_lengths(self) -> dict[str, int]:
        """The lengths of the axes, by their variables, after merging."""
        return {name: self._lengths[name] for name in self.joined(self._names)}

    def _results(self) -> list[tuple[int, Value, Index]]:
        """Compute the items of all outputs: their numbers, values and indices."""
        results = []
        for at, node in enumerate(self.group.outputs):
            if node.shape == self._shape:
                value = self.emitter.value(node, self._place)
            else:
                value = self.emitter.at_number(node, self._number)
            results.append((at, value, self._number))
        return results

    def _body(self) -> None:
        self.store(self._results())

    def build(self) -> Lowered:
        emitter, kernel = self.emitter, self.emitter.kernel
        names = self.joined(self._names)
        if self.gpu:
            return self._by_threads(names)
        if not names:
            self._body()
            kernel.body = [*emitter.bodies[0], *emitter.leave()]
            return self.lowered()
        together = self.together(names)
        if len(together) > 1 and self.lanes > 1 and not self.borders:
            return self._by_short_axes(names[: -len(together)], together)
        *outer, last = names
        rows, length = self.count(outer), self.count([last])
        exact, begin, end = length % self.lanes == 0, ir.Var("begin"), ir.Var("end")
        if rows == 1:
            if self.borders:
                raise LanesImpossible  # tasks divide the axis elsewhere
            kernel.body = self.chunk(length, self.tasks(length, length), max(self.lanes, LANES))
            loops = self.vector_loops(last, begin, end, exact, self._body)
            kernel.body += [*emitter.bodies[0], *loops]
            return self.lowered()
        self.check_lanes(length)
        kernel.body = self.chunk(rows, self.tasks(rows, rows * length))
        inside = self.unpack("row", outer, 0)
        loops = self._between_borders(last, length)
        kernel.body.append(ir.loop("row", begin, end, [*inside, *emitter.bodies[0], *loops]))
        return self.lowered()

    def _by_short_axes(self, outer: list[str], together: list[str]) -> Lowered:
        """Loops for axes that are too short for a vector each: its lanes have items of several of them."""
        emitter, kernel = self.emitter, self.emitter.kernel
        first, *inner = together
        rows, length, step = self.count(outer), self.count([first]), self.lanes // self.count(inner)
        emitter.depth_of.update(dict.fromkeys(together, 1))
        emitter.lanes, emitter.lane_steps = self.lanes, self.lane_steps(together)
        begin: ir.Operand = ir.Var("begin")
        end: ir.Operand = ir.Var("end")
        if rows == 1:
            kernel.body = self.chunk(length, self.tasks(length // step, length * self.count(inner)), step)
            loop_begin, loop_end = begin, end
        else:
            kernel.body = self.chunk(rows, self.tasks(rows, rows * length * self.count(inner)))
            loop_begin, loop_end = 0, length
        inside = self.unpack("row", outer, 0) if rows > 1 else []
        self._body()
        body = [*(ir.Let(name, ir.Const(0)) for name in inner), *emitter.leave()]
        loop = ir.loop(first, loop_begin, loop_end, body, step=step, trips=length // step)
        if rows == 1:
            kernel.body += [*emitter.bodies[0], loop]
        else:
            kernel.body.append(ir.loop("row", begin, end, [*inside, *emitter.bodies[0], loop]))
        return self.lowered()

    def _between_borders(self, last: str, length: int) -> list[ir.For]:
        """The loops along a variable: for what lies between two borders, with a variable of its own."""
        inner = {border for name, border in self.borders if name == last and 0 < border < length}
        if not inner:
            return self.vector_loops(last, 0, length, length % self.lanes == 0, self._body)
        if last not in self._names:
            raise LanesImpossible  # it is merged from several, by which places are given
        result: list[ir.For] = []
        whole, lanes = (self._place, self._number), self.lanes
        for begin, end in pairwise([0, *sorted(inner), length]):
            part = f"{last}{begin}_"
            self._lengths[part] = self.emitter.variables.lengths[part] = end - begin
            moved = variable(part) + Index((), begin) + variable(last) * -1
            self._place = tuple(index + moved * index.factor(last) for index in whole[0])
            self._number = whole[1] + moved * whole[1].factor(last)
            self.lanes = lanes
            wide = self.fitting_lanes(end - begin)
            self.lanes = wide if end - begin >= wide else 1
            result += self.vector_loops(part, 0, end - begin, (end - begin) % self.lanes == 0, self._body)
        (self._place, self._number), self.lanes = whole, lanes
        return result

    def _by_threads(self, names: list[str]) -> Lowered:
        emitter, kernel = self.emitter, self.emitter.kernel
        size, turns = self.count(names) // self.lanes, self.turns
        self.take_lanes(names)
        kernel.grid, kernel.group = (-(-size // (GROUP_THREADS * turns)),), (GROUP_THREADS,)
        emitter.depth_of.update(dict.fromkeys(names, 1))
        if turns > 1:
            kernel.body = self._in_turns(names, size)
            return self.lowered()
        self._body()
        body = [*self._place_of_item(names), *emitter.bodies[0], *emitter.leave()]
        item = ir.Let("item", ir.WORKGROUP * GROUP_THREADS + ir.THREAD)
        kernel.body = [item, *_below(size, body, 0 if self.shared else GROUP_THREADS)]
        return self.lowered()

    def _place_of_item(self, names: list[str]) -> list[ir.Statement]:
        """Compute variables from an item's number; once the loads are known, by which they are ordered."""
        steps = self.emitter.lane_steps
        order = [(name, (self.lanes if steps.get(name) else 1)) for name in self._order(names)]
        variables = [(name, self.count([name]) // lanes, lanes) for name, lanes in order]
        return unflattened(ir.Var("item"), variables)

    def _in_turns(self, names: list[str], size: int) -> list[ir.Statement]:
        """Several items of a thread, a workgroup's width apart: all are computed before any is stored.

        No compiler moves a load before a store that might change what it reads.
        """
        emitter, turns, lanes = self.emitter, self.turns, self.lanes
        turn, slot = ir.Var("turn"), variable("slot")
        emitter.depth_of["slot"], emitter.variables.lengths["slot"] = 1, turns * lanes
        kept: list[tuple[int, str, ir.Type, Index]] = []
        for at, value, index in self._results():
            array, kind = emitter.name("result"), ir.Type(value.type.dtype, lanes)
            emitter.store(array, kind.dtype, slot, emitter.widened(value, lanes), lanes)
            kept.append((at, array, kind, index))
        place = self._place_of_item(names)
        number = (ir.WORKGROUP * turns + turn) * GROUP_THREADS + ir.THREAD

        def each(statements: list[ir.Statement]) -> ir.Statement:
            body = _below(size, [*place, *statements], GROUP_THREADS * turns)
            counts = [ir.Let("item", number), ir.Let("slot", turn * lanes)]
            return ir.loop("turn", 0, turns, [*counts, *body], unrolled=turns)

        computed = each(emitter.leave())
        self.store(
            [
                (at, emitter.let(ir.Load(kind, array, kind.dtype, ir.Var("slot"), int(lanes > 1)), 1), index)
                for at, array, kind, index in kept
            ]
        )
        arrays = [ir.RegisterArray(array, kind.dtype, turns * lanes) for _, array, kind, _ in kept]
        return [*emitter.bodies[0], *arrays, computed, each(emitter.leave())]

    def _order(self, names: list[str]) -> list[str]:
        """The order of variables in which neighbouring threads access neighbouring items most.

        The last in this order changes fastest from thread to thread. The lanes of a thread are neighbours
        along the last of `names` in any case.
        """
        accesses = [(self._number, node) for node in self.group.outputs]
        for number, places in self.emitter.loads.items():
            accesses += [(index, self.group.inputs[number]) for _, index in places]
        factors = [(merged(index, self.emitter.merges), node.dtype.itemsize) for index, node in accesses]

        def traffic(name: str) -> float:
            """Bytes per item, if neighbouring threads differ in this variable."""
            total = 0.0
            for index, itemsize in factors:
                here, last = index.factor(name), index.factor(names[-1])
                if here not in (0, 1):
                    total += max(itemsize, _SECTOR / self.lanes) if last == 1 else _SECTOR
                elif here or last:
                    total += itemsize if here or last == 1 else _SECTOR
            return total

        best = min(reversed(names), key=traffic, default="")
        if not best or self.count([best]) < _NEIGHBOURS or self.shared:
            return names
        return [*(name for name in names if name != best), best]


def _below(size: int, body: list[ir.Statement], together: int) -> list[ir.Statement]:
    """Statements for an item, if it is one of `size`, which workgroups divide into parts of `together`.

    0: into parts that are not known.
    """
    # Unsigned, because the last workgroup may reach beyond the largest int32.
    inside = ir.Var("item").cast("uint32") < ir.Const(size, ir.Type("uint32"))
    return [ir.If(inside, body)] if not together or size % together else body
