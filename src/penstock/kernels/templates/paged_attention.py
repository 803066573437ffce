"""Attention of a query per sequence to keys and values in pages, on a GPU.

The positions of a sequence are divided among workgroups, each of which attends to a part of them, a chunk at a
time, with the queries of all heads that share the keys. The scores never leave a workgroup. A second kernel
weighs the parts of a sequence by their sums, unless there is only one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, inf

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.ir.expressions import Expr, Var
from penstock.kernels.source import KernelSource
from penstock.kernels.templates.launches import Launch, Lowering, group_size

_CHUNK = 128  # positions that a workgroup attends to at a time, and its threads
_LOAD_BYTES = 16  # that a thread reads at once
_MOST_QUERIES = 8  # heads of queries whose sums a thread holds
_MOST_PARTS = 64  # of a sequence, which the second kernel reads one after the other
_GROUPS = 16  # workgroups for each compute unit; where there are more, each has several chunks
_UNROLLED = 8  # loads that are under way together


@dataclass(frozen=True)
class _Problem:
    """The sizes of a node, and how its work is divided."""

    dtype: str
    sequences: int
    heads: int
    key_heads: int
    width: int  # items of a head
    pages: int
    page: int  # positions of a page
    listed: int  # pages in the row of a table
    scale: float
    window: int
    softcap: float
    threads: int
    vector: int  # items that a thread reads at once
    queries: int  # heads of queries of a workgroup
    parts: int
    chunks: int  # of a part

    @property
    def lanes(self) -> int:
        """Threads that read a position together: a power of two, so that some may have nothing to read."""
        return 1 << (self.width // self.vector - 1).bit_length()

    @property
    def padded(self) -> bool:
        """Whether some threads have nothing to read."""
        return self.lanes * self.vector > self.width

    @property
    def together(self) -> int:
        """Positions that are read at a time."""
        return self.threads // self.lanes

    @property
    def weighing(self) -> int:
        """Threads that weigh the positions for a query: a power of two."""
        return 1 << (self.threads // self.queries).bit_length() - 1

    @property
    def per_key(self) -> int:
        """Heads of queries that share keys."""
        return self.heads // self.key_heads

    @property
    def shares(self) -> int:
        """Workgroups that the queries of a head of keys are divided among."""
        return self.per_key // self.queries

    def first(self, k: KernelBuilder, length: Expr) -> Expr:
        """The first position that the query attends to."""
        if not self.window:
            return length - length
        return k.call("maximum", length - self.window, 0)


def paged_attention(node: Node, capabilities: Capabilities) -> Lowering:
    """Kernels of `paged_attention`."""
    problem = _problem(node, capabilities)
    results = problem.sequences * problem.heads
    if problem.parts == 1:
        return Lowering((Launch(_attend(problem, capabilities), (0, 1, 2, 3, 4)),))
    scratch = (4 * results * problem.parts * problem.width, 4 * results * problem.parts * 2)
    return Lowering(
        (
            Launch(_attend(problem, capabilities), (5, 6, 1, 2, 3, 4)),
            Launch(_join(problem, capabilities), (0, 5, 6, 4), operations=0),
        ),
        scratch,
    )


def _problem(node: Node, capabilities: Capabilities) -> _Problem:
    query, cache, table, _ = node.inputs
    (sequences, heads, width), (_, pages, key_heads, page, _) = query.shape, cache.shape
    threads = group_size(_CHUNK, capabilities)
    chunks = -(-table.shape[1] * page // threads)
    queries = next(n for n in range(_MOST_QUERIES, 0, -1) if heads // key_heads % n == 0)
    enough = -(-_GROUPS * capabilities.compute_units // (sequences * heads // queries))
    parts = min(chunks, _MOST_PARTS, enough)
    return _Problem(
        str(node.dtype),
        sequences,
        heads,
        key_heads,
        width,
        pages,
        page,
        table.shape[1],
        **node.attributes,
        threads=threads,
        vector=gcd(width, _LOAD_BYTES // node.dtype.itemsize),
        queries=queries,
        parts=parts,
        chunks=-(-chunks // parts),
    )


def _attend(p: _Problem, capabilities: Capabilities) -> KernelSource:
    outputs = [p.dtype] if p.parts == 1 else ["float32", "float32"]
    k = KernelBuilder("attend_pages", capabilities, outputs, [p.dtype, p.dtype, "int32", "int32"])
    part = k.let("part", k.group() % p.parts)
    share = k.let("share", k.group() // p.parts % p.shares)
    key_head = k.let("key_head", k.group() // (p.parts * p.shares) % p.key_heads)
    row = k.let("row", k.group() // (p.parts * p.shares * p.key_heads))
    head = k.let("head", key_head * p.per_key + share * p.queries)  # the first of the workgroup
    memory = _Local(k, p)
    with k.when(k.thread.eq(0)):
        k.store(memory.length, 0, k.load(k.inputs[3], row))
    with k.when(k.thread < p.queries):
        k.store(memory.most, k.thread, -inf)
        k.store(memory.total, k.thread, 0.0)
    lane = k.let("lane", k.thread % p.lanes * p.vector)  # the first of the thread's items of a head
    queries = _queries(k, p, (row * p.heads + head) * p.width, lane)
    length = k.let("length", k.call("minimum", k.uniform("given", memory.length), p.listed * p.page))
    first = k.let("first", p.first(k, length))
    sums = [k.registers(f"sums{q}", "float32", p.vector) for q in range(p.queries)]
    for own in sums:
        for item in range(p.vector):
            k.store(own, item, 0.0)
    with k.loop("chunk", 0, p.chunks) as chunk:
        start = k.let("start", (part * p.chunks + chunk) * p.threads)
        with k.when((start < length) & (start + p.threads > first)):
            _find(k, p, memory, row, key_head, start, first, length)
            k.barrier()
            _score(k, p, memory, queries, lane)
            k.barrier()
            _weigh(k, p, memory)
            k.barrier()
            _add(k, p, memory, sums, lane)
            k.barrier()  # before the next chunk overwrites what this has read
    _finish(k, p, memory, sums, _Target(row, head, part))
    return k.source((p.sequences * p.key_heads * p.shares * p.parts,), (p.threads,))


class _Local:
    """The memory of a workgroup."""

    def __init__(self, k: KernelBuilder, p: _Problem) -> None:
        self.length = k.shared("lengths", "int32", 1)
        self.rows = k.shared("rows", "int32", p.threads)  # where the keys of positions lie; -1: not seen
        self.weights = k.shared("weights", "float32", p.queries * p.threads)  # scores before
        self.most = k.shared("most", "float32", p.queries)  # the largest score so far
        self.total = k.shared("total", "float32", p.queries)  # of the weights so far
        self.old = k.shared("old", "float32", p.queries)  # by which sums so far are multiplied
        self.sums = k.shared("partial_sums", "float32", p.threads * p.vector)


def _queries(k: KernelBuilder, p: _Problem, first: Expr, lane: Expr) -> list[Memory]:
    """The thread's items of all queries, times the scale of the scores."""
    queries = []
    mask = lane < p.width if p.padded else None
    for q in range(p.queries):
        place = first + lane + q * p.width
        given = k.let(f"given{q}", k.load_vector(k.inputs[0], place, p.vector, p.vector, mask))
        own = k.registers(f"query{q}", "float32", p.vector)
        for item in range(p.vector):
            k.store(own, item, k.lane(given, item) * p.scale)
        queries.append(own)
    return queries


def _find(
    k: KernelBuilder,
    p: _Problem,
    memory: _Local,
    row: Expr,
    key_head: Expr,
    start: Expr,
    first: Expr,
    length: Expr,
) -> None:
    """Where the keys of the chunk's positions lie, a position for each thread."""
    position = k.let("position", start + k.thread)
    listed = k.call("minimum", position // p.page, p.listed - 1)
    page = k.let("page", k.load_index(k.inputs[2], row * p.listed + listed, p.pages))
    seen = (position < length) & (position >= first) & (page >= 0)
    place = ((page * p.key_heads + key_head) * p.page + position % p.page) * p.width
    k.store(memory.rows, k.thread, k.select(seen, place, -1))


def _score(k: KernelBuilder, p: _Problem, memory: _Local, queries: list[Memory], lane: Expr) -> None:
    """Products of keys and queries. Neighbouring threads read neighbouring items, and add their parts."""
    for places, rows, keys in _batches(k, p, memory, lane, 0):
        for place, key, item in zip(places, rows, keys, strict=True):
            for q, query in enumerate(queries):
                part = k.variable(k.fresh("part"), 0.0, "float32")
                for number in range(p.vector):
                    k.multiply_add(part, k.lane(item, number), k.load(query, number))
                score = k.block_reduce(k.fresh("score"), "sum", part, p.threads, p.lanes)
                with k.when(lane.eq(0)):
                    k.store(memory.weights, place + q * p.threads, k.select(key >= 0, score, -inf))


def _batches(
    k: KernelBuilder, p: _Problem, memory: _Local, lane: Expr, skipped: int
) -> Iterator[tuple[list[Var], list[Var], list[Var]]]:
    """Positions of the chunk that are read together, where their keys lie, and the thread's items of each.

    All of a batch are read before any is used. `skipped` items lie before those that are read.
    """
    turns = p.threads // p.together
    batch = min(turns, _UNROLLED)
    with k.loop("turn", 0, turns, batch) as turn:
        places = [k.let(f"place{n}", (turn + n) * p.together + k.thread // p.lanes) for n in range(batch)]
        rows = [k.let(f"row{n}", k.load(memory.rows, place)) for n, place in enumerate(places)]
        items = []
        for n, row in enumerate(rows):
            mask = (row >= 0) & (lane < p.width) if p.padded else row >= 0
            at = row + lane + skipped if skipped else row + lane
            items.append(k.let(f"item{n}", k.load_vector(k.inputs[1], at, p.vector, p.vector, mask)))
        yield places, rows, items


def _weigh(k: KernelBuilder, p: _Problem, memory: _Local) -> None:
    """Weights from scores, relative to the largest so far. Each query has threads of its own."""
    rank, q = k.let("rank", k.thread % p.weighing), k.let("q", k.thread // p.weighing)
    mine = k.let("mine", q < p.queries)
    steps = -(-p.threads // p.weighing)
    scores = k.registers("scores", "float32", steps)
    highest = k.variable("highest", -inf, "float32")
    for step in range(steps):
        score = k.variable(f"read{step}", -inf, "float32")
        with k.when(mine):
            k.assign(score, k.load(memory.weights, q * p.threads + rank + step * p.weighing))
            if p.softcap:
                k.assign(score, k.call("tanh", score / p.softcap) * p.softcap)
                seen = k.load(memory.rows, rank + step * p.weighing) >= 0
                k.assign(score, k.select(seen, score, -inf))
        k.store(scores, step, score)
        k.assign(highest, k.call("maximum", highest, score))
    chunk_most = k.block_reduce("chunk_most", "max", highest, p.threads, p.weighing)
    before = k.variable("before", -inf, "float32")
    with k.when(mine):
        k.assign(before, k.load(memory.most, q))
    latest = k.let("latest", k.call("maximum", before, chunk_most))
    added = k.variable("added", 0.0, "float32")
    for step in range(steps):
        score = k.let(f"own{step}", k.load(scores, step))
        weight = k.let(f"weight{step}", k.select(score.eq(-inf), 0.0, k.call("exp", score - latest)))
        k.assign(added, added + weight)
        with k.when(mine):
            k.store(memory.weights, q * p.threads + rank + step * p.weighing, weight)
    sum_ = k.block_reduce("chunk_sum", "sum", added, p.threads, p.weighing)
    with k.when(mine & rank.eq(0)):
        old = k.let("factor", k.select(before.eq(-inf), 0.0, k.call("exp", before - latest)))
        k.store(memory.old, q, old)
        k.store(memory.most, q, latest)
        k.store(memory.total, q, k.load(memory.total, q) * old + sum_)


def _add(k: KernelBuilder, p: _Problem, memory: _Local, sums: list[Memory], lane: Expr) -> None:
    """Add the values of the chunk by their weights."""
    half = p.pages * p.key_heads * p.page * p.width  # the values lie after all keys
    if p.chunks > 1:
        for q, own in enumerate(sums):
            old = k.let(f"old{q}", k.load(memory.old, q))
            for item in range(p.vector):
                k.store(own, item, k.load(own, item) * old)
    for places, _, values in _batches(k, p, memory, lane, half):
        for place, value in zip(places, values, strict=True):
            for q, own in enumerate(sums):
                weight = k.let(k.fresh("weight"), k.load(memory.weights, place + q * p.threads))
                for item in range(p.vector):
                    k.store(own, item, k.load(own, item) + k.lane(value, item) * weight)


@dataclass(frozen=True)
class _Target:
    """Where the results of a workgroup belong."""

    row: Expr
    head: Expr
    part: Expr


def _finish(k: KernelBuilder, p: _Problem, memory: _Local, sums: list[Memory], target: _Target) -> None:
    """Add up what the threads have of each item, and write it."""
    for q, own in enumerate(sums):
        for item in range(p.vector):
            k.store(memory.sums, k.thread * p.vector + item, k.load(own, item))
        k.barrier()
        result = k.let(f"result{q}", target.row * p.heads + target.head + q)
        place = result if p.parts == 1 else result * p.parts + target.part
        total = k.let(f"total{q}", k.load(memory.total, q))
        with k.loop(f"item{q}", k.thread, p.width, p.threads) as item:
            sum_ = k.variable(f"sum{q}", 0.0, "float32")
            with k.loop(f"other{q}", 0, p.together, unrolled=_UNROLLED) as other:
                k.assign(sum_, sum_ + k.load(memory.sums, other * (p.lanes * p.vector) + item))
            whole = sum_ if p.parts > 1 else k.select(total > 0, sum_ / total, 0.0)
            k.store(k.outputs[0], place * p.width + item, whole)
        if p.parts > 1:
            with k.when(k.thread.eq(0)):
                k.store(k.outputs[1], place * 2, k.load(memory.most, q))
                k.store(k.outputs[1], place * 2 + 1, total)
        if q + 1 < p.queries:
            k.barrier()


def _join(p: _Problem, capabilities: Capabilities) -> KernelSource:
    """The parts of a sequence, weighed by the largest score and the sum of each."""
    threads = group_size(p.width, capabilities)
    k = KernelBuilder("join_attended", capabilities, [p.dtype], ["float32", "float32", "int32"])
    result = k.let("result", k.group())
    length = k.let("length", k.call("minimum", k.load(k.inputs[2], result // p.heads), p.listed * p.page))
    span = p.chunks * p.threads  # positions of a part
    begin = k.let("begin", p.first(k, length) // span)
    end = k.let("end", k.call("minimum", (length + (span - 1)) // span, p.parts))
    most = k.variable("most", -inf, "float32")
    with k.loop("part", begin, end, unrolled=_UNROLLED) as part:
        k.assign(most, k.call("maximum", most, k.load(k.inputs[1], (result * p.parts + part) * 2)))
    with k.loop("item", k.thread, p.width, threads) as item:
        sum_, total = k.variable("sum", 0.0, "float32"), k.variable("total", 0.0, "float32")
        with k.loop("other", begin, end, unrolled=_UNROLLED) as other:
            place = k.let("place", result * p.parts + other)
            weight = k.let("weight", k.call("exp", k.load(k.inputs[1], place * 2) - most))
            k.multiply_add(total, weight, k.load(k.inputs[1], place * 2 + 1))
            k.multiply_add(sum_, weight, k.load(k.inputs[0], place * p.width + item))
        k.store(k.outputs[0], result * p.width + item, k.select(total > 0, sum_ / total, 0.0))
    return k.source((p.sequences * p.heads,), (threads,))
