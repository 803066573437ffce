"""Attention of few queries to pages on a GPU: neighbouring threads share a position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.drivers.driver import Capabilities
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.dialects import dialect_of
from penstock.kernels.ir.expressions import HALF_PRECISION, Const, Expr, Type, Var
from penstock.kernels.source import KernelSource, item_size
from penstock.kernels.templates.paged_operands import LOWEST
from penstock.kernels.templates.paged_units import (
    FEW_HEADS,
    ITEMS,
    RESIDENT,
    THREADS,
    Parts,
    Sizes,
    Step,
    Unit,
    known,
    lanes_of,
    store_item,
    stored_until,
    threads_of,
    weighted,
)


@dataclass(frozen=True)
class _Division:
    """How a workgroup divides its positions."""

    threads: int
    lanes: int  # threads that share a position
    width: int  # items of a thread
    at_once: int  # positions of a thread in a step
    heads: int  # whose results are combined at a time

    @property
    def apart(self) -> int:
        """Positions of all threads."""
        return self.threads // self.lanes


def _divided(sizes: Sizes, capabilities: Capabilities) -> _Division:
    """As many positions at once as there are for all threads, and as local memory has room for."""
    width, lanes = math.gcd(sizes.size, ITEMS), lanes_of(sizes.size)
    threads = threads_of(sizes.size, sizes.together, capabilities)
    item = item_size(sizes.type)
    most = 4 if sizes.together <= FEW_HEADS else 2
    at_once = max(min(most, sizes.share // (threads // lanes)), 1)
    head_bytes = threads * (width + 1) * item
    reduce_bytes = 0 if dialect_of(capabilities).shuffles else threads * item  # of a block reduce
    room = capabilities.local_bytes - ((sizes.together + 2) * lanes * width + 4) * item
    while at_once > 1 and sizes.together * (at_once + 1) * reduce_bytes + head_bytes > room:
        at_once //= 2
    heads = (room - sizes.together * (at_once + 1) * reduce_bytes) // head_bytes
    return _Division(threads, lanes, width, at_once, max(min(heads, sizes.together), 1))


def by_threads(
    k: KernelBuilder, sizes: Sizes, capabilities: Capabilities, memories: Sequence[Memory], step: Step | None
) -> KernelSource:
    """A workgroup has a split of a group of heads; neighbouring threads share a position.

    Each set of them has positions of its own, and all results are combined at the end. `memories` are those
    of pages, table and positions.
    """
    pages, table, positions = memories
    division = _divided(sizes, capabilities)
    threads, width, apart = division.threads, division.width, division.apart
    unit = Unit(k, sizes, k.group(), table)
    last, puts = known(k, sizes, unit, positions, step, dialect_of(capabilities).shuffles)
    start, stop = unit.positions(last)
    slot = k.let("slot", k.thread // division.lanes)
    column = k.let("column", k.thread % division.lanes * width)
    inside = column < sizes.size if division.lanes * width > sizes.size else None
    new, stored = stored_until(k, last, puts, start, stop)

    def clipped(base: Expr, number: int) -> Expr:
        position = k.call("minimum", base + (slot + number * apart), stored - 1)
        return k.call("maximum", position, 0)

    def vector(name: str, memory: Memory, index: Expr) -> Var:
        if width == 1:
            return k.let(name, k.load(memory, index, inside))
        return k.let(name, k.load_vector(memory, index, width, width, inside))

    # The pages of the next positions are looked up before keys are waited for.
    numbers = range(division.at_once)
    ahead = [k.variable(f"page{number}", unit.page(clipped(start, number))) for number in numbers]
    heads = range(sizes.together)
    if step is None:
        rows = [unit.head_row(head) * sizes.size + column for head in heads]
        queries = [vector(f"query{head}", k.inputs[0], row) for head, row in zip(heads, rows, strict=True)]
    else:
        step.begin(k, sizes, unit, threads, division.lanes * width)
        queries = [step.query(k, head, column, width) for head in heads]
    running = [_Running(k, sizes, head, width) for head in heads]
    with k.loop("base", start, stored, apart * division.at_once) as base:
        keys, values, masks = [], [], []
        for number, page in enumerate(ahead):
            masks.append(k.let(f"seen{number}", base + (slot + number * apart) < stored))
            position = k.let(f"position{number}", clipped(base, number))
            place = k.let(f"place{number}", unit.place_in(page, position) + column)
            keys.append(vector(f"key{number}", pages, place))
            values.append(vector(f"value{number}", pages, place + unit.values))
        for number, page in enumerate(ahead):
            k.assign(page, unit.page(clipped(base + apart * division.at_once, number)))
        _take(k, sizes, unit, running, queries, (keys, values, masks), division)
    if step is not None:
        key, value = step.pair(k, column, width)
        seen = k.let("is_new", new.eq(1) & slot.eq(0))
        _take(k, sizes, unit, running, queries, ([key], [value], [seen]), division)
        step.put(k, unit, last, new.eq(1))
    _join_slots(k, sizes, unit, running, division)
    if step is not None:
        step.finish(k, unit)
    resident = max(RESIDENT // threads, 1) if threads > THREADS else 1
    return k.source((sizes.units * sizes.splits,), (threads,), resident, sizes.dtype in HALF_PRECISION)


def _take(
    k: KernelBuilder,
    sizes: Sizes,
    unit: Unit,
    running: Sequence[_Running],
    queries: Sequence[Var],
    positions: tuple[Sequence[Var], Sequence[Var], Sequence[Expr]],
    division: _Division,
) -> None:
    """Take the keys and values of further positions, as far as they are seen."""
    keys, values, masks = positions
    for head, query in enumerate(queries):
        scores = []
        for number, key in enumerate(keys):
            product = k.variable(k.fresh(f"product{head}"), 0.0, sizes.type)
            for lane in range(division.width):
                k.multiply_add(product, k.lane(query, lane), k.lane(key, lane))
            total = k.block_reduce(k.fresh(f"total{head}"), "sum", product, division.threads, division.lanes)
            seen = k.select(masks[number], unit.score(total), LOWEST)
            scores.append(k.let(k.fresh(f"score{head}"), seen))
        running[head].take(scores, masks, values)


class _Running:
    """What is known of the positions of a thread so far, for a head."""

    def __init__(self, k: KernelBuilder, sizes: Sizes, head: int, width: int) -> None:
        self._k, self._head = k, head
        zero = Const(0.0, Type(sizes.type))
        self.most = k.variable(f"most{head}", Const(LOWEST, Type(sizes.type)))
        self.sum = k.variable(f"sum{head}", zero)
        self.result = k.variable(f"result{head}", k.broadcast(zero, width) if width > 1 else zero)

    def take(self, scores: Sequence[Expr], masks: Sequence[Expr], values: Sequence[Expr]) -> None:
        """Take further positions, of which those count that are seen."""
        k, head = self._k, self._head
        most: Expr = self.most
        for score in scores:
            most = k.call("maximum", most, score)
        most = k.let(k.fresh(f"new_most{head}"), most)
        self.rescale(k.let(k.fresh(f"factor{head}"), k.call("exp", self.most - most)))
        k.assign(self.most, most)
        for score, seen, value in zip(scores, masks, values, strict=True):
            weight = k.select(seen, k.call("exp", score - most), 0.0)
            weight = k.let(k.fresh(f"weight{head}"), weight)
            k.assign(self.sum, self.sum + weight)
            k.assign(self.result, k.call("add", self.result, weight * value))

    def rescale(self, factor: Expr) -> None:
        """Multiply the sums."""
        k = self._k
        k.assign(self.sum, self.sum * factor)
        k.assign(self.result, factor * self.result)


def _join_slots(
    k: KernelBuilder, sizes: Sizes, unit: Unit, running: Sequence[_Running], division: _Division
) -> None:
    """Combine what the threads of a workgroup have, and store it; some heads at a time."""
    threads, lanes, width, together = division.threads, division.lanes, division.width, division.heads
    slots = division.apart
    padded = width + 1  # threads that store at once use banks of their own
    values = k.shared("merged", sizes.type, together * threads * padded)
    sums = k.shared("slot_sums", sizes.type, together * slots * 2)
    for first in range(0, sizes.together, together):
        heads = range(first, min(first + together, sizes.together))
        if first:
            k.barrier()  # the heads before were read
        for number, head in enumerate(heads):
            for lane in range(width):
                place = (number * threads + k.thread) * padded + lane
                k.store(values, place, k.lane(running[head].result, lane))
            with k.when((k.thread % lanes).eq(0)):
                place = k.let(f"place_of_slot{head}", (k.thread // lanes + number * slots) * 2)
                k.store(sums, place, running[head].most)
                k.store(sums, place + 1, running[head].sum)
        k.barrier()
        with k.loop(f"item{first}", k.thread, len(heads) * sizes.size, threads) as item:
            own = k.let(f"own_head{first}", item // sizes.size)
            column = k.let(f"own_column{first}", item % sizes.size)
            place_of_item = column // width * padded + column % width
            parts = Parts(slots, own * slots, lanes * padded, place_of_item)
            store_item(k, sizes, unit, own + first, column, weighted(k, sizes, parts, values, sums))
