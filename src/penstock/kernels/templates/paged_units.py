"""How attention of few queries to pages is divided: splits of positions, and what is known of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.dialects import dialect_of
from penstock.kernels.ir.expressions import HALF_PRECISION, Const, Expr, Var
from penstock.kernels.source import KernelSource, item_size
from penstock.kernels.templates.launches import Tasks, is_cpu
from penstock.kernels.templates.paged_operands import LOWEST, Operands, operands_of

_MOST_HEADS = 8  # of queries that are computed together
FEW_HEADS = 4  # of which a thread of a GPU can have several positions at once
ITEMS = 8  # of a position, that a thread of a GPU has
THREADS = 128  # of a workgroup of a GPU
MORE_THREADS = 256  # where they exchange values without local memory
RESIDENT = 512  # threads for each compute unit of a GPU
TILE = 16  # positions that a warp has on tensor cores
ROUND = {64: 256, 128: 128}  # positions that a workgroup reads at a time there, by the size of a head
_CLUSTER = 8  # workgroups that every device with clusters takes in one
# Of a workgroup in a cluster, where a device has room for more workgroups. Each waits for memory, and more of
# them would take longer than it does to combine splits in device memory.
_MOST_ROUNDS = 4
_LEAST = 64  # positions of a split of a GPU
_CPU_LEAST = 512  # of a CPU
_AT_ONCE = 32  # splits that are read at a time


@dataclass(frozen=True)
class Sizes(Operands):
    """The sizes of the operands, and how the work is divided."""

    together: int  # heads of queries
    splits: int
    tiled: bool  # on tensor cores
    clustered: bool  # the splits of a unit are the workgroups of a cluster

    @property
    def units(self) -> int:
        """How many groups of heads there are, of all queries."""
        return self.rows * self.length * self.heads // self.together

    @property
    def share(self) -> int:
        """The positions of a split, at most."""
        reach = self.width * self.page
        return min(reach, self.window or reach) // self.splits

    @property
    def stores_splits(self) -> bool:
        """Whether splits are combined in device memory."""
        return self.splits > 1 and not self.clustered

    @property
    def scratch(self) -> tuple[int, ...]:
        """The bytes of the results of splits, and of their maxima and sums."""
        results = self.units * self.together * self.splits * item_size(self.type)
        return (results * self.size, results * 2) if self.stores_splits else ()


def sizes_of(
    query: Node, pages: Node, table: Node, attributes: Mapping[str, Any], capabilities: Capabilities
) -> Sizes:
    """The sizes of a node with these inputs and attributes."""
    given = operands_of(query, pages, table, attributes)
    groups, reach = given.groups, given.width * given.page
    together = max(heads for heads in range(1, min(groups, _MOST_HEADS) + 1) if groups % heads == 0)
    seen = min(reach, given.window or reach)
    units = given.rows * given.length * given.heads // together
    tiled = (
        capabilities.tensor_cores
        and given.dtype in HALF_PRECISION
        and given.size in ROUND
        and given.page % TILE == 0
    )
    if is_cpu(capabilities):
        splits, least = -(-capabilities.compute_units // units), _CPU_LEAST
    else:  # all workgroups run at once
        threads = MORE_THREADS if tiled else threads_of(given.size, together, capabilities)
        splits = capabilities.compute_units * (RESIDENT // threads) // units
        least = MORE_THREADS // 32 * TILE if tiled else _LEAST
    splits = max(min(splits, seen // least), 1)
    most = capabilities.compute_units // units
    cluster = _in_cluster(splits, most, seen, given.size) if tiled and capabilities.clusters else 1
    splits = cluster if cluster > 1 else splits
    return Sizes(**vars(given), together=together, splits=splits, tiled=tiled, clustered=cluster > 1)


def _in_cluster(splits: int, most: int, seen: int, size: int) -> int:
    """How many splits a cluster has in place of these; 1 where it would be too few, or more than `most`.

    Each workgroup has a compute unit for itself. With two of them in each, clusters begin late, and a step
    takes longer: on an H200, one of four sequences of Llama-1B took 0.92 ms, and 0.88 without clusters, but
    one of two 0.86 and 0.89.
    """
    count = min(1 << splits.bit_length() - 1, _CLUSTER)
    enough = count == splits or seen // count <= _MOST_ROUNDS * ROUND[size]
    return count if enough and count <= most else 1


def threads_of(size: int, together: int, capabilities: Capabilities) -> int:
    """The threads of a workgroup of a GPU."""
    more = dialect_of(capabilities).shuffles and together <= FEW_HEADS
    wanted = max(MORE_THREADS if more else THREADS, lanes_of(size))
    return min(wanted, capabilities.max_group_size)


def lanes_of(size: int) -> int:
    """How many threads of a GPU share a position."""
    return 1 << (size // math.gcd(size, ITEMS) - 1).bit_length()


class Unit:
    """Which queries and positions a task has; names that both kinds of kernel use."""

    def __init__(self, k: KernelBuilder, sizes: Sizes, task: Expr, table: Memory) -> None:
        self._k, self._sizes, self._table = k, sizes, table
        self.split = k.let("split", task % sizes.splits)
        self.number = unit = k.let("unit", task // sizes.splits)
        units_of_query = sizes.heads // sizes.together
        self.query = k.let("query", unit // units_of_query)  # of all rows
        self.row = k.let("row", self.query // sizes.length)
        self.head = k.let("head", unit % units_of_query * sizes.together)  # the first
        self.key_head = k.let("key_head", self.head // (sizes.heads // sizes.key_heads))

    def positions(self, last: Expr) -> tuple[Var, Var]:
        """The positions of the split, given the last that the query attends to: from, and up to."""
        k, sizes = self._k, self._sizes
        stop = k.let("all_stop", last + 1)
        start = k.let("all_start", k.call("maximum", stop - sizes.window, 0) if sizes.window else 0)
        share = k.let("share", (stop - start + sizes.splits - 1) // sizes.splits)
        first = k.let("first", start + self.split * share)
        return first, k.let("stop", k.call("minimum", first + share, stop))

    def tiles_of_positions(self, last: Expr, tile: int) -> tuple[Var, Var, Var]:
        """The first position that the query attends to, and those of the split, from a multiple of `tile` on.

        So no tile of positions lies in two pages.
        """
        k, sizes = self._k, self._sizes
        stop = k.let("all_stop", last + 1)
        begin = k.let("all_start", k.call("maximum", stop - sizes.window, 0) if sizes.window else 0)
        even = k.let("even_start", begin // tile * tile)
        share = k.let("share", (stop - even + (sizes.splits * tile - 1)) // (sizes.splits * tile) * tile)
        first = k.let("first", even + self.split * share)
        return begin, first, k.let("stop", k.call("minimum", first + share, stop))

    def page(self, position: Expr) -> Expr:
        """The page of a position."""
        sizes = self._sizes
        at = self.row * sizes.width + position // sizes.page
        return self._k.call("maximum", self._k.load_index(self._table, at, sizes.pages), 0)

    def place_in(self, page: Expr, position: Expr) -> Expr:
        """Where the keys of a position begin, given its page."""
        sizes = self._sizes
        row = (page * sizes.key_heads + self.key_head) * sizes.page + position % sizes.page
        return row * sizes.size

    def place(self, position: Expr) -> Expr:
        """Where the keys of a position begin."""
        return self.place_in(self._k.let(self._k.fresh("page"), self.page(position)), position)

    @property
    def values(self) -> int:
        """How far after its keys the values of a position are."""
        sizes = self._sizes
        return sizes.pages * sizes.key_heads * sizes.page * sizes.size

    def head_row(self, number: Expr | int) -> Expr:
        """Which row of queries one of the heads is."""
        return self.query * self._sizes.heads + self.head + number

    def score(self, product: Expr) -> Expr:
        """The score of a product of a query and a key."""
        k, sizes = self._k, self._sizes
        score = product * sizes.scale
        return k.call("tanh", score / sizes.softcap) * sizes.softcap if sizes.softcap else score


def kernel_of(name: str, sizes: Sizes, capabilities: Capabilities) -> KernelBuilder:
    """A kernel of splits: its outputs, and query, pages, table and positions."""
    outputs = [sizes.type] * 2 if sizes.stores_splits else [sizes.dtype]
    return KernelBuilder(name, capabilities, outputs, [sizes.dtype, sizes.dtype, "int32", "int32"])


class Step(Protocol):
    """The operands of a step, which put the last position of each row into its pages."""

    def wait(self, k: KernelBuilder) -> None:
        """Wait for what computes the operands, after reads of pages, table, positions and flags only."""

    def begin(self, k: KernelBuilder, sizes: Sizes, unit: Unit, threads: int, padded: int) -> None:
        """Have queries, keys and values in local memory, in rows of so many items."""

    def query(self, k: KernelBuilder, head: int, column: Expr, width: int) -> Var:
        """Items of a query."""

    def item(
        self, k: KernelBuilder, name: Literal["queries", "key", "value"], head: Expr, column: Expr
    ) -> Expr:
        """An item of an operand."""

    def puts(self, k: KernelBuilder, unit: Unit) -> Expr:
        """Whether the row of a workgroup puts its position, 1 or 0."""

    def pair(self, k: KernelBuilder, column: Expr, width: int) -> tuple[Var, Var]:
        """Items of the key and the value that are put."""

    def put(self, k: KernelBuilder, unit: Unit, last: Expr, condition: Expr) -> None:
        """Put them, under a condition."""

    def finish(self, k: KernelBuilder, unit: Unit) -> None:
        """What follows when the results of a split are stored."""


def known(
    k: KernelBuilder, sizes: Sizes, unit: Unit, positions: Memory, step: Step | None, shuffles: bool
) -> tuple[Expr, Expr | None]:
    """The last position that a workgroup attends to, and whether a step puts it, 1 or 0.

    Where threads exchange values by barriers, these have to be the same for all of them by rule.
    """
    if shuffles:
        last = k.let("last", k.load(positions, unit.query))
        return last, None if step is None else k.let("puts", step.puts(k, unit))
    known = k.shared("known", "int32", 2)
    with k.when(k.thread.eq(0)):
        k.store(known, 0, k.load(positions, unit.query))
        k.store(known, 1, 0 if step is None else step.puts(k, unit))
    last = k.uniform("last", known)
    return last, None if step is None else k.uniform("puts", known, 1)


def stored_until(
    k: KernelBuilder, last: Expr, puts: Expr | None, start: Expr, stop: Expr
) -> tuple[Expr, Expr]:
    """Whether a split has the position that a step puts, 1 or 0, and where its positions in pages end."""
    if puts is None:
        return Const(0), stop
    new = k.let("put_here", k.select(stop.eq(last + 1) & (start <= last), puts, 0))
    return new, k.let("stored", stop - new)


def store_item(
    k: KernelBuilder, sizes: Sizes, unit: Unit, head: Expr, column: Expr, known: tuple[Expr, Expr, Expr]
) -> None:
    """Write an item of a result, or of a split's, given the maximum, the sum of the weights, and the item."""
    _, total, result = known
    row = k.let(k.fresh("head_row"), unit.head_row(head))
    if sizes.stores_splits:
        place = k.let(k.fresh("place_in_split"), row * sizes.splits + unit.split)
        store_part(k, sizes, place, column, known, *k.outputs[:2])
    else:
        k.store(k.outputs[0], row * sizes.size + column, result / total)


def store_part(
    k: KernelBuilder,
    sizes: Sizes,
    place: Expr,
    column: Expr,
    known: tuple[Expr, Expr, Expr],
    values: Memory,
    sums: Memory,
) -> None:
    """Write an item of the result of a part of the positions, and its maximum and sum."""
    most, total, result = known
    k.store(values, place * sizes.size + column, result)
    with k.when(column.eq(0)):
        k.store(sums, place * 2, most)
        k.store(sums, place * 2 + 1, total)


# Splits


def combining(sizes: Sizes, capabilities: Capabilities, scalars: Sequence[str] = ()) -> KernelSource:
    """A task for each item of the result; `scalars` are those of the group."""
    k = KernelBuilder("combine_splits", capabilities, [sizes.dtype], [sizes.type] * 2, scalars)
    tasks = Tasks(sizes.units * sizes.together * sizes.size, capabilities)
    values, sums = k.inputs
    with tasks.each(k) as task:
        k.store(k.outputs[0], task, combined(k, sizes, task, values, sums))
    return k.source(tasks.grid, tasks.group)


def combined(k: KernelBuilder, sizes: Sizes, task: Expr, values: Memory, sums: Memory) -> Expr:
    """An item of the result, by the results, maxima and sums of all splits."""
    first = k.let("first_split", task // sizes.size * sizes.splits)
    parts = Parts(sizes.splits, first, sizes.size, task % sizes.size)
    _, total, result = weighted(k, sizes, parts, values, sums)
    return result / total


@dataclass(frozen=True)
class Parts:
    """Parts of the positions: how many, the first, how long the rows of their results are, and an item."""

    count: int
    first: Expr
    length: int
    item: Expr


def weighted(
    k: KernelBuilder, sizes: Sizes, parts: Parts, values: Memory, sums: Memory
) -> tuple[Var, Var, Var]:
    """The maximum of the scores of all parts, the sum of their weights, and an item of the weighted sum."""
    most = k.variable(k.fresh("most"), LOWEST, sizes.type)
    at_once = min(parts.count, _AT_ONCE)
    with k.loop(k.fresh("most_of"), 0, parts.count, unrolled=at_once) as part:
        k.assign(most, k.call("maximum", most, k.load(sums, (parts.first + part) * 2)))
    total = k.variable(k.fresh("total"), 0.0, sizes.type)
    result = k.variable(k.fresh("result"), 0.0, sizes.type)
    with k.loop(k.fresh("of_part"), 0, parts.count, unrolled=at_once) as part:
        place = k.let("part", parts.first + part)
        factor = k.let("factor", k.call("exp", k.load(sums, place * 2) - most))
        k.assign(total, total + factor * k.load(sums, place * 2 + 1))
        k.assign(result, result + factor * k.load(values, place * parts.length + parts.item))
    return most, total, result
