"""The launches of a schedule, for an arrangement of its buffers in allocations.

On a GPU, the kernels of a turn are fused into a launch (horizontal fusion). On a CPU, successive small
kernels are merged (concatenation). Horizontally fused kernels take whole allocations as arguments, since a
launch takes few arguments. So their text depends on which buffers share an allocation, which is known at the
first run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from penstock.compiler.schedule import Copy, InputUse, OutputWrite, Schedule, Step, may_alias
from penstock.drivers.driver import Capabilities, Cost
from penstock.drivers.rates import Crossing
from penstock.kernels.concatenation import Call, concatenated
from penstock.kernels.costing import merged
from penstock.kernels.hazards import Range, Touched, orderings
from penstock.kernels.horizontal_fusion import fuse_horizontally, joins, kind
from penstock.kernels.last_workgroup import with_last_workgroups
from penstock.kernels.sizes import Sizes
from penstock.kernels.teams import in_teams

# For each buffer of a horizontally fused launch: the index of its allocation, and its offset there in
# multiples of the alignment.
Arrangement = tuple[tuple[int, int], ...]
# A list contains calls, lists of calls to fuse horizontally, and copies that run concurrently with them.
# Other copies and host steps are parts of their own.
Part = list[Call | list[Call] | Copy] | Step | Copy
# Bytes. A launch that accesses more fills a GPU by itself, and would evict the data of concurrent launches
# from the cache. So such launches run in sequence: all are declared to write `_DEVICE`, which is no memory.
_LARGE = 24 << 20
_DEVICE: tuple[Range, ...] = ((-1, 0, 1),)
# So do copies of each direction, which cross the link one after another: what is needed first goes first.
_LINKS: dict[str, tuple[Range, ...]] = {"out": ((-2, 0, 1),), "in": ((-3, 0, 1),)}


def launch_parts(schedule: Schedule, capabilities: Capabilities) -> list[Part]:
    """The calls of the steps in order; calls of a turn that are to be fused are a list."""
    parts: list[Part] = []
    for _, turn in groupby(schedule.steps, lambda step: step.turn):
        steps = list(turn)
        kernels = [step for step in steps if isinstance(step, Step) and step.calls]
        beside = [step for step in steps if isinstance(step, Copy) and step.way != "inside"]
        parts += [
            step for step in steps if (step.way == "inside" if isinstance(step, Copy) else not step.calls)
        ]
        calls = [call for step in kernels for call in step.calls]
        if not calls and not beside:
            continue
        if not parts or not isinstance(parts[-1], list):
            parts.append([])
        run = parts[-1]
        assert isinstance(run, list)
        run += beside
        if calls:
            run += [calls] if _fuses(kernels[0], capabilities) and joins(calls) else calls
    return parts


def timeline(schedule: Schedule, capabilities: Capabilities) -> tuple[tuple[Cost, ...], tuple[Crossing, ...]]:
    """The costs of the launches, as far as they are known, and the copies beside them.

    Kernels that are fused are a single launch.
    """
    runs = [part for part in launch_parts(schedule, capabilities) if isinstance(part, list)]
    items = [item for run in runs for item in run]
    known: list[Cost] = []
    before: list[int] = []  # for each item, how many known launches stand before it
    for item in items:
        before.append(len(known))
        if isinstance(item, Copy):
            continue
        calls = [item] if isinstance(item, Call) else item
        cost = merged([call.source.name for call in calls], [call.cost for call in calls])
        known += [] if cost is None else [cost]
    return tuple(known), _crossings(schedule, items, before)


def _crossings(
    schedule: Schedule, items: Sequence[Call | list[Call] | Copy], before: Sequence[int]
) -> tuple[Crossing, ...]:
    """The copies among launches; `before`: how many launches stand before each."""
    copies = {
        at: number for number, at in enumerate(at for at, item in enumerate(items) if isinstance(item, Copy))
    }
    if not copies:
        return ()
    # Only results at the host are written over what copies read.
    hosted = {
        output: write for output, write in schedule.output_writes.items() if schedule.buffers[output].hosted
    }
    after = orderings([_touched(item) for item in items], _aliases(schedule, hosted))
    waits: dict[int, int] = {}  # by copy, the first launch that waits for it
    for at, earlier in enumerate(after):
        if at not in copies:
            for other in earlier:
                if other in copies:
                    waits.setdefault(other, before[at])
    result = []
    for at in copies:
        item = items[at]
        assert isinstance(item, Copy)
        follows = max((1 + before[other] for other in after[at] if other not in copies), default=0)
        others = tuple(copies[other] for other in after[at] if other in copies)
        result.append(Crossing(item.nbytes, item.way == "out", before[at], follows, others, waits.get(at)))
    return tuple(result)


def _touched(item: Call | list[Call] | Copy) -> Touched:
    """The bytes that a launch or a copy reads and writes."""
    if isinstance(item, Copy):
        return item.touched
    calls = [item] if isinstance(item, Call) else item
    reads = tuple(part for call in calls for part in call.touched.reads)
    return Touched(reads, tuple(part for call in calls for part in call.touched.writes + call.scratch))


def _aliases(schedule: Schedule, writes: Mapping[int, OutputWrite]) -> dict[int, list[int]]:
    """For each of these outputs, the inputs that it may be written over."""
    sized: dict[int, dict[int, InputUse]] = {}  # the inputs of each size: others do not fit
    for given, use in schedule.input_uses.items():
        sized.setdefault(use.nbytes, {})[given] = use
    return {
        output: [given for given, use in sized.get(write.nbytes, {}).items() if may_alias(write, use, given)]
        for output, write in writes.items()
    }


def _fuses(step: Step, capabilities: Capabilities) -> bool:
    """Whether the kernels of a step may be fused horizontally with those of its turn."""
    return capabilities.vector_width == 1 and kind(step.group, step.lowering, capabilities) is not None


def fused_buffers(parts: Sequence[Part]) -> list[int]:
    """The buffers of calls that are fused horizontally."""
    runs = [run for run in parts if isinstance(run, list)]
    fused = [call for run in runs for calls in run if isinstance(calls, list) for call in calls]
    return sorted({buffer for call in fused for buffer, _ in call.locations})


def arranged(
    parts: Sequence[Part],
    schedule: Schedule,
    capabilities: Capabilities,
    arrangement: Arrangement | None,
    sizes: Sizes,
) -> list[list[Call | Copy] | Step | Copy]:
    """The calls after fusion; the indices of allocations follow those of the buffers.

    Without an arrangement, every buffer is an argument of its own.
    """
    buffers = fused_buffers(parts)
    within = {buffer: (buffer, 0) for buffer in buffers}
    if arrangement is not None:
        first = len(schedule.buffers)
        within = {
            buffer: (first + allocation, offset)
            for buffer, (allocation, offset) in zip(buffers, arrangement, strict=True)
        }
    result: list[list[Call | Copy] | Step | Copy] = []
    for part in parts:
        if not isinstance(part, list):
            result.append(part)
            continue
        items: list[Call | Copy] = []
        for item in part:
            items += _fused(item, within, capabilities, sizes) if isinstance(item, list) else [item]
        result.append(_merged(items, schedule, capabilities))
    return result


def _merged(
    items: Sequence[Call | Copy], schedule: Schedule, capabilities: Capabilities
) -> list[Call | Copy]:
    """The calls with neighbours merged, on a GPU those that reduce what the one before has reduced."""
    if capabilities.vector_width > 1:
        return _concatenated(items, schedule, capabilities)
    aliases = partial(_aliases, schedule, schedule.output_writes)
    return with_last_workgroups(items, aliases, capabilities)


def _concatenated(
    items: Sequence[Call | Copy], schedule: Schedule, capabilities: Capabilities
) -> list[Call | Copy]:
    """The calls with small neighbours merged, but not across copies."""
    result: list[Call | Copy] = []
    for copies, together in groupby(items, lambda item: isinstance(item, Copy)):
        if copies:
            result += together
        else:
            calls = in_teams([item for item in together if isinstance(item, Call)], capabilities)
            result += concatenated(calls, schedule.arenas, capabilities)
    return result


def _fused(
    calls: Sequence[Call], within: Mapping[int, tuple[int, int]], capabilities: Capabilities, sizes: Sizes
) -> list[Call]:
    launches = fuse_horizontally(calls, within, capabilities)
    if not any(call.source.sizes for call in calls):
        return launches
    return [launch if launch in calls else sizes.launch(launch, varied=True) for launch in launches]


def may_begin_early(calls: Sequence[Call | Copy], after: Sequence[Sequence[int]]) -> list[bool]:
    """For each call, whether it may begin before the one that it must wait for has ended, if that is one.

    That one may have begun early, too, and so on; none of them may write what the call reads before it waits.
    `after`: the calls that each must wait for.
    """
    result: list[bool] = []
    for call, before in zip(calls, after, strict=True):
        early, reads = len(before) == 1, call.touched.ahead
        number = before[0] if before else None
        while early and reads and number is not None:
            writes = _touched(calls[number]).writes
            early = not any(_overlap(read, write) for read in reads for write in writes)
            number = after[number][0] if result[number] else None
        result.append(early)
    return result


def _overlap(one: Range, other: Range) -> bool:
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


def dependencies(
    schedule: Schedule, calls: Sequence[Call | Copy], functions: Mapping[str, Any]
) -> list[list[int]]:
    """For each call or copy, the indices of the earlier ones that it must wait for.

    `functions`: compiled library calls by name.
    """
    touched = []
    for call in calls:
        if isinstance(call, Copy):
            touched.append(Touched(call.touched.reads, call.touched.writes + _LINKS[call.way]))
            continue
        # Whether a library call uses its workspace is known once it is compiled.
        workspace = getattr(functions.get(call.source.name), "workspace", 1)
        reads, writes = call.touched.reads, call.touched.writes
        large = sum(end - start for _, start, end in reads + writes) > _LARGE
        writes += call.scratch if workspace else ()
        touched.append(Touched(reads, writes + _DEVICE if large else writes))
    return orderings(touched, _aliases(schedule, schedule.output_writes))
