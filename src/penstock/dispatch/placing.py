"""Which device runs a program: by estimate, and by measured time if estimates are close."""

from __future__ import annotations

import json
import math
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from penstock.compiler.pipeline import prepare
from penstock.compiler.schedule import Schedule
from penstock.dispatch.candidates import CUT_GAIN, candidates
from penstock.dispatch.cutting import cut
from penstock.dispatch.moving import Locations
from penstock.dispatch.placements import Candidate, Placement, structure_digest
from penstock.dispatch.predictions import Predictions
from penstock.dispatch.running import InTwo, OnOne, Wants, seconds_of
from penstock.errors import DeviceUnavailable, OutOfDeviceMemory
from penstock.execution.executable import Executable
from penstock.execution.host_program import HostProgram
from penstock.execution.realize import executables, numpy_text, to_compute
from penstock.execution.sharing import source
from penstock.execution.structure import Structure
from penstock.files import parse_json
from penstock.graph.node import Node, topological
from penstock.lru import LRU
from penstock.measuring.quiet import measure_quietly
from penstock.measuring.rates import Rates, machine_rates, placement_cache
from penstock.memory.buffer import Buffer
from penstock.runtime import Device
from penstock.tuning_cache import TuningCache

_CLOSE = 3.0  # if prices differ by a smaller factor, the programs are timed
_MAX_PLACED = 256  # structures whose placements are remembered
_MAX_SEEN = 4096


class Dispatcher:
    """Places programs on the members of a logical device."""

    def __init__(self, device: Device, members: Sequence[Device]) -> None:
        self.device = device
        self._forced = device.settings.force_kernels
        self.members = members
        self.locations = Locations(members)
        # For tests: a fixed placement; None lets prices and times decide.
        self.dictate: Callable[[Placed], Placement] | None = None
        self.build_seconds = 0.0  # in total
        self._rates: dict[Device, Rates] | None = None
        self._choices: TuningCache | None = None
        self._placed = LRU[Hashable, "Placed"](_MAX_PLACED)
        self._seen = LRU[Hashable, None](_MAX_SEEN)
        self._everything: weakref.WeakSet[Placed] = weakref.WeakSet()  # including those of jitted functions
        self._predictions = Predictions()
        self._measured_again = False

    @property
    def rates(self) -> Mapping[Device, Rates]:
        """The rates of the members, from disk or measured at the first use."""
        if self._rates is None:
            self._rates = machine_rates(self.members)
            if not self._rates:
                names = " and ".join(member.name for member in self.members)
                raise DeviceUnavailable(f"{names} could not be measured")
        return self._rates

    @property
    def choices(self) -> TuningCache:
        """The placements that were chosen by timing."""
        if self._choices is None:
            self._choices = placement_cache(self.members)
        return self._choices

    def compare(self, timed: Sequence[Candidate]) -> None:
        """Remeasure the rates if programs repeatedly take another time than predicted.

        This happens once in a process. Programs stay where they are, also in later processes.
        """
        for candidate in timed:
            if candidate.placement.second is None and candidate.measured is not None:
                self._predictions.add(candidate.placement.first, candidate.estimated, candidate.measured)
        far_off = self._predictions.far_off()
        if far_off and not self._measured_again:
            self._measured_again = True
            for placed in self._everything:
                placed.keep()
            self._rates = {**self.rates, **machine_rates(far_off, remeasure=True)}

    # For `penstock.execution.realize`

    def seen(self, structure: Structure) -> bool:
        """Whether the same structure was computed before, as far as it is remembered."""
        return structure.key in self._placed or structure.key in self._seen

    def builds(self, structure: Structure) -> bool:
        """Whether a program has to be built to compute it."""
        member = self._staying(structure)
        if member is not None:
            return executables(member).builds(structure)
        forced = self._forced or self.dictate is not None
        numpy = not forced and structure.waits_for_no_compiler(self.seen(structure))
        return structure.key not in self._placed and not numpy

    def computed(self, structure: Structure) -> tuple[list[Buffer], Executable | HostProgram]:
        """The values of nodes, and a program that computed them."""
        try:
            return self._computed(structure)
        except OutOfDeviceMemory:
            if self.device.limit_bytes is None:
                raise
        self._placed[structure.key] = self.build(structure)  # planned for what is left
        return self._computed(structure)

    def _computed(self, structure: Structure) -> tuple[list[Buffer], Executable | HostProgram]:
        constants = structure.constants()
        member = self._staying(structure)
        if member is not None:
            there = executables(member).known(structure)
            assert isinstance(there, Executable)
            return there.run(self.locations.bring(structure.inputs, member), constants), there
        placed, inputs = self._known(structure), [node.value for node in structure.inputs]
        if placed is None:
            on_host = HostProgram(structure, self._sharing(structure.inputs))
            return on_host.run(inputs, constants, structure.bounds), on_host
        program, inputs = placed.chosen(inputs, lambda: structure.inputs, constants)
        return program.run(inputs, constants), program.programs[-1]

    def build(self, structure: Structure, aliases: Mapping[int, int] | None = None) -> Placed:
        """A program for any of the members; see `ExecutableCache.build`."""
        nodes, inputs = prepare(structure.wanted, structure.inputs)
        placed = Placed(self, nodes, inputs, structure, aliases or {})
        self._everything.add(placed)
        return placed

    def explain(self, nodes: Sequence[Node]) -> str:
        """The time of each placement, which is chosen and why, and its steps."""
        wanted = to_compute(nodes)
        if not wanted:
            holders = dict.fromkeys(self.locations.holder(source(node).value).name for node in nodes)
            return f"computed already, on {' and '.join(holders)}"
        structure = Structure(wanted, self.device.capabilities)
        member = self._staying(structure)
        if member is not None:
            there = executables(member).known(structure)
            assert isinstance(there, Executable)
            return f"on {member.name}, which holds the inputs:\n{there.schedule}"
        placed = self._placed.get(structure.key) or self.build(structure)
        text = placed.explained(structure.inputs)
        if structure.key not in self._placed and structure.waits_for_no_compiler(self.seen(structure)):
            return f"{numpy_text(structure)}; in a jitted function:\n{text}"
        return text

    def _staying(self, structure: Structure) -> Device | None:
        """The member that holds most inputs of a small computation, which runs it; None if it is not small.

        This holds if some inputs are not in host memory: for so little, choosing a device does not pay.
        """
        placed = self.dictate is not None or structure.key in self._placed
        if placed or self.device.limit_bytes is not None or not structure.far or not structure.small(True):
            return None
        held: Counter[Device] = Counter()
        for node in structure.inputs:
            holder = self.locations.holder(node.value)
            if not holder.capabilities.shared_memory:
                held[holder] += node.nbytes
        return held.most_common(1)[0][0]

    def _sharing(self, inputs: Sequence[Node]) -> Device:
        """The member that holds all inputs, if it shares memory with the host; else the logical device."""
        first = self.locations.holder(inputs[0].value) if inputs else self.members[0]
        shared = first.capabilities.shared_memory and all(first.holds(node.value) for node in inputs)
        return first if shared else self.device

    def _known(self, structure: Structure) -> Placed | None:
        """The placed graph of a structure; None as long as building a program would not pay."""
        key = structure.key
        placed = self._placed.use(key)
        if placed is None:
            forced = self._forced or self.dictate is not None
            if not forced and structure.waits_for_no_compiler(key in self._seen):
                self._seen[key] = None
                return None
            placed = self._placed[key] = self.build(structure)
        return placed


class Placed:
    """A graph without values, its possible placements, and the programs that were built for them."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        nodes: Sequence[Node],
        inputs: Sequence[Node],
        structure: Structure,
        aliases: Mapping[int, int],
    ) -> None:
        self.nodes = nodes
        self.inputs = inputs
        self._dispatcher = dispatcher
        self._constants = structure.numbers
        self._aliases = aliases
        self._key = structure_digest(structure, aliases)
        self._programs: dict[Placement, OnOne | InTwo] = {}
        self._candidates: list[Candidate] = []
        self._why = "which takes the least time"
        self._best: Candidate | None = None  # once it is known
        self._ready: OnOne | None = None  # the program of `_best`, if it is on a single device
        self._driver: Any = None  # of that device
        self._limit: int | None = None  # of the memory of each device, for which the programs were planned

    @property
    def wrote(self) -> bool:
        """Of a run that failed: whether anything may have been written."""
        return any(program.wrote for way in self._programs.values() for program in way.programs)

    def chosen(
        self, inputs: list[Buffer], holders: Callable[[], Sequence[Node]], constants: Sequence[Any]
    ) -> tuple[OnOne | InTwo, list[Buffer]]:
        """The program to run now on these inputs and constants, and the inputs on its devices.

        `holders` returns the nodes that hold the inputs.
        """
        dispatcher = self._dispatcher
        self._heed_limit()
        ready = self._ready
        # Usually all inputs are on the same device as last time, which is quick to check.
        there = [buffer.driver for buffer in inputs].count(self._driver) == len(inputs)
        if ready is not None and there and dispatcher.dictate is None:
            return ready, inputs
        with dispatcher.device.running:
            held = holders()
            program = self._decided(held, constants)
            return program, program.bring(held)

    @property
    def candidates(self) -> list[Candidate]:
        """The possible placements, with their prices."""
        if not self._candidates:
            self._candidates = candidates(self.nodes, self._dispatcher.rates)
            self._recall()
        return self._candidates

    @property
    def current(self) -> tuple[Executable, ...]:
        """The programs of the best placement so far: a single program, or the two of a cut."""
        with self._dispatcher.device.running:
            return self._program(self._favourite().placement).programs

    @property
    def schedule(self) -> Schedule:
        """The schedule of that placement; of a cut, the one with the larger memory plan."""
        schedules = [program.schedule for program in self.current]
        return max(schedules, key=lambda schedule: schedule.plan.arena_bytes)

    def explained(self, held: Sequence[Node]) -> str:
        """See `Dispatcher.explain`; `held` are the nodes that hold the inputs."""
        with self._dispatcher.device.running:
            self._heed_limit()
            if self._limit is not None:
                self._within_limit(held)
            totals = {
                candidate.placement: candidate.seconds + self._moving(candidate, held)
                for candidate in self.candidates
            }
            lines = []
            for candidate in self.candidates:
                moving = self._moving(candidate, held)
                name = candidate.placement.name
                how = "estimated" if candidate.measured is None else "measured"
                text = f"{name}: {_micro(candidate.seconds + moving)} {how}"
                if candidate.seconds == math.inf:
                    text = f"{name}: no memory for it"
                if candidate.moved:
                    text += f", of them {_micro(candidate.moved)} for moving values between them"
                text += f", of them {_micro(moving)} to bring inputs" if moving else ""
                lines.append(text)
            chosen = min(
                self.candidates, key=lambda candidate: totals[candidate.placement] / self._gain(candidate)
            )
            best = self._favourite()
            if self._best is None and len(self._near()) > 1:
                why = "as it seems; those that are close are timed before the first run"
            else:
                why = self._why if chosen is best else f"as inputs are not on {best.placement.name}"
            lines.append(f"chosen: {chosen.placement.name}, {why}")
            return "\n".join([*lines, self._program(chosen.placement).explained()])

    # Choosing

    def _heed_limit(self) -> None:
        """Forget what was decided for another limit of memory."""
        limit = self._dispatcher.device.limit_bytes
        if limit != self._limit:
            self._limit, self._programs, self._best, self._ready = limit, {}, None, None
            for candidate in self._candidates:
                candidate.measured = None if candidate.measured == math.inf else candidate.measured

    def _decided(self, held: Sequence[Node], constants: Sequence[Any]) -> OnOne | InTwo:
        dictate = self._dispatcher.dictate
        if dictate is not None:
            return self._program(dictate(self))
        if self._limit is not None:
            return self._within_limit(held)
        candidates = self.candidates
        if self._best is None:
            self._time(held, constants)
            self._settle()
            self._dispatcher.compare(candidates)
        assert self._best is not None
        best = self._best
        if best.placement.second is None:
            best = min(
                candidates,
                key=lambda candidate: (
                    (candidate.seconds + self._moving(candidate, held, True)) / self._gain(candidate)
                ),
            )
            if best is not self._best:
                for node in held:
                    if not self._best.placement.first.holds(node.value):
                        self._dispatcher.locations.missed(node)
        return self._program(best.placement)

    def _within_limit(self, held: Sequence[Node]) -> OnOne | InTwo:
        """A program that fits into the memory of a single device, beside the inputs; the soonest first."""
        if self._best is not None:
            return self._program(self._best.placement)
        locations, refusals = self._dispatcher.locations, list[OutOfDeviceMemory]()
        locations.clear()
        wholes = [candidate for candidate in self.candidates if candidate.placement.second is None]
        for candidate in sorted(wholes, key=lambda given: given.seconds + self._moving(given, held)):
            member = candidate.placement.first
            arriving = locations.arriving_bytes(held, member)
            try:
                built = self._on(member, self.nodes, self.inputs, self._aliases, arriving)
            except OutOfDeviceMemory as refusal:
                refusals.append(refusal)
                candidate.measured = math.inf
                continue
            self._best = candidate
            self._ready, self._driver = OnOne(locations, built), member.driver
            self._programs = {candidate.placement: self._ready}
            return self._ready
        raise min(refusals, key=lambda refusal: refusal.smallest or math.inf)

    @staticmethod
    def _gain(candidate: Candidate) -> float:
        return 1.0 if candidate.placement.second is None else CUT_GAIN

    def _moving(self, candidate: Candidate, held: Sequence[Node], shared: bool = False) -> float:
        """Seconds to move the inputs; `shared`: divided by the uses that are expected of each."""
        locations, rates = self._dispatcher.locations, self._dispatcher.rates
        total = 0.0
        for device, indices in self._wants(candidate.placement):
            for node in dict.fromkeys(held[at] for at in indices):
                seconds = locations.seconds(node, device, rates)
                total += seconds / locations.share(node) if shared else seconds
        return total

    def _wants(self, placement: Placement) -> Wants:
        """The devices of a placement, and the indices of the inputs that are needed on each."""
        parts = None if placement.second is None else cut(self.nodes, placement.count)
        if parts is None or placement.second is None:
            return [(placement.first, list(range(len(self.inputs))))]
        wants = []
        for device, side in ((placement.first, parts.heads), (placement.second, parts.tails)):
            needed = set(topological(side))
            wants.append((device, [at for at, node in enumerate(self.inputs) if node in needed]))
        return wants

    def _favourite(self) -> Candidate:
        return self._best or min(
            self.candidates, key=lambda candidate: candidate.seconds / self._gain(candidate)
        )

    def _near(self) -> list[int]:
        """The indices of the candidates whose prices are close to the best."""
        least = min(candidate.estimated for candidate in self._candidates)
        return [at for at, candidate in enumerate(self._candidates) if candidate.estimated <= _CLOSE * least]

    def _time(self, held: Sequence[Node], constants: Sequence[Any]) -> None:
        """Run the candidates that are close, to see which is the fastest."""
        near = [self._candidates[at] for at in self._near()]
        if len(near) < 2 or all(candidate.measured is not None for candidate in near):
            return
        ways = self._that_fit(near)
        measure = partial(seconds_of, list(ways.values()), held, constants, self._dispatcher.members)
        times, _ = measure_quietly(measure, lambda first, second: list(map(min, first, second)))
        for at, seconds in zip(ways, times, strict=True):
            near[at].measured = seconds
        self._why = "which took the least time when it was tried"
        if all(candidate.measured != math.inf for candidate in near):  # memory may suffice the next time
            self._remember()

    def _that_fit(self, near: Sequence[Candidate]) -> dict[int, OnOne | InTwo]:
        """The programs of candidates by index, without those that do not fit into a device's memory."""
        ways: dict[int, OnOne | InTwo] = {}
        for at, candidate in enumerate(near):
            try:
                ways[at] = self._program(candidate.placement)
            except OutOfDeviceMemory:
                candidate.measured = math.inf
                if not ways and at == len(near) - 1:
                    raise
        return ways

    def _settle(self) -> None:
        """Keep the best placement, and its program for the fast path."""
        known = [
            candidate for candidate in self._candidates if candidate.measured is not None
        ] or self._candidates
        self._best = min(known, key=lambda candidate: candidate.seconds / self._gain(candidate))
        program = self._program(self._best.placement)
        self._programs = {self._best.placement: program}  # the others were built for timing only
        if isinstance(program, OnOne):
            self._ready, self._driver = program, program.devices[0].driver

    def _remember(self) -> None:
        if self._key is not None:
            timed = [candidate for candidate in self._candidates if candidate.measured is not None]
            seconds = {candidate.placement.name: candidate.measured for candidate in timed}
            self._dispatcher.choices.put(self._key, json.dumps(seconds))

    def keep(self) -> None:
        """Save the placement even if only prices decided, as these are about to change."""
        if self._best is not None and self._key is not None and self._best.measured is None:
            kept = {self._best.placement.name: self._best.estimated}
            self._dispatcher.choices.put(self._key, json.dumps(kept))

    def _recall(self) -> None:
        """Use the times that an earlier process measured."""
        text = None if self._key is None else self._dispatcher.choices.get(self._key)
        try:
            kept = {str(name): float(seconds) for name, seconds in parse_json(text or "{}").items()}
        except (ValueError, TypeError, AttributeError):  # the file is not valid
            return
        names = [candidate.placement.name for candidate in self._candidates]
        for name in set(kept).difference(names):  # a cut that was considered with other rates
            placement = Placement.parsed(name, self._dispatcher.members)
            if placement is not None and cut(self.nodes, placement.count) is not None:
                self._candidates.append(Candidate(placement, kept[name]))
                names.append(name)
        if kept and set(kept) <= set(names) and all(seconds > 0 for seconds in kept.values()):
            for candidate in self._candidates:
                candidate.measured = kept.get(candidate.placement.name)
            if self._limit is None:
                self._settle()
            self._why = "which took the least time when it was tried in an earlier run"

    # Programs

    def _program(self, placement: Placement) -> OnOne | InTwo:
        program = self._programs.get(placement)
        if program is None:
            program = self._programs[placement] = self._built(placement)
        return program

    def _built(self, placement: Placement) -> OnOne | InTwo:
        locations = self._dispatcher.locations
        parts = None if placement.second is None else cut(self.nodes, placement.count)
        if parts is None or placement.second is None:
            return OnOne(locations, self._on(placement.first, self.nodes, self.inputs, self._aliases))
        wants = self._wants(placement)
        before, after = ([self.inputs[at] for at in indices] for _, indices in wants)
        first = self._on(placement.first, parts.heads, before)
        second = self._on(placement.second, parts.tails, [*after, *parts.leaves])
        return InTwo(locations, first, second, parts, self.nodes, wants)

    def _on(
        self,
        device: Device,
        nodes: Sequence[Node],
        inputs: Sequence[Node],
        aliases: Mapping[int, int] | None = None,
        arriving: int = 0,
    ) -> Executable:
        """A program of a part of the graph; `arriving`: bytes of inputs that are not on the device yet."""
        there = executables(device)
        before = there.build_seconds
        built = there.compile(nodes, inputs, self._constants, aliases, arriving=arriving)
        self._dispatcher.build_seconds += there.build_seconds - before
        return built


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} µs"
