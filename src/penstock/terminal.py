"""What goes to a terminal, through rich: lines, and tables that all look alike.

Names and values come from outside, and must not command the terminal, nor be taken for rich's markup.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.printable import printable

if TYPE_CHECKING:  # rich takes longer to import than half of the package, and few programs need it
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text


def say(console: Console, text: str, style: str | None = None, end: str = "\n") -> None:
    """Print text to a console as it is, but for what a terminal would obey."""
    console.print(printable(text), style=style, end=end, markup=False, highlight=False, soft_wrap=True)


def cell(text: str) -> Text:
    """The same for a cell of a table."""
    from rich.text import Text

    return Text(printable(text))


def table(
    headings: Sequence[str] = (),
    *,
    title: str | None = None,
    padding: tuple[int, ...] = (0, 1),
    widths: Sequence[int] = (),
) -> Table:
    """A table without lines; one without headings, too, where none are given.

    A heading that begins with > is of numbers, which stand under each other and are not broken. Where the
    columns' `widths` are given, words are cut there, and not broken either.
    """
    from rich.table import Table

    made = Table(
        title=title,
        title_justify="left",
        show_header=bool(headings),
        box=None,
        pad_edge=False,
        padding=padding,  # type: ignore[arg-type]
    )
    for at, heading in enumerate(headings):
        numbers = heading.startswith(">")
        made.add_column(
            heading.removeprefix(">"),
            justify="right" if numbers else "left",
            no_wrap=numbers or bool(widths),
            max_width=widths[at] if widths else None,
        )
    return made


def as_text(parts: Sequence[RenderableType], width: int | None, least_width: int) -> str:
    """Lines and tables as text, as wide as the terminal unless a width is given."""
    from rich.console import Console, Group

    width = width or max(shutil.get_terminal_size().columns, least_width)
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, highlight=False).print(Group(*parts))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
