"""The building blocks of sections. Texts are HTML, unless they are called plain."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.formatting import format_share
from penstock.profiling.words import short_kernel, short_location, short_shapes

_MOST_COLUMNS = 6  # of facts; more are in two rows


def card(title: str, *content: str, kind: str = "") -> str:
    """Content in a frame, under a plain title if there is one."""
    head = f"<h3>{escape(title)}</h3>" if title else ""
    return f'<section class="{f"card {kind}".strip()}">{head}{"".join(content)}</section>'


def text(html: str) -> str:
    """A paragraph."""
    return f"<p>{html}</p>"


def aside(html: str) -> str:
    """A paragraph with an explanation."""
    return f'<p class="dim">{html}</p>'


def grid(*cards: str) -> str:
    """Cards side by side if there is room."""
    return f'<div class="grid">{"".join(cards)}</div>'


def fact_grid(facts: Sequence[tuple[str, str]]) -> str:
    """Plain names with plain values."""
    cards = [
        f'<div class="card"><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>' for name, value in facts
    ]
    columns = len(cards) if len(cards) <= _MOST_COLUMNS else -(-len(cards) // 2)
    return f'<dl class="facts" style="--columns: {columns}">{"".join(cards)}</dl>'


def bar(part: float, largest: float) -> str:
    """A share as text and as a bar, which is full for the largest share."""
    width = min(max(part / largest, 0.0), 1.0) if largest > 0 else 0.0
    return f'<span class="bar"><i style="width: {width:.1%}"></i></span>{format_share(part)}'


def kernel_name(name: str) -> str:
    """A plain name of a kernel, with line breaks allowed after every word."""
    return escape(short_kernel(name)).replace("_", "_<wbr>")


def shapes(given: str) -> str:
    """Plain shapes of the inputs and outputs of a kernel."""
    return escape(short_shapes(given).replace("->", "\N{RIGHTWARDS ARROW}"))


def location(site: str) -> str:
    """A plain location in code, with line breaks allowed after every part of its path."""
    return f'<span class="place">{escape(short_location(site)).replace("/", "/<wbr>")}</span>'
