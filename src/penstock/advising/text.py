"""Advice for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.advising.advice import Advice
from penstock.profiling.words import short_location
from penstock.terminal import as_text, cell, table

if TYPE_CHECKING:
    from rich.console import RenderableType

_LEAST_WIDTH = 80
_NOTHING = "nothing to advise: no change that these rules know would save 5% of the time or 10% of the memory"


def rendered(advice: Sequence[Advice], width: int | None = None) -> str:
    """The advice as text, as wide as the terminal unless a width is given."""
    if not advice:
        return _NOTHING
    parts: list[RenderableType] = []
    for number, item in enumerate(advice, 1):
        parts.append(cell(f"{number}. {item.title} [{item.flaw}]"))
        rows = table(padding=(0, 1, 0, 3))
        for label, words in (
            ("where", short_location(item.where)),
            ("evidence", item.evidence),
            ("change", item.change),
            ("gain", item.gain),
        ):
            if words:
                rows.add_row(label, cell(words))
        parts += [rows, ""]
    return as_text(parts, width, _LEAST_WIDTH).rstrip()
