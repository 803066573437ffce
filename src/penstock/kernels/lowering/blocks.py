"""Long sums in blocks, so that their error grows with the logarithm of their length.

One accumulator takes in no more than `BLOCK` values. Then it is added to the accumulator of the next level,
which takes in as many blocks, and so on. Lengths do not depend on the device; short sums are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.graph.reducing import BLOCK
from penstock.kernels.ir.expressions import INT, Const, Expr, Identity, Select, Type, Var
from penstock.kernels.ir.statements import Accumulate, Declare, For, If, Let, Statement

# Gives what starts the accumulators of the present level, and what adds them to those of the next.
NextLevel = Callable[[], tuple[list[Statement], list[Statement]]]


def is_inexact(operation: str, dtype: str) -> bool:
    """Whether the result of a reduction depends on its order so much that long ones need blocks."""
    return operation == "sum" and dtype.startswith("float")


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
    """The variables of reductions in a loop; those of floating-point sums get further levels."""

    def __init__(self, new_name: Callable[[str], str]) -> None:
        self._new_name = new_name
        self._kinds: dict[str, tuple[Type, str]] = {}
        self._names: dict[str, str] = {}  # of each variable: that of its last level

    def add(self, name: str, kind: Type, operation: str) -> None:
        """Take in a variable."""
        self._kinds[name], self._names[name] = (kind, operation), name

    def last(self, name: str) -> str:
        """The name of a variable's last level."""
        return self._names[name]

    def variable(self, name: str) -> Declare:
        """What starts the last level of a variable."""
        return Declare(self._names[name], Identity(*self._kinds[name]))

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
            before.append(Declare(part, Identity(kind, operation)))
            after.append(Accumulate(Var(total, kind), operation, Var(part, kind), kind))
        return before, after


def _changed(body: Sequence[Statement]) -> set[str]:
    """The variables that statements change."""
    names = {statement.target.name for statement in body if isinstance(statement, Accumulate)}
    inner = [statement.body for statement in body if isinstance(statement, For | If)]
    return names.union(*map(_changed, inner))
