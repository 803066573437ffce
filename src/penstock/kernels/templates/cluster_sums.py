"""Sums that tensor cores computed: those of a workgroup and of a cluster are added up, item by item."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.kernels import ir
from penstock.kernels.builder import KernelBuilder, Memory

FEATURES, ROWS = 16, 8  # of a tile

# Given the row, the column, and the sum of each matrix: statements that compute the outputs and store them.
Finish = Callable[[ir.Expr, ir.Expr, Sequence[ir.Var]], list[ir.Statement]]
Totals = Mapping[int, Sequence[ir.Var]]  # by tile of rows


@dataclass(frozen=True)
class Division:
    """A workgroup has so many `features` of each matrix, and one of `splits` parts of the inputs."""

    features: int
    splits: int


@dataclass(frozen=True)
class ClusterSums:
    """The products of all rows with the features of `matrices`, in local memory.

    `sharing`: the warps that have parts of the same sums.
    """

    memory: Memory
    rows: int
    columns: int
    matrices: int
    division: Division
    sharing: int = 1

    @property
    def lines(self) -> int:
        """The rows of all tiles."""
        return -(-self.rows // ROWS) * ROWS

    @property
    def stride(self) -> int:
        """Floats between rows: then a warp writes without bank conflicts."""
        return self.matrices * self.division.features + 4

    def keep(self, k: KernelBuilder, lane: ir.Expr, tile: ir.Expr, share: ir.Expr, totals: Totals) -> None:
        """Store the sums that a warp has of a tile of features."""
        for rows, items in totals.items():
            for number, total in enumerate(items):
                row = share * self.lines + (rows * ROWS + number % 2) + lane % 4 * 2
                feature = tile * FEATURES + lane // 4 + number // 2 * (FEATURES // 2)
                k.store(self.memory, row * self.stride + feature, total)

    def finish(self, k: KernelBuilder, threads: int, first: ir.Expr, rank: ir.Expr, finish: Finish) -> None:
        """Add up the sums of all that share the inputs, once they are kept, and finish a share of them."""
        features, splits = self.division.features, self.division.splits
        if splits > 1:
            k.cluster_barrier()
        else:
            k.barrier()
        share = self.lines * features // splits
        with k.loop("item", rank * share + k.thread, (rank + 1) * share, threads) as item:
            row, own = k.let("row", item // features), k.let("own", item % features)
            column = k.let("feature", first + own)
            with k.when((row < self.rows) & (column < self.columns)):
                products = [
                    self._whole(k, matrix, row * self.stride + own + matrix * features)
                    for matrix in range(self.matrices)
                ]
                k.splice(finish(row, column, products))
        if splits > 1:
            k.cluster_barrier()  # no workgroup may end before the others have read its sums

    def _whole(self, k: KernelBuilder, matrix: int, index: ir.Expr) -> ir.Var:
        """The sum of an item over the warps, and the workgroups, that share its inputs."""
        splits = self.division.splits
        total = k.variable(f"whole{matrix}", 0.0, "float32")
        for share in range(self.sharing):
            place = index + share * (self.lines * self.stride)
            if splits > 1:
                k.assign(total, total + k.cluster_sum(k.fresh("part"), self.memory, place, splits))
            else:
                k.assign(total, total + k.load(self.memory, place))
        return k.let(f"product{matrix}", total)
