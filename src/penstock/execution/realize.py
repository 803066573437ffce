"""From recorded graphs to values on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import numpy as np

from penstock.errors import OutOfDeviceMemory
from penstock.execution.host_program import HostProgram, names
from penstock.execution.hosting import send
from penstock.execution.sharing import shared, source
from penstock.execution.single import Single, is_all_of, single
from penstock.execution.structure import MIN_ITEMS, Structure
from penstock.graph.node import Array, Node, topological
from penstock.graph.reference import constant_values
from penstock.interrupts import held_back
from penstock.memory.buffer import Buffer
from penstock.runtime import Device
from penstock.stream.recorder import Run

if TYPE_CHECKING:
    from penstock.execution.cache import ExecutableCache
    from penstock.execution.executable import Executable
    from penstock.execution.launched import RunProgram


_value = attrgetter("value")


def executables(device: Device) -> ExecutableCache:
    """The programs of a device."""
    with device.running:
        if device.executables is None:
            from penstock.execution.cache import ExecutableCache  # late: a third of what the package takes

            device.executables = ExecutableCache(device)
        own: ExecutableCache = device.executables
        return own


@dataclass
class Replaced:
    """Old values, by the pending nodes that may be written over them: nothing else refers to them."""

    values: dict[Node, Node]
    done: bool = False  # whether all new values are there
    damaged: bool = False  # whether some may be overwritten already

    def aliases(self, program: Executable, structure: Structure) -> dict[int, int] | None:
        """The inputs of a program that its results are written over, by the numbers of both."""
        if not self.values or program.schedule.hosted:
            return None
        number = {node: at for at, node in enumerate(structure.inputs) if not node.value.shared}
        result: dict[int, int] = {}
        for at, node in enumerate(structure.recorded):
            old = self.values.get(node)
            if old is not None and old in number and program.may_overwrite(at, number[old]):
                result[at] = number[old]
        return result or None


def realize(
    nodes: Sequence[Node], device: Device, repeated: bool = False, replaced: Replaced | None = None
) -> None:
    """Compute the nodes that have no value yet, and keep the results on the device.

    `repeated`: the same will be computed many times, so that kernels pay however small it is. `replaced`:
    what results may be written over; Ctrl-C then waits until all of them are there.
    """
    with device.running:  # another thread may be about to compute the same
        _realize(nodes, device, repeated, replaced)


def _realize(
    nodes: Sequence[Node], device: Device, repeated: bool = False, replaced: Replaced | None = None
) -> None:
    """See `realize`; `device.running` is held."""
    if device.updated:
        updated, device.updated = device.updated, {}
        pending = [reference() for reference in list(updated.values())]  # other threads may add some
        nodes = [*nodes, *(node for node in pending if node is not None)]
        repeated = True
    wanted, alone = nodes, None
    if len(nodes) == 1:
        node = nodes[0]
        if node.value is not None or shared(node, device):
            return
        alone, run, is_moved = _small(node, device) if device.runs_programs else (None, None, False)
        if alone is not None:
            _, inputs, given, constants = alone
            if run is not None:
                numbers = constant_values(tuple(constants)) if constants else ()
                if node.like is not None:
                    node.like.note(node, given, constants, run, is_moved)
                try:
                    (value,) = run(inputs, numbers)
                except OutOfDeviceMemory:  # below, it is planned for what is left
                    pass
                else:
                    node.set_value(value)
                    return
            inputs.clear()  # what somebody refers to stays on the device
    else:
        several = dict.fromkeys(nodes)
        wanted = [node for node in several if node.value is None and not shared(node, device)]
        if not wanted:
            return
    structure = Structure(wanted, device.capabilities)
    if device.dispatcher is None:
        moved = executables(device).moved(
            structure, None if alone is None else alone[0], lambda node: _realize((node,), device)
        )
        if moved is not None:
            structure = Structure(moved, device.capabilities, recorded=wanted)
            alone = None if alone is None else single(moved[0])
    run_all = _told if device.stream.recorders else _computed
    if replaced is None or device.dispatcher is not None:
        buffers, program = run_all(structure, device, repeated, None)
        _set_values(wanted, buffers)
    else:
        own = executables(device)
        own.known(structure, repeated, own.state_of(structure))  # which may take its time
        with held_back:
            buffers, program = run_all(structure, device, repeated, replaced)
            _set_values(wanted, buffers)
            replaced.done = True
    if alone is not None and is_all_of(alone, structure):
        executables(device).keep_single(alone[0], structure, program)
    if structure.unchecked:
        structure.watch(buffers[len(wanted) :], device)


def _small(node: Node, device: Device) -> tuple[Single | None, RunProgram | None, bool]:
    """A node as a small expression, what ran it, and whether that takes starts of slices as arguments."""
    alone = single(node)
    if alone is None:
        return None, None, False
    own = device.executables or executables(device)
    run = own.singles.get(alone[0])
    moved = own.starts.again(alone[0], node) if run is None else None
    other = None if moved is None else single(moved)
    if other is not None and other[0] in own.singles:
        return other, own.singles[other[0]], True
    return alone, run, False


def compute(node: Node, device: Device) -> None:
    """Compute a node that has no value yet, like `realize`.

    A node like others that were computed before takes the shortest way: what ran for these, and no call that
    is not necessary.
    """
    with device.running:
        like = node.like
        if like is not None and node.value is None:
            run = like.run
            if run is not None and not device.executables.stream.recorders and not device.updated:
                inputs, numbers = (node.inputs, like.numbers) if like.is_plain else like.given(node)
                values = [*map(_value, inputs)]
                try:
                    if values and None not in values:
                        (node.value,) = run(values, numbers)
                        node.inputs = ()  # as by `set_value`: no gradient passes
                        return
                except OutOfDeviceMemory:  # below, it is planned for what is left
                    pass
                values.clear()  # what somebody refers to stays on the device
        _realize((node,), device)


def value_of(node: Node, device: Device) -> Buffer:
    """The value of a node, computed if it is pending.

    To read `node.value` after `realize` would be too late: a step in another thread lets go of what was kept.
    """
    with device.running:
        compute(node, device)
        value: Buffer = node.value
        return value


def read(node: Node, device: Device) -> Array | None:
    """A copy of a value, or of that of a frequent operation; None where the host cannot read it at once."""
    if (node.value is None and node.like is None) or not device.runs_programs:
        return None
    with device.running:
        return device.layers().transfers.fetched(value_of(node, device), np.dtype(node.dtype), node.shape)


def _set_values(nodes: Sequence[Node], buffers: Sequence[Buffer]) -> None:
    for node, buffer in zip(nodes, buffers, strict=False):
        node.set_value(buffer)


def _computed(
    structure: Structure, device: Device, repeated: bool, replaced: Replaced | None
) -> tuple[list[Buffer], Executable | HostProgram]:
    """The values, and the program that computed them."""
    if device.dispatcher is not None:
        result: tuple[list[Buffer], Executable | HostProgram] = device.dispatcher.computed(structure)
        return result
    own = executables(device)
    state = own.state_of(structure)
    program = own.known(structure, repeated, state)
    try:
        return _run(program, structure, device, replaced), program
    except OutOfDeviceMemory:
        if device.limit_bytes is None or (replaced is not None and replaced.damaged):
            raise
    # What computes it until its kernels are compiled takes more than these, which are planned for the limit.
    program = own.known(structure, True, state)
    return _run(program, structure, device, replaced), program


def _run(
    program: Executable | HostProgram, structure: Structure, device: Device, replaced: Replaced | None
) -> list[Buffer]:
    numbers = structure.constants()
    if isinstance(program, HostProgram):
        return program.run([node.value for node in structure.inputs], numbers, structure.bounds)
    if program.schedule.hosted:
        send(structure.inputs, program.schedule.hosted, device)
    inputs = [node.value for node in structure.inputs]
    aliases = None if replaced is None else replaced.aliases(program, structure)
    if replaced is None or aliases is None:
        return program.run(inputs, numbers)
    replaced.damaged = True  # unless all of it is done, whatever interrupts it
    try:
        return program.run(inputs, numbers, aliases)
    except Exception:
        replaced.damaged = program.wrote
        raise


def _told(
    structure: Structure, device: Device, repeated: bool, replaced: Replaced | None
) -> tuple[list[Buffer], Executable | HostProgram]:
    """The same, and profiles are told of it."""
    own = executables(device)
    fresh, built, start = not own.seen(structure), own.build_seconds, perf_counter()
    buffers, program = _computed(structure, device, repeated, replaced)
    wanted = structure.recorded
    spent = own.build_seconds - built
    by_host = isinstance(program, HostProgram)
    how: Literal["program", "numpy"] = "numpy" if by_host else "program"
    run = Run(
        how, None if by_host else program, fresh, spent, start, perf_counter(), topological(wanted), wanted
    )
    for recorder in device.stream.recorders:
        recorder.computed(run)
    return buffers, program


def needs_compiler(node: Node, device: Device) -> bool:
    """Whether computing a node now would first build a program."""
    with device.running:  # another thread that computes a part of it would change the graph
        wanted = to_compute([node])
        return bool(wanted) and executables(device).builds(Structure(wanted, device.capabilities))


def precompile(node: Node, device: Device) -> None:
    """Compile what computes a node. Others can use the device meanwhile."""
    if device.dispatcher is None:
        executables(device).precompile(node)


def to_compute(nodes: Sequence[Node]) -> list[Node]:
    """Those of some nodes whose values are not known yet."""
    return [node for node in dict.fromkeys(nodes) if source(node).value is None]


def explain(nodes: Sequence[Node], device: Device) -> str:
    """What would compute the nodes: NumPy, or a program with its steps, the bytes they move, and its plan."""
    if device.dispatcher is not None:
        text: str = device.dispatcher.explain(nodes)
        return text
    wanted = to_compute(nodes)
    if not wanted:
        return "computed already"
    with device.running:
        own, structure = executables(device), Structure(wanted, device.capabilities)
        called = f"; {structure.called} operations were recorded before" if structure.called else ""
        schedule = own.schedule(structure, own.state_of(structure))
        if not own.waits_for_no_compiler(structure):
            return f"{schedule}{called}"
        return f"{numpy_text(structure)}; in a jitted function:\n{schedule}{called}"


def numpy_text(structure: Structure) -> str:
    """What NumPy computes, and why."""
    what = " ".join(names(topological(structure.nodes)))
    why = "the host sees all inputs" if structure.inputs else "there are no inputs"
    small = structure.small(seen=True)
    why += f" and no step has {MIN_ITEMS} items" if small else " and it was not computed before"
    return f"NumPy computes [{what}] on the host, as {why}"
