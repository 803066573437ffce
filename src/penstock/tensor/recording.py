"""How operations are recorded: with gradients or without, computed when much is pending or only recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_gradients: ContextVar[bool] = ContextVar("gradients", default=True)
_computes: ContextVar[bool] = ContextVar("computes", default=True)


def recording() -> bool:
    """Whether results require a gradient where what they are computed from does: outside of `no_grad`."""
    return _gradients.get()


def computes() -> bool:
    """Whether an expression is computed once much of it is pending: outside of `only_recording`."""
    return _computes.get()


@contextlib.contextmanager
def only_recording() -> Iterator[None]:
    """In this block nothing is computed, however much is pending: what is recorded is to be called later."""
    token = _computes.set(False)
    try:
        yield
    finally:
        _computes.reset(token)


@contextlib.contextmanager
def no_grad() -> Iterator[None]:
    """In this block, results require no gradient."""
    token = _gradients.set(False)
    try:
        yield
    finally:
        _gradients.reset(token)
