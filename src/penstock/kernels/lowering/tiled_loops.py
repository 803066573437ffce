"""The loops of a map group that reads an input across its rows, as a transpose does: tile by tile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.fusion.costs import CROSSED_AXIS
from penstock.fusion.index import Index, variable
from penstock.kernels import ir
from penstock.kernels.lowering.loop_nest import GROUP_THREADS, LoopNest, Lowered, at_most
from penstock.kernels.lowering.map_loops import MapLoops
from penstock.kernels.lowering.values import computed_dtype, merged
from penstock.kernels.transposing import transposed

_SHORTEST = CROSSED_AXIS  # axis that is worth a tile
_LINES = 128  # bytes of a result's row in the tile of a CPU
_HEIGHT = 16  # neighbours along an input's row in the tile of a CPU: a cache line of float32
# The same in all tiles, one after another, of a part of a CPU's task: its rows are read as streams.
_RUN = 512
# Both where results go past the caches. With rows of a power of two, few neighbours in each would all go to
# the same channel of memory.
_STREAMED_LINES, _STREAMED_RUN = 256, 2048
_STREAMED_HEIGHT = 32  # two lines, because CPUs read pairs of lines from memory
_STREAMED_ITEM = 4  # bytes at least: narrower vectors have no such store
_SHARE_OF_CACHE = 2  # half: a kernel that touches more would leave little of its results there
_SIDE = 32  # of the tile of a GPU
_WIDE_SIDE = 64  # the same where there is enough work for workgroups of `_WIDE_THREADS`
_WIDE_THREADS = 512
_GROUPS = 8  # such workgroups for each compute unit
_MOST_COPIES = 3  # inputs whose tiles stay in a CPU's first-level cache


class TiledLoops(MapLoops):
    """Elementwise work in tiles.

    What neighbouring results read from distant places is first copied to a tile in local memory: in the order
    of the input, which is along another variable than the results' rows.
    """

    def finds_use(self, trial: LoopNest) -> bool:
        """Whether tiles help, given a trial without tiles."""
        loads = trial.emitter.loads
        self.streams = not self.gpu and self._is_large() and not any(trial.may_alias())
        names = self.joined(self._names)
        if len(names) < 2 or self._lengths[names[-1]] < _SHORTEST:
            return False
        self._last = names[-1]
        copies: dict[str, list[tuple[int, Index]]] = {}
        for number, places in loads.items():
            for index in {index for _, index in places}:
                across = self._across(merged(index, self.emitter.merges), names)
                if across and not (self.gpu and self.group.inputs[number].dtype.kind == "b"):
                    copies.setdefault(across, []).append((number, index))
        if not copies:
            return False
        self._other = max(copies, key=lambda name: len(copies[name]))
        ordered = sorted(copies[self._other], key=lambda copy: (copy[0], str(copy[1])))
        self._copied = self._fitting(ordered, _SIDE) if self.gpu else ordered[:_MOST_COPIES]
        tiles = self.count(names) // _WIDE_SIDE**2
        wide = tiles >= _GROUPS * self.units and self.max_threads >= _WIDE_THREADS
        wide = wide and self._fitting(ordered, _WIDE_SIDE) == self._copied
        self._side, self._threads = (_WIDE_SIDE, _WIDE_THREADS) if wide else (_SIDE, GROUP_THREADS)
        return bool(self._copied)

    def _is_large(self) -> bool:
        """Whether what the kernel touches does not stay in the caches of a CPU."""
        values = (*self.group.inputs, *self.group.outputs)
        wide = min(node.dtype.itemsize for node in self.group.outputs) >= _STREAMED_ITEM
        touched = sum(node.nbytes for node in values)
        return wide and 0 < self.cache_bytes <= _SHARE_OF_CACHE * touched

    def _fitting(self, copies: Sequence[tuple[int, Index]], side: int) -> list[tuple[int, Index]]:
        """The copies whose tiles fit into local memory."""
        result, room = [], self.local_bytes
        for number, index in copies:
            room -= np.dtype(computed_dtype(self.group.inputs[number])).itemsize * side * (side + 1)
            if room >= 0:
                result.append((number, index))
        return result

    def _across(self, index: Index, names: list[str]) -> str:
        """The variable, other than the last, along which an input is contiguous; empty if there is none."""
        if index.factor(self._last) in (0, 1) or not {name for name, _ in index.terms} <= {*names}:
            return ""
        long = (name for name in names[:-1] if self._lengths[name] >= _SHORTEST)
        return next((name for name in long if index.factor(name) == 1), "")

    def build(self) -> Lowered:
        self._define_tiles()
        return self._by_groups() if self.gpu else self._by_tasks()

    def _define_tiles(self) -> None:
        """The sizes of tiles, their arrays, and the index of an item in them."""
        emitter = self.emitter
        itemsize = min(node.dtype.itemsize for node in self.group.outputs)
        run, line = (_STREAMED_RUN, _STREAMED_LINES) if self.streams else (_RUN, _LINES)
        self._height = _STREAMED_HEIGHT if self.streams else _HEIGHT
        self._sides = {self._other: run, self._last: line // itemsize}
        pad = 0
        if self.gpu:
            self._sides = dict.fromkeys((self._other, self._last), self._side)
            pad = 1  # avoids bank conflicts along columns
        width, height = self._sides[self._last] + pad, self._side if self.gpu else self._height
        for name in self._sides:
            begin = f"{name}begin"
            emitter.depth_of[begin], emitter.variables.lengths[begin] = 0, self._lengths[name]
        self._spot = self._inside(self._other) * width + self._inside(self._last)
        for number, index in self._copied:
            array = ir.LocalArray(emitter.name("tile"), self._type(number).dtype, height * width)
            emitter.kernel.arrays.append(array)
            emitter.copies[number, index] = array.name, self._spot

    @staticmethod
    def _inside(name: str) -> Index:
        """The index inside of a tile along a variable."""
        return variable(name) + variable(f"{name}begin") * -1

    def _outside(self) -> tuple[list[str], list[int]]:
        """The variables without tiles, and the number of tiles along the other two."""
        names = [name for name in self.joined(self._names) if name not in self._sides]
        return names, [-(-self._lengths[name] // side) for name, side in self._sides.items()]

    def _begin(self, number: ir.Expr) -> list[ir.Statement]:
        """Where a tile, or a run of tiles, begins and ends, and the variables that are constant in it."""
        names, (high, wide) = self._outside()
        result: list[ir.Statement] = [ir.Let("outside", number // (high * wide))]
        for name, count in ((self._other, number // wide % high), (self._last, number % wide)):
            run = not self.gpu and name == self._other
            begin, end = (
                ir.Var(f"{name}{word}") for word in (("first", "stop") if run else ("begin", "end"))
            )
            result.append(ir.Let(begin.name, count * self._sides[name]))
            limit = at_most(begin, self._sides[name], ir.Const(self._lengths[name]))
            result += [] if self.gpu else [ir.Let(end.name, limit)]
        return [*result, *self.unpack("outside", names, 0)]

    # A CPU

    def _by_tasks(self) -> Lowered:
        emitter, kernel = self.emitter, self.emitter.kernel
        for name in self._sides:
            self.check_lanes(self._lengths[name])
        names, (high, wide) = self._outside()
        tiles = self.count(names) * high * wide
        kernel.body = self.chunk(tiles, self.tasks(tiles, self.count(self.joined(self._names))))
        begin = self._begin(ir.Var("number"))
        emitter.depth_of[self._other] = 0
        copies = [statement for copy in self._copied for statement in self._copy(*copy)]
        exact = self._lengths[self._last] % self.lanes == 0
        first, end = (ir.Var(f"{self._last}{word}") for word in ("begin", "end"))
        rows = self.vector_loops(self._last, first, end, exact, self._body)
        first, end = (ir.Var(f"{self._other}{word}") for word in ("begin", "end"))
        row = ir.loop(self._other, first, end, [*emitter.bodies[0], *rows])
        start, stop = (ir.Var(f"{self._other}{word}") for word in ("first", "stop"))
        tile = [ir.Let(end.name, at_most(first, self._height, stop)), *copies, row]
        run = ir.loop(first.name, start, stop, tile, step=self._height)
        kernel.body.append(ir.loop("number", ir.Var("begin"), ir.Var("end"), [*begin, run]))
        return self.lowered()

    def _copy(self, number: int, index: Index) -> list[ir.Statement]:
        """Copy an input's tile: in blocks of vectors, and the remainder item by item."""
        emitter, lanes = self.emitter, self.lanes
        emitter.depth_of[self._last] = 1
        (a, a_begin, a_end), (b, b_begin, b_end) = (
            (ir.Var(name), ir.Var(f"{name}begin"), ir.Var(f"{name}end")) for name in (self._last, self._other)
        )
        kind, (array, _) = self._type(number), emitter.copies[number, index]
        item = ir.Load(kind, f"in{number}", self._stored(number), emitter.index(index)[0])
        spot = emitter.index(self._spot)[0]
        single: list[ir.Statement] = [
            ir.Let("item", item),
            ir.Store(ir.Var("item", kind), array, kind.dtype, spot),
        ]

        def nest(
            a_end: ir.Expr, b_begin: ir.Expr, b_end: ir.Expr, step: int, body: list[ir.Statement]
        ) -> ir.For:
            inner = ir.loop(b.name, b_begin, b_end, body, step=step)
            return ir.loop(a.name, a_begin, a_end, [inner], step=step)

        if lanes == 1:
            return [nest(a_end, b_begin, b_end, 1, single)]
        block = self._block(number, index)
        if all(self._lengths[name] % lanes == 0 for name in self._sides):
            return [nest(a_end, b_begin, b_end, lanes, block)]
        less = lanes - 1
        a_rest, b_rest = (
            begin + (end - begin) // lanes * lanes for begin, end in ((a_begin, a_end), (b_begin, b_end))
        )
        rest = ir.Select(ir.INT, a < a_rest, b_rest, b_begin)
        return [nest(a_end - less, b_begin, b_end - less, lanes, block), nest(a_end, rest, b_end, 1, single)]

    def _block(self, number: int, index: Index) -> list[ir.Statement]:
        """Copy a square block of vectors, transposed."""
        emitter, lanes = self.emitter, self.lanes
        kind = ir.Type(self._type(number).dtype, lanes)
        (array, spot), stored = emitter.copies[number, index], self._stored(number)
        result: list[ir.Statement] = []
        rows: list[ir.Var] = []

        def named(value: ir.Expr) -> ir.Var:
            name = emitter.name("row")
            result.append(ir.Let(name, value))
            return ir.Var(name, kind)

        step = merged(index, emitter.merges).factor(self._last)
        for row in range(lanes):
            place, _, _ = emitter.index(index + Index((), row * step))
            rows.append(named(ir.Load(kind, f"in{number}", stored, place, 1)))
        for row, value in enumerate(transposed(rows, named)):
            place, _, _ = emitter.index(spot + Index((), row * self._sides[self._last]))
            result.append(ir.Store(value, array, kind.dtype, place))
        return result

    def _type(self, number: int) -> ir.Type:
        return ir.Type(computed_dtype(self.group.inputs[number]))

    def _stored(self, number: int) -> str:
        return str(self.group.inputs[number].dtype)

    # A GPU

    def _by_groups(self) -> Lowered:
        emitter, kernel = self.emitter, self.emitter.kernel
        names, (high, wide) = self._outside()
        kernel.grid, kernel.group = (self.count(names) * high * wide,), (self._threads,)
        kernel.body = [
            *self._begin(ir.WORKGROUP),
            ir.Let("lane", ir.THREAD % self._side),
            ir.Let("line", ir.THREAD // self._side),
        ]
        emitter.depth_of.update(dict.fromkeys(self._sides, 1))
        copies: list[ir.Statement] = []
        for number, index in self._copied:
            kind, (array, spot) = self._type(number), emitter.copies[number, index]
            item, place = emitter.name("item"), emitter.index(spot)[0]
            read = ir.Load(kind, f"in{number}", self._stored(number), emitter.index(index)[0])
            copies += [ir.Let(item, read), ir.Store(ir.Var(item, kind), array, kind.dtype, place)]
        self._body()
        kernel.body += emitter.bodies[0]
        kernel.body.append(self._each(self._last, self._other, copies))
        kernel.body += [ir.Barrier(), self._each(self._other, self._last, emitter.leave())]
        return self.lowered()

    def _each(self, far: str, near: str, body: list[ir.Statement]) -> ir.Statement:
        """Each thread's part of a tile; neighbouring threads are neighbours along the variable `near`."""
        side, rows = self._side, self._threads // self._side
        turn = ir.Var(f"{far}begin") + ir.Var("turn") * rows + ir.Var("line")
        places = [ir.Let(far, turn), ir.Let(near, ir.Var(f"{near}begin") + ir.Var("lane"))]
        bounds = [ir.Var(name) < self._lengths[name] for name in (far, near) if self._lengths[name] % side]
        inside = [ir.If(ir.all_of(bounds), body)] if bounds else body
        turns = side // rows
        return ir.loop("turn", 0, turns, [*places, *inside], unrolled=turns)
