"""Attention of a query per sequence to keys and values in pages, on a GPU.

The positions of a sequence are divided among workgroups, each of which attends to a part of them, a chunk at a
time, with the queries of all heads that share the keys. The scores never leave a workgroup. A second kernel
weighs the parts of a sequence by their sums, unless there is only one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, inf

from penstock.drivers.driver import Capabilities
from penstock.graph.node import Node
from penstock.kernels.builder import KernelBuilder, Memory
from penstock.kernels.ir.expressions import Expr, Var
from penstock.kernels.source import KernelSource
from penstock.kernels.templates.launches import Launch, Lowering, group_size

_CHUNK = 128  # positions, each with the scores of a thread
_LOAD_BYTES = 16  # that a thread reads at once
_MOST_QUERIES = 8  # heads of queries whose sums a thread holds
_MOST_PARTS = 64  # of a sequence, which the second kernel reads one after the other
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
    parts = min(chunks, _MOST_PARTS)
    queries = next(n for n in range(_MOST_QUERIES, 0, -1) if heads // key_heads % n == 0)
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
    _load_queries(k, p, memory.query, row * p.heads + head)
    k.barrier()
    length = k.let("length", k.call("minimum", k.uniform("given", memory.length), p.listed * p.page))
    first = k.let("first", p.first(k, length))
    most = [k.variable(f"most{q}", -inf, "float32") for q in range(p.queries)]
    total = [k.variable(f"total{q}", 0.0, "float32") for q in range(p.queries)]
    sums = [k.registers(f"sums{q}", "float32", p.vector) for q in range(p.queries)]
    for own in sums:
        for lane in range(p.vector):
            k.store(own, lane, 0.0)
    with k.loop("chunk", 0, p.chunks) as chunk:
        start = k.let("start", (part * p.chunks + chunk) * p.threads)
        with k.when((start < length) & (start + p.threads > first)):
            _chunk(k, p, memory, _Place(row, key_head, start, first, length), most, total, sums)
    _finish(k, p, memory, sums, most, total, _Target(row, head, part))
    return k.source((p.sequences * p.key_heads * p.shares * p.parts,), (p.threads,))


class _Local:
    """The memory of a workgroup."""

    def __init__(self, k: KernelBuilder, p: _Problem) -> None:
        self.quads = 4 if p.width % 4 == 0 else 1  # items of a query that are read at once
        self.length = k.shared("lengths", "int32", 1)
        self.query = k.shared("query", "float32", p.queries * p.width, width=self.quads)
        self.rows = k.shared("rows", "int32", p.threads)  # where the keys of each position lie
        self.weights = k.shared("weights", "float32", p.queries * p.threads)
        self.sums = k.shared("partial_sums", "float32", p.threads * p.vector)


@dataclass(frozen=True)
class _Place:
    """The chunk of a workgroup, and which positions its query attends to."""

    row: Expr
    key_head: Expr
    start: Expr
    first: Expr
    length: Expr

    def seen(self, offset: Expr) -> Expr:
        """Whether the query attends to a position of the chunk."""
        position = self.start + offset
        return (position < self.length) & (position >= self.first)


def _load_queries(k: KernelBuilder, p: _Problem, query: Memory, first: Expr) -> None:
    """The queries, times the scale of the scores, to local memory."""
    each = 4 if p.width % 4 == 0 else 1
    with k.loop("item", k.thread, p.queries * p.width // each, p.threads) as item:
        if each == 1:
            k.store(query, item, k.load(k.inputs[0], first * p.width + item) * p.scale)
        else:
            given = k.let("given_query", k.load_vector(k.inputs[0], first * p.width + item * 4, 4, 4))
            lanes = [k.let(f"scaled{lane}", k.lane(given, lane) * p.scale) for lane in range(4)]
            k.store(query, item * 4, k.let("scaled", k.vector(lanes)), 4)


def _chunk(
    k: KernelBuilder,
    p: _Problem,
    memory: _Local,
    place: _Place,
    most: list[Var],
    total: list[Var],
    sums: list[Memory],
) -> None:
    """Attend to a chunk, and add it to the sums, which are relative to the largest score so far."""
    position = k.let("position", place.start + k.thread)
    seen = k.let("seen", place.seen(k.thread))
    page = k.let("page", k.load_index(k.inputs[2], _listed(k, p, place.row, position), p.pages))
    inside = k.let("inside", seen & (page >= 0))
    own = (page * p.key_heads + place.key_head) * p.page + position % p.page
    key = k.let("key", k.select(inside, own * p.width, -1))
    k.store(memory.rows, k.thread, key)
    scores = [k.variable(f"score{q}", 0.0, "float32") for q in range(p.queries)]
    with k.when(inside):
        _scores(k, p, memory, key, scores)
    for q, score in enumerate(scores):
        if p.softcap:
            k.assign(score, k.call("tanh", score / p.softcap) * p.softcap)
        k.assign(score, k.select(inside, score, -inf))
        largest = k.block_reduce(f"largest{q}", "max", score, p.threads, p.threads)
        new = k.let(f"new{q}", k.call("maximum", most[q], largest))
        # Nothing was seen so far, or will be weighed with what was.
        old = k.let(f"old{q}", k.select(most[q].eq(-inf), 0.0, k.call("exp", most[q] - new)))
        weight = k.variable(f"weight{q}", k.select(inside, k.call("exp", score - new), 0.0))
        k.store(memory.weights, k.thread + q * p.threads, weight)
        added = k.block_reduce(f"added{q}", "sum", weight, p.threads, p.threads)
        k.assign(total[q], total[q] * old + added)
        k.assign(most[q], new)
        for lane in range(p.vector):
            k.store(sums[q], lane, k.load(sums[q], lane) * old)
    k.barrier()
    _values(k, p, memory, sums)
    k.barrier()  # before the next chunk overwrites weights and rows


def _listed(k: KernelBuilder, p: _Problem, row: Expr, position: Expr) -> Expr:
    """Where the table has the page of a position."""
    return row * p.listed + k.call("minimum", position // p.page, p.listed - 1)


def _scores(k: KernelBuilder, p: _Problem, memory: _Local, key: Expr, scores: list[Var]) -> None:
    """Products of a key with the queries."""
    each = memory.quads if p.vector % memory.quads == 0 else 1
    with k.loop("item", 0, p.width, p.vector, unrolled=_UNROLLED) as item:
        given = k.let("given_key", k.load_vector(k.inputs[1], key + item, p.vector, p.vector))
        for q, score in enumerate(scores):
            for start in range(0, p.vector, each):
                place = q * p.width + item + start
                if each == 1:
                    k.multiply_add(score, k.lane(given, start), k.load(memory.query, place))
                    continue
                query = k.let(f"query{q}_{start}", k.load_vector(memory.query, place, each, each))
                for lane in range(each):
                    k.multiply_add(score, k.lane(given, start + lane), k.lane(query, lane))


def _values(k: KernelBuilder, p: _Problem, memory: _Local, sums: list[Memory]) -> None:
    """Add the values of a chunk by their weights. Neighbouring threads read neighbouring items."""
    threads = p.width // p.vector  # that read the values of a position
    together = p.threads // threads  # positions
    half = p.pages * p.key_heads * p.page * p.width  # the values lie after all keys
    item = k.let("value_item", k.thread % threads * p.vector)
    with k.loop("offset", k.thread // threads, p.threads, together, unrolled=_UNROLLED) as offset:
        key = k.let("value_row", k.load(memory.rows, offset))
        used = k.let("used", (key >= 0) & (k.thread < together * threads))
        value = k.let(
            "value", k.load_vector(k.inputs[1], key + item + half, p.vector, p.vector, mask=used)
        )
        for q, own in enumerate(sums):
            weight = k.let(f"value_weight{q}", k.load(memory.weights, offset + q * p.threads))
            for lane in range(p.vector):
                k.store(own, lane, k.load(own, lane) + k.lane(value, lane) * weight)


@dataclass(frozen=True)
class _Target:
    """Where the results of a workgroup belong."""

    row: Expr
    head: Expr
    part: Expr


def _finish(
    k: KernelBuilder,
    p: _Problem,
    memory: _Local,
    sums: list[Memory],
    most: list[Var],
    total: list[Var],
    target: _Target,
) -> None:
    """Add up what the threads have of each item, and write it."""
    threads = p.width // p.vector
    together = p.threads // threads
    for q, own in enumerate(sums):
        for lane in range(p.vector):
            k.store(memory.sums, k.thread * p.vector + lane, k.load(own, lane))
        k.barrier()
        result = k.let(f"result{q}", target.row * p.heads + target.head + q)
        place = result if p.parts == 1 else result * p.parts + target.part
        with k.loop(f"item{q}", k.thread, p.width, p.threads) as item:
            sum_ = k.variable(f"sum{q}", 0.0, "float32")
            with k.loop(f"other{q}", 0, together, unrolled=_UNROLLED) as other:
                k.assign(sum_, sum_ + k.load(memory.sums, other * p.width + item))
            if p.parts == 1:
                sum_ = k.select(total[q] > 0, sum_ / total[q], 0.0)
            k.store(k.outputs[0], place * p.width + item, sum_)
        if p.parts > 1:
            with k.when(k.thread.eq(0)):
                k.store(k.outputs[1], place * 2, most[q])
                k.store(k.outputs[1], place * 2 + 1, total[q])
        if q + 1 < p.queries:
            k.barrier()


def _join(p: _Problem, capabilities: Capabilities) -> KernelSource:
    """The parts of a sequence, weighed by the largest score and the sum of each."""
    threads = group_size(p.width, capabilities)
    k = KernelBuilder("join_attended", capabilities, [p.dtype], ["float32", "float32", "int32"])
    result = k.let("result", k.group())
    length = k.let(
        "length", k.call("minimum", k.load(k.inputs[2], result // p.heads), p.listed * p.page)
    )
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
