"""The display of a running training: a live view in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from penstock.formatting import format_bytes, format_clock
from penstock.terminal import phase, say, table
from penstock.train.metrics import Metrics

_LINES = 20  # of a whole run, besides those of evaluations
_UNKNOWN_LINES = 100  # steps for a line, where nobody knows how many a run has
_COMPILING = 10  # times as long as others: a step that was compiled; two in a row are just slow
_SMOOTHING = 0.95  # the decay of the exponential moving average of the loss


class View(Protocol):
    """The interface to a trainer."""

    def phase(self, name: str, total: int = 0) -> AbstractContextManager[Callable[[int], None]]:
        """Show some work before training; the function given says how much of `total` is done."""

    def start(self, done: int, steps: int | None, seconds: float) -> None:
        """Training starts after `done` steps of `steps`, if that is known; they took some seconds."""

    def show(self, metrics: Metrics) -> None:
        """A step is done."""

    def note(self, text: str) -> None:
        """Show a note."""

    def stop(self) -> None:
        """Training has ended. Safe to call at any time, and twice."""


def open_view(console: Console) -> View:
    """The view for a console."""
    return LiveView(console) if console.is_terminal else PlainView(console)


class Smoothed:
    """An exponential moving average."""

    def __init__(self) -> None:
        self._total = self._weight = 0.0

    def add(self, value: float) -> float:
        """Add a value; the new average."""
        self._total = self._total * _SMOOTHING + value * (1 - _SMOOTHING)
        self._weight = self._weight * _SMOOTHING + (1 - _SMOOTHING)
        return self._total / self._weight


class _Recent:
    """The metrics of the last steps, smoothed and formatted."""

    def __init__(self) -> None:
        self._means = {name: Smoothed() for name in ("loss", "step", "data_wait", "device_wait")}
        self._first, self._compiled = True, False
        self.step_seconds = math.nan  # until the second step, since the first compiles

    def add(self, metrics: Metrics, seconds: float) -> None:
        """Add a step, which took some seconds."""
        self.loss = self._means["loss"].add(metrics.loss)
        compiles = seconds > _COMPILING * self.step_seconds and not self._compiled  # a batch of another shape
        if not (self._first or compiles):
            self.step_seconds = self._means["step"].add(seconds)
        self._first, self._compiled = False, compiles
        rate, self._counted = metrics.speed
        self._amount = rate * seconds
        data, device = (
            self._means[name].add(getattr(metrics, name)) for name in ("data_wait", "device_wait")
        )
        self.waiting = f"waits {data:.0%} for data, {device:.0%} for the device"
        limit = "" if metrics.limit_bytes is None else f" of {format_bytes(metrics.limit_bytes)}"
        live, pooled, peak = map(format_bytes, (metrics.live_bytes, metrics.pooled_bytes, metrics.peak_bytes))
        self.memory = f"{live} live, {pooled} pooled, {peak} peak{limit}"

    @property
    def speed(self) -> str:
        """Tokens or samples per second."""
        if math.isnan(self.step_seconds):
            return "compiled"
        return f"{self._amount / self.step_seconds:,.0f} {self._counted}/s"


class PlainView:
    """About `_LINES` lines for the whole run, and a line for each evaluation."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._recent = _Recent()
        self._steps: int | None = 1
        self._seconds = 0.0
        self._compiling = ExitStack()  # until the first step is done

    def phase(self, name: str, total: int = 0) -> AbstractContextManager[Callable[[int], None]]:
        """See `View`."""
        return phase(self._console, name, total)

    def start(self, done: int, steps: int | None, seconds: float) -> None:
        """See `View`."""
        self._steps, self._seconds = steps, seconds
        self._compiling.enter_context(self.phase("compiling the step"))

    def show(self, metrics: Metrics) -> None:
        """See `View`."""
        self._compiling.close()
        recent = self._recent
        recent.add(metrics, metrics.seconds - self._seconds)
        self._seconds = metrics.seconds
        every = self._steps // _LINES if self._steps else _UNKNOWN_LINES
        regular = metrics.step % max(1, every) == 0
        if not (math.isnan(recent.step_seconds) or regular or metrics.validation_loss is not None):
            return
        whole = f"/{self._steps}" if self._steps else ""
        parts = [f"step {metrics.step:>{len(str(self._steps or 1))}}{whole}", f"loss {recent.loss:.4f}"]
        if metrics.validation_loss is not None:
            parts.append(f"validation {metrics.validation_loss:.4f}")
        parts += [f"{name} {value:.4f}" for name, value in metrics.others.items()]
        parts.append(recent.speed)
        if self._steps and not math.isnan(recent.step_seconds):
            parts.append(f"{format_clock(recent.step_seconds * (self._steps - metrics.step))} left")
        ranks = [str(metrics.traffic)] if metrics.traffic else []
        self.note("  ".join([*parts, recent.memory, recent.waiting, *ranks]))

    def note(self, text: str) -> None:
        """See `View`."""
        say(self._console, text)

    def stop(self) -> None:
        """See `View`."""
        self._compiling.close()


class LiveView:
    """A progress bar with the time left, and the metrics of the last step below it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._recent = _Recent()
        self._seconds = 0.0
        self._validation = ""
        self._best = math.inf
        self._others: dict[str, float] = {}  # the last of each
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("compiling", total=None)
        self._live = Live(self._progress, console=console)

    def phase(self, name: str, total: int = 0) -> AbstractContextManager[Callable[[int], None]]:
        """See `View`."""
        return phase(self._console, name, total)

    def start(self, done: int, steps: int | None, seconds: float) -> None:
        """See `View`."""
        self._seconds = seconds
        self._progress.update(self._task, total=steps, completed=done)
        self._live.start()

    def show(self, metrics: Metrics) -> None:
        """See `View`."""
        recent = self._recent
        recent.add(metrics, metrics.seconds - self._seconds)
        self._seconds = metrics.seconds
        if metrics.validation_loss is not None:
            self._best = min(self._best, metrics.validation_loss)
            self._validation = f"; validation {metrics.validation_loss:.4f}, the best {self._best:.4f}"
        self._others |= metrics.others
        rows = table(padding=(0, 2))
        rate = f"; learning rate {metrics.learning_rate:.2e}"
        rows.add_row("loss", f"{recent.loss:.4f}{self._validation}{rate}")
        if self._others:
            rows.add_row("metrics", "; ".join(f"{name} {value:.4f}" for name, value in self._others.items()))
        rows.add_row("speed", f"{recent.speed}; {recent.waiting}")
        rows.add_row("memory", f"{recent.memory}; {metrics.hit_rate:.0%} of requests served by the pool")
        if metrics.traffic:
            rows.add_row("ranks", "\n".join([str(metrics.traffic), *metrics.traffic.lines()]))
        self._progress.update(self._task, completed=metrics.step, description="training")
        self._live.update(Group(self._progress, rows))

    def note(self, text: str) -> None:
        """See `View`."""
        say(self._console, text)

    def stop(self) -> None:
        """See `View`."""
        self._live.stop()


class NoView:
    """Shows nothing."""

    def phase(self, name: str, total: int = 0) -> AbstractContextManager[Callable[[int], None]]:
        """See `View`."""
        return nullcontext(lambda done: None)

    def start(self, done: int, steps: int | None, seconds: float) -> None:
        """See `View`."""

    def show(self, metrics: Metrics) -> None:
        """See `View`."""

    def note(self, text: str) -> None:
        """See `View`."""

    def stop(self) -> None:
        """See `View`."""
