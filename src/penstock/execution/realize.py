"""From recorded graphs to values on the device: programs by structure, built when that pays.

A small expression that is seen for the first time waits for no compiler: NumPy computes it, where the host
sees the memory of all its inputs. What lies in memory of the device's own is computed there, small or large.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from penstock.execution.host_program import HostProgram, names
from penstock.execution.single import single
from penstock.execution.structure import MIN_ITEMS, Structure
from penstock.graph.node import Node, topological
from penstock.graph.reference import Constant
from penstock.graph.shaping import RESHAPE
from penstock.lru import LRU
from penstock.memory.buffer import Buffer
from penstock.runtime import Device
from penstock.stream.recorder import Run

if TYPE_CHECKING:
    from penstock.execution.executable import Executable

_MAX_PROGRAMS = 256
_MAX_HOST_PROGRAMS = 1024


class ExecutableCache:
    """The programs of one device, and what was seen; both bounded, they forget what was not used longest."""

    def __init__(self, device: Device) -> None:
        self._device = device
        from penstock.kernels.cache import KernelCache  # imported late: a third of what the package takes

        self.kernels = KernelCache(device)
        self._forced = device.settings.force_kernels
        self._programs = LRU[Hashable, "Executable"](_MAX_PROGRAMS)
        self._host_programs = LRU[Hashable, HostProgram](_MAX_HOST_PROGRAMS)
        self.singles = LRU[Hashable, "Executable | HostProgram"](_MAX_PROGRAMS)  # of small expressions
        self.build_seconds = 0.0  # in all

    def seen(self, structure: Structure) -> bool:
        """Whether the same was computed before, as far as it is remembered."""
        return structure.key in self._programs or structure.key in self._host_programs

    def waits_for_no_compiler(self, structure: Structure) -> bool:
        """Whether NumPy computes it, and no kernel."""
        return not self._forced and structure.waits_for_no_compiler(self.seen(structure))

    def builds(self, structure: Structure) -> bool:
        """Whether computing it now would first build a program."""
        return structure.key not in self._programs and not self.waits_for_no_compiler(structure)

    def known(self, structure: Structure, repeated: bool = False) -> Executable | HostProgram:
        """The program of a structure: of NumPy as long as building kernels would not pay.

        `repeated`: it will be computed many times.
        """
        key = structure.key
        program = self._programs.use(key)
        if program is not None:
            return program
        on_host = self._host_programs.use(key)
        if on_host is not None and on_host.small and not repeated:
            return on_host
        if not repeated and self.waits_for_no_compiler(structure):
            on_host = self._host_programs[key] = HostProgram(structure)
            return on_host
        program = self._programs[key] = self.build(structure)
        return program

    def build(self, structure: Structure, aliases: Mapping[int, int] | None = None) -> Executable:
        """A new executable. `aliases` names wanted nodes that should be written over inputs, by numbers."""
        from penstock.compiler.pipeline import prepare

        start = perf_counter()
        nodes, inputs = prepare(structure.wanted, structure.inputs)
        self.build_seconds += perf_counter() - start
        return self.compile(nodes, inputs, structure.numbers, aliases)

    def compile(
        self,
        nodes: Sequence[Node],
        inputs: Sequence[Node],
        constants: Mapping[Constant, int],
        aliases: Mapping[int, int] | None = None,
    ) -> Executable:
        """The executable of a prepared graph; see `compile_graph`."""
        from penstock.compiler.pipeline import compile_graph
        from penstock.compiler.target import Target
        from penstock.execution.executable import Executable

        start = perf_counter()
        target = Target(self._device.name, self._device.capabilities, self.kernels.lowering)
        schedule = compile_graph(nodes, inputs, constants, target, aliases)
        built = Executable(schedule, self._device, self.kernels)
        self.build_seconds += perf_counter() - start
        return built


def executables(device: Device) -> ExecutableCache:
    """The programs of a device."""
    with device.running:
        if device.executables is None:
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
        alone = single(nodes[0]) if len(nodes) == 1 and device.runs_programs else None
        if alone is not None:
            known = executables(device).singles.use(alone.key)
            if known is not None:
                if isinstance(known, HostProgram):
                    (value,) = known.run(alone.inputs, alone.numbers, device)
                else:
                    (value,) = known.run(alone.inputs, alone.numbers)
                nodes[0].settle(value)
                return
        several = dict.fromkeys(nodes) if len(nodes) > 1 else nodes
        wanted = [node for node in several if node.value is None and not _alias(node)]
        if not wanted:
            return
        structure = Structure(wanted, device.capabilities)
        compute = _told if device.stream.recorders else _computed
        buffers, program = compute(structure, device, repeated)
        for node, buffer in zip(wanted, buffers, strict=False):
            node.settle(buffer)
        stays = not isinstance(program, HostProgram) or program.small  # else kernels compute it the next time
        if alone is not None and stays and alone.is_all_of(structure):
            executables(device).singles[alone.key] = program
        if structure.unchecked:
            structure.watch(buffers[len(wanted) :], device)


def _computed(
    structure: Structure, device: Device, repeated: bool
) -> tuple[list[Buffer], Executable | HostProgram]:
    """The values, and the program that computed them."""
    if device.dispatcher is not None:
        result: tuple[list[Buffer], Executable | HostProgram] = device.dispatcher.computed(structure)
        return result
    program = executables(device).known(structure, repeated)
    inputs, numbers = [node.value for node in structure.inputs], structure.constants()
    if isinstance(program, HostProgram):
        return program.run(inputs, numbers, device), program
    return program.run(inputs, numbers), program


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


def _alias(node: Node) -> bool:
    """Settle a node that is another's value unchanged, where that is known."""
    primitive = node.primitive
    if not primitive.is_identity and primitive is not RESHAPE:
        return False
    known = source(node).value
    if known is None:
        return False
    known.shared = True
    node.settle(known)
    return True


def source(node: Node) -> Node:
    """The node whose value is that of `node` too."""
    while node.value is None and (node.primitive.is_identity or node.primitive is RESHAPE):
        node = node.inputs[0]
    return node


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
        if not own.waits_for_no_compiler(structure):
            program = own.known(structure)
            assert not isinstance(program, HostProgram)
            return f"{program.schedule}{called}"
        steps = own.build(structure).schedule
        return f"{numpy_text(structure)}; in a jitted function:\n{steps}{called}"


def numpy_text(structure: Structure) -> str:
    """What NumPy computes, and why."""
    what = " ".join(names(topological(structure.nodes)))
    why = "the host sees all inputs" if structure.inputs else "there are no inputs"
    small = structure.small(seen=True)
    why += f" and no step has {MIN_ITEMS} items" if small else " and it was not computed before"
    return f"NumPy computes [{what}] on the host, as {why}"
