"""Advice for a terminal."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence

from penstock.advising.advice import Advice
from penstock.printable import cell
from penstock.profiling.words import short_place

_LEAST_WIDTH = 80
_NOTHING = "nothing to advise: no change that these rules know would save 5% of the time or 10% of the memory"


def rendered(advice: Sequence[Advice], width: int | None = None) -> str:
    """The advice as text, as wide as the terminal unless a width is given."""
    from rich.console import Console, Group, RenderableType  # imported late, as in profiles
    from rich.table import Table

    if not advice:
        return _NOTHING
    width = width or max(shutil.get_terminal_size().columns, _LEAST_WIDTH)
    parts: list[RenderableType] = []
    for number, one in enumerate(advice, 1):
        parts.append(cell(f"{number}. {one.title} [{one.flaw}]"))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 3))
        for label, words in (
            ("where", short_place(one.where)),
            ("evidence", one.evidence),
            ("change", one.change),
            ("gain", one.gain),
        ):
            if words:
                table.add_row(label, cell(words))
        parts += [table, ""]
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, highlight=False).print(Group(*parts))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()).rstrip()
