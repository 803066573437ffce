"""Where the user's code stands: the innermost line that is not Penstock's own.

The trainer and the command line are users of the library themselves, and their lines count as such: whoever
called them wrote nothing that waits or asks for memory.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_USERS = (f"{_PACKAGE}train{os.sep}", f"{_PACKAGE}cli.py")


def user_line() -> str:
    """`file:line` of the caller outside the package; the name of the thread if that is one of Penstock's."""
    return user_call()[0]


def user_call() -> tuple[str, str]:
    """The same, and what that line called: a function of the package, such as `tensor/core.py:item`."""
    frame, inside = sys._getframe(1), None
    while frame is not None:
        name = frame.f_code.co_filename
        if (not name.startswith(_PACKAGE) or name.startswith(_USERS)) and name != threading.__file__:
            return f"{name}:{frame.f_lineno}", _called(inside)
        inside, frame = frame, frame.f_back  # type: ignore[assignment]
    return f"({threading.current_thread().name})", _called(inside)


def in_package(where: str) -> bool:
    """Whether a line is Penstock's own."""
    return where.startswith((_PACKAGE, "("))


def _called(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    name = frame.f_code.co_filename.removeprefix(_PACKAGE).replace(os.sep, "/")
    return f"{name}:{frame.f_code.co_name}"
