"""The output of a run: progress in a terminal, and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.bench.comparing import Comparison
from penstock.bench.results import DeviceResults
from penstock.bench.statistics import CONFIDENCE, MARGIN, Interval, median_interval, ratio_in_turn
from penstock.formatting import format_bandwidth, format_digits, format_flops, time_unit
from penstock.printable import printable
from penstock.terminal import cell, say, table

_PIPED_WIDTH = 200  # columns, so that no line of a table is cut or wrapped
_SURE = f"{CONFIDENCE:.0%}"
_STYLES = {"slower": "red", "faster": "green", "same": ""}


def open_console() -> Console:
    """The terminal, or a pipe with lines long enough for every table."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPED_WIDTH)


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Shows the progress, if the output is a terminal."""
    if not console.is_terminal:
        yield lambda doing: None
        return
    # No refreshing thread, which would disturb the measurement.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda doing: live.update(Text(printable(doing), style="dim"), refresh=True)


def show_results(console: Console, results: DeviceResults) -> None:
    """The ceilings of a device, and its cases."""
    hardware, ceilings = results.hardware, results.ceilings
    say(console, f"\n{hardware} through {hardware.api}")
    say(
        console,
        f"ceilings: {format_bandwidth(ceilings.moved)} in memory, {format_flops(ceilings.flops)} in a "
        f"matmul, {format_bandwidth(ceilings.uploaded)} up, {format_bandwidth(ceilings.downloaded)} down",
    )
    rows = _table(">time", f">{_SURE}", ">GFLOP/s", ">GB/s", ">of ceiling")
    for case in results.measured:
        seconds = case.time.middle
        least = ceilings.least_seconds(case.flops, case.nbytes, case.way)
        share = f"{_share(least / seconds)} {ceilings.bound(case.flops, case.nbytes, case.way)}"
        rows.add_row(
            cell(case.label),
            *_times(case.time),
            _rate(case.flops, seconds),
            _rate(case.nbytes, seconds),
            share,
        )
    console.print(rows)
    for left_out in results.left_out:
        say(console, f"left out: {left_out}")
    if any(case.torch_seconds for case in results.measured):
        _show_peer(console, results)


def _show_peer(console: Console, results: DeviceResults) -> None:
    say(console, "\nagainst PyTorch; above 1, Penstock is faster")
    rows = _table(">penstock", ">torch", ">ratio", f">{_SURE}")
    for case in results.measured:
        ratio = ratio_in_turn(case.torch_seconds, case.seconds)
        times = (_times(time)[0] for time in (case.time, median_interval(case.torch_seconds)))
        rows.add_row(cell(case.label), *times, *_ratios(ratio))
    console.print(rows)


def show_comparison(console: Console, comparison: Comparison, source: str) -> None:
    """The cases before and now."""
    say(console, f"\nagainst {source}")
    rows = _table(">before", ">now", ">ratio", f">{_SURE}", "")
    for change in comparison.changes:
        times = [_times(time)[0] for time in (change.before, change.now)]
        said = "" if change.verdict == "same" else change.verdict
        rows.add_row(cell(change.label), *times, *_ratios(change.ratio), said, style=_STYLES[change.verdict])
    console.print(rows)
    for labels, where in ((comparison.only_before, source), (comparison.only_now, "this run")):
        if labels:
            say(console, f"only in {where}: {', '.join(labels)}")
    count = len(comparison.slower)
    say(
        console,
        f"{count} of {len(comparison.changes)} got slower, by more than noise and {MARGIN:.0%}"
        if count
        else f"nothing got slower by more than noise and {MARGIN:.0%}",
    )


def _table(*headings: str) -> Table:
    return table(("case", *headings), padding=(0, 2, 0, 0))


def _times(time: Interval) -> tuple[str, str]:
    """A time and its interval, in one unit."""
    length, unit = time_unit(time.middle)
    low, middle, high = (format_digits(seconds / length) for seconds in time)
    return f"{middle} {unit}", f"{low} - {high}"


def _rate(amount: float, seconds: float) -> str:
    return format_digits(amount / seconds / 1e9) if amount else "-"


def _share(share: float) -> str:
    return "<1%" if share < 0.01 else f"{share:.0%}"


def _ratios(ratio: Interval) -> tuple[str, str]:
    return f"{ratio.middle:.2f}", f"{ratio.low:.2f} - {ratio.high:.2f}"
