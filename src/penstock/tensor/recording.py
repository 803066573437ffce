"""How operations are recorded: with gradients or without, computed when much is pending or only recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from penstock.graph.node import PlaceholderRead
from penstock.runtime import Device

T = TypeVar("T")

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


def recorded_once(device: Device, key: Hashable, record: Callable[[], T | None]) -> T | None:
    """What `record` gives for a key, kept with the device; None where it cannot be used again.

    That is so where the key has no hash, and where a value is read that a placeholder stands for.
    """
    if not device.reuses_graphs:
        return None
    graphs = device.subgraphs
    with device.running:  # another thread may come here at the same time
        try:
            known: T | None = graphs.use(key)
        except TypeError:  # an attribute or an argument has no hash
            return None
        if known is None and key not in graphs:
            with only_recording(), contextlib.suppress(PlaceholderRead):
                known = record()
            graphs[key] = known
        return known


@contextlib.contextmanager
def no_grad() -> Iterator[None]:
    """In this block, results require no gradient."""
    token = _gradients.set(False)
    try:
        yield
    finally:
        _gradients.reset(token)
