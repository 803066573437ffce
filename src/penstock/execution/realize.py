"""From recorded graphs to values on the device."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from penstock.errors import OutOfDeviceMemory
from penstock.execution.host_program import HostProgram, names
from penstock.execution.hosting import send
from penstock.execution.sharing import shared, source
from penstock.execution.single import Single, is_all_of, single
from penstock.execution.structure import MIN_ITEMS, Structure
from penstock.graph.node import Node, topological
from penstock.graph.reference import constant_values
from penstock.memory.buffer import Buffer
from penstock.runtime import Device
from penstock.stream.recorder import Run

if TYPE_CHECKING:
    from penstock.execution.cache import ExecutableCache
    from penstock.execution.executable import Executable


def executables(device: Device) -> ExecutableCache:
    """The programs of a device."""
    with device.running:
        if device.executables is None:
            from penstock.execution.cache import ExecutableCache  # late: a third of what the package takes

            device.executables = ExecutableCache(device)
        own: ExecutableCache = device.executables
        return own


def realize(nodes: Sequence[Node], device: Device, repeated: bool = False) -> None:
    """Compute the nodes that have no value yet, and keep the results on the device.

    `repeated`: the same will be computed many times, so that kernels pay however small it is.
    """
    with device.running:  # another thread may be about to compute the same
        if device.updated:
            updated, device.updated = device.updated, {}
            pending = [reference() for reference in list(updated.values())]  # other threads may add some
            nodes = [*nodes, *(node for node in pending if node is not None)]
            repeated = True
        alone: Single | None = None
        wanted = nodes
        if len(nodes) == 1:
            (node,) = nodes
            if node.value is not None or shared(node, device):
                return
            alone = single(node) if device.runs_programs else None
            if alone is not None:
                key, inputs, _, constants = alone
                run = (device.executables or executables(device)).singles.use(key)
                if run is not None:
                    try:
                        (value,) = run(inputs, constant_values(tuple(constants)) if constants else ())
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
        if not repeated and device.dispatcher is None:
            slices = executables(device).slices_first(structure)
            if slices and slices != wanted:
                realize(slices, device)
                structure = Structure(wanted, device.capabilities)
        compute = _told if device.stream.recorders else _computed
        buffers, program = compute(structure, device, repeated)
        for node, buffer in zip(wanted, buffers, strict=False):
            node.set_value(buffer)
        if alone is not None and is_all_of(alone, structure):
            executables(device).keep_single(alone[0], structure, program)
        if structure.unchecked:
            structure.watch(buffers[len(wanted) :], device)


def _computed(
    structure: Structure, device: Device, repeated: bool
) -> tuple[list[Buffer], Executable | HostProgram]:
    """The values, and the program that computed them."""
    if device.dispatcher is not None:
        result: tuple[list[Buffer], Executable | HostProgram] = device.dispatcher.computed(structure)
        return result
    own = executables(device)
    state = own.state_of(structure)
    program = own.known(structure, repeated, state)
    try:
        return _run(program, structure, device), program
    except OutOfDeviceMemory:
        if device.limit_bytes is None:
            raise
    # What computes it until its kernels are compiled takes more than these, which are planned for the limit.
    program = own.known(structure, True, state)
    return _run(program, structure, device), program


def _run(program: Executable | HostProgram, structure: Structure, device: Device) -> list[Buffer]:
    numbers = structure.constants()
    if isinstance(program, HostProgram):
        return program.run([node.value for node in structure.inputs], numbers, structure.bounds)
    if program.schedule.hosted:
        send(structure.inputs, program.schedule.hosted, device)
    return program.run([node.value for node in structure.inputs], numbers)


def _told(
    structure: Structure, device: Device, repeated: bool
) -> tuple[list[Buffer], Executable | HostProgram]:
    """The same, and profiles are told of it."""
    own = executables(device)
    fresh, built, start = not own.seen(structure), own.build_seconds, perf_counter()
    buffers, program = _computed(structure, device, repeated)
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


def waits_for_a_compiler(node: Node, device: Device) -> bool:
    """Whether computing a node now would first build a program."""
    wanted = to_compute([node])
    return bool(wanted) and executables(device).builds(Structure(wanted, device.capabilities))


def precompile(node: Node, device: Device) -> None:
    """Compile what computes a node. Others can use the device meanwhile."""
    wanted = to_compute([node])
    if wanted and device.dispatcher is None:
        executables(device).precompile(Structure(wanted, device.capabilities))


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
