"""Sums of rows by index on a GPU, in a kernel that needs no sorted index; the bits are always the same.

A workgroup has every n-th row of the result, because frequent tokens mostly have neighbouring ids. It
searches the whole index for its rows, counts their occurrences, and sorts their positions by row. A few
threads add up a short row, and the whole workgroup a long row. For very frequent rows, and for all rows if
the positions do not fit into local memory, it searches the index once more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from penstock.drivers.driver import Capabilities
from penstock.graph.dtypes import HALF_PRECISION
from penstock.graph.node import Node
from penstock.graph.reducing import BLOCK
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.dialects import dialect_of
from penstock.kernels.dialects.dialect import MANY_STEPS
from penstock.kernels.ir.expressions import Expr, Var
from penstock.kernels.source import WORD, KernelSource
from penstock.kernels.templates.bitonic import sort_in_local_memory
from penstock.kernels.templates.launches import group_size

_THREADS = 512  # of a workgroup
_TILE = 32  # threads that add up a row
_MOST_ROWS = 1024  # of a workgroup
_LISTED = 4096  # positions that a workgroup sorts
_LONG = 16  # positions of a row, beyond which all threads add it up
_OFTEN = 1024  # positions of a row, beyond which they are not sorted
_ACCESS = 16  # bytes that a thread reads at once
_PARTS = 4  # of a row that a thread adds up together, where it reads a word at once


def add_rows(node: Node, capabilities: Capabilities) -> KernelSource | None:
    """The kernel of `scatter_add`; None where its loops would be too long."""
    scatter = _Scatter(node, capabilities)
    return scatter.source() if scatter.most_rows else None


class _Columns:
    """The columns of a thread: distant parts of a row, each of neighbours that it reads at once."""

    def __init__(self, node: Node, tile: int, word_access: bool) -> None:
        self.rest = math.prod(node.shape[1:])
        self.dtype = "float32" if node.dtype in HALF_PRECISION else str(node.dtype)
        self.width = math.gcd(self.rest, max(1, (WORD if word_access else _ACCESS) // node.dtype.itemsize))
        parts = min(_PARTS, -(-self.rest // (tile * self.width))) if word_access else 1
        self.steps = [part * tile * self.width for part in range(parts)]
        self.count = parts * self.width  # sums of a thread
        self.span = tile * self.count  # columns of all threads of a tile


class _Scatter:
    """Builds the kernel."""

    def __init__(self, node: Node, capabilities: Capabilities) -> None:
        dialect, dtype = dialect_of(capabilities), str(node.dtype)
        index = node.inputs[1]
        self.length, self.count = node.shape[0], index.size
        less = 1
        while _local_bytes(_Columns(node, _TILE, dialect.word_access), less, dialect.word_access) > (
            capabilities.local_bytes
        ):
            less *= 2
        self.threads = group_size(_THREADS // less, capabilities)
        self.tile = min(_TILE, self.threads)
        self.tiles = self.threads // self.tile
        self.columns = _Columns(node, self.tile, dialect.word_access)
        self.listed = _LISTED // less
        # A key has the row in its high bits and the position in its low bits.
        self.bits = self.count.bit_length()
        self.most_rows = _MOST_ROWS // less
        if dialect.word_access:  # keys are 32 bits wide
            self.most_rows = min(self.most_rows, 1 << 32 - self.bits)
        steps = dialect.most_steps(capabilities)
        if self.count > self.listed and steps < MANY_STEPS:
            # A workgroup may have to search the whole index for each of its rows.
            turns = -(-self.columns.rest // self.columns.span) * (self.count // self.tiles + 64)
            self.most_rows = min(self.most_rows, steps // turns)
        if not self.most_rows:
            return
        self.groups = min(self.length, max(2 * capabilities.compute_units, -(-self.length // self.most_rows)))
        self.rows = -(-self.length // self.groups)
        self.key = "uint32"
        if not dialect.word_access and self.rows << self.bits > 1 << 31:
            self.key, self.listed = "uint64", self.listed // 2
        self.k = k = KernelBuilder("add_rows", capabilities, [dtype], [dtype, str(index.dtype)])
        self.keys = k.shared("keys", self.key, self.listed)
        self.counts = k.shared("counts", "int32", self.rows, atomic=True)
        self.starts = k.shared("starts", "int32", self.rows + 1)
        self.long_rows = k.shared("long_rows", "int32", self.rows)
        self.totals = k.shared("found", "int32", 2, atomic=True)  # positions, and long rows
        self.told = k.shared("told", "int32", 1)
        self.across = k.shared("across", self.columns.dtype, self.threads * self.columns.count)

    def source(self) -> KernelSource:
        """The kernel."""
        k = self.k
        self.tile_rank = k.let("tile_rank", k.thread // self.tile)
        self.rank = k.let("rank", k.thread % self.tile)
        self._count()
        listed = self._list()
        self._sort(listed)
        self._find_starts(listed)
        self._add_short_rows()
        self._add_long_rows()
        return k.source((self.groups,), (self.threads,))

    def _row(self, position: Expr) -> Var:
        """The row of the result at a position of the index; -1 if it is out of range."""
        return self.k.let("row", self.k.load_index(self.k.inputs[1], position, self.length))

    def _position(self, at: Expr) -> Expr:
        """The position in a key."""
        return (self.k.load(self.keys, at) & ((1 << self.bits) - 1)).cast("int32")

    def _count(self) -> None:
        """Count the occurrences of each of the workgroup's rows."""
        k = self.k
        with k.loop("i", k.thread, self.rows, self.threads) as i:
            k.store(self.counts, i, 0)
        with k.when(k.thread.eq(0)):
            k.store(self.totals, 0, 0)
            k.store(self.totals, 1, 0)
        k.barrier()
        with k.loop("i", k.thread, self.count, self.threads) as i:
            row = self._row(i)
            with k.when((row >= 0) & (row % self.groups).eq(k.group())):
                k.atomic_add(self.counts, row // self.groups, 1)
        k.barrier()

    def _list(self) -> Var:
        """List the keys of rows that are not too frequent; returns their number, 0 if they do not fit."""
        k = self.k
        with k.loop("i", k.thread, self.count, self.threads) as i:
            row = self._row(i)
            with k.when((row >= 0) & (row % self.groups).eq(k.group())):
                own = k.let("own", row // self.groups)
                with k.when(k.load(self.counts, own) <= _OFTEN):
                    at = k.atomic_add(self.totals, 0, 1, "at")
                    with k.when(at < self.listed):
                        k.store(self.keys, at, own.cast(self.key) << self.bits | i.cast(self.key))
        k.barrier()
        with k.when(k.thread.eq(0)):
            count = k.let("found_keys", k.load(self.totals, 0))
            k.store(self.told, 0, k.select(count <= self.listed, count, 0))
        return k.uniform("listed", self.told)

    def _sort(self, listed: Var) -> None:
        """Sort the keys, padded to a power of two with the largest key."""
        k = self.k
        padded = k.variable("padded", 1)
        with k.repeat(padded < listed):
            k.assign(padded, padded * 2)
        with k.loop("i", listed + k.thread, padded, self.threads) as i:
            k.store(self.keys, i, (1 << (64 if self.key == "uint64" else 32)) - 1)
        sort_in_local_memory(k, [self.keys], padded, self.threads)

    def _find_starts(self, listed: Var) -> None:
        """Where the keys of each row begin."""
        k = self.k
        with k.loop("row", k.thread, self.rows + 1, self.threads) as row:
            before, after = k.variable("before", 0), k.variable("after", listed)
            with k.repeat(before < after):
                middle = k.let("middle", (before + after) // 2)
                less = k.let("less", (k.load(self.keys, middle) >> self.bits).cast("int32") < row)
                k.assign(before, k.select(less, middle + 1, before))
                k.assign(after, k.select(less, after, middle))
            k.store(self.starts, row, before)
        k.barrier()

    def _add_short_rows(self) -> None:
        """A tile of threads adds up each short row; long rows are listed."""
        k, columns = self.k, self.columns
        own_rows = k.let("own_rows", (self.length - 1 - k.group()) // self.groups + 1)
        with k.loop("row", self.tile_rank, own_rows, self.tiles) as row:
            begin, end = k.let("begin", k.load(self.starts, row)), k.let("end", k.load(self.starts, row + 1))
            often = k.let("often", k.load(self.counts, row))
            with k.when((often > _LONG) | often.ne(end - begin)), k.when(self.rank.eq(0)):
                slot = k.atomic_add(self.totals, 1, 1, "slot")
                k.store(self.long_rows, slot, row)
            first = self.rank * columns.width
            with k.otherwise(), k.loop("column", first, columns.rest, columns.span) as column:
                sums = _Sums.zero(k, columns, column)
                with k.loop("i", begin, end) as i:
                    sums.add(k.let("position", self._position(i)))
                sums.store(row * self.groups + k.group())
        k.barrier()

    def _add_long_rows(self) -> None:
        """Each tile adds up a part of a long row, then the parts of each column are added."""
        k, columns, tile = self.k, self.columns, self.tile
        with k.when(k.thread.eq(0)):
            k.store(self.told, 0, k.load(self.totals, 1))
        with k.loop("number", 0, k.uniform("found_long", self.told)) as number:
            row = k.let("row", k.load(self.long_rows, number))
            goal = k.let("goal", row * self.groups + k.group())
            begin = k.variable("begin", k.load(self.starts, row))
            size = k.variable("size_of_row", k.load(self.starts, row + 1) - begin)
            is_sorted = k.let("is_sorted", k.load(self.counts, row).eq(size))
            with k.when(~is_sorted):
                k.assign(begin, 0)
                k.assign(size, self.count)
            first = k.let("first", begin + self._share(size, self.tile_rank))
            end = k.let("end", begin + self._share(size, self.tile_rank + 1))
            with k.loop("start", 0, columns.rest, columns.span) as start:
                column = k.let("column", start + self.rank * columns.width)
                sums = _Sums.zero(k, columns, column)
                levels = _Levels(sums, -(-self.count // self.tiles))
                inside = k.let("inside_end", k.select(column < columns.rest, end, 0))
                with k.loop("i", first, inside) as i:
                    position = k.variable("position", i)
                    with k.when(is_sorted):
                        k.assign(position, self._position(i))
                    with k.otherwise(), k.when(self._row(i).ne(goal)):
                        k.assign(position, -1)
                    with k.when(position >= 0):
                        sums.add(position)
                        levels.add()
                levels.end()
                sums.put(self.across, self.threads)
                k.barrier()
                with k.loop("sum", k.thread, tile * columns.count, self.threads) as number_of_sum:
                    at = k.let("at", number_of_sum // tile * self.threads + number_of_sum % tile)
                    total = k.variable("total", k.load(self.across, at))
                    with k.loop("other", 1, self.tiles) as other:
                        k.accumulate(total, "sum", k.load(self.across, at + other * tile))
                    k.store(self.across, at, total)
                k.barrier()
                with k.when((k.thread < tile) & (column < columns.rest)):
                    sums.take(self.across, self.threads).store(goal)
                k.barrier()

    def _share(self, size: Expr, rank: Expr) -> Expr:
        """Where the part of a tile begins: size * rank // tiles, without overflow."""
        return size // self.tiles * rank + size % self.tiles * rank // self.tiles


def _local_bytes(columns: _Columns, less: int, word_access: bool) -> int:
    """The bytes of local memory, with arrays `less` times smaller than usual."""
    item = max(np.dtype(columns.dtype).itemsize, WORD if word_access else 1)
    return (WORD * (_LISTED + 3 * _MOST_ROWS) + item * _THREADS * columns.count) // less + 64


@dataclass(frozen=True)
class _Sums:
    """The sums of a thread's columns, from `column` on: a variable for each part."""

    k: KernelBuilder
    columns: _Columns
    column: Expr
    variables: list[Var]

    @classmethod
    def zero(cls, k: KernelBuilder, columns: _Columns, column: Expr, name: str = "sums") -> _Sums:
        """The sums before anything is added."""
        zero = k.identity("sum", columns.dtype, columns.width)
        variables = [k.variable(f"{name}{part}", zero) for part in range(len(columns.steps))]
        return cls(k, columns, column, variables)

    def _inside(self, step: int) -> Expr | None:
        """Whether a part's columns exist; None if they surely do, as those of the first part."""
        rest = self.columns.rest
        return self.column + step < rest if step and rest % self.columns.span else None

    def _index(self, row: Expr, step: int) -> Expr:
        place = row * self.columns.rest + self.column
        return place + step if step else place

    def add(self, position: Expr) -> None:
        """Add the row of the input at a position."""
        k, width = self.k, self.columns.width
        for part, (variable, step) in enumerate(zip(self.variables, self.columns.steps, strict=True)):
            load = k.load_vector(k.inputs[0], self._index(position, step), width, width, self._inside(step))
            k.accumulate(variable, "sum", k.let(f"more{part}", load))

    def store(self, row: Expr) -> None:
        """Store the sums as those of a row."""
        k, output = self.k, self.k.outputs[0]
        for variable, step in zip(self.variables, self.columns.steps, strict=True):
            inside, index = self._inside(step), self._index(row, step)
            if inside is None:
                k.store(output, index, variable, self.columns.width)
            else:
                with k.when(inside):
                    k.store(output, index, variable, self.columns.width)

    def put(self, shared: Memory, threads: int) -> None:
        """Write the sums to local memory."""
        for number in range(self.columns.count):
            part, lane = divmod(number, self.columns.width)
            self.k.store(shared, self.k.thread + number * threads, self.k.lane(self.variables[part], lane))

    def take(self, shared: Memory, threads: int) -> _Sums:
        """Read the sums from local memory."""
        k, width = self.k, self.columns.width
        totals = []
        for part in range(len(self.variables)):
            items = [k.load(shared, k.thread + (part * width + lane) * threads) for lane in range(width)]
            totals.append(k.let(f"totals{part}", k.vector(items)))
        return replace(self, variables=totals)


class _Levels:
    """Long floating-point sums in levels: the sum of a block is added to the next level."""

    def __init__(self, sums: _Sums, most: int) -> None:
        """`most`: the largest possible number of items."""
        k = self.k = sums.k
        self._sums = [sums]
        self._taken: list[Var] = []
        while most > BLOCK and sums.columns.dtype.startswith("float"):
            most, level = -(-most // BLOCK), len(self._taken)
            self._taken.append(k.variable(f"taken{level}", 0))
            self._sums.append(_Sums.zero(k, sums.columns, sums.column, f"level{level + 1}_"))

    def add(self, level: int = 0) -> None:
        """Count an item that was added to the first level."""
        if level == len(self._taken):
            return
        k, taken = self.k, self._taken[level]
        k.assign(taken, taken + 1)
        with k.when(taken.eq(BLOCK)):
            self._raise(level)
            for variable in self._sums[level].variables:
                k.assign(variable, k.identity("sum", variable.type.dtype, variable.type.width))
            k.assign(taken, 0)
            self.add(level + 1)

    def end(self) -> None:
        """Move the total to the sums of the first level."""
        for level in range(len(self._taken)):
            self._raise(level)
        if self._taken:
            for first, last in zip(self._sums[0].variables, self._sums[-1].variables, strict=True):
                self.k.assign(first, last)

    def _raise(self, level: int) -> None:
        """Add the sums of a level to the next level."""
        for variable, above in zip(self._sums[level].variables, self._sums[level + 1].variables, strict=True):
            self.k.accumulate(above, "sum", variable)
