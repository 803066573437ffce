"""Long sums in blocks, so that their error grows with the logarithm of their length.

One accumulator takes in no more than `BLOCK` values. Then it is added to the accumulator of the next level,
which takes in as many blocks, and so on. Lengths do not depend on the device; short sums are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.graph.reducing import BLOCK
from penstock.kernels.ir.expressions import INT, Combine, Const, Expr, Identity, Load, Select, Type, Var
from penstock.kernels.ir.statements import (
    Accumulate,
    Declare,
    For,
    If,
    Let,
    RegisterArray,
    Statement,
    Store,
)

LANES = 8  # of a CPU's vectors, and partial results of a reduction in the end, whether it has vectors or not

# Gives what starts the accumulators of the present level, and what adds them to those of the next.
NextLevel = Callable[[], tuple[list[Statement], list[Statement]]]


def is_inexact(operation: str, dtype: str) -> bool:
    """Whether the result of a reduction depends on its order so much that long ones need blocks."""
    return operation == "sum" and dtype.startswith("float")


def depends_on_order(operation: str, dtype: str) -> bool:
    """Whether the bits of a reduction depend on its order."""
    return operation in ("sum", "prod") and dtype.startswith("float")


def in_blocks(loop: For, each: int, next_level: NextLevel) -> tuple[For, int]:
    """A loop whose every turn adds `each` values: in blocks, and how many values its last level takes in."""
    if each * loop.trips > BLOCK and 2 * each > BLOCK:
        before, after = next_level()
        loop, each = replace(loop, body=[*before, *loop.body, *after]), 1
    while each * loop.trips > BLOCK:
        before, after = next_level()
        loop, each = _cut(loop, BLOCK // each, before, after), 1
    return loop, each * loop.trips


def _cut(loop: For, turns: int, before: list[Statement], after: list[Statement]) -> For:
    """A loop over blocks of so many turns of another."""
    assert isinstance(loop.step, Const)
    size, blocks = turns * int(loop.step.value), -(-loop.trips // turns)
    block, begin, end = (f"{loop.name}_{word}" for word in ("block", "begin", "end"))
    full: Expr = Var(begin) + size
    if loop.start != Const(0) or loop.stop != Const(blocks * size):
        full = Select(INT, loop.stop - Var(begin) < size, loop.stop, full)
    part = replace(loop, start=Var(begin), stop=Var(end), trips=turns)
    start = Var(block) * size if loop.start == Const(0) else loop.start + Var(block) * size
    body = [Let(begin, start), Let(end, full), *before, part, *after]
    return For(block, Const(0), Const(blocks), Const(1), body, trips=blocks)


class Sums:
    """The variables of reductions in a loop; those of floating-point sums get further levels.

    On a CPU, a variable may be an array of partial results, which takes in as many values as it has items
    before the first item takes in another. On the next level, only the first `LANES` of them are kept apart.
    """

    def __init__(self, new_name: Callable[[str], str]) -> None:
        self._new_name = new_name
        self._kinds: dict[str, tuple[Type, str]] = {}
        self._names: dict[str, str] = {}  # of each variable: that of its last level
        self._lengths: dict[str, int] = {}  # of each level that is an array

    def add(self, name: str, kind: Type, operation: str, length: int = 0) -> None:
        """Take in a variable; `length`: that of an array."""
        self._kinds[name], self._names[name] = (kind, operation), name
        if length:
            self._lengths[name] = length

    def last(self, name: str) -> str:
        """The name of a variable's last level."""
        return self._names[name]

    def start(self, name: str) -> list[Statement]:
        """What starts the last level of a variable."""
        return self._start(name, self._names[name])

    def _start(self, name: str, level: str) -> list[Statement]:
        (kind, operation), length = self._kinds[name], self._lengths.get(level, 0)
        if not length:
            return [Declare(level, Identity(kind, operation))]
        first, turns = Var("chain") * kind.width, length // kind.width
        store = Store(Identity(kind, operation), level, kind.dtype, first)
        loop = For("chain", Const(0), Const(turns), Const(1), [store], turns if kind.width > 1 else 0)
        return [RegisterArray(level, kind.dtype, length), loop]

    def blocked(self, loop: For, each: int = 1) -> tuple[For, int]:
        """`in_blocks` for a loop that changes some of the variables."""
        changed = _changed(loop.body)
        kinds = {name: (operation, kind.dtype) for name, (kind, operation) in self._kinds.items()}
        long = [name for name, last in self._names.items() if last in changed and is_inexact(*kinds[name])]
        return in_blocks(loop, each, lambda: self._next_level(long)) if long else (loop, 1)

    def _next_level(self, names: Sequence[str]) -> tuple[list[Statement], list[Statement]]:
        before: list[Statement] = []
        after: list[Statement] = []
        for name in names:
            (kind, operation), part = self._kinds[name], self._names[name]
            total = self._names[name] = self._new_name("total")
            before += self._start(name, part)
            if part not in self._lengths or kind.width == LANES:
                statements, value = self._folded(name, part, Const(0))
                after += [*statements, Accumulate(Var(total, kind), operation, value, kind)]
                continue
            self._lengths[total], lane = LANES, Var("lane")
            statements, value = self._folded(name, part, lane)
            statements.append(Accumulate(Var(total, kind), operation, value, kind, lane))
            after.append(For("lane", Const(0), Const(LANES), Const(1), statements))
        return before, after

    def folded(self, name: str, place: Expr) -> tuple[list[Statement], Expr]:
        """What computes one of the first `LANES` partial results of a variable's last level, and its value.

        `place`: its number, of vectors 0.
        """
        return self._folded(name, self._names[name], place)

    def _folded(self, name: str, level: str, place: Expr) -> tuple[list[Statement], Expr]:
        kind, operation = self._kinds[name]
        if level not in self._lengths:
            return [], Var(level, kind)
        step = int(kind.width > 1)
        statements: list[Statement] = []

        def named(value: Expr) -> Expr:
            part = Let(self._new_name("part"), value)
            statements.append(part)
            return Var(part.name, kind)

        starts = range(0, self._lengths[level], LANES)
        parts = [named(Load(kind, level, kind.dtype, place + start, step)) for start in starts]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [named(Combine(kind, operation, left, right)) for left, right in pairs]
        return statements, parts[0]


def _changed(body: Sequence[Statement]) -> set[str]:
    """The variables that statements change."""
    names = {statement.target.name for statement in body if isinstance(statement, Accumulate)}
    inner = [statement.body for statement in body if isinstance(statement, For | If)]
    return names.union(*map(_changed, inner))
