"""The tables of a page: kernels, which can be sorted, copies, waits, ranks, owners of memory, settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from penstock.formatting import UNKNOWN, format_seconds, format_share
from penstock.profiling.records import CopyRecord, KernelRecord, OwnerRecord, WaitRecord
from penstock.profiling.words import short_kernel
from penstock.report import words
from penstock.report.cards import bar, card, grid, kernel_name, location, shapes

_MOST_ROWS = 100  # of a table; the page says how many are left out

Cell = tuple[str, float | str]  # HTML, and the value to sort by


def kernel_table(kernels: Sequence[KernelRecord], several_devices: bool) -> str:
    """Every kernel, by time."""
    whole = sum(kernel.seconds or 0.0 for kernel in kernels)
    heads = ["Kernel", "Time", "Part", "Of ceiling", "GFLOP/s", "GB/s", "Calls", "Mean"]
    bars = _bars([kernel.seconds or 0.0 for kernel in kernels], whole)
    rows = [
        _kernel(number, kernel, part, several_devices)
        for number, (kernel, part) in enumerate(zip(kernels, bars, strict=True))
    ]
    keys = [str(number) for number in range(len(kernels))]
    return _table("kernels", heads, rows, sortable=True, keys=keys)


def _kernel(number: int, kernel: KernelRecord, part: Cell, several: bool) -> list[Cell]:
    name = short_kernel(kernel.name)
    where = f"{kernel.device} " if several else ""
    by_host = "on the host " if kernel.where == "host" else ""
    about = f"{escape(where + by_host)}{shapes(kernel.shapes)}".strip()
    shown = f'<button type="button" class="pick" data-kernel="{number}">{kernel_name(name)}</button>'
    if about:
        shown += f'<div class="dim small">{about}</div>'
    ceiling = UNKNOWN
    if kernel.share is not None:
        ceiling = f'{kernel.share:.0%} <span class="tag">{escape(kernel.bound)}</span>'
    return [
        (shown, name),
        (words.known(format_seconds(kernel.seconds)), kernel.seconds or 0.0),
        part,
        (ceiling, kernel.share or 0.0),
        (words.rate(kernel.gflops), kernel.gflops or 0.0),
        (words.rate(kernel.gbytes), kernel.gbytes or 0.0),
        (f"{kernel.calls:,}", float(kernel.calls)),
        (words.known(format_seconds(kernel.mean_seconds)), kernel.mean_seconds or 0.0),
    ]


def copy_table(copies: Sequence[CopyRecord]) -> str:
    """Every direction of copies."""
    meaning = {"upload": "to the device", "download": "to the host", "copy": "on the device"}
    rows: list[list[Cell]] = [
        [
            (escape(meaning.get(copy.direction, copy.direction)), copy.direction),
            (escape(copy.device), copy.device),
            (escape(copy.where), copy.where),
            (f"{copy.calls:,}", float(copy.calls)),
            (words.nbytes(copy.nbytes), float(copy.nbytes)),
            (words.known(format_seconds(copy.seconds)), copy.seconds or 0.0),
            (words.rate(copy.gbytes), copy.gbytes or 0.0),
        ]
        for copy in copies
    ]
    return _table("copies", ["Copies", "Device", "Made by", "Calls", "Bytes", "Time", "GB/s"], rows)


def wait_table(waits: Sequence[WaitRecord], seconds: float) -> str:
    """Every line that waited, with its part of the profile's seconds."""
    bars = _bars([wait.seconds for wait in waits], seconds)
    rows: list[list[Cell]] = [
        [
            (location(wait.where), wait.where),
            (escape(wait.why), wait.why),
            (f"{wait.count:,}", float(wait.count)),
            (format_seconds(wait.seconds), wait.seconds),
            part,
        ]
        for wait, part in zip(waits, bars, strict=True)
    ]
    return _table("waits", ["Line of code", "Reason", "Count", "Time", "Part"], rows)


def rank_table(ranks: Sequence[tuple[float, float, float]]) -> str:
    """Every rank: seconds that it waited in a step, bytes that it sent, and the share that was hidden."""
    whole = sum(waited for waited, _, _ in ranks)
    bars = _bars([waited for waited, _, _ in ranks], whole)
    rows: list[list[Cell]] = [
        [
            (f"rank {number}", f"{number:04}"),
            (format_seconds(waited), waited),
            part,
            (words.nbytes(sent), sent),
            (format_share(hidden) if math.isfinite(hidden) else UNKNOWN, hidden),
        ]
        for number, ((waited, sent, hidden), part) in enumerate(zip(ranks, bars, strict=True))
    ]
    return _table("ranks", ["Rank", "Waited", "Part", "Sent", "Hidden"], rows)


def owner_table(owners: Sequence[OwnerRecord]) -> str:
    """Every line that held memory at the peak."""
    sizes = [float(owner.peak_bytes) for owner in owners]
    bars = _bars(sizes, sum(sizes))
    rows: list[list[Cell]] = [
        [
            (location(owner.owner), owner.owner),
            (words.nbytes(owner.peak_bytes), float(owner.peak_bytes)),
            part,
            (f"{owner.allocations:,}", float(owner.allocations)),
            (words.nbytes(owner.allocated_bytes), float(owner.allocated_bytes)),
        ]
        for owner, part in zip(owners, bars, strict=True)
    ]
    return _table("owners", ["Held by", "Bytes", "Part", "Blocks", "Asked for"], rows)


def _bars(values: Sequence[float], whole: float) -> list[Cell]:
    """The shares of values in a whole, with bars; that of the largest is full."""
    parts = [value / whole if whole else 0.0 for value in values]
    return [(bar(part, max(parts)), part) for part in parts]


def settings_tables(settings: Mapping[str, Mapping[str, object]]) -> str:
    """A card for each section of a configuration."""
    cards = []
    for name, values in settings.items():
        rows = "".join(
            f'<tr><th scope="row">{escape(key)}</th><td>{words.known(str(value))}</td></tr>'
            for key, value in values.items()
        )
        cards.append(card(name.capitalize(), f'<table class="plain">{rows}</table>'))
    return grid(*cards)


def _table(
    name: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    sortable: bool = False,
    keys: Sequence[str] = (),
) -> str:
    """A table in a scrolling box. `keys` connect the rows with the dots of a chart."""
    of_numbers = [all(not isinstance(row[at][1], str) for row in rows) for at in range(len(heads))]
    titles = "".join(
        f'<th scope="col"{_side(number)}>'
        + (f'<button type="button" class="sort">{head}</button>' if sortable else head)
        + "</th>"
        for head, number in zip(heads, of_numbers, strict=True)
    )
    lines = []
    for at, row in enumerate(rows[:_MOST_ROWS]):
        cells = "".join(
            f'<td{_side(number)} data-value="{escape(str(value))}">{shown}</td>'
            for (shown, value), number in zip(row, of_numbers, strict=True)
        )
        mark = f' data-kernel="{keys[at]}"' if keys else ""
        lines.append(f"<tr{mark}>{cells}</tr>")
    left = len(rows) - _MOST_ROWS
    more = f'<p class="dim small">and {left:,} more</p>' if left > 0 else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table class="{name}">'
        f"<thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>{more}"
    )


def _side(number: bool) -> str:
    return ' class="number"' if number else ""
