"""Output to a terminal through rich: lines, and tables in a common style.

Names and values come from outside, so control characters and rich's markup in them are escaped.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.printable import printable

if TYPE_CHECKING:  # rich takes longer to import than half of the package, and few programs need it
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text


_PATIENCE = 2.0  # seconds after which a phase of work is named where there is no live display
_UNLIMITED = 1 << 16  # columns
_REMINDER = 10.0  # seconds between two lines about the same phase


def say(console: Console, text: str, style: str | None = None, end: str = "\n") -> None:
    """Print text to a console as it is, with control characters escaped."""
    console.print(printable(text), style=style, end=end, markup=False, highlight=False, soft_wrap=True)


def complain(problem: object) -> None:
    """Print a problem to standard error."""
    from rich.console import Console

    say(Console(stderr=True), f"penstock: {problem}", style="red")


def write_json(value: object) -> None:
    """Print a value for other programs, as a line of JSON."""
    sys.stdout.write(json.dumps(value) + "\n")


@contextmanager
def phase(console: Console, name: str, total: int = 0) -> Iterator[Callable[[int], None]]:
    """Show what takes its time, and how much of `total` is done: the function given adds to that.

    In a terminal it is a line that goes away at the end. Elsewhere, a line is printed when it takes longer
    than two seconds, and again every ten.
    """
    if not console.is_terminal:
        with _in_lines(console, name, total) as advance:
            yield advance
        return
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    bar = [BarColumn(), TaskProgressColumn()] if total else []
    columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False), *bar, TimeElapsedColumn()]
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=total or None)
        yield lambda amount: progress.advance(task, amount)


@contextmanager
def _in_lines(console: Console, name: str, total: int) -> Iterator[Callable[[int], None]]:
    done = 0
    ended = threading.Event()

    def advance(amount: int) -> None:
        nonlocal done
        done += amount

    def remind() -> None:
        begun = time.monotonic()
        pause = _PATIENCE
        while not ended.wait(pause):
            share = f", {min(done / total, 1):.0%}" if total else ""
            say(console, f"{name}: {time.monotonic() - begun:.0f} s{share}")
            pause = _REMINDER

    thread = threading.Thread(target=remind, name="phase", daemon=True)
    thread.start()
    try:
        yield advance
    finally:
        ended.set()
        thread.join()


def cell(text: str) -> Text:
    """The text of a table's cell, with control characters escaped."""
    from rich.text import Text

    return Text(printable(text))


def table(
    headings: Sequence[str] = (),
    *,
    title: str | None = None,
    padding: tuple[int, ...] = (0, 1),
    widths: Sequence[int] = (),
) -> Table:
    """A table without lines, and without headings if none are given.

    A column whose heading begins with > is right-aligned and not wrapped. If the columns' `widths` are given,
    texts are cut there, and not wrapped either.
    """
    from rich.table import Table

    result = Table(
        title=title,
        title_justify="left",
        show_header=bool(headings),
        box=None,
        pad_edge=False,
        padding=padding,  # type: ignore[arg-type]
    )
    for at, heading in enumerate(headings):
        right = heading.startswith(">")
        result.add_column(
            heading.removeprefix(">"),
            justify="right" if right else "left",
            no_wrap=right or bool(widths),
            max_width=widths[at] if widths else None,
        )
    return result


def show(console: Console, rows: Table) -> None:
    """Print a table; where there is no terminal, in lines as long as they need to be."""
    if console.is_terminal:
        console.print(rows)
    else:
        text = as_text([rows], _UNLIMITED, 0)
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def as_text(parts: Sequence[RenderableType], width: int | None, least_width: int) -> str:
    """Lines and tables as text, as wide as the terminal unless a width is given."""
    from rich.console import Console, Group

    width = width or max(shutil.get_terminal_size().columns, least_width)
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, highlight=False).print(Group(*parts))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
