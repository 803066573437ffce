"""What a run shows: progress in a terminal, and tables there and in a pipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.bench.comparing import Comparison
from penstock.bench.results import DeviceResults
from penstock.bench.statistics import CONFIDENCE, MARGIN, Interval, median_interval, ratio_in_turn
from penstock.printable import cell, printable, say

_PIPED_WIDTH = 200  # columns, so that no line of a table is cut or broken
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_SURE = f"{CONFIDENCE:.0%}"
_STYLES = {"slower": "red", "faster": "green", "same": ""}


def open_console() -> Console:
    """The terminal, or a pipe with lines long enough for every table."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPED_WIDTH)


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Shows what is being done, where somebody is looking."""
    if not console.is_terminal:
        yield lambda doing: None
        return
    # No thread draws it again and again, which would disturb what is measured.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda doing: live.update(Text(printable(doing), style="dim"), refresh=True)


def show_results(console: Console, results: DeviceResults) -> None:
    """The ceilings of a device, and its cases."""
    hardware, ceilings = results.hardware, results.ceilings
    note(console, f"\n{hardware} through {hardware.api}")
    note(
        console,
        f"ceilings: {ceilings.moved / 1e9:.3g} GB/s in memory, {ceilings.flops / 1e9:.4g} GFLOP/s in a "
        f"matmul, {ceilings.uploaded / 1e9:.3g} GB/s up, {ceilings.downloaded / 1e9:.3g} GB/s down",
    )
    table = _table("case", "time", _SURE, "GFLOP/s", "GB/s", "of ceiling")
    for one in results.measured:
        seconds = one.time.middle
        least = ceilings.least_seconds(one.flops, one.nbytes, one.way)
        share = f"{_share(least / seconds)} {ceilings.bound(one.flops, one.nbytes, one.way)}"
        table.add_row(
            cell(one.label), *_times(one.time), _rate(one.flops, seconds), _rate(one.nbytes, seconds), share
        )
    console.print(table)
    for case in results.left_out:
        note(console, f"left out: {case}")
    if any(one.torch_seconds for one in results.measured):
        _show_peer(console, results)


def _show_peer(console: Console, results: DeviceResults) -> None:
    note(console, "\nagainst PyTorch; above 1, Penstock is faster")
    table = _table("case", "penstock", "torch", "ratio", _SURE)
    for one in results.measured:
        ratio = ratio_in_turn(one.torch_seconds, one.seconds)
        times = (_times(one)[0] for one in (one.time, median_interval(one.torch_seconds)))
        table.add_row(cell(one.label), *times, *_ratios(ratio))
    console.print(table)


def show_comparison(console: Console, comparison: Comparison, source: str) -> None:
    """The same cases before and now."""
    note(console, f"\nagainst {source}")
    table = _table("case", "before", "now", "ratio", _SURE, "")
    for change in comparison.changes:
        times = [_times(one)[0] for one in (change.before, change.now)]
        said = "" if change.verdict == "same" else change.verdict
        table.add_row(cell(change.label), *times, *_ratios(change.ratio), said, style=_STYLES[change.verdict])
    console.print(table)
    for labels, where in ((comparison.only_before, source), (comparison.only_now, "this run")):
        if labels:
            note(console, f"only in {where}: {', '.join(labels)}")
    count = len(comparison.slower)
    note(
        console,
        f"{count} of {len(comparison.changes)} got slower, by more than noise and {MARGIN:.0%}"
        if count
        else f"nothing got slower by more than noise and {MARGIN:.0%}",
    )


def note(console: Console, text: str) -> None:
    """A line to be read as it is."""
    say(console, text)


def _table(*names: str) -> Table:
    """Names and numbers; where there is little room, only names are broken."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for place, name in enumerate(names):
        # Numbers stand under each other; words, in the first column and under no name, begin at one place.
        table.add_column(name, justify="right" if place and name else "left", no_wrap=bool(place))
    return table


def _times(time: Interval) -> tuple[str, str]:
    """A time and its interval, in one unit."""
    scale, unit = next((one for one in _UNITS if time.middle >= one[0]), _UNITS[-1])
    low, middle, high = (_digits(one / scale) for one in time)
    return f"{middle} {unit}", f"{low} - {high}"


def _digits(value: float) -> str:
    """Three digits of a number, or as many as it has before the point."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def _rate(amount: float, seconds: float) -> str:
    return _digits(amount / seconds / 1e9) if amount else "-"


def _share(share: float) -> str:
    return "<1%" if share < 0.01 else f"{share:.0%}"


def _ratios(ratio: Interval) -> tuple[str, str]:
    return f"{ratio.middle:.2f}", f"{ratio.low:.2f} - {ratio.high:.2f}"
