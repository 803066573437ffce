"""The call site in the user's code: the innermost line that is not in Penstock.

The trainer and the command line count as users of the library: their callers wrote nothing that waits or
allocates.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_USERS = (f"{_PACKAGE}train{os.sep}", f"{_PACKAGE}cli.py")


def user_line() -> str:
    """`file:line` of the caller outside the package; the name of the thread if it is Penstock's."""
    return user_call()[0]


def user_call() -> tuple[str, str]:
    """The call site, and the function of the package that it called, such as `tensor/core.py:item`."""
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
