"""Kernel concatenation: small kernels that follow one another, as one: a launch on a CPU takes longer.

Each becomes a function, and one thread calls them in order, so each finds what those before it wrote.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from penstock.drivers.driver import Capabilities, Cost
from penstock.kernels.costing import merged
from penstock.kernels.dialects import dialect_of
from penstock.kernels.dialects.dialect import Dialect
from penstock.kernels.hazards import Range, Touched
from penstock.kernels.ir.expressions import Const, Expr, Var
from penstock.kernels.ir.statements import CallFunction, For, Function, KernelIR
from penstock.kernels.source import MOST_PARAMETER_BYTES, KernelSource, digest, kernel_of

_SMALL = 100_000  # items times operations; about as long as two launches
_MAX_CALLS = 64  # in one kernel, which a compiler has to take


@dataclass(frozen=True)
class Call:
    """A launch before it is bound: what its arguments are, apart from buffers and constants themselves."""

    source: KernelSource
    places: tuple[tuple[int, int], ...]  # of each buffer: its number in the program, and the unit there
    scalars: tuple[int, ...]
    numbers: tuple[int, ...]  # of the constants in the program
    work: int
    touched: Touched
    scratch: tuple[Range, ...] = ()  # what it may write besides, for itself
    cost: Cost | None = None


def together(calls: Sequence[Call]) -> Touched:
    """What several calls touch."""
    reads = dict.fromkeys(part for call in calls for part in call.touched.reads)
    return Touched(tuple(reads), tuple(part for call in calls for part in call.touched.writes))


def total_cost(calls: Sequence[Call]) -> Cost | None:
    """What several calls cost as one."""
    return merged([call.source.name for call in calls], [call.cost for call in calls])


def concatenated(calls: Sequence[Call], arenas: Container[int], capabilities: Capabilities) -> list[Call]:
    """The calls, of which neighbours that are small are one. `arenas`: buffers in which places vary."""
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
    if not _takes_sizes(together):
        return len(together) <= _MAX_CALLS
    slots = {slot for call in together for slot, _ in call.places}
    numbers = {number for call in together for number in call.numbers}
    sizes = sum(1 + len(call.places) + len(call.scalars) for call in together)
    fits = 12 * len(slots) + 8 * len(numbers) + 4 * sizes <= MOST_PARAMETER_BYTES
    return fits and len(together) <= _MAX_CALLS


def _takes_sizes(calls: Sequence[Call]) -> bool:
    return any(call.source.sizes for call in calls)


@dataclass
class _Integers:
    """The integers of a concatenated kernel: constants, or where kernels in it take sizes, arguments."""

    as_arguments: bool
    values: list[int] = field(default_factory=list)  # of the arguments

    def of(self, value: int) -> Expr:
        """One of them."""
        if not self.as_arguments:
            return Const(value)
        self.values.append(value)
        return Var(f"size{len(self.values) - 1}")


def _concatenated(calls: Sequence[Call], arenas: Container[int], dialect: Dialect) -> Call:
    """Calls as one: a thread calls them in order, with one workgroup of each after the other."""
    slots = sorted({slot for call in calls for slot, _ in call.places})
    numbers: dict[int, str] = {}
    for call in calls:
        numbers.update(zip(call.numbers, call.source.scalars[len(call.scalars) :], strict=True))
    integers, body, said = _Integers(_takes_sizes(calls)), [], []
    for call in calls:
        groups = integers.of(math.prod(call.source.grid))
        arguments = [integers.of(unit) if slot in arenas else Const(unit) for slot, unit in call.places]
        arguments += [integers.of(scalar) for scalar in call.scalars]
        said.append((call.source.name, [slot for slot, _ in call.places], groups, arguments, call.numbers))
        arguments += [Var(f"c{list(numbers).index(number)}") for number in call.numbers]
        buffers = tuple(
            (dtype, f"out{slots.index(slot)}")
            for dtype, (slot, _) in zip(call.source.buffers, call.places, strict=True)
        )
        called = CallFunction(call.source.name, Var("group"), (), buffers, tuple(arguments))
        body.append(For("group", Const(0), groups, Const(1), [called]))
    functions = {
        call.source.name: Function(call.source.name, kernel_of(call.source), "static", private=True)
        for call in calls
    }
    kernel = KernelIR(
        outputs=["uint8"] * len(slots),
        scalars=[*numbers.values()],
        functions=[*functions.values()],
        body=[*body],
        sizes=len(integers.values),
    )
    source = dialect.render(kernel, f"chain_{digest(repr(said))}")
    return Call(
        source,
        tuple((slot, 0) for slot in slots),
        tuple(integers.values),
        tuple(numbers),
        sum(call.work for call in calls),
        together(calls),
        cost=total_cost(calls),
    )
