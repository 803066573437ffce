"""Ctrl-C and SIGTERM, which end a run after its step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from penstock.train.view import View


@contextmanager
def interruptible(view: View) -> Iterator[Callable[[], signal.Signals | None]]:
    """A function that tells which of Ctrl-C and SIGTERM was received. A second ends the process at once."""
    received: signal.Signals | None = None

    def handler(number: int, _: FrameType | None) -> None:
        nonlocal received
        received = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        view.note("stopping after this step, with a checkpoint; Ctrl-C again stops at once")

    if threading.current_thread() is not threading.main_thread():
        yield lambda: received  # only the main thread receives signals
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received
    finally:
        for number, previous in before.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
