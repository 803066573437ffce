"""Vectors that all rows of a row kernel read, such as a norm that a product multiplies with a matrix."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from penstock.fusion.index import Index
from penstock.fusion.views import below_views
from penstock.graph.dtypes import HALF_PRECISION
from penstock.graph.elementwise import CAST
from penstock.graph.node import Node
from penstock.kernels import ir
from penstock.kernels.lowering.sums_of_rows import SumsOfRows
from penstock.kernels.rewriting import names_in

READ_WORDS = 64  # registers for what a thread reads before it computes anything


class VectorsOfRows(SumsOfRows):
    """The part of a GPU's row loops that computes vectors before the rows."""

    _of_vector: set[Node]  # reductions of a vector that all rows read
    _levels: dict[Node, int]  # of each node: how many passes must end before it is computed
    _first_pass: int  # over rows
    _number: Index  # of the current item
    _column: Index
    _reads: ir.For | None = None  # what a thread reads of its row before it computes anything

    @abstractmethod
    def _is_whole(self, node: Node) -> bool:
        """Whether a value has an item for each of all rows."""

    @abstractmethod
    def _fits_registers(self) -> bool:
        """Whether a thread's part of a row is so short that loops over it are unrolled."""

    @abstractmethod
    def _words(self, nodes: Sequence[Node]) -> int:
        """How many registers a thread's items of some nodes take."""

    @abstractmethod
    def _pass(self, stage: int, keep: list[Node], whole: bool = True) -> None:
        """A pass over a row; with `whole` False, over the vector that is kept for all rows."""

    def _vector_passes(self) -> list[ir.Statement]:
        """What is computed before the rows: the vector that all of them read, which stays in registers."""
        if not self._of_vector:
            return []
        emitter = self.emitter
        emitter.bodies[0] = []
        number, self._number = self._number, self._column
        emitter.stage = 0
        if self._fits_registers():
            self._pass(0, self._vector_inputs(), whole=False)
        inputs = [*emitter.kept]
        for stage in range(self._first_pass):
            emitter.stage = stage
            self._pass(stage, [])
        if self._fits_registers():
            emitter.stage = self._first_pass
            self._pass(self._first_pass, self._vectors(), whole=False)
        for key in inputs:
            del emitter.kept[key]
        self._number = number
        # Threads exchange values in local memory, which the rows reuse.
        return [*emitter.bodies[0], ir.Barrier()]

    def _around(
        self, before_rows: list[ir.Statement], body: list[ir.Statement], hold: bool
    ) -> list[ir.Statement]:
        """The body of a row, after what is computed before it; what it reads comes first.

        With `hold`, a compiler may not save registers by computing something before everything is read. It
        does not pay where a vector is in registers, too: then there is room for fewer workgroups.
        """
        reads = next((1 + at for at, part in enumerate(body) if part is self._reads), 0)
        first = [part for part in body[:reads] if not isinstance(part, ir.Forget)]
        if hold and reads and not before_rows:
            return [*first, *ir.optimization_barrier("held", body[reads:])]
        made = {getattr(part, "name", "") for part in before_rows if not isinstance(part, ir.For)}
        if not made.isdisjoint(names_in(first)):
            return [*before_rows, *body]
        forgets = [part for part in body[:reads] if isinstance(part, ir.Forget)]  # of vectors
        return [*first, *before_rows, *forgets, *body[reads:]]

    def _vector_inputs(self) -> list[Node]:
        """The inputs that vectors are computed from: all are read at once, and stay in registers."""
        stack, seen = [*self._of_vector, *self._vectors()], set[Node]()
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack += () if node in self.group.inputs else node.inputs
        inputs = [node for node in self.group.inputs if node in seen and node.size == self.group.columns]
        return inputs if self._words(inputs) <= READ_WORDS else []

    def _vectors(self) -> list[Node]:
        """The vectors that rows read and that depend on reductions."""
        read = {
            read
            for node in self.group.nodes
            if self._is_whole(node)
            for parent in node.inputs
            if (read := below_views(parent)).size == self.group.columns and self._levels.get(read)
        }
        return [_unwidened(node) for node in self.group.nodes if node in read]


def _unwidened(node: Node) -> Node:
    """The value in half precision that a value was cast from, if it was: it takes half the registers."""
    source = below_views(node.inputs[0]) if node.primitive is CAST else node
    return source if source.dtype in HALF_PRECISION and source.size == node.size else node
