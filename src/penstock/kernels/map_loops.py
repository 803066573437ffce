"""The loops of a map group."""

from __future__ import annotations

from penstock.fusion.index import flat, unflatten
from penstock.kernels.loop_nest import GROUP_THREADS, LoopNest, Lowered
from penstock.kernels.loops import Count, Loop
from penstock.kernels.scopes import Merge


class MapLoops(LoopNest):
    """Every item by itself: a thread of a GPU computes one, a thread of a CPU a part of an axis."""

    def space(self) -> None:
        self._names, self._place = self.axes("a", max(self.group.outputs, key=lambda node: node.ndim).shape)
        self._shape = max(self.group.outputs, key=lambda node: node.ndim).shape

    def merges(self) -> list[Merge]:
        return self.found_merges(self._names)

    def _body(self) -> None:
        number = flat(tuple(self._place), self._shape)
        results = []
        for at, node in enumerate(self.group.outputs):
            if node.shape == self._shape:
                place = tuple(self._place)
            else:
                place = unflatten(number, node.shape, self.scopes.variables)
            results.append((at, self.scopes.value(node, place), number))
        self.store(results)

    def write(self) -> Lowered:
        scopes, form = self.scopes, self.scopes.form
        names = self.joined(self._names)
        size = self.count(names)
        if self.gpu:
            form.grid, form.group = (-(-size // GROUP_THREADS),), (GROUP_THREADS,)
            form.body = [Count("item", f"GROUP(0) * {GROUP_THREADS} + THREAD")]
            inside = self.unpack("item", names, 1)
            self._body()
            form.body.append(
                Loop("once", "item", str(size), str(size), [*inside, *scopes.bodies[0], *scopes.leave()])
            )
            return self.lowered()
        outer, inner = names[:-1], names[-1:]
        rows, length = self.count(outer), self.count(inner)
        if not inner:
            self._body()
            form.body = [*scopes.bodies[0], *scopes.leave()]
            return self.lowered()
        if rows == 1:
            form.body = self.chunk(length, self.tasks(length, size), 8)
            loops = self.vector_loops(inner[0], "begin", "end", length % self.lanes == 0, self._body)
            form.body += [*scopes.bodies[0], *loops]
            return self.lowered()
        form.body = self.chunk(rows, self.tasks(rows, size))
        inside = self.unpack("row", outer, 0)
        loops = self.vector_loops(inner[0], "0", str(length), length % self.lanes == 0, self._body)
        form.body.append(Loop("row", "begin", "end", "1", [*inside, *scopes.bodies[0], *loops]))
        return self.lowered()
