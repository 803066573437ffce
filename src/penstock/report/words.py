"""Values as a page shows them, with a dash for unknown values."""

from __future__ import annotations

import math
from html import escape

from penstock.formatting import UNKNOWN, format_bytes, format_number


def axis(value: float) -> str:
    """A number, as short as possible."""
    for letter, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size <= abs(value) < 1e12:
            return f"{value / size:.4g}{letter}"
    return format_number(value)


def rate(value: float | None) -> str:
    """A number; a dash if it is unknown or zero."""
    return format_number(value) if value else UNKNOWN


def loss(value: float) -> str:
    """Four digits after the point, since losses differ by little."""
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3g}"


def nbytes(value: float) -> str:
    """Bytes, which may not be known."""
    return format_bytes(round(value)) if math.isfinite(value) else UNKNOWN


def known(value: str) -> str:
    """A text for HTML; a dash if there is none."""
    return escape(value) if value else UNKNOWN
