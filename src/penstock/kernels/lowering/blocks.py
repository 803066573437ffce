"""Long sums in blocks, so that their error grows with the logarithm of their length.

An accumulator takes at most `BLOCK` values. It is then added to the accumulator of the next level, which
takes as many blocks, and so on. Blocks do not depend on the device; short sums need no second level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.graph.reducing import BLOCK
from penstock.kernels import ir

# The partial results that a reduction ends with, vectorised or not; also the least lanes of a CPU's vectors.
LANES = 8

# Returns the statements that start the accumulators of this level, and those that add them to the next level.
NextLevel = Callable[[], tuple[list[ir.Statement], list[ir.Statement]]]


def is_inexact(operation: str, dtype: str) -> bool:
    """Whether a reduction loses so much to rounding that long ones need blocks."""
    return operation == "sum" and dtype.startswith("float")


def depends_on_order(operation: str, dtype: str) -> bool:
    """Whether the bits of a reduction depend on its order."""
    return operation in ("sum", "prod") and dtype.startswith("float")


def in_blocks(loop: ir.For, each: int, next_level: NextLevel) -> tuple[ir.For, int]:
    """A loop that adds `each` values per iteration, in blocks, and how many values its last level adds."""
    if each * loop.trips > BLOCK and 2 * each > BLOCK:
        before, after = next_level()
        loop, each = replace(loop, body=[*before, *loop.body, *after]), 1
    while each * loop.trips > BLOCK:
        before, after = next_level()
        loop, each = _cut(loop, BLOCK // each, before, after), 1
    return loop, each * loop.trips


def _cut(loop: ir.For, turns: int, before: list[ir.Statement], after: list[ir.Statement]) -> ir.For:
    """A loop over blocks of `turns` iterations of another."""
    assert isinstance(loop.step, ir.Const)
    size, blocks = turns * int(loop.step.value), -(-loop.trips // turns)
    block, begin, end = (ir.Var(f"{loop.name}_{word}") for word in ("block", "begin", "end"))
    full: ir.Expr = begin + size
    if loop.start != ir.Const(0) or loop.stop != ir.Const(blocks * size):
        full = ir.Select(ir.INT, loop.stop - begin < size, loop.stop, full)
    part = replace(loop, start=begin, stop=end, trips=turns)
    start = block * size if loop.start == ir.Const(0) else loop.start + block * size
    body = [ir.Let(begin.name, start), ir.Let(end.name, full), *before, part, *after]
    return ir.loop(block.name, 0, blocks, body, trips=blocks)


class Sums:
    """The accumulators of reductions in a loop; floating-point sums get further levels.

    On a CPU, an accumulator may be an array of partial results that take values in turn. From the next level
    on, only the first `LANES` of them stay apart.
    """

    def __init__(self, new_name: Callable[[str], str]) -> None:
        self._new_name = new_name
        self._kinds: dict[str, tuple[ir.Type, str]] = {}  # of each accumulator's first level, and reduction
        self._names: dict[str, str] = {}  # of each accumulator: the name of its last level
        self._lengths: dict[str, int] = {}  # of each level that is an array

    def add(self, name: str, kind: ir.Type, operation: str, length: int = 0) -> None:
        """Add an accumulator; `length`: that of an array."""
        self._kinds[name], self._names[name] = (kind, operation), name
        if length:
            self._lengths[name] = length

    def last(self, name: str) -> str:
        """The name of an accumulator's last level."""
        return self._names[name]

    def start(self, name: str, level: str = "") -> list[ir.Statement]:
        """The statements that start a level of an accumulator, by default the last."""
        level = level or self._names[name]
        (kind, operation), length = self._kinds[name], self._lengths.get(level, 0)
        kind = kind if level == name else folded_type(kind)
        if not length:
            return [ir.Declare(level, ir.Identity(kind, operation))]
        turns = length // kind.width
        store = ir.Store(ir.Identity(kind, operation), level, kind.dtype, ir.Var("chain") * kind.width)
        loop = ir.loop("chain", 0, turns, [store], unrolled=turns if kind.width > 1 else 0)
        return [ir.RegisterArray(level, kind.dtype, length), loop]

    def blocked(self, loop: ir.For, each: int = 1) -> tuple[ir.For, int]:
        """`in_blocks` for a loop that changes some of the accumulators."""
        changed = {
            statement.target.name for statement in ir.walk(loop.body) if isinstance(statement, ir.Accumulate)
        }
        long = [
            name
            for name, (kind, operation) in self._kinds.items()
            if self._names[name] in changed and is_inexact(operation, kind.dtype)
        ]
        return in_blocks(loop, each, lambda: self._next_level(long)) if long else (loop, 1)

    def _next_level(self, names: Sequence[str]) -> tuple[list[ir.Statement], list[ir.Statement]]:
        before: list[ir.Statement] = []
        after: list[ir.Statement] = []
        for name in names:
            (kind, operation), part = self._kinds[name], self._names[name]
            kind = folded_type(kind)
            total = self._names[name] = self._new_name("total")
            before += self.start(name, part)
            if part not in self._lengths or kind.width == LANES:
                statements, value = self.folded(name, ir.Const(0), part)
                after += [*statements, ir.Accumulate(ir.Var(total, kind), operation, value, kind)]
                continue
            self._lengths[total], lane = LANES, ir.Var("lane")
            statements, value = self.folded(name, lane, part)
            statements.append(ir.Accumulate(ir.Var(total, kind), operation, value, kind, lane))
            after.append(ir.loop("lane", 0, LANES, statements))
        return before, after

    def folded(self, name: str, lane: ir.Expr, level: str = "") -> tuple[list[ir.Statement], ir.Expr]:
        """What computes a lane of a level, by default the last, and its value; for vectors, lane 0."""
        (whole, operation), level = self._kinds[name], level or self._names[name]
        kind = folded_type(whole)
        if level not in self._lengths:
            return [], _in_lanes(ir.Var(level, whole if level == name else kind), operation)
        statements: list[ir.Statement] = []

        def named(value: ir.Expr) -> ir.Expr:
            part = ir.Let(self._new_name("part"), value)
            statements.append(part)
            return ir.Var(part.name, kind)

        step, starts = int(kind.width > 1), range(0, self._lengths[level], LANES)
        parts = [named(ir.Load(kind, level, kind.dtype, lane + start, step)) for start in starts]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [named(ir.Combine(kind, operation, left, right)) for left, right in pairs]
        return statements, parts[0]


def folded_type(kind: ir.Type) -> ir.Type:
    """The type of the partial results that stay apart after the first level."""
    return ir.Type(kind.dtype, min(kind.width, LANES))


def _in_lanes(value: ir.Var, operation: str) -> ir.Expr:
    """A vector's items in at most `LANES` lanes, where the order does not matter."""
    kind = folded_type(value.type)
    if value.type == kind:
        return value
    low, high = (ir.Shuffle(kind, value, value, tuple(range(at, at + LANES))) for at in (0, LANES))
    return ir.Combine(kind, operation, low, high)
