"""What a program would take under each budget, before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from penstock.compiler.taking import Level, Levels, too_large_text
from penstock.drivers.driver import Cost
from penstock.drivers.rates import Crossing, StepRates
from penstock.execution import rates
from penstock.formatting import format_bytes, format_seconds
from penstock.fusion.costs import MOST_ITEMS
from penstock.runtime import Device

_SHOWN = 2  # kinds of what is recomputed, in a row


@dataclass(frozen=True)
class PlannedBudget:
    """A budget, and what a program takes inside it."""

    budget_bytes: int  # the smallest for which this is the plan
    arena_bytes: int  # the part of it that is for temporaries
    extra_work: float  # of computing again and waiting for copies, as a share of the work without a budget
    recomputed: tuple[tuple[str, int], ...]  # what is, and how often, what takes longest first
    launches: tuple[Cost, ...] = field(repr=False)  # what each computes and moves
    copies: tuple[Crossing, ...] = field(default=(), repr=False)  # to the host and from there, beside them
    moved: tuple[tuple[str, int], ...] = ()  # to the host and back: what is, and how often, the largest first
    host_bytes: int = 0  # of the host's memory, for what is moved
    too_large: tuple[str, ...] = ()  # what NumPy computes, which takes far longer than kernels would

    @property
    def text(self) -> str:
        """What is recomputed and moved, for people."""
        parts = [_listed(self.recomputed)] if self.recomputed else []
        if self.moved:
            parts.append(f"{format_bytes(self.host_bytes)} moved to the host: {_listed(self.moved)}")
        return "; ".join(parts) or "nothing"


def _listed(counts: Sequence[tuple[str, int]]) -> str:
    shown = [f"{times} x {name}" for name, times in counts[:_SHOWN]]
    rest = sum(times for _, times in counts[_SHOWN:])
    return ", ".join([*shown, *([f"{rest} more"] if rest else [])])


def _planned(held: int, level: Level) -> PlannedBudget:
    return PlannedBudget(
        held + level.taken_bytes,
        level.arena_bytes,
        level.extra_work,
        level.recomputed,
        level.launches,
        level.copies,
        level.moved,
        level.host_bytes,
        level.too_large,
    )


@dataclass(frozen=True)
class MemoryPlan:
    """Budgets from no limit to the smallest, with what each one costs. Printed, it is a table."""

    device: str
    held_bytes: int  # by what is there before the program runs, with its inputs
    _levels: Levels = field(repr=False)  # without a budget, and with less memory: planned when asked for
    _idle: int = field(repr=False)  # bytes of `held` that go to the host where all levels take too much
    _planned_for: Device = field(repr=False)

    @classmethod
    def of(cls, device: Device, held: int, levels: Levels, idle: int = 0) -> MemoryPlan:
        """From what the compiler says of each level; see `budget_levels`."""
        return cls(device.name, held, levels, idle, device)

    @cached_property
    def _first(self) -> Level:
        return self._levels.first()

    @cached_property
    def unlimited(self) -> PlannedBudget:
        """What is taken without a budget. It is known without a plan for others."""
        return _planned(self.held_bytes, self._first)

    @cached_property
    def budgets(self) -> tuple[PlannedBudget, ...]:
        """The budgets, the largest first; planned when they are first asked for."""
        held, idle = self.held_bytes, self._idle
        levels = [self._first, *self._levels.less()]
        least = held + levels[-1].taken_bytes
        budgets = [self.unlimited, *(_planned(held, level) for level in levels[1:])]
        budgets += [
            replace(
                _planned(held - idle, level),
                moved=(("state that it does not use", 1), *level.moved),
                host_bytes=level.host_bytes + idle,
            )
            for level in levels
            if held - idle + level.taken_bytes < least
        ]
        return tuple(budgets)

    def within(self, limit_bytes: int) -> MemoryPlan:
        """The same plan for one budget only, sooner known: its rows are that inside and that without any."""
        levels = self._levels

        def less() -> list[Level]:
            inside = levels.inside(limit_bytes) or levels.inside(limit_bytes + self._idle)
            return [inside] if inside and inside.taken_bytes < self._first.taken_bytes else []

        return replace(self, _levels=replace(levels, first=lambda: self._first, less=less))

    @property
    def note(self) -> str:
        """Why it takes far more time and memory than smaller sizes would; empty if it does not."""
        large = self.unlimited.too_large
        return too_large_text(large) if large else ""

    @property
    def unlimited_bytes(self) -> int:
        """What is taken without a budget."""
        return self.unlimited.budget_bytes

    @property
    def smallest_bytes(self) -> int:
        """The smallest budget that would do."""
        return self.budgets[-1].budget_bytes

    def fits(self, limit_bytes: int) -> bool:
        """Whether a budget will do: sooner known than `smallest_bytes`."""
        return self._levels.fits(limit_bytes + self._idle)

    @cached_property
    def least_bytes(self) -> int:
        """A budget that would do, mostly the smallest: sooner known than `smallest_bytes`."""
        return self.held_bytes - self._idle + self._levels.least()

    @property
    def growth(self) -> float:
        """How many times as large values may be until they have too many items for fused kernels.

        Such a program takes far more memory.
        """
        return (MOST_ITEMS - 1) / max(self._levels.largest, 1)

    @cached_property
    def _rates(self) -> StepRates | None:
        """The rates of the device; measured once, and kept on disk.

        None: it cannot be measured, or NumPy computes large values.
        """
        if self.note:
            return None
        dtypes = {cost.product for cost in self.unlimited.launches if cost.product}
        return self._planned_for.driver.rates or rates.step_rates(self._planned_for, dtypes)

    @property
    def unlimited_seconds(self) -> float | None:
        """The predicted time of a run without a budget; None where it is not known."""
        return self._rates.seconds(self.unlimited.launches) if self._rates else None

    @cached_property
    def step_seconds(self) -> tuple[float, ...] | None:
        """The predicted time of a run under each budget; None where it is not known.

        Never less under a smaller budget.
        """
        rates = self._rates
        if rates is None:
            return None
        return tuple(accumulate((rates.seconds(row.launches, row.copies) for row in self.budgets), max))

    def verdict(self, limit_bytes: int) -> str:
        """Whether a budget will do, and what it costs."""
        limit = format_bytes(limit_bytes)
        inside = next((at for at, row in enumerate(self.budgets) if row.budget_bytes <= limit_bytes), None)
        if inside is None:
            least = self.smallest_bytes  # exactly, as what is rounded may be a little less
            return f"{limit} is too little: {least} bytes ({format_bytes(least)}) would do"
        seconds = self.step_seconds
        time = f"; about {format_seconds(seconds[inside])} for a step" if seconds else ""
        if not inside:
            return f"{limit} is enough, and nothing is recomputed or moved{time}"
        return f"{limit} will do, with at most {self.budgets[inside].extra_work:.1%} more work{time}"

    def __str__(self) -> str:
        seconds = self.step_seconds
        times = [format_seconds(time) for time in seconds] if seconds else ["unknown"] * len(self.budgets)
        rows = [("budget", "temporaries", "step", "more work", "recomputed")]
        rows += [
            (
                format_bytes(row.budget_bytes),
                format_bytes(row.arena_bytes),
                time,
                f"{row.extra_work:.1%}",
                row.text,
            )
            for row, time in zip(self.budgets, times, strict=True)
        ]
        widths = [max(len(row[at]) for row in rows) for at in range(4)]
        lines = [
            "  ".join([*(part.rjust(width) for part, width in zip(row, widths, strict=False)), row[-1]])
            for row in rows
        ]
        held = f"{format_bytes(self.held_bytes)} are there before it runs, and count"
        notes = [self.note] if self.note else []
        return "\n".join([f"on {self.device}; {held}; times are predicted", *lines, *notes])
