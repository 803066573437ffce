"""A profile as tables for a terminal."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from penstock.formatting import format_bytes, format_rate, format_seconds
from penstock.profiling.records import CopyRecord, DeviceRecord, KernelRecord, OwnerRecord, WaitRecord
from penstock.profiling.words import short_kernel, short_location, short_shapes
from penstock.terminal import as_text, cell, table

if TYPE_CHECKING:
    from rich.table import Table

_ROWS = 15  # of each table
_LEAST_WIDTH = 100
_LEAST_WORDS = 6  # characters


class _OfDevice(Protocol):
    """Any record with a device."""

    @property
    def device(self) -> str:
        """Its name."""
        ...


T = TypeVar("T", bound=_OfDevice)


class Contents:
    """Everything that the tables show."""

    def __init__(
        self,
        seconds: float,
        devices: Sequence[DeviceRecord],
        kernels: Sequence[KernelRecord],
        copies: Sequence[CopyRecord],
        waits: Sequence[WaitRecord],
        memory: Sequence[OwnerRecord],
    ) -> None:
        self.seconds = seconds
        self.devices = devices
        self.kernels = kernels
        self.copies = copies
        self.waits = waits
        self.memory = memory


def rendered(contents: Contents, width: int | None = None) -> str:
    """The tables as text, as wide as the terminal unless a width is given."""
    width = width or max(shutil.get_terminal_size().columns, _LEAST_WIDTH)
    return as_text([*map(cell, _summaries(contents)), *_tables(contents, width)], width, _LEAST_WIDTH)


def _summaries(contents: Contents) -> list[str]:
    lines = [f"profile of {format_seconds(contents.seconds)}"]
    for device in contents.devices:
        busy = ""
        if device.busy_seconds is not None and contents.seconds:
            share = device.busy_seconds / contents.seconds
            busy = f", kernels {format_seconds(device.busy_seconds)} ({share:.0%} of the time)"
        requests = device.pool_hits + device.pool_misses
        hits = f", pool hits {device.pool_hits / requests:.0%}" if requests else ""
        memory = f", memory at most {format_bytes(device.peak_bytes)}"
        lines.append(f"{device.name} ({device.description}){busy}{memory}{hits}")
        if not device.timed:
            lines.append("  it does not tell when commands ran, so they are counted but not timed")
        if device.dropped_events:
            lines.append(
                f"  {device.dropped_events} single events are not kept; the totals below count them too"
            )
    return lines


def _tables(contents: Contents, width: int) -> list[Table]:
    several = len(contents.devices) > 1
    whole = sum(kernel.seconds or 0.0 for kernel in contents.kernels)
    kernels = "kernel, shapes, >calls, >total, >part, >mean, >GFLOP/s, >GB/s, >of ceiling"
    copies = "direction, by, >calls, >bytes, >total, >GB/s"
    owners = "held by, >bytes, >blocks asked for, >bytes asked for"
    tables = [
        _table("kernels", kernels, contents.kernels, lambda kernel: _kernel(kernel, whole), several, width),
        _table("copies", copies, contents.copies, _copy, several, width),
        _table("waits of the host", "line, why, >count, >total", contents.waits, _wait, several, width),
        _table("memory at the peak", owners, contents.memory, _owner, several, width),
    ]
    return [shown for shown in tables if shown is not None]


def _table(
    title: str, headings: str, records: Sequence[T], row: Callable[[T], list[str]], several: bool, width: int
) -> Table | None:
    """A table of the first records; None if there are none. With `several` devices, rows name theirs.

    Headings are separated by commas; those of right-aligned columns begin with >.
    """
    if not records:
        return None
    left = len(records) - _ROWS
    names = [*(["device"] if several else []), *headings.split(", ")]
    shown = records[:_ROWS]
    rows: list[list[str]] = [[*([record.device] if several else []), *row(record)] for record in shown]
    wide = [max(len(cells[at]) for cells in [names, *rows]) for at in range(len(names))]
    # If there is little room, words are cut and numbers are not.
    words = [at for at, name in enumerate(names) if not name.startswith(">")]
    room = width - sum(wide) - 2 * len(wide) + sum(wide[at] for at in words)
    for at in sorted(words, key=lambda at: wide[at]):
        wide[at] = max(min(wide[at], room // len(words)), _LEAST_WORDS)
        room -= wide[at]
        words = words[1:]
    made = table(names, title=title, widths=wide)
    for cells in rows:
        made.add_row(*map(cell, cells))
    if left > 0:
        made.caption = f"and {left} more"
        made.caption_justify = "left"
    return made


def _kernel(kernel: KernelRecord, all_seconds: float) -> list[str]:
    share = f"{(kernel.seconds or 0) / all_seconds:.0%}" if all_seconds else ""
    ceiling = f"{kernel.share:.0%} {kernel.bound}" if kernel.share is not None else ""
    return [
        short_kernel(kernel.name),
        short_shapes(kernel.shapes),
        str(kernel.calls),
        format_seconds(kernel.seconds),
        share,
        format_seconds(kernel.mean_seconds),
        format_rate(kernel.gflops),
        format_rate(kernel.gbytes),
        ceiling,
    ]


def _copy(copy: CopyRecord) -> list[str]:
    amounts = (format_bytes(copy.nbytes), format_seconds(copy.seconds), format_rate(copy.gbytes))
    return [copy.direction, copy.where, str(copy.calls), *amounts]


def _wait(wait: WaitRecord) -> list[str]:
    return [short_location(wait.where), wait.why, str(wait.count), format_seconds(wait.seconds)]


def _owner(owner: OwnerRecord) -> list[str]:
    sizes = (format_bytes(owner.peak_bytes), str(owner.allocations), format_bytes(owner.allocated_bytes))
    return [short_location(owner.owner), *sizes]
