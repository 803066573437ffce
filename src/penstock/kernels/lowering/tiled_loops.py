"""The loops of a map group that reads an input across its rows, as a transposed copy does: tile by tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.fusion.costs import CROSSED_AXIS
from penstock.fusion.index import Index, variable
from penstock.kernels.ir.expressions import (
    INT,
    THREAD,
    WORKGROUP,
    Const,
    Expr,
    Load,
    Select,
    Shuffle,
    Type,
    Var,
    all_of,
)
from penstock.kernels.ir.statements import Barrier, For, If, Let, LocalArray, Statement, Store
from penstock.kernels.lowering.emitter import computed_dtype, merged
from penstock.kernels.lowering.loop_nest import GROUP_THREADS, Lowered, at_most
from penstock.kernels.lowering.map_loops import MapLoops

_SHORTEST = CROSSED_AXIS  # axis that is worth a tile
_LINE = 64  # bytes of a result's row that a CPU writes at a time
_HEIGHT = 128  # neighbours along an input's row in the tile of a CPU
_SIDE = 32  # of the tile of a GPU
_MOST_COPIES = 3  # inputs whose tiles stay in a CPU's nearest cache
# An 8 x 8 block is transposed in three rounds: of which rows two are made, and which of their 16 items.
_PAIRS = (
    ((0, 1), (2, 3), (4, 5), (6, 7)),
    ((0, 2), (1, 3), (4, 6), (5, 7)),
    ((0, 4), (1, 5), (2, 6), (3, 7)),
)
_ITEMS = (
    ((0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15)),
    ((0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)),
    ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)),
)

Loads = Mapping[int, set[tuple[int, Index]]]


class TiledLoops(MapLoops):
    """Every item by itself, tile after tile.

    What neighbouring results read from places far apart is copied into a tile first. It is read as it lies in
    memory, along another variable than that of the results' rows, and lies in the tile as they need it.
    """

    def finds_use(self, loads: Loads) -> bool:
        """Whether anything is read across, by what a trial without tiles has read."""
        names = self.joined(self._names)
        if len(names) < 2 or self._lengths[names[-1]] < _SHORTEST:
            return False
        self._last = names[-1]
        copies: dict[str, list[tuple[int, Index]]] = {}
        for number, places in loads.items():
            for index in {index for _, index in places}:
                across = self._across(merged(index, self.emitter.merges), names)
                if across and self._may_copy(number):
                    copies.setdefault(across, []).append((number, index))
        if not copies:
            return False
        self._other = max(copies, key=lambda name: len(copies[name]))
        found = sorted(copies[self._other], key=lambda copy: (copy[0], str(copy[1])))
        self._copied = self._fitting(found) if self.gpu else found[:_MOST_COPIES]
        return bool(self._copied)

    def _fitting(self, copies: Sequence[tuple[int, Index]]) -> list[tuple[int, Index]]:
        """Those of some copies whose tiles fit into the memory of a workgroup."""
        result, room = [], self.local_bytes
        for number, index in copies:
            room -= np.dtype(computed_dtype(self.group.inputs[number])).itemsize * _SIDE * (_SIDE + 1)
            if room >= 0:
                result.append((number, index))
        return result

    def _across(self, index: Index, names: list[str]) -> str:
        """The variable along which an input is read item by item, if it is not the last; else nothing."""
        if index.factor(self._last) in (0, 1) or not {name for name, _ in index.terms} <= {*names}:
            return ""
        long = (name for name in names[:-1] if self._lengths[name] >= _SHORTEST)
        return next((name for name in long if index.factor(name) == 1), "")

    def _may_copy(self, number: int) -> bool:
        return not (self.gpu and self.group.inputs[number].dtype.kind == "b")

    def build(self) -> Lowered:
        self._set_out()
        return self._by_groups() if self.gpu else self._by_tasks()

    def _set_out(self) -> None:
        """Tiles, and where in them the inputs' items lie."""
        emitter = self.emitter
        itemsize = min(node.dtype.itemsize for node in self.group.outputs)
        self._sides = {self._other: _HEIGHT, self._last: max(8, _LINE // itemsize)}
        pad = 0
        if self.gpu:
            self._sides = dict.fromkeys((self._other, self._last), _SIDE)
            pad = 1  # so that neither rows nor columns lie in one bank of the memory
        width = self._sides[self._last] + pad
        for name in self._sides:
            begin = f"{name}begin"
            emitter.depth_of[begin], emitter.variables.lengths[begin] = 0, self._lengths[name]
        self._spot = self._inside(self._other) * width + self._inside(self._last)
        for number, index in self._copied:
            array, dtype = emitter.name("tile"), computed_dtype(self.group.inputs[number])
            emitter.kernel.arrays.append(LocalArray(array, dtype, self._sides[self._other] * width))
            emitter.copies[number, index] = array, self._spot

    @staticmethod
    def _inside(name: str) -> Index:
        """The part of a variable that lies inside of a tile."""
        return variable(name) + variable(f"{name}begin") * -1

    def _outside(self) -> tuple[list[str], list[int]]:
        """The variables without tiles, and how many tiles there are along the other two."""
        names = [name for name in self.joined(self._names) if name not in self._sides]
        return names, [-(-self._lengths[name] // side) for name, side in self._sides.items()]

    def _begin(self, number: Expr) -> list[Statement]:
        """Where the tile with a number begins and ends, and the variables that are the same all over it."""
        names, (high, wide) = self._outside()
        result: list[Statement] = [Let("outside", number // (high * wide))]
        for name, count in ((self._other, number // wide % high), (self._last, number % wide)):
            begin = Var(f"{name}begin")
            result.append(Let(begin.name, count * self._sides[name]))
            end = at_most(begin, self._sides[name], Const(self._lengths[name]))
            result += [] if self.gpu else [Let(f"{name}end", end)]
        return [*result, *self.unpack("outside", names, 0)]

    # A CPU

    def _by_tasks(self) -> Lowered:
        emitter, kernel = self.emitter, self.emitter.kernel
        names, (high, wide) = self._outside()
        tiles = self.count(names) * high * wide
        kernel.body = self.chunk(tiles, self.tasks(tiles, self.count(self.joined(self._names))))
        begin = self._begin(Var("number"))
        emitter.depth_of[self._other] = 0
        copies = [statement for copy in self._copied for statement in self._copy(*copy)]
        exact = self._lengths[self._last] % self.lanes == 0
        first, end = (Var(f"{self._last}{word}") for word in ("begin", "end"))
        rows = self.vector_loops(self._last, first, end, exact, self._body)
        first, end = (Var(f"{self._other}{word}") for word in ("begin", "end"))
        row = For(self._other, first, end, Const(1), [*emitter.bodies[0], *rows])
        kernel.body.append(For("number", Var("begin"), Var("end"), Const(1), [*begin, *copies, row]))
        return self.lowered()

    def _copy(self, number: int, index: Index) -> list[Statement]:
        """The copy of an input's tile: in blocks of vectors, and what is left over item by item."""
        emitter, lanes = self.emitter, self.lanes
        emitter.depth_of[self._last] = 1
        (a, a_begin, a_end), (b, b_begin, b_end) = (
            (Var(name), Var(f"{name}begin"), Var(f"{name}end")) for name in (self._last, self._other)
        )
        kind, (array, _) = self._type(number), emitter.copies[number, index]
        item = Load(kind, f"in{number}", self._stored(number), emitter.index(index)[0])
        spot = emitter.index(self._spot)[0]
        single: list[Statement] = [Let("item", item), Store(Var("item", kind), array, kind.dtype, spot)]
        if lanes == 1:
            return [_nest(a, a_begin, a_end, b, b_begin, b_end, 1, single)]
        block = self._block(number, index)
        if all(self._lengths[name] % lanes == 0 for name in self._sides):
            return [_nest(a, a_begin, a_end, b, b_begin, b_end, lanes, block)]
        less = lanes - 1
        a_rest, b_rest = (
            begin + (end - begin) // lanes * lanes for begin, end in ((a_begin, a_end), (b_begin, b_end))
        )
        rest = Select(INT, a < a_rest, b_rest, b_begin)
        return [
            _nest(a, a_begin, a_end - less, b, b_begin, b_end - less, lanes, block),
            _nest(a, a_begin, a_end, b, rest, b_end, 1, single),
        ]

    def _block(self, number: int, index: Index) -> list[Statement]:
        """A block of as many vectors as they have items, transposed."""
        emitter, lanes = self.emitter, self.lanes
        kind = Type(self._type(number).dtype, lanes)
        (array, spot), stored = emitter.copies[number, index], self._stored(number)
        result: list[Statement] = []
        rows: list[Var] = []

        def named(value: Expr) -> Var:
            name = emitter.name("row")
            result.append(Let(name, value))
            return Var(name, kind)

        step = merged(index, emitter.merges).factor(self._last)
        for row in range(lanes):
            place, _, _ = emitter.index(index + Index((), row * step))
            rows.append(named(Load(kind, f"in{number}", stored, place, 1)))
        for turn, (pairs, items) in enumerate(zip(_PAIRS, _ITEMS, strict=True)):
            made = [named(Shuffle(kind, rows[i], rows[j], part)) for i, j in pairs for part in items]
            rows = made if turn < 2 else made[::2] + made[1::2]
        for row, value in enumerate(rows):
            place, _, _ = emitter.index(spot + Index((), row * self._sides[self._last]))
            result.append(Store(value, array, kind.dtype, place))
        return result

    def _type(self, number: int) -> Type:
        return Type(computed_dtype(self.group.inputs[number]))

    def _stored(self, number: int) -> str:
        return str(self.group.inputs[number].dtype)

    # A GPU

    def _by_groups(self) -> Lowered:
        emitter, kernel = self.emitter, self.emitter.kernel
        names, (high, wide) = self._outside()
        kernel.grid, kernel.group = (self.count(names) * high * wide,), (GROUP_THREADS,)
        kernel.body = [*self._begin(WORKGROUP), Let("lane", THREAD % _SIDE), Let("line", THREAD // _SIDE)]
        emitter.depth_of.update(dict.fromkeys(self._sides, 1))
        copies: list[Statement] = []
        for number, index in self._copied:
            kind, (array, spot) = self._type(number), emitter.copies[number, index]
            item, place = emitter.name("item"), emitter.index(spot)[0]
            read = Load(kind, f"in{number}", self._stored(number), emitter.index(index)[0])
            copies += [Let(item, read), Store(Var(item, kind), array, kind.dtype, place)]
        self._body()
        kernel.body += emitter.bodies[0]
        kernel.body.append(self._each(self._last, self._other, copies))
        kernel.body += [Barrier(), self._each(self._other, self._last, emitter.leave())]
        return self.lowered()

    def _each(self, far: str, near: str, body: list[Statement]) -> Statement:
        """A part of a tile for each thread; neighbouring threads are neighbours along the variable `near`."""
        rows = GROUP_THREADS // _SIDE
        turn = Var(f"{far}begin") + Var("turn") * rows + Var("line")
        places = [Let(far, turn), Let(near, Var(f"{near}begin") + Var("lane"))]
        bounds = [Var(name) < self._lengths[name] for name in (far, near) if self._lengths[name] % _SIDE]
        inside = [If(all_of(bounds), body)] if bounds else body
        turns = _SIDE // rows
        return For("turn", Const(0), Const(turns), Const(1), [*places, *inside], turns)


def _nest(
    a: Var, a_begin: Expr, a_end: Expr, b: Var, b_begin: Expr, b_end: Expr, step: int, body: list[Statement]
) -> For:
    """Two loops, one inside the other."""
    inner = For(b.name, b_begin, b_end, Const(step), body)
    return For(a.name, a_begin, a_end, Const(step), [inner])
