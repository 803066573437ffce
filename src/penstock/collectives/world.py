"""The ranks of this program: those of the process, or of a thread that is a rank itself."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType

from penstock.collectives.communicator import Communicator
from penstock.collectives.engine import Engine

_of_thread: ContextVar[Communicator | None] = ContextVar("communicator", default=None)
_of_process: Communicator | None = None
_ALONE = Communicator(Engine())


def communicator() -> Communicator:
    """What exchanges arrays with the other ranks; of a program that has not begun to, it is alone."""
    return _of_thread.get() or _of_process or _ALONE


def begun() -> bool:
    """Whether the process has ranks already."""
    return _of_process is not None


def begin(engine: Engine, timeout: float) -> Communicator:
    """Let the process be a rank of an engine until it ends; an exception that ends it ends the others."""
    global _of_process
    _of_process = Communicator(engine, timeout)
    if engine.size > 1:
        atexit.register(_of_process.close)
        sys.excepthook = _failed
    return _of_process


@contextmanager
def as_rank(own: Communicator) -> Iterator[None]:
    """Let this thread be a rank for a block."""
    token = _of_thread.set(own)
    try:
        yield
    except BaseException:
        own.close(together=False)  # the others, which may wait for it, are told
        raise
    finally:
        _of_thread.reset(token)
        own.close()


@contextmanager
def patient() -> Iterator[None]:
    """Let the other ranks wait as long as this block takes: it compiles, or writes."""
    with communicator().patient():
        yield


@contextmanager
def rank_0_first() -> Iterator[None]:
    """Run a block on rank 0, and then on the others, which find what it left."""
    group = communicator()
    if group.rank > 0:
        group.barrier()
        yield
        return
    with group.patient():
        yield
    group.barrier()


def _failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception that nothing has caught, and end the other ranks, which would wait for this one."""
    sys.__excepthook__(kind, error, trace)
    communicator().fail(f"ended by {kind.__name__}: {error}")
