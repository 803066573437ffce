"""Delays Ctrl-C until the end of blocks that must not be interrupted.

Python raises KeyboardInterrupt between any two operations of the main thread, also between the launches of a
step that overwrites its own parameters. The handler here raises it as Python's own does, except inside
`held_back`: there it is raised at the end. A second Ctrl-C is raised at once.
"""

from __future__ import annotations

# Not `signal`, which converts everything to enumerations and takes microseconds for that.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from types import FrameType

_MAIN = threading.main_thread().ident
_SIGINT = int(signal.SIGINT)


class _HeldBack:
    """A block of the main thread that Ctrl-C does not interrupt. Blocks are not nested."""

    def __init__(self) -> None:
        self._inside = False
        self._arrived = False

    def __enter__(self) -> None:
        if threading.get_ident() == _MAIN:
            # A handler that the program has installed is kept.
            if _signal.getsignal(_SIGINT) is signal.default_int_handler:
                signal.signal(_SIGINT, self._handle)
            self._inside = True

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == _MAIN:
            self._inside = False
            if self._arrived:
                self._arrived = False
                raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._inside and not self._arrived:
            self._arrived = True
        else:
            self._arrived = False
            raise KeyboardInterrupt


held_back = _HeldBack()
