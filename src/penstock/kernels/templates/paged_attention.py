"""Attention of few queries to keys and values in pages: each position that is attended to is read once.

The positions of a sequence are divided into splits, so that few sequences keep all of a device busy. The
maximum of the scores, the sum of the weights and the weighted sum of the values are updated as positions
come, and those of splits are combined at the end. Heads of queries that share keys are computed together.

A step on a GPU takes the last position of each sequence from its operands rather than from pages, and writes
that to its page: no other workgroup reads it there.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.graph.paged_attention import MOST_QUERIES
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.ir.expressions import Const, Expr, Type, Var
from penstock.kernels.source import KernelSource
from penstock.kernels.templates.launches import Launch, Lowering, Tasks, is_cpu
from penstock.kernels.templates.paged_gpu import by_threads
from penstock.kernels.templates.paged_operands import LOWEST
from penstock.kernels.templates.paged_prompts import lanes_of, prompt_attention
from penstock.kernels.templates.paged_tiles import by_tiles
from penstock.kernels.templates.paged_units import (
    Sizes,
    Step,
    Unit,
    combining,
    kernel_of,
    sizes_of,
    store_item,
)

_TILE = 64  # positions that a thread of a CPU has the scores of
_SUMS = 12  # vectors of results that are added to at a time


def paged_attention(node: Node, capabilities: Capabilities) -> Lowering:
    """The kernel of all splits, and the kernel that combines them if they are stored."""
    query, pages, table, _ = node.inputs
    if query.shape[1] > MOST_QUERIES:
        return prompt_attention(node, capabilities)
    sizes = sizes_of(query, pages, table, node.attributes, capabilities)
    build = _on_cpu if is_cpu(capabilities) else _on_gpu
    inputs = (1, 2, 3, 4)
    if not sizes.stores_splits:
        return Lowering((Launch(build(sizes, capabilities), (0, *inputs)),))
    splits = Launch(build(sizes, capabilities), (5, 6, *inputs))
    combine = Launch(combining(sizes, capabilities), (0, 5, 6), operations=0)
    return Lowering((splits, combine), sizes.scratch)


def _on_gpu(sizes: Sizes, capabilities: Capabilities) -> KernelSource:
    k = kernel_of("attend_to_pages", sizes, capabilities)
    return on_gpu(k, sizes, capabilities, k.inputs[1:], None)


def on_gpu(
    k: KernelBuilder, sizes: Sizes, capabilities: Capabilities, memories: Sequence[Memory], step: Step | None
) -> KernelSource:
    """A workgroup has a split of a group of heads. `memories` are those of pages, table and positions."""
    build = by_tiles if sizes.tiled else by_threads
    return build(k, sizes, capabilities, memories, step)


# CPUs


def _on_cpu(sizes: Sizes, capabilities: Capabilities) -> KernelSource:
    """A task has a split of a group of heads, in tiles of positions."""
    lanes, width = lanes_of(sizes.size, sizes.type, capabilities)
    k = kernel_of("attend_to_pages", sizes, capabilities)
    tasks = Tasks(sizes.units * sizes.splits, capabilities)
    scores = k.shared("scores", sizes.type, sizes.together * _TILE, width=lanes)
    places = k.shared("places", "int32", _TILE)
    results = k.shared("results", sizes.type, sizes.together * sizes.size)
    heads = range(sizes.together)
    with tasks.each(k) as task:
        unit = Unit(k, sizes, task, k.inputs[2])
        start, stop = unit.positions(k.let("last", k.load(k.inputs[3], unit.query)))
        most = [k.variable(f"most{head}", LOWEST, sizes.type) for head in heads]
        sums = [k.variable(f"sum{head}", 0.0, sizes.type) for head in heads]
        with k.loop("cleared", 0, sizes.together * sizes.size) as item:
            k.store(results, item, 0.0)
        with k.loop("tile", start, stop, _TILE) as tile:
            count = k.let("count", k.call("minimum", stop - tile, _TILE))
            with k.loop("at", 0, count) as at:
                place = k.let("place", unit.place(k.let("position", tile + at)))
                k.store(places, at, place)
                for head in heads:
                    product = _dot(k, sizes, unit.head_row(head) * sizes.size, place, width, head)
                    k.store(scores, at + head * _TILE, unit.score(product))
            for head in heads:
                _weigh(k, sizes, head, lanes, (scores, results), count, (most[head], sums[head]))
            together = max(_SUMS // sizes.together, 1) * width
            for first in range(0, sizes.size, together):
                columns = range(first, min(first + together, sizes.size), width)
                _add_values(k, sizes, unit, columns, (scores, places, results), count)
        for head in heads:
            with k.loop(f"item{head}", 0, sizes.size) as item:
                result = k.load(results, item + head * sizes.size)
                store_item(k, sizes, unit, Const(head), item, (most[head], sums[head], result))
    return k.source(tasks.grid, tasks.group)


def _vector(k: KernelBuilder, memory: Memory, index: Expr, width: int) -> Expr:
    return k.load_vector(memory, index, width) if width > 1 else k.load(memory, index)


def _dot(k: KernelBuilder, sizes: Sizes, query: Expr, key: Expr, width: int, head: int) -> Expr:
    """The product of a query and a key, whose first items are given."""
    zero = Const(0.0, Type(sizes.type))
    total = k.variable(f"products{head}", k.broadcast(zero, width) if width > 1 else zero)
    for column in range(0, sizes.size, width):
        left = k.let(f"left{head}_{column}", _vector(k, k.inputs[0], query + column, width))
        right = k.let(f"right{head}_{column}", _vector(k, k.inputs[1], key + column, width))
        k.multiply_add(total, left, right)
    return k.block_reduce(f"product{head}", "sum", total, 1, 1)


def _weigh(
    k: KernelBuilder,
    sizes: Sizes,
    head: int,
    lanes: int,
    arrays: tuple[Memory, Memory],
    count: Expr,
    known: tuple[Var, Var],
) -> None:
    """Replace the scores of a tile by weights, `lanes` at a time, and rescale what was summed before."""
    (scores, results), (most, total) = arrays, known
    first = head * _TILE
    end = k.let(f"end{head}", (count + (lanes - 1)) // lanes * lanes)
    with k.loop(f"at_rest{head}", count, end) as at:
        k.store(scores, at + first, LOWEST)
    before = k.let(f"before{head}", most)
    highest = k.variable(f"highest{head}", k.load_vector(scores, Const(first), lanes))
    with k.loop(f"at_most{head}", lanes, end, lanes) as at:
        k.assign(highest, k.call("maximum", highest, k.load_vector(scores, at + first, lanes)))
    greatest = k.block_reduce(f"greatest{head}", "max", highest, 1, 1)
    k.assign(most, k.call("maximum", most, greatest))
    factor = k.let(f"factor{head}", k.call("exp", before - most))
    weights = k.variable(f"weights{head}", k.broadcast(Const(0.0, Type(sizes.type)), lanes))
    with k.loop(f"at_weight{head}", 0, end, lanes) as at:
        score = k.let(f"score{head}", k.load_vector(scores, at + first, lanes))
        power = k.call("exp", k.call("subtract", score, k.broadcast(most, lanes)))
        weight = k.let(f"weight{head}", power)
        k.store(scores, at + first, weight)
        k.assign(weights, k.call("add", weights, weight))
    added = k.block_reduce(f"added{head}", "sum", weights, 1, 1)
    k.assign(total, total * factor + added)
    with k.loop(f"scaled{head}", 0, sizes.size) as item:
        place = item + head * sizes.size
        k.store(results, place, k.load(results, place) * factor)


def _add_values(
    k: KernelBuilder,
    sizes: Sizes,
    unit: Unit,
    columns: range,
    arrays: tuple[Memory, Memory, Memory],
    count: Expr,
) -> None:
    """Add some columns of the weighted values of a tile to the results of all heads, in vectors."""
    (scores, places, results), width = arrays, columns.step
    totals = {
        (head, column): k.variable(
            f"total{head}_{column}", _vector(k, results, Const(head * sizes.size + column), width)
        )
        for head in range(sizes.together)
        for column in columns
    }
    with k.loop(f"at_value{columns.start}", 0, count) as at:
        place = k.let("place", k.load(places, at) + unit.values)
        values = {
            column: k.let(f"value{column}", _vector(k, k.inputs[1], place + column, width))
            for column in columns
        }
        for head in range(sizes.together):
            weight = k.load(scores, at + head * _TILE)
            weight = k.let(f"factor{head}", k.broadcast(weight, width) if width > 1 else weight)
            for column, value in values.items():
                k.multiply_add(totals[head, column], weight, value)
    for (head, column), total in totals.items():
        k.store(results, Const(head * sizes.size + column), total)
