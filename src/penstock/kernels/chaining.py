"""Small kernels that follow one another, as one: a launch on a CPU takes longer than they do.

Each becomes a function, and one thread calls them in order, so each finds what those before it wrote.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.device.driver import Cost
from penstock.kernels.costing import merged
from penstock.kernels.hazards import Range, Touched
from penstock.kernels.source import C_TYPES, KernelSource, digest, head

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


def chained(calls: Sequence[Call]) -> list[Call]:
    """The calls, of which neighbours that are small are one."""
    result: list[Call] = []
    run: list[Call] = []
    for call in [*calls, None]:
        if call is not None and _is_small(call) and len(run) < _MAX_CALLS:
            run.append(call)
            continue
        result += [_chain(run)] if len(run) > 1 else run
        run = []
        if call is not None:
            (run if _is_small(call) else result).append(call)
    return result


def _is_small(call: Call) -> bool:
    return call.work <= _SMALL and not call.source.complete


def _chain(calls: Sequence[Call]) -> Call:
    said = [(call.source.name, call.places, call.scalars, call.numbers) for call in calls]
    name = f"chain_{digest(repr(said))}"
    slots = sorted({slot for call in calls for slot, _ in call.places})
    numbers: dict[int, str] = {}
    for call in calls:
        dtypes = call.source.scalars[len(call.scalars) :]
        numbers.update(zip(call.numbers, dtypes, strict=True))
    functions = {call.source.name: _function(call.source, f"{name}_{call.source.name}") for call in calls}
    buffers = [("uint8", f"b{slot}") for slot in slots]
    constants = [(dtype, f"c{number}") for number, dtype in numbers.items()]
    body = [_called(call, f"{name}_{call.source.name}") for call in calls]
    # A thread by itself needs no memory of its group, and runs the groups of a call one after the other.
    text = [
        "#undef GROUP\n#undef LOCAL\n#define GROUP(axis) chain_group\n#define LOCAL",
        *functions.values(),
        head(name, buffers, [], constants) + "\n".join(body) + "\n}\n",
    ]
    source = KernelSource(name, "\n".join(text), ("uint8",) * len(slots), tuple(numbers.values()), (1,), (1,))
    places = tuple((slot, 0) for slot in slots)
    work = sum(call.work for call in calls)
    return Call(source, places, (), tuple(numbers), work, together(calls), cost=total_cost(calls))


def _function(source: KernelSource, name: str) -> str:
    return source.text.replace(f"KERNEL {source.name}(", f"static void {name}(int chain_group, ")


def _called(call: Call, name: str) -> str:
    buffers = [
        f"(GLOBAL {C_TYPES[dtype]} *)b{slot}"
        for dtype, (slot, _) in zip(call.source.buffers, call.places, strict=True)
    ]
    places = [str(unit) for _, unit in call.places]
    rest = [*map(str, call.scalars), *(f"c{number}" for number in call.numbers)]
    loop = f"for (int group = 0; group < {math.prod(call.source.grid)}; group++)"
    return f"    {loop} {name}(group, {', '.join([*buffers, *places, *rest])});"
