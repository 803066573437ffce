"""Kernel concatenation: small kernels that follow one another, as one: a launch on a CPU takes longer.

Each becomes a function, and one thread calls them in order, so each finds what those before it wrote.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

from penstock.drivers.driver import Capabilities, Cost
from penstock.kernels import ir
from penstock.kernels.costing import merged
from penstock.kernels.dialects import dialect_of
from penstock.kernels.dialects.dialect import Dialect
from penstock.kernels.hazards import Range, Touched
from penstock.kernels.source import MOST_PARAMETER_BYTES, KernelSource, digest, kernel_of

_BUFFER_BYTES, _CONSTANT_BYTES = 12, 8  # of parameters: an address with its offset, and a constant
_SMALL = 100_000  # items times operations; about as long as two launches
_MAX_CALLS = 64  # in one kernel, which a compiler has to take
_SIZE_BYTES = 4  # of a size that is a parameter


@dataclass(frozen=True)
class Call:
    """A launch before it is bound: what its arguments are, apart from buffers and constants themselves."""

    source: KernelSource
    locations: tuple[tuple[int, int], ...]  # of each buffer: its number in the program, and its offset there
    scalars: tuple[int, ...]
    constants: tuple[int, ...]  # by their numbers in the program
    work: int
    touched: Touched
    scratch: tuple[Range, ...] = ()  # what it may write besides, for itself
    cost: Cost | None = None


class MergedCalls:
    """Calls that become calls of functions in one kernel, which takes all their buffers and constants."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.sources: dict[str, KernelSource] = {}  # of the functions, by name
        self._slots: set[int] = set()
        self._constants: dict[int, str] = {}  # dtypes, by their numbers in the program

    def add(self, call: Call) -> None:
        """One more call."""
        self.calls.append(call)
        self.sources[call.source.name] = call.source
        self._slots.update(slot for slot, _ in call.locations)
        dtypes = call.source.scalars[len(call.scalars) :]
        self._constants.update(zip(call.constants, dtypes, strict=True))

    def parameter_bytes(self, more: Call) -> int:
        """The bytes of the kernel's parameters with one more call, without sizes."""
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
        """One of the calls; `arguments` are the offsets of its buffers, and scalars."""
        slots = sorted(self._slots)
        buffers = tuple(
            (dtype, f"out{slots.index(slot)}")
            for dtype, (slot, _) in zip(call.source.buffers, call.locations, strict=True)
        )
        constants = [ir.Var(f"c{list(self._constants).index(number)}") for number in call.constants]
        return ir.CallFunction(call.source.name, workgroup, tuple(arrays), buffers, (*arguments, *constants))

    def as_one(self, kernel: ir.KernelIR, name: str, dialect: Dialect, scalars: Sequence[int] = ()) -> Call:
        """The call of a kernel that makes all of them."""
        calls, slots = self.calls, sorted(self._slots)
        kernel.outputs, kernel.scalars = ["uint8"] * len(slots), [*self._constants.values()]
        reads = dict.fromkeys(part for call in calls for part in call.touched.reads)
        writes = tuple(part for call in calls for part in call.touched.writes)
        return Call(
            dialect.render(kernel, name),
            tuple((slot, 0) for slot in slots),
            tuple(scalars),
            tuple(self._constants),
            sum(call.work for call in calls),
            Touched(tuple(reads), writes),
            cost=merged([call.source.name for call in calls], [call.cost for call in calls]),
        )


def concatenated(calls: Sequence[Call], arenas: Container[int], capabilities: Capabilities) -> list[Call]:
    """The calls, with small neighbours merged. `arenas`: buffers whose values lie at offsets that vary."""
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
    """Whether a kernel takes one more call: with sizes as arguments, it has only so many parameters."""
    together = [*run.calls, call]
    if len(together) > _MAX_CALLS or not _takes_sizes(together):
        return len(together) <= _MAX_CALLS
    sizes = sum(1 + len(call.locations) + len(call.scalars) for call in together)
    return run.parameter_bytes(call) + _SIZE_BYTES * sizes <= MOST_PARAMETER_BYTES


def _takes_sizes(calls: Sequence[Call]) -> bool:
    return any(call.source.sizes for call in calls)


def _concatenated(run: MergedCalls, arenas: Container[int], dialect: Dialect) -> Call:
    """Calls as one: a thread calls them in order, with one workgroup of each after the other.

    Where kernels among them take sizes, all integers are arguments, and not constants of the text.
    """
    takes_sizes, sizes = _takes_sizes(run.calls), []

    def integer(value: int) -> ir.Expr:
        if not takes_sizes:
            return ir.Const(value)
        sizes.append(value)
        return ir.Var(f"size{len(sizes) - 1}")

    body: list[ir.Statement] = []
    identity = []  # what the kernel's name tells apart
    for call in run.calls:
        groups = integer(math.prod(call.source.grid))
        arguments = [
            integer(offset) if slot in arenas else ir.Const(offset) for slot, offset in call.locations
        ]
        arguments += [integer(scalar) for scalar in call.scalars]
        called = run.call(call, ir.Var("group"), arguments)
        body.append(ir.For("group", ir.Const(0), groups, ir.Const(1), [called]))
        slots = [slot for slot, _ in call.locations]
        identity.append((call.source.name, slots, groups, [*called.arguments], call.constants))
    kernel = ir.KernelIR(functions=run.functions("static", private=True), body=body, sizes=len(sizes))
    return run.as_one(kernel, f"chain_{digest(repr(identity))}", dialect, sizes)
