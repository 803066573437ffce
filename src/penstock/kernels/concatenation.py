"""Kernel concatenation: neighbouring small kernels are merged, as a launch on a CPU takes longer than they.

Each becomes a function, and a single thread calls them in order, so each sees the results of those before it.
Neighbours that differ only in the offsets of their buffers, as the steps of a long chain do, are a loop over
a table of offsets: a compiler takes as long for it as for a single call. So are a few that come in turn.
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterator, Sequence
from dataclasses import dataclass

from penstock.drivers.driver import Capabilities, Cost
from penstock.kernels import ir
from penstock.kernels.costing import merged
from penstock.kernels.dialects import dialect_of
from penstock.kernels.dialects.dialect import Dialect
from penstock.kernels.hazards import Range, Touched
from penstock.kernels.source import MOST_PARAMETER_BYTES, KernelSource, digest, kernel_of
from penstock.kernels.templates.launches import Partials

_BUFFER_BYTES, _CONSTANT_BYTES = 12, 8  # of parameters: a pointer with its offset, and a constant
_SMALL = 100_000  # items times operations; about as long as two launches
_MAX_PIECES = 64  # calls or loops of calls in a kernel, for the sake of compile time
_MAX_CALLS = 1024  # in a kernel
_PERIODS = range(1, 5)  # how many calls may come in turn
_SIZE_BYTES = 4  # of a size that is a parameter


@dataclass(frozen=True)
class Call:
    """A launch before it is bound: its arguments, with indices for buffers and constants."""

    source: KernelSource
    locations: tuple[tuple[int, int], ...]  # of each buffer: its index in the program, and the offset in it
    scalars: tuple[int, ...]
    constants: tuple[int, ...]  # by their indices in the program
    work: int
    touched: Touched
    scratch: tuple[Range, ...] = ()  # which it may write, too
    cost: Cost | None = None
    reduces: bool = False  # by loops, or by a template
    reads_own: Partials | None = None  # if its workgroups do


def piece_of(call: Call) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Equal for calls that differ in offsets, and in the number of workgroups, only."""
    return call.source.name, tuple(slot for slot, _ in call.locations), call.scalars, call.constants


def _repeated(call: Call) -> tuple[Hashable, ...]:
    """Equal for calls, of as many workgroups, that differ in offsets only."""
    return *piece_of(call), call.source.grid


@dataclass(frozen=True)
class Rows:
    """What calls of one function differ in: integers, a row for each call."""

    table: str
    rows: list[list[int]]

    def item(self, column: int) -> ir.Expr:
        """A column of the current row; a constant where it is the same in all rows."""
        if len({row[column] for row in self.rows}) == 1:
            return ir.Const(self.rows[0][column])
        return ir.Load(ir.INT, self.table, "int32", ir.Var("row") * len(self.rows[0]) + column)

    def in_memory(self) -> ir.Table:
        """The rows as the kernel has them."""
        return ir.Table(self.table, tuple(integer for row in self.rows for integer in row))


class MergedCalls:
    """Calls that become function calls in a kernel, which takes all their buffers and constants."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.sources: dict[str, KernelSource] = {}  # of the functions, by name
        self.slots: set[int] = set()  # of its buffers
        self._constants: dict[int, str] = {}  # dtypes, by their indices in the program
        self.pieces = 0  # calls in the text, about: those that repeat others but for offsets do not count
        self._keys: list[Hashable] = []
        self._matches = dict.fromkeys(_PERIODS, 0)  # the last calls that are those of a period before
        self.takes_sizes = False  # whether any of the kernels does

    def add(self, call: Call) -> None:
        """Add a call."""
        self.pieces += self.begins_piece(call)
        key = _repeated(call)
        self._matches = {period: self._matching(period, key) for period in _PERIODS}
        self._keys.append(key)
        self.takes_sizes = self.takes_sizes or bool(call.source.sizes)
        self.calls.append(call)
        self.sources[call.source.name] = call.source
        self.slots.update(slot for slot, _ in call.locations)
        dtypes = call.source.scalars[len(call.scalars) :]
        self._constants.update(zip(call.constants, dtypes, strict=True))

    def begins_piece(self, more: Call) -> bool:
        """Whether another call adds to the text: it ends no repetition."""
        key = _repeated(more)
        return all(self._matching(period, key) < period for period in _PERIODS)

    def _matching(self, period: int, key: Hashable) -> int:
        """How many of the last calls are those of a period before, with another call."""
        same = len(self._keys) >= period and self._keys[-period] == key
        return self._matches[period] + 1 if same else 0

    def repetitions(self) -> Iterator[list[list[Call]]]:
        """The calls in order: those that come in turn, for each turn."""
        at = 0
        while at < len(self.calls):
            turns = {period: self._turns(at, period) for period in _PERIODS}
            period = max(_PERIODS, key=lambda period: period * turns[period] if turns[period] > 1 else 0)
            end = at + period * turns[period]
            yield [self.calls[start : start + period] for start in range(at, end, period)]
            at = end

    def _turns(self, at: int, period: int) -> int:
        """How often the calls of a period repeat."""
        first, turns = self._keys[at : at + period], 1
        while self._keys[at + turns * period : at + (turns + 1) * period] == first:
            turns += 1
        return turns

    @property
    def digest(self) -> str:
        """The same for calls whose kernels have the same text, unless that takes sizes.

        Names of kernels end in it. A function may serve any number of workgroups, but the text of a kernel
        that calls it has their number.
        """
        return digest(repr([(_repeated(call), call.locations) for call in self.calls]))

    def parameter_bytes(self, more: Call) -> int:
        """The bytes of the kernel's parameters with another call, without sizes."""
        slots = self.slots.union(slot for slot, _ in more.locations)
        return _BUFFER_BYTES * len(slots) + _CONSTANT_BYTES * len({*self._constants, *more.constants})

    def functions(self, linkage: str, private: bool = False) -> list[ir.Function]:
        """The functions of the kernel."""
        return [
            ir.Function(name, kernel_of(source), linkage, private) for name, source in self.sources.items()
        ]

    def call(
        self,
        call: Call,
        workgroup: ir.Expr,
        arguments: Sequence[ir.Expr],
        arrays: Sequence[tuple[str, int]] = (),
        numbers: Sequence[ir.Expr] = (),
    ) -> ir.CallFunction:
        """A call as a statement; `arguments` are the offsets of its buffers, and its scalars.

        `numbers`: those of its buffers among the parameters, if these differ between calls.
        """
        slots = sorted(self.slots)
        own = [f"out{slots.index(slot)}" for slot, _ in call.locations]
        names: Sequence[str | ir.Expr] = numbers or own
        buffers = tuple(zip(call.source.buffers, names, strict=True))
        constants = [ir.Var(f"c{list(self._constants).index(number)}") for number in call.constants]
        return ir.CallFunction(call.source.name, workgroup, tuple(arrays), buffers, (*arguments, *constants))

    def as_one(self, kernel: ir.KernelIR, name: str, dialect: Dialect, scalars: Sequence[int] = ()) -> Call:
        """The call of a kernel that makes all calls."""
        calls, slots = self.calls, sorted(self.slots)
        kernel.outputs, kernel.scalars = ["uint8"] * len(slots), [*self._constants.values()]
        reads = dict.fromkeys(part for call in calls for part in call.touched.reads)
        writes = tuple(part for call in calls for part in call.touched.writes)
        ahead = tuple(part for call in calls for part in call.touched.ahead)
        return Call(
            dialect.render(kernel, name),
            tuple((slot, 0) for slot in slots),
            tuple(scalars),
            tuple(self._constants),
            sum(call.work for call in calls),
            Touched(tuple(reads), writes, ahead),
            tuple(part for call in calls for part in call.scratch),
            merged([call.source.name for call in calls], [call.cost for call in calls]),
        )


def concatenated(calls: Sequence[Call], arenas: Container[int], capabilities: Capabilities) -> list[Call]:
    """The calls, with small neighbours merged. `arenas`: buffers in which offsets vary."""
    dialect = dialect_of(capabilities)
    result: list[Call] = []
    run = MergedCalls()
    for call in [*calls, None]:
        if call is None or not _is_small(call) or not _has_room(run, call):
            result += [_concatenated(run, arenas, dialect)] if len(run.calls) > 1 else run.calls
            run = MergedCalls()
        if call is not None and _is_small(call):
            run.add(call)
        elif call is not None:
            result.append(call)
    return result


def _is_small(call: Call) -> bool:
    return call.work <= _SMALL and not call.source.complete and not call.source.alone


def _has_room(run: MergedCalls, call: Call) -> bool:
    """Whether a kernel has room for another call: its parameters are bounded if sizes are arguments."""
    if not run.takes_sizes and not call.source.sizes:
        return len(run.calls) < _MAX_CALLS and run.pieces + run.begins_piece(call) <= _MAX_PIECES
    together = [*run.calls, call]
    sizes = sum(1 + len(call.locations) + len(call.scalars) for call in together)
    within = run.parameter_bytes(call) + _SIZE_BYTES * sizes <= MOST_PARAMETER_BYTES
    return len(together) <= _MAX_PIECES and within


def _concatenated(run: MergedCalls, arenas: Container[int], dialect: Dialect) -> Call:
    """Merged calls: a thread makes them in order, each for one workgroup after the other."""
    if run.takes_sizes:
        return _with_sizes(run, arenas, dialect)
    kernel = ir.KernelIR(functions=run.functions("PIECE", private=True))
    for turns in run.repetitions():
        body: list[ir.Statement] = []
        for call, *others in zip(*turns, strict=True):
            offsets = [[offset for _, offset in each.locations] for each in (call, *others)]
            rows = Rows(f"table{len(kernel.tables)}", offsets)
            arguments = [rows.item(at) for at in range(len(call.locations))]
            arguments += [ir.Const(scalar) for scalar in call.scalars]
            # An arena holds values of several dtypes, one after another.
            body += [ir.Fence()] if body or kernel.body or len(turns) > 1 else []
            body.append(_each_group(run, call, ir.Const(math.prod(call.source.grid)), arguments))
            if len(turns) > 1:
                kernel.tables.append(rows.in_memory())
        kernel.body += [ir.loop("row", 0, len(turns), body)] if len(turns) > 1 else body
    return run.as_one(kernel, f"chain_{run.digest}", dialect)


def _with_sizes(run: MergedCalls, arenas: Container[int], dialect: Dialect) -> Call:
    """The same, if any of the kernels takes sizes: all integers are arguments, no constants of the text."""
    sizes: list[int] = []

    def integer(value: int) -> ir.Expr:
        sizes.append(value)
        return ir.Var(f"size{len(sizes) - 1}")

    body: list[ir.Statement] = []
    identity = []  # which the kernel's name depends on
    for call in run.calls:
        groups = integer(math.prod(call.source.grid))
        arguments = [
            integer(offset) if slot in arenas else ir.Const(offset) for slot, offset in call.locations
        ]
        arguments += [integer(scalar) for scalar in call.scalars]
        body += [ir.Fence()] if body else []
        body.append(_each_group(run, call, groups, arguments))
        slots = [slot for slot, _ in call.locations]
        identity.append((call.source.name, slots, groups, arguments, call.constants))
    kernel = ir.KernelIR(functions=run.functions("PIECE", private=True), body=body, sizes=len(sizes))
    return run.as_one(kernel, f"chain_{digest(repr(identity))}", dialect, sizes)


def _each_group(run: MergedCalls, call: Call, groups: ir.Expr, arguments: Sequence[ir.Expr]) -> ir.Statement:
    """A call for one workgroup after the other."""
    return ir.loop("group", 0, groups, [run.call(call, ir.Var("group"), arguments)])
