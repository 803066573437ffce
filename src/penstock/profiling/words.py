"""Names, shapes and locations of a profile, shortened for tables."""

from __future__ import annotations

import os
import re
from contextlib import suppress

_DIGEST = re.compile(r"_[0-9a-f]{12}$")
_DTYPE = re.compile(r"\b(bfloat|float|int|uint)(\d+)")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SHORT = {"bfloat": "bf", "float": "f", "int": "i", "uint": "u"}


def short_kernel(name: str) -> str:
    """A kernel's name without the digest that makes it unique."""
    return _DIGEST.sub("", name)


def short_shapes(shapes: str) -> str:
    """Shapes with dtypes of three letters."""
    return _DTYPE.sub(lambda match: _SHORT[match[1]] + match[2], shapes)


def short_location(site: str) -> str:
    """A line of code, with its path relative to the current folder or to the package if that is shorter."""
    path, colon, line = site.rpartition(":")
    if not colon or not os.path.isabs(path):
        return site
    if path.startswith(_PACKAGE):
        return f"penstock{os.sep}{path.removeprefix(_PACKAGE)}:{line}"
    with suppress(ValueError):  # on another drive
        return f"{min(path, os.path.relpath(path), key=len)}:{line}"
    return site
