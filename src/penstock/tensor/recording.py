"""Modes of recording: with or without gradients, and with or without computing what is pending."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from penstock.graph.node import PlaceholderRead
from penstock.lru import Key
from penstock.runtime import Device

T = TypeVar("T")

_gradients: ContextVar[bool] = ContextVar("gradients", default=True)
_computes: ContextVar[bool] = ContextVar("computes", default=True)


def recording() -> bool:
    """Whether results of tensors that require a gradient require it too: outside of `no_grad`."""
    return _gradients.get()


def computes() -> bool:
    """Whether large pending expressions are computed early: outside of `only_recording`."""
    return _computes.get()


@contextlib.contextmanager
def only_recording() -> Iterator[None]:
    """In this block nothing is computed, however much is pending, as a subgraph is recorded."""
    token = _computes.set(False)
    try:
        yield
    finally:
        _computes.reset(token)


def recorded_once(
    device: Device, key: Hashable, record: Callable[[], T | None], short: bool = False
) -> T | None:
    """The result of `record` for a key, cached on the device; None if it cannot be reused.

    That is so if the key is not hashable, or if recording reads the value of a placeholder. `short`: Python
    hashes the key again at every look-up sooner than it calls a method.
    """
    if not device.reuses_graphs:
        return None
    graphs = device.subgraphs
    try:
        kept = key if short else Key(key)
        known: T | None = graphs.get(kept)  # not `use`, which takes three times as long
    except TypeError:  # an attribute or an argument is not hashable
        return None
    if known is not None:
        return known
    with device.running:  # for other threads
        if kept in graphs:
            known = graphs[kept]
        else:
            with only_recording(), contextlib.suppress(PlaceholderRead):
                known = record()
            graphs[kept] = known
        return known


@contextlib.contextmanager
def no_grad() -> Iterator[None]:
    """In this block, results require no gradient.

    >>> x = ps.asarray([1.0])
    >>> x.requires_grad = True
    >>> with ps.no_grad():
    ...     y = x * 2
    >>> y.requires_grad
    False
    """
    token = _gradients.set(False)
    try:
        yield
    finally:
        _gradients.reset(token)
