"""Names and places of a profile, short enough for a table."""

from __future__ import annotations

import os
import re
from contextlib import suppress

_DIGEST = re.compile(r"_[0-9a-f]{12}$")
_DTYPE = re.compile(r"\b(bfloat|float|int|uint)(\d+)")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SHORT = {"bfloat": "bf", "float": "f", "int": "i", "uint": "u"}


def short_kernel(name: str) -> str:
    """A kernel's name without the digest that tells it from others of that name."""
    return _DIGEST.sub("", name)


def short_shapes(shapes: str) -> str:
    """Shapes with dtypes of three letters."""
    return _DTYPE.sub(lambda found: _SHORT[found[1]] + found[2], shapes)


def short_place(site: str) -> str:
    """A line of code, by its path from here where that is shorter; Penstock's own by that in the package."""
    path, colon, line = site.rpartition(":")
    if not colon or not os.path.isabs(path):
        return site
    if path.startswith(_PACKAGE):
        return f"penstock{os.sep}{path.removeprefix(_PACKAGE)}:{line}"
    with suppress(ValueError):  # on another drive
        return f"{min(path, os.path.relpath(path), key=len)}:{line}"
    return site
