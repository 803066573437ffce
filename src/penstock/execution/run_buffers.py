"""The buffers of an executable's runs: their locations, and what differs between successive runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.compiler.launches import Arrangement
from penstock.compiler.schedule import Schedule
from penstock.kernels.source import ALIGNMENT
from penstock.memory.buffer import Buffer


class RunBuffers:
    """The locations of the last run's buffers, and which of them differ in the next run."""

    def __init__(self, schedule: Schedule, fused: Sequence[int]) -> None:
        self._schedule = schedule
        self.fused = fused  # buffers of horizontally fused kernels
        self._fused = frozenset(fused)
        self._numbers = schedule.outputs
        self._inputs_end = schedule.outputs.start
        self.aliases: Mapping[int, int] | None = None
        self.outputs: list[tuple[int, int]] = []  # each with the input that it takes, or -1
        self._fresh: list[int] = []  # outputs that take none
        self.places: list[tuple[int, int]] = []  # of each buffer: its allocation's number, and its offset
        self.allocations: list[tuple[int, bool]] = []  # a buffer of each; False: it stands for itself only
        self._distinct = 0  # allocations among the buffers
        self._alone: set[int] = set()  # buffers in an allocation that no other lies in

    def set_outputs(self, aliases: Mapping[int, int] | None) -> None:
        """Note which inputs the outputs are written over from now on."""
        self.aliases = aliases
        results = self._schedule.results
        taken = {results[wanted]: given for wanted, given in (aliases or {}).items()}
        self.outputs = [(at, taken.get(at, -1)) for at in self._numbers]
        self._fresh = [at for at in self._numbers if at not in taken]

    def moved(self, places: list[tuple[int, int]], same: bool) -> tuple[list[int] | None, bool]:
        """The buffers that do not lie where they did in the last run; None: all may have moved.

        `same`: outputs take the inputs that they took then. The second result is whether other buffers than
        before may lie in one allocation.
        """
        last, end, arenas = self.places, self._inputs_end, self._numbers.stop
        if not last:
            return None, True
        same = same and places[:end] == last[:end] and places[arenas:] == last[arenas:]
        candidates = self._fresh if same else range(len(places))
        moved = [at for at in candidates if places[at] != last[at]]
        if self._fused.isdisjoint(moved):
            return moved, True
        # A buffer that had an allocation to itself, and has one again, is found there in the same way.
        if not self._alone.issuperset(moved) or len({serial for serial, _ in places}) != self._distinct:
            return None, True
        taken = [len(places) + number for number, (at, _) in enumerate(self.allocations) if at in moved]
        return moved + taken, False

    def arrange(self, buffers: Sequence[Buffer]) -> Arrangement:
        """Find the allocations that horizontally fused kernels take, beside the buffers."""
        counts = Counter(buffer.place[0] for buffer in buffers)
        self._distinct = len(counts)
        self._alone = {at for at, buffer in enumerate(buffers) if counts[buffer.place[0]] == 1}
        allocations: list[tuple[int, bool]] = []
        numbers: dict[Any, int] = {}
        result = []
        for at in self.fused:
            buffer = buffers[at]
            offset = buffer.offset
            # A buffer alone, perhaps a part of a value such as a batch of a dataset, is its own argument: so
            # kernels do not depend on where it lies.
            grouped = at not in self._alone and not offset % ALIGNMENT
            key = buffer.memory.serial if grouped else buffer
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = len(allocations)
                allocations.append((at, grouped))
            result.append((number, offset // ALIGNMENT if grouped else 0))
        self.allocations = allocations
        return tuple(result)
