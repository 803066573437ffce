"""What an executable launches: a few kernels with all arguments set, or what it launched in its last run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeAlias

from penstock.compiler.schedule import Copy, Schedule
from penstock.errors import OutOfDeviceMemory
from penstock.execution.hosting import on_device
from penstock.kernels.concatenation import Call
from penstock.kernels.source import ALIGNMENT
from penstock.memory.buffer import Buffer, new_buffer
from penstock.runtime import Device
from penstock.stream.program import CopyEnds, Program
from penstock.stream.queue import BufferSizes, Uses
from penstock.stream.recorder import Launch

_native = attrgetter("native")
# A run of a program, from buffers of its inputs and its constants.
RunProgram: TypeAlias = Callable[[Sequence[Buffer], Sequence[Any]], list[Buffer]]


@dataclass(frozen=True, slots=True)
class DirectLaunch:
    """A launch that gets all arguments at each run: the sources of the arguments in order."""

    command: Launch
    touched: Callable[[Sequence[Any]], Sequence[Buffer]]  # the buffers that it takes, of those of a run
    scalars: list[int]
    constants: Sequence[int]


def direct_launch(call: Call, launch: tuple[Any, Any, Any, list[Any]], schedule: Schedule) -> DirectLaunch:
    """A call of a schedule as such a launch; `launch` is its kernel, grid, group and arguments."""
    kernel, grid, group, args = launch
    slots = [slot for slot, _ in call.locations]
    sizes = BufferSizes(schedule.buffers[slot].nbytes for slot in slots)
    scalars = args[len(slots) : len(args) - len(call.constants)]
    # By a slice, an item getter gives a sequence of a single buffer too.
    touched = itemgetter(*slots) if len(slots) > 1 else itemgetter(slice(slots[0], slots[0] + 1))
    return DirectLaunch((kernel, grid, group, sizes), touched, scalars, call.constants)


def _direct_run(
    launch: DirectLaunch, schedule: Schedule, device: Device, arenas: Callable[[], list[Buffer]] | None
) -> RunProgram:
    """What runs a program that is a single launch with one output, while `device.running` is held.

    Its temporaries are in the only one of `arenas`, if it has any.

    All arguments are set each time: there is nothing to compare, and little between a call and its launch.
    """
    layers, record = device.layers(), device.stream.launcher(launch.command)
    driver, touched, scalars, constants = layers.driver, launch.touched, launch.scalars, launch.constants
    (output,) = schedule.outputs
    nbytes, is_shared = schedule.buffers[output].nbytes, any(schedule.shared)
    values = len(schedule.results)  # several of them may be one
    count, in_turn = len(constants), [*constants] == [*range(len(constants))]
    in_order = (*touched(range(output + 1)),) == (output, *range(1, output))  # the output, then all inputs

    def run(inputs: Sequence[Buffer], numbers: Sequence[Any]) -> list[Buffer]:
        if layers.hosts_state:
            inputs = on_device(inputs, schedule.hosted, device)
        arena = None if arenas is None else arenas()[0]  # before the result, for which it may make room
        try:
            result = new_buffer(driver, nbytes, layers.source)
        except OutOfDeviceMemory:
            result = device.empty(nbytes)  # which makes room
        taken = [result, *inputs] if in_order else touched([arena, *inputs, result])
        native = [*map(_native, taken), *scalars]
        if constants:
            native += numbers[:count] if in_turn else [numbers[constant] for constant in constants]
        record(native, taken)
        if is_shared:
            result.shared = True
        return [result] if values == 1 else [result] * values

    return run


def direct_runs(
    launches: Sequence[DirectLaunch],
    schedule: Schedule,
    device: Device,
    arenas: Callable[[], list[Buffer]],
    has_arenas: bool,
) -> RunProgram:
    """The same for a few launches, with any number of outputs; `has_arenas`: temporaries are in `arenas`."""
    simple = len(launches) == len(schedule.outputs) == 1 and {*schedule.results} == {*schedule.outputs}
    if simple and (not has_arenas or len(schedule.arenas) == 1):
        return _direct_run(launches[0], schedule, device, arenas if has_arenas else None)
    steps = [
        (device.stream.launcher(launch.command), launch.touched, launch.scalars, launch.constants)
        for launch in launches
    ]
    layers, results = device.layers(), schedule.results
    output_bytes = [schedule.buffers[output].nbytes for output in schedule.outputs]
    shared = [at for at, is_shared in zip(results, schedule.shared, strict=True) if is_shared]

    def run(inputs: Sequence[Buffer], numbers: Sequence[Any]) -> list[Buffer]:
        if layers.hosts_state:
            inputs = on_device(inputs, schedule.hosted, device)
        arena, *more_arenas = arenas()
        buffers = [arena, *inputs, *map(device.empty, output_bytes), *more_arenas]
        for record, touched, scalars, constants in steps:
            taken = touched(buffers)
            record([*map(_native, taken), *scalars, *[numbers[at] for at in constants]], taken)
        for at in shared:
            buffers[at].shared = True
        return [buffers[at] for at in results]

    return run


class RepeatedRun(NamedTuple):
    """What was launched in a run, and where its buffers lay."""

    program: Program
    uses: Uses
    places: Sequence[tuple[int, int]]  # the list itself says which run it was
    arenas: Sequence[tuple[int, int]]


def ends(step: Copy, buffers: Sequence[Buffer]) -> CopyEnds:
    """Where a copy goes and comes from, of the buffers of a run."""
    (target, to), (source, start) = step.target, step.source
    return CopyEnds(buffers[target], to * ALIGNMENT, buffers[source], start * ALIGNMENT)
