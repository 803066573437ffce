"""Numbers as a page shows them, and what stands for those that nobody knows."""

from __future__ import annotations

import math
from html import escape

from penstock.config import format_bytes

UNKNOWN = "\N{EN DASH}"


def number(value: float) -> str:
    """Three digits, or all before the point."""
    if 0 < abs(value) < 1e-3 or abs(value) >= 1e9:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def axis(value: float) -> str:
    """The same, as short as it can be."""
    for letter, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size <= abs(value) < 1e12:
            return f"{value / size:.4g}{letter}"
    return number(value)


def rate(value: float | None) -> str:
    """A number that may not be known, or not be more than nothing."""
    return number(value) if value else UNKNOWN


def loss(value: float) -> str:
    """Four digits after the point, as losses differ by little."""
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3g}"


def share(value: float) -> str:
    """Of a hundred; small ones with a digit more."""
    if abs(value) < 5e-4:
        return "0%"
    return f"{value:.1%}" if abs(value) < 0.1 else f"{value:.0%}"


def nbytes(value: float) -> str:
    """With a unit."""
    return format_bytes(round(value)) if math.isfinite(value) else UNKNOWN


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as far as they matter."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def counted(count: int, thing: str) -> str:
    """A number of things, each of which has an s where they are several."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def known(value: str) -> str:
    """A text for HTML, and a dash where there is none."""
    return escape(value) if value else UNKNOWN
