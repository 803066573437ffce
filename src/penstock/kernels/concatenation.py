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

BUFFER_BYTES, CONSTANT_BYTES = 12, 8  # of parameters: an address with its offset, and a constant
_SMALL = 100_000  # items times operations; about as long as two launches
_MAX_CALLS = 64  # in one kernel, which a compiler has to take
_SIZE_BYTES = 4  # of a size that is a parameter


@dataclass(frozen=True)
class Call:
    """A launch before it is bound: what its arguments are, apart from buffers and constants themselves."""

    source: KernelSource
    places: tuple[tuple[int, int], ...]  # of each buffer: its number in the program, and its offset there
    scalars: tuple[int, ...]
    numbers: tuple[int, ...]  # of the constants in the program
    work: int
    touched: Touched
    scratch: tuple[Range, ...] = ()  # what it may write besides, for itself
    cost: Cost | None = None


class MergedCalls:
    """Several calls as those of functions in one kernel, which takes their buffers and constants."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._slots = sorted({slot for call in calls for slot, _ in call.places})
        self._constants: dict[int, str] = {}  # dtypes, by their numbers in the program
        for call in calls:
            dtypes = call.source.scalars[len(call.scalars) :]
            self._constants.update(zip(call.numbers, dtypes, strict=True))

    @property
    def parameter_bytes(self) -> int:
        """The bytes of the kernel's parameters, without sizes."""
        return BUFFER_BYTES * len(self._slots) + CONSTANT_BYTES * len(self._constants)

    def call(
        self,
        call: Call,
        workgroup: ir.Expr,
        arguments: Sequence[ir.Expr],
        arrays: Sequence[tuple[str, int]] = (),
    ) -> ir.CallFunction:
        """One of the calls; `arguments` are the offsets of its buffers, and scalars."""
        buffers = tuple(
            (dtype, f"out{self._slots.index(slot)}")
            for dtype, (slot, _) in zip(call.source.buffers, call.places, strict=True)
        )
        constants = [ir.Var(f"c{list(self._constants).index(number)}") for number in call.numbers]
        return ir.CallFunction(call.source.name, workgroup, tuple(arrays), buffers, (*arguments, *constants))

    def as_one(self, kernel: ir.KernelIR, name: str, dialect: Dialect, scalars: Sequence[int] = ()) -> Call:
        """The call of a kernel that makes all of them."""
        kernel.outputs, kernel.scalars = ["uint8"] * len(self._slots), [*self._constants.values()]
        reads = dict.fromkeys(part for call in self._calls for part in call.touched.reads)
        writes = tuple(part for call in self._calls for part in call.touched.writes)
        return Call(
            dialect.render(kernel, name),
            tuple((slot, 0) for slot in self._slots),
            tuple(scalars),
            tuple(self._constants),
            sum(call.work for call in self._calls),
            Touched(tuple(reads), writes),
            cost=merged([call.source.name for call in self._calls], [call.cost for call in self._calls]),
        )


def concatenated(calls: Sequence[Call], arenas: Container[int], capabilities: Capabilities) -> list[Call]:
    """The calls, with small neighbours merged. `arenas`: buffers whose values lie at offsets that vary."""
    dialect = dialect_of(capabilities)
    result: list[Call] = []
    run: list[Call] = []
    for call in [*calls, None]:
        if call is not None and _is_small(call) and _has_room(run, call):
            run.append(call)
            continue
        result += [_concatenated(run, arenas, dialect)] if len(run) > 1 else run
        run = []
        if call is not None:
            (run if _is_small(call) else result).append(call)
    return result


def _is_small(call: Call) -> bool:
    return call.work <= _SMALL and not call.source.complete


def _has_room(calls: Sequence[Call], call: Call) -> bool:
    """Whether a kernel takes one more call: with sizes as arguments, it has only so many parameters."""
    together = [*calls, call]
    if len(together) > _MAX_CALLS or not _takes_sizes(together):
        return len(together) <= _MAX_CALLS
    sizes = sum(1 + len(call.places) + len(call.scalars) for call in together)
    return MergedCalls(together).parameter_bytes + _SIZE_BYTES * sizes <= MOST_PARAMETER_BYTES


def _takes_sizes(calls: Sequence[Call]) -> bool:
    return any(call.source.sizes for call in calls)


def _concatenated(calls: Sequence[Call], arenas: Container[int], dialect: Dialect) -> Call:
    """Calls as one: a thread calls them in order, with one workgroup of each after the other.

    Where kernels among them take sizes, all integers are arguments, and not constants of the text.
    """
    merging, takes_sizes, sizes = MergedCalls(calls), _takes_sizes(calls), []

    def integer(value: int) -> ir.Expr:
        if not takes_sizes:
            return ir.Const(value)
        sizes.append(value)
        return ir.Var(f"size{len(sizes) - 1}")

    body: list[ir.Statement] = []
    identity = []  # what the kernel's name tells apart
    for call in calls:
        groups = integer(math.prod(call.source.grid))
        arguments = [integer(offset) if slot in arenas else ir.Const(offset) for slot, offset in call.places]
        arguments += [integer(scalar) for scalar in call.scalars]
        called = merging.call(call, ir.Var("group"), arguments)
        body.append(ir.For("group", ir.Const(0), groups, ir.Const(1), [called]))
        slots = [slot for slot, _ in call.places]
        identity.append((call.source.name, slots, groups, [*called.arguments], call.numbers))
    sources = {call.source.name: call.source for call in calls}
    functions = [
        ir.Function(name, kernel_of(source), "static", private=True) for name, source in sources.items()
    ]
    kernel = ir.KernelIR(functions=functions, body=body, sizes=len(sizes))
    return merging.as_one(kernel, f"chain_{digest(repr(identity))}", dialect, sizes)
