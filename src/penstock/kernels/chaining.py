"""Small kernels that follow one another, as one: a launch on a CPU takes longer than they do.

Each becomes a function, and one thread calls them in order, so each finds what those before it wrote.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from penstock.drivers.driver import Cost
from penstock.kernels.costing import merged
from penstock.kernels.hazards import Range, Touched
from penstock.kernels.source import C_TYPES, MOST_PARAMETER_BYTES, KernelSource, digest, head

_SMALL = 100_000  # items times operations; about as long as two launches
_MAX_CALLS = 64  # in one chain, whose text a compiler has to take


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
    reads = dict.fromkeys(one for call in calls for one in call.touched.reads)
    return Touched(tuple(reads), tuple(one for call in calls for one in call.touched.writes))


def total_cost(calls: Sequence[Call]) -> Cost | None:
    """What several calls cost as one."""
    return merged([call.source.name for call in calls], [call.cost for call in calls])


def chained(calls: Sequence[Call], arenas: Container[int]) -> list[Call]:
    """The calls, of which neighbours that are small are one. `arenas`: buffers in which places vary."""
    result: list[Call] = []
    run: list[Call] = []
    for call in [*calls, None]:
        if call is not None and _is_small(call) and _has_room(run, call):
            run.append(call)
            continue
        result += [_chain(run, arenas)] if len(run) > 1 else run
        run = []
        if call is not None:
            (run if _is_small(call) else result).append(call)
    return result


def _is_small(call: Call) -> bool:
    return call.work <= _SMALL and not call.source.complete


def _has_room(calls: Sequence[Call], call: Call) -> bool:
    """Whether a chain takes one more call: with sizes as arguments, it has only so many parameters."""
    together = [*calls, call]
    if not _takes_sizes(together):
        return len(together) <= _MAX_CALLS
    slots = {slot for one in together for slot, _ in one.places}
    numbers = {number for one in together for number in one.numbers}
    sizes = sum(1 + len(one.places) + len(one.scalars) for one in together)
    fits = 12 * len(slots) + 8 * len(numbers) + 4 * sizes <= MOST_PARAMETER_BYTES
    return fits and len(together) <= _MAX_CALLS


def _takes_sizes(calls: Sequence[Call]) -> bool:
    return any(call.source.sizes for call in calls)


@dataclass
class _Integers:
    """The integers in the text of a chain: numbers, or where kernels in it take sizes, arguments."""

    as_arguments: bool
    values: list[int] = field(default_factory=list)  # of the arguments

    def text(self, value: int) -> str:
        """How the text says one."""
        if not self.as_arguments:
            return str(value)
        self.values.append(value)
        return f"size{len(self.values) - 1}"

    def of(self, call: Call, arenas: Container[int]) -> tuple[str, list[str], list[str]]:
        """Those of a call: how many groups it has, the places of its buffers, and its scalars."""
        places = [self.text(unit) if slot in arenas else str(unit) for slot, unit in call.places]
        return self.text(math.prod(call.source.grid)), places, [self.text(one) for one in call.scalars]


def _chain(calls: Sequence[Call], arenas: Container[int]) -> Call:
    integers = _Integers(_takes_sizes(calls))
    texts = [integers.of(call, arenas) for call in calls]
    said = [
        (call.source.name, [slot for slot, _ in call.places], text, call.numbers)
        for call, text in zip(calls, texts, strict=True)
    ]
    name = f"chain_{digest(repr(said))}"
    slots = sorted({slot for call in calls for slot, _ in call.places})
    numbers: dict[int, str] = {}
    for call in calls:
        dtypes = call.source.scalars[len(call.scalars) :]
        numbers.update(zip(call.numbers, dtypes, strict=True))
    functions = {call.source.name: _function(call.source, f"{name}_{call.source.name}") for call in calls}
    buffers = [("uint8", f"b{slot}") for slot in slots]
    constants = [("int32", f"size{number}") for number in range(len(integers.values))]
    constants += [(dtype, f"c{number}") for number, dtype in numbers.items()]
    body = [
        _called(call, f"{name}_{call.source.name}", *text) for call, text in zip(calls, texts, strict=True)
    ]
    # A thread by itself needs no memory of its group, and runs the groups of a call one after the other.
    text = [
        "#undef GROUP\n#undef LOCAL\n#define GROUP(axis) chain_group\n#define LOCAL",
        *functions.values(),
        head(name, buffers, [], constants) + "\n".join(body) + "\n}\n",
    ]
    scalars = ("int32",) * len(integers.values) + tuple(numbers.values())
    source = KernelSource(name, "\n".join(text), ("uint8",) * len(slots), scalars, (1,), (1,))
    places = tuple((slot, 0) for slot in slots)
    work = sum(call.work for call in calls)
    touched, cost = together(calls), total_cost(calls)
    return Call(source, places, tuple(integers.values), tuple(numbers), work, touched, cost=cost)


def _function(source: KernelSource, name: str) -> str:
    return source.text.replace(f"KERNEL {source.name}(", f"static void {name}(int chain_group, ")


def _called(call: Call, name: str, groups: str, places: Sequence[str], scalars: Sequence[str]) -> str:
    buffers = [
        f"(GLOBAL {C_TYPES[dtype]} *)b{slot}"
        for dtype, (slot, _) in zip(call.source.buffers, call.places, strict=True)
    ]
    rest = [*scalars, *(f"c{number}" for number in call.numbers)]
    loop = f"for (int group = 0; group < {groups}; group++)"
    return f"    {loop} {name}(group, {', '.join([*buffers, *places, *rest])});"
