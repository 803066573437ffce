"""The programs of a device, by structure, and what computes an expression while its program is compiled.

A new expression should wait neither for a compiler nor, on a GPU, for a plan of its fused kernels. Kernels of
single operations, which were compiled ahead, compute it, and from the second time on a thread plans its fused
kernels and compiles them: see `ahead`. Both give the same bits. On a CPU the plan comes first, and kernels
that are on disk are loaded. NumPy computes an expression if it is exact, the
host sees the memory of all inputs, and it is small or new. Small expressions that repeat get a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from time import perf_counter, sleep

from penstock.collectives.world import patient
from penstock.compiler.pipeline import budget_levels, compile_graph, prepare
from penstock.compiler.schedule import Schedule
from penstock.compiler.target import Budget, Target
from penstock.drivers.driver import Driver
from penstock.errors import OutOfDeviceMemory
from penstock.execution.ahead import Ahead
from penstock.execution.executable import Executable
from penstock.execution.host_program import HostProgram
from penstock.execution.hosting import Residents, State
from penstock.execution.launched import RunProgram
from penstock.execution.memory_plan import MemoryPlan
from penstock.execution.numpy_or_launch import NumpyOrLaunch
from penstock.execution.sharing import source
from penstock.execution.sources import kernel_sources
from penstock.execution.starts import Starts
from penstock.execution.structure import Structure
from penstock.fusion.groups import Group
from penstock.graph.node import Node
from penstock.graph.reference import Constant
from penstock.graph.separate import NotSeparable
from penstock.kernels.cache import KernelCache
from penstock.kernels.lower import Lowering
from penstock.kernels.source import KernelSource
from penstock.lru import LRU
from penstock.memory.buffer import Buffer
from penstock.runtime import Device

_MAX_PROGRAMS = 256
_MAX_HOST_PROGRAMS = 1024
_MAX_BRIDGES = 64
_OFTEN = 8  # runs by NumPy after which several operations are worth a kernel
_MOST_IN_PLACE = 1 << 18  # items; NumPy takes longer than a launch for more
_SHARE_OF_FREE = 4  # a quarter: single operations store intermediate values, fused kernels do not
_MAX_OPERATIONS = 256  # for single operations: more take as long to schedule as to compile

_PAUSE_SECONDS = 1e-4  # after each kernel of a plan in a thread: others would wait 5 ms for Python's lock


@dataclass
class _Bridge:
    """What computes an expression until it is planned, and the kernels of its schedule are compiled."""

    program: Executable | HostProgram
    schedule: Schedule | None  # None: not planned yet
    compiled: Future[None] | None = None  # nothing is planned or compiled for what comes once

    @property
    def over(self) -> bool:
        """Whether compilation has ended, with kernels or with an error."""
        return self.compiled is not None and self.compiled.done()

    def end(self) -> None:
        """Cancel compilation, or wait for it if it has begun."""
        if self.compiled is not None and not self.compiled.cancel():
            self.compiled.exception()


class ExecutableCache:
    """The programs of a device and the expressions seen there, in bounded caches (least recently used)."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.stream = device.stream
        self.kernels = KernelCache(device)
        self._forced = device.settings.force_kernels
        self._programs = LRU[Hashable, Executable](_MAX_PROGRAMS)
        self._bridges = LRU[Hashable, _Bridge](_MAX_BRIDGES)
        self._schedules = LRU[Hashable, Schedule](_MAX_BRIDGES)  # of programs whose kernels are compiled
        self._host_programs = LRU[Hashable, HostProgram](_MAX_HOST_PROGRAMS)
        self.starts = Starts(device.capabilities)
        # What runs small expressions. It drops the oldest: to note each use would slow all of them down.
        self.singles = LRU[Hashable, RunProgram](_MAX_PROGRAMS)
        self.build_seconds = 0.0  # in all
        self._last_built = perf_counter()
        self._ahead: Ahead | None = None
        if device.settings.compile_ahead and device.driver.keeps_compiled:
            self._ahead = Ahead(device, self.kernels, lambda: self._last_built)

    def seen(self, structure: Structure) -> bool:
        """Whether the same was computed before, as far as it is remembered."""
        key = structure.key
        return key in self._programs or key in self._bridges or key in self._host_programs

    def waits_for_no_compiler(self, structure: Structure) -> bool:
        """Whether NumPy computes it, and no kernel."""
        if self._forced or structure.key in self._programs:
            return False
        return structure.waits_for_no_compiler(self.seen(structure))

    def builds(self, structure: Structure) -> bool:
        """Whether computing it now would first build a program."""
        return structure.key not in self._programs and not self.waits_for_no_compiler(structure)

    def moved(
        self, structure: Structure, key: Hashable | None, compute: Callable[[Node], None]
    ) -> Sequence[Node] | None:
        """What computes an expression that is new only in where its slices start; see `Starts.moved`."""
        if self.seen(structure):
            return None
        return self.starts.moved(structure, key, compute, self._device.limit_bytes is None)

    def keep_single(self, key: Hashable, structure: Structure, program: Executable | HostProgram) -> None:
        """Remember the program of a small expression, unless it is temporary, or was planned for a limit.

        Such a program may expect inputs at the host, and a limit may change.
        """
        if isinstance(program, HostProgram):
            if program.small and not self._may_be_outgrown(program):
                self.singles[key] = program.runner
        elif structure.key not in self._bridges and not program.schedule.spares:
            on_host = self._host_programs.get(structure.key)
            if on_host is None or on_host.largest > _MOST_IN_PLACE:
                self.singles[key] = program.runner
            else:
                seconds, driver = self._launch_seconds(on_host), self._device.driver
                self.singles[key] = NumpyOrLaunch(on_host, program.runner, seconds, driver).run

    def _may_be_outgrown(self, program: HostProgram) -> bool:
        """Whether a kernel is better once an expression has come often."""
        if self._ahead is None:
            return False
        is_quick = self._launch_seconds(program) < Driver.launch_seconds
        return program.operations > 1 or (is_quick and not program.is_alone)

    def _launch_seconds(self, program: HostProgram) -> float:
        """What a launch takes in place of NumPy, beside the work itself."""
        driver = self._device.driver
        return driver.launch_seconds if program.small else Driver.launch_seconds

    def known(
        self, structure: Structure, repeated: bool = False, state: State | None = None
    ) -> Executable | HostProgram:
        """The program of a structure: of NumPy as long as building kernels would not pay.

        `repeated`: it will be computed many times. `state`: see `build`.
        """
        key = structure.key
        program = self._programs.use(key)
        if program is not None and self._in_budget(program.schedule, state):
            return program
        bridge = self._bridges.use(key)
        if not repeated:
            on_host = self._on_host(structure)
            often = on_host is not None and self._may_be_outgrown(on_host) and on_host.runs >= _OFTEN
            if on_host is not None and not often:
                return on_host
            if bridge is None:
                bridge = self._bridge(structure, on_host, state)
            elif bridge.compiled is None:
                assert self._ahead is not None
                bridge.compiled = self._ahead.compile(self._building(bridge, structure))
            if bridge is not None and not bridge.over:
                return bridge.program
        start = perf_counter()
        if bridge is not None:
            self._bridges.pop(key)
            bridge.end()  # what could not be planned or compiled is told by the program below
            if bridge.schedule is not None:
                self._schedules[key] = bridge.schedule
        anywhere = not repeated and self._serves_anywhere(structure)
        with patient():
            program = Executable(self.schedule(structure, state), self._device, self.kernels, anywhere)
        self._schedules.pop(key, None)
        self._programs[key] = program
        self._note_built(start)
        return program

    def _on_host(self, structure: Structure) -> HostProgram | None:
        """What computes a structure by NumPy, where that is quicker than building a program."""
        known = self._host_programs.use(structure.key)
        if known is not None and known.small:
            return known
        if not self.waits_for_no_compiler(structure):
            return None
        known = self._host_programs[structure.key] = HostProgram(structure, self._device)
        return known

    def _bridge(
        self, structure: Structure, on_host: HostProgram | None, state: State | None
    ) -> _Bridge | None:
        """What computes a structure while a thread builds its fused kernels: NumPy, or single operations.

        None where no compiler is needed, and where single operations are not compiled, or give other bits.
        """
        if self._forced or self._ahead is None:
            return None
        if on_host is None and not self._may_be_apart(structure):
            return None
        if not self._is_planned_later():
            schedule = self.schedule(structure, state)
            if not self._missing(schedule, self._serves_anywhere(structure)):
                return None
        program = on_host or self._single_operations(structure, state)
        if program is None:
            return None
        if self._bridges.full and (oldest := self._bridges.popitem(last=False)[1]).compiled is not None:
            oldest.compiled.cancel()  # nobody waits for it
        planned = self._schedules.pop(structure.key, None)
        bridge = self._bridges[structure.key] = _Bridge(program, planned)
        return bridge

    def _is_planned_later(self) -> bool:
        """Whether single operations compute something before it would be planned, as on a GPU.

        A CPU has more to gain from fused kernels that are on disk already. Under a limit of memory, a plan
        tells whether something can be computed at all.
        """
        return self._device.capabilities.vector_width == 1 and self._device.limit_bytes is None

    def _building(self, bridge: _Bridge, structure: Structure) -> Callable[[], None]:
        """What plans the schedule of a bridge, if it has none, and compiles its kernels, in any thread."""
        nodes, inputs = prepare(structure.wanted, structure.inputs)  # now: others may compute a part of it
        numbers, anywhere = dict(structure.numbers), self._serves_anywhere(structure)

        def lower(group: Group) -> Lowering | None:
            sleep(_PAUSE_SECONDS)
            return self.kernels.lowering(group)

        def build() -> None:
            if bridge.schedule is None:
                target = replace(self._target(), lower=lower)
                bridge.schedule = compile_graph(nodes, inputs, numbers, target)
            self.kernels.compile_ahead(self._missing(bridge.schedule, anywhere))

        return build

    def _missing(self, schedule: Schedule, anywhere: bool = False) -> list[KernelSource]:
        """The kernels of a schedule that need a compiler."""
        return self.kernels.missing(kernel_sources(schedule, self._device, self.kernels, anywhere))

    def _serves_anywhere(self, structure: Structure) -> bool:
        """Whether the kernels of an expression serve any arrangement of its buffers.

        So they are known, and compiled, before it is first run.
        """
        return self._ahead is not None and self._may_be_apart(structure)

    def _may_be_apart(self, structure: Structure) -> bool:
        """Whether single operations may give the bits of a structure, and are not too many."""
        return len(structure.operations) <= _MAX_OPERATIONS

    def _single_operations(self, structure: Structure, state: State | None) -> Executable | None:
        """The program of single operations; None where they are not compiled, or need too much memory."""
        assert self._ahead is not None
        try:
            separate = self._separate(structure)
        except NotSeparable:
            return None
        if absent := self._missing(separate):
            self._ahead.add(absent)
            return None
        more = separate.plan.arena_bytes - self._free_bytes() // _SHARE_OF_FREE
        if more > 0 and more > self.schedule(structure, state).plan.arena_bytes:
            return None
        return Executable(separate, self._device, self.kernels)

    def _free_bytes(self) -> int:
        """The bytes that can still be allocated."""
        stats = self._device.memory_stats()
        limit = self._device.capabilities.total_bytes if stats.limit_bytes is None else stats.limit_bytes
        return max(limit - stats.live_bytes, 0)

    def precompile(self, node: Node) -> None:
        """Compile the kernels that compute a node; others can use the device meanwhile."""
        with self._device.running:  # first: others may be about to compute a part of it
            if source(node).value is not None:
                return
            structure = Structure([node], self._device.capabilities)
            if not self.builds(structure):
                return
            schedule = self.schedule(structure, self.state_of(structure))
            missing = self._missing(schedule, self._serves_anywhere(structure))
        kernels = self.kernels.compiled(missing)
        with self._device.running:
            self.kernels.keep(kernels)

    def compiling(
        self, structure: Structure, aliases: Mapping[int, int] | None = None, state: State | None = None
    ) -> Callable[[], None]:
        """What compiles the kernels of `build`, in any thread, while others use the device."""
        with self._device.running:
            nodes, inputs = prepare(structure.wanted, structure.inputs)
            schedule = self._compiled(nodes, inputs, structure.numbers, aliases, 2, state)
            missing = self._missing(schedule)

        def compile_all() -> None:
            if self._device.driver.keeps_compiled:
                self.kernels.compile_ahead(missing)
                return
            kernels = self.kernels.compiled(missing)
            with self._device.running:
                self.kernels.keep(kernels)

        return compile_all

    def state_of(self, structure: Structure) -> State | None:
        """What may lie at the host under a limit, of an expression outside of jitted functions."""
        limited = self._device.capabilities.offloads and self._device.limit_bytes is not None
        return State.of_expression(structure) if limited else None

    def schedule(self, structure: Structure, state: State | None = None) -> Schedule:
        """The schedule of a structure; kept until there is a program of it. `state`: see `build`."""
        program = self._programs.get(structure.key)
        if program is not None and self._in_budget(program.schedule, state):
            return program.schedule
        schedule = self._schedules.use(structure.key)
        if schedule is None or not self._in_budget(schedule, state):
            start = perf_counter()
            nodes, inputs = prepare(structure.wanted, structure.inputs)
            schedule = self._compiled(nodes, inputs, structure.numbers, state=state)
            self._schedules[structure.key] = schedule
            self._note_built(start)
        return schedule

    def _separate(self, structure: Structure) -> Schedule:
        """The schedule of a structure without fusion."""
        nodes, inputs = prepare(structure.wanted, structure.inputs)
        return compile_graph(nodes, inputs, structure.numbers, self._target(fuses=False))

    def _target(self, fuses: bool = True, budget: Budget | None = None) -> Target:
        device, kernels = self._device, self.kernels
        apart = None if fuses else kernels.shared_lowering
        return Target(
            device.name, device.capabilities, kernels.lowering, budget, apart, lambda: device.link_cost
        )

    def budget(self, results: int = 1, state: State | None = None, arriving: int = 0) -> Budget | None:
        """The memory of the device as a program finds it; None where it has no limit.

        `arriving`: bytes of inputs that will come to the device before it runs.
        """
        limit = self._device.limit_bytes
        return None if limit is None else self._budget(limit, results, state, arriving)

    def _budget(self, limit: int, results: int, state: State | None, arriving: int = 0) -> Budget:
        held = self._device.held_bytes() + arriving
        if state is None:
            return Budget(limit, held, results)
        held += state.arriving
        nodes = state.nodes()
        parts = frozenset(at for at, node in nodes.items() if node.value.whole is not node.value)
        known = Budget(limit, held, results, state_results=state.results, last=state.last(), parts=parts)
        if not self._device.capabilities.offloads:
            return known
        own = Residents(nodes, self._device, state.lasts)
        return replace(known, held=held + own.away_bytes, state=own.numbers, freed=own.freed)

    def _in_budget(self, schedule: Schedule, state: State | None) -> bool:
        """Whether a schedule can run within the limit now, and keeps all values where there is none."""
        budget = self.budget(state=state)
        if budget is None:
            return not schedule.spares
        held = budget.held - budget.freed(schedule.hosted)
        return schedule.hosted <= budget.state and held + schedule.taken_bytes <= budget.limit

    def _compiled(
        self,
        nodes: Sequence[Node],
        inputs: Sequence[Node],
        constants: Mapping[Constant, int],
        aliases: Mapping[int, int] | None = None,
        results: int = 1,
        state: State | None = None,
        arriving: int = 0,
    ) -> Schedule:
        """The schedule of a prepared graph within the limit of the device."""
        budget = self.budget(results, state, arriving)
        try:
            return compile_graph(nodes, inputs, constants, self._target(budget=budget), aliases)
        except OutOfDeviceMemory:
            if budget is None:
                raise
        self._device.make_room()
        budget = self.budget(results, state, arriving)
        try:
            return compile_graph(nodes, inputs, constants, self._target(budget=budget), aliases)
        except OutOfDeviceMemory as error:
            if self._device.capabilities.offloads and self._spill(state):
                return self._compiled(nodes, inputs, constants, aliases, results, state, arriving)
            raise self._device.with_owners(error) from None

    def _spill(self, state: State | None) -> bool:
        """Have state move to the host that is not this program's; whether there was any.

        A function of its own: a refusal, while somebody looks at it, must not refer to nodes.
        """
        return self._device.spill(() if state is None else set(state.nodes().values()))

    def build(
        self,
        structure: Structure,
        aliases: Mapping[int, int] | None = None,
        state: State | None = None,
    ) -> Executable:
        """A new executable. `aliases` names wanted nodes that should be written over inputs, by numbers.

        `state`: inputs that the caller puts where the executable expects them, at the host or on the device.
        """
        start = perf_counter()
        nodes, inputs = prepare(structure.wanted, structure.inputs)
        self._note_built(start)
        return self.compile(nodes, inputs, structure.numbers, aliases, state)

    def memory_plan(
        self,
        structure: Structure,
        aliases: Mapping[int, int] | None = None,
        state: State | None = None,
    ) -> MemoryPlan:
        """What `build` would take under budgets from none to the smallest."""
        nodes, inputs = prepare(structure.wanted, structure.inputs)
        self._device.make_room()  # unused memory must not count, as when a budget is refused
        budget = self._budget(self._device.capabilities.total_bytes, 2, state)
        levels = budget_levels(nodes, inputs, structure.numbers, self._target(budget=budget), aliases)
        return MemoryPlan.of(self._device, budget.held, levels, self._idle_bytes(state))

    def _idle_bytes(self, state: State | None) -> int:
        """What is free on the device where all state moves to the host that a program does not use."""
        if not self._device.capabilities.offloads:
            return 0
        own = set() if state is None else set(state.nodes().values())
        owners = list(self._device.state_owners)
        idle = [node for owner in owners for node in owner.state_nodes() if node not in own]
        there = [
            node for node in dict.fromkeys(idle) if isinstance(node.value, Buffer) and not node.value.hosted
        ]
        residents = Residents(dict(enumerate(there)), self._device)
        return residents.freed(residents.numbers)

    def compile(
        self,
        nodes: Sequence[Node],
        inputs: Sequence[Node],
        constants: Mapping[Constant, int],
        aliases: Mapping[int, int] | None = None,
        state: State | None = None,
        arriving: int = 0,
    ) -> Executable:
        """The executable of a prepared graph; see `compile_graph` and `budget`.

        Whoever has it run again may still hold the results of the last run, so there are two of each.
        """
        start = perf_counter()
        schedule = self._compiled(nodes, inputs, constants, aliases, 2, state, arriving)
        built = Executable(schedule, self._device, self.kernels)
        self._note_built(start)
        return built

    def _note_built(self, start: float) -> None:
        self._last_built = perf_counter()
        self.build_seconds += self._last_built - start
