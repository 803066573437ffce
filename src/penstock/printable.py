"""Text that is safe to print: without control characters that a terminal would interpret."""

from __future__ import annotations

import re

# Control characters except tab and line break, unpaired surrogates, and changes of the writing direction.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_MOST_SHOWN = 80  # characters of a value in a message


def printable(text: str) -> str:
    r"""The text with every character that a terminal would interpret escaped, such as `\x1b`."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def shown(value: object) -> str:
    """A value for a message: its `repr`, if that is short and does not raise."""
    try:
        text = printable(repr(value))
    except (RecursionError, ValueError):  # too deep; or an integer of too many digits
        return f"{type(value).__name__} that is too large to show"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
