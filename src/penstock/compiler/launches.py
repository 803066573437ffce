"""The launches of a schedule, for an arrangement of its buffers in allocations.

On a GPU, the kernels of a turn are fused into a launch (horizontal fusion). On a CPU, successive small
kernels are merged (concatenation). Horizontally fused kernels take whole allocations as arguments, since a
launch takes few arguments. So their text depends on which buffers share an allocation, which is known at the
first run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from penstock.compiler.schedule import Copy, Schedule, Step
from penstock.drivers.driver import Capabilities, Cost
from penstock.kernels.concatenation import Call, concatenated
from penstock.kernels.costing import merged
from penstock.kernels.hazards import Range, Touched, orderings
from penstock.kernels.horizontal_fusion import fuse_horizontally, joins, kind
from penstock.kernels.sizes import Sizes

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


def launch_costs(schedule: Schedule, capabilities: Capabilities) -> tuple[Cost, ...]:
    """The costs of the launches, as far as they are known; kernels that are fused are a single launch."""
    runs = [part for part in launch_parts(schedule, capabilities) if isinstance(part, list)]
    known: list[Cost | None] = []
    for item in (item for run in runs for item in run if not isinstance(item, Copy)):
        calls = [item] if isinstance(item, Call) else item
        known.append(merged([call.source.name for call in calls], [call.cost for call in calls]))
    return tuple(cost for cost in known if cost is not None)


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
        gpu = capabilities.vector_width == 1
        result.append(items if gpu else _concatenated(items, schedule, capabilities))
    return result


def _concatenated(
    items: Sequence[Call | Copy], schedule: Schedule, capabilities: Capabilities
) -> list[Call | Copy]:
    """The calls with small neighbours merged, but not across copies."""
    result: list[Call | Copy] = []
    for copies, together in groupby(items, lambda item: isinstance(item, Copy)):
        if copies:
            result += together
        else:
            calls = [item for item in together if isinstance(item, Call)]
            result += concatenated(calls, schedule.arenas, capabilities)
    return result


def _fused(
    calls: Sequence[Call], within: Mapping[int, tuple[int, int]], capabilities: Capabilities, sizes: Sizes
) -> list[Call]:
    launches = fuse_horizontally(calls, within, capabilities)
    if not any(call.source.sizes for call in calls):
        return launches
    return [launch if launch in calls else sizes.launch(launch, varied=True) for launch in launches]


def dependencies(
    schedule: Schedule, calls: Sequence[Call | Copy], functions: Mapping[str, Any]
) -> list[list[int]]:
    """For each call or copy, the indices of the earlier ones that it must wait for.

    `functions`: compiled library calls by name.
    """
    aliases = {
        output: [given for given in schedule.input_uses if schedule.may_alias(output, given)]
        for output in schedule.output_writes
    }
    touched = []
    for call in calls:
        if isinstance(call, Copy):
            touched.append(call.touched)
            continue
        # Whether a library call uses its workspace is known once it is compiled.
        workspace = getattr(functions.get(call.source.name), "workspace", 1)
        reads, writes = call.touched.reads, call.touched.writes
        large = sum(end - start for _, start, end in reads + writes) > _LARGE
        writes += call.scratch if workspace else ()
        touched.append(Touched(reads, writes + _DEVICE if large else writes))
    return orderings(touched, aliases)
