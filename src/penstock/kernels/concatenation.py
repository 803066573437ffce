"""Kernel concatenation: neighbouring small kernels are merged, as a launch on a CPU takes longer than they.

Each becomes a function, and a single thread calls them in order, so each sees the results of those before it.
Neighbours that differ only in the offsets of their buffers, as the steps of a long chain do, are a loop over
a table of offsets: a compiler takes as long for it as for a single call.
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.drivers.driver import Capabilities, Cost
from penstock.kernels import ir
from penstock.kernels.costing import merged
from penstock.kernels.dialects import dialect_of
from penstock.kernels.dialects.dialect import Dialect
from penstock.kernels.hazards import Range, Touched
from penstock.kernels.source import MOST_PARAMETER_BYTES, KernelSource, digest, kernel_of

_BUFFER_BYTES, _CONSTANT_BYTES = 12, 8  # of parameters: a pointer with its offset, and a constant
_SMALL = 100_000  # items times operations; about as long as two launches
_MAX_PIECES = 64  # calls or loops of calls in a kernel, for the sake of compile time
_MAX_CALLS = 1024  # in a kernel
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
        self._slots: set[int] = set()
        self._constants: dict[int, str] = {}  # dtypes, by their indices in the program
        self.pieces = 0  # runs of calls that differ in offsets only
        self.takes_sizes = False  # whether any of the kernels does

    def add(self, call: Call) -> None:
        """Add a call."""
        self.pieces += self.begins_piece(call)
        self.takes_sizes = self.takes_sizes or bool(call.source.sizes)
        self.calls.append(call)
        self.sources[call.source.name] = call.source
        self._slots.update(slot for slot, _ in call.locations)
        dtypes = call.source.scalars[len(call.scalars) :]
        self._constants.update(zip(call.constants, dtypes, strict=True))

    def begins_piece(self, more: Call) -> bool:
        """Whether another call differs from the last in more than offsets."""
        return not self.calls or _repeated(self.calls[-1]) != _repeated(more)

    @property
    def digest(self) -> str:
        """The same for calls whose kernels have the same text, unless that takes sizes.

        Names of kernels end in it. A function may serve any number of workgroups, but the text of a kernel
        that calls it has their number.
        """
        return digest(repr([(_repeated(call), call.locations) for call in self.calls]))

    def parameter_bytes(self, more: Call) -> int:
        """The bytes of the kernel's parameters with another call, without sizes."""
        slots = self._slots.union(slot for slot, _ in more.locations)
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
    ) -> ir.CallFunction:
        """A call as a statement; `arguments` are the offsets of its buffers, and its scalars."""
        slots = sorted(self._slots)
        buffers = tuple(
            (dtype, f"out{slots.index(slot)}")
            for dtype, (slot, _) in zip(call.source.buffers, call.locations, strict=True)
        )
        constants = [ir.Var(f"c{list(self._constants).index(number)}") for number in call.constants]
        return ir.CallFunction(call.source.name, workgroup, tuple(arrays), buffers, (*arguments, *constants))

    def as_one(self, kernel: ir.KernelIR, name: str, dialect: Dialect, scalars: Sequence[int] = ()) -> Call:
        """The call of a kernel that makes all calls."""
        calls, slots = self.calls, sorted(self._slots)
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
    kernel = ir.KernelIR(functions=run.functions("static", private=True))
    for number, (_, calls) in enumerate(groupby(run.calls, _repeated)):
        piece = list(calls)
        rows = Rows(f"table{number}", [[offset for _, offset in call.locations] for call in piece])
        arguments = [rows.item(at) for at in range(len(piece[0].locations))]
        arguments += [ir.Const(scalar) for scalar in piece[0].scalars]
        called = _each_group(run, piece[0], ir.Const(math.prod(piece[0].source.grid)), arguments)
        # An arena holds values of several dtypes, one after another.
        if len(piece) == 1:
            kernel.body += [ir.Fence(), called] if kernel.body else [called]
        else:
            kernel.tables.append(rows.in_memory())
            kernel.body.append(ir.loop("row", 0, len(piece), [ir.Fence(), called]))
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
    kernel = ir.KernelIR(functions=run.functions("static", private=True), body=body, sizes=len(sizes))
    return run.as_one(kernel, f"chain_{digest(repr(identity))}", dialect, sizes)


def _each_group(run: MergedCalls, call: Call, groups: ir.Expr, arguments: Sequence[ir.Expr]) -> ir.Statement:
    """A call for one workgroup after the other."""
    return ir.loop("group", 0, groups, [run.call(call, ir.Var("group"), arguments)])
