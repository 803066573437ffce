"""Teams: on a CPU, the calls of layers that follow one another share a launch.

A launch on a CPU takes as long as a hundred thousand operations, mostly until threads that sleep are awake,
and a step of a network with few rows has hundreds of launches that are not much longer. Where the same calls
come again and again with other buffers, as those of layers do, they become functions of one kernel, which
calls them in a loop over tables of buffers and offsets. It has a workgroup for each core, which share the
workgroups of each call as tasks: whoever is free takes the next, and begins with a call when those before
it are done. A workgroup waits only for tasks that others have begun, so it does not matter how many of
them run at once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.drivers.driver import Capabilities
from penstock.kernels import ir
from penstock.kernels.concatenation import Call, MergedCalls, Rows
from penstock.kernels.dialects import dialect_of
from penstock.kernels.source import item_size

_MOST_WORK = 1 << 25  # operations and bytes of a call; beyond that, a launch takes little of the time
_LEAST_WORK = 1 << 18  # of the largest in a turn; below that, a thread alone is about as fast
_FEWEST_TURNS, _FEWEST_CALLS = 4, 12
_LONGEST_TURN = 64  # calls, for the sake of compile time
_ARRAY_BYTES = 1 << 18  # of a function, which has them on the stack


def in_teams(calls: Sequence[Call], capabilities: Capabilities) -> list[Call]:
    """The calls, with those that come in turns merged."""
    if not capabilities.kernel_counters:
        return list(calls)
    numbers: dict[Hashable, int] = {}
    kinds = np.array(
        [numbers.setdefault(_kind(call), len(numbers)) if _may_join(call) else -1 for call in calls]
    )
    merged: dict[int, tuple[int, Call]] = {}  # by their first calls, with the first after them
    while found := _longest(kinds):
        begin, end, period = found
        kinds[begin:end] = -1
        if _is_worth_it(calls[begin : begin + period]):
            merged[begin] = end, _merged(calls[begin:end], period, capabilities)
    result: list[Call] = []
    at = 0
    while at < len(calls):
        at, call = merged.get(at, (at + 1, calls[at]))
        result.append(call)
    return result


def _kind(call: Call) -> Hashable:
    """Equal for calls that differ in their buffers and offsets only."""
    return call.source.name, call.source.grid, call.scalars, call.constants


def _may_join(call: Call) -> bool:
    source = call.source
    if source.complete or source.alone or not 0 <= _work(call) <= _MOST_WORK:
        return False
    return sum(item_size(dtype) * length for dtype, _, length in source.arrays) <= _ARRAY_BYTES


def _work(call: Call) -> int:
    """Operations and bytes; -1 where they are not known."""
    return -1 if call.cost is None else call.cost.operations + call.cost.nbytes


def _longest(kinds: npt.NDArray[np.int_]) -> tuple[int, int, int] | None:
    """The longest part in which calls come in turns, if there is one: its ends, and the calls of a turn.

    `kinds`: the same for calls that may be the same of two turns, or -1.
    """
    best, most = None, _FEWEST_CALLS - 1
    for period in range(1, min(_LONGEST_TURN, len(kinds) // _FEWEST_TURNS) + 1):
        same = (kinds[period:] == kinds[:-period]) & (kinds[period:] >= 0)
        edges = np.flatnonzero(np.diff(same, prepend=False, append=False))
        if not len(edges):
            continue
        lengths = (edges[1::2] - edges[::2]) // period * period
        longest = int(lengths.argmax())
        covered = int(lengths[longest]) + period
        if covered > most and covered >= _FEWEST_TURNS * period:
            begin, most = int(edges[2 * longest]), covered
            best = begin, begin + covered, period
    return best


def _is_worth_it(turn: Sequence[Call]) -> bool:
    """Whether a thread alone is slower, and most kernels would be compiled for the program anyway."""
    shared = sum(call.source.sizes > 0 for call in turn)
    return max(map(_work, turn)) >= _LEAST_WORK and 2 * shared < len(turn)


def _merged(calls: Sequence[Call], period: int, capabilities: Capabilities) -> Call:
    """Turns of so many calls as one."""
    merging = MergedCalls()
    for call in calls:
        merging.add(call)
    kernel = ir.KernelIR(
        functions=merging.functions("PIECE", private=True),
        grid=(capabilities.compute_units,),
        counters=ir.FIRST_TASK + len(calls),
    )
    numbers = {slot: number for number, slot in enumerate(sorted(merging.slots))}
    tasks = sum(math.prod(call.source.grid) for call in calls[:period])
    body: list[ir.Statement] = []
    row, before = ir.Var("row"), 0
    for number, same in enumerate(calls[at::period] for at in range(period)):
        table = Rows(f"table{number}", [_row(call, numbers) for call in same])
        count = math.prod(same[0].source.grid)
        shared = [_own(same[0], merging, table)]
        body.append(ir.SharedTasks("task", count, row * period + number, row * tasks + before, shared))
        kernel.tables.append(table.in_memory())
        before += count
    kernel.body = [
        ir.Pointers(len(merging.slots)),
        ir.loop("row", 0, len(calls) // period, body),
        ir.EndTasks(),
    ]
    one = merging.as_one(kernel, f"team_{merging.digest}", dialect_of(capabilities))
    return replace(one, source=replace(one.source, alone=True))


def _row(call: Call, numbers: Mapping[int, int]) -> list[int]:
    """The buffers of a call, by their numbers among the parameters, and their offsets."""
    return [*(numbers[slot] for slot, _ in call.locations), *(at for _, at in call.locations)]


def _own(call: Call, merging: MergedCalls, table: Rows) -> ir.Statement:
    """A task of the calls of a function, in all turns."""
    buffers = len(call.locations)
    arguments = [table.item(buffers + at) for at in range(buffers)]
    arguments += [ir.Const(scalar) for scalar in call.scalars]
    return merging.call(call, ir.Var("task"), arguments, numbers=[table.item(at) for at in range(buffers)])
